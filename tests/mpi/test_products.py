"""Properties of products on real ranks: right results, and the words that the interpreter counts, to the last one."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering import fitted
from rma_mm.windows.checks.checked import SWITCH
from tests.launch import parallel
from tests.reference import collect, distribute, expected, whole_numbers
from tests.strategies import EXTENTS, axes_of, layouts, placements
from tests.strategies_mpi import shared_examples
from tests.thorough import usually


@dataclass(frozen=True)
class Product:
    """One drawn product; shapes and layouts are those of the stored A, B and C."""

    mesh: tuple[int, ...]
    shape: tuple[int, int, int]
    layouts: tuple[Layout, Layout, Layout]
    transposed: str
    dtype: str
    alpha: int
    beta: int
    narrow: int
    seed: int

    @property
    def extents(self):
        m, n, k = self.shape
        a = (k, m) if "A" in self.transposed else (m, k)
        b = (n, k) if "B" in self.transposed else (k, n)
        return a, b, (m, n)


@st.composite
def products(draw, size, algorithm):
    """Products for `size` ranks on any grid of theirs."""
    row = ALGORITHMS[algorithm]
    mesh = MeshShape(draw(st.sampled_from(list(grids(size, draw(st.sampled_from(axes_of(row))))))))
    shape = tuple(draw(st.sampled_from(EXTENTS)) for _ in range(3))
    transposed = draw(st.sampled_from(("", "", "A", "B", "AB")))
    dtype = draw(st.sampled_from(("float64", "float64", "float32", "int32", "float16")))
    scalars = draw(st.sampled_from((1, 2, -1))), draw(st.sampled_from((0, 0, 1, 3)))
    drawn = Product(mesh.shape, shape, (), transposed, dtype, *scalars, draw(st.sampled_from((3, 128))), draw(seeds))
    if row.placements or row.fit:
        _, (a, b, c) = draw(placements(row, shape, mesh))
        placed = (a.T if "A" in transposed else a, b.T if "B" in transposed else b, c)
    else:
        placed = tuple(draw(layouts(mesh, extent)) for extent in drawn.extents)
    return Product(**{**vars(drawn), "layouts": placed})


seeds = st.integers(0, 999)


def placed(x, layout, mesh, dtype, seed):
    """A DistMatrix with the tiles that the reference makes, summands of a partial one included."""
    tiles = distribute(x, layout, mesh.shape, np.random.default_rng(seed))
    D = DistMatrix.empty(x.shape, dtype, mesh, layout)
    if mesh.is_member:
        D.tile[...] = tiles[mesh.rank]
    return D


def check(comm, product, algorithm, meshes):
    """One product: the result, then the traffic of every rank."""
    if product.mesh not in meshes:
        meshes[product.mesh] = Mesh(product.mesh, comm)
    mesh = meshes[product.mesh]
    fitted.NARROW = product.narrow
    rng = np.random.default_rng(product.seed)
    a, b, c = (whole_numbers(rng, extent) for extent in product.extents)
    given = zip((a, b, c), product.layouts, strict=True)
    A, B, C = (placed(x, layout, mesh, product.dtype, product.seed) for x, layout in given)
    plan = rma_mm.plan(
        A, B, mesh, layout=C.layout, algorithm=algorithm, alpha=product.alpha, beta=product.beta,
        transpose_a="A" in product.transposed, transpose_b="B" in product.transposed,
    )  # fmt: skip
    if product.beta == 0 and product.dtype.startswith("float"):
        C.tile[...] = np.nan
    for _ in range(2 if product.beta == 0 else 1):  # a plan runs as often as one likes
        plan.execute(A, B, out=C)
    tiles = comm.gather(C.tile.astype(float))
    words = comm.gather((plan.words.words_intra + plan.words.words_inter, plan.words.words_inter))
    claims = comm.gather(plan.claims)
    if comm.rank == 0:
        wanted = expected(a, b, c, product.alpha, product.beta, product.transposed)
        assert np.array_equal(collect(tiles, C.layout, mesh.shape, wanted.shape), wanted)
        count_words(plan, words, claims)
    plan.close()


def count_words(plan, words, claims):
    """What the transports counted is what the interpreter counts."""
    schedule = plan.schedule
    homes = {
        name: [np.zeros(schedule.home(name, rank).shape) for rank in schedule.mesh.ranks] for name in schedule.homes
    }
    replay = dict(enumerate(claims)) if schedule.pool else None
    outcome = interpret(schedule, homes, claims=replay)
    assert [total for total, _ in words] == outcome.words
    assert sum(between for _, between in words) == outcome.words_between_nodes


def check_any(comm, algorithm, max_examples):
    """Products on placements and grids of any kind."""
    meshes: dict[tuple[int, ...], Mesh] = {}
    try:
        shared_examples(
            comm,
            products(comm.size, algorithm),
            lambda comm, product: check(comm, product, algorithm, meshes),
            max_examples,
        )
    finally:
        fitted.NARROW = 128
    for mesh in meshes.values():
        mesh.close()


@parallel(timeout=120)
@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if not row.grouped])
def test_any_placements_on_any_grid(comm, algorithm):
    check_any(comm, algorithm, 3)


@parallel(ranks=(2, 4, 6), env=("node", "nolocal"), timeout=120)
@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if row.grouped])
def test_any_placements_on_any_grid_where_groups_move_operands(comm, algorithm):
    """They need no window for that: what windows do is seen where nothing else moves anything."""
    check_any(comm, algorithm, 3)


@parallel(ranks=(4,), env=("node",))
def test_a_rank_begins_what_others_of_its_group_do_behind_a_barrier(comm):
    """It waits for them only there, where it has no products before."""
    texts = ("P('i:weights(0, 3)', 'j:bounds(0, 6, 13)')", "P('i:cyclic(3, 7)', 'j:bounds(0, 0, 6)')", "P(None, None)")
    placed = tuple(parse_layout(text, MeshShape((2, 2))) for text in texts)
    meshes: dict[tuple[int, ...], Mesh] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitted, "NARROW", 128)
        check(comm, Product((2, 2), (13, 6, 6), placed, "A", "float64", 1, 1, 3, 269), "pumma", meshes)
    meshes[2, 2].close()


@parallel(ranks=(4,), env=("cliques",), timeout=120)
@pytest.mark.parametrize("algorithm", usually(13, [*[*ALGORITHMS][::2], *[*ALGORITHMS][1::2]]))
def test_any_placements_on_any_grid_under_checks(comm, algorithm):
    """Every transfer and product is checked, nothing is found, and as many words are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        check_any(comm, algorithm, 2)


@parallel(ranks=(2, 4, 6), env=("node", "nolocal", "created"))
@pytest.mark.parametrize("algorithm", ["srumma", "stationary_c"])
def test_words_of_stationary_c_on_even_blocks_are_the_closed_form(comm, algorithm):
    rows, cols = {2: (2, 1), 4: (2, 2), 6: (2, 3)}[comm.size]
    m, n, k = 12, 18, 24
    with Mesh((rows, cols), comm) as mesh:
        A = DistMatrix.from_numpy(np.ones((m, k)), mesh, "i,j")
        B = DistMatrix.from_numpy(np.ones((k, n)), mesh, "i,j")
        plan = rma_mm.plan(A, B, mesh, layout="i,j", algorithm=algorithm)
        assert (plan.execute(A, B).to_numpy() == k).all()
        pulled = plan.words.words_intra + plan.words.words_inter
        assert pulled == m * k // rows * (cols - 1) // cols + k * n // cols * (rows - 1) // rows
