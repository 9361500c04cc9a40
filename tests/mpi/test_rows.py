"""Every row on real ranks: what it moves against closed forms, what it gives against NumPy, and what it refuses.

Words are the same wherever ranks are. Messages are those that a transport counts: one for each MPI call. Where ranks
share a node, a get is a copy by load and store, which is no message, while the interpreter counts it; in `nolocal`
every rank is a node of its own, so that there, and only there, all messages of the closed forms are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from math import prod

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.algorithms.search.t10_points import points
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import grids
from rma_mm.runtime.execution.operands import Operand
from rma_mm.schedule.lowering import decisions
from rma_mm.schedule.ops import Copy
from tests.closed_forms import FORMS, even_shape
from tests.launch import parallel
from tests.mpi.test_library import same_error
from tests.reference import collect, distribute, expected, whole_numbers
from tests.thorough import thorough

# -- what is moved, against closed forms ----------------------------------------------------------

GRIDS = {
    4: [(4,), (2, 2), (1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (2, 1, 3), (1, 3, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
    9: [(3, 3), (1, 3, 3)],
}
"""Ranks → meshes of one to three axes."""


def placed(x, layout, mesh, dtype, seed):
    """A DistMatrix with the tiles that the reference makes, summands of a partial one included."""
    tiles = distribute(x, layout, mesh.grid, np.random.default_rng(seed))
    D = DistMatrix.empty(x.shape, mesh, layout, dtype)
    if mesh.is_member:
        D.tile[...] = tiles[mesh.rank]
    return D


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
        patch.setattr(decisions, "NARROW", width)
        yield


def check_form(mesh, form):
    """Words and messages of one algorithm on one mesh are the closed form, to the last one."""
    grid, shape = mesh.grid.dims, even_shape(mesh.grid.dims)
    in_place = "AB" if mesh.num_nodes == 1 else ""
    with panels_of(1 if in_place and form.viewed_of else 128):  # fused panels are got, and not read in place
        words, messages, gets = of_algorithm(mesh, shape, form.name, form.layouts(mesh.grid))
    if mesh.num_nodes == 1:  # every get is a copy by load and store
        messages = [sum(both) for both in zip(messages, gets, strict=True)]
    assert words == form.words(grid, shape), f"words of {form.label} on {grid}"
    assert messages == form.messages(grid, shape, in_place), f"messages of {form.label} on {grid}"


@parallel(ranks=tuple(GRIDS), env=("node", "nolocal"), timeout=120, usual="nolocal")
def test_words_and_messages_are_the_closed_form(comm):
    for grid in GRIDS[comm.size]:
        with Mesh(grid, comm) as mesh:
            for form in FORMS.values():
                is_ring = form.axes == 1 and grid in [(2, 2), (3, 3)]
                if form.axes == len(grid) or is_ring:
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


def check_product(mesh, name, product, allowed=BY_GROUPS | ONE_SIDED):
    """One product on the placements that the plan chooses. Rank 0 is told what was wrong; empty where nothing was."""
    a, b, c = product.matrices()
    operands = [Operand(x.shape, np.dtype(product.dtype)) for x in (a, b)]
    with rma_mm.plan(
        *operands, mesh, algorithm=name, alpha=product.alpha, beta=product.beta,
        transpose_a="A" in product.transposed, transpose_b="B" in product.transposed,
    ) as plan:
        given = zip((a, b, c), "ABC", strict=True)
        A, B, C = (placed(x, plan.layouts[letter], mesh, product.dtype, 0) for x, letter in given)
        plan.prepare(A, B, C)
        before = counters(plan)
        plan.execute(A, B, out=C)
        traffic = [new - old for new, old in zip(counters(plan), before, strict=True)]
        moved = [plan.words.words_intra + plan.words.words_inter, plan.words.messages]
        ways = {way for how in plan.movement.values() for way in how.split("+")}
    ranks = mesh.comm.gather((C.tile.astype(float), ways, traffic, moved))
    if mesh.rank:
        return ""
    tiles, ways, traffic, moved = zip(*ranks, strict=True)
    wanted = expected(a, b, c, product.alpha, product.beta, product.transposed)
    right = np.array_equal(collect(tiles, C.layout, mesh.grid, wanted.shape), wanted)
    trouble = [] if right else ["a wrong result"]
    trouble += misnamed(set().union(*ways), traffic, moved, allowed)
    return f"{name} on {mesh.grid}: {', '.join(trouble)} with {product}" if trouble else ""


def counters(plan):
    """Words and messages that the windows, and those that the channels, of a plan have counted on this rank so far."""
    (bound,) = plan.prepared.bound.values()
    sides = [[each.counters for each in side] for side in (bound.windows, bound.setup.channels)]
    return [
        figure
        for side in sides
        for figure in (sum(x.words_intra + x.words_inter for x in side), sum(x.messages for x in side))
    ]


def misnamed(ways, traffic, moved, allowed):
    """What is wrong about the `ways` that plans name, when their ranks' counters saw this `traffic`."""
    for (words, messages, by_group, letters), mine in zip(traffic, moved, strict=True):
        if [words + by_group, messages + letters] != mine:
            yield f"words and messages {mine} that are not {words} + {by_group} and {messages} + {letters}"
    words, _, by_group, letters = (sum(each) for each in zip(*traffic, strict=True))
    if (words > 0) != bool(ways & ONE_SIDED):
        yield f"{words} words through windows and the movements {ways}"
    if not (by_group > 0) == (letters > 0) == bool(ways & BY_GROUPS):
        yield f"{by_group} words and {letters} messages through channels and the movements {ways}"
    if not ways <= {*allowed, "here"}:
        yield f"the movements {ways}"


def rows_on(grid, number):
    """Rows that can use a mesh, with the place of each in the registry.

    All of them; of the many meshes of five ranks and more with an axis of one rank, a fifth each takes its turn.
    """
    for at, name in enumerate(ALGORITHMS):
        is_taken = 1 not in grid or prod(grid) < 5 or (at + number) % 5 == 0
        if is_taken and AXES.get(name, len(grid)) == len(grid):
            yield at, name


@thorough
@parallel(ranks=(1, 4, 6, 8, 9), env=("node",), timeout=120)
def test_every_row_on_every_mesh(comm):
    trouble = []
    for number, grid in enumerate(grid for axes in (1, 2, 3) for grid in grids(comm.size, axes)):
        with Mesh(grid, comm) as mesh:
            for at, name in rows_on(grid, number):
                product = PRODUCTS[(at + 2 * number) % 3].rolled(number // 3)
                trouble.append(check_product(mesh, name, product))
    assert not any(comm.bcast(trouble)), "\n".join(filter(None, trouble))


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


@parallel(ranks=(4, 6), env=("node", "nolocal"))
def test_what_a_row_cannot_use_is_refused_alike_on_every_rank(comm):
    grid, long = {4: ((2, 2), "(1, 2, 2)"), 6: ((2, 3), "(1, 2, 3)")}[comm.size]
    with Mesh(grid, comm) as mesh:
        for name in (name for name, axes in AXES.items() if axes == 3):
            assert f"needs a mesh of three axes, as {long}; this one is {grid}" in refusal(mesh, name)
        whole, blocks, turned = "*,*", "i,j", "j,i"
        skewed = "needs A placed as P('i', 'j:skew(i)') or P('i', 'j') or P('j', 'i'), and"
        assert skewed in refusal(mesh, "cannon", whole, blocks)
        for x, a, b in (("B", blocks, whole), ("A", whole, turned)):
            upright = f"needs {x} placed as P('i', 'j') or P('j', 'i'), and it is P(None, None)"
            assert upright in refusal(mesh, "summa_c", a, b)
        assert "needs A placed as P('i', 'j'), and it is P('j', 'i')" in refusal(mesh, "srumma", turned, turned)
        for a, b in ((whole, blocks), (turned, turned), (blocks, turned)):
            check_auto(mesh, a, b)
    with Mesh((comm.size,), comm) as mesh:
        assert f"needs a mesh of two axes, as {grid}; this one is ({comm.size},)" in refusal(mesh, "cannon")
        check_auto(mesh, "i,*", "*,i")


def check_auto(mesh, a, b):
    """Left to the plan, a row is found that takes these placements, and it gives the right result."""
    x = np.arange(144.0).reshape(12, 12) % 7
    A, B = DistMatrix.from_numpy(x, mesh, a), DistMatrix.from_numpy(x.T, mesh, b)
    with rma_mm.plan(A, B, mesh) as plan:
        named = refusal_or_none(A, B, plan.algorithm)
        assert named is None, f"auto took {plan.algorithm} for {a} and {b}: {named}"
        assert np.array_equal(plan.execute(A, B).to_numpy(), x @ x.T)


@parallel(ranks=(4,), env=("node",))
def test_blocks_that_differ_from_column_to_column_serve_who_moves_them_one_by_one(comm):
    """As auto places them on ranks that differ in speed; groups want the same slices."""
    x, y = (whole_numbers(np.random.default_rng(seed), (30, 30)) for seed in (1, 2))
    by_column, even = "P('i:bounds(0, 9, 30, 0, 20, 30):skew(j)', 'j')", "P('i', 'j')"
    with Mesh((2, 2), comm) as mesh:
        for a, b, c in ((by_column, even, by_column), (even, by_column, even)):
            A, B = DistMatrix.from_numpy(x, mesh, a), DistMatrix.from_numpy(y, mesh, b)
            for name in ("srumma", "cannon:pull", "summa_c:pull", "pblas:pull"):
                assert np.array_equal(rma_mm.matmul(A, B, mesh, algorithm=name, layout=c).to_numpy(), x @ y), name
            assert "redistribute it, or name a stationary form" in refusal_or_none(A, B, "summa_c")


def refusal_or_none(A, B, name):
    """Why a row refuses these matrices when it is named; None where it takes them."""
    try:
        rma_mm.plan(A, B, A.mesh, algorithm=name).close()
    except AlgorithmError as error:
        return str(error)
    return None


@parallel(ranks=(4, 6), env=("node",))
def test_unknown_forms_are_refused_alike_on_every_rank(comm):
    with Mesh({4: (2, 2), 6: (2, 3)}[comm.size], comm) as mesh:
        assert "cannon has the form cannon:pull" in refusal(mesh, "cannon:foo")
        assert "srumma has one form only" in refusal(mesh, "srumma:pull")
        assert all(name in refusal(mesh, "canon:pull") for name in ("auto", *ALGORITHMS))
        for text in ("2,2/1,1,1", "2,2,1", "2,2,1/0,1,1", "2,2,1/2,2,1/x", "2,2,1/2,2,1/4/4", ""):
            assert "takes F_op and the rings of A, B and C" in refusal(mesh, f"t10_rotate:{text}")
        would_fit(mesh, "t10_rotate:5,5,1/1,1,1", f"is for 25 ranks, and there are {comm.size}")
        would_fit(mesh, f"t10_rotate:{comm.size},1,1/2,1,1", "A's ring of 2 does not divide the 1 ranks along n")
        would_fit(mesh, "t10_rotate:2,2,1/3,2,1", {4: "A's ring of 3 does not divide", 6: "is for 4 ranks"}[comm.size])
        would_fit(mesh, "cosma:9,9,9", f"needs 729 ranks, and there are {comm.size}")
        assert "cosma takes a grid, as cosma:2,2,1" in refusal(mesh, "cosma:9,9")


def would_fit(mesh, name, why):
    """`name` is refused for that reason, and what the refusal offers instead does fit."""
    text = refusal(mesh, name)
    assert why in text, text
    offered = text.split("; ")[-1].removesuffix(" would fit")
    fitting = f"{name.split(':')[0]}:{offered.split(':')[-1]}"
    rma_mm.plan(*[Operand((12, 12), np.dtype(float))] * 2, mesh, algorithm=fitting).close()


# -- what is kept ---------------------------------------------------------------------------------


KEPT = {2: ("cannon", "summa_c", "summa_a", "pumma"), 3: ("johnson_3d", "solomonik_25d", "cosma", "t10_rotate")}
"""Axes of a mesh → rows whose plans come and go on it."""


@thorough
@parallel(ranks=(4,), env=("node",), timeout=120)
def test_plans_that_come_and_go_leave_no_communicators(comm):
    x = np.ones((12, 12))
    channels = []
    with Mesh((2, 2), comm) as flat, Mesh((2, 1, 2), comm) as cube:
        for n in range(200):
            mesh = (flat, cube)[n % 2]
            names = KEPT[len(mesh.grid.dims)]
            with rma_mm.plan(x, x, mesh, algorithm=names[n // 2 % len(names)]) as plan:
                assert (plan.execute(x, x).tile == 12).all()
            if n % 40 == 39:
                channels.append([(len(mesh._channels), len(mesh.arena.slabs)) for mesh in (flat, cube)])
        handles = {channel.comm.handle for mesh in (flat, cube) for channel in mesh._channels.values()}
        assert len(handles) == sum(count for count, _ in channels[0])
    assert channels == channels[:1] * 5
    assert not flat._channels




@parallel(ranks=(4,), env=("node",))
def test_a_ring_that_is_named_is_a_ring(comm):
    """Also on placements over the one long axis of a mesh of two; over both axes it is refused, with the reason."""
    x = np.arange(64.0).reshape(8, 8)
    for shape in ((4,), (4, 1), (1, 4), (2, 2)):
        with Mesh(shape, comm) as mesh:
            long = [repr(name) for name, size in zip(mesh.grid.names, mesh.grid.dims, strict=True) if size > 1]
            rows, cols = f"P(({', '.join(long)},), None)", f"P(None, ({', '.join(long)},))"
            places = {
                "gather_gemm": (rows, cols, cols), "gather_gemm:b": (rows, cols, rows),
                "gemm_scatter": (cols, rows, rows), "gemm_scatter:columns": (cols, rows, cols),
            }
            for name, (a, b, c) in places.items():
                A, B = DistMatrix.from_numpy(x, mesh, a), DistMatrix.from_numpy(x, mesh, b)
                call = partial(rma_mm.plan, A, B, algorithm=name, layout=c)
                if shape == (2, 2):
                    same_error(comm, AlgorithmError, call, "along one axis of all ranks", f"name {name}:pull")
                    assert np.array_equal(rma_mm.matmul(A, B, algorithm=f"{name}:pull", layout=c).to_numpy(), x @ x)
                    continue
                with call() as plan:
                    assert "shift" in plan.movement.values(), (shape, name, plan.movement)
                    assert np.array_equal(plan.execute(A, B).to_numpy(), x @ x)
