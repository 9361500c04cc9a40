"""Products and all that is made of them, drawn together, on meshes that stay: as `python -m bench.trust` does.

One job does hundreds of cases, one after the other, so that what one leaves behind may break another: matrices and
plans that live on, meshes beside each other that are closed in between. Algorithms, placements, element types, values
up to the largest, semirings, epilogues, products of a matrix and its transpose, batches, expressions, chains and files
are all drawn. A failure is repeated by the command that it names.
"""

import os
import time

import numpy as np
import pytest

import rma_mm
from bench.trust.__main__ import repeat
from bench.trust.jobs import Setting
from bench.trust.worker import Worker
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DisagreementError
from tests.jobs import VARIANT
from tests.launch import parallel

SEED = 33
CASES = 60
SETTINGS = {
    "node": ("shared", "one"), "cliques": ("shared", "two"), "nolocal": ("shared", "each"),
    "allocated": ("allocated", "one"), "created": ("created", "one"), "ucx": ("ucx", "one"),
}
"""Environments of tests as settings of `bench.trust`: the window, and how many nodes."""


@parallel(ranks=(1, 2, 3, 4, 6), env=tuple(SETTINGS), timeout=120)
def test_whatever_is_drawn_is_numpys(comm, tmp_path):
    setting = Setting(comm.size, *SETTINGS[os.environ[VARIANT]])
    worker = Worker(comm, SEED, setting.name, tmp_path)
    for number in range(CASES):
        case, (outcome, text) = worker.case(number)
        said = f"{repeat(setting, SEED)} --only {number}, or --from 0 --to {number + 1}"
        assert outcome in ("right", "refused"), f"{outcome}: {said}\n{case}\n{text}"
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
