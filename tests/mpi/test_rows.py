"""Every row on real ranks: what it moves against closed forms, what it gives against NumPy, and what it refuses.

Words are the same wherever ranks are. Messages are those that a transport counts: one for each MPI call. Where ranks
share a node, a get is a copy by load and store, which is no message, while the interpreter counts it; in `nolocal`
every rank is a node of its own, so that there, and only there, all messages of the closed forms are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.algorithms.t10 import points
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import grids
from rma_mm.runtime.footprint import Operand
from rma_mm.schedule import boxes
from rma_mm.schedule.ops import Copy
from tests.closed_forms import FORMS, even_shape
from tests.launch import parallel
from tests.reference import expected, whole_numbers

# -- what is moved, against closed forms ----------------------------------------------------------

GRIDS = {
    4: [(4,), (2, 2), (1, 4), (4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (2, 1, 3), (1, 3, 2), (3, 2, 1)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 2, 4), (4, 1, 2)],
    9: [(9,), (3, 3), (1, 3, 3), (3, 1, 3)],
}
"""Ranks → meshes of one to three axes."""


def matrices(mesh, shape, layouts):
    """A and B of ones on these placements, and the placement of C."""
    m, n, k = shape
    a, b, c = layouts
    return DistMatrix.from_numpy(np.ones((m, k)), mesh, a), DistMatrix.from_numpy(np.ones((k, n)), mesh, b), c


def executed(plan, A, B, k):
    """(words, messages, gets) of every rank in one execution, whose result is checked."""
    assert (plan.execute(A, B).tile == k).all()
    own = plan.mesh.rank
    gets = sum(isinstance(op, Copy) and op.src.rank != own for op in plan.schedule.program(own))
    words = plan.words.words_intra + plan.words.words_inter
    return [list(each) for each in zip(*plan.mesh.comm.allgather((words, plan.words.messages, gets)), strict=True)]


def of_algorithm(mesh, shape, name, layouts=(None, None, None)):
    """(words, messages, gets) of every rank in a product on these placements, or on those that the plan chooses."""
    m, n, k = shape
    a, b, c = layouts
    operands = [Operand(extent, np.dtype(float), each) for extent, each in (((m, k), a), ((k, n), b))]
    with rma_mm.plan(*operands, mesh, layout=c, algorithm=name) as plan:
        A, B, _ = matrices(mesh, shape, (plan.layouts["A"], plan.layouts["B"], c))
        return executed(plan, A, B, k)


@contextmanager
def panels_of(width: int) -> Iterator[None]:
    """Panels may be as narrow as this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "NARROW", width)
        yield


def check_form(mesh, form):
    """Words and messages of one algorithm on one mesh are the closed form, to the last one."""
    grid, shape = mesh.shape.shape, even_shape(mesh.shape.shape)
    in_place = "AB" if mesh.nodes == 1 else ""
    with panels_of(1 if in_place and form.viewed_of else 128):  # fused panels are got, and not read in place
        words, messages, gets = of_algorithm(mesh, shape, form.name, form.layouts(mesh.shape))
    if mesh.nodes == 1:  # every get is a copy by load and store
        messages = [sum(both) for both in zip(messages, gets, strict=True)]
    assert words == form.words(grid, shape), f"words of {form.label} on {grid}"
    assert messages == form.messages(grid, shape, in_place), f"messages of {form.label} on {grid}"


@parallel(ranks=tuple(GRIDS), env=("node", "nolocal"), timeout=120)
def test_words_and_messages_are_the_closed_form(comm):
    for grid in GRIDS[comm.size]:
        with Mesh(grid, comm) as mesh:
            for form in FORMS.values():
                if form.axes == len(grid) or (form.axes == 1 and grid in [(2, 2), (3, 2), (2, 2, 2)]):
                    check_form(mesh, form)


ROTATING = {
    4: [
        ("2,2,1/2,2,1", "cannon, placed skewed", (2, 2)),
        ("1,4,1/4,1,1", "column_parallel, A m→i", (4,)),
        ("4,1,1/1,4,1", "data_parallel, B k→i", (4,)),
        ("1,1,4/1,1,4", "gemm_scatter", (4,)),
    ],
    6: [
        ("2,3,1/3,2,1", "cannon, placed skewed", (2, 3)),
        ("3,2,1/2,3,1", "cannon, placed skewed", (3, 2)),
        ("1,1,6/1,1,6", "gemm_scatter", (6,)),
    ],
    9: [("3,3,1/3,3,1", "cannon, placed skewed", (3, 3))],
}
"""Ranks → plans of t10_rotate that are another algorithm, by the label of its closed form, and that one's mesh."""


@parallel(ranks=tuple(ROTATING), env=("nolocal",))
def test_points_of_t10_are_other_algorithms(comm):
    with Mesh((comm.size,), comm) as mesh:
        for point, label, grid in ROTATING[comm.size]:
            shape = even_shape(grid)
            words, messages, _ = of_algorithm(mesh, shape, f"t10_rotate:{point}")
            assert words == FORMS[label].words(grid, shape), f"words of {point} and {label}"
            if label != "gemm_scatter":  # which travels in two pieces
                assert messages == FORMS[label].messages(grid, shape), f"messages of {point} and {label}"


@parallel(ranks=(2, 4, 6), env=("node",))
def test_every_point_of_t10_moves_what_it_says(comm):
    """From equal shares: the copies are made first, and then all rotates (algorithms.md §4)."""
    shape = even_shape((comm.size,))
    with Mesh((comm.size,), comm) as mesh:
        for point in points(comm.size):
            words, _, _ = of_algorithm(mesh, shape, f"t10_rotate:{point}")
            assert sum(words) == comm.size * (point.moved(shape) + point.placing(shape)), str(point)


# -- what is computed, against NumPy --------------------------------------------------------------

AXES = {
    **dict.fromkeys(("srumma", "cannon", "summa_c", "summa_a", "summa_b", "pumma", "pblas"), 2),
    **dict.fromkeys(("mixed_2d", "row_column_2d"), 2),
    **dict.fromkeys(("agarwal_3d", "johnson_3d", "solomonik_25d", "tesseract", "nus_3d"), 3),
}
"""Rows that want meshes of so many axes. The others take any."""

BY_GROUPS = {"broadcast", "all-gather", "shift", "reduce", "reduce-scatter"}
ONE_SIDED = {"get", "view", "accumulate"}


@dataclass(frozen=True)
class Product:
    """What to multiply, and how."""

    shape: tuple[int, int, int]
    transposed: str
    dtype: str
    alpha: int
    beta: int

    def rolled(self, places):
        """The same with other extents for m, n and k."""
        m, n, k = islice(cycle(self.shape), places % 3, places % 3 + 3)
        return Product((m, n, k), *list(vars(self).values())[1:])

    def matrices(self):
        """A, B and C, as they are stored."""
        rng = np.random.default_rng(sum(self.shape))
        m, n, k = self.shape
        a = (k, m) if "A" in self.transposed else (m, k)
        b = (n, k) if "B" in self.transposed else (k, n)
        return [whole_numbers(rng, extent) for extent in (a, b, (m, n))]


PRODUCTS = (
    Product((13, 17, 11), "B", "float64", 2, -1),  # divides nothing
    Product((0, 5, 7), "A", "float32", 1, 3),
    Product((1, 11, 13), "AB", "int32", -1, 0),
)


def check_product(mesh, name, product):
    """One product on the placements that the plan chooses: the result, and what the plan says of its movement."""
    a, b, c = product.matrices()
    dtype = np.dtype(product.dtype)
    with rma_mm.plan(
        Operand(a.shape, dtype), Operand(b.shape, dtype), mesh, algorithm=name, alpha=product.alpha, beta=product.beta,
        transpose_a="A" in product.transposed, transpose_b="B" in product.transposed,
    ) as plan:  # fmt: skip
        A, B, C = (
            DistMatrix.from_numpy(x.astype(dtype), mesh, plan.layouts[operand])
            for operand, x in zip("ABC", (a, b, c), strict=True)
        )
        before = plan_traffic(plan, A, B, C)
        plan.execute(A, B, out=C)
        check_movement(plan, [new - old for new, old in zip(plan_traffic(plan, A, B, C), before, strict=True)])
    wanted = expected(a, b, c, product.alpha, product.beta, product.transposed)
    assert np.array_equal(C.to_numpy(), wanted.astype(dtype)), f"{name} on {mesh}: {product}"


def plan_traffic(plan, A, B, C):
    """What windows and channels have counted on this rank so far: words and messages of each."""
    plan.prepare(A, B, C)
    (bound,) = plan.bound.values()
    sides = [window.counters for window in bound.windows], [channel.counters for channel in bound.channels]
    return [
        sum(figure)
        for each in sides
        for figure in ([x.words_intra + x.words_inter for x in each], [x.messages for x in each])
    ]


def check_movement(plan, traffic):
    """The plan names what the counters of windows and channels saw, over all ranks, and nothing else."""
    words, messages, group_words, group_messages = traffic
    assert plan.words.words_intra + plan.words.words_inter == words + group_words
    assert plan.words.messages == messages + group_messages
    named = {way for how in plan.movement.values() for way in how.split("+")}
    seen = plan.mesh.comm.allgather((named, words, group_words, group_messages))
    named = set().union(*(each[0] for each in seen))
    one_sided, by_groups, letters = (sum(each[n] for each in seen) for n in (1, 2, 3))
    case = f"{plan.algorithm} on {plan.mesh}: {named}"
    assert named <= BY_GROUPS | ONE_SIDED | {"here"}, case
    assert (one_sided > 0) == bool(named & ONE_SIDED), case
    assert (letters > 0) == (by_groups > 0) == bool(named & BY_GROUPS), case


@parallel(ranks=range(1, 10), env=("node",), timeout=120)
def test_every_row_on_every_mesh(comm):
    for axes in (1, 2, 3):
        for number, grid in enumerate(grids(comm.size, axes)):
            with Mesh(grid, comm) as mesh:
                for name in ALGORITHMS:
                    if AXES.get(name, axes) == axes:
                        for product in PRODUCTS:
                            check_product(mesh, name, product.rolled(number))
                    else:
                        assert f"needs a mesh of {('two', 'three')[AXES[name] - 2]} axes" in refusal(mesh, name)


# -- what is refused ------------------------------------------------------------------------------


def refusal(mesh, name, a=None, b=None):
    """The words in which a row refuses a product, which are the same on every rank."""
    operands = [Operand((12, 12), np.dtype(float))] * 2
    if a or b:
        operands = [DistMatrix.from_numpy(np.ones((12, 12)), mesh, layout) for layout in (a, b)]
    with pytest.raises(AlgorithmError) as caught:
        rma_mm.plan(*operands, mesh, algorithm=name)
    (text,) = set(mesh.comm.allgather(str(caught.value)))
    return text
