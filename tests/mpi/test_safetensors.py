"""safetensors files on real ranks: the command line, an index of several files, arrays, and what is wrong with them."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

import rma_mm
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.command.jobs import job
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import DisagreementError, FileFormatError, OptionError
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_formats import flip
from tests.mpi.test_library import same_error
from tests.thorough import thorough

WHOLE = (slice(None),) * 2


def read(path):
    """A matrix, on this rank alone."""
    with rma_mm.open(path) as opened:
        return opened.read(WHOLE)


def numbers(shape, dtype, seed=0):
    """Small whole numbers, whose products are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


@thorough
@parallel(ranks=(1, 3), env=("node", "cliques"))
def test_the_command_line(comm, tmp_path):
    """A model in two files, a part of it, C0 and a bias; the result beside them; a flipped bit is found."""
    a, b, c0, bias = (numbers(shape, "f4") for shape in ((9, 8), (7, 6), (5, 6), (6,)))
    with Mesh((comm.size,), comm) as mesh:
        for name, x in (("1::a", a), ("1::c0", c0), ("2::b", b)):
            file, inner = name.split("::")
            DistMatrix.from_numpy(x, mesh).save(f"{tmp_path}/m-{file}.safetensors::{inner}")
        DistArray.from_numpy(bias, mesh).save(f"{tmp_path}/m-2.safetensors::bias")
        DistArray.from_numpy(bias, mesh).save(f"{tmp_path}/v.safetensors")
    if comm.rank == 0:
        files = {"a": "m-1.safetensors", "c0": "m-1.safetensors", "b": "m-2.safetensors", "bias": "m-2.safetensors"}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    m = "m.safetensors.index.json"
    line = f"{m}::a[2:7,1:] {m}::b --c {m}::c0 --beta 2 --bias-per column --verify --quiet --json -"
    wanted = a[2:7, 1:] @ b + 2 * c0 + bias
    for output, vector in (("out.safetensors", f"{m}::bias"), ("m-1.safetensors::x/y", "v.safetensors")):
        done = command(comm, f"{line} --bias {vector} -o {output}", tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["verified"] is True
        found = read(tmp_path / output)
        assert found.dtype == np.float32 and np.array_equal(found, wanted)
    assert np.array_equal(read(tmp_path / "m-1.safetensors::a"), a)
    assert np.array_equal(read(tmp_path / "out.safetensors::C"), wanted)
    before = sorted(os.listdir(tmp_path))
    right = job.Job._write
    for words, write, code, said in (
        (f"{m}::a[2:7,1:] {m}::b -o bad.safetensors --verify", flip, 4, "the result is wrong"),
        (f"{m}::a {m}::b", right, 2, "inner dimensions differ"),
        (f"{m}::a {m}::d", right, 2, "d is not there; the index holds a: m-1.safetensors"),
        (f"{m}::a m-1.safetensors", right, 2, "say which matrix, as m-1.safetensors::NAME; the file holds"),
        (f"{m}::a m-2.safetensors::bias", right, 2, "(6,), 1 dimensions; a matrix has 2"),
        (f"{m}::a[:,1:] {m}::b --bias {m}::c0 --bias-per row", right, 2, "c0: holds an array of shape (5, 6)"),
        (f"{m}::a[:,1:] {m}::b -o {m}::C", right, 2, "write to a .safetensors file"),
        (f"{m}::a[:,1:] {m}::b --alpha 1j --compute-dtype complex128 -o o.safetensors", right, 2, "no complex128"),
        (f"m-1.safetensors::a[:,1:] {m}::b -o ./m-1.safetensors::a", right, 2, "the file of an operand too"),
    ):
        with mock.patch.object(job.Job, "_write", write):
            done = command(comm, f"{words} --quiet", tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done
        assert said in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


@parallel(ranks=(2,), env=("node",))
def test_arrays_of_other_dimensions(comm, tmp_path):
    """Batches and vectors, through load and save; halves of floats, which a file tells by itself."""
    path = tmp_path / "x.safetensors"
    arrays = {"batch": numbers((5, 3, 4), "i2"), "vector": numbers((7,), "f8")}
    arrays["half"] = numbers((6, 5), BFLOAT16 or "f2")
    with Mesh((2,), comm) as mesh:
        for name, x in arrays.items():
            kind = DistMatrix if x.ndim == 2 else DistArray
            kind.from_numpy(x, mesh).save(f"{path}::{name}")
        for name, x in arrays.items():
            found = rma_mm.load(f"{path}::{name}", mesh)
            assert found.dtype == x.dtype and np.array_equal(found.to_numpy(), x)
        assert np.array_equal(rma_mm.load(path, mesh).to_numpy(), arrays["half"])  # its only matrix
        same_error(comm, FileFormatError, lambda: rma_mm.load(f"{path}::batch[1:, :]", mesh), "3 dimensions")


@parallel(ranks=(3,), env=("node",))
def test_errors_are_the_same_on_every_rank(comm, tmp_path):
    """And leave nothing behind. Ranks with files of their own that differ in where the elements lie are told."""
    with Mesh((3,), comm) as mesh:
        A = DistMatrix.from_numpy(np.arange(6.0).reshape(2, 3), mesh)
        A.save(tmp_path / "x.safetensors")
        if comm.rank == 0:
            (tmp_path / "y.safetensors").write_bytes(b"not one")
        comm.barrier()
        at = str(tmp_path)
        for error, call, *words in (
            (FileFormatError, lambda: rma_mm.load(f"{at}/x.safetensors::A", mesh), "A is not there", "C: (2, 3)"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/y.safetensors::A", mesh), "no safetensors file, or truncated"),
            (FileFormatError, lambda: A.save(f"{at}/y.safetensors::A"), "no safetensors file, or truncated"),
            (FileFormatError, lambda: A.save(f"{at}/z.safetensors::__metadata__"), "is no name of a tensor"),
            (FileFormatError, lambda: A.save(f"{at}/z.safetensors::\udcff"), "is no name of a tensor"),
            (OptionError, lambda: A.save(f"{at}/z.safetensors", chunks=(2, 2)), "chunks: output"),
        ):
            same_error(comm, error, call, *words)
        assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "y.safetensors"]
        comm.barrier()
        own = tmp_path / f"{comm.rank}"
        own.mkdir()
        with Mesh((1,), MPI.COMM_SELF) as alone:
            B = DistMatrix.from_numpy(np.arange(6.0).reshape(2, 3), alone)
            for name in ("A", "B")[: 1 + (comm.rank == 2)]:
                B.save(own / f"x.safetensors::{name}")
        with chdir(own):
            same_error(comm, DisagreementError, lambda: rma_mm.load("x.safetensors::A", mesh), "offset")
