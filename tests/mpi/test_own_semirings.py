"""Semirings registered outside the package, on real ranks: every algorithm, accumulates, verification, refusals."""

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.elements.semiring import SEMIRINGS, register_semiring
from rma_mm.errors import AlgorithmError, DisagreementError, DtypeError
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.verification.check import verify
from tests.launch import parallel
from tests.mpi.test_library import same_error
from tests.own_semirings import TYPES, elements, registered, spoilt
from tests.pure.test_semirings import expected, same
from tests.strategies import some_mesh
from tests.thorough import usually

NO_MPI = "gcd_lcm"
"""The one that ranks cannot accumulate."""


def matrices(name):
    """A, B, C0, and what C becomes."""
    rng, (m, n, k) = np.random.default_rng(3), (36, 28, 24)
    a, b, c = (elements(rng, name, shape) for shape in ((m, k), (k, n), (m, n)))
    wanted = expected(SEMIRINGS[name], a, b, c)
    assert len(np.unique(wanted)) > 1, name
    return a, b, c, wanted


def check(mesh, plan, name, a, b, c, wanted):
    """C ⊕ A ⊗ B is NumPy's; it passes the verification, and with one wrong element it does not."""
    A, B, C, before = (
        DistMatrix.from_numpy(x, mesh, plan.layouts[home]) for x, home in ((a, "A"), (b, "B"), (c, "C"), (c, "C"))
    )
    assert same(plan.execute(A, B, C).to_numpy(), wanted), (name, plan.algorithm)
    semiring = SEMIRINGS[name]
    assert verify(A, B, C, beta=1, before=before, semiring=semiring).ok, (name, plan.algorithm)
    wrong = DistMatrix.from_numpy(spoilt(np.random.default_rng(5), wanted), mesh, plan.layouts["C"])
    verdict = verify(A, B, wrong, beta=1, before=before, semiring=semiring)
    assert not verdict.ok and "computed again it is" in verdict.reason, (name, plan.algorithm)
    for x in (A, B, C, before, wrong):
        x.close()


@parallel(ranks=(4,), env=("created",))
@pytest.mark.parametrize("name", usually(1, ("xor_and", NO_MPI, *sorted(set(TYPES) - {"xor_and", NO_MPI}))))
def test_every_algorithm_takes_a_semiring_of_ones_own(comm, name):
    """On placements of its own choice; where MPI cannot accumulate so, all but those that do."""
    refused = {}
    with registered():
        a, b, *rest = matrices(name)
        given = [Operand(x.shape, x.dtype) for x in (a, b)]
        for grid in {some_mesh(row).shape: None for row in ALGORITHMS.values()}:
            with Mesh(grid, comm) as mesh:
                for row in [row for row in ALGORITHMS.values() if some_mesh(row).shape == grid]:
                    try:
                        plan = rma_mm.plan(*given, mesh, algorithm=row.name, semiring=name, beta=1)
                    except AlgorithmError as error:
                        refused[row.name] = str(error)
                        continue
                    check(mesh, plan, name, a, b, *rest)
                    plan.close()
    assert all("accumulates, and MPI has no operation" in why for why in refused.values()), refused
    always = {"stationary_a", "stationary_b", "queue"}  # others turn out so on some placements
    assert set(refused) >= always if name == NO_MPI else not refused
    assert len(ALGORITHMS) - len(refused) > 15, refused


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
                        algorithm, "MPI has no operation",
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
