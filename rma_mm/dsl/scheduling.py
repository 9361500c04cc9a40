"""Algorithms in DISTAL's words: a statement, distribution notation for placements, scheduling words for the rest.

    blocks = product("C(m,n) = A(m,k) * B(k,n)", A="xy->xy", B="xy->xy", C="xy->xy")
    summa = blocks.distribute(m="i", n="j").divide("k").reorder("k").communicate("A", "B", at="k")
    row = summa.rotate("k", by="ij").row("my_cannon", "Cannon 1969", "blocks go round rows and columns")

Source: R. Yadav, A. Aiken and F. Kjolstad, "DISTAL: the distributed tensor algebra compiler" (2022), sections 3 and 4.
The mesh's axes are i, j, l, … here, whatever they are called, and X, Y, Z, … ranks lie along them. A notation has one
entry per axis, so an algorithm is for meshes of as many axes. The loops of an index k that is cut are ko and ki; ki may
be cut again, into kio and kii. An index stands for them all: the outermost where loops are reordered, the innermost
where they are cut or communicated at. Every word gives new loops, which print as one statement:

>>> loops = product()
>>> print(loops)
forall(m, forall(n, forall(k, C(m,n) += A(m,k) * B(k,n))))
>>> loops = loops.distribute(m="i", n="j")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(mi, forall(ni, forall(k, C(m,n) += A(m,k) * B(k,n))))), Distributed), \
divide(m, mo, mi, X) and divide(n, no, ni, Y))
>>> loops = loops.divide("k", "X")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(mi, forall(ni, forall(ko, forall(ki, C(m,n) += A(m,k) * B(k,n)))))), \
Distributed), divide(m, mo, mi, X) and divide(n, no, ni, Y) and divide(k, ko, ki, X))
>>> loops = loops.reorder("ko", "mi", "ni", "ki")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(ko, forall(mi, forall(ni, forall(ki, C(m,n) += A(m,k) * B(k,n)))))), \
Distributed), divide(m, mo, mi, X) and divide(n, no, ni, Y) and divide(k, ko, ki, X))
>>> loops = loops.communicate("C", at="no")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(ko, forall(mi, forall(ni, forall(ki, C(m,n) += A(m,k) * B(k,n))))), \
transfers: transfer(C)), Distributed), divide(m, mo, mi, X) and divide(n, no, ni, Y) and divide(k, ko, ki, X))
>>> loops = loops.communicate("A", at="ko")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(ko, forall(mi, forall(ni, forall(ki, C(m,n) += A(m,k) * B(k,n)))), \
transfers: transfer(A)), transfers: transfer(C)), Distributed), \
divide(m, mo, mi, X) and divide(n, no, ni, Y) and divide(k, ko, ki, X))
>>> loops = loops.communicate("B", at="ko")
>>> print(loops)
suchthat(forall(mo, forall(no, forall(ko, forall(mi, forall(ni, forall(ki, C(m,n) += A(m,k) * B(k,n)))), \
transfers: transfer(A), transfer(B)), transfers: transfer(C)), Distributed), \
divide(m, mo, mi, X) and divide(n, no, ni, Y) and divide(k, ko, ki, X))
>>> print(loops.pseudocode())
@parallel for mo in range(X):
    @parallel for no in range(Y):
        load C[M/X, N/Y]
        for ko in range(X):
            load A[M/X, K/X]
            load B[K/X, N/Y]
            for mi in range(M/X):
                for ni in range(N/Y):
                    for ki in range(K/X):
                        C(m,n) += A(m,k) * B(k,n)

What differs from DISTAL: one index is the loop in time, k unless reordered. It is cut where owners change, unless words
say otherwise. A rotated operand is brought to circular windows before the product (the skew of the textbooks), where
DISTAL fetches the first slices from wherever they are. An operand is fetched by broadcasts, shifts or reductions only
where it is named by `communicate` and they are proved equal to one-sided pulls and pushes; else it moves by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Literal, NoReturn, cast

from rma_mm.algorithms.from_table import one_sided, placed_work
from rma_mm.classes import dataclass
from rma_mm.dsl.cut_loops import SIZES, CutLoops
from rma_mm.dsl.loop_nest import Loop, Nest
from rma_mm.dsl.placed_loops import PlacedLoops
from rma_mm.dsl.statement import PLAIN, Statement, parse_statement
from rma_mm.errors import AlgorithmError, LayoutError, Renamed
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.schedule.algorithm import DIMS, OWNERS, Algorithm, Cut, Grains, stationary

BLOCKED = "xy->xy"  # the placement of all three where none is given


def product(statement: str = PLAIN, /, **placements: str) -> Loops:
    """Return the loops of a product in index notation, with tensors placed in DISTAL's notation.

    Parameters
    ----------
    statement : str
        The product, as `C(m,n) = A(m,k) * B(k,n)`.
    **placements : str
        Placement of each tensor as it lies, rows first; all three or none. Without them, tensors lie in blocks.

    Returns
    -------
    Loops
        The loops, not yet distributed.

    Raises
    ------
    AlgorithmError
        If the statement or a placement cannot be read.

    Examples
    --------
    >>> product(A="xy->xy", B="xy->xy", C="xy->xy").distribute(m="i")
    Traceback (most recent call last):
    rma_mm.errors.AlgorithmError: distribute: got m→(i), and nothing for the axis j; each of i, j cuts one of m, n, k
    """
    parsed = parse_statement(statement)
    named = parsed.names
    placements = placements or dict.fromkeys(named.values(), BLOCKED)
    if set(placements) != set(named.values()):
        got = ", ".join(placements)
        raise AlgorithmError(f"product: got placements of {got}; the tensors are {', '.join(sorted(named.values()))}")
    if wrong := [x for x, text in placements.items() if not isinstance(text, str)]:
        raise AlgorithmError(f"product: {wrong[0]}: got {placements[wrong[0]]!r}; a placement is a text, as in xy->xy")
    counts = {x: len(text.partition("->")[2].replace(" ", "")) for x, text in placements.items()}
    if len(set(counts.values())) > 1 or not 1 <= min(counts.values()) <= len(AXIS_NAMES):
        got = ", ".join(f"{x} {count}" for x, count in counts.items())
        most = len(AXIS_NAMES)
        raise AlgorithmError(f"product: got entries for {got} axes; all have as many, one to {most}, as in xy->xy")
    notations = placements[named["A"]], placements[named["B"]], placements[named["C"]]
    loops = Loops(notations, AXIS_NAMES[: min(counts.values())], parsed, parsed.indices, CutLoops(parsed.indices))
    for x, name in named.items():
        try:
            loops.placed.placed(x, loops.placed.any_mesh)
        except LayoutError as error:
            raise AlgorithmError(f"product: {name}: {error}") from error
    return loops


@dataclass(frozen=True)
class Loops:
    """The loops of a product as words have arranged them so far. Every word returns a new value."""

    notations: tuple[str, str, str]
    """Distribution notations of A, B and C."""
    axes: tuple[str, ...]
    """Names here of the axes of the mesh."""
    statement: Statement
    order: tuple[str, ...]
    """The loops that are not distributed, outermost first."""
    loops: CutLoops
    """The loops into which each index is cut."""
    over: str = ""
    """The index that was reordered to be the loop in time; the summed one where empty."""
    levels: Mapping[str, str] = field(default_factory=dict)
    """Communicated operand → the loop in time, one that cuts it, `start` or `end`."""
    rotated: str = ""
    """The index whose loop starts elsewhere on every rank; none where empty."""
    by: tuple[str, ...] = ()
    """The axes whose coordinates say where."""

    def __post_init__(self) -> None:
        if self.rotated not in ("", self.walked):
            _refuse("rotate", self.rotated, f"the loop in time is {self.walked}; only that one rotates")
        outer = self.loops.outer(self.walked)
        for x, level in self.levels.items():
            name, whole = self.statement.names[x], "end" if x == "C" else "start"
            if level not in (self.walked, whole, *outer, *self.loops.distributed[-1:]):
                how = "leaves in one" if x == "C" else "is fetched whole"
                more = f"; or at {', '.join(outer)}" if outer else ""
                rule = f"{name} moves in chunks at {self.walked}, or {how} at {whole}{more}"
                _refuse("communicate", f"{name} at {level}", rule)
            around = self.order[: self.order.index(level)] if level in outer else ()
            if inside := [loop for loop in around if loop not in outer]:
                _refuse("communicate", f"{name} at {level}, inside {', '.join(inside)}", f"reorder({level!r}) first")

    # -- words ------------------------------------------------------------------------------------

    def distribute(self, **axes: Sequence[str]) -> Loops:
        """Distribute indices over axes of the mesh; m becomes mo over ranks, and mi on each.

        Parameters
        ----------
        **axes : str or sequence of str
            Axes for each index, as m="i", or m=("i", "l") to nest them. Each axis is named once.
        """
        work = {self._index("distribute", each): self._named("distribute", names) for each, names in axes.items()}
        named = [axis for names in work.values() for axis in names]
        twice = [axis for axis in named if named.count(axis) > 1]
        missing = [axis for axis in self.axes if axis not in named]
        if twice or missing:
            found = f"the axis {twice[0]} twice" if twice else f"nothing for the axis {', '.join(missing)}"
            got, indices = f"{_cuts(work)}, and {found}" if work else found, ", ".join(self.statement.indices)
            _refuse("distribute", got, f"each of {', '.join(self.axes)} cuts one of {indices}")
        if self.loops.work or self.loops.cuts:
            _refuse("distribute", "loops that are distributed or cut", "it comes first, and once")
        order = tuple(f"{index}i" if index in work else index for index in self.order)
        return replace(self, loops=replace(self.loops, work=work), order=order)._distinct("distribute")

    def divide(self, loop: str, parts: int | str | None = None) -> Loops:
        """Cut a loop into even parts: k into ko, over the parts, and ki, within one.

        Parameters
        ----------
        loop : str
            The loop.
        parts : int or str, optional
            Number of parts; X, Y, Z, … for the ranks along the first, second, third axis of the mesh. By default the
            loop, not yet cut, is cut where owners change.
        """
        most = list(SIZES)[: len(self.axes)]
        if parts is not None and parts not in most and not (type(parts) is int and parts >= 1):
            _refuse("divide", repr(parts), f"parts is a whole number of at least 1, or of {', '.join(most)}")
        return self._cut("divide", loop, Cut(SIZES.get(str(parts), parts or 0)))

    def split(self, loop: str, size: int) -> Loops:
        """Cut a loop into pieces of a fixed size.

        Parameters
        ----------
        loop : str
            The loop.
        size : int
            Indices of a piece; the last may be shorter.
        """
        if type(size) is not int or size < 1:
            _refuse("split", repr(size), "size is a whole number of at least 1")
        return self._cut("split", loop, Cut(size=size))

    def reorder(self, *loops: str) -> Loops:
        """Move local loops to the front, in this order.

        Parameters
        ----------
        *loops : str
            The loops; the first one's index runs in time.
        """
        first = [self._outermost(loop) for loop in loops]
        if not first or len(set(first)) < len(first):
            _refuse("reorder", repr(loops), f"it takes some of {', '.join(self.order)}, each once")
        order = (*first, *(loop for loop in self.order if loop not in first))
        for index in self.statement.indices:
            nested = self.loops.local(index)
            if list(nested) != sorted(nested, key=order.index):
                _refuse("reorder", ", ".join(loops), f"{nested[-1]} lies within {', '.join(nested[:-1])}")
        over = next(index for index in self.statement.indices if first[0] in self.loops.local(index))
        return replace(self, order=order, over=over)

    def communicate(self, *operands: str, at: str) -> Loops:
        """Choose when operands move: in chunks at the loop in time or one that cuts it, or else as a whole.

        Chunks mean more messages and less memory: at ko, a chunk of k is fetched each time; at kio, a part of one. C
        leaves once in any case if the summed index runs in time.

        Parameters
        ----------
        *operands : str
            The tensors.
        at : str
            A loop in time for chunks. For whole operands the innermost distributed loop, as no; "start" for A and B,
            "end" for C.
        """
        names = self.statement.names
        for each in operands:
            if each not in names.values():
                _refuse("communicate", repr(each), "the operands are {A}, {B} and {C}".format(**names))
        levels = {**self.levels, **{x: at for x, name in names.items() if name in operands}}
        loops = self if at != self.walked or self.loops.cuts.get(at) else self.divide(at)
        return replace(loops, levels=levels)._hoisted()

    def rotate(self, loop: str, by: Sequence[str]) -> Loops:
        """Start the loop in time at coordinate · extent / size, summed over the axes `by`.

        Parameters
        ----------
        loop : str
            The loop in time.
        by : sequence of str
            Axes, as ("i", "j") or "ij", or the loops over them, as ("mo", "no").
        """
        index = next((each for each in self.statement.indices if loop in (each, *self.loops.outer(each)[:1])), loop)
        over = {f"{each}o": axes for each, axes in self.loops.work.items()}
        is_plain = isinstance(by, str) or not isinstance(by, Sequence)
        named = by if is_plain else tuple(axis for each in by for axis in over.get(each, (each,)))
        return replace(self, rotated=self._index("rotate", index), by=self._named("rotate", named))

    # -- what they make ---------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, bool]:
        """Return options of `matmul` besides the algorithm: which of `operands` lie transposed."""
        return self.statement.options

    @property
    def operands(self) -> tuple[str, str]:
        """The tensors in the order in which `matmul` takes them."""
        return self.statement.operands

    def algorithm(self, name: str, source: str = "", summary: str = "") -> Algorithm:
        """Return the algorithm that these loops describe.

        Parameters
        ----------
        name : str
            Its name.
        source, summary : str
            Publication and description, for `--list`.

        Returns
        -------
        Algorithm
            The algorithm, to be registered.

        Raises
        ------
        AlgorithmError
            If loops are not distributed, or an index other than that of the loop in time is divided.
        """
        if not self.loops.work:
            _refuse(
                "algorithm", "loops that are not distributed", "say which axes share them out: distribute(m=…, n=…)"
            )
        for index in self.loops.cuts:
            if index != self.walked:
                rule = f"the loop in time is {self.walked}; reorder({index!r}), or divide that"
                _refuse("divide", index, rule)
        placed, work = self.placed, self.placed.work
        mine = Layout(tuple(tuple(Level((axis,)) for axis in work.get(dim, ())) for dim in "mn"))
        is_here = "k" not in work and placed.placed("C", placed.any_mesh).split_replicas(placed.any_mesh) == mine
        algorithm = Algorithm(
            name, source, summary, stationary("C") if is_here else placed_work(_cuts(work), len(self.axes)),
            cast(Literal["m", "n", "k"], placed.over), order="rotated" if self.rotated else "plain", rotate_by=self.by,
            result="here" if is_here else "reduce", placements=placed.placements, also_accepts=placed.also_accepts,
            staged_to=placed.staged_to, granularity=self._grains, grouped="".join(sorted(self.levels)),
            prefetch_all="".join(x for x in sorted(self.levels) if x not in placed.chunked),
        )
        return replace(algorithm, form=one_sided(algorithm)) if algorithm.grouped else algorithm

    row = Renamed("algorithm")

    @property
    def placed(self) -> PlacedLoops:
        """Return the placements that these loops need for their operands."""
        dims = dict(zip(self.statement.indices, DIMS, strict=True))
        chunked = "".join(x for x in sorted(self.levels) if self._depth(x))
        work = {dims[index]: axes for index, axes in self.loops.work.items()}
        return PlacedLoops(
            self.notations, self.statement.transposed, self.axes, work, dims[self.walked], self.by, chunked
        )

    @property
    def _grains(self) -> Grains:
        """Return how the loop in time is cut into the pieces of A, B and C that move at once."""
        cuts = self.loops.cuts.get(self.walked, ()) or (OWNERS,)
        a, b, c = (cuts[: self._depth(x)] or cuts for x in "ABC")
        return a, b, c

    def _depth(self, x: str) -> int:
        """Within how many cuts of the loop in time an operand moves; 0 if it moves whole."""
        outer, level = self.loops.outer(self.walked), self.levels.get(x, "")
        return outer.index(level) + 1 if level in outer else max(1, len(outer)) if level == self.walked else 0

    # -- as text ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return str(self._nest)

    def pseudocode(self) -> str:
        """Nested for lines: `@parallel` over ranks, `load` where a tile is fetched, `add` where a sum goes home."""
        return self._nest.pseudocode()

    @property
    def _nest(self) -> Nest:
        loops, extents = self.loops, self.loops.extents
        turned = loops.local(self.rotated)[0] if self.rotated else ""
        by = ", ".join(loops.over_axes(self.by))
        nested = tuple(
            Loop(f"{name}s" if name == turned else name, extents[name], name in loops.distributed, *self._moved(name))
            for name in (*loops.distributed, *self.order)
        )
        rotated = [f"rotate({turned}, {{{by}}}, {turned}s)"] if turned else []
        return Nest(str(self.statement), nested, (*loops.relations, *rotated))

    def _moved(self, loop: str) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Return the tiles loaded at the head of a loop, and those added at its end."""
        loads: list[tuple[str, str]] = []
        adds: list[tuple[str, str]] = []
        levels = (*self.loops.distributed[-1:], *self.loops.outer(self.walked))
        for x in sorted(self.levels):
            depth, access = self._depth(x), self.statement.access[x]
            if loop == levels[depth]:
                sides = (self.loops.tile(each, depth * (each == self.walked)) for each in (access.rows, access.cols))
                is_sum = x == "C" and self.statement.contracted_index in self.loops.work
                (adds if is_sum else loads).append((access.name, f"[{', '.join(sides)}]"))
        return tuple(loads), tuple(adds)

    # -- loops by name ----------------------------------------------------------------------------

    @property
    def walked(self) -> str:
        """The index of the loop in time."""
        return self.over or self.statement.contracted_index

    def _cut(self, word: str, loop: str, cut: Cut) -> Loops:
        """Return the innermost loop of an index cut in two."""
        index = next((each for each in self.statement.indices if loop in (each, self.loops.innermost(each))), loop)
        if loop in self.loops.distributed or any(loop in self.loops.outer(each) for each in self.statement.indices):
            _refuse(word, loop, "it is cut already; what can be cut further is the loop within")
        cuts, old = self.loops.cuts.get(self._index(word, index), ()), self.loops.innermost(index)
        if cut == OWNERS and cuts:
            _refuse(word, f"{loop} without parts", "where owners change is the first cut of a loop")
        at = self.order.index(old)
        order = (*self.order[:at], f"{old}o", f"{old}i", *self.order[at + 1 :])
        grown = replace(self.loops, cuts={**self.loops.cuts, index: (*cuts, cut)})
        return replace(self, loops=grown, order=order)._distinct(word)._hoisted()

    def _hoisted(self) -> Loops:
        return self.reorder(*self.loops.outer(self.walked)) if self.walked in self.levels.values() else self

    def _distinct(self, word: str) -> Loops:
        """These loops, if each has a name of its own."""
        loops = (*self.loops.distributed, *self.order)
        names = [*loops, *(index for index in self.statement.indices if index not in loops)]
        if same := {name for name in names if names.count(name) > 1}:
            _refuse(word, f"an index called {min(same)}", "a loop would be called so too; call the index otherwise")
        return self

    def _named(self, word: str, axes: Sequence[str]) -> tuple[str, ...]:
        """`axes`, if they are axes of the mesh, each once."""
        is_list = isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes)
        if not is_list or not axes or not set(axes) <= set(self.axes) or len(set(axes)) < len(axes):
            _refuse(word, repr(axes), f"the notations are for the axes {', '.join(self.axes)}, each named once")
        return tuple(axes)

    def _index(self, word: str, name: str) -> str:
        if name not in self.statement.indices:
            _refuse(word, repr(name), f"the loops are {', '.join(self.statement.indices)}")
        return name

    def _outermost(self, loop: str) -> str:
        """Return a local loop, or the first one of an index."""
        if loop in self.order:
            return loop
        return self.loops.local(self._index("reorder", loop))[0]


def _cuts(work: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{dim}→({','.join(axes)})" for dim, axes in work.items())


def _refuse(word: str, got: str, rule: str) -> NoReturn:
    raise AlgorithmError(f"{word}: got {got}; {rule}")


# -- the algorithms that the paper writes so ------------------------------------------------------

BLOCKS = product(A="xy->xy", B="xy->xy", C="xy->xy")  # two-dimensional blocks of all three
SUMMA = BLOCKS.distribute(m="i", n="j").divide("k").reorder("k").communicate("A", "B", at="k")  # as `summa_c`
CANNON = SUMMA.rotate("k", by=("i", "j"))  # as `cannon` on blocks that lie plain, which are skewed first
PUMMA = SUMMA.rotate("k", by=("i",))  # as `pumma`
