"""Zarr stores on real ranks: whatever is saved is what zarr reads and is loaded again, wherever it lies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.command.jobs import job
from rma_mm.errors import FileFormatError, OptionError, ShapeError
from rma_mm.runtime.files.containers import zarr_source
from rma_mm.runtime.matrices import filed
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused_in_a_line
from tests.mpi.test_library import same_error
from tests.processes import Mpiexec, job_environment
from tests.thorough import thorough, usually

zarr = pytest.importorskip("zarr")


def as_it_lies(matrix, output):
    """What `write` must not do: each rank writes what it holds."""
    output.write(matrix.region, matrix.tile)


@parallel(ranks=(4,), env=("node",))
def test_placements_that_cut_chunks_lose_nothing(comm, tmp_path):
    """Each chunk, or shard, is written by one rank; one that would write a part of one is stopped, and so are all."""
    x = 1.0 + np.arange(90.0 * 70).reshape(90, 70)
    with Mesh((2, 2), comm) as mesh:
        for layout in ("P('i:cyclic(5)', 'j')", "P(None, ('i', 'j'))", "P('i', None)", "P('i', 'j:cyclic(1)')"):
            A = DistMatrix.from_numpy(x, mesh, layout)
            for name, options in (("A", {"chunks": (16, 12)}), ("B", {"chunks": (8, 12), "shards": (16, 36)})):
                A.save(f"{tmp_path}/x.zarr::{name}", **options)
                assert np.array_equal(zarr.open_array(tmp_path / "x.zarr", path=name, mode="r")[...], x)
                save = partial(A.save, tmp_path / "y.zarr", **options)
                with mock.patch.object(filed, "write", as_it_lies):
                    same_error(comm, ShapeError, save, "cuts a chunk")
        assert os.listdir(tmp_path) == ["x.zarr"] and sorted(os.listdir(tmp_path / "x.zarr")) == ["A", "B", "zarr.json"]


@thorough
@parallel(ranks=(4,), env=("node",))
def test_what_is_in_shards_is_read_once(comm, tmp_path):
    """However it is to lie then; and it lies in blocks of shards where nothing is said."""
    path, x = tmp_path / "x.zarr", np.arange(90.0 * 70).reshape(90, 70)
    if comm.rank == 0:
        made = zarr.create_array(path, shape=x.shape, chunks=(8, 4), shards=(16, 12), dtype=x.dtype)
        made[...] = x
    comm.barrier()
    read: list[tuple[int, int]] = []

    class Watched(zarr_source.ZarrArray):
        def read(self, region, out):
            read.extend({(i // 16, j // 12) for i in region[0].indices for j in region[1].indices})
            super().read(region, out)

    with mock.patch.object(zarr_source, "ZarrArray", Watched), Mesh((2, 2), comm) as mesh:
        for layout in (None, "P('i:cyclic(5)', 'j')", "P(None, 'j')", "P('j', None, i=0)"):
            read.clear()
            A = rma_mm.load(path, mesh, layout)
            assert np.array_equal(A.to_numpy(), x)
            assert sorted(chain.from_iterable(comm.allgather(read))) == [(i, j) for i in range(6) for j in range(6)]
            if layout is None:
                assert A.tile.shape == [(48, 36), (48, 34), (42, 36), (42, 34)][comm.rank]


@parallel(ranks=(1, 3), env=("node",))
def test_errors_are_the_same_on_every_rank(comm, tmp_path):
    """Of names, options, damaged chunks; what one rank cannot write; nothing is left."""
    at = f"{tmp_path}/x.zarr"
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_numpy(np.arange(60.0).reshape(10, 6), mesh, "P('i', None)")
        A.save(f"{at}::g/A", chunks=(4, 4))
        A.save(f"{at}::g/B", chunks=(4, 4))
        if comm.rank == 0:
            Path(at, "g/A/c/2/1").write_bytes(b"")
            zarr.create_array(at, name="v", shape=(6,), chunks=(4,), dtype="f4")[...] = np.arange(6)
        comm.barrier()
        assert rma_mm.load(f"{at}::v", mesh).to_numpy().tolist() == [0, 1, 2, 3, 4, 5]
        for error, call, *words in (
            (FileFormatError, lambda: rma_mm.load(f"{at}::A", mesh), "A is not there", "/g/A: (10, 6) of float64"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/g", mesh), "g is a group", "/g/B: (10, 6) of float64"),
            (FileFormatError, lambda: rma_mm.load(f"{at}::g/A", mesh), "g/A: is truncated", "c/2/1 has 0 bytes"),
            (FileFormatError, lambda: A.save(at), "is a group in that store"),
            (FileFormatError, lambda: A.save(f"{at}::g/A/B"), "is an array, which holds no others"),
            (OptionError, lambda: A.save(f"{at}::C", chunks=(4, 4), shards=(6, 4)), "of a shard must be multiples of"),
        ):
            same_error(comm, error, call, *words)
        assert sorted(os.listdir(at)) == ["g", "v", "zarr.json"]
        if comm.size > 1:
            with mock.patch("os.access", return_value=comm.rank < comm.size - 1):
                said = "cannot write there", "all nodes must see"
                same_error(comm, FileFormatError, lambda: A.save(f"{at}::C"), *said)
        with mock.patch("os.fsync", full if comm.rank == comm.size - 1 else os.fsync):
            same_error(comm, FileFormatError, lambda: A.save(f"{at}::C", chunks=(2, 2)), "No space left on device")
        comm.barrier()
        assert sorted(os.listdir(at)) == ["g", "v", "zarr.json"]


def full(_):
    raise OSError(28, "No space left on device")


def spoiled(how):
    """Writes the result, of which a chunk is spoiled on the disk."""

    def write(self, c, write=job.Job._write):
        write(self, c)
        self.comm.barrier()
        if self.comm.rank == 0:
            (file,) = Path(self.output.temporary).rglob("c/0/1")
            raw = file.read_bytes()
            file.write_bytes(raw[:-5] + b"\0\0\0\0\0" if how == "flip" else raw[:7])
        self.comm.barrier()

    return write


@thorough
@parallel(ranks=(2,), env=("node",))
def test_the_command_line(comm, tmp_path):
    """Inputs, parts, C0, bias and output in one store; verified against what is written."""
    rng = np.random.default_rng(0)
    a, b, c0, bias = (rng.integers(-4, 5, shape).astype("f4") for shape in ((9, 8), (7, 6), (5, 6), 6))
    path = tmp_path / "d.zarr"
    if comm.rank == 0:
        for name, x in (("g/a", a), ("c0", c0), ("bias", bias)):
            zarr.create_array(path, name=name, shape=x.shape, dtype=x.dtype, chunks=(4, 3)[: x.ndim])[...] = x
        np.save(tmp_path / "b.npy", b)
    comm.barrier()
    line = "d.zarr::g/a[2:7,1:] b.npy --c d.zarr/c0 --beta 2 --bias d.zarr/bias --bias-per column"
    how = "--chunks 2,2 --shards 2,4 --verify --quiet --compress none"
    done = command(comm, f"{line} -o d.zarr/C {how} --json -", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"] is True
    made = zarr.open_array(path, path="C", mode="r")
    assert np.array_equal(made[...], a[2:7, 1:] @ b + 2 * c0 + bias) and made.shards == (2, 4)
    for kind, code, said in (("flip", 4, "in the file, and was computed as"), ("cut", 1, "d.zarr")):
        with mock.patch.object(job.Job, "_write", spoiled(kind)):
            done = command(comm, f"{line} -o d.zarr/C --chunks 2,2 --compress none --verify", tmp_path)
        assert (done.returncode, said in done.stderr) == (code, True), done
    assert np.array_equal(zarr.open_array(path, path="C", mode="r")[...], made[...])
    for words, said in (
        ("d.zarr::g/x b.npy -o d.zarr/y", "g/x is not there; the store holds /C: (5, 6) of float32, /c0: (5, 6)"),
        ("d.zarr::g/a b.npy -o d.zarr/y", "inner dimensions differ"),
        ("d.zarr::g/a[:,1:] b.npy -o d.zarr", "--output: got d.zarr, which is the file of an operand too"),
        ("d.zarr::g/a[:,1:] b.npy -o d.zarr/g", "is a group in that store"),
        ("d.zarr::g/a[:,1:] b.npy -o d.zarr/y --shards 2,2", "without chunks"),
        ("d.zarr::g/a[:,1:] b.npy --bias d.zarr/c0 --bias-per row", "a vector is needed"),
        ("d.zarr::g/a[:,1:] b.npy -o d.zarr/y --result-dtype bfloat16", "Zarr has no bfloat16"),
        ("d.zarr::g/a[:,1:] b.npy -o d.zarr/g//a", "is no name in a Zarr store"),
    ):
        refused_in_a_line(command(comm, words, tmp_path), said)
    assert sorted(os.listdir(path)) == ["C", "bias", "c0", "g", "zarr.json"]


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", usually(1, [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_ends_while_it_writes(tmp_path: Path, how: signal.Signals) -> None:
    """Nothing stands under the final name; what is interrupted leaves nothing else, and what is killed no more than one
    folder, which the next run removes."""
    environment = job_environment({})
    line = ["-m", "rma_mm.run", "--shape", "3000,3000,8", "-o", "C.zarr", "--chunks", "100,100", "--quiet"]
    with open(tmp_path / "log", "wb") as log:
        made = Mpiexec(2, line, environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 60
        while not list(tmp_path.glob(".C.zarr.*.partial/new/c/*/*")):
            assert time.monotonic() < limit and made.process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        if how == signal.SIGKILL:
            made.kill()
        else:
            os.killpg(made.process.pid, how)
        made.process.wait(20)
    finally:
        made.kill()
    left = set(os.listdir(tmp_path)) - {"log"}
    assert len(left) == (how == signal.SIGKILL), left
    if left:
        line = [sys.executable, "-m", "rma_mm.run", "--shape", "30,30,8", "-o", "C.zarr", "--quiet"]
        subprocess.run(line, cwd=tmp_path, env=environment, check=True, timeout=60)
        assert sorted(os.listdir(tmp_path)) == ["C.zarr", "log"]
