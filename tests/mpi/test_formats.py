"""A format that is registered from outside the package (`tests.raw_format`): round trips, errors, the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.command.jobs import job
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import DisagreementError, FileFormatError
from rma_mm.runtime.files.formats import FORMATS, Format, format_of
from rma_mm.runtime.files.generated import generated
from tests import raw_format
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_library import same_error

CASES = [
    # shape, element type, placements to save from and to load to
    ((37, 23), "float64", "i:cyclic(3), *", "*, i"),
    ((5, 70), "complex64", "*, i:cyclic(2)", "i, *"),
    ((1, 9), "int8", "*, i", "*, *"),
    ((8, 6), "bfloat16", "i, *", "*, i:cyclic(1)"),
    ((0, 4), "bool", "i, *", "i, *"),
    ((12, 12), "float32", "*, *", "i:weights({}), *"),
]


@parallel(ranks=(1, 2, 3, 4), env=("node",))
def test_round_trips(comm, tmp_path):
    """Types, cuts and replicas; what is beside the elements has its name when they have theirs; .npy both ways."""
    assert format_of("X.RAW") is raw_format.RAW
    with Mesh((comm.size,), comm) as mesh:
        for number, (shape, dtype, source, target) in enumerate(CASES):
            x = generated(number, "A", parse_dtype(dtype))(*np.ogrid[: shape[0], : shape[1]])
            raw, npy, plain = (tmp_path / f"{number}{suffix}" for suffix in (".raw", ".npy", ".matrix"))
            DistMatrix.from_numpy(x, mesh, source).save(raw)
            if comm.rank == 0:
                assert raw.read_bytes() == x.tobytes()
                assert json.loads(Path(f"{raw}.json").read_text()) == {"shape": list(shape), "dtype": dtype}
            B = rma_mm.load(raw, mesh, target.format(", ".join("1" * comm.size)))
            assert (B.shape, B.dtype) == (shape, x.dtype)
            assert B.to_numpy().tobytes() == x.tobytes()
            B.save(npy)
            rma_mm.load(npy, mesh, dtype=dtype).save(plain)  # a name that no format has: .npy again
            if comm.rank == 0:
                assert plain.read_bytes() == npy.read_bytes()
                assert np.load(npy).tobytes() == x.tobytes()
        assert len(os.listdir(tmp_path)) == 4 * len(CASES)


def spoil(path: Path, how: str) -> None:
    """Make an input that cannot be read."""
    if how == "no file":
        path.unlink()
    elif how == "no sidecar":
        Path(f"{path}.json").unlink()
    elif how == "truncated":
        os.truncate(path, 47)
    else:
        Path(f"{path}.json").write_text(how)


BAD = {
    "no file": "No such file", "no sidecar": "No such file", "truncated": "needs 48 bytes with its header",
    "{}": "no shape and dtype", '{"shape": [2, 3], "dtype": "float80"}': "float80", "[": "no shape and dtype",
}


@parallel(ranks=(1, 3), env=("node",))
def test_errors_are_the_same_on_every_rank(comm, tmp_path):
    """As good as those of .npy: they name the file, and nothing is left behind."""
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_numpy(np.arange(6.0).reshape(2, 3), mesh)
        for how, words in BAD.items():
            path = tmp_path / "x.raw"
            A.save(path)
            if comm.rank == 0:
                spoil(path, how)
            comm.Barrier()
            same_error(comm, FileFormatError, lambda path=path: rma_mm.load(path, mesh), "x.raw", words)
        for path in (tmp_path / "none" / "y.raw", tmp_path / "y.raw"):
            if comm.rank == 0:
                os.makedirs(tmp_path / "y.raw.json", exist_ok=True)
            comm.Barrier()
            same_error(comm, FileFormatError, lambda path=path: A.save(path), "y.raw", "director")
        assert not (tmp_path / "y.raw").exists() and not [name for name in os.listdir(tmp_path) if name[0] == "."]


@parallel(ranks=(3,), env=("node",))
def test_a_format_that_fails_on_one_rank(comm, tmp_path):
    """With an error that is none of this package's: the others must not wait for it."""

    def fails(*_):
        if comm.rank == 0:
            raise KeyError("of the format's own")

    FORMATS[".odd"] = Format((".odd",), fails, fails)
    try:
        with Mesh((3,), comm) as mesh:
            A = DistMatrix.from_numpy(np.ones((4, 4)), mesh)
            for call in (A.save, lambda path: rma_mm.load(path, mesh)):
                with pytest.raises(Exception, match="of the format's own"):
                    call(tmp_path / "x.odd")
    finally:
        del FORMATS[".odd"]


@parallel(ranks=(2,), env=("node",))
def test_ranks_that_find_different_files(comm, tmp_path):
    """Each rank has a directory of its own, as on hosts that share none."""
    own = tmp_path / str(comm.rank)
    own.mkdir()
    np.full((4, 2 + comm.rank), 1.0).tofile(own / "x.raw")
    (own / "x.raw.json").write_text(json.dumps({"shape": (4, 2 + comm.rank), "dtype": "float64"}))
    comm.Barrier()
    before = os.getcwd()
    os.chdir(own)
    try:
        with Mesh((2,), comm) as mesh:
            same_error(comm, DisagreementError, lambda: rma_mm.load("x.raw", mesh), "shape")
    finally:
        os.chdir(before)


def flip(self, c, write=job.Job._write):
    """Writes the result, of which a bit flips on the disk."""
    write(self, c)
    self.comm.barrier()
    if self.comm.rank == 0:
        with open(self.output.temporary, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0] ^ 64
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte]))
    self.comm.barrier()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with A.raw (31 × 17) and B.npy (17 × 13)."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((31, 17)), rng.standard_normal((17, 13))
    a.tofile(tmp_path / "A.raw")
    (tmp_path / "A.raw.json").write_text(json.dumps({"shape": a.shape, "dtype": "float64"}))
    np.save(tmp_path / "B.npy", b)
    return tmp_path


@parallel(ranks=(2,), env=("node",))
def test_the_command_line_takes_it(comm, here):
    """Read, written, and verified with the file on the disk: right is 0, a bit that flips there 4, a misfit 2."""
    right = job.Job._write
    for number, (line, write, code) in enumerate(
        (("A.raw B.npy", right, 0), ("A.raw B.npy", flip, 4), ("A.raw A.raw", right, 2))
    ):
        with mock.patch.object(job.Job, "_write", write):
            done = command(comm, f"{line} -o {number}.raw --verify --quiet", here)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert sorted(os.listdir(here)) == ["0.raw", "0.raw.json", "A.raw", "A.raw.json", "B.npy"]
    a, c = (np.fromfile(here / name).reshape(31, -1) for name in ("A.raw", "0.raw"))
    np.testing.assert_allclose(c, a @ np.load(here / "B.npy"), atol=1e-12)


@parallel(ranks=(3,), env=("node",))
def test_files_that_name_others_are_read_on_request(comm, tmp_path):
    """By `load` and by the command; refused by both, on every rank alike, where nobody asks for it."""
    h5py = pytest.importorskip("h5py")
    x = np.arange(12.0).reshape(3, 4)
    if comm.rank == 0:
        x.tofile(tmp_path / "elements")
        with h5py.File(tmp_path / "E.h5", "w") as file:
            file.create_dataset("A", x.shape, "f8", external=[(str(tmp_path / "elements"), 0, x.nbytes)])
        np.save(tmp_path / "B.npy", np.eye(4))
    comm.Barrier()
    with Mesh((comm.size,), comm) as mesh:
        path = tmp_path / "E.h5"
        same_error(comm, FileFormatError, lambda: rma_mm.load(path, mesh), "E.h5", "elements", "--allow-external")
        assert np.array_equal(rma_mm.load(path, mesh, allow_external=True).to_numpy(), x)
    for flag, code in (("", 2), (" --allow-external", 0)):
        done = command(comm, f"E.h5::A B.npy -o C.npy --verify --quiet{flag}", tmp_path)
        assert done.returncode == code, done.stderr
    assert np.array_equal(np.load(tmp_path / "C.npy"), x)
