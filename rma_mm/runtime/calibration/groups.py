"""Movements of groups to be timed, through channels: broadcasts, all-gathers, shifts and reductions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import inf

from mpi4py import MPI

from rma_mm.geometry.span import Region
from rma_mm.policy.model.machine import COLLECTIVES, PACKED, Cost
from rma_mm.policy.model.traffic import FLAT
from rma_mm.runtime.calibration.overlap import LONG, WIDTH, Overlap
from rma_mm.runtime.calibration.sampling import BUSY, Act, Sample, TransferBenchmark, multiply_for
from rma_mm.runtime.calibration.site import Load, Site
from rma_mm.runtime.calibration.transfers import ROWS, Array
from rma_mm.windows import Transfer
from rma_mm.windows.channel import Channel
from rma_mm.windows.progress import Progress

SIZES = (1, 64, 512)  # rows of what each member sends: 2 KiB, 128 KiB and 1 MiB
TAG = 1  # of shifts


class CollectiveGroups:
    """The groups on one class of link, and this rank's part in its own."""

    def __init__(
        self, comm: MPI.Intracomm, site: Site, link: str, home: Array, room: Array, progress: Progress, multiply: Act
    ) -> None:
        """home, room: memory that parts come from, and go to. Collective over `comm`."""
        self.site, self.link, self.progress, self.whole = site, link, progress, comm
        self.all = site.groups(link)
        self.group: tuple[int, ...] = next((group for group in self.all if site.rank in group), ())
        colour = self.all.index(self.group) if self.group else MPI.UNDEFINED
        self.comm = MPI.Intracomm(comm.Split(colour, comm.rank))
        self.channel = Channel(self.comm, self.group, site.node_of) if self.group else None
        self.home, self.room, self.multiply = home, room, multiply
        self.transfers: list[Transfer] = []

    def cases(self, is_thorough: bool) -> list[TransferBenchmark]:
        """Return every movement in every size, its targets idle, and busy where that is asked for."""
        found: list[TransferBenchmark] = []
        for name in COLLECTIVES:
            for rows in SIZES[:-1] if self.link == "between" else SIZES:  # `overlaps` tell what large ones take there
                nbytes = rows * WIDTH * 4
                places = [self.parts(name, rows, place) for place in range(ROWS // (FLAT * SIZES[-1]))]
                moves = [GroupBenchmark(parts) for parts in places if parts]
                found.append(TransferBenchmark(self.link, name, nbytes, self.load(name), moves))
                if is_thorough and rows != SIZES[1]:
                    found.append(BusyGroupBenchmark(self, name, nbytes, places[0]))
        return found

    def pieces(self, columns: int) -> Packed:
        return Packed(self, columns)

    def overlaps(self) -> list[Overlap]:
        """Return benchmarks of long shifts, contiguous and strided, and of long sums."""
        found = []
        for name, cols in (("shift", WIDTH), (f"shift{PACKED}", WIDTH // 2)):
            areas = [Region.box((0, rows * WIDTH // cols), (0, cols)) for rows in LONG]
            moves = [self.shifts(area) for area in areas]
            found.append(self.overlap(name, "shift", moves))
        count = max(map(len, self.all))
        parts = [[self.sum(n, rows // count, owner) for n, owner in enumerate(self.group)] for rows in LONG]
        self.transfers += [transfer for each in parts for transfer in each]
        return [*found, self.overlap("reduce", "reduce-scatter", parts, 1 / count)]

    def overlap(self, name: str, movement: str, moves: Sequence[Sequence[Transfer]], share: float = 1.0) -> Overlap:
        """One of them. share: of the rows of `LONG` that a movement has."""
        calls, volume = self.load(movement)
        load = calls, volume * share
        return Overlap(self.whole, self.site, name, load, moves, self.progress, self.multiply)

    def shifts(self, area: Region) -> list[Transfer]:
        """Return a shift of an area round the ring of this rank's group; nothing if it has none."""
        if self.channel is None:
            return []
        group, at = self.group, self.group.index(self.site.rank)
        to, source = group[(at + 1) % len(group)], group[at - 1]
        made: Transfer = self.channel.shift((self.home, area), to, (self.room, area), source, True, TAG)
        self.transfers.append(made)
        return [made]

    def load(self, name: str) -> Load:
        """Return the terms of a movement's time; every member's share takes as long as every other's."""
        sent, received = Counter[int](), Counter[int]()
        for group in self.all:
            for member in group:
                first, last = member == group[0], member == group[-1]
                others = len(group) - 1
                sent[member] += {"broadcast": others * first, "shift": 1, "reduce": 1 - last}.get(name, others)
                received[member] += {"broadcast": 1 - first, "shift": 1, "reduce": others * last}.get(name, others)
        if self.link == "between":
            return self.site.wire_load(sent, received)
        return self.site.processor_load(sent + received)

    def parts(self, name: str, rows: int, place: int) -> list[Transfer]:
        """This rank's part: of a reduce-scatter one transfer for each owner, of all others one."""
        if self.channel is None:
            return []
        channel, group, me = self.channel, self.group, self.site.rank
        at = group.index(me)
        first = place * len(group)
        boxes = [Region.box((n * rows, (n + 1) * rows), (0, WIDTH)) for n in range(first, first + len(group))]
        mine = (self.home, boxes[0])
        made: list[Transfer]
        if name == "broadcast":
            made = [channel.broadcast(group[0], [mine if at == 0 else (self.room, boxes[0])], True)]
        elif name == "all-gather":
            theirs = [(owner, (self.room, box)) for owner, box in zip(group, boxes, strict=True) if owner != me]
            made = [channel.gather([mine], theirs, True)]
        elif name == "shift":
            return self.shifts(boxes[0])
        elif name == "reduce":
            made = [self.sum(first, rows, group[-1])]
        else:
            made = [self.sum(first + n, rows, owner) for n, owner in enumerate(group)]
        self.transfers += made
        return made

    def sum(self, n: int, rows: int, owner: int) -> Transfer:
        """Return the sum of everyone's n-th part, at its owner."""
        assert self.channel is not None
        summand, place = (x[n * rows : (n + 1) * rows] for x in (self.home, self.room))
        result: Array | None = place if owner == self.site.rank else None
        return self.channel.reduce(summand, owner, result)

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.close()
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()


class Packed(TransferBenchmark):
    """A ring shift of strided data, which MPI packs and unpacks."""

    def __init__(self, groups: CollectiveGroups, columns: int) -> None:
        moves: list[Act] = []
        if groups.channel is not None:
            moves = [GroupBenchmark(groups.shifts(Region.box((0, ROWS), (0, columns))))]
        super().__init__(groups.link, "packed", ROWS * columns * 4, groups.load("shift"), moves)

    def seconds(self, found: float, shift: Cost) -> float:
        return max(0.0, found / self.load[0] - shift.seconds(self.nbytes)) / ROWS


class GroupBenchmark:
    """A rank's part in a movement, from start to end."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self.parts = parts

    def __call__(self) -> None:
        for part in self.parts:
            part.start()
        for part in self.parts:
            part.wait()


class BusyGroupBenchmark(TransferBenchmark):
    """A movement during which half of the members multiply: measures the time of the other half."""

    def __init__(self, all_groups: CollectiveGroups, name: str, nbytes: int, parts: Sequence[Transfer]) -> None:
        super().__init__(all_groups.link, f"{name} busy", nbytes, all_groups.load(name), [])
        self.parts, self.progress = parts, all_groups.progress
        group = all_groups.group
        is_target = bool(group) and group.index(all_groups.site.rank) >= len(group) // 2
        self.multiply: Act | None = all_groups.multiply if is_target else None

    def sample(self) -> list[Sample]:
        begin = time.perf_counter()
        with self.progress:
            for part in self.parts:
                part.start()
            if self.multiply is not None:
                multiply_for(BUSY, self.multiply, self.progress)
            for part in self.parts:
                part.wait()
        is_origin = bool(self.parts) and self.multiply is None
        return [Sample(begin, time.perf_counter()) if is_origin else Sample(begin, begin, inf)]
