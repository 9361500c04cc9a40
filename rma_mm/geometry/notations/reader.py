"""Tools that all notations share: reading text with errors that point at a character, and limits that most have."""

from __future__ import annotations

import re
from typing import NoReturn, cast

from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Split
from rma_mm.geometry.mesh import MeshShape

TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>[0-9]+)|(?P<mark>[\[\](),]))")
"""Words, whole numbers, brackets and commas: enough for most notations."""


class Reader:
    """The tokens of one text, read from left to right."""

    def __init__(self, text: str, forms: str, begin: int = 0, token: re.Pattern[str] = TOKEN) -> None:
        self.text = text
        self.forms = forms
        self.at = 0
        self.tokens = self._scan(begin, token)

    def _scan(self, at: int, token: re.Pattern[str]) -> list[tuple[str, str, int]]:
        """(kind, text, column) of each token; the last one is an `end` without text."""
        plain = unquoted(self.text)
        tokens = []
        while plain[at:].strip():
            found = token.match(plain, at)
            if not found:
                self.fail("a character that has no meaning here", len(plain) - len(plain[at:].lstrip()))
            kind = cast(str, found.lastgroup)
            tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        tokens.append(("end", "", len(self.text)))
        return tokens

    def fail(self, what: str, column: int | None = None) -> NoReturn:
        raise LayoutError(f"layout: {what}; write it {self.forms}\n{self.marked(column)}")

    def marked(self, column: int | None = None) -> str:
        """Return the text, and below it a mark under the token at hand, or under `column`."""
        column = self.tokens[self.at][2] if column is None else column
        before = re.sub(r"[^\t]", " ", self.text[:column])
        return f"  {self.text}\n  {before}^"

    def fail_before(self, what: str) -> NoReturn:
        """Raise LayoutError with a mark under the token just read."""
        self.at -= 1
        self.fail(what)

    def peek(self, *marks: str) -> bool:
        return self.tokens[self.at][1] in marks

    def next(self, kind: str, what: str) -> str:
        """Read a token of this kind; `what` names it in errors."""
        found, text, _ = self.tokens[self.at]
        if found != kind:
            self.fail(f"expected {what}")
        self.at += 1
        return text

    def mark(self, mark: str) -> None:
        if not self.peek(mark):
            self.fail(f"expected {mark!r}")
        self.at += 1

    def comma(self, *closing: str) -> None:
        """Read the comma between two items; behind the last one, where a closing mark follows, it may be left out."""
        if not self.peek(*closing):
            self.mark(",")

    def end(self) -> None:
        if self.tokens[self.at][0] != "end":
            self.fail("something behind the end")


def unquoted(text: str) -> str:
    return re.sub(r"['\"]", " ", text)


def even_axes(
    layout: Layout, mesh: MeshShape, notation: str, pins: bool = False, partial: bool = False, ordered: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return the axes that cut each dimension of a matrix, for a notation that has even cuts over single axes only.

    The flags say that it has pins, that it has partial sums, and that it nests axes in mesh order alone.
    Raises LayoutError if the layout needs more, saying what.
    """
    fault = _other_fault(layout, mesh) or next(filter(None, map(_cut_fault, layout.splits)), "")
    if not fault and layout.pins and not pins:
        fault = f"has no pins; got {', '.join(f'{axis}={at}' for axis, at in layout.pins)}"
    if not fault and layout.partial and not partial:
        fault = f"has no partial sums; got {', '.join(f'{axis}=sum' for axis in layout.partial)}"
    cuts = tuple(tuple(axis for level in split for axis in level.axes) for split in layout.splits)
    for axes in cuts:
        if not fault and ordered and list(axes) != sorted(axes, key=mesh.names.index):
            fault = f"nests axes in the order of the mesh, {', '.join(mesh.names)}; got {', '.join(axes)}"
    if fault:
        raise LayoutError(f"{notation} {fault}")
    return cuts


def _other_fault(layout: Layout, mesh: MeshShape) -> str:
    """Return the fault of a layout in anything but its cuts, pins and sums; empty if there is none."""
    if layout.grid is not None:
        return f"names axes of the mesh {mesh}; got those of the grid {layout.grid}"
    if len(layout.splits) != 2:
        return f"places matrices here, of two dimensions; got {len(layout.splits)}"
    named = (*layout.split_axes, *layout.partial, *(axis for axis, _ in layout.pins))
    unknown = [axis for axis in named if axis not in mesh.names]
    return f"names the axes {', '.join(mesh.names)} of the mesh; got {', '.join(unknown)}" if unknown else ""


def _cut_fault(split: Split) -> str:
    """Return why even cuts over single axes cannot express this cut; empty if they can."""
    for level in split:
        if level.kind != "even":
            return f"cuts evenly; got {level.kind} over {'+'.join(level.axes)}"
        if level.skew:
            return f"has no skew; got {'+'.join(level.axes)} shifted by {', '.join(level.skew)}"
        if len(level.axes) > 1:
            return f"cuts over one axis after the other; got {'+'.join(level.axes)} taken as one"
    return ""
