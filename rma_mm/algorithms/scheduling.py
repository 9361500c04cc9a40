"""Rows written in DISTAL's words: distribution notation for the placements, scheduling words for the rest.

    blocks = product(A="xy->xy", B="xy->xy", C="xy->xy")
    summa = blocks.distribute(m="i", n="j").divide("k").reorder("k").communicate("A", "B", at="k")
    row = summa.rotate("k", by="ij").row("my_cannon", "Cannon 1969", "blocks go round rows and columns")

Source: R. Yadav, A. Aiken and F. Kjolstad, "DISTAL: the distributed tensor algebra compiler" (2022), sections 3 and 4.
The loops are m, n and k of C[m, n] = A[m, k] · B[k, n]; i, j, l are the first, second and third axis of the mesh,
whatever they are called. A notation has one entry per axis, so a row is for meshes of as many axes.

What differs from DISTAL: k is the loop in time, and cut where owners change, unless words say otherwise. A rotated
operand is brought to circular windows before the product (the skew of the textbooks), where DISTAL fetches the first
slices from wherever they are. An operand is fetched by broadcasts, shifts or reductions only where it is named by
`communicate` and they are proved equal to one-sided pulls and pushes; else it moves by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, cast

from rma_mm.algorithms.survey import one_sided, placed_work
from rma_mm.errors import AlgorithmError, LayoutError
from rma_mm.geometry.layout import Layout, Level
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.geometry.notations.distal import parse_distal
from rma_mm.schedule.row import DIMS, OPERAND_DIMS, Problem, Row, Wanted, stationary


def product(A: str, B: str, C: str) -> Loops:
    """The loops of C = A · B, with the operands placed by DISTAL's notation; on the left rows, then columns.

    >>> product(A="xy->xy", B="xy->xy", C="xy->xy").distribute(m="i")
    Traceback (most recent call last):
    rma_mm.errors.AlgorithmError: distribute: got m→(i), and nothing for the axis j; each of i, j cuts one of m, n, k
    """
    counts = {x: len(text.partition("->")[2].replace(" ", "")) for x, text in zip("ABC", (A, B, C), strict=True)}
    if len(set(counts.values())) > 1 or not 1 <= counts["A"] <= len(AXIS_NAMES):
        got = ", ".join(f"{x} {count}" for x, count in counts.items())
        raise AlgorithmError(f"product: got entries for {got} axes; all three have as many, one to three, as in xy->xy")
    loops = Loops((A, B, C), AXIS_NAMES[: counts["A"]])
    for x in "ABC":
        try:
            loops.placed(x, loops.any_mesh)
        except LayoutError as error:
            raise AlgorithmError(f"product: {x}: {error}") from error
    return loops


@dataclass(frozen=True)
class Loops:
    """The loops over m, n and k as words have arranged them so far. Every word returns a new value."""

    notations: tuple[str, str, str]
    """Of A, B and C."""
    axes: tuple[str, ...]
    """Names here of the axes of the mesh."""
    work: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Loop → the axes that share it out, outermost first."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """Divided loop → pieces of an owner's part, at least."""
    over: Literal["m", "n", "k"] = "k"
    """The loop in time."""
    levels: Mapping[str, str] = field(default_factory=dict)
    """Communicated operand → the loop in time, `start` or `end`."""
    rotated: str = ""
    """The loop that starts elsewhere on every rank; none where empty."""
    by: tuple[str, ...] = ()
    """The axes whose coordinates say where."""

    def __post_init__(self) -> None:
        if self.rotated not in ("", self.over):
            _refuse("rotate", self.rotated, f"the loop in time is {self.over}; only that one rotates")
        for x, level in self.levels.items():
            whole = "end" if x == "C" else "start"
            if level not in (self.over, whole):
                how = "leaves in one" if x == "C" else "is fetched whole"
                _refuse("communicate", f"{x} at {level}", f"{x} moves in chunks at {self.over}, or {how} at {whole}")

    def distribute(self, **axes: Sequence[str]) -> Loops:
        """Share loops out over axes of the mesh, as in m="i" or m=("i", "l"), which nests; each axis named once."""
        work = {_loop("distribute", dim): self._named("distribute", names) for dim, names in axes.items()}
        named = [axis for names in work.values() for axis in names]
        twice = [axis for axis in named if named.count(axis) > 1]
        missing = [axis for axis in self.axes if axis not in named]
        if twice or missing:
            found = f"the axis {twice[0]} twice" if twice else f"nothing for the axis {', '.join(missing)}"
            got = f"{_cuts(work)}, and {found}" if work else found
            _refuse("distribute", got, f"each of {', '.join(self.axes)} cuts one of {', '.join(DIMS)}")
        return replace(self, work=work)

    def divide(self, dim: str, parts: int = 1) -> Loops:
        """Cut a loop into pieces: where owners change in any case, and each owner's part into so many at least."""
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            _refuse("divide", repr(parts), "parts is a whole number of at least 1")
        return replace(self, pieces={**self.pieces, _loop("divide", dim): parts})

    def reorder(self, dim: str) -> Loops:
        """Make a loop the outermost in time."""
        return replace(self, over=cast(Literal["m", "n", "k"], _loop("reorder", dim)))

    def communicate(self, *operands: str, at: str) -> Loops:
        """Say when operands move: at the loop in time in chunks, or A and B at the `start`, C at the `end`, whole.

        In chunks there are more messages and less memory. C leaves once in any case where k is the loop in time.
        """
        for x in operands:
            if x not in OPERAND_DIMS:
                _refuse("communicate", repr(x), "the operands are A, B and C")
        return replace(self, levels={**self.levels, **dict.fromkeys(operands, at)})

    def rotate(self, dim: str, by: Sequence[str]) -> Loops:
        """Start the loop in time at coordinate · extent / size, summed over the axes `by`: as in ("i", "j") or "ij"."""
        return replace(self, rotated=_loop("rotate", dim), by=self._named("rotate", by))

    def _named(self, word: str, axes: Sequence[str]) -> tuple[str, ...]:
        """`axes`, if they are axes of the mesh, each once."""
        if not axes or not set(axes) <= set(self.axes) or len(set(axes)) < len(axes):
            _refuse(word, repr(axes), f"the notations are for the axes {', '.join(self.axes)}, each named once")
        return tuple(axes)

    def row(self, name: str, source: str = "", summary: str = "") -> Row:
        """The row that these words describe."""
        if not self.work:
            _refuse("row", "loops that are not distributed", "say which axes share them out: distribute(m=…, n=…)")
        for dim in self.pieces:
            if dim != self.over:
                _refuse("divide", dim, f"the loop in time is {self.over}; reorder({dim!r}), or divide that")
        mine = Layout(tuple(tuple(Level((axis,)) for axis in self.work.get(dim, ())) for dim in "mn"))
        is_here = "k" not in self.work and self.placed("C", self.any_mesh).unshared(self.any_mesh) == mine
        whole = [x for x in sorted(self.levels) if self.levels[x] != self.over]
        row = Row(
            name, source, summary, stationary("C") if is_here else placed_work(_cuts(self.work), len(self.axes)),
            self.over, order="rotated" if self.rotated else "plain", by=self.by, result="here" if is_here else "reduce",
            placements=self._placements, also=self._also, stage=self._stage, pieces=self.pieces.get(self.over, 1),
            grouped="".join(sorted(self.levels)), whole="".join(whole),
        )  # fmt: skip
        return replace(row, form=one_sided(row)) if row.grouped else row

    @property
    def any_mesh(self) -> MeshShape:
        """A mesh that has every coordinate that a notation may name."""
        return MeshShape((10,) * len(self.axes))

    def placed(self, x: str, mesh: MeshShape) -> Layout:
        """The placement of an operand on a mesh."""
        return parse_distal(self.notations["ABC".index(x)], mesh)

    def brought(self, x: str, mesh: MeshShape) -> Layout | None:
        """What A or B is brought to before the product; None where it stays.

        Of what moves in chunks, copies are made first; what is cut over a rotating axis is skewed by the others.
        """
        placed = self.placed(x, mesh)
        if self.levels.get(x) != self.over:
            return None
        brought = self._skewed(x, placed, mesh) if DIMS.index(self.over) in OPERAND_DIMS[x] else placed
        return brought if brought != placed or placed.replicated_axes(mesh) else None

    def _skewed(self, x: str, placed: Layout, mesh: MeshShape) -> Layout:
        """An operand in circular windows of each rank's share of the loop in time, where its part of that rotates."""
        named = dict(zip(self.axes, mesh.names, strict=False))
        dim = OPERAND_DIMS[x].index(DIMS.index(self.over))
        own, other = ([axis for level in placed.splits[d] for axis in level.axes] for d in (dim, 1 - dim))
        share, by = ([named[axis] for axis in axes] for axes in (self.work.get(self.over, ()), self.by))
        outer = [axis for axis in share if axis not in other]
        inner = [axis for axis in own if axis not in outer]
        turning = next((axis for axis in inner if axis in by), None)
        skew = tuple(axis for axis in by if axis not in (*inner, *outer))
        if turning is None or not skew:
            return placed
        split = tuple(Level((axis,), skew=skew if axis == turning else ()) for axis in (*outer, *inner))
        splits = tuple(split if d == dim else placed.splits[d] for d in (0, 1))
        return replace(placed, splits=splits, pins=tuple(pin for pin in placed.pins if pin[0] not in outer))

    def _placements(self, mesh: MeshShape) -> Wanted | str:
        """The placements on a mesh, or why it cannot be used."""
        if len(mesh.shape) != len(self.axes):
            texts = ", ".join(self.notations)
            return f"needs a mesh with as many axes as {texts} have entries; this one is {mesh}"
        try:
            return self.placed("A", mesh), self.placed("B", mesh), self.placed("C", mesh).unshared(mesh)
        except LayoutError as error:
            return str(error)

    def _also(self, mesh: MeshShape) -> dict[str, Layout]:
        """A and B where they are brought to, or one copy of what is replicated at coordinate 0; all copies of C."""
        found = {"C": self.placed("C", mesh)}
        for x in "AB":
            placed, brought = self.placed(x, mesh), self.brought(x, mesh)
            spare = placed.replicated_axes(mesh)
            if brought is not None:
                first = replace(placed, pins=(*placed.pins, *((axis, 0) for axis in spare)))
                found[x] = first if spare else brought
        return found

    def _stage(self, problem: Problem) -> dict[str, Layout]:
        """The placements that A and B are brought to."""
        wanted = {x: self.brought(x, problem.mesh) for x in "AB"}
        return {x: layout for x, layout in wanted.items() if layout is not None}


def _loop(word: str, dim: str) -> str:
    """`dim`, if it is a loop."""
    if dim not in [*DIMS]:
        _refuse(word, repr(dim), f"the loops are {', '.join(DIMS)}")
    return dim


def _cuts(work: Mapping[str, tuple[str, ...]]) -> str:
    """The work map in the survey's words."""
    return ", ".join(f"{dim}→({','.join(axes)})" for dim, axes in work.items())


def _refuse(word: str, got: str, rule: str) -> NoReturn:
    raise AlgorithmError(f"{word}: got {got}; {rule}")


# -- the algorithms that the paper writes so ------------------------------------------------------

BLOCKS = product(A="xy->xy", B="xy->xy", C="xy->xy")
"""Two-dimensional blocks of all three."""
SUMMA = BLOCKS.distribute(m="i", n="j").divide("k").reorder("k").communicate("A", "B", at="k")
"""As `summa_c`."""
CANNON = SUMMA.rotate("k", by=("i", "j"))
"""As `cannon` on blocks that lie plain, which are skewed first."""
PUMMA = SUMMA.rotate("k", by=("i",))
"""As `pumma`."""
