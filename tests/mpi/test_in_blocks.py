"""Results that do not fit in memory: block by block into every format, ended at any moment and gone on with."""

import errno
import json
import os
import subprocess
import time
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import Mesh
from rma_mm.errors import FileFormatError
from rma_mm.geometry.span import Region
from rma_mm.runtime.files import output
from rma_mm.runtime.files.journal import Journal, checksum
from rma_mm.runtime.products.blocks import BlockedProduct
from rma_mm.unfinished import Unfinished
from tests import raw_format
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.processes import Mpiexec, job_environment, mpirun
from tests.thorough import thorough, usually

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

M, N, K = 150, 130, 270
LINE = "A.npy B.zarr --memory-limit 40KiB --quiet"
"""C alone takes 78 KB, so that it is cut on one rank and on two."""


@pytest.fixture
def here(tmp_path):
    """A folder with A.npy, B.zarr, C0.npy, and biases."""
    rng = np.random.default_rng(34)
    shapes = {"A": (M, K), "B": (K, N), "C0": (M, N), "row": (M,), "column": (N,)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.integers(-3, 4, shape).astype("f4"))
    made = zarr.create_array(tmp_path / "B.zarr", shape=(K, N), chunks=(90, 20), dtype="f4")
    made[...] = np.load(tmp_path / "B.npy")
    return tmp_path


def arrays(here, *names):
    return [np.load(here / f"{name}.npy") for name in names]


def read(path, **said):
    with rma_mm.open(path, **said) as opened:
        return opened.read((slice(None), slice(None)))


OUTPUTS = {
    "C.npy": "", "x.h5::g/C": "", "x.safetensors::C": "", f"x{raw_format.RAW.suffixes[0]}": "",
    "x.zarr::g/C": "--chunks 8,10 --shards 16,20", "y.zarr": "--chunks 16,20",
}


@parallel(ranks=(1, 2), env=("node", "cliques"), usual="cliques")
def test_every_format_gets_whole_blocks(comm, here):
    a, b = arrays(here, "A", "B")
    for path, how in OUTPUTS.items():
        done = command(comm, f"{LINE} -o {path} {how} --verify --json r.json", here)
        assert done.returncode == 0, (path, done.stderr)
        assert np.array_equal(read(f"{here}/{path}"), a @ b), path
        report = json.loads((here / "r.json").read_text())
        assert report["verified"] is True and report["peak_bytes"] <= 40 * 2**10
        assert np.prod(report["blocks"]["of"]) > 1 and report["blocks"]["resumed"] == 0
        assert report["files"]["written"]["bytes"] == M * N * 4 and report["files"]["streamed"]["bytes"] > 0
    left = [name for name in os.listdir(here) if name.startswith(".") or name.endswith(".journal")]
    assert not left, left


@parallel(ranks=(2,), env=("node",))
def test_blocks_of_several_shapes_are_not_held_at_once(comm, here):
    """And the same job gives the same bits, where the fastest plan would add up in no fixed order too."""
    a, b = arrays(here, "A", "B")
    for limit in (18, 30):
        with mock.patch.dict(os.environ, RMA_MM_MACHINE="typical"), Mesh((2, 1), comm) as mesh:
            files = [rma_mm.open(here / name) for name in ("A.npy", "B.zarr")]
            product = BlockedProduct(mesh, *files, (M, N, K), None, None, None, memory_limit=limit * 2**10)
            assert len({region.shape for region in product.blocks}) > 1
            assert product.first.choice.reproducible
            for region in product.blocks:
                c = product.multiply(region)
                held = sum(block.local.nbytes for block in mesh.arena.blocks)
                assert max(comm.allgather(held)) <= product.first.peak_bytes
                assert np.array_equal(c.to_numpy(), (a @ b)[region.selector()])
            product.close()


@parallel(ranks=(2,), env=("node",))
def test_what_is_added_and_applied_in_each_block(comm, here):
    a, b, c0, row, column = arrays(here, "A", "B", "C0", "row", "column")
    for more, wanted in (
        ("--c C0.npy --beta 2 --alpha -1", -(a @ b) + 2 * c0),
        ("--bias row.npy --bias-per row --activation relu", np.maximum(a @ b + row[:, None], 0)),
        ("--bias column.npy --bias-per column --result-dtype float64", (a @ b + column).astype(float)),
    ):
        done = command(comm, f"{LINE} -o C.npy --verify {more}", here)
        assert done.returncode == 0, done.stderr
        found = np.load(here / "C.npy")
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), more
    np.save(here / "At.npy", a.T)
    done = command(comm, f"{LINE.replace('A.npy', 'At.npy')} --transpose-a -o C.npy --verify", here)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(here / "C.npy"), a @ b)


@thorough
@pytest.mark.parametrize("path", usually(1, ["C.npy", "x.h5::g/C", "y.zarr", "x.safetensors"]))
def test_killed_at_any_moment_and_gone_on_with(here, path):
    """Nothing is under the name; what is done stays so, but for the block that was under way; the bits are the same."""
    a, b = arrays(here, "A", "B")
    how, typical = OUTPUTS["y.zarr"].split() if path == "y.zarr" else [], {"RMA_MM_MACHINE": "typical"}
    line = ["-m", "rma_mm.run", *LINE.split(), "-o", path, *how]
    environment = job_environment(typical)
    file = here / path.partition("::")[0]
    known = -1
    for turn in range(4):
        more = ["--resume", "--json", "r.json"] if turn else []
        with open(here / "log", "wb") as log:
            made = Mpiexec(2, [*line, *more], environment, cwd=here, stdout=log, stderr=subprocess.STDOUT)
            limit = time.monotonic() + 60
            while made.process.poll() is None and blocks_of(here) <= known + turn % 2:
                assert time.monotonic() < limit
                time.sleep(0.002)
            made.kill()
            made.process.wait(20)
        if made.process.returncode == 0:
            break
        assert not file.exists(), (here / "log").read_text()
        assert blocks_of(here) >= known, "what was done stays"
        known = blocks_of(here)
    else:
        done = mpirun(2, line, variables=typical, cwd=here)
        assert done.returncode == 2 and "--resume continues it" in done.stderr
        assert blocks_of(here) == known
        done = mpirun(2, [*line, "--resume", "--verify", "--json", "r.json"], variables=typical, cwd=here)
        assert done.returncode == 0, done.stderr
        assert json.loads((here / "r.json").read_text())["blocks"]["resumed"] == known > 0
    assert np.array_equal(read(f"{here}/{path}"), a @ b)
    assert not [name for name in os.listdir(here) if name.endswith((".journal", ".partial"))]


def blocks_of(here):
    """Blocks that are done, as the journal says; −1 without one."""
    for name in os.listdir(here):
        if name.endswith(".journal"):
            return (here / name).read_bytes().count(b'"sum"')
    return -1


def fails_in(number, write=output.Output.write):
    """A disk that is full when some block comes to it."""
    calls = []

    def fails(self, region, tile):
        calls.append(region)
        if len(calls) == number and self.comm.rank == self.comm.size - 1:
            raise FileFormatError(f"output {self.sink.path}: No space left on device")
        write(self, region, tile)

    return mock.patch.object(output.Output, "write", fails)


@parallel(ranks=(2,), env=("node",))
def test_what_is_wrong_with_a_journal(comm, here):
    """Each is one message, and leaves what is done alone."""
    a, b = arrays(here, "A", "B")
    with fails_in(3):
        done = command(comm, f"{LINE} -o C.npy", here)
    assert done.returncode == 1 and not (here / "C.npy").exists()
    assert all(word in done.stderr for word in ("block 3 of", "No space left", "2 of", "--resume continues")), done
    journal = here / "C.npy.journal"
    begun = journal.read_bytes()
    comm.Barrier()
    for change, line, words in (
        (None, f"{LINE} -o C.npy", "with 2 blocks that are done; --resume continues it"),
        (None, f"{LINE} -o C.npy --resume --alpha 2", "it was started with options"),
        (None, f"{LINE} -o D.npy --resume", "there is nothing to resume"),
        (None, f"{LINE} -o C.npy --resume --trace t.json", "--trace: is not supported if C is computed in blocks"),
        (None, f"{LINE} -o C.npy --resume --repeat 2", "--repeat: is not supported if C is computed in blocks"),
        (b"{", f"{LINE} -o C.npy --resume", "has no first line; remove it to start again"),
    ):
        if change is not None and comm.rank == 0:
            journal.write_bytes(change)
        comm.Barrier()
        refused(command(comm, line, here), words)
        assert journal.read_bytes() == (begun if change is None else change)
        comm.Barrier()
    if comm.rank == 0:
        journal.write_bytes(begun + b'{"block": 2, "su')  # the last line is half written
        with open(next(here.glob(".C.npy.*.partial")), "r+b") as file:  # and one block is damaged
            file.seek(200)
            file.write(b"\7")
    comm.Barrier()
    done = command(comm, f"{LINE} -o C.npy --resume --verify --json r.json", here)
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "r.json").read_text())["blocks"]["resumed"] == 1
    assert np.array_equal(np.load(here / "C.npy"), a @ b)


@parallel(ranks=(2,), env=("node",))
def test_inputs_that_have_changed_are_not_gone_on_with(comm, here):
    with fails_in(2):
        command(comm, f"{LINE} -o C.npy", here)
    if comm.rank == 0:
        np.save(here / "A.npy", np.zeros((M, K), "f4"))
    comm.Barrier()
    refused(command(comm, f"{LINE} -o C.npy --resume", here), "it was started with inputs")
    if comm.rank == 0:
        (here / "C.npy.journal").unlink()
    comm.Barrier()
    done = command(comm, f"{LINE} -o C.npy", here)
    assert done.returncode == 0, done.stderr
    assert not np.load(here / "C.npy").any()
    assert not list(here.glob(".*.partial"))


def test_a_checksum_is_that_of_all_parts_together():
    """And tells an element from another, and from itself elsewhere."""
    rng = np.random.default_rng(1)
    for dtype in ("f4", "f8", "i1", "c16", "f2"):
        x = rng.integers(-9, 9, (17, 13)).astype(dtype)
        whole = checksum(Region.whole(x.shape), x)
        parts = [Region.box(rows, cols) for rows in ((0, 5), (5, 17)) for cols in ((0, 2), (2, 13))]
        assert sum(checksum(part, x[part.selector()]) for part in parts) % 2**64 == whole
        assert checksum(Region.whole(x.shape), x[::-1]) != whole
        x[3, 4] += 1
        assert checksum(Region.whole(x.shape), x) != whole


def test_a_journal_that_is_there_is_not_begun_anew(tmp_path):
    journal = Journal.begin(str(tmp_path / "C.npy"), {"shape": [1, 2]})
    journal.note(0, 2**63)
    with pytest.raises(FileFormatError, match="with 1 blocks that are done"):
        Journal.begin(str(tmp_path / "C.npy"), {})
    found = Journal.resume(str(tmp_path / "C.npy"))
    assert found.blocks == {0: 2**63} and found.facts == {"version": 1, "shape": [1, 2]}
    with open(journal.path, "rb") as file:
        raw = file.read()
    with open(journal.path, "wb") as file:
        file.write(raw.replace(b'"sum": 9', b'"sum": 8'))
    assert Journal.resume(str(tmp_path / "C.npy")).blocks == {}


@pytest.mark.parametrize("links", [True, False])
def test_a_journal_is_never_seen_without_its_first_line(tmp_path, monkeypatch, links):
    final, seen = str(tmp_path / "C.npy"), []

    def fsync(descriptor, sync=os.fsync):
        seen.append(os.path.exists(final + ".journal"))
        sync(descriptor)

    def link(*names, made=os.link):
        if not links:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        made(*names)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    Journal.begin(final, {"shape": [1, 2]})
    assert seen[0] is False and seen[-1] is True
    assert Journal.resume(final).facts == {"version": 1, "shape": [1, 2]}
    assert os.listdir(tmp_path) == ["C.npy.journal"]


def test_what_an_end_amid_the_beginning_leaves_goes_with_the_next_job(tmp_path):
    """The journal has its name, and still the temporary one besides."""
    final = str(tmp_path / "C.npy")
    child = os.fork()
    if not child:
        with mock.patch.object(Unfinished, "discard", side_effect=lambda: os._exit(9)):
            Journal.begin(final, {"shape": [1, 2]})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(os.listdir(tmp_path)) == 2
    assert Journal.resume(final).facts == {"version": 1, "shape": [1, 2]}
    assert os.listdir(tmp_path) == ["C.npy.journal"]
