"""What ranks send each other in group operations, for the check that all of it matches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ..errors import ScheduleError
from ..geometry.span import Region
from .ops import Broadcast, Op, Reduce, Ref, incoming, outgoing
from .passes import kind_of

Route = tuple[int, int, str]
"""(from, to, operand): what is sent on one route arrives in order."""


class Letters:
    """Everything sent and expected so far."""

    def __init__(self) -> None:
        self.sent: dict[Route, list[tuple[Region, list[Region]]]] = defaultdict(list)
        self.expected: dict[Route, list[Region]] = defaultdict(list)
        self.calls: dict[tuple[int, ...], dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))

    def send(self, rank: int, op: Op, contents: Callable[[Ref], list[Region]]) -> None:
        """Note what `rank` sends, with the products in it, and what it expects."""
        if isinstance(op, Broadcast):
            self.calls[op.group][rank].append(op.parts)
        elif isinstance(op, Reduce):
            self.calls[op.group][rank].append(op.dsts)
        for to, ref in outgoing(op, rank):
            self.sent[rank, to, kind_of(ref)].append((ref.region, contents(ref)))
        for source, ref in incoming(op, rank):
            self.expected[source, rank, kind_of(ref)].append(ref.region)

    def find(self, route: Route, region: Region) -> list[Region] | None:
        """The products that came with `region`; None where it has not been sent yet."""
        found = [products for what, products in self.sent[route] if what == region]
        return found[-1] if found else None

    def check(self) -> None:
        """Raise ScheduleError unless all that was sent was expected, in that order, and groups made the same calls."""
        for route in {*self.sent, *self.expected}:
            source, to, x = route
            if [region for region, _ in self.sent[route]] != self.expected[route]:
                raise ScheduleError(f"rank {to} expects of {x} what rank {source} does not send, or in another order")
        for group, calls in self.calls.items():
            if any(calls[rank] != calls[group[0]] for rank in group):
                raise ScheduleError(f"the ranks {group} do not make the same calls in the same order")
