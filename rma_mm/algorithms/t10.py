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
from math import prod
from typing import Literal

from rma_mm.algorithms.search.t10_points import Point, best_point
from rma_mm.algorithms.survey import whole_numbers
from rma_mm.geometry.layout import Layout
from rma_mm.schedule.row import Row, Setting, in_pieces


def row_of(point: Point, setting: Setting) -> Row:
    """The row of a plan. Operands that are placed otherwise are brought to where it wants them."""
    a, b, c = point.layouts()
    wanted = setting.unless_given((a, b, c))
    longest = max(-(-setting.shape[2] // (point.ranks[2] * ring)) for ring in point.rings[:2])
    rotates = max(point.rings[:2]) > 1
    over: Literal["k", "n"] = "k" if rotates or point.rings[2] == 1 or point.rings[2] < point.ranks[2] else "n"
    ring_axes = ("a", "b") if over == "k" else ("c",)
    pieces = -(-longest // point.pace) if point.pace else 1
    by = tuple(axis for axis in ring_axes if axis in point.grid.names)
    return replace(
        T10_ROTATE,
        placements=lambda _: wanted, work=lambda _: point.work(),
        over=over, order="rotated" if by else "plain", by=by, own_last=over == "n",
        result="here" if point.ranks[2] == 1 and wanted[2] else "reduce",
        stage=lambda _: {"A": a, "B": b}, grains=in_pieces(pieces), fit=None, form=None,
    )  # fmt: skip


def _fit(setting: Setting) -> Row | str:
    if any(layout is not None and layout.partial for layout in setting.layouts[:2]):
        return "takes no summands of A or B; redistribute them to a placement that holds each element first"
    point = best_point(setting.shape, setting.mesh.size, setting.memory)
    return point if isinstance(point, str) else row_of(point, setting)


def _form(text: str) -> Row | str:
    """The row of the plan that `text` names."""
    parts = text.split("/")
    ranks, rings = (whole_numbers(part, 3) for part in [*parts, "", ""][:2])
    pace = whole_numbers(parts[2], 1) if len(parts) == 3 else [0]
    if not ranks or not rings or not pace or len(parts) > 3:
        return "t10_rotate takes F_op and the rings of A, B and C, as t10_rotate:2,2,1/2,2,1, and a pace, as …/64"
    point = Point((ranks[0], ranks[1], ranks[2]), (rings[0], rings[1], rings[2]), pace[0] or None)

    def fit(setting: Setting) -> Row | str:
        size = setting.mesh.size
        best = f"t10_rotate:{best_point(setting.shape, size)}"
        if prod(point.ranks) != size:
            return f"F_op {point.ranks} is for {prod(point.ranks)} ranks, and there are {size}; {best} would fit"
        if isinstance(refused := _fit(setting), str):
            return refused
        if point.fault:
            return f"{point.fault}; {best} would fit"
        return replace(row_of(point, setting), name=f"t10_rotate:{text}")

    return replace(T10_ROTATE, name=f"t10_rotate:{text}", fit=fit, form=None)


T10_ROTATE = Row(
    name="t10_rotate",
    source="Liu et al. 2024 (T10)",
    summary="compute-shift: operands rotate in rings of any length, from all copied to each element once",
    work=lambda problem: Layout(((), (), ())),
    over="k",
    grouped="ABC",
    fit=_fit,
    form=_form,
)
