"""Layouts in the form of JAX's PartitionSpec with a few words more: `rma_mm.geometry.notation` shows the forms."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, prod
from typing import cast

from rma_mm.errors import nearest
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import CutKind, Level, Split, cyclic_fault, is_whole
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import Reader, even_axes

CUTS = ("cyclic", "weights", "bounds", "skew")  # the words behind a colon
_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<mark>[(),:=+*]))")
_FORMS = "as in P('i', 'j'), P(None, ('i', 'j')), P('i:cyclic(32)', None, l=0), P('i', None, j=sum)"


def parse_partition_spec(text: str, mesh: MeshShape, dims: int = 2) -> Layout:
    """Return the layout of `dims` dimensions that `text` describes on `mesh`.

    Raises LayoutError, with a mark under the offending character, for text that does not parse or names axes the
    mesh does not have.
    """
    return _Parser(text, dims, mesh).parse()


def layout_to_partition_spec(layout: Layout, mesh: MeshShape) -> str:
    """Return the layout in the form that JAX itself takes, where a tuple nests axes and there are only even cuts.

    Raises LayoutError for what our text has and JAX's has not: pins, sums, skew, other cuts, axes taken as one.
    """
    even_axes(layout, mesh, "PartitionSpec")
    return str(layout)


class _Parser(Reader):
    """Recursive descent over the tokens of one layout text."""

    def __init__(self, text: str, dims: int, mesh: MeshShape) -> None:
        super().__init__(text, _FORMS, token=_TOKEN)
        self.mesh = mesh
        self.dims = dims
        self.grid: MeshShape | None = None
        if "on" not in mesh.names:
            self._read_grid()

    def _axis(self, what: str) -> str:
        axis = self.next("word", what)
        if axis not in self.mesh.names:
            self.fail_before(f"got the axis {axis!r}; the mesh {self.mesh} has the axes {', '.join(self.mesh.names)}")
        return axis

    def parse(self) -> Layout:
        if self.tokens[0][0] == "end":
            self.fail("nothing is said")
        wrapped = self.peek("P") and self.tokens[self.at + 1][1] == "("
        if wrapped:
            self.at += 2
        splits: list[Split] = []
        pins: list[tuple[str, int]] = []
        partial: list[str] = []
        while not self.peek(")", ""):
            if self.tokens[self.at][0] == "word" and self.tokens[self.at + 1][1] == "=":
                self._keyword(pins, partial)
            elif pins or partial:
                self.fail("a dimension may not follow a pin or a sum")
            elif len(splits) == self.dims:
                self.fail(f"more than {self.dims} dimensions")
            else:
                splits.append(self._dimension())
            self.comma(")", "")
        if wrapped:
            self.mark(")")
        self.end()
        splits += [()] * (self.dims - len(splits))
        return Layout(tuple(splits), tuple(pins), tuple(partial), self.grid)

    def _read_grid(self) -> None:
        """Read `on m=2, n=3` behind the placement, whose axes are then those of that grid."""
        begin = next((n for n, token in enumerate(self.tokens) if token[1] == "on" and n), None)
        if begin is None:
            return
        self.at = begin + 1
        sizes: dict[str, int] = {}
        while self.tokens[self.at][0] != "end":
            name = self.next("word", "an axis of the grid")
            self.mark("=")
            number = self.next("number", "its ranks")
            if name in sizes or not number.isdecimal() or int(number) < 1:
                self.fail_before("a grid has axes of different names with at least one rank each")
            sizes[name] = int(number)
            if self.tokens[self.at][0] != "end":
                self.mark(",")
        if not sizes:
            self.fail("expected the axes of the grid, as in on m=2, n=3")
        self.grid = MeshShape(tuple(sizes.values()), tuple(sizes))
        if self.grid.size > self.mesh.size:
            self.fail(f"the grid needs {self.grid.size} ranks, the mesh has {self.mesh.size}", self.tokens[begin][2])
        self.mesh = self.grid
        self.tokens = [*self.tokens[:begin], self.tokens[-1]]
        self.at = 0

    def _keyword(self, pins: list[tuple[str, int]], partial: list[str]) -> None:
        axis = self._axis("an axis")
        self.mark("=")
        if self.peek("sum"):
            self.at += 1
            partial.append(axis)
        else:
            number = self.next("number", "a coordinate or the word sum")
            if not number.isdecimal():
                self.fail_before(f"a coordinate is a whole number, not {number}")
            pins.append((axis, int(number)))

    def _dimension(self) -> Split:
        if self.peek("None", "*"):
            self.at += 1
            return ()
        if not self.peek("("):
            return (self._level(),)
        self.mark("(")
        levels = []
        while not self.peek(")"):
            levels.append(self._level())
            self.comma(")")
        self.mark(")")
        return tuple(levels)

    def _level(self) -> Level:
        axes = [self._axis("a mesh axis, None or *")]
        while self.peek("+"):
            self.at += 1
            axes.append(self._axis("a mesh axis"))
        level = Level(tuple(axes))
        while self.peek(":"):
            self.at += 1
            word = self.next("word", f"one of {', '.join(CUTS)}")
            if word not in CUTS:
                self.fail_before(f"no cut is called {word!r}; {nearest(word, CUTS)}there are {', '.join(CUTS)}")
            if level.skew if word == "skew" else level.kind != "even":
                self.fail_before("one cut and one skew at most")
            begin = self.at + 1
            items = self._arguments("word" if word == "skew" else "number")
            if word == "skew":
                level = replace(level, skew=tuple(items))
            else:
                level = replace(level, kind=cast(CutKind, word), args=tuple(float(x) for x in items))
                self._check_cut(level, begin)
        return level

    def _check_cut(self, level: Level, begin: int) -> None:
        """Refuse arguments that no extent allows; `begin` is the token of the first."""
        end, self.at = self.at, begin
        parts = prod(self.mesh.axis_size(axis) for axis in level.axes)
        if level.kind == "cyclic" and (fault := cyclic_fault(level.args, parts)):
            self.at += 2 * fault[0]  # a comma stands between two numbers
            self.fail(fault[1])
        if level.kind == "bounds" and not all(map(is_whole, level.args)):
            self.fail("bounds are whole numbers")
        if level.kind == "weights" and not 0 < sum(level.args) < inf:
            self.fail("weights are finite, and not all zero")
        self.at = end

    def _arguments(self, kind: str) -> list[str]:
        self.mark("(")
        items = []
        while not self.peek(")"):
            items.append(self.next(kind, "a number") if kind == "number" else self._axis("a mesh axis"))
            self.comma(")")
        self.mark(")")
        return items
