"""The first plan whose memory fits, found without making those that cannot.

What a plan's matrices take is known before it is made, and what narrower panels take follows from wide ones. So a limit
that is out of reach is refused after a few cheap looks, and one that is tight costs little more than its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from math import ceil, prod
from typing import TYPE_CHECKING

from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError, MemoryLimitError
from rma_mm.policy.planner.candidates import NO_PUSHES, Candidate, Request, placed_problem
from rma_mm.policy.planner.preference import EXCLUDED, TWO_SIDED, acts_alone
from rma_mm.runtime.execution.footprint import adds_elsewhere, all_ops, peak_bytes, scratch_used, standing_bytes
from rma_mm.runtime.execution.operands import Operands, frame_dtype
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.algorithm import DIMS, PlacedProblem
from rma_mm.schedule.lowering.decisions import LONGEST, LoweringDecisions
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import Op, Slot
from rma_mm.schedule.schedule import Schedule, remembered
from rma_mm.windows.hosts.shm_limits import memory_free
from rma_mm.windows.waiting import largest

if TYPE_CHECKING:
    from mpi4py import MPI

WIDTHS, DEPTHS = (1024, 256, 64, 16), (2, 1, 0)
"""Panel widths and prefetch depths, the hungriest first: the first that fits the memory limit is taken."""
READ_AT_ONCE = 2**22
"""Elements of a panel of A and one of B together, as wide as they are made where they come from files."""
FAST_PIECES = 8  # as many multiply-adds may a Multiply have that Strassen's algorithm cuts: 3 s of one core
PANELS = 512
"""A rank's panels, those of all tasks that may fall to it, up to which they are made narrower to save memory."""
CHECKED = 2**30  # bytes of all ranks from which on a product is compared with the memory that is free
WORK = 256  # panels that are looked at, in all, to say how much the leanest plan needs


def memory_trials(
    mesh: Mesh, operands: Operands, request: Request, found: list[Candidate], able: list[Candidate]
) -> list[MemoryTrial]:
    """Return a product by each candidate that can serve. Collective over all of the mesh.

    found: all candidates; able: those of them that may be taken.
    """
    able = [each for each in able if not each.rejected and each.layouts is not None]
    trials = [MemoryTrial(mesh, operands, request, found, each) for each in able]
    if operands.options.memory_limit is not None:
        for trial, least in zip(trials, largest(mesh.comm, [trial.standing for trial in trials]), strict=True):
            trial.least = dict.fromkeys(trial.tunings, least)
    return trials


def fit_memory(trials: list[MemoryTrial], limit: int | None) -> PlanChoice:
    """Choose the first candidate and tuning whose memory fits the limit. Collective over all of the mesh.

    limit: bytes, at most the limit that the trials were made with. What is found out of them is kept for other limits.

    Raises MemoryLimitError with what the leanest plan needs, AlgorithmError if none does as it is asked for.
    """
    for trial in trials:
        chosen = trial.first(limit)
        if chosen is not None:
            return chosen
    name, need, is_exact = _leanest(trials)
    what = f"the leanest plan ({name}) needs {need}" if is_exact else f"every plan needs at least {need}"
    what += f", {need - (limit or 0)} more; raise the limit or use more ranks"
    raise MemoryLimitError(f"memory_limit: got {limit} bytes a rank; {what}", need * is_exact)


def require_homes(mesh: Mesh, operands: Operands) -> None:
    """Raise MemoryLimitError on every rank if the matrices that are yet to be made do not fit all nodes. Collective.

    To be asked before a product is planned: for so large matrices that alone takes long.
    """
    new = [x for x in (operands.a, operands.b, operands.c) if x.in_place is None]
    needed = sum(prod(x.shape) * x.dtype.itemsize for x in new)
    if needed < CHECKED:
        return
    told = mesh.comm.allgather(memory_free())
    left = {node: min(told[rank] for rank, each in enumerate(mesh.node_of) if each == node) for node in mesh.node_of}
    free, what = sum(each for each, _ in left.values()), left[0][1] if len(left) == 1 else "the nodes have free"
    if needed > free:
        raise MemoryLimitError(
            f"memory: the matrices of the product need {needed} bytes, and {what} {free}, {needed - free} too few; "
            f"use more nodes, or smaller matrices"
        )


def require_memory(mesh: Mesh, choice: PlanChoice) -> None:
    """Raise MemoryLimitError on every rank if the ranks of a node need more memory than is free there. Collective.

    Else the system would end a rank without a word, after a long time. Operands that are there count no more.
    """
    if choice.peak_bytes * mesh.size < CHECKED:
        return
    given, schedule = choice.spec, choice.schedule
    own = peak_bytes(mesh, schedule, given)
    for x, operand in (("A", given.a), ("B", given.b), ("C", given.c)):
        if operand.in_place is not None and mesh.is_member:
            own -= schedule.in_memory(x, mesh.rank) * operand.dtype.itemsize
    require_free(mesh.comm, mesh.node_of, own)


def require_free(comm: MPI.Intracomm, node_of: Sequence[int], own: int) -> None:
    """The same for the given number of bytes that this rank needs. Collective."""
    told = comm.allgather((own, memory_free()))
    for node in dict.fromkeys(node_of):
        mates = [rank for rank, each in enumerate(node_of) if each == node]
        needed, (free, what) = sum(told[rank][0] for rank in mates), min(told[rank][1] for rank in mates)
        if needed > free:
            raise MemoryLimitError(
                f"memory: the product needs {needed} bytes on node {node} ({len(mates)} ranks), and {what} {free}, "
                f"{needed - free} too few; use more nodes, smaller matrices or a memory limit"
            )


@dataclass
class MemoryTrial:
    """A candidate in each of its tunings, with the memory that they are known to need."""

    mesh: Mesh
    operands: Operands
    request: Request
    candidates: list[Candidate]
    candidate: Candidate
    problem: PlacedProblem = field(init=False)
    tunings: list[Tuning] = field(init=False)
    standing: int = field(init=False)  # bytes of this rank's matrices, whatever the tuning
    least: dict[Tuning, int] = field(init=False, default_factory=dict)
    """Bytes that a tuning needs at least, on the fullest rank."""
    seen: set[Tuning] = field(init=False, default_factory=set)  # tunings that were looked at: they need just that
    unfit: str = field(init=False, default="")  # why its operations are none that may be done; empty if they are

    def __post_init__(self) -> None:
        layouts, width = self.candidate.layouts, self.candidate.width
        assert layouts is not None
        self.problem = placed_problem(self.request, layouts, self.candidate.copied)
        dim = DIMS.index(self.candidate.algorithm.over)
        grain = self.problem.chunk_multiple(dim)
        if self.problem.files:
            width = max(width, READ_AT_ONCE // max(1, sum(self.problem.shape) - self.problem.shape[dim]))
        width, *others = (max(grain, each // grain * grain) for each in (width, *WIDTHS))
        others += [each for each in WIDTHS if each < grain]  # by which chunks are read several times
        schedule = lower(self.candidate.algorithm, self.problem, self.tuning(width))
        self.standing = standing_bytes(self.mesh, schedule, self.operands)
        self.walked = self.problem.shape[dim]
        self.tasks = schedule.pool.tasks if schedule.pool else 1
        narrower = [each for each in dict.fromkeys(others) if each < width and self.panels(each) <= PANELS]
        self.tunings = [self.tuning(width, depth) for depth in dict.fromkeys((Tuning.of(width).depth, *DEPTHS))]
        self.tunings += [self.tuning(each, depth) for each in narrower for depth in DEPTHS]

    def tuning(self, width: int, depth: int = DEPTHS[-1]) -> Tuning:
        """Return a tuning; Strassen's algorithm saves more of longer products."""
        return Tuning(width, depth, LONGEST * (FAST_PIECES if self.operands.options.fast else 1))

    @cached_property
    def reads(self) -> LoweringDecisions:
        return LoweringDecisions.of(self.candidate.algorithm, self.problem)

    def panels(self, width: int) -> int:
        return self.tasks * ceil(self.walked / width)

    def first(self, limit: int | None) -> PlanChoice | None:
        """Return the hungriest tuning that fits, None if none does. Collective."""
        for tuning in self.tunings:
            if limit is not None and self.least[tuning] <= limit and tuning.width not in {t.width for t in self.seen}:
                self.look(self.tuning(tuning.width))  # it says the most of all the others
            if limit is not None and self.least[tuning] > limit:
                continue
            schedule, is_ordered = self.look(tuning)
            if self.unfit:
                return None
            if limit is None or self.least[tuning] <= limit:
                return PlanChoice(
                    self.operands, self.request, self.candidates, self.candidate, self.problem, schedule, tuning,
                    self.least[tuning], is_ordered, self.mesh.granted(self.mesh.flavour),
                )
        return None

    def look(self, tuning: Tuning) -> tuple[Schedule, bool]:
        """Generate a schedule and record its memory, and whether its sums have a fixed order. Collective."""
        schedule = remembered(lower(self.candidate.algorithm, self.problem, tuning))
        ops = all_ops(schedule, self.mesh)
        scratch = scratch_used(self.mesh, schedule, self.operands, ops)
        others = [each for each in self.tunings if each.width <= tuning.width and each.depth >= tuning.depth]
        far = self.far(schedule, ops)
        bounds = [self.standing + far * each.width // tuning.width for each in others]
        pushes = adds_elsewhere(ops, self.mesh.rank)
        alone = self.request.prefer == TWO_SIDED and acts_alone(ops, self.mesh.rank)
        need, pushed, excluded, *most = largest(self.mesh.comm, [self.standing + scratch, pushes, alone, *bounds])
        for each, bound in zip(others, most, strict=True):
            if each not in self.seen:
                self.least[each] = max(bound, self.least.get(each, 0))
        self.least[tuning] = need
        self.seen.add(tuning)
        self.unfit = EXCLUDED if excluded else ""
        if pushed and not self.request.pushes:
            self.unfit = f"accumulates here, and {NO_PUSHES}"
        elif pushed and self.operands.needs_order:
            self.unfit = "accumulates in no fixed order here, which deterministic=True excludes"
        return schedule, not pushed

    def far(self, schedule: Schedule, ops: list[Op]) -> int:
        """Return the bytes of this rank's scratch that panels of any width divide: sums, and data out of reach.

        What is in reach may need none of it where panels are narrower, as then it lies dense more often.
        """
        rank, reads = self.mesh.rank, self.reads
        slots: Counter[Slot] = Counter()
        for op in ops:
            for owner, dst in [(move.source, move.dst) for move in op.moves(rank) if move.dst]:
                x = dst.operand
                is_far = x != "C" and not reads.reaches(rank, owner, x)
                if isinstance(dst.buffer, Slot) and dst.rank == rank and is_far:
                    slots[dst.buffer] += dst.region.size
            for slot in op.slots:
                if slot.name[0] == "C" and not slot.group:
                    slots[slot] = slot.region.size
        frames: Counter[str] = Counter()
        for slot, size in slots.items():
            frames[slot.frame] = max(frames[slot.frame], min(size, slot.region.size))
        return sum(size * frame_dtype(self.operands, schedule, frame).itemsize for frame, size in frames.items())


def _leanest(trials: list[MemoryTrial]) -> tuple[str, int, bool]:
    """Return the candidate that needs least memory, how much, and whether that is exact or a lower bound. Collective.

    Looks at the most promising tuning time and again, until that is one it has looked at, or has looked at enough.
    """
    work = 0
    while True:
        able = [(n, trial) for n, trial in enumerate(trials) if not trial.unfit]
        if not able:
            raise AlgorithmError(f"{trials[-1].candidate.algorithm.name}: {trials[-1].unfit}")
        need, is_guess, n, at = min(
            (trial.least[each], each not in trial.seen, n, -at)
            for n, trial in able
            for at, each in enumerate(trial.tunings)
        )
        trial, tuning = trials[n], trials[n].tunings[-at]
        if not is_guess or work > WORK:
            return trial.candidate.algorithm.name, need, not is_guess
        wide = trial.tuning(trial.candidate.width)
        tuning = tuning if wide in trial.seen else wide
        work += trial.panels(tuning.width)
        trial.look(tuning)
