"""Reading and writing `.npy`: any part of any matrix, and one clear message for everything that is not a matrix."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED
from rma_mm.errors import FileFormatError, OptionError
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files import formats, strided
from rma_mm.runtime.files.formats import FORMATS, Format, format_of, register_format
from rma_mm.runtime.files.generated import generated
from rma_mm.runtime.files.npy import NpySink, read_header
from rma_mm.runtime.files.output import Saving
from rma_mm.unfinished import temporary_name, write_whole
from tests.processes import ROOT

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def matrix(shape: tuple[int, int], dtype: Any) -> Array:
    rows, cols = np.ogrid[: shape[0], : shape[1]]
    return generated(3, "A", dtype)(rows, cols)


@st.composite
def spans(draw: st.DrawFn, extent: int) -> Span:
    """Any set of indices below `extent`."""
    kind = draw(st.sampled_from(["range", "cyclic", "any"]))
    if kind == "range":
        a, b = sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent))))
        return Span.range(a, b)
    if kind == "cyclic":
        return Span.cyclic(extent, draw(st.integers(1, 5)), draw(st.integers(1, 4)), 0)
    chosen = draw(st.sets(st.sampled_from(range(extent)))) if extent else set()
    return Span((i, i + 1) for i in chosen)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, int], Any, str, str, Region]:
    shape = draw(st.tuples(st.integers(0, 30), st.integers(0, 30)))
    region = Region((draw(spans(shape[0])), draw(spans(shape[1]))))
    return shape, draw(st.sampled_from(SUPPORTED)), draw(st.sampled_from("CF")), draw(st.sampled_from("=><")), region


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), version=st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_any_part_of_any_matrix_is_read(case: Any, version: tuple[int, int]) -> None:
    """Types, orders, byte orders, format versions, runs of indices."""
    shape, dtype, order, byte_order, region = case
    x = matrix(shape, dtype)
    stored = x.view("V2") if dtype == BFLOAT16 else x.astype(dtype.newbyteorder(byte_order))
    with open("x.npy", "wb") as file:
        npy.write_array(file, np.asarray(stored, order=order), version=version)
    header = read_header("x.npy", "bfloat16" if dtype == BFLOAT16 else None)
    assert (header.shape, header.dtype) == (shape, dtype)
    out = np.zeros(region.shape, dtype)
    header.read(region, out)
    assert out.tobytes() == np.ascontiguousarray(x[region.selector()]).tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_parts_written_make_the_matrix(case: Any) -> None:
    """Four parts, any cut, tiles of any stride."""
    shape, dtype, order, _, region = case
    x = matrix(shape, dtype)
    output = NpySink.create("c.npy", shape, dtype)
    whole = Region.whole(shape)
    for rows in (region[0], whole[0] - region[0]):
        for cols in (region[1], whole[1] - region[1]):
            part = Region((rows, cols))
            output.write(part, np.asarray(x[part.selector()], order=order))
    assert os.listdir() == [os.path.basename(output.temporary)]
    output.publish()
    y = np.load("c.npy")
    assert y.dtype == ("V2" if dtype == BFLOAT16 else dtype)
    assert y.tobytes() == x.tobytes()
    assert os.listdir() == ["c.npy"]
    os.unlink("c.npy")


def saved(x: Any, **options: Any) -> str:
    np.save("x.npy", x, **options)
    return "x.npy"


def raw(content: bytes) -> str:
    Path("x.npy").write_bytes(content)
    return "x.npy"


def header_only(header: str) -> str:
    text = header.encode().ljust(117) + b"\n"
    return raw(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def ordered(value: str) -> str:
    return header_only(f"{{'descr': '<f4', 'fortran_order': {value}, 'shape': (2, 2), }}")


def shaped(value: str) -> str:
    return header_only(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {value}, }}")


def archive() -> str:
    with zipfile.ZipFile("x.npy", "w") as file:
        file.writestr("a.npy", b"")
    return "x.npy"


def directory() -> str:
    os.mkdir("x.npy")
    return "x.npy"


def fifo() -> str:
    os.mkfifo("x.npy")
    return "x.npy"


def truncated(length: int) -> str:
    saved(np.ones((4, 5)))
    os.truncate("x.npy", length)
    return "x.npy"


def pickled() -> str:
    return raw(pickle.dumps({"a": 1}))


BAD = {
    "missing": (lambda: "x.npy", "No such file"),
    "directory": (directory, "is a directory"),
    "fifo": (fifo, "not a regular file"),
    "empty": (lambda: raw(b""), "is empty"),
    "text": (lambda: raw(b"1 2 3\n"), "is not a .npy file"),
    "archive": (archive, "npz archive"),
    "pickle": (pickled, "pickle, which is never loaded"),
    "objects": (lambda: saved(np.array([[1, None]], object), allow_pickle=True), "pickled objects"),
    "magic only": (lambda: truncated(4), "truncated"),
    "within the lengths": (lambda: truncated(9), "ends within its header"),
    "within the header": (lambda: truncated(50), "ends within its header"),
    "within the elements": (lambda: truncated(287), "(4, 5) of float64 needs 288 bytes"),
    "records": (lambda: saved(np.zeros((2, 2), [("a", "f4")])), "holds records"),
    "strings": (lambda: saved(np.array([["a"]])), "supported element types are"),
    "long double": (lambda: saved(np.zeros((2, 2), np.longdouble)), "supported element types are"),
    "dates": (lambda: saved(np.zeros((2, 2), "M8[s]")), "supported element types are"),
    "raw bytes": (lambda: saved(np.zeros((2, 2), "V2")), "--dtype bfloat16"),
    "0-D": (lambda: saved(np.float32(3)), "shape (), 0 dimensions"),
    "1-D": (lambda: saved(np.ones(7)), "shape (7,), 1 dimensions"),
    "3-D": (lambda: saved(np.ones((2, 3, 4))), "shape (2, 3, 4), 3 dimensions"),
    "version": (lambda: raw(b"\x93NUMPY\x09\x00" + b" " * 200), "version 9"),
    "no dict": (lambda: header_only("[1, 2]"), "damaged"),
    "code": (lambda: header_only("__import__('os').abort()"), "damaged"),
    "nested": (lambda: header_only("(" * 100), "damaged"),
    "bad type": (lambda: header_only("{'descr': 'q9', 'fortran_order': False, 'shape': (2, 2), }"), "damaged"),
    "bad shape": (lambda: header_only("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -2), }"), "no shape"),
    "order None": (lambda: ordered("None"), "fortran_order is None"),
    "order 2": (lambda: ordered("2"), "fortran_order is 2"),
    "order text": (lambda: ordered("'False'"), "fortran_order is 'False'"),
    "long": (lambda: ordered("'" + "x" * 50_000 + "'"), "xxx … xxx"),
    "empty and long": (lambda: shaped(f"(0, {2**60})"), "elements, rows or columns"),
    "beyond 64 bits": (lambda: shaped(f"({2**63}, 0)"), "elements, rows or columns"),
    "huge": (
        lambda: header_only("{'descr': '<f4', 'fortran_order': False, 'shape': (1" + "0" * 30 + ", 2), }"),
        "truncated",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_matrix_is_refused(name: str) -> None:
    """With the path and the reason."""
    make, words = BAD[name]
    with pytest.raises(FileFormatError) as caught:
        read_header(make())
    text = str(caught.value)
    assert text.startswith("x.npy: ")
    assert words in text
    assert "\n" not in text
    assert len(text) < 300


def test_dtype_must_be_that_of_the_file() -> None:
    """Except that bfloat16 may be said where only some files hold |V2."""
    saved(np.ones((2, 2), np.float32))
    assert read_header("x.npy", "float32").dtype == np.float32
    assert read_header("x.npy", "bfloat16").dtype == np.float32
    with pytest.raises(FileFormatError, match="holds float32, but int8 was asked for"):
        read_header("x.npy", "int8")


def test_file_that_shrinks_is_an_error_not_a_crash() -> None:
    """Between header and elements."""
    saved(np.ones((40, 50)))
    header = read_header("x.npy")
    os.truncate("x.npy", 1000)
    with pytest.raises(FileFormatError, match="changed meanwhile"):
        header.read(Region.whole((40, 50)), np.empty((40, 50)))


BAD_OUTPUTS = {
    "/nowhere/c.npy": "the directory /nowhere does not exist",
    ".": "is a directory",
    "./": "is a directory",
    "/dev/null": "not a regular file",
}
FOREIGN = ["x.csv", "x.CSV", "results.v2.json", "x.npz"]


@pytest.mark.parametrize("path", FOREIGN)
def test_names_of_other_formats_are_not_given_to_files(path: str) -> None:
    """Unless the format is said; names whose ending nobody has are those of .npy files."""
    with pytest.raises(FileFormatError, match=r"files are not written; there are .*npy.*--format npy"):
        Saving().create(path, (2, 2), np.dtype("f4"))
    for how, name in ((Saving(format="npy"), path), (Saving(), "x.matrix"), (Saving(), "x")):
        sink = how.create(name, (2, 2), np.dtype("f4"))
        sink.discard()
    assert os.listdir() == []


@pytest.mark.parametrize("path", BAD_OUTPUTS)
def test_outputs_that_cannot_be(path: str) -> None:
    """Found before anything is computed; nothing is left behind."""
    with pytest.raises(FileFormatError) as caught:
        NpySink.create(path, (2, 2), np.dtype(np.float32))
    assert str(caught.value).startswith(f"output {path}: ")
    assert BAD_OUTPUTS[path] in str(caught.value)
    assert os.listdir() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_outputs_without_permission() -> None:
    """Directory or file."""
    os.mkdir("closed", 0o500)
    Path("old.npy").touch(0o400)
    for path in ("closed/c.npy", "old.npy"):
        with pytest.raises(FileFormatError, match=r"cannot be written|read-only"):
            NpySink.create(path, (2, 2), np.dtype(np.float32))


def test_full_disk_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileFormatError, match="144 bytes: No space left"):
        NpySink.create("c.npy", (2, 2), np.dtype(np.float32))
    assert os.listdir() == []


def test_discarded_output_leaves_what_was_there() -> None:
    """The old file under the final name is untouched until the new one is whole."""
    saved(np.ones((2, 2)))
    output = NpySink.create("x.npy", (1, 1), np.dtype(np.float32))
    output.discard()
    output.discard()
    assert os.listdir() == ["x.npy"]
    assert np.load("x.npy").shape == (2, 2)


def test_links_are_followed() -> None:
    """The link stays a link."""
    os.mkdir("deep")
    os.symlink("deep/c.npy", "c.npy")
    NpySink.create("c.npy", (1, 0), np.dtype(np.float32)).publish()
    assert os.path.islink("c.npy")
    assert np.load("deep/c.npy").shape == (1, 0)


def made(name: str = "x.npy") -> NpySink:
    return NpySink.create(name, (2, 2), np.dtype(np.float32))


def mode(name: str) -> int:
    return os.stat(name).st_mode & 0o7777


@pytest.mark.parametrize(("old", "umask", "new"), [(0o600, 0o022, 0o600), (None, 0o027, 0o640), (0o664, 0o077, 0o664)])
def test_modes(old: int | None, umask: int, new: int) -> None:
    """That of the file that is replaced, or what the umask leaves; nobody else reads what is not whole."""
    before = os.umask(umask)
    try:
        if old is not None:
            saved(np.ones((2, 2)))
            os.chmod("x.npy", old)
        output = made()
        assert mode(output.temporary) == 0o600
        output.publish()
        write_whole("--json r.json", "r.json", "{}")
    finally:
        os.umask(before)
    assert (mode("x.npy"), mode("r.json")) == (new, 0o666 & ~umask)


def test_planted_links_are_not_followed() -> None:
    """Under the temporary name, whatever it is written for; loops are no names."""
    Path("victim").write_text("mine")
    for name in ("x.npy", "r.json"):
        os.symlink("victim", temporary_name(os.path.realpath(name), str(os.getpid())))
    made().publish()
    write_whole("--json r.json", "r.json", "{}")
    assert Path("victim").read_text() == "mine"
    assert not os.path.islink("x.npy") and Path("r.json").read_text() == "{}"
    os.symlink("loop", "loop")
    for make in (lambda: made("loop"), lambda: write_whole("output loop", "loop", "")):
        with pytest.raises(FileFormatError, match="output loop: is a loop"):
            make()


@pytest.mark.parametrize("name", ["x" * 255, "x" * 250, "é" * 127, "x" * 256])
def test_long_names(name: str) -> None:
    """As long as the file system allows."""
    if len(name.encode()) > 255:
        with pytest.raises(FileFormatError, match="at most 255 bytes"):
            made(name)
    else:
        made(name).publish()
        assert os.listdir() == [name]


def test_what_dead_writers_left_is_removed() -> None:
    """Not what somebody holds, nor what is written for another name, nor what is no file."""
    code = f"from {NpySink.__module__} import *; NpySink.create('x.npy', (2, 2), np.dtype('f4')); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    (left,) = os.listdir()
    Path(".x.npy.7.npy.8.partial").touch()
    os.mkfifo(".x.npy.6.partial")
    held = made()
    assert {*os.listdir()} == {os.path.basename(held.temporary), ".x.npy.7.npy.8.partial", ".x.npy.6.partial"}
    other = made()
    assert left not in os.listdir() and os.path.exists(held.temporary) and held.temporary != other.temporary
    held.discard()
    other.publish()


@pytest.mark.parametrize("change", ["rewritten", "replaced", "a fifo"])
def test_an_input_that_changes_is_refused(change: str) -> None:
    """Even in place, with as many bytes as before."""
    header = read_header(saved(np.ones((4, 5))))
    if change == "rewritten":
        saved(np.zeros((4, 5)))
        os.utime("x.npy", ns=(0, 0))
    elif change == "replaced":
        np.save("y.npy", np.ones((4, 5)))
        os.replace("y.npy", "x.npy")
    else:
        os.unlink("x.npy")
        fifo()
    with pytest.raises(FileFormatError, match=r"meanwhile|not a regular file"):
        header.read(Region.whole((4, 5)), np.empty((4, 5)))


def test_columns_that_lie_far_apart_are_read_alone() -> None:
    """Rows of 40 KB in which few columns are wanted; rows longer than what is read at a time."""
    for shape, cols in (((40, 5000), Span([(3, 5), (4000, 4001)])), ((2, 400_000), Span.range(7, 399_990))):
        x = matrix(shape, np.dtype(np.float64))
        region = Region((Span.cyclic(shape[0], 1, 2, 1), cols))
        for order in ("C", "F"):
            header = read_header(saved(np.asarray(x, order=order)))
            out = np.empty(region.shape)
            header.read(region, out)
            assert (out == x[region.selector()]).all()


@pytest.mark.parametrize("how", ["as here", "in bands", "by rows"])
def test_many_rows_of_which_few_columns_are_wanted(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """By few calls where the system copies for us, in bands of the file, or row by row; also of a file cut off."""
    x = matrix((300, 9000), np.dtype(np.float32))
    monkeypatch.setattr(strided, "BAND", 2**20 if how == "in bands" else strided.BAND)
    monkeypatch.setattr(strided, "_copying", (lambda: None) if how == "by rows" else strided._copying)
    header = read_header(saved(x))
    for rows, cols in ((Span.range(3, 299), Span.range(100, 131)), (Span.range(0, 300), Span([(1, 2), (8000, 8100)]))):
        region = Region((rows, cols))
        for out in (np.empty(region.shape, "f4"), np.empty(region.shape, "f4", order="F")):
            header.read(region, out)
            assert (out == x[region.selector()]).all()
    with open("x.npy", "r+b") as file:
        os.truncate("x.npy", 300 * 9000 * 2)
        out = np.empty((300, 31), "f4").view(np.uint8)
        assert strided.read_rows(file.fileno(), header.offset, 4 * 9000, out) < 300
    with pytest.raises(FileFormatError, match="meanwhile"):
        header.read(Region.box((0, 300), (0, 31)), np.empty((300, 31), "f4"))


def test_formats_go_by_the_longest_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    """In capitals too. A name whose ending no format has is one of .npy."""
    npy_format = FORMATS[".npy"]
    monkeypatch.setattr(formats, "FORMATS", dict(FORMATS))
    one, other = (Format(suffixes, npy_format.open, npy_format.create) for suffixes in ((".gz",), (".tile.gz", ".t")))
    for each in (one, other):
        register_format(each)
    names = ("a.gz", "A.TILE.GZ", "b/c.t", Path("t"), "x.gz/y", "z.npy", "n.npy.old")
    assert [format_of(name) for name in names] == [one, other, other, *[npy_format] * 4]


@pytest.mark.parametrize("suffix", [".npy", "", "npy", ".NPY", ".a/b", ".", ". x", "a.b"])
def test_suffixes_that_cannot_be(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken, or no suffix; then none of the format's is registered."""
    monkeypatch.setattr(formats, "FORMATS", dict(FORMATS))
    with pytest.raises(OptionError, match=r"register_format: got the suffix"):
        register_format(Format((".new", suffix), read_header, NpySink.create))
    assert ".new" not in formats.FORMATS
