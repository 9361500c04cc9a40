"""A matrix from one placement to any other, as a schedule: every rank pulls what its new tiles need.

Summands of a partial source are first pushed into a placement that holds each element once.
"""

from __future__ import annotations

from collections.abc import Iterator

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import Accumulate, Barrier, Copy, Finish, Op, Ref, Scale
from rma_mm.schedule.schedule import STAGE, Home, Schedule, home_region


def redistribution(mesh: MeshShape, shape: tuple[int, int], source: Layout, target: Layout) -> Schedule:
    """Return the schedule that fills C (placed by `target`) with A (placed by `source`).

    A partial target gets the matrix as one of its summands, the others are zero.
    """
    homes = {"A": Home(shape, source), "C": Home(shape, target)}
    name, layout = "A", source
    if source.partial:
        name, layout = "A" + STAGE, source.single(mesh)
        homes[name] = Home(shape, layout)

    def program(rank: int) -> list[Op]:
        ops: list[Op] = [*sum_partial(mesh, shape, "A", source, rank)] if source.partial else []
        home = home_region(target, shape, mesh, rank)
        coords = target.coords(mesh, rank) or {}
        if any(coords.get(axis) for axis in target.partial):
            mine = Ref(rank, "C", home)
            return [*ops, Scale(mine, False, 0), Finish(mine, 0)] if home else ops
        return ops + copies(mesh, shape, layout, (name, "C"), home, rank)

    return Schedule(mesh, homes, program)


def sum_partial(mesh: MeshShape, shape: tuple[int, int], x: str, layout: Layout, rank: int) -> Iterator[Op]:
    """Yield the operations that sum the partial matrix `x` into `x+`, which holds each element once."""
    single = layout.single(mesh)
    mine = home_region(single, shape, mesh, rank)
    if mine:
        yield Scale(Ref(rank, x + STAGE, mine), False, 0)
    yield Barrier(0)
    coords = layout.coords(mesh, rank) or {}
    region = home_region(layout, shape, mesh, rank)
    if region and not any(coords[axis] for axis in layout.replicated_axes(mesh)):  # one replica speaks for all
        for owner, part in pieces(mesh, shape, single, region, rank):
            yield Accumulate(Ref(rank, x, part), Ref(owner, x + STAGE, part), 0)
    yield Barrier(0)


def copies(
    mesh: MeshShape, shape: tuple[int, int], layout: Layout, homes: tuple[str, str], region: Region, rank: int
) -> list[Copy]:
    """Copies of `region` from the first home, placed by `layout`, into this rank's part of the second."""
    source, target = homes
    found = pieces(mesh, shape, layout, region, rank)
    return [Copy(Ref(owner, source, part), Ref(rank, target, part), 0) for owner, part in found]


def pieces(
    mesh: MeshShape, shape: tuple[int, int], layout: Layout, region: Region, rank: int
) -> list[tuple[int, Region]]:
    """Return the owners of `region`, beginning behind `rank`, so that ranks start at different owners."""
    found = layout.overlapping(shape, mesh, region, rank)
    return sorted(found, key=lambda piece: (piece[0] - rank) % mesh.size)
