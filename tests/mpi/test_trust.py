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
from rma_mm import Mesh
from rma_mm.errors import DisagreementError
from tests.jobs import VARIANT
from tests.launch import parallel

SEED = 20
CASES = 60


@parallel(ranks=(4,), env=("node", "cliques", "nolocal", "allocated", "created"))
def test_whatever_is_drawn_is_numpys(comm, tmp_path):
    worker = Worker(comm, SEED, os.environ[VARIANT], tmp_path)
    for number in range(CASES):
        case, (outcome, text) = worker.case(number)
        assert outcome in ("right", "refused"), f"{outcome}: {case}\n{text}"
    worker.close()


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
