"""A schedule as a picture: who multiplies what, who moves what to whom, turn by turn. As text, for small meshes.

Everything is read off the operations. A *turn* of a rank is a run of Multiplies of one step; the picture shows the
n-th turns of all ranks together, though nothing makes ranks wait for each other. A transfer stands at the turn that
first uses what it brings, wherever it was issued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cache
from itertools import zip_longest
from textwrap import wrap

from rma_mm.classes import dataclass
from rma_mm.errors import count_of
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.algorithm import DIMS, OPERAND_DIMS
from rma_mm.schedule.lowering.boxes import disjoint
from rma_mm.schedule.ops import Barrier, Multiply, Op, Ref, Shift, TransferSpec, counted
from rma_mm.schedule.schedule import Schedule, expand

RANKS, TURNS = 9, 12  # the largest schedule that is drawn as text
WIDTH = 100  # columns of the text
SIGNS = {
    "shift": "←", "broadcast": "⇐", "all-gather": "⇐", "get": "get", "view": "view",
    "accumulate": "→", "reduce": "⇒", "reduce-scatter": "⇒",
}
"""Signs between a block and the other rank."""
LEGEND = (
    "A12 is part 1 of the rows and part 2 of the columns of A; 0+1 both parts, * all, a:b indices.",
    "Arrives before, from (rank): ← shifted, ⇐ broadcast or gathered, get pulled, view read in place.",
    "Leaves after, to (rank): → added to its owner's C one-sidedly, ⇒ summed up by a reduction.",
)


@dataclass
class Cell:
    """Activity of one rank in a scene."""

    arrives: list[TransferSpec] = field(default_factory=list)
    products: list[Multiply] = field(default_factory=list)
    leaves: list[TransferSpec] = field(default_factory=list)


@dataclass
class Scene:
    """Activity of all ranks in one step, or before the first, or after the last."""

    title: str
    barriers: int  # barriers just before it
    cells: list[Cell]  # by rank


class Labels:
    """Names of blocks, by the parts into which all the placements together cut m, n and k."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.extents = [0, 0, 0]  # (m, n, k)
        spans: list[list[Span]] = [[], [], []]
        for name, home in schedule.homes.items():
            boxes = [schedule.home(name, rank) for rank in schedule.mesh.ranks]
            for side, dim in enumerate(self.dims(name)):
                spans[dim] += [box[side] for box in boxes if box]
                self.extents[dim] = home.shape[side]
        self.parts = [sorted(disjoint(found), key=lambda part: part.start) for found in spans]
        """The numbered parts of m, n and k."""
        self.part = cache(self._part)

    def dims(self, name: str) -> tuple[int, int]:
        return OPERAND_DIMS[name[0] if self.schedule.shape else "C"]

    def _part(self, dim: int, span: Span) -> str:
        """`*`, the numbers of whole parts, or else indices."""
        if not span:
            return "-"
        if len(span) == self.extents[dim]:
            return "*"
        met = [n for n, part in enumerate(self.parts[dim]) if part & span]
        if sum(len(self.parts[dim][n]) for n in met) != len(span):
            return str(span)
        is_run = len(met) > 2 and met[-1] - met[0] == len(met) - 1
        return f"{met[0]}…{met[-1]}" if is_run else "+".join(map(str, met))

    def block(self, name: str, region: Region) -> str:
        """Return the name of a box of the matrix `name`, as A12 or A(1,0+1)."""
        rows, cols = (self.part(dim, span) for dim, span in zip(self.dims(name), region, strict=True))
        return f"{name}{rows}{cols}" if len(rows) == len(cols) == 1 else f"{name}({rows},{cols})"

    def ref(self, ref: Ref) -> str:
        return self.block(ref.operand, ref.region)

    def product(self, op: Multiply) -> str:
        """Return a Multiply, with its indices of k on one line."""
        c, a, b = map(self.ref, (op.c, op.a, op.b))
        b, lower = b + "ᵀ" * op.b_is_transposed_a, "  lower half" * op.half
        return f"{c} {':=' if op.first else '+='} {a}·{b}  k\N{NO-BREAK SPACE}{op.a.region[1]}{lower}"

    def move(self, move: TransferSpec, rank: int) -> str:
        other = move.source if move.to == rank else move.to
        return f"{self.ref(move.ref)} {SIGNS[move.kind]} {place(self.schedule.mesh, other)}"

    def homes(self, rank: int) -> Iterator[tuple[str, Region]]:
        """(words, box) for each home of a rank."""
        for name, home in sorted(self.schedule.homes.items()):
            region = self.schedule.home(name, rank)
            summand = " (a summand)" if home.layout.partial else ""
            box = f"{self.block(name, region)}  {' × '.join(map(str, region))}{summand}"
            yield box if region else f"{name}  nothing", region


def place(mesh: MeshShape, rank: int) -> str:
    return f"({','.join(map(str, mesh.coords(rank).values()))})"


def layers(mesh: MeshShape) -> list[tuple[str, list[list[int]]]]:
    """(title, rows of ranks) for each plane of the mesh that its first two axes span."""
    columns, *deeper = mesh.names[1:] or ("",)
    found = []
    for at in mesh.along(tuple(deeper), dict.fromkeys(mesh.names, 0)):
        title = ", ".join(f"{axis} = {at[axis]}" for axis in deeper)
        lines = [at] if not columns else list(mesh.along(mesh.names[:1], at))
        across = (columns,) if columns else mesh.names
        found.append((title, [[mesh.rank(each) for each in mesh.along(across, line)] for line in lines]))
    return found


def step_numbers(ops: Sequence[Op]) -> list[int]:
    """The turn, from 0, that each operation belongs to or comes after; −1 before the first."""
    turn, step = -1, None
    numbers = []
    for op in ops:
        if isinstance(op, Multiply):
            turn += op.step != step
            step = op.step
        elif op.adds or isinstance(op, Barrier) or (isinstance(op, Shift) and op.dst.operand == "C"):
            step = None
        numbers.append(turn)
    return numbers


def scenes(schedule: Schedule) -> list[Scene]:
    """Return the whole schedule; a pool's tasks dealt out in turn."""
    acts = [_Acts(expand(schedule, rank), rank) for rank in schedule.mesh.ranks]
    count = max(act.step_count for act in acts)
    found = []
    for at in (BEFORE, *range(count), AFTER):
        cells = [act.cells.get(at, Cell()) for act in acts]
        barriers = max(acts, key=lambda act: act.step_count).met(at, count)
        if 0 <= at < count or barriers or any(at in act.cells for act in acts):
            when = {BEFORE: "Before the first turn" if count else "Before", AFTER: "At last" if count else "Moves"}
            found.append(Scene(when.get(at, f"Step {at + 1} of {count}"), barriers, cells))
    return found


BEFORE, AFTER = -1, 10**9  # positions of operations that belong to no step


class _Acts:
    """The operations of one rank, by scene."""

    def __init__(self, ops: Sequence[Op], rank: int) -> None:
        self.rank = rank
        self.cells: defaultdict[int, Cell] = defaultdict(Cell)
        self.barriers: list[int] = []
        numbers = step_numbers(ops)
        self.first_use: dict[object, int] = {}
        for op, turn in zip(ops, numbers, strict=True):
            for ref in op.refs if isinstance(op, Multiply) else ():
                self.first_use.setdefault(ref.buffer, turn)
        for op, turn in zip(ops, numbers, strict=True):
            self.note(op, turn)

    @property
    def step_count(self) -> int:
        return 1 + max((at for at in self.cells if at < AFTER), default=BEFORE)

    def met(self, at: int, count: int) -> int:
        return sum(1 for turn in self.barriers if turn == at or (at == AFTER and turn >= count))

    def note(self, op: Op, turn: int) -> None:
        if isinstance(op, Multiply):
            self.cells[turn].products.append(op)
        elif isinstance(op, Barrier):
            self.barriers.append(max(turn + 1, self.step_count))
        for move in counted(op, self.rank):
            cell = self.cells[self.scene(move, turn)]
            if move.dst or move not in cell.arrives:  # what several products read in place is named once
                (cell.leaves if move.adds else cell.arrives).append(move)

    def scene(self, move: TransferSpec, turn: int) -> int:
        """The turn of a transfer: into a slot, its first use; into a home, before the product, or for C after it.

        Added to C: behind the turn that made it; summands of A and B: before the product. Read in place: where it is.
        """
        is_result = move.ref.operand == "C"
        if move.adds:
            return max(turn, 0) if is_result else BEFORE
        if isinstance(move.ref.buffer, str) and move.dst:
            return AFTER if is_result else BEFORE
        return self.first_use.get(move.ref.buffer, max(turn, 0)) if move.dst else turn


def lines_of(cell: Cell, rank: int, labels: Labels) -> list[str]:
    """Return a cell in words, in the order of time."""
    before = [labels.move(move, rank) for move in cell.arrives]
    after = [labels.move(move, rank) for move in cell.leaves]
    return [*before, *map(labels.product, cell.products), *after]


def heading(schedule: Schedule, labels: Labels) -> list[str]:
    """Return the headline: the product, its ranks, the parts that number blocks, and how tasks are handed out."""
    mesh = schedule.mesh
    shapes = {x: " × ".join(map(str, home.shape)) for x, home in schedule.homes.items()}
    product = "C ({C}) = A ({A}) · B ({B})" if schedule.shape else "A ({A}) is moved into C"
    lines = [f"Mesh {mesh}: {count_of(mesh.size, 'rank')}. {product.format(**shapes)}."]
    for name, parts in zip(DIMS, labels.parts, strict=True):
        numbered = [f"{n} = {part}" for n, part in enumerate(parts[:TURNS])]
        more = [f"… {len(parts) - 1}"] if len(parts) > TURNS else []
        lines += [f"Parts of {name}: {'; '.join([*numbered, *more])}"] * bool(parts)
    if schedule.pool:
        lines.append(
            f"{schedule.pool.tasks} tasks are claimed by fetch-and-add: which rank runs which is settled in the run. "
            "Here they are dealt out in turn."
        )
    return lines


def idle(schedule: Schedule, found: Sequence[Scene]) -> list[str]:
    """Return the ranks that multiply nothing, in words."""
    ranks = [rank for rank in schedule.mesh.ranks if not any(scene.cells[rank].products for scene in found)]
    names = " ".join(place(schedule.mesh, rank) for rank in ranks)
    return [f"These ranks multiply nothing: {names}"] if ranks and schedule.shape else []


def meeting(scene: Scene) -> list[str]:
    times = "" if scene.barriers == 1 else f", {scene.barriers} times in a row"
    return [f"All ranks meet at a barrier{times}."] if scene.barriers else []


def drawn(schedule: Schedule) -> str:
    """Return the schedule as text: where things lie, then a grid of the ranks for every turn.

    Of more than RANKS ranks or TURNS turns it says only how large it is; `page.page` draws those.
    """
    labels, mesh = Labels(schedule), schedule.mesh
    text = heading(schedule, labels)
    turns = max(max(step_numbers(expand(schedule, rank)), default=-1) + 1 for rank in mesh.ranks[:RANKS])
    if mesh.size > RANKS or turns > TURNS:
        size = f"{mesh.size} ranks and up to {turns} turns" if mesh.size <= RANKS else f"{mesh.size} ranks"
        text.append(f"Too large for text: {size}; it shows {RANKS} ranks and {TURNS} turns. A page of HTML shows more.")
        return "\n".join(_folded(text, WIDTH))
    found = scenes(schedule)
    text = _folded([*text, *LEGEND, *idle(schedule, found)], WIDTH)
    text += ["", "Where things lie", *_grid(mesh, [[words for words, _ in labels.homes(rank)] for rank in mesh.ranks])]
    for scene in found:
        cells = [lines_of(cell, rank, labels) for rank, cell in enumerate(scene.cells)]
        text += ["", *meeting(scene)]
        text += [scene.title, *_grid(mesh, cells)] if any(cells) else []
    return "\n".join(text)


def _folded(lines: Sequence[str], width: int) -> list[str]:
    """Return lines of at most `width` characters; continued lines are indented."""
    folded = [part for line in lines for part in wrap(line, width, subsequent_indent="  ")]
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in folded]


def _grid(mesh: MeshShape, cells: Sequence[list[str]]) -> list[str]:
    """Cells of text in the shape of the mesh, layer by layer; rows that are too long go on below."""
    planes = layers(mesh)
    across = len(planes[0][1][0])
    folded = [_folded(lines or ["–"], (WIDTH - 1) // min(across, 3) - 3) for lines in cells]
    names = [place(mesh, rank) for rank in mesh.ranks]
    width = 2 + max(len(line) for lines in [*folded, names] for line in lines)
    fit = -(-across // -(-across // ((WIDTH - 1) // (width + 1))))
    text = []
    for title, rows in planes:
        text += [title] * bool(title)
        text += _boxes([row[n : n + fit] for row in rows for n in range(0, across, fit)], names, folded, width)
    return text


def _boxes(rows: list[list[int]], names: Sequence[str], cells: Sequence[list[str]], width: int) -> list[str]:
    """Return rows of ranks as boxes with their names in the upper edge."""
    text = []
    across = max(map(len, rows))
    for n, row in enumerate(rows):
        left, cross, right = "├┼┤" if n else "┌┬┐"
        blank = [""] * (across - len(row))
        text.append(
            left + cross.join(f"─{name}".ljust(width, "─") for name in [*(names[r] for r in row), *blank]) + right
        )
        for lines in zip_longest(*(cells[rank] for rank in row), fillvalue=""):
            text.append("│" + "│".join(f" {line}".ljust(width) for line in [*lines, *blank]) + "│")
    return [*text, "└" + "┴".join(["─" * width] * across) + "┘"]
