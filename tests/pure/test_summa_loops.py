"""The loops of `summa_loops.py` are the table form of SUMMA, operation by operation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms.summa import SUMMA_C
from rma_mm.algorithms.summa_loops import summa_operations
from rma_mm.geometry.mesh import MeshShape
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import Op
from rma_mm.schedule.passes import frames
from rma_mm.schedule.verify.checker import verify


def by_content(op: Op) -> Op:
    """Return the operation with its scratch slots called by their operand, and not given a place in the pool."""
    return op.on_slots(lambda slot: replace(slot, name=slot.name[0], frame=""))


@given(st.integers(2, 4).flatmap(lambda q: st.tuples(st.just(q), *[st.integers(q, 30)] * 3)))
def test_loops_are_the_table_form(case: tuple[int, int, int, int]) -> None:
    q, *shape = case
    mesh = MeshShape((q, q))
    schedule = lower(SUMMA_C, PlacedProblem(tuple(shape), mesh, SUMMA_C.placements(mesh)), Tuning(depth=0))
    for rank in mesh.ranks:
        by_loops = map(by_content, summa_operations(*shape, mesh, rank))
        assert list(by_loops) == list(map(by_content, schedule.program(rank)))
    verify(replace(schedule, program=lambda rank: frames(list(summa_operations(*shape, mesh, rank)), linger=False)))
