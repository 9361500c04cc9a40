"""Products and redistributions with everything drawn together, hundreds in one job, as `python -m bench.trust` does.

Rank 0 draws each, and state that one leaves behind may break another. The nightly command runs as many as is wanted,
and repeats the numbers that it prints.
"""

import os
import time

import numpy as np
import pytest

import rma_mm
from bench.trust.worker import Worker
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DisagreementError
from tests.jobs import VARIANT
from tests.launch import parallel

SEED = 20
CASES = 20


@parallel(ranks=(4,), env=("node", "cliques", "nolocal", "allocated", "created"))
def test_whatever_is_drawn_is_numpys(comm, tmp_path):
    worker = Worker(comm, SEED, os.environ[VARIANT], tmp_path)
    for number in range(CASES):
        case, (outcome, text) = worker.case(number)
        assert outcome in ("right", "refused"), f"{outcome}: {case}\n{text}"
    worker.close()


@parallel(ranks=(2, 3), env=("node",))
def test_summands_in_the_callers_own_memory_are_multiplied(comm):
    x = np.arange(12.0).reshape(3, 4)
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_local(x.copy(), (3, 4), mesh, "*, *, i=sum")
        for algorithm in ("auto", "stationary_c", "queue"):
            assert np.array_equal(rma_mm.matmul(A, x.T, mesh, algorithm=algorithm).to_numpy(), comm.size * x @ x.T)


@parallel(ranks=(2,), env=("node",))
def test_a_file_replaced_while_it_is_opened_is_noticed(comm, tmp_path):
    """A rank that has read the header of the old file would read the new one's columns as rows."""
    path, x = tmp_path / "A.npy", np.arange(12.0).reshape(4, 3)
    if comm.rank == 0:
        np.save(path, x)
    comm.Barrier()
    with Mesh((2,), comm) as mesh:
        if comm.rank == 0:
            time.sleep(0.3)
            np.save(path, np.asfortranarray(x))
        with pytest.raises(DisagreementError, match="fortran_order"):
            rma_mm.load(path, mesh)
