"""Bind operations to real memory: resolve views, bind transfers and local products, and put waits between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import Region
from rma_mm.kernels import bind
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.kernels.product import Product
from rma_mm.kernels.symmetric import clear_beyond, mirror_within, transpose_into
from rma_mm.policy.model.machine import Machine
from rma_mm.runtime.execution.accumulators import Accumulator
from rma_mm.runtime.execution.addressing import Box, Places, slots
from rma_mm.runtime.execution.collectives import Bound, bind_broadcast, bind_reduce, bind_shift
from rma_mm.runtime.execution.epilogue import EpilogueBinder
from rma_mm.runtime.execution.node_slots import Fetch, NodeScratch
from rma_mm.runtime.execution.poisoned_slots import Slots
from rma_mm.runtime.execution.tracing import Trace, TracedTransfer, itemsize, op_noted, transfer_noted
from rma_mm.runtime.execution.unpacking import Unpacked, is_packed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.watching.tally import FAR_LINKS
from rma_mm.runtime.watching.transfers import WatchedTransfer, timed
from rma_mm.schedule import ops
from rma_mm.schedule.dispatch import Dispatch
from rma_mm.schedule.mirror_ops import Clear, Mirror, multiply_adds
from rma_mm.schedule.ops import Op, Slot
from rma_mm.schedule.passes import leading
from rma_mm.windows import Counters, Transfer
from rma_mm.windows.boxes.copying import CopyTransfer, paired_views
from rma_mm.windows.channel import Channel
from rma_mm.windows.checks.checked import CheckedTransfer, labelled
from rma_mm.windows.hosts.liveness import CELLS, DOING, MULTIPLY, NODE

Action = Callable[[], None]

SHORT = 2**14
"""Words that may go to another node in front of a barrier, whose own messages then come behind them on the wire: more
of them delay it by longer than beginning early gains."""


@dataclass
class Scalars:
    """Scalars and types that a schedule leaves open."""

    alpha: Any = 1
    beta: Any = 0
    conj_a: bool = False
    conj_b: bool = False
    kernel: str = "auto"
    sums: Accumulator = field(default_factory=Accumulator)
    epilogue: Epilogue | None = None


@dataclass
class Setup:
    """Resources shared by all lists of operations of one executable."""

    mesh: Mesh
    places: Places
    scalars: Scalars
    meet: Action  # A barrier of the schedule
    claim: Action  # runs tasks of the pool
    done: Callable[[float], None]  # told of every product's multiply-adds
    transfers: list[Transfer]  # everything bound, to be closed in the end
    channels: list[Channel]
    total_work: float = 0.0
    kernels: set[str] = field(default_factory=set)  # those that do local products
    trace: Trace | None = None  # where to note what is done when
    machine: Machine | None = None  # what transfers are compared with
    closings: EpilogueBinder = field(init=False)

    def __post_init__(self) -> None:
        self.closings = EpilogueBinder(self.places, self.scalars.epilogue, self.scalars.kernel)


class Binding:
    """One list of operations, bound: `actions` in the order in which they are to be called."""

    handlers = Dispatch[None]()

    def __init__(self, setup: Setup, program: Sequence[Op]) -> None:
        self.setup, self.places, self.scalars, self.rank = setup, setup.places, setup.scalars, setup.mesh.rank
        self.actions: list[Action] = []
        self.steps: list[Product | CopyTransfer] = []
        """Multiplies, and copies that are over when they have begun, in the order of the actions."""
        self.actions_of_steps = 0
        self._at_once: set[Transfer] = set()
        self.viewed = Counters()  # words that Multiplies read in place, of one run
        self.under_way: dict[str, list[tuple[int, Transfer]]] = defaultdict(list)
        """Transfers by name, each with the number of barriers before it in the program."""
        self.passed = 0  # barriers that stand before what is bound now
        self.gates: list[ops.Await] = []  # awaited events that have not delayed anything yet
        self.fetches: dict[str, Fetch] = {}
        self.fused = self.fused_scales(program)
        self.closed = setup.closings.by_products(program)
        self.met: list[range] = []  # the actions of each barrier
        lead, rest = leading(program)
        slots = None if setup.mesh.checks is None else Slots(self.places.memory.frames, self.wait, self.actions.append)
        for self.passed, first in enumerate(lead):
            self.all(first, slots)
        self.head, self.passed = len(self.actions), 0
        """So many actions begin transfers that wait for nothing but A and B."""
        self.all(rest, slots)
        meets_first = not lead[0] and self.delays(chain.from_iterable(lead[1:]))
        self.opening = slice(self.head, self.met[0].stop if meets_first else self.head)
        """The actions up to the first barrier, where they are better done before those that begin transfers."""
        self.tail = len(self.actions)  # from this action on it only completes what has begun
        self.unmet_tail = self.met[-1].start if self.met and self.met[-1].stop == self.tail else self.tail
        """The same where barriers are left out."""
        self.wait(list(self.under_way))
        if slots is not None:
            slots.leave()

    def all(self, program: Sequence[Op], slots: Slots | None) -> None:
        """Yield the operations, each after the poisoning of scratch that has become free."""
        for op in program:
            if slots is not None:
                slots.enter(op)
            self.handlers[type(op)](self, op)

    def delays(self, ops: Iterable[Op]) -> bool:
        """Return whether these move so much to or from other nodes that a barrier behind them would have to wait."""
        nodes = self.setup.mesh.node_of
        moves = (move for op in ops for move in op.moves(self.rank))
        return sum(move.ref.region.size for move in moves if nodes[move.source] != nodes[move.to]) > SHORT

    def wait(self, keys: Iterable[str], behind: float = inf) -> None:
        """Wait for the transfers under these names before the next call.

        Not what stands behind more barriers than `behind`: other ranks may not take part in that yet.
        """
        for op in self.gates:
            meeting = partial(self.setup.mesh.progress.wait, self.node_scratch.is_due(op))
            self.act(timed(self.setup.mesh.metrics.tally, meeting, NODE), op)
        self.gates = []
        for key in keys:
            found = self.under_way.pop(key, [])
            due = [transfer for passed, transfer in found if passed <= behind]
            self.actions += [transfer.wait for transfer in due]
            self.actions_of_steps += sum(transfer in self._at_once for transfer in due)
            if later := [each for each in found if each[0] > behind]:
                self.under_way[key] = later

    def begin(self, transfer: Transfer, *keys: str) -> None:
        """Start a transfer, which is then under way under these names."""
        self.setup.transfers.append(transfer)
        for key in keys:
            self.under_way[key].append((self.passed, transfer))
        moved = transfer.inner if isinstance(transfer, WatchedTransfer) else transfer
        if isinstance(moved, CopyTransfer):
            self.steps.append(moved)
            self.actions_of_steps += 1
            self._at_once.add(transfer)
        self.actions.append(transfer.begin if isinstance(transfer, TracedTransfer) else transfer.start)

    def act(self, action: Action, op: Op, name: str = "") -> None:
        self.actions.append(op_noted(self.setup.trace, action, op, self.places, name))

    def noted(self, transfer: Transfer, op: Op, part: int = 0, kind: str = "") -> Transfer:
        watched = self.watched(labelled(transfer, op), op)
        return transfer_noted(self.setup.trace, watched, op, self.places, part, kind)

    def watched(self, transfer: Transfer, op: Op) -> Transfer:
        """Return the transfer, timed for the metrics unless it stays within this rank's memory."""
        mesh, machine = self.setup.mesh, self.setup.machine
        if isinstance(op, ops.Copy) and op.src.rank == self.rank:
            return transfer
        kind, rank = (op.kind, op.remote.rank) if isinstance(op, ops.OneSidedOp) else ("group", 0)
        timed_one = WatchedTransfer(transfer, mesh.metrics.tally, kind, bool(ops.foreign(op, self.rank)), rank)
        if isinstance(op, ops.Copy) and machine is not None:
            is_far = mesh.node_of[op.src.rank] != mesh.node_of[self.rank]
            where: Sequence[object] = mesh.node_of if is_far else mesh.hosts
            nbytes, ranks = op.src.region.size * itemsize(op, op.dst, self.places), where.count(where[self.rank])
            flavour = self.places.home(op.src).window.flavour
            timed_one.hold_against(machine, FAR_LINKS[is_far], nbytes, flavour, ranks)
        return timed_one

    # -- transfers --------------------------------------------------------------------------------

    @handlers.on(ops.Copy)
    def copy(self, op: ops.Copy) -> None:
        """A slot may take several copies at once; what it held before is awaited."""
        transfer = self.get(op)
        if isinstance(op.dst.buffer, Slot) and op.dst.buffer.group:
            self.setup.transfers.append(transfer)
            self.fetch(op.dst.buffer).transfers.append(transfer)
            return
        self.wait(f"read {name}" for name in slots([op.dst]))
        self.begin(transfer, f"fill {op.dst.place}")

    def get(self, op: ops.Copy) -> Transfer:
        """Return the transfer of a Copy, through other memory if that is quicker or the data is cast."""
        place, schedule = self.places.box(op.dst), self.places.schedule
        block = self.places.home(op.src)
        if not is_packed(schedule, op, block.window.reaches(op.src.rank), block.dtype != place[0].dtype):
            return self.noted(self.transfer(op, place), op)
        landing = self.places.copied_area(op.dst, block.dtype)
        inner = self.transfer(op, (landing, Region.whole(landing.shape)))
        return Unpacked(self.noted(inner, op), landing, place)

    def transfer(self, op: ops.OneSidedOp, local: Box) -> Transfer:
        """Return a get (or accumulate) between a home and memory of this node, in the home's own orientation."""
        schedule, remote = self.places.schedule, op.remote
        assert isinstance(remote.buffer, str)
        where, (origin, here) = schedule.holds(remote).locate(remote.region), local
        block, flipped = self.places.block(remote.buffer, summing=op.adds)
        assert block is not None
        sums = self.scalars.sums
        if op.adds and sums.are_keys(remote, origin.dtype):
            origin = sums.encode_keys(origin)
        if flipped:
            where, here, origin = where.T, here.T, origin.T
        target, (rows, cols) = block.patch(remote.rank, where), here
        if op.adds:
            return block.window.accumulate(remote.rank, target, origin, rows, cols, sums.reduction(remote))
        return block.window.get(remote.rank, target, origin, rows, cols)

    @handlers.on(ops.Accumulate)
    def accumulate(self, op: ops.Accumulate) -> None:
        """An add of local memory to a home; memory of another type than the home's is cast into a copy first."""
        self.wait(f"fill {name}" for name in slots([op.src]))
        key = f"read {op.src.place}"
        block = self.places.home(op.dst, summing=True)
        source, sums = self.places.whole(op.src, False), self.scalars.sums
        flavour = FLAVOURS[block.window.flavour]
        if op.dst.buffer == "C" and not (sums.through_windows and flavour.sums(sums.semiring.reduction, block.dtype)):
            where = self.places.schedule.holds(op.dst).locate(op.dst.region)
            target = self.places.whole(op.dst, summing=True), where
            self.act(sums.local_add(target, self.places.box(op.src)), op, "cast")
            return
        if isinstance(op.src.buffer, Slot) or source.dtype == block.dtype:
            if sums.are_keys(op.dst, source.dtype):
                self.act(sums.encode_in_place(self.places.box(op.src)), op, "cast")
            self.begin(self.noted(self.transfer(op, self.places.box(op.src)), op), key)
            return
        schedule = self.places.schedule
        where = schedule.holds(op.src).locate(op.src.region)
        copied = self.places.copied_area(op.src, block.dtype)
        there = block.patch(op.dst.rank, schedule.holds(op.dst).locate(op.dst.region))
        self.act(lambda: cast(source[where.selector()], copied), op, "cast")
        transfer = block.window.accumulate(op.dst.rank, there, copied, *Region.whole(copied.shape))
        self.begin(self.noted(transfer, op), key)

    @handlers.on(ops.Broadcast)
    def broadcast(self, op: ops.Broadcast) -> None:
        channel = self.channel(op.group)
        if self.is_in_reach(op):
            self.copy_alone(op, channel)
        else:
            self.bind_collective(op, [bind_broadcast(op, self.places, channel)])

    @handlers.on(ops.Shift)
    def shift(self, op: ops.Shift) -> None:
        channel = self.channel(tuple(self.places.schedule.mesh.ranks))
        if self.is_in_reach(op):
            self.copy_alone(op, channel)
        else:
            self.bind_collective(op, [bind_shift(op, self.places, channel)])

    def is_in_reach(self, op: ops.GroupOp) -> bool:
        """True if all ranks of the group can copy what it moves out of its owners' memory."""
        return op.may_copy(self.setup.mesh.node_of) and self.places.loads(op.origins[0])

    def copy_alone(self, op: ops.GroupOp, channel: Channel) -> None:
        """Copy what a group in reach moves to this rank.

        A message would be copied too, but not before both sides have looked up from their multiplies.
        """
        for copy in op.copies(self.rank):
            moved = self.transfer(copy, self.places.box(copy.dst))
            inner = moved.inner if isinstance(moved, CheckedTransfer) else moved
            assert isinstance(inner, CopyTransfer)
            inner.counters, inner.messages = channel.counters, 1  # the channel's, whoever moves it
            self.wait(f"read {name}" for name in slots([copy.dst]))
            self.begin(self.noted(moved, copy, kind=op.kind), f"fill {copy.dst.place}")

    @handlers.on(ops.Reduce)
    def reduce(self, op: ops.Reduce) -> None:
        self.bind_collective(op, bind_reduce(op, self.places, self.channel(op.group), self.scalars.sums))

    def bind_collective(self, op: ops.GroupOp, parts: Iterable[Bound]) -> None:
        for part, bound in enumerate(parts):
            self.wait(bound.after)
            self.begin(self.noted(bound.transfer, op, part), *bound.during)

    def channel(self, group: tuple[int, ...]) -> Channel:
        """Return the channel of some ranks, which the plan has made."""
        found = self.setup.mesh.channel(group)
        if found not in self.setup.channels:
            self.setup.channels.append(found)
        return found

    # -- what ranks of a node fetch together ------------------------------------------------------

    @property
    def node_scratch(self) -> NodeScratch:
        """Return the scratch memory that the ranks of this node share."""
        assert self.places.memory.node_scratch is not None
        return self.places.memory.node_scratch

    def fetch(self, slot: Slot) -> Fetch:
        """Return the fetch of a slice, which waits for the event awaited just before it."""
        if slot.name not in self.fetches:
            self.fetches[slot.name] = Fetch(self.node_scratch, [self.node_scratch.is_due(op) for op in self.gates])
            self.gates = []
        return self.fetches[slot.name]

    @handlers.on(ops.Await)
    def await_(self, op: ops.Await) -> None:
        self.gates.append(op)

    @handlers.on(ops.Post)
    def post(self, op: ops.Post) -> None:
        """Count up: now, or when this rank's piece of a slice has landed."""
        if op.filled is None:
            self.act(partial(self.node_scratch.post, op.event), op)
            return
        fetch = self.fetch(op.filled)
        fetch.event, fetch.number = op.event, sum(each.event == op.event for each in self.fetches.values())
        self.act(fetch.start, op, "start together")

    # -- what this rank does alone ----------------------------------------------------------------

    @handlers.on(ops.Multiply)
    def multiply(self, op: ops.Multiply) -> None:
        """A local product, during which a helper gives MPI progress."""
        self.wait([*(f"fill {name}" for name in slots([op.a, op.b, op.c])), *(f"read {x}" for x in slots([op.c]))])
        a, b, c = self.places.array(op.a), self.places.array(op.b), self.places.array(op.c, summing=True)
        nodes = self.setup.mesh.node_of
        for ref, array in ((op.a, a), (op.b, b)):
            if ref.rank != self.rank:
                self.viewed.add(array.size, 0, same_node=nodes[ref.rank] == nodes[self.rank])
        s = self.scalars
        beta = 0 if op.first else s.beta if id(op) in self.fused else 1
        tile = self.setup.closings.of(op.c) if id(op) in self.closed else None
        b = b.T if op.b_is_transposed_a else b
        product = bind(a, b, c, s.alpha, beta, s.conj_a, s.conj_b, s.kernel, s.sums.semiring, tile, op.half)
        self.steps.append(product)
        self.setup.kernels.add(product.kernel)
        self.actions_of_steps += 1
        work = float(multiply_adds(op))
        self.setup.total_work += work
        helper, done, tally = self.setup.mesh.progress, self.setup.done, self.setup.mesh.metrics.tally

        def multiply() -> None:
            begun, CELLS[DOING] = clock(), MULTIPLY
            helper.during(product)
            tally.multiplying += clock() - begun
            tally.work += work
            done(work)

        self.act(multiply, op)

    def fused_scales(self, program: Sequence[Op]) -> set[int]:
        """Return the scales by beta that the next Multiply includes, and those Multiplies (by identity)."""
        fused: set[int] = set()
        if self.places.memory.shadow is not None:
            return fused
        for n, op in enumerate(program):
            if isinstance(op, ops.Scale) and op.keep:
                later = (x for x in program[n + 1 :] if not isinstance(x, ops.Copy | ops.Post | ops.Await))
                following = next(later, None)
                if isinstance(following, ops.Multiply) and following.c == op.c:
                    fused |= {id(op), id(following)}
        return fused

    @handlers.on(ops.Scale)
    def scale(self, op: ops.Scale) -> None:
        """Open a region: as zeros, or as beta times C."""
        self.wait(f"read {name}" for name in slots([op.c]))
        if id(op) in self.fused:
            return
        c = self.places.array(op.c, summing=True)
        beta, sums = self.scalars.beta if op.keep else 0, self.scalars.sums
        is_elsewhere = op.keep and self.places.memory.shadow is not None
        old = self.places.result_part(op.c.region) if is_elsewhere else None
        self.act(partial(sums.open, c, old, beta, sums.are_keys(op.c, c.dtype)), op)

    @handlers.on(ops.Finish)
    def finish(self, op: ops.Finish) -> None:
        """Close a region, unless the products that completed it have: its epilogue, and rounding into C."""
        if id(op) in self.closed:
            return
        c, sums = self.places.array(op.c, summing=True), self.scalars.sums
        if sums.are_keys(op.c, c.dtype):
            self.act(partial(sums.close, c), op)
        if self.setup.closings.needed:
            self.act(self.setup.closings.call(op.c), op)

    @handlers.on(Mirror)
    def mirror(self, op: Mirror) -> None:
        """A box of C, or one that was copied, transposed into C."""
        self.wait(f"fill {name}" for name in slots([op.src]))
        (box, (rows, cols)), (c, where) = self.places.box(op.src), self.places.box(op.c)
        if op.is_diagonal:
            self.act(partial(mirror_within, c[where.selector()], op.conjugates), op)
            return
        pairs = paired_views(box.T, (cols, rows), c, (where[0], where[1]))

        def mirror() -> None:
            for image, source in pairs:
                transpose_into(image, source, op.conjugates)

        self.act(mirror, op)

    @handlers.on(Clear)
    def clear(self, op: Clear) -> None:
        (c, (lines, columns)), (rows, cols) = self.places.box(op.c), op.c.region
        first = np.searchsorted(cols.indices, rows.indices, side="right").tolist()
        self.act(partial(clear_beyond, c, lines.indices.tolist(), first, columns.indices), op)

    @handlers.on(ops.Barrier)
    def barrier(self, op: ops.Barrier) -> None:
        begin = len(self.actions)
        self.wait(list(self.under_way), behind=self.passed)
        self.act(self.setup.meet, op)
        self.passed += 1
        self.met.append(range(begin, len(self.actions)))

    @handlers.on(ops.Claim)
    def claim(self, _: ops.Claim) -> None:
        self.actions.append(self.setup.claim)
