"""`fast=1` and `fast=2`: products, their checks, what is refused, and what reports say."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import OptionError, VerificationError
from rma_mm.kernels.gemm import fast, form
from tests.launch import parallel
from tests.mpi.test_misuse import same_error
from tests.processes import mpirun

SMALL = mock.patch.object(form, "LEAST", (8, 8))


@parallel(ranks=(1, 2, 4, 6), env=("nolocal",))
@SMALL
def test_products_are_right_and_checked(comm):
    rng = np.random.default_rng(2)
    with Mesh((comm.size,), comm) as mesh:
        for dtype, levels, options in (
            ("float32", 1, {}), ("float64", 2, {"transpose_a": True, "alpha": 2}), ("int32", 2, {"beta": 1}),
            ("complex64", 1, {"conjugate_a": True, "transpose_a": True}),
        ):
            a, b = (rng.standard_normal((200, 200)).astype(dtype) if dtype != "int32" else
                    rng.integers(-9, 9, (200, 200)).astype(dtype) for _ in range(2))
            A, B = (DistMatrix.from_numpy(x, mesh, "i, *") for x in (a, b))
            C = DistMatrix.from_numpy(np.ones_like(a), mesh, "i, *")
            rma_mm.matmul(A, B, out=C, fast=levels, check=True, **options)
            left = a.T.conj() if options.get("transpose_a") else a
            expected = options.get("alpha", 1) * (left @ b) + options.get("beta", 0)
            np.testing.assert_allclose(C.to_numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            plan = rma_mm.plan(A, B, fast=levels)
            plan.execute(A, B)
            assert comm.allreduce(plan.prepared.kernels == {f"fast{levels}"})


@parallel(ranks=(2,), env=("nolocal",))
@SMALL
def test_a_check_finds_what_is_wrong(comm):
    """One of the seven products that is left out of one rank's table, and one element that is off."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((400, 400)).astype(np.float32) for _ in range(2))

    def faulty(*arguments):
        made = fast.table.original(*arguments)
        made[0] -= comm.rank == 1
        return made

    faulty.original = fast.table.original = fast.table
    with Mesh((2,), comm) as mesh:
        A, B = (DistMatrix.from_numpy(x, mesh, "i, *") for x in (a, b))
        C = rma_mm.matmul(A, B, fast=1)
        rma_mm.verify(A, B, C, fast=1)
        if comm.rank == 1:
            C.tile[7, 9] += 0.1
        with pytest.raises(VerificationError):
            rma_mm.verify(A, B, C, fast=1)
        with mock.patch.object(fast, "table", faulty):
            same_error(comm, VerificationError, lambda: rma_mm.matmul(A, B, out=C, fast=1, check=True), "C is wrong")


@parallel(ranks=(2,))
def test_what_does_not_go_with_it(comm):
    with Mesh((2,), comm) as mesh:
        a = np.ones((4, 4), np.float32)
        for wrong, options, text in (
            (3, {}, "fast: got 3"), ("1", {}, "fast: got '1'"), (-1, {}, "fast: got -1"),
            (1, {"kernel": "blas"}, "leave one of them out"), (1, {"semiring": "min_plus"}, "cannot subtract"),
        ):
            same_error(comm, OptionError, lambda w=wrong, o=options: rma_mm.matmul(a, a, mesh, fast=w, **o), text)
        batch = np.ones((2, 4, 4), np.float32)
        same_error(comm, OptionError, lambda: rma_mm.matmul(batch, batch, mesh, fast=1), "not supported for batches")


def test_the_command_says_what_was_done(tmp_path):
    for size, kernel in ((1536, "fast1"), (1000, "numpy blas numba")):
        line = f"-m rma_mm.run --shape {size},{size},{size} --fast 1 --threads 1 --verify --json out.json"
        done = mpirun(1, line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        facts = json.loads((tmp_path / "out.json").read_text())
        assert facts["kernel"] in kernel.split() and facts["verified"]
        assert bool(facts["fallbacks"]) == (kernel != "fast1")
    assert mpirun(1, ["-m", "rma_mm.run", "--fast", "3"], cwd=tmp_path).returncode == 2
