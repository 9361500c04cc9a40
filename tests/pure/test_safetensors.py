"""safetensors files: headers, tensors of every type both ways, files that tensors are added to, indices."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rma_mm
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED
from rma_mm.errors import DtypeError, FileFormatError
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.containers import safetensors
from rma_mm.runtime.files.containers.safetensors import open_array, open_indexed, open_tensor
from rma_mm.runtime.files.output import Saving
from rma_mm.runtime.files.version import Version

WHOLE = (slice(None),) * 2
TYPES = [dtype for dtype in SUPPORTED if dtype != np.complex128]


def numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    """Elements of any type that tell their places."""
    return (np.arange(np.prod(shape)).reshape(shape) % 120).astype(dtype)


def written(path: Path, header: Any, size: int) -> Path:
    """A file with a header of our own, and so many bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def added(path: str | Path, x: Any) -> None:
    """Write a matrix as ranks do."""
    sink = Saving().create(path, x.shape, x.dtype)
    sink.write(Region.whole(x.shape), x)
    back = np.empty_like(x)
    sink.source().read(Region.whole(x.shape), back)
    assert np.array_equal(back, x)
    sink.publish()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_both_ways_with_the_package(tmp_path, dtype):
    """What the package writes is read here, and by it once more; what is written here it reads."""
    package = pytest.importorskip("safetensors.numpy")
    x = numbers((5, 7), dtype)
    package.save_file({"odd": numbers((3,), "i1"), "x": x, "e": x[:0]}, tmp_path / "a.safetensors")
    with rma_mm.open(f"{tmp_path}/a.safetensors::x[1:, :-2]") as A:
        assert (A.shape, A.dtype, A.chunks, A.order) == ((4, 5), x.dtype, None, "C")
        assert np.array_equal(A.read(WHOLE), x[1:, :-2])
        region = Region((Span([(0, 1), (2, 4)]), Span([(1, 2), (3, 5)])))
        for reader in (A, A.again()):
            out = np.empty(region.shape, A.dtype)
            reader.read(region, out)
            assert np.array_equal(out, x[1:, :-2][np.ix_([0, 2, 3], [1, 3, 4])])
    assert rma_mm.open(tmp_path / "a.safetensors/e").read(WHOLE).shape == (0, 7)
    path = tmp_path / "b.safetensors"
    added(f"{path}::first", x)
    added(f"{path}::second/é", x[::-1].copy())
    added(f"{path}::first", x[:, :3].copy())
    found = package.load_file(path)
    assert set(found) == {"first", "second/é"}
    assert np.array_equal(found["first"], x[:, :3]) and np.array_equal(found["second/é"], x[::-1])
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_what_is_there_stays(tmp_path):
    """Other tensors, of types that are not read here too, and what the header says beside; elements are aligned."""
    path = written(
        tmp_path / "x.safetensors",
        {"__metadata__": {"by": "us"}, "f8": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
         "v": {"dtype": "I16", "shape": [2], "data_offsets": [3, 7]}},
        0,
    )
    with open(path, "ab") as file:
        file.write(b"abc" + np.array([7, -9], "<i2").tobytes())
    added(f"{path}::x", numbers((2, 3), "f8"))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"] == {"by": "us"} and length % 8 == 0
    assert [(name, x["data_offsets"]) for name, x in header.items() if name != "__metadata__"] == [
        ("x", [0, 48]), ("v", [48, 52]), ("f8", [52, 55]),
    ]
    assert raw[8 + length + 48 :] == np.array([7, -9], "<i2").tobytes() + b"abc"
    vector = open_array(f"{path}::v")
    out = np.empty((1, 2), "i2")
    vector.read(Region.whole((1, 2)), out)
    assert out.tolist() == [[7, -9]]
    with pytest.raises(FileFormatError, match="1 dimensions; a matrix has 2"):
        open_tensor(f"{path}::v")
    with pytest.raises(FileFormatError, match="holds F8_E4M3; types that are read are F64"):
        open_array(f"{path}::f8")


A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
HEADERS = {
    "no JSON": (b"{", 0, "a damaged header"), "a list": ([], 0, "a damaged header"),
    "deep": (b"[" * 99999, 0, "a damaged header"),
    "short": ({"A": A}, 23, "tells of 97 bytes, it has 96"), "long": ({"A": A}, 25, "it has 98"),
    "offsets": ({"A": {**A, "data_offsets": [0, 20]}}, 20, "'A' has 20 bytes for [2, 3] of F32"),
    "gap": ({"A": {**A, "data_offsets": [4, 28]}}, 28, "'A' lies at 4 to 28, where 0 is its place"),
    "twice": ({"A": A, "B": A}, 24, "'B' lies at 0 to 24, where 24"),
    "backwards": ({"A": {**A, "data_offsets": [0, -24]}}, 0, "a damaged header"),
    "negative": ({"A": {**A, "shape": [-2, -3]}}, 24, "has the shape [-2, -3]"),
    "fraction": ({"A": {**A, "shape": [2.0, 3]}}, 24, "has the shape [2.0, 3]"),
    "no type": ({"A": {"shape": [2, 3], "data_offsets": [0, 24]}}, 24, "damaged header: 'dtype'"),
    "not there": ({"B": A}, 24, "A is not there; the file holds B: (2, 3) of F32"),
    "cube": ({"A": {**A, "shape": [1, 2, 3]}}, 24, "3 dimensions; a matrix has 2"),
    "number": ({"A": {**A, "shape": [], "data_offsets": [0, 4]}}, 4, "0 dimensions"),
    "huge": ({"A": {**A, "shape": [2**40, 2**40]}}, 24, "has 24 bytes for"),
    "nothing": ({}, 0, "A is not there; the file holds no matrix"),
    "a name twice": (f'{{"A": {json.dumps(A)}, "A": {json.dumps(A)}}}'.encode(), 24, "'A' stands there twice"),
    "a key twice": (b'{"A": {"dtype": "F32", "dtype": "I32", "shape": [], "data_offsets": [0, 4]}}', 4, "'dtype' sta"),
    "metadata": ({"__metadata__": {"a": 1}, "A": A}, 24, "a damaged header"),
    "metadata's kind": ({"__metadata__": [], "A": A}, 24, "a damaged header"),
    "half a letter": ({"\ud800": A}, 24, "a damaged header"),
    "UTF-16": (json.dumps({"A": A}).encode("utf-16"), 24, "a damaged header"),
    "empty and long": ({"A": {**A, "shape": [0, 2**60], "data_offsets": [0, 0]}}, 0, "A: has shape (0, 11529"),
    "odd names": ({"B\nB": A}, 24, "A is not there; the file holds 'B\\nB': (2, 3) of F32"),
}


@pytest.mark.parametrize(("header", "size", "words"), HEADERS.values(), ids=HEADERS)
def test_headers_that_are_damaged(tmp_path, header, size, words):
    """One line that names the file, and what is wrong."""
    path = written(tmp_path / "x.safetensors", header, size)
    with pytest.raises(FileFormatError) as error:
        rma_mm.open(f"{path}::A")
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    """Missing, empty, truncated, with a length beyond the file, changed while in use."""
    path = tmp_path / "x.safetensors"
    other = b"\x93NUMPY" * 9
    for raw, words in ((None, "No such file"), (b"", "is empty"), (b"1234567", "truncated"), (other, "no safetensors")):
        if raw is not None:
            path.write_bytes(raw)
        with pytest.raises(FileFormatError, match=words):
            rma_mm.open(f"{path}::A")
    path.unlink()
    added(f"{path}::A", numbers((2, 3), "f4"))
    for cut in range(1, len(path.read_bytes()), 13):
        part = tmp_path / "part.safetensors"
        part.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(FileFormatError):
            rma_mm.open(part)
    source = rma_mm.open(path)
    assert source.shape == (2, 3)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(FileFormatError, match="was replaced or changed"):
        source.read(WHOLE)


def test_what_is_read_again(tmp_path, monkeypatch):
    """By the package, piece by piece and from the disk; by this code without one, or with an old one."""
    path, x = tmp_path / "x.safetensors", numbers((9, 4), "f4")
    added(f"{path}::x", x)
    region = Region((Span([(0, 2), (3, 9)]), Span([(0, 1), (2, 4)])))
    monkeypatch.setattr(safetensors, "BLOCK", 20)
    kinds = []
    for version in ("0.8.1", "1.0.0rc1", "0.7.0", None):
        if version is None:
            monkeypatch.setitem(sys.modules, "safetensors", None)
        else:
            monkeypatch.setattr(pytest.importorskip("safetensors"), "__version__", version)
        with rma_mm.open(path) as opened:
            again = open_tensor(path).again()
            kinds.append(type(again))
            for reader in (again, opened.again()):
                out = np.empty(region.shape, "f4")
                reader.read(region, out)
                assert np.array_equal(out, x[region.selector()])
    assert kinds == [safetensors.ByPackage] * 2 + [safetensors.Tensor] * 2


def test_a_file_that_changes_is_not_read_again(tmp_path):
    """Nor one that is damaged by then; what the disk holds is read."""
    pytest.importorskip("safetensors")
    path, x = tmp_path / "x.safetensors", numbers((2, 3), "f4")
    added(f"{path}::x", x)
    source, out, raw = open_tensor(path), np.empty((2, 3), "f4"), path.read_bytes()
    again = source.again()
    path.write_bytes(raw[:-24] + x[::-1].tobytes())
    os.utime(path, ns=(0, 0))
    for call in (source.again, lambda: again.read(Region.whole(x.shape), out), source.check):
        with pytest.raises(FileFormatError, match="was replaced or changed"):
            call()
    open_tensor(path).again().read(Region.whole(x.shape), out)
    assert np.array_equal(out, x[::-1])
    path.write_bytes(raw.replace(b'"x"', b'"y"'))
    with pytest.raises(ValueError, match="x"):  # of the package
        safetensors.ByPackage(replace(source, version=Version.of(str(path))))


def test_what_a_user_says_it_holds(tmp_path):
    """Its own type; bfloat16 may be said for the sake of other files; no other, and no word that is no type."""
    added(f"{tmp_path}/x.safetensors::x", numbers((2, 3), "f4"))
    added(f"{tmp_path}/x.safetensors::v", numbers((1, 3), "i1"))
    for said in (None, "float32", "bfloat16"):
        assert rma_mm.open(f"{tmp_path}/x.safetensors::x", said).dtype == np.float32
    with pytest.raises(FileFormatError, match="x: holds float32, but int8 was asked for; leave --dtype out"):
        rma_mm.open(f"{tmp_path}/x.safetensors::x", "int8")
    with pytest.raises(DtypeError, match="'float80' is not an element type"):
        rma_mm.open(f"{tmp_path}/x.safetensors::x", "float80")


def test_the_only_one_needs_no_name(tmp_path):
    """The only matrix, whatever else there is; the only array where there is no matrix, and one will do."""
    vector = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    path = written(tmp_path / "v.safetensors", {"v": vector}, 24)
    assert open_array(path).array == (6,)
    with pytest.raises(FileFormatError, match="say which matrix"):
        open_tensor(path)
    path = written(tmp_path / "m.safetensors", {"A": A, "v": {**vector, "data_offsets": [24, 48]}}, 48)
    assert open_tensor(path).inner == open_array(path).inner == "A"
    path = written(tmp_path / "w.safetensors", {"u": vector, "v": {**vector, "data_offsets": [24, 48]}}, 48)
    with pytest.raises(FileFormatError, match="say which matrix"):
        open_array(path)


def test_links_and_names_that_appear_meanwhile(tmp_path):
    """A link to nothing is followed, as for other outputs; what another program makes meanwhile is not replaced."""
    link, x = tmp_path / "link.safetensors", numbers((2, 3), "f4")
    link.symlink_to("real.safetensors")
    added(link, x)
    assert link.is_symlink() and np.array_equal(rma_mm.open(tmp_path / "real.safetensors").read(WHOLE), x)
    sink = Saving().create(tmp_path / "new.safetensors", (2, 3), np.dtype("f4"))
    (tmp_path / "new.safetensors").write_text("of another program")
    with pytest.raises(FileFormatError, match=r"new\.safetensors: was made by another program meanwhile"):
        sink.publish()
    sink.discard()
    assert (tmp_path / "new.safetensors").read_text() == "of another program"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_cannot_be_written(tmp_path):
    """Types that the format does not have, another file's place; nothing is left, and what was there stays."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"something else, of some length")
    for name, dtype, words in (
        ("x.safetensors::A", "f4", "no safetensors file, or truncated"),
        ("y.safetensors::A", "c16", "has no complex128"),
        ("y.safetensors::__metadata__", "f4", "is no name"), ("y.safetensors::\udcff", "f4", "is no name"),
        ("none/y.safetensors", "f4", "does not exist"),
        ("y.safetensors.index.json::A", "f4", "is an index of files"),
    ):
        with pytest.raises(FileFormatError, match=words):
            Saving().create(tmp_path / name, (2, 3), np.dtype(dtype))
    assert os.listdir(tmp_path) == ["x.safetensors"]
    path.unlink()
    added(path, numbers((2, 3), "f4"))
    sink = Saving().create(f"{path}::B", (2, 3), np.dtype("f4"))
    added(f"{path}::D", numbers((2, 3), "f4"))
    with pytest.raises(FileFormatError, match="was replaced or changed"):
        sink.publish()
    sink.discard()
    assert os.listdir(tmp_path) == ["x.safetensors"]
    with pytest.raises(FileFormatError, match=r"the file holds C: \(2, 3\) of F32, D: \(2, 3\) of F32"):
        rma_mm.open(path)


def test_an_index_of_several_files(tmp_path):
    """Names lead to the file that holds the tensor; an index that is none, or leads elsewhere, is refused."""
    x, y = numbers((2, 3), "f4"), numbers((4, 2), BFLOAT16 or "f2")
    added(f"{tmp_path}/m-1.safetensors::a.weight", x)
    added(f"{tmp_path}/m-2.safetensors::b.weight", y)
    index = tmp_path / "m.safetensors.index.json"
    files = dict(zip(("a.weight", "b.weight", "c"), (f"m-{n}.safetensors" for n in (1, 2, 3)), strict=True))
    files |= {"d": "../m-1.safetensors", "e": "m-1.safetensors", "f": 3, "h": "", "i": "..", "j": "m\0"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert np.array_equal(rma_mm.open(f"{index}::a.weight").read(WHOLE), x)
    assert np.array_equal(rma_mm.open(f"{index}::b.weight[:, 1:]").read(WHOLE), y[:, 1:])
    for name, words in (
        ("c", "No such file"), ("d", "names the file ../m-1.safetensors, which"),
            ("e", "e is not there; the file holds a.weight"),
        *((name, "no file beside it") for name in "fhij"),
        ("g", "g is not there; the index holds a.weight: m-1.safetensors"),
    ):
        with pytest.raises(FileFormatError, match=words):
            rma_mm.open(f"{index}::{name}")
    with pytest.raises(FileFormatError, match="say which matrix"):
        rma_mm.open(index)
    source, through = open_indexed(f"{index}::a.weight"), rma_mm.open(f"{index}/b.weight")
    assert through.shape == (4, 2)
    index.write_text(json.dumps({"weight_map": files | {"a.weight": "m-2.safetensors"}}))
    for call in (source.check, source.again):
        with pytest.raises(FileFormatError, match=r"index\.json: was replaced or changed"):
            call()
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(FileFormatError, match="is no index of tensors"):
            rma_mm.open(f"{index}::a.weight")
