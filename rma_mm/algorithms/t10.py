"""T10's compute-shift plans: operands that are needed by several ranks rotate among them instead of being copied.

    F_op = (m, n, k)     how many ranks share out each dimension; m·n·k = P
    a | n, b | m, c | k  into how many parts A, B and C are split in time: the length of their rings

A lacks n, so the n ranks along that dimension need the same part of A. In rings of `a` ranks each holds one part and
passes it on; n/a rings hold copies. `a = 1` copies (fast, large), `a = n` holds each element once (slow, small). B
likewise along m; C's parts along k are summed to `c` owners. With F_op = (p, p, 1) and rings of p this is Cannon.

Source: Y. Liu et al., "Scaling deep learning computation over the inter-core connected intelligence processor with
T10" (SOSP 2024). The form `:m,n,k/a,b,c` (or `…/pace`) names a plan; parts are circular windows of k, so rings need
not divide one another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Literal

from rma_mm.algorithms.from_table import whole_numbers
from rma_mm.algorithms.search.t10_points import Point, best_point, least_moving
from rma_mm.geometry.layout import Layout
from rma_mm.schedule.algorithm import Algorithm, Problem, in_pieces


def row_of(point: Point, problem: Problem) -> Algorithm:
    """Return the row of a plan. Operands that are placed otherwise are brought to where it wants them."""
    a, b, c = point.layouts()
    wanted = problem.unless_given((a, b, c))
    over: Literal["k", "n"] = "n" if point.sums_rotate else "k"
    ring_axes = ("a", "b") if over == "k" else ("c",)
    by = tuple(axis for axis in ring_axes if axis in point.grid.names)
    factors = point.factors(problem.shape).items()
    notes = [f"{x}           f_s {space}, f_t {time}, rp {pace}" for x, (space, time, pace) in factors]
    return replace(
        T10_ROTATE,
        found_as=str(point),
        notes=(f"T10's plan  {point}", *notes),
        placements=lambda _: wanted,
        work=lambda _: point.work(),
        over=over,
        order="rotated" if by else "plain",
        rotate_by=by,
        end_at_owner=over == "n",
        result="here" if point.ranks[2] == 1 and wanted[2] else "reduce",
        staged_to=lambda _: {"A": a, "B": b},
        granularity=in_pieces(point.pieces(problem.shape[2])),
        specialize=None,
        form=None,
    )


def _refused(problem: Problem) -> str:
    """Return why T10 has no plan for a problem; empty if it has one."""
    if any(layout is not None and layout.partial for layout in problem.layouts[:2]):
        return "cannot read partial sums of A or B; redistribute them without sum first"
    found = least_moving(problem.shape, problem.mesh.size, problem.memory)
    return found if isinstance(found, str) else ""


def _fit(problem: Problem) -> Algorithm | str:
    if refused := _refused(problem):
        return refused
    point = _best(problem)
    return point if isinstance(point, str) else row_of(point, problem)


@lru_cache(maxsize=64)
def _best(problem: Problem) -> Point | str:
    """Return the plan that takes least, or why there is none."""

    @cache
    def seconds(point: Point) -> float:
        return problem.seconds(row_of(point, problem))

    return best_point(problem, seconds)


def _form(text: str) -> Algorithm | str:
    """Return the algorithm of the plan that `text` names."""
    parts = text.split("/")
    ranks, rings = (whole_numbers(part, 3) for part in [*parts, "", ""][:2])
    pace = whole_numbers(parts[2], 1) if len(parts) == 3 else [0]
    if not ranks or not rings or not pace or len(parts) > 3:
        return "t10_rotate takes F_op and the rings of A, B and C, as t10_rotate:2,2,1/2,2,1, and a pace, as …/64"
    point = Point((ranks[0], ranks[1], ranks[2]), (rings[0], rings[1], rings[2]), pace[0] or None)

    def fit(problem: Problem) -> Algorithm | str:
        size = problem.mesh.size
        if prod(point.ranks) != size:
            fault = f"F_op {point.ranks} is for {prod(point.ranks)} ranks, and there are {size}"
        elif refused := _refused(problem):
            return refused
        else:
            fault = point.fault
        if fault:
            return f"{fault}; t10_rotate:{_best(replace(problem, memory=None))} would fit"
        return replace(row_of(point, problem), name=f"t10_rotate:{text}")

    return replace(T10_ROTATE, name=f"t10_rotate:{text}", specialize=fit, form=None)


T10_ROTATE = Algorithm(
    name="t10_rotate",
    source="Liu et al. 2024 (T10)",
    summary="compute-shift: operands rotate in rings of any length, from all copied to each element once",
    work=lambda problem: Layout(((), (), ())),
    over="k",
    grouped="ABC",
    specialize=_fit,
    form=_form,
)
