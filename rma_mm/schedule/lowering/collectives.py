"""Passes that replace pulls and pushes by what a group of ranks does together, wherever both are equal.

A pull may become a broadcast where, at one step, all ranks of a group want the same slice, of one of them or of an
owner beside the group, who then joins it; a shift where each rank's next slice is what its ring neighbour just used. A
push may become a reduction where all push to the same place at one step, and a shift where a rank adds to what its
neighbour just added to. Every pass asks for the operations of all members, as they are before any pass, so that all
members decide alike. Where the proof fails, the Copies and Accumulates stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rma_mm.schedule.lowering.node_crossing import Crossing
from rma_mm.schedule.ops import Accumulate, Broadcast, Copy, Multiply, Op, Reduce, Ref, Scale, Shift, Slot

BESIDE = 64  # owners beside a group up to which they join it, each of them in a group of its own with a communicator

Member = Callable[[int], Sequence[Op]]  # A rank → its operations before any pass
Pass = Callable[[list[Op], int], list[Op]]  # (operations of a rank, the rank) → the same with group operations
Parts = dict[int, tuple[Ref, ...]]  # step → boxes of homes that the whole group moves at it
Calls = dict[int, list[tuple[tuple[Ref, ...], tuple[int, ...]]]]
"""Step → what is sent at it by one broadcast, or all-gather, each, and among whom."""


def pulls(member: Member, group: Sequence[int], x: str, at_once: bool = True) -> Pass | None:
    """Return the pass that moves operand `x` by broadcasts, or else by shifts; None if neither is proved.

    at_once: what several members own and all want at one step is one all-gather, and not a broadcast from each.
    """
    copies = {q: [op for op in member(q) if isinstance(op, Copy) and op.dst.operand == x] for q in group}
    wanted = {q: [op.src for op in copies[q] if op.src.rank != q] for q in group}
    parts = _multicast(member, group, copies)
    named = {part for step in parts.values() for part in step}
    is_all = all(named.issuperset(refs) for refs in wanted.values())
    ring = 0 if is_all else _ring([wanted[q] for q in group], group)
    if ring and all(fills(op.dst) for q in group for op in copies[q]):
        return lambda ops, rank: _shifting(ops, rank, tuple(group), copies, ring)
    calls: Calls = {
        step: [(sent, tuple(group)) for sent in ([refs] if at_once else [(ref,) for ref in refs])]
        for step, refs in parts.items()
    }
    return (lambda ops, rank: _broadcasting(ops, rank, x, calls)) if parts else None


def joins(member: Member, group: Sequence[int], x: str) -> Pass | None:
    """Return the pass by which owners outside a group broadcast slices of `x` to it; None if there are none.

    It is for the members, and for those owners: who sends walks through the same steps in the same order.
    """
    copies = {q: [op for op in member(q) if isinstance(op, Copy) and op.dst.operand == x] for q in group}
    owners = {op.src.rank for op in copies[group[0]]}.difference(group)
    calls: Calls = {}
    for owner in sorted(owners) if len(owners) <= BESIDE else ():
        members = tuple(sorted((*group, owner)))
        for step, refs in _multicast(member, members, {**copies, owner: []}).items():
            calls.setdefault(step, []).extend(((ref,), members) for ref in refs if ref.rank == owner)
    return (lambda ops, rank: _broadcasting(ops, rank, x, calls)) if calls else None


def pushes(
    member: Member, group: Sequence[int], x: str = "C", is_dense: Callable[[Ref], bool] = lambda _: True
) -> Pass | None:
    """Return the pass that sums C by reductions, or else round a ring; None if neither is proved.

    is_dense: whether a box is one part of its owner's array, as reductions want it.
    """
    adds = {q: [op for op in member(q) if isinstance(op, Accumulate) and op.dst.operand == x] for q in group}
    if not all(fills(op.src) for q in group for op in adds[q]):
        return None
    lag = _summing_ring([[op.dst for op in adds[q]] for q in group], group)
    parts = _common(
        adds, group, {q: _by_step([(op.step, op.dst) for op in adds[q] if is_dense(op.dst)]) for q in group}
    )
    if lag and len(parts) < len(adds[group[0]]):
        return lambda ops, rank: _shifting_sums(ops, rank, tuple(group), lag)
    return (lambda ops, rank: _reducing(ops, tuple(group), parts)) if parts else None


def by_node(ops: list[Op], rank: int, group: tuple[int, ...], two: Crossing) -> list[Op]:
    """`ops` with what a group broadcasts or sums in two steps, one between nodes and one on each.

    The second step needs the first. A Broadcast on a node is issued later (`Op.ahead`); a sum between nodes follows
    when the next one is due.
    """
    result, due, count = list[Op](), list[Op](), 0
    for op in ops:
        if isinstance(op, Broadcast) and op.group == group:
            result += _broadcast_by_node(op, rank, two)
        elif isinstance(op, Reduce) and op.group == group:
            count += 1
            first, second = _reduced_by_node(op, rank, two, f"C~{count}")
            result += [*due, *first]
            due = second
        else:
            result.append(op)
    return result + due


def fills(ref: Ref) -> bool:
    return isinstance(ref.buffer, Slot) and ref.buffer.region == ref.region


# -- the proofs -----------------------------------------------------------------------------------


def _ring(wanted: list[list[Ref]], group: Sequence[int]) -> int:
    """Return how many slices a rank gets from its neighbour before that gets its next one; 0 if there is no ring.

    wanted: what each member takes from others, in order.
    """
    size = len(group)
    if size < 2 or not wanted[0]:
        return 0
    lag, rest = divmod(len(wanted[0]), size - 1)
    if rest or any(len(mine) != len(wanted[0]) for mine in wanted):
        return 0
    for n, mine in enumerate(wanted):
        following = (n + 1) % size
        first = all(ref.rank == group[following] for ref in mine[:lag])
        if not first or mine[lag:] != wanted[following][: len(mine) - lag]:
            return 0
    return lag


def _summing_ring(targets: list[list[Ref]], group: Sequence[int]) -> int:
    """Slices that each member adds to its own C, the last of its walk; 0 if there is no ring."""
    size = len(group)
    if size < 2 or not targets[0]:
        return 0
    lag, rest = divmod(len(targets[0]), size)
    if rest or any(len(mine) != len(targets[0]) or len(set(mine)) != len(mine) for mine in targets):
        return 0
    for n, mine in enumerate(targets):
        following = targets[(n + 1) % size]
        if mine[lag:] != following[: len(mine) - lag] or any(ref.rank != group[n] for ref in mine[-lag:]):
            return 0
    return lag


def _multicast(member: Member, group: Sequence[int], copies: dict[int, list[Copy]]) -> Parts:
    """Return the slices that every member but their owner copies at the same step, into one buffer."""
    wanted = {}
    for q in group:
        found: dict[int, list[Ref]] = {}
        buffers: dict[int, set[str | Slot]] = {}
        for op in copies[q]:
            if op.src.rank != q:
                found.setdefault(op.step, []).append(op.src)
                buffers.setdefault(op.step, set()).add(op.dst.buffer)
        wanted[q] = {step: refs for step, refs in found.items() if len(buffers[step]) == 1}
    return _common({q: member(q) for q in group}, group, wanted, owners=True)


def _common(
    ops: Mapping[int, Sequence[Op]], group: Sequence[int], wanted: dict[int, dict[int, list[Ref]]], owners: bool = False
) -> Parts:
    """Step → boxes that every member names (with `owners`: every member but the box's owner), if all step alike.

    ops: by member, those that say in which order it steps.
    """
    order = {q: list(dict.fromkeys(op.step for op in ops[q])) for q in group}
    shared = [step for step in order[group[0]] if all(step in order[q] for q in group)]
    parts: Parts = {}
    for step in shared:
        named = {q: set(wanted[q].get(step, ())) for q in group}
        found = sorted(set().union(*named.values()), key=lambda ref: (ref.rank, [span.runs for span in ref.region]))
        legal = [
            ref
            for ref in found
            if ref.rank in named and all(ref in named[q] or (owners and q == ref.rank) for q in group)
        ]
        if legal:
            parts[step] = tuple(legal)
    if any([step for step in order[q] if step in parts] != list(parts) for q in group):
        return {}
    return parts


def _by_step(found: list[tuple[int, Ref]]) -> dict[int, list[Ref]]:
    steps: dict[int, list[Ref]] = {}
    for step, ref in found:
        steps.setdefault(step, []).append(ref)
    return steps


# -- the rewrites ---------------------------------------------------------------------------------


def _shifting(ops: list[Op], rank: int, group: tuple[int, ...], copies: dict[int, list[Copy]], lag: int) -> list[Op]:
    """Replace Copies by Shifts: receive from the next member while sending to the one before."""
    before, following = _neighbours(rank, group)
    mine, theirs = ([op for op in copies[q] if op.src.rank != q] for q in (rank, before))
    turn = {op: n for n, op in enumerate(mine)}
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Copy) and op in turn:
            n = turn[op]
            sent = theirs[n].src if n < lag else mine[n - lag].dst
            op = Shift(sent, op.dst, before, following, group, op.step, op.src)
        result.append(op)
    return result


def _broadcasting(ops: list[Op], rank: int, x: str, calls: Calls) -> list[Op]:
    """Copies replaced by the calls of their step, which owners join."""
    into = {(op.step, op.src): op.dst for op in ops if isinstance(op, Copy) and op.dst.operand == x}
    calls = {step: [call for call in made if rank in call[1]] for step, made in calls.items()}
    called = {(step, ref) for step, made in calls.items() for parts, _ in made for ref in parts if ref.rank != rank}
    result: list[Op] = []
    joined: set[int] = set()
    for op in ops:
        if op.step in calls and op.step not in joined:
            joined.add(op.step)
            for parts, group in calls[op.step]:
                places = [into[op.step, part] for part in parts if part.rank != rank]
                result.append(Broadcast(parts, _room(places), group, op.step))
        if not (isinstance(op, Copy) and op.dst.operand == x and (op.step, op.src) in called):
            result.append(op)
    return result


def _room(places: list[Ref]) -> Ref | None:
    """Return the slot, or the box of a home, that several places are parts of."""
    if not places:
        return None
    buffer = places[0].buffer
    return replace(places[0], region=buffer.region) if isinstance(buffer, Slot) else places[0]


def _reducing(ops: list[Op], group: tuple[int, ...], parts: Parts) -> list[Op]:
    """Accumulates to `parts` replaced by one Reduce a step."""
    sources = {(op.step, op.dst): op.src for op in ops if isinstance(op, Accumulate)}
    result: list[Op] = []
    joined: set[int] = set()
    for op in ops:
        if isinstance(op, Accumulate) and op.dst in parts.get(op.step, ()):
            if op.step in joined:
                continue
            joined.add(op.step)
            dsts = parts[op.step]
            op = Reduce(tuple(sources[op.step, dst] for dst in dsts), dsts, group, op.step)
        result.append(op)
    return result


def _broadcast_by_node(op: Broadcast, rank: int, two: Crossing) -> list[Op]:
    """Broadcasts from the owners to one rank of each other node, and from it to the others there."""

    def passed(part: Ref) -> Ref:
        if part.rank in two.near:
            return part
        assert op.dst is not None
        return Ref(two.mate(part.rank), op.dst.buffer, part.region)

    steps = [
        (tuple(part for part in op.parts if two.places[part.rank] == place), across)
        for place, across in enumerate(two.across)
    ]
    steps.append((tuple(map(passed, op.parts)), two.near))
    return [
        Broadcast(parts, op.dst if any(part.rank != rank for part in parts) else None, group, op.step)
        for parts, group in steps
        if parts and rank in group and len(group) > 1
    ]


def _reduced_by_node(op: Reduce, rank: int, two: Crossing, name: str) -> tuple[list[Op], list[Op]]:
    """Sums of a node, each by the rank in the place of the part's owner, and those of them between nodes."""
    first, sums = list[Op](), list(op.srcs)
    if len(two.near) > 1:
        sums = [
            Ref(two.mate(dst.rank), Slot(f"{name}.{n}", dst.region), dst.region) for n, dst in enumerate(op.dsts)
        ]
        first = [Reduce(op.srcs, tuple(sums), two.near, op.step)]
    second = list[Op]()
    for place, across in enumerate(two.across):
        pairs = [pair for pair in zip(sums, op.dsts, strict=True) if two.places[pair[1].rank] == place]
        if pairs and rank in across:
            srcs, dsts = zip(*pairs, strict=True)
            second.append(Reduce(srcs, dsts, across, op.step))
    return first, second


def _shifting_sums(ops: list[Op], rank: int, group: tuple[int, ...], lag: int) -> list[Op]:
    """Accumulates to others replaced by Shifts: a sum goes to the member that adds to it next."""
    before, following = _neighbours(rank, group)
    adds = [op for op in ops if isinstance(op, Accumulate)]
    turn = {op: n for n, op in enumerate(adds)}
    started = {op.src.buffer for op in adds[lag:]}
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Accumulate) and turn[op] < len(adds) - lag:
            op = Shift(op.src, adds[turn[op] + lag].src, before, following, group, op.step)
        elif isinstance(op, Multiply) and op.c.buffer in started:
            op = replace(op, first=False)
        elif isinstance(op, Scale) and op.c.buffer in started:
            continue
        result.append(op)
    return result


def _neighbours(rank: int, group: tuple[int, ...]) -> tuple[int, int]:
    """Return the members before and behind a rank on the ring."""
    at = group.index(rank)
    return group[at - 1], group[(at + 1) % len(group)]
