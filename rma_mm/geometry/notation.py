"""Text ↔ layout, in the form of JAX's PartitionSpec with a few words more.

    P('i', 'j')                 rows over the mesh axis i, columns over j
    P('i', ('l', 'j'))          columns over l, and inside each part over j
    P(None, 'j')                rows not split; axes that are not named replicate
    P('i:cyclic(32)', None)     blocks of 32 rows dealt out round robin
    P('i+j:cyclic(32)', None)   the same over i and j taken as one axis
    P('i:weights(1, 2)', None)  uneven shares;  'i:bounds(0, 10, 30)' says where to cut
    P('i', 'j:skew(i)')         columns in circular windows shifted by i (Cannon)
    P('i', 'j', l=0)            pinned to the coordinate 0 of the axis l
    P('i', None, j=sum)         every rank along j holds a summand
    P('m', 'k') on m=2, k=3     axes of another grid over the first ranks of the mesh

Quotes and the outer P( ) may be left out: `i,j` on a command line. `*` is None.
"""

from __future__ import annotations

import re
from math import inf
from typing import NoReturn, cast

from ..errors import LayoutError
from .layout import CutKind, Layout, Level, Split, is_whole
from .mesh import MeshShape

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<mark>[(),:=+*]))")
_CUTS = ("cyclic", "weights", "bounds", "skew")
_FORMS = "as in P('i', 'j'), P(None, ('i', 'j')), P('i:cyclic(32)', None, l=0), P('i', None, j=sum)"


def parse_layout(text: str, mesh: MeshShape, dims: int = 2) -> Layout:
    """The layout that `text` describes on `mesh`.

    Raises LayoutError, with a mark under the offending character, for text that does not parse or names axes the
    mesh does not have.
    """
    return _Parser(text, dims, mesh).parse()


class _Parser:
    """Recursive descent over the tokens of one layout text."""

    def __init__(self, text: str, dims: int, mesh: MeshShape) -> None:
        self.text = text
        self.mesh = mesh
        self.dims = dims
        self.plain = re.sub(r"['\"]", " ", text)  # quotes carry no meaning, and blanks keep the columns true
        self.tokens = self._scan()
        self.at = 0
        self.grid: MeshShape | None = None
        if "on" not in mesh.names:
            self._read_grid()

    def _scan(self) -> list[tuple[str, str, int]]:
        tokens, at = [], 0
        while self.plain[at:].strip():
            found = _TOKEN.match(self.plain, at)
            if not found:
                self._fail("a character that has no meaning here", len(self.plain) - len(self.plain[at:].lstrip()))
            kind = cast(str, found.lastgroup)
            tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        tokens.append(("end", "", len(self.text)))
        return tokens

    def _fail(self, what: str, column: int | None = None) -> NoReturn:
        column = self.tokens[self.at][2] if column is None else column
        raise LayoutError(f"layout: {what}; write it {_FORMS}\n  {self.text}\n  {' ' * column}^")

    def _peek(self, *marks: str) -> bool:
        return self.tokens[self.at][1] in marks

    def _next(self, kind: str, what: str) -> str:
        found, text, _ = self.tokens[self.at]
        if found != kind:
            self._fail(f"expected {what}")
        self.at += 1
        return text

    def _axis(self, what: str) -> str:
        axis = self._next("word", what)
        if axis not in self.mesh.names:
            self.at -= 1
            self._fail(f"got the axis {axis!r}; the mesh {self.mesh} has the axes {', '.join(self.mesh.names)}")
        return axis

    def _mark(self, mark: str) -> None:
        if not self._peek(mark):
            self._fail(f"expected {mark!r}")
        self.at += 1

    def parse(self) -> Layout:
        if self.tokens[0][0] == "end":
            self._fail("nothing is said")
        wrapped = self._peek("P") and self.tokens[self.at + 1][1] == "("
        if wrapped:
            self.at += 2
        splits: list[Split] = []
        pins: list[tuple[str, int]] = []
        partial: list[str] = []
        while not self._peek(")", ""):
            if self.tokens[self.at][0] == "word" and self.tokens[self.at + 1][1] == "=":
                self._keyword(pins, partial)
            elif pins or partial:
                self._fail("a dimension may not follow a pin or a sum")
            elif len(splits) == self.dims:
                self._fail(f"more than {self.dims} dimensions")
            else:
                splits.append(self._dimension())
            if not self._peek(")", ""):
                self._mark(",")
        if wrapped:
            self._mark(")")
        if self.tokens[self.at][0] != "end":
            self._fail("something behind the end")
        splits += [()] * (self.dims - len(splits))
        return Layout(tuple(splits), tuple(pins), tuple(partial), self.grid)

    def _read_grid(self) -> None:
        """Find `on m=2, n=3` behind the placement: the axes are those of that grid, and not of the mesh."""
        begin = next((n for n, token in enumerate(self.tokens) if token[1] == "on" and n), None)
        if begin is None:
            return
        self.at = begin + 1
        sizes: dict[str, int] = {}
        while self.tokens[self.at][0] != "end":
            name = self._next("word", "an axis of the grid")
            self._mark("=")
            number = self._next("number", "its ranks")
            if name in sizes or not number.isdecimal() or int(number) < 1:
                self.at -= 1
                self._fail("a grid has axes of different names with at least one rank each")
            sizes[name] = int(number)
            if self.tokens[self.at][0] != "end":
                self._mark(",")
        if not sizes:
            self._fail("expected the axes of the grid, as in on m=2, n=3")
        self.grid = MeshShape(tuple(sizes.values()), tuple(sizes))
        if self.grid.size > self.mesh.size:
            self._fail(f"the grid needs {self.grid.size} ranks, the mesh has {self.mesh.size}", self.tokens[begin][2])
        self.mesh = self.grid
        self.tokens = [*self.tokens[:begin], self.tokens[-1]]
        self.at = 0

    def _keyword(self, pins: list[tuple[str, int]], partial: list[str]) -> None:
        axis = self._axis("an axis")
        self._mark("=")
        if self._peek("sum"):
            self.at += 1
            partial.append(axis)
        else:
            number = self._next("number", "a coordinate or the word sum")
            if not number.isdecimal():
                self.at -= 1
                self._fail(f"a coordinate is a whole number, not {number}")
            pins.append((axis, int(number)))

    def _dimension(self) -> Split:
        if self._peek("None", "*"):
            self.at += 1
            return ()
        if not self._peek("("):
            return (self._level(),)
        self._mark("(")
        levels = []
        while not self._peek(")"):
            levels.append(self._level())
            if not self._peek(")"):
                self._mark(",")
        self._mark(")")
        return tuple(levels)

    def _level(self) -> Level:
        axes = [self._axis("a mesh axis, None or *")]
        while self._peek("+"):
            self.at += 1
            axes.append(self._axis("a mesh axis"))
        kind = "even"
        args: list[float] = []
        skew: list[str] = []
        while self._peek(":"):
            self.at += 1
            word = self._next("word", f"one of {', '.join(_CUTS)}")
            if word not in _CUTS:
                self.at -= 1
                self._fail(f"no cut is called {word!r}; there are {', '.join(_CUTS)}")
            if skew if word == "skew" else kind != "even":
                self.at -= 1
                self._fail("one cut and one skew at most")
            begin = self.at + 1
            items = self._arguments("word" if word == "skew" else "number")
            if word == "skew":
                skew = items
            else:
                kind, args = word, [float(x) for x in items]
                self._check_cut(word, args, begin)
        return Level(tuple(axes), cast(CutKind, kind), tuple(args), tuple(skew))

    def _check_cut(self, word: str, args: list[float], begin: int) -> None:
        """Refuse arguments that no extent allows; `begin` is the token of the first."""
        end, self.at = self.at, begin
        if word == "cyclic" and (len(args) != 1 or not is_whole(args[0]) or args[0] < 1):
            self._fail("cyclic takes one whole block size of at least 1")
        if word == "bounds" and not all(map(is_whole, args)):
            self._fail("bounds are whole numbers")
        if word == "weights" and not 0 < sum(args) < inf:
            self._fail("weights are finite, and not all zero")
        self.at = end

    def _arguments(self, kind: str) -> list[str]:
        self._mark("(")
        items = []
        while not self._peek(")"):
            items.append(self._next(kind, "a number") if kind == "number" else self._axis("a mesh axis"))
            if not self._peek(")"):
                self._mark(",")
        self._mark(")")
        return items
