"""Possible placements of a chain's matrices, and their costs; `chain_search` chooses among them. Pure: no MPI.

Pure: no MPI. `chain_search` chooses among placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.shares import cuts_by_speed
from rma_mm.policy.model.cost_model import CostModel, estimate
from rma_mm.policy.model.locality import WHOLE, rank_sample
from rma_mm.policy.model.machine import COPY
from rma_mm.policy.model.traffic import Phase, TrafficItem, Workload
from rma_mm.policy.model.volumes import reduction_phase
from rma_mm.policy.planner.candidates import Request, about_seconds, single_layouts
from rma_mm.policy.planner.chain_graph import BATCHED, SUM, Shape
from rma_mm.policy.planner.chain_steps import Factor, Step
from rma_mm.schedule.algorithm import same_place
from rma_mm.schedule.lowering.decisions import NARROW


def placements(
    mesh: MeshShape, shape: Shape, is_turned: bool, known: Sequence[Layout] = (), speeds: tuple[float, ...] = ()
) -> tuple[Layout, ...]:
    """Return the placements that a matrix may have: known ones, then those that hold each element once.

    is_turned: whether some product reads it transposed, so that what is blocks to that one is among them. speeds: of
    ranks that differ in speed, whose shares then do as well.
    """
    singles = _cut_singles(mesh, shape, speeds)
    turned = _cut_singles(mesh, shape[::-1], speeds) if is_turned else []
    found: list[Layout] = []
    for layout in (*known, *singles, *(each.T for each in turned)):
        if not any(same_place(layout, other, shape, mesh) for other in found):
            found.append(layout)
    return tuple(found)


def _cut_singles(mesh: MeshShape, shape: Shape, speeds: tuple[float, ...]) -> list[Layout]:
    """The placements that hold each element once; by speed also with cuts that are alike everywhere, as groups need."""
    ways = (True, False) if speeds else ()
    cut = [
        replace(layout, splits=cuts_by_speed(layout.splits, shape, mesh, speeds, NARROW, by_column))
        for layout in single_layouts(mesh) for by_column in ways
    ]
    return cut or list(single_layouts(mesh))


@lru_cache(maxsize=4096)
def product_seconds(request: Request) -> float:
    return about_seconds(request)


def conversion_seconds(mesh: MeshShape, shape: Shape, source: Layout, target: Layout, cost_model: CostModel) -> float:
    """Return seconds of bringing a matrix from one placement to another. The tariff speaks of it as A."""
    sample = rank_sample(mesh)
    phases = []
    if source.partial:
        phases.append(reduction_phase("A", mesh, shape, source))
        source = source.single(mesh)
    phases.append(Phase(_pulled(mesh, shape, target, source, cost_model.flavour("A").loads_on_node)))
    return estimate(Workload(sample, phases, np.zeros(sample.count)), cost_model).seconds


def _pulled(mesh: MeshShape, shape: Shape, target: Layout, source: Layout, in_place: bool) -> list[TrafficItem]:
    """Return the traffic of pulls from one placement to another. in_place: whether they can load what node-mates hold.

    What others must send comes as it lies at its owner, and is put into place once it is there.
    """
    sample = rank_sample(mesh)
    rows, cols = sample.parts(target, shape)
    found = sample.spread(source, shape, (rows, cols), sample.holds(target))
    held = sample.spans(source, 1, shape[1])
    zero = np.zeros(sample.count)
    loaded = found.node if in_place else zero
    sent = found.foreign - loaded
    put = zero if cols.run <= held.run else sent  # else it lies in one stretch here, and comes there at once
    run = 2 * found.run if cols.run < held.run else WHOLE  # MPI packs what is in pieces on one side, its owner's
    calls = found.cuts[0] * found.cuts[1] / np.maximum(1.0, found.own + found.foreign)
    return [
        TrafficItem("A", "get", found.own + put, zero, zero, zero, run=found.run),
        TrafficItem("A", "get", zero, loaded, zero, calls * loaded, run=found.run),
        TrafficItem("A", "get", zero, found.node - loaded, found.between, calls * sent, run=run),
    ]


# -- element-wise steps ---------------------------------------------------------------------------


def beside(layout: Layout, shape: Shape, factor: Factor, own: Shape) -> Layout | None:
    """Return the placement of an element-wise operand whose result of `shape` is placed by `layout`.

    own: the shape of what is read; where it is broadcast, ranks hold it again. None if none will do.
    """
    read = own[::-1] if factor.transposed else own
    splits = tuple(
        split if mine == extent else () for split, mine, extent in zip(layout.splits, read, shape, strict=True)
    )
    if layout.partial or (splits != layout.splits and layout.skew_axes):  # replicas of what is shifted would differ
        return None
    return replace(layout, splits=splits[::-1] if factor.transposed else splits)


def summands(step: Step, layout: Layout, mesh: MeshShape) -> Layout | None:
    """Return the layout of sums over the ranks' own parts: partial along the axes that cut the matrix.

    Return None if parts are shifted, so that they do not add up, or if parts of largest elements would have to.
    """
    axes, layout = step.axes, layout.T if step.factors[0].transposed else layout
    if layout.skew_axes:
        return None
    cut = [axis for dim in axes for level in layout.splits[dim] for axis in level.axes]
    cut = [axis for axis in cut if layout.mesh(mesh).axis_size(axis) > 1]
    if cut and step.reduction != SUM:
        return None
    splits = tuple(() if dim in axes else split for dim, split in enumerate(layout.splits))
    return replace(layout, splits=splits, partial=(*layout.partial, *cut))


def group_layout(mesh: MeshShape, shape: Shape, groups: int) -> Layout:
    """Return the placement that deals whole groups of rows out to all ranks, as evenly as it can be."""
    rows = shape[0] // groups
    edges = tuple(float(n * groups // mesh.size * rows) for n in range(mesh.size + 1))
    return Layout(((Level(mesh.names, "bounds", edges),), ()))


def beside_groups(
    mesh: MeshShape, step: Step, layout: Layout, shapes: Mapping[str, Shape]
) -> tuple[Layout, ...] | None:
    """Return the placements of the operands of work on groups for a placement of its result; None if none will do."""
    assert step.grouped is not None
    groups = step.grouped[1]
    if not same_place(layout, group_layout(mesh, shapes[step.result], groups), shapes[step.result], mesh):
        return None
    return tuple(group_layout(mesh, shapes[x.name], groups) for x in step.others)


def grouped_seconds(mesh: MeshShape, step: Step, shapes: Mapping[str, Shape], cost_model: CostModel) -> float:
    """Return seconds of work on groups: their products, and what passes through memory, on the rank with most."""
    assert step.grouped is not None
    name, groups, _ = step.grouped
    share = -(-groups // mesh.size) / groups
    elements = sum(prod(shapes[each]) for each in (step.result, *(x.name for x in step.others)))
    seconds = cost_model.machine.cost("own", COPY).seconds(share * elements * cost_model.itemsize, 0.0)
    if name not in BATCHED:
        return seconds
    (rows, n), (height, columns) = shapes[step.result], shapes[step.others[0].name]
    k = height if BATCHED[name] == "tn" else groups * columns
    return seconds + share * groups * cost_model.local.seconds(rows / groups, n, k / groups)


def matching_layout(layout: Layout, among: Sequence[Layout], shape: Shape, mesh: MeshShape) -> Layout | None:
    return next((each for each in among if same_place(each, layout, shape, mesh)), None)


def all_places(
    mesh: MeshShape, steps: Sequence[Step], shapes: Mapping[str, Shape], known: Mapping[str, Layout],
    speeds: tuple[float, ...],
) -> dict[str, tuple[Layout, ...]]:
    """Return the placements that each matrix may have, including those that element-wise steps produce."""
    turned = {each.name for step in steps for each in step.factors if each.transposed}
    whole = {each.name for step in steps if not step.axes for each in step.factors}
    whole |= {step.result for step in steps if step.is_product}
    whole |= {name for step in steps for name in (step.result, *(x.name for x in step.reads)) if 1 not in shapes[name]}
    names = dict.fromkeys(name for step in steps for name in (*(x.name for x in step.reads), step.result))
    places: dict[str, list[Layout]] = {}
    for name in names:
        there = (known[name],) if name in known else ()
        every = placements(mesh, shapes[name], name in turned, there, speeds) if name in whole else there
        places[name] = list(every)
    for name in ("", *names):  # what is placed by nothing else lies anywhere
        if name and not places[name]:
            places[name] += placements(mesh, shapes[name], False)
        for step in steps if not name else ():
            for each in () if step.grouped is None else (step.result, *(x.name for x in step.others)):
                wanted = group_layout(mesh, shapes[each], step.grouped[1] if step.grouped else 1)
                if matching_layout(wanted, places[each], shapes[each], mesh) is None:
                    places[each].append(wanted)
        while any(_spread(mesh, step, shapes, places) for step in steps):
            pass
    return {name: tuple(each) for name, each in places.items()}


def _spread(
    mesh: MeshShape, step: Step, shapes: Mapping[str, Shape], places: dict[str, list[Layout]]
) -> bool:
    """Add a step's operand placements to its result's, and the reverse; return whether any were new."""
    if step.grouped is not None:
        return False
    shape, added = shapes[step.result], list[tuple[str, Layout | None]]()
    for layout in places[step.result]:
        added += [(x.name, beside(layout, shape, x, shapes[x.name])) for x in step.others]
    for x in step.others:
        if shape == (shapes[x.name][::-1] if x.transposed else shapes[x.name]):
            added += [(step.result, layout.T if x.transposed else layout) for layout in places[x.name]]
    if step.axes:
        ends = [summands(step, layout, mesh) for layout in places[step.factors[0].name]]
        added += [(step.result, replace(each, partial=())) for each in ends if each]
    is_new = False
    for name, place in added:
        if place is not None and not place.partial and matching_layout(place, places[name], shapes[name], mesh) is None:
            places[name].append(place)
            is_new = True
    return is_new


def elementwise_seconds(mesh: MeshShape, step: Step, shape: Shape, layout: Layout, cost_model: CostModel) -> float:
    """Seconds of element-wise work, or of sums, on matrices of `shape` placed by `layout`: they pass through memory."""
    elements = float(rank_sample(mesh).elements_held(layout, shape).max(initial=0.0))
    passes = len(step.reads) + (not step.is_product)
    return cost_model.machine.cost("own", COPY).seconds(elements * passes * cost_model.itemsize, 0.0)
