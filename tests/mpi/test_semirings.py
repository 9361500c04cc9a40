"""Products of other semirings on real ranks: what is pushed, paths and reachability, and errors."""


import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.errors import AlgorithmError, DisagreementError, DtypeError, LayoutError, OptionError
from rma_mm.runtime.verification.check import verify
from rma_mm.windows.boxes.datatypes import OPERATIONS
from tests.launch import parallel
from tests.mpi.test_library import same_error
from tests.pure.test_semirings import expected, same, values
from tests.thorough import usually

PUSHES = {"stationary_a": ("P(None, 'i')", "P('i', None)"), "stationary_b": ("P(None, 'i')", "P('i', None)")}
"""Placements of A and B of which every rank adds to every other's part of C."""


@parallel(ranks=(4,), env=("node", "cliques", "nolocal", "allocated", "created"))
@pytest.mark.parametrize("name", usually(1, ["min_plus", "max_min"]))
def test_nan_and_infinities_are_pushed(comm, name):
    """Of many summands of one element, in any order of arrival, a single NaN decides; the same bits every time."""
    m, n, k = 40, 30, 24
    rng, semiring = np.random.default_rng(4), SEMIRINGS[name]
    with Mesh((comm.size, 1), comm) as mesh:
        for dtype in ("float32", "float64", "float16"):
            a, b = (rng.uniform(1, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
            if name == "max_min":
                a, b = -a, -b
            a[3, ::7], a[5, 20], a[7], a[8] = np.nan, np.nan, np.inf, -np.inf
            b[4, 2], b[11, 3] = np.nan, -np.inf
            wanted = expected(semiring, a, b)
            assert np.isnan(wanted).any(axis=0).all() and not np.isnan(wanted).all(axis=1).all()
            for algorithm, places in PUSHES.items():
                A, B = (DistMatrix.from_numpy(x, mesh, place) for x, place in zip((a, b), places, strict=True))
                with rma_mm.plan(A, B, mesh, layout="P('i', None)", algorithm=algorithm, semiring=name) as plan:
                    assert plan.reproducible and comm.allreduce(plan.movement["C"] != "here") > 0
                    first = plan.execute(A, B).to_numpy()
                    assert same(first, wanted)
                    for _ in range(3):
                        assert plan.execute(A, B).to_numpy().tobytes() == first.tobytes()


@parallel(ranks=(4,), env=("node", "created"))
def test_operations_take_turns_on_one_matrix(comm):
    """Sums, least and greatest sums one after the other into one C, and on from what it holds."""
    rng = np.random.default_rng(7)
    a, b = rng.integers(1, 9, (20, 18)).astype(float), rng.integers(1, 9, (18, 22)).astype(float)
    with Mesh((4, 1), comm) as mesh:
        A, B = DistMatrix.from_numpy(a, mesh, "P(None, 'i')"), DistMatrix.from_numpy(b, mesh, "P('i', None)")
        C = DistMatrix.empty((20, 22), mesh, "P('i', None)", "float64")
        least, greatest = (expected(SEMIRINGS[name], a, b) for name in ("min_plus", "max_plus"))
        for _ in range(4):
            rma_mm.matmul(A, B, mesh, out=C, algorithm="stationary_a", semiring="min_plus")
            assert np.array_equal(C.to_numpy(), least)
            rma_mm.matmul(A, B, mesh, out=C, beta=1, algorithm="stationary_a")
            assert np.array_equal(C.to_numpy(), least + a @ b)
            rma_mm.matmul(A, B, mesh, out=C, beta=1, algorithm="stationary_a", semiring="min_plus")
            assert np.array_equal(C.to_numpy(), np.minimum(least, least + a @ b))
            rma_mm.matmul(A, B, mesh, out=C, beta=1, algorithm="stationary_b", semiring="max_plus")
            assert np.array_equal(C.to_numpy(), np.maximum(least, greatest))


@parallel(ranks=(4,), env=("node", "cliques"))
def test_deterministic_excludes_nothing_that_has_one_result(comm):
    a, b = np.full((12, 16), 2.0), np.full((16, 8), 3.0)
    with Mesh((comm.size, 1), comm) as mesh:
        A, B = DistMatrix.from_numpy(a, mesh, "P(None, 'i')"), DistMatrix.from_numpy(b, mesh, "P('i', None)")
        with rma_mm.plan(A, B, mesh, algorithm="stationary_a", semiring="max_plus", deterministic=True) as plan:
            assert plan.reproducible
            assert (plan.execute(A, B).to_numpy() == 5).all()
        with rma_mm.plan(A, B, mesh, algorithm="stationary_a", semiring="max_plus") as plan:
            assert "max_plus" in str(plan)
        same_error(comm, AlgorithmError, lambda: rma_mm.plan(A, B, mesh, algorithm="stationary_a", deterministic=True))


# -- what it refuses ------------------------------------------------------------------------------


@parallel(ranks=(3,), env=("node",))
def test_errors_are_the_same_on_every_rank(comm):
    x, y = np.ones((4, 4), np.float32), np.ones((4, 4), bool)
    with Mesh((3, 1), comm) as mesh:

        def refused(kind, *words, a=x, **options):
            same_error(comm, kind, lambda: rma_mm.matmul(a, a, mesh, **options), *words)

        refused(OptionError, "tropical", "min_plus", semiring="tropical")
        refused(OptionError, "alpha: got 2", semiring="min_plus", alpha=2)
        refused(OptionError, "conjugate", semiring="min_plus", conjugate_a=True)
        refused(DtypeError, "order", a=x.astype("complex64"), semiring="max_plus")
        refused(DtypeError, ".astype(bool)", semiring="or_and")
        refused(DtypeError, "or_and", a=y, semiring="min_plus")
        refused(AlgorithmError, "blas", semiring="min_plus", kernel="blas")
        refused(LayoutError, "C", "sum", semiring="min_plus", layout="P('j', None, i=sum)")
        out = DistMatrix.empty((4, 4), mesh, dtype="float32")
        refused(OptionError, "beta: got 3", semiring="min_plus", beta=3, out=out)
        mine = ("min_plus", "max_plus", "min_plus")[comm.rank]
        refused(DisagreementError, "min_plus", "max_plus", semiring=mine)


@parallel(ranks=(1, 3), env=("node",))
def test_a_wrong_element_is_found(comm):
    """In any of few rows, whoever holds it; NaN and the sign of infinity too."""
    rng = np.random.default_rng(1)
    for name, dtype in (("min_plus", "float32"), ("max_min", "int16"), ("max_plus", "bfloat16")):
        semiring, kind = SEMIRINGS[name], parse_dtype(dtype)
        a, b, c = (values(rng, shape, kind) for shape in ((40, 30), (30, 20), (40, 20)))
        with Mesh((comm.size, 1), comm) as mesh:
            A, B, before = (DistMatrix.from_numpy(x, mesh) for x in (a, b, c))
            C = DistMatrix.from_numpy(expected(semiring, a, b, c), mesh)
            assert verify(A, B, C, beta=1, before=before, semiring=semiring).ok
            for number in range(6):
                wrong = C.to_numpy()
                row, col = rng.integers(40), rng.integers(20)
                was = wrong[row, col]
                wrong[row, col] = -100 if was != -100 else 100
                if number > 3 and kind.kind != "i":
                    wrong[row, col] = np.nan if was == was else 0
                found = verify(A, B, DistMatrix.from_numpy(wrong, mesh), beta=1, before=before, semiring=semiring)
                assert not found.ok and f"C[{row}, {col}]" in found.reason


def test_every_operation_has_mpis():
    assert set(OPERATIONS) == set(REDUCTIONS)
    assert {semiring.reduction.mpi for semiring in SEMIRINGS.values()} == {"SUM", "MIN", "MAX", "LOR"}
