"""A whole calibration: what there is to time here, and the machine that comes out of it. Collective throughout."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from math import log2
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import count_of
from rma_mm.flavours import DEFAULT
from rma_mm.kernels.choice.rates import processor
from rma_mm.kernels.choice.speed import square
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.model.machine import COPY, LINKS, PACKED, TYPICAL, Cost, Machine
from rma_mm.runtime.calibration.fitting import Shape, cost_of, kernel_of
from rma_mm.runtime.calibration.overlap import overlap_kind
from rma_mm.runtime.calibration.sampling import Case, TransferBenchmark, sampled, scatter, typical
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.calibration.speeds import measured, round_of, with_processors
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.runtime.calibration.local import Products
    from rma_mm.runtime.calibration.overlap import Overlap

USUAL = f"{DEFAULT.name}.get"  # the movement by which others are priced that were not measured
BUSY_TOO = " busy"  # behind the name of a movement whose targets are inside a multiply
Pair = tuple[str, str]  # an element type and a kernel; or a class of link, and a movement or a flavour of windows
Point = tuple[float, float, float]  # transfers, bytes and seconds of a movement in one size


@dataclass(frozen=True)
class Wanted:
    products: tuple[Pair, ...] = ()  # local products: element type and kernel
    flavours: tuple[str, ...] = ()  # windows
    basis: bool = True
    """True if figures of neither links nor kernels are wanted: copies, groups, meetings, the runtime's own work."""
    thorough: bool = False  # true if groups are also timed with busy targets, and several readers of one owner


@dataclass(frozen=True)
class Measurements:
    """The measured figures, the same on every rank."""

    machine: Machine
    points: Mapping[Pair, list[Point]] = field(default_factory=dict)  # class of link and movement → its sizes
    contention: Mapping[Pair, tuple[int, float]] = field(default_factory=dict)
    """Class of link and flavour → readers of one owner, and what they take over as many with an owner each."""
    rounds: int = 0  # how often each case was timed
    scattered: bool = False  # true if no two rounds found the same speeds of ranks


def run_calibration(
    comm: MPI.Intracomm, site: Site, wanted: Wanted, seconds: float, base: Machine | None = None
) -> Measurements:
    """Measure the wanted figures in about this time, and add them to the known ones. Collective over `comm`."""
    deadline = time.perf_counter() + seconds
    site = replace(site, cores=base.cores) if base is not None else with_processors(comm, site)
    with using_threads(site.threads), _prepared(comm, site, wanted) as cases:
        first = round_of(comm, site) if wanted.basis else ()
        found = cases.measured(deadline)
        speeds = measured(comm, site, first) if wanted.basis else (base or TYPICAL).speeds
    costs = _costs(found.points, base)
    costs["between"] = _between(costs["between"], found.long)
    _complete(costs, site)
    new = Machine(f"{processor().strip()}, {count_of(site.size, 'rank')} on {count_of(len(site.nodes), 'node')}", {})
    machine = replace(
        base or new, costs=costs, measured=True, **found.facts,
        kernels={**(base or new).kernels, **{name: kernel_of(*timed) for name, timed in found.products.items()}},
        cores=site.cores, threads=site.threads, nodes_per_host=site.nodes_per_host, speeds=speeds or (),
    )
    told = comm.bcast((machine.as_json(), found.points, found.contention) if comm.rank == 0 else None)
    return Measurements(Machine.from_json(told[0]), told[1], told[2], found.rounds, speeds is None)


def _costs(points: dict[Pair, list[Point]], base: Machine | None) -> dict[str, dict[str, Cost]]:
    """Return the measured costs together with the known ones.

    A busy target within a node: what waits for it takes no processor. So the points of what took longer than the ranks
    that share the processors explain are put right: a transfer, and that waiting. Between nodes, one transfer after
    the other finds a target that has just looked up; others wait for half of its interval.
    """
    costs = {link: dict(base.costs[link]) if base else {} for link in LINKS}
    for link, name in sorted(points, key=lambda pair: pair[1].endswith(BUSY_TOO)):
        idle = costs[link].get(name.removesuffix(BUSY_TOO))
        if name.endswith(BUSY_TOO) and link == "node" and idle is not None:
            points[link, name] = [_late(point, idle) for point in points[link, name]]
        found = cost_of(points[link, name])
        if name.endswith(BUSY_TOO) and link == "between" and idle is not None:
            found = replace(found, alpha=(idle.alpha + max(idle.alpha, found.alpha)) / 2)
        costs[link][name] = found
    return costs


def _between(costs: Mapping[str, Cost], long: Mapping[str, tuple[Point, float]]) -> dict[str, Cost]:
    """Return costs between nodes that agree with long transfers: bandwidths, and the fraction that a multiply hides.

    long: movement → its point, and its seconds that no multiply hides. Links that let some bytes through at once make
    short transfers look fast: nothing is faster than long transfers are. What was not measured has the hidden share of
    its kind. Those of what lies together are hard to measure and much alike: each counts half, and their median the
    other half.
    """
    found, shares = dict(costs), {overlap_kind(name): cost.hidden for name, cost in costs.items() if cost.hidden < 1}
    alphas = {name: costs[name.removesuffix(PACKED)].alpha for name in long}
    betas = {name: max(0.0, point[2] - point[0] * alphas[name]) / point[1] for name, (point, _) in long.items()}
    together = [name for name in long if not name.endswith(PACKED)]
    least = min((betas[name] for name in together), default=0.0)
    for name, ((_, nbytes, _), exposed) in long.items():
        beta = max(least, betas[name])
        found[name] = Cost(alphas[name], beta)
        shares[overlap_kind(name)] = min(1.0, max(0.0, 1 - exposed / (beta * nbytes))) if beta else 1.0
    usual = median(shares[overlap_kind(name)] for name in together) if together else 1.0
    shares |= {kind: (share + usual) / 2 for kind, share in shares.items() if not kind.endswith(PACKED)}
    return {
        name: Cost(cost.alpha, max(least, cost.beta), shares.get(overlap_kind(name), cost.hidden))
        for name, cost in found.items()
    }


def _late(point: Point, idle: Cost) -> Point:
    transfers, nbytes, seconds = point
    each = nbytes / transfers
    alone = idle.seconds(each)
    return 1.0, each, alone + max(0.0, seconds - transfers * alone)


def _complete(costs: dict[str, dict[str, Cost]], site: Site) -> None:
    """Replace figures that could not be measured by the nearest ones."""
    if not site.has("node"):
        costs["node"] = {COPY: costs["own"][COPY]}
    elif USUAL not in costs["node"]:
        costs["node"].setdefault(COPY, costs["own"][COPY])
    if not site.has("between"):
        costs["between"] = dict(TYPICAL.costs["between"])
    elif USUAL not in costs["between"]:
        gets = [cost for name, cost in costs["between"].items() if name.endswith(".get")]
        costs["between"].setdefault(COPY, gets[0] if gets else costs["between"]["shift"])


@dataclass
class _Found:
    """Figures, each already the median of the rounds."""

    points: dict[Pair, list[Point]] = field(default_factory=lambda: defaultdict(list))
    products: dict[str, tuple[list[Shape], list[float]]] = field(default_factory=dict)
    contention: dict[Pair, tuple[int, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # fields of the machine
    long: dict[str, tuple[Point, float]] = field(default_factory=dict)
    """Movement between nodes → what a long one took, and the seconds of it that no multiply hides."""
    rounds: int = 0


class _Cases:
    """Benchmarks of this rank, prepared. Collective to make and to close."""

    def __init__(self, comm: MPI.Intracomm, site: Site, wanted: Wanted, products: list[Products]) -> None:
        from rma_mm.runtime.calibration.groups import CollectiveGroups
        from rma_mm.runtime.calibration.local import NARROW, Crowding, Meeting, Operation, Pieces, copies
        from rma_mm.runtime.calibration.transfers import SIDE, buffer, opened
        from rma_mm.windows.progress import Progress

        self.site, self.comm, self.products, self.has_basis = site, comm, products, wanted.basis
        self.host: MPI.Intracomm = cast("MPI.Intracomm", comm.Split(site.host_of[site.rank], site.rank))
        is_far = site.has("between")
        self.progress = {is_needed: Progress(is_needed or is_far) for is_needed in (False, True)}
        home, room, multiply = buffer(), buffer(), square(SIDE)
        flavours = wanted.flavours if site.size > 1 else ()
        self.windows = opened(comm, site, flavours, room, self.progress, multiply)
        links = [link for link in ("node", "between") if wanted.basis and site.has(link)]
        self.groups = [
            CollectiveGroups(comm, site, link, home, room, self.progress[is_far], multiply) for link in links
        ]
        self.movements: list[TransferBenchmark] = copies(site, home, room) if wanted.basis else []
        for each in self.windows:
            self.movements += each.cases(is_far and wanted.basis and each is self.windows[0])
        for group in self.groups:
            self.movements += group.cases(wanted.thorough)
        self.contention = [case for each in self.windows for case in each.contention() if wanted.thorough]
        self.pieces = [Pieces(site, home, room)] if wanted.basis else []
        self.packed = [group.pieces(NARROW) for group in self.groups[:1]]
        self.meetings = [Meeting(comm)] if wanted.basis else []
        self.crowding = [Crowding(comm, site, multiply)] if wanted.basis else []
        self.operations = [Operation(comm, site, self.progress[False])] if wanted.basis else []
        self.overlaps: list[Overlap] = []
        if is_far and wanted.basis:
            self.overlaps = [each for window in self.windows[:1] for each in window.overlaps()]
            self.overlaps += [each for group in self.groups if group.link == "between" for each in group.overlaps()]

    def measured(self, deadline: float) -> _Found:
        cases: list[Case] = [
            *self.movements, *self.contention, *self.overlaps, *self.pieces, *self.packed, *self.meetings,
            *self.crowding, *self.operations, *self.products,
        ]
        samples = sampled(self.comm, self.host, cases, deadline)
        rounds: dict[Case, NDArray[np.float64]] = dict(zip(cases, samples, strict=True))
        figures = {case: typical(each) for case, each in rounds.items()}
        found = _Found(rounds=max(map(len, samples), default=0))
        if self.has_basis and len(samples) > 1:
            found.facts["scatter"] = scatter([np.concatenate(each) for each in zip(*samples, strict=True)])
        for case in self.movements:
            found.points[case.link, case.name].append(case.point(figures[case][0]))
        for crowd in self.contention:
            one, each = figures[crowd]
            found.contention[crowd.link, crowd.flavour] = crowd.readers, one / each
        for product in self.products:
            found.products[product.name] = product.timed(figures[product])
        for overlap in self.overlaps:
            found.long[overlap.name] = overlap.point(rounds[overlap]), overlap.exposed(rounds[overlap])
        for pieces in self.pieces:
            found.facts["piece"] = pieces.seconds(figures[pieces][0], cost_of(found.points["own", COPY]))
        for packed in self.packed:
            found.facts["packed"] = packed.seconds(figures[packed][0], cost_of(found.points[packed.link, "shift"]))
        for meeting in self.meetings:
            found.facts["meeting"] = figures[meeting][0] / max(1.0, log2(self.site.size))
        for crowding in self.crowding:
            found.facts["crowding"] = crowding.slowdown(rounds[crowding])
        for operation in self.operations:
            found.facts["operation"] = operation.seconds(figures[operation])
        return found

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for window in self.windows:
            window.close()
        for progress in self.progress.values():
            progress.close()
        self.host.Free()


@contextmanager
def _prepared(comm: MPI.Intracomm, site: Site, wanted: Wanted) -> Iterator[_Cases]:
    """Cases on a communicator of their own; closed where all went well: after an error others may never come."""
    from rma_mm.runtime.calibration.local import LocalScratch, Products

    own = comm.Dup()
    with agreed(comm, "calibration"):
        scratch = LocalScratch() if wanted.products else None
        products = [Products(own, site, dtype, kernel, scratch) for dtype, kernel in wanted.products if scratch]
    cases = _Cases(own, site, wanted, products)
    yield cases
    barrier(own)
    cases.close()
    own.Free()
