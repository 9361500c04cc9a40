"""A matrix from one placement to any other, as a schedule: every rank pulls what its new tiles need.

Summands of a partial source are first pushed into a placement that holds each element once. What several ranks of a
node need from other nodes crosses to the node once: each of them pulls a piece, and then the others' pieces from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.schedule.lowering.node_crossing import can_share, replicas
from rma_mm.schedule.lowering.node_fetch import even_piece
from rma_mm.schedule.ops import Accumulate, Barrier, Copy, Finish, Op, Ref, Scale
from rma_mm.schedule.schedule import STAGE, Home, Schedule, home_region


def redistribution(
    mesh: MeshShape, shape: tuple[int, int], source: Layout, target: Layout, is_readable: bool = False
) -> Schedule:
    """Return the schedule that fills C (placed by `target`) with A (placed by `source`).

    A partial target gets the matrix as one of its summands, the others are zero. is_readable: whether ranks may read
    each other's C, so that those of a node can share what comes from other nodes.
    """
    homes = {"A": Home(shape, source), "C": Home(shape, target)}
    name, layout = "A", source
    if source.partial:
        name, layout = "A" + STAGE, source.single(mesh)
        homes[name] = Home(shape, layout)

    are_shared = is_readable and can_share(mesh, shape, source, target)

    def program(rank: int) -> list[Op]:
        ops: list[Op] = [*sum_partial(mesh, shape, "A", source, rank)] if source.partial else []
        home = home_region(target, shape, mesh, rank)
        coords = target.coords(mesh, rank) or {}
        found: list[Copy] = []
        if not any(coords.get(axis) for axis in target.partial):
            found = copies(mesh, shape, layout, (name, "C"), home, rank)
        elif home:
            ops += [Scale(Ref(rank, "C", home), False, 0), Finish(Ref(rank, "C", home), 0)]
        return ops + (shared(mesh, found, replicas(mesh, target)[rank], rank) if are_shared else [*found])

    return Schedule(mesh, homes, program)


def shared(
    mesh: MeshShape, found: list[Copy], group: tuple[int, ...], rank: int, places: Mapping[int, int] | None = None
) -> list[Op]:
    """Copies into C, of which a rank makes its share of those from other nodes; the others' are in C of its `group`.

    Its share is a piece of each, or, of those from ranks in `places`, what comes from its own place.
    """
    nodes, far, near, passed = mesh.node_of_rank, list[Op](), list[Op](), list[Op]()
    for op in found:
        if len(group) == 1 or nodes[op.src.rank] == nodes[rank]:
            near.append(op)
            continue
        at = group.index(rank)
        for n in (*range(at, len(group)), *range(at)):
            if piece := _share(op, n, len(group), places or {}):
                dst = replace(op.dst, region=piece)
                if n == at:
                    far.append(Copy(replace(op.src, region=piece), dst, 0))
                else:
                    passed.append(Copy(replace(dst, rank=group[n]), dst, 1))
    return [*far, *near, Barrier(0), *passed]


def _share(op: Copy, index: int, count: int, places: Mapping[int, int]) -> Region | None:
    """Return the part of a Copy that falls to one of `count` ranks."""
    if op.src.rank not in places:
        return even_piece(op.dst.region, index, count)
    return op.dst.region if places[op.src.rank] % count == index else None


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
