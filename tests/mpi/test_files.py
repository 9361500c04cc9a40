"""Files of every format on real ranks: whatever is saved is loaded again, wherever it lies, and the command line."""

from __future__ import annotations

import json
import os
from itertools import chain
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.errors import DisagreementError, DtypeError, FileFormatError, OptionError, ShapeError
from rma_mm.runtime.files.containers import hdf5
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused_in_a_line
from tests.mpi.test_library import same_error

h5py = pytest.importorskip("h5py")


@parallel(ranks=(4,), env=("node",))
def test_what_is_in_chunks_is_decompressed_once(comm, tmp_path):
    """However it is to lie then; and it lies in blocks of chunks where nothing is said."""
    path, x = tmp_path / "x.h5", np.arange(90.0 * 70).reshape(90, 70)
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=(16, 12), compression="gzip")
    comm.barrier()
    read: list[tuple[int, int]] = []

    class Watched(hdf5.Dataset):
        def read(self, region, out):
            read.extend({(i // 16, j // 12) for i in region[0].indices for j in region[1].indices})
            super().read(region, out)

    with pytest.MonkeyPatch.context() as patch, Mesh((2, 2), comm) as mesh:
        patch.setattr(hdf5, "Dataset", Watched)
        for layout in (None, "P('i:cyclic(5)', 'j')", "P(None, 'j')", "P('j', None, i=0)"):
            read.clear()
            A = rma_mm.load(path, mesh, layout)
            assert np.array_equal(A.to_numpy(), x)
            assert sorted(chain.from_iterable(comm.allgather(read))) == [(i, j) for i in range(6) for j in range(6)]
            if layout is None:
                assert A.tile.shape == [(48, 36), (48, 34), (42, 36), (42, 34)][comm.rank]


@parallel(ranks=(3,), env=("node",))
def test_from_anything_that_has_slices(comm, tmp_path):
    """Mapped files, datasets, and a class of one's own; others are refused."""
    x = np.arange(35.0).reshape(7, 5)
    np.save(tmp_path / f"{comm.rank}.npy", x)
    with Mesh((3,), comm) as mesh:
        mapped = np.load(tmp_path / f"{comm.rank}.npy", mmap_mode="r")
        for layout in (None, "P(None, 'i:cyclic(2)')", "P(None, None)", "P(None, None, i=sum)"):
            assert np.array_equal(DistMatrix.from_source(mapped, mesh, layout).to_numpy(), x)
        if comm.rank == 0:
            with h5py.File(tmp_path / "x.h5", "w") as file:
                file["x"] = x
        comm.barrier()
        with h5py.File(tmp_path / "x.h5") as file:
            assert np.array_equal(DistMatrix.from_source(file["x"], mesh).to_numpy(), x)
        same_error(comm, ShapeError, lambda: DistMatrix.from_source([[1.0]], mesh), "got list", "x[a:b, c:d]")
        same_error(comm, ShapeError, lambda: DistMatrix.from_source(x[0], mesh), "two dimensions")
        same_error(comm, DtypeError, lambda: DistMatrix.from_source(x.astype(object), mesh), "object")
        for said, given in ((x.shape, x[:1]), (x.shape, x[:, :1]), (x.shape, x[0, 0]), ((7, 6), x), ((8, 5), x)):
            wrong = Sliced(said, given.dtype, given)
            same_error(comm, ShapeError, lambda wrong=wrong: DistMatrix.from_source(wrong, mesh), "x: gave", "for x[")
        wrong = Sliced(x.shape, np.dtype("f4"), x)
        same_error(comm, ShapeError, lambda: DistMatrix.from_source(wrong, mesh), "x: gave float64", "float32 of shape")
        same_error(comm, ShapeError, lambda: DistMatrix.from_source(Sliced(3, x.dtype, x), mesh), "shape: got 3")
        uneven = np.zeros((4, 4 + comm.rank // 2))
        same_error(comm, DisagreementError, lambda: DistMatrix.from_source(uneven, mesh), "shape")
        late = Sliced(x.shape, x.dtype, None if comm.rank == 1 else x)
        with pytest.raises(Exception, match="not subscriptable"):
            DistMatrix.from_source(late, mesh)


@parallel(ranks=(3,), env=("node",))
def test_formats_that_are_said(comm, tmp_path):
    """Of all files of a command line, whatever they are called; matrices alone are loaded as DistMatrix."""
    a, b, bias = (np.arange(float(np.prod(shape))).reshape(shape) for shape in ((3, 4), (4, 2), (2,)))
    for kind in ("h5", "safetensors"):
        with Mesh((3,), comm) as mesh:
            for name, x in (("a", a), ("b", b), ("v", bias), ("batch", np.ones((2, 3, 4)))):
                made = DistMatrix if x.ndim == 2 else DistArray
                made.from_numpy(x, mesh).save(f"{tmp_path}/{kind}.data::{name}", format=kind)
            for name, said in (("v", "(2,)"), ("batch", "(2, 3, 4)")):
                at = f"{tmp_path}/{kind}.data::{name}"
                same_error(comm, ShapeError, lambda at=at: DistMatrix.load(at, mesh, format=kind), said, "use load")  # noqa: B023
            B = DistMatrix.load(f"{tmp_path}/{kind}.data::b[1:, :]", mesh, "P(None, 'i')", format=kind)
            assert np.array_equal(B.to_numpy(), b[1:])
        words = "{0}.data::a {0}.data::b --bias {0}.data::v --bias-per column -o {0}.out --format {0} --verify --quiet"
        done = command(comm, words.format(kind), tmp_path)
        assert done.returncode == 0, done.stderr
        with rma_mm.open(f"{tmp_path}/{kind}.out", format=kind) as opened:
            assert np.array_equal(opened.read((slice(None),) * 2), a @ b + bias)


class Sliced:
    """Something that says what it holds, and may hold something else."""

    def __init__(self, shape: Any, dtype: Any, held: Any) -> None:
        self.shape, self.dtype, self.held = shape, dtype, held

    def __getitem__(self, box: Any) -> Any:
        if np.ndim(self.held) == 0 and self.held is not None:
            return self.held
        return self.held[box]


@parallel(ranks=(1, 3), env=("node",))
def test_errors_are_the_same_on_every_rank(comm, tmp_path):
    """Of names, parts, formats and options."""
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_numpy(np.arange(6.0).reshape(2, 3), mesh)
        A.save(tmp_path / "A.npy")
        A.save(tmp_path / "A.h5")
        A.save(f"{tmp_path}/A.h5::v/w")
        at = str(tmp_path)
        for error, call, *words in (
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.npy::x", mesh), "such a file holds one matrix"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.npy[::2, :]", mesh), "[::2, :]", "steps of 1"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.npy[1, :]", mesh), "[1, :]", "as [0:1000, :]"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.npy[:, :, :]", mesh), "rows and columns"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.h5::B", mesh), "B is not there", "/C: (2, 3) of float64"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.h5::v", mesh), "v is a group", "/v/w: (2, 3) of float64"),
            (FileFormatError, lambda: rma_mm.load(f"{at}/A.h5", mesh), "say which matrix"),
            (FileFormatError, lambda: A.save(f"{at}/B.npy[:, :]"), "a part of a matrix"),
            (OptionError, lambda: rma_mm.load(f"{at}/A.npy", mesh, format="csv"), "got 'csv'; must be one of h5, hdf"),
            (OptionError, lambda: A.save(f"{at}/B.npy", chunks=(2, 2)), "chunks: output", "B.npy has none"),
            (OptionError, lambda: A.save(f"{at}/B.npy", chunks=3), "chunks: got 3", "rows and columns"),
            (OptionError, lambda: A.save(f"{at}/B.npy", compress="zip"), "compress: got 'zip'"),
            (OptionError, lambda: A.save(f"{at}/B.npy", colour="red"), "the option 'colour'"),
        ):
            same_error(comm, error, call, *words)
        assert sorted(os.listdir(tmp_path)) == ["A.h5", "A.npy"]
        A.save(tmp_path / "x.data", format="h5")
        assert np.array_equal(rma_mm.load(tmp_path / "x.data", mesh, format="h5").to_numpy(), A.to_numpy())


@parallel(ranks=(2,), env=("node",))
def test_the_command_line(comm, tmp_path):
    """Inputs, parts of them, C0, bias and output in files that hold several; verified against what is written."""
    rng = np.random.default_rng(0)
    a, b, c0, bias = (rng.integers(-4, 5, shape).astype("f4") for shape in ((9, 8), (7, 6), (5, 6), 6))
    path = tmp_path / "d.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("g/a", data=a, chunks=(4, 3), compression="gzip")
            file["c0"], file["bias"] = c0, bias
        np.save(tmp_path / "b.npy", b)
    comm.barrier()
    line = "d.h5::g/a[2:7,1:] b.npy --c d.h5::c0 --beta 2 --bias d.h5::bias --bias-per column"
    done = command(comm, f"{line} -o d.h5::g/c --verify --quiet --json -", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is True
    assert [report["files"][how]["bytes"] for how in ("read", "written")] == [4 * (5 * 7 + 7 * 6 + 5 * 6), 4 * 5 * 6]
    for moved in report["files"].values():
        assert moved["bytes_per_second"] * moved["seconds"] == pytest.approx(moved["bytes"])
    with h5py.File(path) as file:
        assert np.array_equal(file["g/c"][()], a[2:7, 1:] @ b + 2 * c0 + bias)
        assert np.array_equal(file["g/a"][()], a)
    before = path.read_bytes()
    for words, said in (
        ("d.h5::g/x b.npy -o d.h5::y", "g/x is not there; the file holds /c0: (5, 6) of float32, /g/a: (9, 8)"),
        ("d.h5::g/a b.npy -o d.h5::y", "inner dimensions differ"),
        ("d.h5::g/a[:,1:] b.npy -o d.h5::c0/y", "as HDF5"),
        ("d.h5::g/a[:,1:] b.npy --chunks 2,2", "--chunks: needs --output FILE"),
        ("d.h5::g/a[:,1:] b.npy --chunks 2", "two whole numbers"),
        ("d.h5::g/a[:,1:] b.npy -o d.h5::y --compress zstd", "compress: output"),
        ("d.h5::g/a[:,1:] b.npy --bias d.h5::c0 --bias-per row", "a vector is needed"),
        ("d.h5::g/a[:,1:] b.npy --format csv", "got 'csv'"),
        ("d.h5::g/a[:,1:] b.npy -o d.h5::/g/a", "--output: got d.h5::/g/a, which is the file of an operand too"),
        ("d.h5::C b.npy -o d.h5", "--output: got d.h5, which is the file of an operand too"),
        ("d.h5::g/a[:,1:] b.npy -o ./b.npy", "--output: got ./b.npy, which is the file of an operand too"),
        ("d.h5::g/a[:,1:] b.npy --json d.h5", "--json: got d.h5, which is the file of an operand too"),
    ):
        refused_in_a_line(command(comm, words, tmp_path), said)
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["b.npy", "d.h5"]
