"""einsum on real ranks: what is shared between expressions, what moves, and errors."""

from functools import partial

import numpy as np
import pytest

import rma_mm
from bench.trust.expressions import by_definition
from bench.trust.own_semirings import registered
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.errors import (
    AlgorithmError,
    DisagreementError,
    DtypeError,
    LayoutError,
    MemoryLimitError,
    OptionError,
    ShapeError,
)
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.einsum import placing
from rma_mm.runtime.einsum.placing import Placements
from tests.launch import parallel
from tests.mpi.test_library import same_error


def check_chain(comm, mesh):
    """Products of matrices are placed together, once for each kind of operands; by any semiring, and to any place."""
    kept = Placements.of(mesh).known
    numbers = np.random.default_rng(5)
    arrays = [numbers.integers(-3, 4, shape).astype("float32") for shape in ((12, 5), (7, 5), (7, 9), (9, 12))]
    text, before = "ij,kj,kl,lm->mi", len(kept)
    for ring in ("plus_times", "plus_times", "min_plus"):
        for layout in (None, "P(None, 'i')"):
            given = [DistMatrix.from_numpy(arrays[0], mesh, "P(None, 'i')"), *arrays[1:]]
            found = rma_mm.einsum(text, *given, mesh=mesh, semiring=ring, layout=layout)
            if ring == "plus_times":
                expected = np.einsum(text, *arrays)
            else:
                expected = by_definition(text, arrays, SEMIRINGS[ring])
            assert np.array_equal(found.to_numpy(), expected)
            assert layout is None or str(found.layout) == layout
    assert len(kept) == before + 4
    assert all(len(placed.steps) == 3 for placed in [*kept.values()][before:])


@parallel(ranks=(3,), env=("node",))
def test_results_errors_and_what_moves(comm):
    with Mesh((comm.size,), comm) as mesh:
        x = np.arange(6 * 4 * 5.0).reshape(6, 4, 5)
        a = DistArray.from_numpy(x, mesh)
        same = rma_mm.einsum("bij->bij", a)
        same.tile[...] += 1  # a result is never an operand's memory
        assert np.array_equal(a.to_numpy(), x)
        heads = rma_mm.einsum("bij,bkj->bik", a, a)
        assert str(heads.layout) == "P('i', None, None)"
        assert np.array_equal(heads.to_numpy(), np.einsum("bij,bkj->bik", x, x))
        total = rma_mm.einsum("ijk->", a)
        assert isinstance(total, np.float64)
        assert total == x.sum()
        placed = rma_mm.einsum("bij->jb", a, layout="P(None, 'i')")
        assert str(placed.layout) == "P(None, 'i')"
        assert np.array_equal(placed.to_numpy(), np.einsum("bij->jb", x))
        small, ones = x.astype("int8"), np.ones((5, 2), "int8")
        wide = rma_mm.einsum("...j,jk", small, ones, mesh=mesh, compute_dtype="int64")
        assert wide.dtype == np.int64
        assert np.array_equal(wide.to_numpy(), small.astype("int64") @ ones)
        y = np.arange(12.0).reshape(3, 4)
        skewed = DistMatrix.from_numpy(y, mesh, "P('i:skew(j)', 'j') on i=1, j=3")
        assert np.array_equal(rma_mm.einsum("ij,ijk->k", skewed, np.ones((3, 4, 2)), mesh=mesh).to_numpy(), [66, 66])
        summands = Layout(((), ()), partial=("i",))
        held = DistMatrix.from_local(np.full((2, 2), 100, "int8"), (2, 2), mesh, summands)  # 300 is 44
        for text in ("ij->i", "ij->ij"):
            wide = rma_mm.einsum(text, held, compute_dtype="int64")
            assert np.array_equal(wide.to_numpy(), np.einsum(text, np.full((2, 2), 44)))
        for dtype in ("float16", "bfloat16"):  # ones summed in these stop at 2048 and 256
            ones = np.ones((2, 4096)).astype(parse_dtype(dtype))
            for x in (ones, DistMatrix.from_numpy(ones, mesh, "P(None, 'i')")):
                assert rma_mm.einsum("ij->", x, mesh=mesh) == 8192
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placing, "LARGE", 1)
            check_chain(comm, mesh)
        none = DistMatrix.from_numpy(np.zeros((0, 4), "int8"), mesh), np.arange(-4, 8, dtype="int8").reshape(4, 3)
        for ring, least in (("max_plus", -128), ("min_plus", 127)):  # which ⊗ something does not leave as it is
            for text, shape in (("ij,jk->k", (3,)), ("ij,jk->jk", (4, 3)), ("ij,jk->", ())):
                found = rma_mm.einsum(text, *none, semiring=ring)
                assert np.array_equal(found.to_numpy() if shape else found, np.full(shape, least))
        nan = rma_mm.einsum("ij,jk->k", np.zeros((0, 4)), np.full((4, 3), np.nan), mesh=mesh, layout="P('i')")
        assert np.array_equal(nan.to_numpy(), np.zeros(3))
        tall = DistMatrix.from_numpy(np.ones((3, 1)), mesh)
        refused = (
            (LayoutError, lambda: rma_mm.einsum("ij->i", held, semiring="min_plus"), ("operand 0", "partial sums")),
            (ShapeError, lambda: rma_mm.einsum("ii->i", tall), ("'i'", "3 and 1 in operand 0")),
            (ShapeError, lambda: rma_mm.einsum("bij,bjk", a, a), ("'j'", "5 in operand 0", "4 in operand 1")),
            (OptionError, lambda: rma_mm.einsum("bij->bb", a), ("'b'", "twice")),
            (OptionError, lambda: rma_mm.einsum("bij->z", a), ("'z'",)),
            (DtypeError, lambda: rma_mm.einsum("i", np.array(["a"]), mesh=mesh), ("operand 0",)),
            (OptionError, lambda: rma_mm.einsum("bij->b", a, semiring="times"), ("semiring",)),
            (AlgorithmError, lambda: rma_mm.einsum("bij->b", a, kernel="fast"), ("kernel", "fast")),
            (OptionError, lambda: rma_mm.einsum("bij->b", a, memory_limit=-1), ("memory_limit", "-1")),
            (MemoryLimitError, lambda: rma_mm.einsum("bij->b", a, memory_limit=335), ("335", "take 336")),
            (LayoutError, lambda: rma_mm.einsum("bij,bkj->bik", a, a, layout="P('z')"), ("'z'",)),
            (LayoutError, lambda: rma_mm.einsum("bij,bij->", a, a, layout="i"), ("layout: got i", "a number")),
            (DisagreementError, lambda: rma_mm.einsum("i->", np.full(2, comm.rank), mesh=mesh), ("sum of the array",)),
            (LayoutError, lambda: rma_mm.einsum("bij,bkj->bik", a, a, layout=["i"]), ("layout: got ['i']",)),
        )
        for kind, call, words in refused:
            same_error(comm, kind, call, *words)
        with registered():  # of one where nobody knows whether sums may come first
            x = np.array([[4, 6], [9, 10], [12, 8]], "uint32")
            found = rma_mm.einsum("ij,kj->ik", x, x[:2], mesh=mesh, semiring="gcd_lcm").to_numpy()
            assert np.array_equal(found, np.gcd.reduce(np.lcm(x[:, None], x[None, :2]), axis=2))
            few = x[:2]
            for text, given in (("ij,ij,kj->i", (x, x, x)), ("ij,jk,kl", (x, few, few)), ("ij,jk", (x[:, :1], few))):
                call = partial(rma_mm.einsum, text, *given, mesh=mesh, semiring="gcd_lcm")
                same_error(comm, OptionError, call, "is summed over before all operands are multiplied", "gcd_lcm")
    with pytest.raises(ValueError, match="mesh"):
        rma_mm.einsum("i", np.ones(3), mesh="x")
