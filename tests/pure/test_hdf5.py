"""HDF5 files: which datasets are read, how, and what is said of the others; files that are written."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rma_mm
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED
from rma_mm.errors import FileFormatError, OptionError
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.containers import chunked, hdf5
from rma_mm.runtime.files.output import Saving

h5py = pytest.importorskip("h5py")

WHOLE = (slice(None), slice(None))
TYPES = [dtype for dtype in SUPPORTED if dtype != BFLOAT16]


def numbers(shape, dtype):
    """Elements of any type that tell their places."""
    return (np.arange(np.prod(shape)).reshape(shape) % 120).astype(dtype)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file with datasets of all kinds."""
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["group/A"] = numbers((6, 4), "f8")
        file["swapped"] = numbers((6, 4), ">i4")
        file["vector"] = numbers(5, "f4")
        file["cube"] = numbers((2, 3, 4), "f4")
        file["number"] = 3.0
        file["nothing"] = h5py.Empty("f4")
        file["records"] = np.zeros((2, 2), [("x", "f4"), ("y", "i4")])
        file.create_dataset("text", data=np.array([["a", "b"]], h5py.string_dtype()))
        file.create_dataset("packed", data=numbers((37, 23), "f4"), chunks=(8, 5), compression="gzip", shuffle=True)
        file.create_dataset("summed", data=numbers((37, 23), "i2"), chunks=(8, 5), fletcher32=True)
        file.create_dataset("late", shape=(3, 4), dtype="f4", fillvalue=7)
        file.create_dataset("empty", shape=(0, 4), dtype="f4")
        file.create_dataset("packed_vector", data=numbers(9, "f8"), chunks=(4,))
        file["link"] = h5py.SoftLink("/group/A")
        file["broken"] = h5py.SoftLink("/nowhere")
    return path


@pytest.mark.parametrize("name", ["group/A", "/group/A", "swapped", "packed", "summed", "late", "empty", "link"])
def test_datasets_are_read(data, name):
    """Whole, and parts of them, as the library has them."""
    with h5py.File(data) as file:
        wanted = file[name][()]
    with rma_mm.open(f"{data}::{name}") as A:
        assert (A.shape, A.dtype, A.order) == (wanted.shape, wanted.dtype.newbyteorder("="), "C")
        assert np.array_equal(A.read((slice(None), slice(None))), wanted)
        assert np.array_equal(A.read((slice(1, -1), slice(2, 3))), wanted[1:-1, 2:3])
        again = np.empty(A.shape, A.dtype)
        A.again().read(Region.whole(A.shape), again)
        assert np.array_equal(again, wanted)
    assert np.array_equal(rma_mm.open(f"{data}/{name.strip('/')}[1:3, :-1]").read((slice(None),) * 2), wanted[1:3, :-1])


def test_what_lies_dense_is_read_without_the_library(data):
    """And what does not is not."""
    kinds = {name: type(hdf5.open_dataset(f"{data}::{name}")) for name in ("group/A", "swapped", "packed", "late")}
    assert list(kinds.values()) == [hdf5.DenseDataset] * 2 + [hdf5.Dataset] * 2
    assert rma_mm.open(f"{data}::packed").chunks == (8, 5)
    assert rma_mm.open(f"{data}::packed[8:, 10:]").chunks == (8, 5)
    assert rma_mm.open(f"{data}::packed[4:, :]").chunks is None


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {}, {"compression": "lzf"}, {"shuffle": True, "fletcher32": True}]
)
def test_compressed_chunks_are_as_the_library_has_them(tmp_path, options):
    """Of all types and byte orders, also where chunks are missing, cut by the edge, or were not compressed."""
    path = tmp_path / "x.h5"
    types = [*TYPES, *(np.dtype(kind).newbyteorder(">") for kind in ("i2", "f4", "f8", "c16"))]
    with h5py.File(path, "w") as file:
        for dtype in types:
            x = numbers((37, 23), dtype)
            said = {"compression": "gzip", "fillvalue": x[1, 1]} | options
            made = file.create_dataset(dtype.str, (37, 23), dtype, chunks=(8, 5), **said)
            made[:20] = x[:20]
            if "fletcher32" not in options:
                made.id.write_direct_chunk((24, 5), numbers((8, 5), dtype).tobytes(), filter_mask=0xFF)
    for dtype in types:
        with h5py.File(path) as file:
            wanted = file[dtype.str][()]
        for region in (WHOLE, (slice(3, 31), slice(4, 22))):
            assert np.array_equal(rma_mm.open(f"{path}::{dtype.str}").read(region), wanted[region])


def test_chunks_that_do_not_unpack(tmp_path):
    path = tmp_path / "x.h5"
    for raw in (b"none of zlib", zlib.compress(bytes(100)), zlib.compress(bytes(200))):
        with h5py.File(path, "w") as file:
            made = file.create_dataset("A", (8, 5), "f4", chunks=(8, 5), compression="gzip")
            made.id.write_direct_chunk((0, 0), raw)
        with pytest.raises(FileFormatError, match="has a damaged chunk at"):
            rma_mm.open(path).read(WHOLE)


def test_a_chunk_that_is_stored_in_far_too_many_bytes_is_not_read(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("A", (8, 5), "f4", chunks=(8, 5), compression="gzip")
        made.id.write_direct_chunk((0, 0), bytes(2**26 + 1))
    with pytest.raises(FileFormatError, match=f"a chunk of 160 bytes is stored in {2**26 + 1}"):
        rma_mm.open(path).read(WHOLE)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6).map(Span)


@given(rows=spans, cols=spans, most=st.integers(1, 50))
def test_any_region_of_chunks_is_read_and_each_chunk_once(rows, cols, most, tmp_path_factory):
    """However many runs it has; chunks of which it has nothing are not read."""
    path = tmp_path_factory.getbasetemp() / "any.h5"
    x = numbers((37, 23), "f4")
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=(8, 5))
    region = Region((rows & Span.range(0, 37), cols & Span.range(0, 23)))
    source, read = hdf5.open_dataset(f"{path}::x"), Counter()

    class Watched:
        def __getitem__(self, box):
            r, c = box
            first, last = range(r.start // 8, -(-r.stop // 8)), range(c.start // 5, -(-c.stop // 5))
            read.update((i, j) for i in first for j in last)
            return x[box]

    out = np.empty(region.shape, "f4")
    source.read(region, out)
    assert np.array_equal(out, x[np.ix_(*(span.indices for span in region))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BAND", most * 23 * 4)
        patch.setattr(hdf5, "library_file", lambda path: open_as({"/x": Watched()}))
        source.read(region, out)
    assert np.array_equal(out, x[np.ix_(*(span.indices for span in region))])
    touched = {(i // 8, j // 5) for i in region[0].indices for j in region[1].indices}
    assert read == Counter(touched)


class open_as:
    """A context that gives what it was made with."""

    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        pass


BAD = {
    "vector": "1 dimensions; a matrix has 2", "cube": "3 dimensions", "number": "0 dimensions",
    "nothing": "no elements", "records": "holds records", "text": "holds text or objects",
    "group": "group is a group; the file holds /empty: (0, 4) of float32", "no": "no is not there; the file holds",
    "broken": "not there", "group/A/B": "not there",
}


@pytest.mark.parametrize(("name", "words"), BAD.items())
def test_what_is_no_matrix(data, name, words):
    """One line that names file and dataset."""
    with pytest.raises(FileFormatError) as error:
        rma_mm.open(f"{data}::{name}")
    assert words in str(error.value) and str(data) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_hdf5(tmp_path, data):
    """Missing, empty, of another kind, truncated, of damaged chunks, locked, changed while in use."""
    path = tmp_path / "x.h5"
    for make, words in (
        (lambda: None, "No such file"),
        (lambda: path.write_bytes(b""), "cannot be read or written as HDF5"),
        (lambda: path.write_bytes(b"no HDF5" * 99), "cannot be read or written as HDF5"),
        (lambda: path.write_bytes(data.read_bytes()[:900]), "cannot be read or written as HDF5"),
    ):
        make()
        with pytest.raises(FileFormatError, match=words):
            rma_mm.open(f"{path}::A")
    with pytest.raises(FileFormatError, match="is a directory"):
        rma_mm.open(f"{tmp_path}::A", format="h5")
    raw = bytearray(data.read_bytes())
    with h5py.File(data) as file:
        at = file["summed"].id.get_chunk_info(3).byte_offset
    raw[at] ^= 1
    path.write_bytes(raw)
    whole = (slice(None),) * 2
    with pytest.raises(FileFormatError, match=r"x\.h5: cannot be read or written as HDF5"):
        rma_mm.open(f"{path}::summed").read(whole)
    source = rma_mm.open(f"{path}::packed")
    path.write_bytes(raw + b" ")
    with pytest.raises(FileFormatError, match="was replaced or changed"):
        source.read(whole)
    hold = f"import h5py; file = h5py.File({str(data)!r}, 'r+'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(FileFormatError, match="locked by a program that writes"):
            rma_mm.open(f"{data}::packed")
        holder.communicate(b"\n", timeout=30)


def test_the_only_matrix_needs_no_name(tmp_path):
    """Of several, one has to be named."""
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["g/A"] = numbers((2, 3), "i1")
        file["v"] = numbers(4, "i1")
    assert rma_mm.open(path).shape == (2, 3)
    with h5py.File(path, "r+") as file:
        file["B"] = numbers((3, 3), "i1")
    with pytest.raises(FileFormatError, match=r"the file holds /B: \(3, 3\) of int8, /g/A: \(2, 3\) of int8"):
        rma_mm.open(path)


def test_a_virtual_dataset_with_a_missing_part_is_refused(tmp_path):
    """The library would give fill values for it, without a word. Other files are read on request only."""
    layout = h5py.VirtualLayout((4, 3), "f8")
    for part in range(2):
        with h5py.File(tmp_path / f"part{part}.h5", "w") as file:
            file["x"] = numbers((2, 3), "f8") + part
        layout[2 * part : 2 * part + 2] = h5py.VirtualSource(f"part{part}.h5", "x", (2, 3))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(FileFormatError, match=r"is a virtual dataset of the file part\d\.h5, which is not read unless"):
        rma_mm.open(tmp_path / "all.h5")
    whole = rma_mm.open(tmp_path / "all.h5", allow_external=True)
    assert whole.read((slice(3, 4), slice(0, 2))).tolist() == [[4.0, 5.0]]
    assert whole.again().shape == (4, 3)
    os.remove(tmp_path / "part1.h5")
    with pytest.raises(FileFormatError, match=r"part1\.h5 is not there"):
        rma_mm.open(tmp_path / "all.h5", allow_external=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_written_is_read_by_the_library(tmp_path, dtype):
    """All types; into a new file, beside what is in a file, and in place of it."""
    path, x = tmp_path / "x.h5", numbers((5, 7), dtype)
    for name, array in (("a/b", x), ("c", x[:2]), ("c", x[1:])):
        sink = Saving().create(f"{path}::{name}", array.shape, array.dtype)
        for rows in (slice(0, 1), slice(1, len(array))):
            sink.write(Region((Span.range(*rows.indices(len(array))[:2]), Span.range(0, 7))), array[rows])
        back = np.empty_like(array)
        sink.source().read(Region.whole(array.shape), back)
        assert np.array_equal(back, array)
        sink.publish()
    with h5py.File(path) as file:
        assert np.array_equal(file["a/b"][()], x) and np.array_equal(file["c"][()], x[1:])
        assert file["c"].dtype == dtype
    assert os.listdir(tmp_path) == ["x.h5"]


def test_what_cannot_be_written(tmp_path, data):
    """Nothing is left behind, and what was there stays as it is."""
    before = data.read_bytes()
    (tmp_path / "other.h5").write_bytes(b"something else")
    x = np.dtype("f4")
    for name, dtype, words in (
        ("data.h5::group", x, "is a group in that file"), ("data.h5::group/A/B", x, "as HDF5"),
        ("other.h5::A", x, "as HDF5"), ("none/x.h5::A", x, "does not exist"), ("data.h5::A[1:2, :]", x, "a part of"),
        ("data.h5::A", BFLOAT16, "HDF5 has no bfloat16"),
    ):
        with pytest.raises(FileFormatError, match=words):
            Saving().create(tmp_path / name, (2, 3), dtype)
    with pytest.raises(OptionError, match=r"chunks: output .*data\.h5::A has none"):
        Saving(chunks=(2, 2)).create(f"{data}::A", (2, 3), x)
    assert data.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["data.h5", "other.h5"]
    sink = Saving().create(f"{data}::C", (2, 3), x)
    with h5py.File(data, "r+") as file:
        file["late"].attrs["more"] = 1
    with pytest.raises(FileFormatError, match="was replaced or changed"):
        sink.publish()
    sink.discard()
    assert sorted(os.listdir(tmp_path)) == ["data.h5", "other.h5"]


def test_without_the_library(monkeypatch, data):
    """The message names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    for call in (lambda: rma_mm.open(f"{data}::A"), lambda: Saving().create(f"{data}::A", (2, 2), np.dtype("f4"))):
        with pytest.raises(FileFormatError, match=r"pip install 'rma_mm\[hdf5\]'"):
            call()
