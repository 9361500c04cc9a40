"""Seconds of a product from its account: the closed form of what `simulator` works out operation by operation.

In every phase the processors of a host are shared by its ranks, and the wire of a node by its ranks; what crosses
nodes goes on behind the multiplies, except for the first panel. The laws are those of `machine`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil, log2

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.flavours import DEFAULT, Flavour, find_flavour
from rma_mm.policy.model.locality import WHOLE
from rma_mm.policy.model.machine import (
    COLLECTIVES,
    COPY,
    MULTIPLIES,
    PAGE,
    SUMS,
    TYPICAL,
    Cost,
    Kernel,
    Machine,
    by_group,
)
from rma_mm.policy.model.spans import Figures, Numbers
from rma_mm.policy.model.traffic import FLAT, READ, LocalWork, Phase, TrafficItem, Workload


@dataclass(frozen=True)
class CostModel:
    """Prices of a product: the machine, and the types, kernel and windows that it uses."""

    machine: Machine = TYPICAL
    dtype: str = "float32"  # of what is multiplied, or of the sums if that is what operands are converted to
    kernel: str = "blas"
    itemsize: int = 4  # bytes of an element of A and B
    accum_itemsize: int = 4  # bytes of an element of C while it is summed
    flavours: tuple[tuple[str, str], ...] = ()
    """(operand, the windows that its transfers go through); the default where nothing is said."""
    reading: float = 0.0  # seconds in which a node reads a byte of the files that operands stay in

    def bytes_of(self, x: str) -> int:
        return self.accum_itemsize if x == "C" else self.itemsize

    def flavour(self, x: str) -> Flavour:
        return find_flavour(dict(self.flavours).get(x, DEFAULT.name))

    @cached_property
    def local(self) -> Kernel:
        return self.machine.kernel(self.dtype, self.kernel)


@dataclass(frozen=True)
class CostBreakdown:
    """Seconds of a product, and where they go."""

    multiplying: float = 0.0  # in local products
    moving: float = 0.0  # in transfers that the multiplies do not hide
    meeting: float = 0.0  # in meetings and the runtime's own work

    @property
    def seconds(self) -> float:
        return self.multiplying + self.moving + self.meeting

    def corrected(self, factor: float) -> CostBreakdown:
        """Return the same with all but the multiplies, which no way of moving data changes, so many times as long."""
        return CostBreakdown(self.multiplying, self.moving * factor, self.meeting * factor)


STALLED = 0.25
"""The share of its multiplies for which a rank waits in a ring of sums: its neighbour sends between two of its own."""
TYPICALLY = CostModel()  # cost model of float32 products if nothing was measured
NOTHING = CostBreakdown()  # what is not priced


@dataclass
class _Load:
    """Work of every rank in a phase."""

    multiplying: Figures
    processor: Figures  # seconds of processors, products included
    wire: Figures  # seconds of the wire for its words
    exposed: Figures  # seconds of the wire that no multiply hides
    serving: Figures  # seconds of the wire the other way, for what others want of what it holds
    circling: Figures  # seconds of the wire for slices of which a rank has the first, or the last, itself
    rounds: Figures  # of those the slices that move by the wire, each during one turn of the walk
    pushed: Figures  # seconds of the wire for what is added to other ranks' parts of C
    waiting: Figures  # seconds until its transfers begin to arrive
    operations: Figures
    stalled: Figures  # seconds for which it waits for a neighbour that multiplies


def estimate(workload: Workload, cost_model: CostModel) -> CostBreakdown:
    crossing = _crossing(workload, cost_model)
    costs = [_phase(workload, phase, cost_model, late) for phase, late in zip(workload.phases, crossing, strict=True)]
    meeting = 2 * cost_model.machine.meet(workload.sample.mesh.size)
    multiplying = sum(each.multiplying for each in costs) * cost_model.machine.corrections.get(MULTIPLIES, 1.0)
    moving, meeting = sum(each.moving for each in costs), sum((each.meeting for each in costs), meeting)
    return CostBreakdown(multiplying, moving, meeting)


def _crossing(workload: Workload, cost_model: CostModel) -> list[Cost]:
    """Return the seconds of traffic between groups of nodes in each phase: latencies (alpha), transfers (beta).

    While one owner after the other sends, its own group receives nothing.
    """
    machine, nothing = cost_model.machine, [Cost(0.0, 0.0)] * len(workload.phases)
    if not machine.groups or workload.on is None:  # a mesh may have millions of ranks
        return nothing
    mesh = by_group(workload.sample.mesh, machine.groups)
    if mesh.is_one_node:
        return nothing
    other, count, costs = workload.on(mesh), len(set(mesh.node_of_rank)), []
    for phase in other.phases:
        nbytes, calls = np.zeros(other.sample.count), np.zeros(other.sample.count)
        for moved in phase.moved:
            if moved.how != "view":
                in_turn = np.minimum(moved.rounds, count / (count - 1))
                nbytes += cost_model.bytes_of(moved.x) * moved.between * in_turn
                calls += moved.messages * moved.between / np.maximum(1.0, moved.node + moved.between)
        joint = machine.joint
        costs.append(Cost(joint.alpha * float(calls.max()), joint.beta * other.sample.by_node(nbytes)))
    return costs


def _phase(workload: Workload, phase: Phase, cost_model: CostModel, crossing: Cost) -> CostBreakdown:
    """Return the seconds of a phase. crossing: those of what goes between groups of nodes."""
    machine, sample = cost_model.machine, workload.sample
    speeds = machine.speeds_of(sample.mesh.size)
    load = _load(workload, phase, cost_model)
    ranks = sample.mesh.size * machine.nodes_per_host / sample.node_count

    def busiest_host(figures: Figures) -> float:
        """When the processors of the fullest host are done."""
        total = sample.by_node(figures, machine.nodes_per_host)
        if ranks > machine.slots:
            total *= machine.crowding
        if phase.is_shared:  # at the end all wait for the slowest rank's last task, for half of it on average
            last = 0.5 / (max(1.0, phase.claims) * min(speeds)) if speeds else 0.0
            return total / min(machine.slots, ranks) * (1 + last)
        if speeds:  # what one leaves of its processors, others do not take
            return float(figures.max()) * max(1.0, machine.crowding * ranks / machine.slots)
        return max(float(figures.max()), total / machine.slots)

    multiplying, overhead = busiest_host(load.multiplying), busiest_host(load.operations * machine.operation)
    busy = busiest_host(load.processor + load.operations * machine.operation)
    wire = max(sample.by_node(load.wire), sample.by_node(load.serving), crossing.beta)
    wire += float(load.waiting.max()) + crossing.alpha
    behind = 0.0
    if phase.work is not None and not phase.is_shared:  # a queue fetches nothing for its next task
        first, circling = 1 / max(1.0, float(np.max(phase.steps))), sample.by_node(load.circling)
        meanwhile = busy * min(1 - first, float(load.rounds.max()) * first) if circling else busy - multiplying * first
        slowed = 1 + sample.by_node(load.pushed) / wire if wire else 1.0  # who adds up is multiplying: half the pace
        behind = min(meanwhile / slowed, wire - max(0.0, wire - circling) * first)
        own = float(load.wire.max())  # a rank's own transfers hold it up
        behind = max(0.0, behind - busiest_host(load.exposed) * min(1.0, behind / own)) if own else behind
    stalled = float(load.stalled.max()) * max(1.0, ranks / machine.slots)
    moving = max(0.0, busy - multiplying - overhead) + wire - behind + stalled
    return CostBreakdown(multiplying, moving, phase.barriers * machine.meet(sample.mesh.size) + overhead)


def _load(workload: Workload, phase: Phase, cost_model: CostModel) -> _Load:
    """Return the work of every rank in a phase."""
    machine, zero = cost_model.machine, np.zeros(workload.sample.count)
    load = _Load(*(zero.copy() for _ in range(11)))
    load.processor += machine.cost("own", COPY).beta * cost_model.accum_itemsize * phase.opened
    if phase.work is not None:
        load.multiplying, calls = _products(phase.work, cost_model)
        if machine.speeds:
            speeds = of_each(machine.speeds, workload.sample.ranks[: workload.sample.count], 1.0)
            load.multiplying /= speeds.mean() if phase.is_shared else speeds
        if phase.is_shared:
            load.multiplying /= workload.sample.mesh.size
            calls = calls / workload.sample.mesh.size
        load.processor += load.multiplying
        load.operations += calls
    delays = of_each(machine.delays, workload.sample.nodes, 0.0) if machine.delays else 0.0
    for moved in phase.moved:
        _move(load, moved, phase, cost_model, delays)
    if phase.claims:
        link = "between" if workload.sample.node_count > 1 else "node"
        load.waiting += phase.claims * machine.cost(link, "fetch_add").alpha
    if machine.wires:
        wires = of_each(machine.wires, workload.sample.nodes, 1.0)
        load.wire /= wires
        load.circling /= wires
        load.pushed /= wires
        load.exposed /= wires
        load.serving /= wires
    return load


def of_each(figures: tuple[float, ...], numbers: Numbers, default: float) -> Figures:
    return np.where(numbers < len(figures), np.array(figures)[np.minimum(numbers, len(figures) - 1)], default)


def _products(work: LocalWork, cost_model: CostModel) -> tuple[Figures, Figures]:
    """Return seconds of a rank's local products, and how many there are."""
    kernel = cost_model.local
    (m, n, k), (cut_m, cut_n, cut_k) = work.extents, work.pieces
    calls = cut_m * cut_n * cut_k * (m * n * k > 0)
    added = kernel.c + kernel.aliased * (work.columns * cost_model.accum_itemsize % PAGE == 0)
    touched = kernel.a * m * k * cut_n + kernel.b * k * n * cut_m + added * m * n * cut_k
    return kernel.call * calls + kernel.point * m * n * k + touched * (calls > 0), calls


def _move(load: _Load, moved: TrafficItem, phase: Phase, cost_model: CostModel, delays: Figures | float) -> None:
    """Add the cost of a movement to the ranks' load. delays: seconds more of the latency of each one's node."""
    if moved.how == "view":
        return
    machine, size, flavour = cost_model.machine, cost_model.bytes_of(moved.x), cost_model.flavour(moved.x)
    is_sum = moved.how in SUMS or (moved.how == "shift" and moved.x == "C")
    if moved.group > 1 and not is_sum and flavour.loads_on_node and not moved.between.any():
        moved = replace(moved, how="get", passed=None)  # each rank of the group copies it
    load.operations += moved.messages
    if moved.how == READ:  # the ranks of a node share the disk as they share its wire, behind their multiplies
        load.wire += cost_model.reading * size * moved.own
        load.processor += machine.cost("own", COPY).beta * size * moved.own
        return
    words = moved.own + moved.node + moved.between
    here = machine.cost("own", moved.how if moved.how == "accumulate" else COPY, flavour.name)
    load.processor += here.beta * size * moved.own
    is_packed = moved.how in COLLECTIVES or flavour.packed_by_mpi
    load.processor += machine.piece / moved.run * (words if not is_packed else moved.own)
    packed = moved.between if not is_packed else moved.node + moved.between
    load.processor += machine.packed / moved.run * packed
    foreign = np.maximum(1.0, moved.node + moved.between)
    near, far = moved.messages * moved.node / foreign, moved.messages * moved.between / foreign
    both = 2.0 if moved.how in COLLECTIVES else 1.0  # each word is sent and received
    rounds = 1.0
    if moved.how == "broadcast" and moved.group > FLAT:
        both = rounds = float(ceil(log2(moved.group)))
    node = machine.cost("node", moved.how, flavour.name)
    if moved.passed is None:
        load.processor += (node.alpha * near + node.beta * size * moved.node) * both
    else:
        passed = float(moved.messages.max()) * moved.passed / float(foreign.max())
        load.processor += node.alpha * (near + passed) + node.beta * size * (moved.node + moved.passed)
    if moved.how == "shift" and moved.x == "C":  # a sum is waited for, and its sender may be inside a multiply
        load.stalled += STALLED * load.multiplying
    is_met = phase.work is not None and moved.how == "get" and bool(np.max(phase.steps) > 1)
    wire = machine.cost("between", moved.how, flavour.name, packed=moved.run < WHOLE)
    busy = machine.cost("between", moved.how, flavour.name, busy=True) if is_met else wire
    full = wire.beta  # a get by itself may wait until its owner has sent what it sends; one that follows has been asked
    if is_met:
        full = min(full, machine.cost("between", "shift").beta)
    each = max(full, busy.beta) * size
    load.wire += each * moved.between * moved.rounds
    load.exposed += (1 - wire.hidden) * wire.beta * size * moved.between * moved.rounds
    if moved.skips_turn:
        load.circling += each * moved.between * moved.rounds
        load.rounds = np.maximum(load.rounds, moved.messages * (moved.between > 0))
    if moved.how == "accumulate":
        load.pushed += each * moved.between * moved.rounds
    load.serving += each * moved.served
    load.waiting += (wire.alpha + delays) * far * rounds
    if is_met:  # a target that multiplies answers when it looks up, or when it has done with this step
        late = max(0.0, machine.cost("node", moved.how, flavour.name, busy=True).alpha - node.alpha)
        waits = late * np.minimum(near, phase.steps) + max(0.0, busy.alpha - wire.alpha) * np.minimum(far, phase.steps)
        load.waiting += np.minimum(waits, load.multiplying)
