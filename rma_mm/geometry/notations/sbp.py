"""OneFlow's SBP signatures: one word per mesh axis.

    S(0)   the axis splits the rows      B   every rank along the axis holds the same
    S(1)   it splits the columns         P   every rank along the axis holds a summand

Axes that split the same dimension nest in the order of the mesh. There are no pins, skew, weights, blocks or other
orders: `layout_to_sbp` says which of these a layout needs. Source: Yuan et al. 2021, "OneFlow: redesign the
distributed deep learning framework from scratch", sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, product
from math import prod
from typing import Literal, cast, get_args

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import Reader, even_axes

Placed = Literal["S(0)", "S(1)", "B", "P"]  # what one mesh axis is to a matrix
Sbp = tuple[Placed, ...]  # one word per axis of the mesh, in its order
PLACED: tuple[Placed, ...] = get_args(Placed)
SPLITS: frozenset[Placed] = frozenset({"S(0)", "S(1)"})
Sizes = tuple[int, ...]

VALID: dict[tuple[Placed, Placed], Placed] = {
    ("S(0)", "B"): "S(0)",
    ("B", "S(1)"): "S(1)",
    ("S(1)", "S(0)"): "P",
    ("P", "B"): "P",
    ("B", "P"): "P",
    ("B", "B"): "B",
}
"""Placement of C = A·B along an axis, by those of A and B; other pairs cannot be multiplied without communication."""

_FORMS = "as in (S(0), B): one of S(0), S(1), B, P per mesh axis"


# -- text and layouts -----------------------------------------------------------------------------


def parse_sbp(text: str, mesh: MeshShape, begin: int = 0) -> Sbp:
    """Return the signature that `text` spells from the column `begin` on; the outer brackets may be left out.

    Raises LayoutError, with a mark under the offending character, where it is malformed or does not have one word
    per axis of `mesh`.
    """
    reader = Reader(text, _FORMS, begin)
    axes = len(mesh.dims)
    wrapped = reader.peek("(")
    reader.at += wrapped
    found: list[Placed] = []
    while not reader.peek(")", ""):
        if len(found) == axes:
            reader.fail(f"more than one word per axis; the mesh {mesh} has {axes}")
        found.append(_word(reader))
        reader.comma(")", "")
    if len(found) < axes:
        reader.fail(f"got {len(found)} words; the mesh {mesh} has {axes} axes, and each needs one")
    if wrapped:
        reader.mark(")")
    reader.end()
    return tuple(found)


def _word(reader: Reader) -> Placed:
    """Read S(0), S(1), B or P."""
    word = reader.next("word", "S(0), S(1), B or P")
    if word not in ("S", "B", "P"):
        reader.fail_before(f"expected S(0), S(1), B or P, not {word!r}")
    if word == "S":
        reader.mark("(")
        dim = reader.next("number", "0 for rows or 1 for columns")
        if dim not in ("0", "1"):
            reader.fail_before("S splits dimension 0, the rows, or 1, the columns")
        reader.mark(")")
        word = f"S({dim})"
    return cast(Placed, word)


def sbp_text(sbp: Sbp) -> str:
    """Return the signature as text.

    >>> sbp_text(("S(0)", "B"))
    '(S(0), B)'
    """
    return f"({', '.join(sbp)})"


def layout_to_sbp(layout: Layout, mesh: MeshShape) -> Sbp:
    """Return the layout as a signature; raises LayoutError, saying why, if there is none."""
    rows, cols = even_axes(layout, mesh, "SBP", partial=True, ordered=True)
    groups: tuple[tuple[Placed, tuple[str, ...]], ...] = (("S(0)", rows), ("S(1)", cols), ("P", layout.partial))
    words = {axis: word for word, axes in groups for axis in axes}
    return tuple(words.get(axis, "B") for axis in mesh.names)


def sbp_to_layout(sbp: Sbp, mesh: MeshShape) -> Layout:
    """Return the layout with this signature; raises LayoutError if it does not have one word per axis of `mesh`."""
    _check_length(sbp, mesh)
    axes = {word: [axis for axis, have in zip(mesh.names, sbp, strict=True) if have == word] for word in PLACED}
    splits = tuple(tuple(Level((axis,)) for axis in axes[word]) for word in ("S(0)", "S(1)"))
    return Layout(splits, partial=tuple(axes["P"]))


def _check_length(sbp: Sbp, mesh: MeshShape) -> None:
    if len(sbp) != len(mesh.dims) or not set(sbp) <= set(PLACED):
        raise LayoutError(
            f"SBP: got {sbp_text(sbp)}; the mesh {mesh} has the axes {', '.join(mesh.names)}, and each needs one of "
            f"{', '.join(PLACED)}"
        )


# -- signatures of a product ----------------------------------------------------------------------


def deduce(a: Sbp, b: Sbp) -> Sbp:
    """The signature of C = A·B; raises LayoutError, with what would fit, where they cannot be multiplied as they are.

    >>> deduce(("S(0)", "B"), ("B", "S(1)"))
    ('S(0)', 'S(1)')
    """
    if len(a) != len(b):
        raise LayoutError(f"SBP: got A {sbp_text(a)} and B {sbp_text(b)}; both need one word per mesh axis")
    for axis, pair in enumerate(zip(a, b, strict=True)):
        if pair not in VALID:
            raise LayoutError(f"SBP: axis {axis} has A {pair[0]} and B {pair[1]}; {_fitting(*pair)}")
    return tuple(VALID[pair] for pair in zip(a, b, strict=True))


def _fitting(a: Placed, b: Placed) -> str:
    """Return a text of the placements that fit `a` for A or `b` for B, and of all valid combinations."""
    with_a = " or ".join(y for x, y in VALID if x == a)
    with_b = " or ".join(x for x, y in VALID if y == b)
    every = ", ".join(f"{x}·{y} = {c}" for (x, y), c in VALID.items())
    return f"beside A {a}, B may be {with_a}; beside B {b}, A may be {with_b}; valid along an axis are {every}"


def signatures(mesh: MeshShape) -> Iterator[tuple[Sbp, Sbp, Sbp]]:
    """Yield all (A, B, C) that need no movement except for the sums: six per axis."""
    for pairs in product(VALID, repeat=len(mesh.dims)):
        yield tuple(a for a, _ in pairs), tuple(b for _, b in pairs), tuple(VALID[pair] for pair in pairs)


# -- boxing: from one signature to another --------------------------------------------------------


@dataclass(frozen=True)
class SbpStep:
    """One collective along one mesh axis, in each of its groups of ranks."""

    axis: str  # the mesh axis along which a group lies
    name: str  # all-gather, reduce-scatter, all-reduce, all-to-all, slice, keep one summand, or pad with zeros
    source: Placed  # what the axis is before
    target: Placed  # what it is after
    words: int  # elements moved, over all ranks

    def __str__(self) -> str:
        return f"{self.axis}: {self.source}→{self.target} by {self.name}, {self.words} words"


@dataclass(frozen=True)
class Boxing:
    """Conversion of one signature into another: steps to be done in this order."""

    steps: tuple[SbpStep, ...]  # None if the signatures are the same
    words: int  # elements moved by all of them, over all ranks


def boxing(source: Sbp, target: Sbp, shape: tuple[int, int], mesh: MeshShape) -> Boxing:
    """The steps that turn `source` into `target` for a matrix of `shape`, in the order that moves the fewest words.

    Each step changes one axis, to its target or, where an inner split is in the way, to B for a while: an axis changes
    its split of a dimension only while no axis after it splits that dimension, or the inner parts would not nest. (So
    swapping nested splits gathers, where a general redistribution could move less.) Ring collectives: p ranks on V
    elements, gathered or unreduced, move (p−1)V for all-gather and reduce-scatter and 2(p−1)V for all-reduce;
    all-to-all moves what changes hands, V(p−1)/p where the parts are equal; a slice moves nothing.
    Raises LayoutError if a signature does not fit the mesh.

    >>> print(*boxing(("P", "S(0)"), ("B", "S(0)"), (6, 8), MeshShape((2, 3))).steps)
    i: P→B by all-reduce, 96 words
    """
    _check_length(source, mesh)
    _check_length(target, mesh)
    return _cheapest(source, target, shape, mesh.dims, mesh.names)


@lru_cache(maxsize=4096)
def _cheapest(source: Sbp, target: Sbp, shape: tuple[int, int], sizes: Sizes, names: tuple[str, ...]) -> Boxing:
    """Return the boxing with the fewest words, of equal ones that with the fewest steps, by Dijkstra's algorithm."""
    done: set[Sbp] = set()
    number = count()  # keeps the queue from comparing signatures
    queue: list[tuple[int, int, int, Sbp, tuple[SbpStep, ...]]] = [(0, 0, next(number), source, ())]
    while True:
        words, length, _, at, steps = heappop(queue)
        if at == target:
            return Boxing(steps, words)
        if at in done:
            continue
        done.add(at)
        for axis, word in _changes(at, target):
            moved = _words(at, axis, word, shape, sizes)
            step = SbpStep(names[axis], _name(at[axis], word), at[axis], word, moved)
            there = (*at[:axis], word, *at[axis + 1 :])
            heappush(queue, (words + moved, length + 1, next(number), there, (*steps, step)))


def _changes(at: Sbp, target: Sbp) -> Iterator[tuple[int, Placed]]:
    """Yield the axes that may change now, with their new placement: the target, or B for a split."""
    for axis, (have, want) in enumerate(zip(at, target, strict=True)):
        words: set[Placed] = {want, "B"} if have in SPLITS else {want}
        yield from ((axis, word) for word in sorted(words - {have}) if _nests(at, axis, word))


def _nests(at: Sbp, axis: int, target: Placed) -> bool:
    """True if no later axis splits a dimension whose split by `axis` changes."""
    changed = SPLITS & {at[axis], target}
    return changed.isdisjoint(at[axis + 1 :])


def _name(source: Placed, target: Placed) -> str:
    """Return the collective that turns one word into another."""
    if target == "P":
        return "keep one summand" if source == "B" else "pad with zeros"
    if source == "B":
        return "slice"
    if target == "B":
        return "all-reduce" if source == "P" else "all-gather"
    return "reduce-scatter" if source == "P" else "all-to-all"


def _words(at: Sbp, axis: int, target: Placed, shape: tuple[int, int], sizes: Sizes) -> int:
    """Return elements moved over all ranks when `axis` becomes `target`.

    The groups along the axis share out the matrix, once for each coordinate on other axes that hold it whole.
    """
    copies = prod(size for n, size in enumerate(sizes) if n != axis and at[n] in ("B", "P"))
    held = prod(shape) * copies
    name = _name(at[axis], target)
    if name == "all-to-all":
        rows, cols = (_lengths(at, axis, dim, extent, sizes) for dim, extent in enumerate(shape))
        return held - copies * sum(r * c for r, c in zip(rows, cols, strict=True))
    rounds = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(name, 0)
    return rounds * (sizes[axis] - 1) * held


def _lengths(at: Sbp, axis: int, dim: int, extent: int, sizes: Sizes) -> list[int]:
    """By coordinate on `axis`, how much of the dimension lies there if `axis` splits it inside the axes before it."""
    parts = [extent]
    for n in range(axis):
        if at[n] == f"S({dim})":
            parts = [length for part in parts for length in _even(part, sizes[n])]
    return [sum(lengths) for lengths in zip(*(_even(part, sizes[axis]) for part in parts), strict=True)]


def _even(extent: int, count: int) -> list[int]:
    return [(index + 1) * extent // count - index * extent // count for index in range(count)]
