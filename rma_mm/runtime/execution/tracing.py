"""Trace of one rank during an execution: its calls one after the other, and transfers beside them.

Calls are wrapped when they are bound, and only where there is a trace: without one nothing is different or slower. A
transfer lasts from its start until it was *seen* to be over, which may be later than it was: a get that landed during a
product is seen when the rank next asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns as clock
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from rma_mm.runtime.execution.addressing import Places
from rma_mm.schedule.mirror_ops import multiply_adds
from rma_mm.schedule.ops import Accumulate, Multiply, Op, Reduce, Ref, TransferSpec, counted
from rma_mm.windows import Transfer

T = TypeVar("T")
Facts = dict[str, Any]


class TraceEvent(NamedTuple):
    name: str
    kind: str
    """multiply, wait, start, scale, cast, barrier, post, claim, flush; of transfers get, accumulate, shift, …"""
    start: int  # nanoseconds of this process's clock
    end: int
    facts: Facts


class Trace:
    def __init__(self) -> None:
        self.calls: list[TraceEvent] = []  # what the rank itself did, one after the other
        self.transfers: list[TraceEvent] = []  # what went on beside it
        self.repetitions: list[tuple[int, int]] = []
        """Start and end of each product, in nanoseconds of this process's clock."""

    def clear(self) -> None:
        for events in (self.calls, self.transfers, self.repetitions):
            events.clear()

    @contextmanager
    def repetition(self) -> Iterator[None]:
        """Trace one product, from one barrier of all ranks to the next."""
        start, before = clock(), len(self.calls)
        yield
        self.repetitions.append((start, clock()))
        if before < len(self.calls):  # until its first call a rank agrees with the others on what is to be done
            begun = self.calls[before].start
            self.calls.insert(before, TraceEvent("wait", "wait", start, begun, {"for": "all ranks to begin"}))

    def call(self, call: Callable[[], T], name: str, facts: Facts) -> Callable[[], T]:
        """Return the call, noted. Such calls must not be made within each other."""

        def noted() -> T:
            start = clock()
            result = call()
            self.calls.append(TraceEvent(name, name, start, clock(), facts))
            return result

        return noted


class TracedTransfer:
    """A transfer (see `windows.Transfer`) whose start, end and waits are noted."""

    def __init__(self, trace: Trace, inner: Transfer, kind: str, facts: Facts) -> None:
        self.trace, self.inner, self.kind, self.facts = trace, inner, kind, facts
        self.name = f"{kind} {facts['operand']}"
        self._start: int | None = None  # when it began; None while nothing is under way

    def start(self) -> None:
        self._start = clock()
        self.inner.start()
        self.done()

    def begin(self) -> None:
        """Begin, as the next of the rank's own calls; where it is over at once, the rank itself has moved it."""
        start = clock()
        self.start()
        name = self.name if self._start is None else f"start {self.name}"
        self.trace.calls.append(TraceEvent(name, "start", start, clock(), self.facts))

    def done(self) -> bool:
        is_done = self.inner.done()
        if is_done:
            self._end()
        return is_done

    def wait(self) -> None:
        """Return when it is over, as the next of the rank's own calls."""
        if self._start is None:  # nothing to wait for, as was seen before
            return self.inner.wait()
        start = clock()
        self.inner.wait()
        self.trace.calls.append(TraceEvent("wait", "wait", start, clock(), {"for": self.name, **self.facts}))
        self._end()
        return None

    def close(self) -> None:
        self.inner.close()

    def _end(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            self.trace.transfers.append(TraceEvent(self.name, self.kind, start, clock(), self.facts))


def call_noted(
    trace: Trace | None, call: Callable[[], T], name: str, facts: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], T]:
    return call if trace is None else trace.call(call, name, dict(facts))


def op_noted(
    trace: Trace | None, call: Callable[[], None], op: Op, places: Places, name: str = ""
) -> Callable[[], None]:
    return call if trace is None else trace.call(call, name or op.kind, call_facts(op, places))


def transfer_noted(
    trace: Trace | None, transfer: Transfer, op: Op, places: Places, part: int = 0, kind: str = ""
) -> Transfer:
    """Return the transfer that an operation (of a Reduce, one part) has become, noted where there is a trace.

    kind: what it is noted as, if not as the operation's kind.
    """
    if trace is None:
        return transfer
    kind = kind or op.kind
    if isinstance(op, Reduce):
        op = replace(op, srcs=op.srcs[part : part + 1], dsts=op.dsts[part : part + 1])
    return TracedTransfer(trace, transfer, kind, transfer_facts(op, places))


# -- what is told of an operation -----------------------------------------------------------------


def call_facts(op: Op, places: Places) -> Facts:
    """Return the operation as maths, with a product's multiply-adds and the operands it reads in place."""
    facts: Facts = {"operation": str(op), "step": op.step}
    if isinstance(op, Multiply):
        viewed = [ref for ref in (op.a, op.b) if ref.rank != places.rank]
        size = sum(ref.region.size * places.array(ref).itemsize for ref in viewed)
        facts |= {"multiply_adds": multiply_adds(op), "bytes": size} | words_of(op, places)
    return facts


def transfer_facts(op: Op, places: Places) -> Facts:
    """Return the facts of a transfer: ranks, bytes (incoming, or else outgoing), and words as the report counts them.

    Words are counted once, on the rank that asked for them; what is moved within a rank's own memory is no word.
    """
    rank, nodes = places.rank, places.schedule.mesh.node_of_rank
    came: list[TransferSpec] = []
    went: list[TransferSpec] = []
    for move in op.moves(rank):
        (went if move.source == rank and (move.adds or move.to != rank) else came).append(move)
    moved = came or went
    refs = list(dict.fromkeys(move.ref for move in moved))
    return {
        "operand": refs[0].operand if refs else "",
        "regions": [f"[{', '.join(map(str, ref.region))}]" for ref in refs],
        "from": sorted({move.source for move in came}),
        "to": sorted({move.to for move in went}),
        "bytes": sum(move.ref.region.size * itemsize(op, move.ref, places) for move in moved),
        **words_of(op, places),
        "between_nodes": any(nodes[move.source] != nodes[move.to] for move in came + went),
        "step": op.step,
    }


def itemsize(op: Op, ref: Ref, places: Places) -> int:
    """Return the bytes of an element in transit; for accumulates, those of the sum's type."""
    if isinstance(op, Accumulate):
        assert isinstance(op.dst.buffer, str)
        block, _ = places.block(op.dst.buffer, summing=True)
        assert block is not None
        return block.dtype.itemsize
    if isinstance(op, Reduce):
        ref = op.srcs[0]
    return places.whole(ref, summing=False).itemsize


def words_of(op: Op, places: Places) -> Facts:
    """Return words of this operation as the report counts them, and as (source, destination, words)."""
    nodes, words = places.schedule.mesh.node_of_rank, {"intra_node": 0, "inter_node": 0}
    pairs = [(move.source, move.to, move.ref.region.size) for move in counted(op, places.rank)]
    for source, to, size in pairs:
        words["intra_node" if nodes[source] == nodes[to] else "inter_node"] += size
    return {"words": words, "pairs": pairs}
