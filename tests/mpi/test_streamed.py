"""Operands that stay in their files: what is read and held, faults while it is read, and what is refused."""

import json
import os
from collections import Counter
from itertools import product
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import AlgorithmError, DisagreementError, LayoutError, MemoryLimitError, VerificationError
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.opened import Opened
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.mpi.test_library import same_error
from tests.processes import mpirun
from tests.thorough import usually

h5py = pytest.importorskip("h5py")

M, N, K = 60, 44, 3000
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}


def operands(comm, folder):
    """A and B of whole numbers, by rows in A.npy, and in chunks in B.h5."""
    rng = np.random.default_rng(34)
    a, b = rng.integers(-3, 4, (M, K)).astype("f4"), rng.integers(-3, 4, (K, N)).astype("f4")
    if comm.rank == 0:
        np.save(folder / "A.npy", a)
        with h5py.File(folder / "B.h5", "w") as file:
            file.create_dataset("B", data=b, chunks=(100, 11), compression="gzip")
    comm.Barrier()
    return a, b


@parallel(ranks=(1, 2, 4), env=("node", "cliques"))
def test_each_element_is_read_once_on_a_node_and_no_chunk_twice(comm, tmp_path):
    """Also where memory for few panels only is granted, which then begin where chunks do."""
    a, b = operands(comm, tmp_path)
    parts: list[tuple[str, Region]] = []
    read = Opened.read

    def noted(self, region, out=None):
        parts.append((str(self.path)[-4:], region))
        return read(self, region, out)

    with mock.patch.object(Opened, "read", noted), Mesh(GRIDS[comm.size], comm) as mesh:
        A, B = (rma_mm.open(tmp_path / name) for name in ("A.npy", "B.h5"))
        for limit in (None, (M * N + 2 * (M + N) * 500) * 4):
            parts.clear()
            with rma_mm.plan(A, B, mesh, memory_limit=limit) as plan:
                assert limit is None or plan.peak_bytes <= limit
                assert np.array_equal(plan.execute(A, B).to_numpy(), a @ b)
            nodes = comm.allgather((mesh.node_of[comm.rank], list(parts)))
            for node in set(mesh.node_of):
                times, chunks = {"npy": np.zeros((M, K)), ".h5": np.zeros((K, N))}, Counter()
                for name, region in (part for at, each in nodes if at == node for part in each):
                    times[name[-3:]][region.selector()] += 1
                    if name == "B.h5":
                        each = zip(region, (100, 11), strict=True)
                        rows, cols = (set((span.indices // step).tolist()) for span, step in each)
                        chunks.update(product(rows, cols))
                assert (times["npy"] <= 1).all() and (times[".h5"] <= 1).all()
                assert sum(chunks.values()) <= 1.1 * len(chunks)
            assert all(each for _, each in nodes)


@parallel(ranks=(2,), env=("node",))
def test_what_stays_in_files_takes_no_memory(comm, tmp_path):
    a, b = operands(comm, tmp_path)
    with Mesh((2, 1), comm) as mesh:
        A, B = (rma_mm.open(tmp_path / name) for name in ("A.npy", "B.h5"))
        with rma_mm.plan(A, B, mesh, algorithm="stationary_c") as plan:
            assert plan.peak_bytes <= (M * N // 2 + 3 * (M // 2 + N) * 1024) * 4
            text = plan.explain()
            assert f"{(M * K + K * N) * 4} bytes read" in text
        words = "more; raise the limit"
        same_error(comm, MemoryLimitError, lambda: rma_mm.matmul(A, B, mesh, memory_limit=M * N * 2), words)
        C = DistMatrix.from_numpy(np.ones((M, N), "f4"), mesh)
        rma_mm.matmul(A, B, mesh, out=C, alpha=2, beta=-1)
        assert np.array_equal(C.to_numpy(), 2 * (a @ b) - 1)


@parallel(ranks=(2,), env=("node",))
def test_misuse(comm, tmp_path):
    a, b = operands(comm, tmp_path)
    with Mesh((2, 1), comm) as mesh:
        A, B = (rma_mm.open(tmp_path / name) for name in ("A.npy", "B.h5"))
        D = DistMatrix.from_numpy(a, mesh, "*,*")
        same_error(comm, AlgorithmError, lambda: rma_mm.matmul(A, B, mesh, algorithm="cannon"), "stationary_c can")
        with rma_mm.plan(A, B, mesh) as plan, rma_mm.plan(D, B, mesh) as other:
            same_error(comm, LayoutError, lambda: plan.execute(D, B), "A: this plan was made for one that stays in a")
            same_error(comm, LayoutError, lambda: other.execute(A, B), "A: this plan was made for one that is in mem")
            assert np.array_equal(other.execute(D, B).to_numpy(), a @ b)
        own = tmp_path / f"{comm.rank}.npy"
        np.save(own, a[: 50 + comm.rank])
        same_error(comm, DisagreementError, lambda: rma_mm.matmul(rma_mm.open(own), B, mesh), "shape")
        np.save(own, b)
        first = tmp_path / "0.npy"
        comm.Barrier()  # on rank 0 B is A, and on the other it is not
        two = rma_mm.open(own), rma_mm.open(first)
        same_error(comm, DisagreementError, lambda: rma_mm.matmul(*two, mesh, transpose_a=True), "B is A")
        A.close()
        with pytest.raises(rma_mm.errors.ClosedError):
            rma_mm.matmul(A, B, mesh)
        if comm.rank:
            two[1].close()
        same_error(comm, rma_mm.errors.ClosedError, lambda: rma_mm.matmul(B, two[1], mesh, transpose_a=True), "closed")


@parallel(ranks=(1, 2, 3), env=("node", "cliques"))
def test_a_file_times_its_own_transpose_is_read_once(comm, tmp_path):
    """By its own name and by others; chunks too are; C is whole, or its lower triangle, whatever multiplies it."""
    rng = np.random.default_rng(7)
    x = rng.integers(-3, 4, (K, N)).astype("f4")
    path = tmp_path / "X.h5"
    if comm.rank == 0:
        np.save(tmp_path / "X.npy", x)
        with h5py.File(path, "w") as file:
            file.create_dataset("g/X", data=x, chunks=(100, 11))
    comm.Barrier()
    half = x.T @ x
    with Mesh((comm.size,), comm) as mesh:
        for name, again in ((f"{path}::g/X", "X.h5::/g/X"), (str(tmp_path / "X.npy"), "X.npy")):
            X, same = rma_mm.open(name), rma_mm.open(os.path.relpath(tmp_path / again))
            assert X.is_same(X) and X.is_same(same)
            for A, B, how in ((X, X, {"transpose_a": True}), (X, same, {"transpose_a": True, "fill": "lower"})):
                with rma_mm.plan(A, B, mesh, algorithm="stationary_c:summands", **how) as plan:
                    assert f"{x.nbytes} bytes read" in plan.explain()
                    assert np.array_equal(plan.execute(A, B).to_numpy(), np.tril(half) if "fill" in how else half)
                with rma_mm.plan(A, B, mesh, algorithm="stationary_c:syrk", deterministic=True, **how) as plan:
                    assert np.array_equal(plan.execute(A, B).to_numpy(), np.tril(half) if "fill" in how else half)
            C = rma_mm.matmul(X, same, mesh, transpose_b=True)
            assert np.array_equal(C.to_numpy(), x @ x.T) and rma_mm.verify(X, X, C, transpose_b=True).ok
            part = rma_mm.open(f"{name}[0:{N}, :]")
            assert not X.is_same(part)
            assert np.array_equal(rma_mm.matmul(part, part, mesh).to_numpy(), x[:N] @ x[:N])
            assert np.array_equal(rma_mm.matmul(X, part, mesh).to_numpy(), x @ x[:N])
    line = "X.npy ./X.npy --transpose-a -o C.npy --verify --memory-limit 60KiB --json r.json"
    for more, wanted in (("", half), ("--symmetric --c C0.npy --beta 2", half + 2)):
        if comm.rank == 0:
            np.save(tmp_path / "C0.npy", np.ones((N, N), "f4"))
        comm.Barrier()
        done = command(comm, f"{line} {more}", tmp_path)
        assert done.returncode == 0, done.stderr
        assert np.array_equal(np.load(tmp_path / "C.npy"), wanted)
        found = json.loads((tmp_path / "r.json").read_text())
        assert found["algorithm"].startswith("stationary_c:") and found["files"]["streamed"]["bytes"] == x.nbytes
        comm.Barrier()


PROGRAM = """
import os, shutil, sys
import numpy as np
from mpi4py import MPI
import rma_mm

folder, fault = sys.argv[1:]
path, comm, done = f"{folder}/A.npy", MPI.COMM_WORLD, []


def strike(now, total):
    done.append(now)
    if comm.rank == 1 and len(done) == 1:
        if fault == "truncated":
            os.truncate(path, 1000)
        elif fault == "replaced":
            shutil.copy(path, path + "~")
            os.replace(path + "~", path)
        else:
            os.unlink(path)


mesh = rma_mm.Mesh((comm.size, 1), comm)
A, B = rma_mm.open(path), rma_mm.open(f"{folder}/B.h5")
plan = rma_mm.plan(A, B, mesh, memory_limit=50_000)
try:
    plan.execute(A, B, progress=strike)
except rma_mm.errors.FileFormatError as error:
    print(f"rank {comm.rank}: {error}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("fault", usually(1, ["truncated", "replaced", "removed"]))
def test_a_file_that_changes_meanwhile_is_one_error_for_all(tmp_path, fault):
    """In the midst of the product, on whichever rank meets it first; nobody waits for ever."""
    operands(MPI.COMM_SELF, tmp_path)
    done = mpirun(3, ["-c", PROGRAM, str(tmp_path), fault], timeout=60)
    lines = done.stdout.splitlines()
    said = {line.partition(": ")[2] for line in lines}
    assert len(lines) == 3 and len(said) == 1, done
    assert "A.npy" in said.pop() and "Traceback" not in done.stderr


@parallel(ranks=(2,), env=("node",))
def test_it_is_verified_against_what_the_files_hold(comm, tmp_path):
    """By `check`, by `verify`, and by the command, which streams by itself where its limit is too small for A and B."""
    a, b = operands(comm, tmp_path)
    with Mesh((2, 1), comm) as mesh:
        A, B = (rma_mm.open(tmp_path / name) for name in ("A.npy", "B.h5"))
        C = rma_mm.matmul(A, B, mesh, check=True)
        assert rma_mm.verify(A, B, C).ok
        C.tile[3, 5] += 1
        with pytest.raises(VerificationError, match="C is wrong"):
            rma_mm.verify(A, B, C)
    line = "A.npy B.h5::B -o C.npy --verify --memory-limit 200KiB --json r.json"
    done = command(comm, line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "read" in done.stdout and "behind the product" in done.stdout
    assert np.array_equal(np.load(tmp_path / "C.npy"), a @ b)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["verified"] is True and found["peak_bytes"] <= 200 * 2**10
    assert found["files"]["read"]["bytes"] == 0
    assert found["files"]["streamed"]["bytes"] == (M * K + K * N) * 4
    assert 0 <= found["files"]["streamed"]["hidden"] <= 1
    refused(command(comm, "A.npy B.h5::B --memory-limit 6KiB", tmp_path), "memory_limit: got 6144", "more")
