"""The candidates of one case against each other: all of them checked and timed, then chosen and best head to head."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from bench.policy.cases import ANY, OWN, Case
from bench.policy.operands import Matrices, whole_matrices
from rma_mm.errors import RmaError
from rma_mm.geometry.mesh import grids
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels.threads import set_threads
from rma_mm.policy.planner.candidates import Candidate
from rma_mm.runtime.execution.footprint import all_ops, merged
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products.prices import best_grid

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.geometry.layout import Layout

LOST = 2.5
"""Times the fastest: who took longer is not timed again."""
LEAST_SAMPLE = 3e-3
"""Seconds that a sample should take at least; so many products are timed together."""
MOST_PRODUCTS = 20
"""Products in a sample at most."""
DUEL = 0.5
"""Seconds that go into a head-to-head, where its least rounds take less."""
MOST_ROUNDS = 21
"""Rounds of a head-to-head at most."""


@dataclass(frozen=True)
class Pace:
    """How often everything is timed."""

    rounds: int = 3
    """Of all candidates, before and behind which those that have lost are left out."""
    duel: int = 7
    """Of chosen and best, at least."""
    direct: int = 9
    """Of `matmul` that chooses and `matmul` that is told."""


QUICK = Pace(1, 3, 3)


@dataclass(eq=False)
class Contender:
    """One candidate, prepared."""

    candidate: Candidate
    place: int
    """In the planner's own order on its mesh, the cheapest first."""
    mesh: rma_mm.Mesh
    matrices: Matrices
    is_chosen: bool
    plan: rma_mm.Plan | None = None
    operands: tuple[rma_mm.DistMatrix, ...] = ()
    error: str | None = None
    same_as: int | None = None
    """The contender whose operations are exactly these."""
    right: bool | None = None
    samples: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a user would name."""
        return self.candidate.algorithm.name

    @property
    def seconds(self) -> float:
        """Of one product: the median, of an even number of samples the lower one, for noise only ever adds."""
        return median_low(self.samples)

    def run(self, times: int = 1) -> None:
        """Multiply. Collective."""
        assert self.plan is not None
        a, b, c = self.operands
        for _ in range(times):
            self.plan.execute(a, b, out=c)

    def prediction(self, plan: rma_mm.Plan) -> dict[str, Any]:
        """What the plan is expected to take, of what that consists, and what it settled beside row and placements."""
        priced = plan.choice.chosen
        return {
            "predicted": plan.predicted_seconds, "bill": asdict(priced.cost), "correction": priced.correction,
            "width": plan.choice.tuning.width, "copied": priced.copied,
        }

    @property
    def priced_words(self) -> float:
        """The words that all ranks move, by its closed form."""
        return (self.plan.choice.chosen if self.plan else self.candidate).traffic.words

    def as_json(self) -> dict[str, Any]:
        """All that is known of it."""
        layouts = self.candidate.layouts or ()
        return {
            "algorithm": self.name, "mesh": str(self.mesh.grid), "place": self.place, "chosen": self.is_chosen,
            "layouts": dict(zip("ABC", map(str, layouts), strict=False)),
            **(self.prediction(self.plan) if self.plan else {"predicted": None}),
            "seconds": self.seconds if self.samples else None, "samples": self.samples,
            "right": self.right, "same_as": self.same_as, "error": self.error, "priced_words": self.priced_words,
            **self.facts,
        }


class Contest:
    """One case on the ranks at hand. Collective in all it does."""

    def __init__(self, case: Case, comm: MPI.Intracomm, pace: Pace) -> None:
        self.case, self.comm, self.pace = case, comm, pace
        self.meshes: list[rma_mm.Mesh] = []
        self.contenders: list[Contender] = []
        self.planning = 0.0
        """Seconds in which the planner chose, on the slowest rank."""
        self.products = 1
        """In a sample."""
        self.whole = whole_matrices(case, comm)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, RmaError):
            return  # the other ranks may be anywhere
        for contender in self.contenders:
            contender.matrices.close()
            contender.operands = ()
        for mesh in self.meshes:
            mesh.close()

    def run(self) -> dict[str, Any]:
        """Everything there is to know of the case."""
        own = own_grid(self.case, self.comm)
        for grid in dict.fromkeys([own, *(grids(self.case.ranks, 2) if self.case.mesh == ANY else [])]):
            self.enter(grid, grid == own)
        if self.case.further:
            known = {contender.name.partition(":")[0] for contender in self.contenders}
            self.enter(measure.grid(self.case.further), False, known)
        if self.meshes[0].num_nodes != self.case.nodes:
            return {"skipped": f"this MPI shows {self.meshes[0].num_nodes} nodes, not {self.case.nodes}"}
        self.contenders.sort(key=lambda contender: not contender.is_chosen)  # it stands for those that are the same
        self.name()
        self.find_same()
        self.check()
        self.race()
        return {"planning": self.planning, "products": self.products, **self.verdict()}

    # -- who competes -----------------------------------------------------------------------------

    def enter(self, grid: tuple[int, ...], is_own: bool, but: Container[str] = ()) -> None:
        """Ask the planner on a mesh of this shape. but: algorithms that do not compete."""
        mesh = rma_mm.Mesh(grid, self.comm, window=self.case.window, speeds=self.case.speeds)
        self.meshes.append(mesh)
        set_threads(mesh.threads)  # else it is done anew for each product
        matrices = Matrices(self.case, mesh, self.whole)
        a, b, c = (parse_layout(text, mesh.grid) if text else None for text in self.case.layouts)
        start = time.perf_counter()
        auto = rma_mm.plan(self.operand("A", a), self.operand("B", b), mesh, layout=c)
        took = time.perf_counter() - start
        for place, candidate in enumerate(auto.choice.candidates):
            is_known = candidate.algorithm.name.partition(":")[0] in but
            if not candidate.rejected and candidate.layouts is not None and not is_known:
                is_chosen = is_own and candidate is auto.choice.chosen
                plan = auto if is_chosen else None
                self.contenders.append(Contender(candidate, place, mesh, matrices, is_chosen, plan))
        if is_own:
            (self.planning,) = measure.slowest(self.comm, [took])
        else:
            auto.close()

    def operand(self, operand: str, layout: Layout | None) -> Operand:
        """A or B as the planner is told of it."""
        mine = operand in self.case.own
        return Operand(self.case.extent(operand), np.dtype(self.case.dtype), layout, False if mine else None)

    def name(self) -> None:
        """Make a plan of every candidate by naming it on its placements."""
        for contender in self.contenders:
            if contender.plan is not None:
                continue
            assert contender.candidate.layouts is not None
            a, b, c = contender.candidate.layouts
            given = self.operand("A", a), self.operand("B", b)
            try:
                contender.plan = rma_mm.plan(*given, contender.mesh, layout=c, algorithm=contender.name)
            except RmaError as error:  # the same one on every rank
                contender.error = f"{type(error).__name__}: {error}"

    def find_same(self) -> None:
        """Let one contender stand for all that have its operations, on every rank."""
        programs = [None if contender.plan is None else program(contender.plan) for contender in self.contenders]
        mine = [
            {at for at in range(index) if found is not None and programs[at] == found}
            for index, found in enumerate(programs)
        ]
        for contender, *sets in zip(self.contenders, *self.comm.allgather(mine), strict=True):
            if common := set.intersection(*sets):
                contender.same_as = min(common)
                assert contender.plan is not None
                contender.facts["movement"] = self.movement(contender)

    def movement(self, contender: Contender) -> dict[str, str]:
        """How A, B and C move, on any rank."""
        assert contender.plan is not None
        return merged(self.comm.allgather(contender.plan.movement))

    # -- measuring --------------------------------------------------------------------------------

    def racing(self) -> list[Contender]:
        """Who is timed."""
        return [x for x in self.contenders if x.plan is not None and x.same_as is None and x.right is not False]

    def check(self) -> None:
        """Multiply once by every plan, and hold the result against NumPy's, element by element."""
        for contender in self.racing():
            assert contender.plan is not None
            contender.operands = contender.matrices.of(contender.plan)
            contender.plan.adapt = False  # another plan in the midst of it would be timed, and making it
            c = contender.operands[2]
            c.tile[...] = np.nan
            contender.run()
            right = contender.matrices.holds_product(c)
            words = contender.plan.words
            counts = (words.words_intra, words.words_inter, words.messages)
            told = self.comm.allgather((right, counts, contender.plan.peak_bytes))
            contender.right = all(each[0] for each in told)
            intra, inter, messages = (sum(column) for column in zip(*(each[1] for each in told), strict=True))
            contender.facts = {
                "movement": self.movement(contender),
                "words": {"intra_node": intra, "inter_node": inter}, "messages": messages, "peak_bytes": told[0][2],
            }

    def race(self) -> None:
        """Time all contenders, and those that are not beaten yet again."""
        racing = self.racing()
        self.time(racing, 1)
        fastest = min((x.seconds for x in racing), default=1.0)
        self.products = min(MOST_PRODUCTS, max(1, ceil(LEAST_SAMPLE / fastest)))
        self.time(racing, 1)  # all of them twice: a single sample may have been disturbed
        fastest = min((x.seconds for x in racing), default=1.0)
        self.time([x for x in racing if x.seconds <= LOST * fastest], self.pace.rounds - 1)

    def time(self, contenders: Sequence[Contender], rounds: int) -> None:
        """So many more samples of each, interleaved."""
        calls = {str(at): partial(x.run, self.products) for at, x in enumerate(contenders)}
        for found, x in zip(self.interleaved(calls, rounds, 0).values(), contenders, strict=True):
            x.samples += [took / self.products for took in found]

    def interleaved(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int
    ) -> dict[str, list[float]]:
        """Samples of every call; without a pause where ranks have one thread each, and none goes on spinning."""
        settle = measure.SETTLE if any(mesh.threads > 1 for mesh in self.meshes) else 0
        return measure.interleaved(self.comm, calls, rounds, warmup, settle)

    # -- comparing --------------------------------------------------------------------------------

    def verdict(self) -> dict[str, Any]:
        """The regret, and what it rests on; what is chosen, best and the other one stands by its number."""
        record: dict[str, Any] = {"contenders": [contender.as_json() for contender in self.contenders]}
        racing = self.racing()
        chosen = next((x for x in racing if x.is_chosen), None)
        if chosen is None:
            return {**record, "error": "what was chosen could not be timed"}
        other = min((x for x in racing if x is not chosen), key=lambda x: x.seconds, default=None)
        duel = self.duel(chosen, other) if other else {}
        ratio = median(duel["chosen"]) / median(duel["other"]) if other else None
        lost = other is not None and ratio is not None and ratio > 1 and other.seconds < chosen.seconds
        best = other if lost and other else chosen
        assert chosen.plan is not None
        numbers = {"chosen": chosen, "other": other, "best": best}
        record |= {name: self.contenders.index(x) if x else None for name, x in numbers.items()}
        record |= {"duel": duel, "ratio": ratio, "regret": ratio if lost else 1.0, **self.path(chosen)}
        return record | ({"direct": self.directly(chosen, best)} if self.case.direct else {})

    def duel(self, chosen: Contender, other: Contender) -> dict[str, list[float]]:
        """Samples of the chosen one and of the best other one, in turn."""
        took = self.products * (chosen.seconds + other.seconds)
        rounds = min(MOST_ROUNDS, max(self.pace.duel, int(DUEL / took))) if self.pace != QUICK else self.pace.duel
        calls = {name: partial(x.run, self.products) for name, x in (("chosen", chosen), ("other", other))}
        found = self.interleaved(calls, rounds | 1, 1)
        return {name: [took / self.products for took in samples] for name, samples in found.items()}

    def path(self, chosen: Contender) -> dict[str, Any]:
        """Whether what was chosen reaches memory as it should there: in place, or without waiting for its owner.

        faster: seconds of the fastest contender that does, over those of the chosen one which does not.
        """
        flavour = chosen.mesh.window_flavour
        exposed = "ABC" if flavour == "created" else self.case.own
        if not exposed and (flavour != "shared" or self.case.nodes > 1):
            return {"path": None}

        def is_so(contender: Contender) -> bool:
            moved = contender.facts["movement"]
            return waits_for_nobody(moved, exposed) if exposed else in_place(moved)

        fit = [x.seconds for x in self.racing() if is_so(x)]
        faster = None if is_so(chosen) or not fit else min(fit) / chosen.seconds
        return {"path": "no wait" if exposed else "in place", "kept": is_so(chosen), "faster": faster}

    def directly(self, chosen: Contender, best: Contender) -> dict[str, Any]:
        """`matmul` that chooses for itself against `matmul` that is told what is best here."""
        a, b, _ = chosen.operands
        assert best.candidate.layouts is not None
        multiply = partial(rma_mm.matmul, a, b, chosen.mesh)
        calls = {"auto": multiply, "named": partial(multiply, algorithm=best.name, layout=best.candidate.layouts[2])}
        samples = self.interleaved(calls, self.pace.direct, 2)
        seconds = measure.medians(samples)
        return {"named": best.name, "samples": samples, "ratio": seconds["auto"] / seconds["named"]}


def own_grid(case: Case, comm: MPI.Intracomm) -> tuple[int, ...]:
    """The mesh of a case, or the one that the planner would take."""
    if case.mesh not in (OWN, ANY):
        return measure.grid(case.mesh)
    return best_grid(comm, case.shape, case.dtype, speeds=case.speeds)


def program(plan: rma_mm.Plan) -> tuple[object, ...]:
    """What this rank does and holds; equal for plans between which there is no difference."""
    schedule, rank = plan.schedule, plan.mesh.rank
    homes = {name: schedule.home(name, rank) for name in schedule.homes}
    return all_ops(schedule, plan.mesh), homes, plan.choice.request.in_place, plan.node_scratch is None, plan.kernel


def in_place(movement: dict[str, str]) -> bool:
    """Whether A and B are only ever read where they lie."""
    return all(set(movement[x].split("+")) <= {"view", "here"} for x in "AB")


def waits_for_nobody(movement: dict[str, str], exposed: str) -> bool:
    """Whether no one-sided transfer goes to memory that its owner must serve."""
    return not any({"get", "accumulate"} & set(movement[x].split("+")) for x in exposed)
