"""Semirings registered outside the package, on real ranks: every algorithm, accumulates, verification, refusals."""

import numpy as np

import rma_mm
from bench.trust.own_semirings import TYPES, elements, registered
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.semiring import SEMIRINGS, register_semiring
from rma_mm.errors import AlgorithmError, DisagreementError, DtypeError
from tests.launch import parallel
from tests.mpi.test_library import same_error
from tests.pure.test_semirings import expected, same

NO_MPI = "gcd_lcm"
"""The one that ranks cannot accumulate."""


def matrices(name):
    """A, B, C0, and what C becomes."""
    rng, (m, n, k) = np.random.default_rng(3), (36, 28, 24)
    a, b, c = (elements(rng, name, shape) for shape in ((m, k), (k, n), (m, n)))
    wanted = expected(SEMIRINGS[name], a, b, c)
    assert len(np.unique(wanted)) > 1, name
    return a, b, c, wanted


PUSHES = {"stationary_a": ("P(None, 'i')", "P('i', None)"), "stationary_b": ("P(None, 'i')", "P('i', None)")}
"""Placements of A and B of which every rank adds to every other's part of C."""


@parallel(ranks=(4,), env=("node", "cliques", "nolocal", "allocated", "created"))
def test_ranks_accumulate_by_its_operation(comm):
    """Where MPI has that; where it has not, they are told so, and `auto` takes another way."""
    with registered(), Mesh((comm.size, 1), comm) as mesh:
        for name in TYPES:
            a, b, _, _ = matrices(name)
            wanted = expected(SEMIRINGS[name], a, b)
            for algorithm, places in PUSHES.items():
                A, B = (DistMatrix.from_numpy(x, mesh, place) for x, place in zip((a, b), places, strict=True))
                options = {"layout": "P('i', None)", "semiring": name}
                if name == NO_MPI:
                    same_error(
                        comm, AlgorithmError, lambda: rma_mm.plan(A, B, mesh, algorithm=algorithm, **options),  # noqa: B023
                        algorithm, "MPI cannot accumulate",
                    )
                    assert same(rma_mm.matmul(A, B, mesh, **options).to_numpy(), wanted)
                    continue
                with rma_mm.plan(A, B, mesh, algorithm=algorithm, **options) as plan:
                    assert plan.reproducible and comm.allreduce("accumulate" in plan.movement["C"]) > 0
                    assert same(plan.execute(A, B).to_numpy(), wanted), (name, algorithm)


@parallel(ranks=(3,), env=("node",))
def test_ranks_hear_what_is_wrong(comm):
    """Types that it does not take; and ranks on which one name means different things."""
    x = np.ones((6, 6), np.float32)
    with registered(), Mesh((comm.size, 1), comm) as mesh:
        same_error(comm, DtypeError, lambda: rma_mm.matmul(x, x, mesh, semiring="union"), "union", "uint64", "float32")
        operations = np.bitwise_or if comm.rank == 1 else np.bitwise_xor, np.bitwise_and
        register_semiring("mine", *operations, "u")
        y = np.ones((6, 6), np.uint8)
        same_error(comm, DisagreementError, lambda: rma_mm.matmul(y, y, mesh, semiring="mine"), "bitwise_or", "rank 1")
