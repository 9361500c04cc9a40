"""Where an operand in reach is copied together rather than multiplied in parts."""

import pytest

from rma_mm.algorithms import ALGORITHMS
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import Copy, Multiply
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify

MESH = MeshShape((2, 2))


def schedule(shape: tuple[int, int, int], a: str, b: str, width: int = 1024) -> Schedule:
    c = b if "None, (" in b else a
    places = parse_layout(a, MESH), parse_layout(b, MESH), parse_layout(c, MESH)
    found = lower(ALGORITHMS["stationary_c"], PlacedProblem(shape, MESH, places), Tuning(width=width))
    verify(found)
    return found


def counts(found: Schedule) -> tuple[int, int]:
    ops = found.program(1)
    return sum(isinstance(op, Copy) for op in ops), sum(isinstance(op, Multiply) for op in ops)


@pytest.mark.parametrize(
    ("shape", "a", "b"),
    [
        ((16384, 256, 4096), "P(('i', 'j'), None)", "P('i', 'j')"),
        ((65536, 512, 512), "P(('i', 'j'), None)", "P('i', 'j')"),
        ((512, 65536, 512), "P('i', 'j')", "P(None, ('i', 'j'))"),
    ],
)
def test_a_small_operand_in_four_parts_is_copied_and_multiplied_once(shape, a, b):
    assert counts(schedule(shape, a, b)) == (4, 1)


def test_large_operands_are_multiplied_where_they_lie():
    assert counts(schedule((4096, 4096, 4096), "P('i', 'j')", "P('i', 'j')")) == (0, 2)


def test_small_products_are_left_alone():
    assert counts(schedule((512, 512, 1024), "P(('i', 'j'), None)", "P('i', 'j')")) == (0, 4)


def test_where_memory_is_scarce_nothing_is_copied_together():
    copies, products = counts(schedule((16384, 256, 4096), "P(('i', 'j'), None)", "P('i', 'j')", width=256))
    assert copies == 0 < products
