"""The closed form's pieces and copies against what lowering makes of the same row and problem."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import find_algorithm
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Span
from rma_mm.policy.model.joint_cuts import joint
from rma_mm.policy.model.locality import rank_sample
from rma_mm.policy.model.traffic import Phase
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, candidates, placed_problem
from rma_mm.schedule.lowering.boxes import fused, refine
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import Copy, Multiply, Op, Slot
from tests.strategies import pure

BLOCKED = ["stationary_c", "srumma", "summa_c:pull", "mixed_2d:pull", "data_parallel:pull", "gather_gemm:pull"]
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (3, 2), (1, 4), (6, 1), (5, 3)]
EXTENTS = st.sampled_from([1, 64, 100, 171, 256, 300, 512, 700, 1000, 1500, 2600])


def copied(ops: list[Op], x: str) -> int:
    """Words that a rank copies of an operand to multiply them."""
    copies = (op for op in ops if isinstance(op, Copy) and isinstance(op.dst.buffer, Slot))
    return sum(op.dst.region.size for op in copies if op.src.buffer == x)


def got(walk: Phase, x: str, rank: int) -> float:
    """The same, as it is priced."""
    return float(sum(each.own[rank] + each.node[rank] for each in walk.moved if (each.x, each.how) == (x, "get")))


@pytest.mark.parametrize("name", BLOCKED)
def test_what_is_multiplied_in_pieces_and_copied_together_is_what_is_priced(name: str) -> None:
    @pure(40)
    @given(st.sampled_from(GRIDS), st.tuples(EXTENTS, EXTENTS, EXTENTS))
    def check(grid: tuple[int, int], shape: tuple[int, int, int]) -> None:
        request = Request(shape, MeshShape(grid), algorithm=name)
        found = candidates(request)[0]
        assert found.layouts is not None
        problem = placed_problem(request, found.layouts)
        schedule = lower(found.algorithm, problem, Tuning(found.width, 2))
        walk = next(
            phase for phase in workload_of(found.algorithm, problem, found.width).phases if phase.work is not None
        )
        assert walk.work is not None
        for rank in range(prod(grid)):
            ops = list(schedule.program(rank))
            is_idle = not all(extent[rank] for extent in walk.work.extents)
            pieces = 0 if is_idle else prod(cut[rank] for cut in walk.work.pieces)
            assert sum(isinstance(op, Multiply) for op in ops) == pieces
            for x in "AB":
                assert got(walk, x, rank) == pytest.approx(copied(ops, x), abs=2, rel=2e-3)

    check()


def test_a_tile_that_is_dealt_out_to_other_ranks_than_its_partner_is_copied_together() -> None:
    """A's and B's blocks of k go round in steps of two and of three: no piece lies together in either's memory."""
    request = Request((1024, 1024, 1024), MeshShape((3, 2)), algorithm="pblas:pull")
    found = candidates(request)[0]
    assert found.layouts is not None
    walk = workload_of(found.algorithm, placed_problem(request, found.layouts), found.width).phases[-1]
    assert walk.work is not None
    assert walk.work.pieces[2].tolist() == [6.0] * 6
    assert [got(walk, x, 0) for x in "AB"] == [384 * 1024, 512 * 1024]


@pure(100)
@given(
    st.sampled_from([g for g in GRIDS if prod(g) > 1]), EXTENTS, st.integers(1, 200),
    st.lists(st.sampled_from(["i", "j", "(i,j)", "(j,i)"]), min_size=1, max_size=3), st.sampled_from(["*", "i", "j"]),
)
def test_spans_are_cut_together_as_lowering_cuts_them(
    grid: tuple[int, int], extent: int, least: int, texts: list[str], wanted_text: str
) -> None:
    mesh = MeshShape(grid)
    sample = rank_sample(mesh)
    layouts = [parse_layout(f"{text}, *", mesh) for text in texts]
    wanted, *helds = (sample.spans(x, 0, extent) for x in (parse_layout(f"{wanted_text}, *", mesh), *layouts))
    found = joint(wanted, helds, [sample.overlap(wanted, held).parts() for held in helds], least)
    for rank in range(mesh.size):
        at = int(wanted.of[rank])
        span = parse_layout(f"{wanted_text}, *", mesh).region((extent, 1), mesh, rank)[0]
        cutters = [parts_of(layout, mesh, extent) for layout in layouts]
        pieces = [span]
        for parts in cutters:
            pieces = refine(pieces, parts)
        panels = fused(pieces, least) or [span]
        assert found.whole[at] == max(1, len(pieces))
        assert found.fused[at] == len(panels)
        assert found.narrowest[at] == min(map(len, pieces), default=0)
        for parts, share in zip(cutters, found.repacked, strict=True):
            repacked = sum(len(panel) for panel in panels if sum(bool(panel & part) for part in parts) > 1)
            assert share[at] == pytest.approx(repacked / max(1, len(span)))
        assert not np.any(found.interleaved)


def parts_of(layout: Layout, mesh: MeshShape, extent: int) -> list[Span]:
    """The different spans of rows that ranks hold, those that are empty apart."""
    spans = (layout.region((extent, 1), mesh, rank)[0] for rank in range(mesh.size))
    return [span for span in dict.fromkeys(spans) if span]


def test_the_row_that_is_looked_at_is_one_sided() -> None:
    assert not any(find_algorithm(name).grouped for name in BLOCKED)


GRAINED = [("gather_gemm", (4096, 37, 3387), 24, 24), ("cosma", (566, 2774, 62), 32, 16)]


@pytest.mark.parametrize(("name", "shape", "ranks", "made"), GRAINED)
def test_parts_are_cut_into_no_more_than_the_shortest_has(
    name: str, shape: tuple[int, int, int], ranks: int, made: int
) -> None:
    """Of 37 columns for 24 ranks none is cut in two."""
    request = Request(shape, MeshShape((1, ranks)), algorithm=name)
    (found,) = candidates(request)
    assert found.layouts is not None
    problem = placed_problem(request, found.layouts)
    work = next(phase.work for phase in workload_of(found.algorithm, problem).phases if phase.work)
    ops = lower(found.algorithm, problem).program(0)
    assert prod(int(cuts[0]) for cuts in work.pieces) == sum(isinstance(op, Multiply) for op in ops) == made
