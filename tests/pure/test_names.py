"""Names of matrices in files: what is a file, what a matrix in it, what a part; and what is open by such a name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rma_mm
from rma_mm.errors import ClosedError, FileFormatError, OptionError, ShapeError
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.formats import format_of, named_in
from rma_mm.runtime.files.names import Name, listed, split
from rma_mm.runtime.files.output import Saving

SUFFIXES = {".h5", ".zarr", ".safetensors.index.json"}
X = np.arange(35.0).reshape(7, 5)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cuts(rows: tuple[Any, Any] = (None, None), cols: tuple[Any, Any] = (None, None)) -> tuple[slice, slice]:
    """Two slices."""
    return slice(*rows), slice(*cols)


NAMES = {
    "A.npy": ("A.npy", "", None), "d/A": ("d/A", "", None), "x.h5": ("x.h5", "", None), "x.h5/": ("x.h5/", "", None),
    "x.h5::/g/A": ("x.h5", "/g/A", None), "x.h5::a::b": ("x.h5", "a::b", None), "x.h5::": ("x.h5", "", None),
    "d/x.H5/g/A": ("d/x.H5", "g/A", None), "d.zarr/x.h5/A": ("d.zarr", "x.h5/A", None), ".h5/A": (".h5/A", "", None),
    "m.safetensors.index.json/a.b": ("m.safetensors.index.json", "a.b", None), "d/m.json/a": ("d/m.json/a", "", None),
    "A[1:2, 3:]": ("A", "", cuts((1, 2), (3, None))), "A[:]": ("A", "", cuts()), "A[-3:-1]": ("A", "", cuts((-3, -1))),
    "A[ : , -5 : ]": ("A", "", cuts((None, None), (-5, None))), "A[0:9:1, ::]": ("A", "", cuts((0, 9))),
    "x.h5::A[0:2][1:3]": ("x.h5", "A[0:2]", cuts((1, 3))), "x.h5/A[2:,:]": ("x.h5", "A", cuts((2, None))),
    "d[0:1]/A": ("d[0:1]/A", "", None), "[0:1]": ("[0:1]", "", None), "A[0:1].npy": ("A[0:1].npy", "", None),
    "a\nb[0:1]": ("a\nb", "", cuts((0, 1))),
}


@pytest.mark.parametrize(("text", "said"), NAMES.items())
def test_what_a_name_says(text, said):
    """File, matrix in it, part."""
    name = Name.of(text, SUFFIXES)
    assert (name.path, name.inner, name.part) == said and name.text == text


PARTS = ["0", "::2", "0:4:2", "::-1", ":,:,:", "", ",", "a:b", "1.5:", "0:1;", "--1:", "::::"]


@pytest.mark.parametrize("words", PARTS)
def test_parts_that_are_none(words):
    """One line that repeats them, and says what one is."""
    with pytest.raises(FileFormatError) as error:
        Name.of(f"A.npy[{words}]")
    assert f"[{words}]" in str(error.value) and "as [0:1000, :]" in str(error.value)


def test_long_numbers_are_no_part():
    """Of more digits than any index has."""
    assert Name.of("A[:" + "9" * 18 + "]").part == cuts((None, 10**18 - 1))
    with pytest.raises(FileFormatError, match="steps of 1"):
        Name.of("A[:" + "9" * 5000 + "]")


def test_what_is_there_is_that_file():
    """Brackets, colons and folders called like a file, where they are there under the whole name."""
    for text in ("x[0:2]", "a::b.npy", "c::d.h5"):
        assert Name.of(text, SUFFIXES).path != text
        Path(text).touch()
        assert Name.of(text, SUFFIXES) == Name(text, text)
    os.makedirs("run.h5/deep")
    Path("run.h5/A.npy").touch()
    assert Name.of("run.h5/A.npy", SUFFIXES).path == "run.h5/A.npy"
    os.makedirs("s.zarr/g/A")
    assert Name.of("s.zarr/g/A", SUFFIXES).whole == "s.zarr::g/A"


def test_files_with_odd_names_are_read_and_written():
    """With colons, of formats that hold several too; in folders that have some."""
    os.mkdir("a::b")
    for name in ("x::y.npy", "x[0:2].npy", "x[0:2]", "a::b/z.npy"):
        np.save("x.npy", X)
        os.rename("x.npy", name)
        assert np.array_equal(read(name), X)
        assert np.array_equal(read(f"{name}[1:, :]"), X[1:])
    for name in ("u::v.safetensors", "a::b/w.safetensors"):
        Path("plain.safetensors").unlink(missing_ok=True)
        written("plain.safetensors::A", X)
        os.rename("plain.safetensors", name)
        assert np.array_equal(read(name), X)
        assert np.array_equal(read(f"{name}[:2]"), X[:2])
        assert np.array_equal(read(f"{name}::A[:2]"), X[:2])
        written(f"{name}::B", X[1:])
        assert np.array_equal(read(f"{name}::B"), X[1:]) and np.array_equal(read(f"{name}::A"), X)


def read(name: str) -> Any:
    """All of it."""
    with rma_mm.open(name) as opened:
        return opened.read(cuts())


def written(name: str, x: Any) -> None:
    """A matrix, as one rank writes it."""
    sink = Saving().create(name, x.shape, x.dtype)
    sink.write(Region.whole(x.shape), x)
    assert sink.source().shape == x.shape
    sink.publish()


def test_names_and_formats():
    """A format that keeps one matrix takes no name of one; one is told apart by the file's name, or by its own."""
    with pytest.raises(FileFormatError, match=r"A\.npy::x: such a file holds one matrix; leave ::x out"):
        named_in("A.npy::x")
    assert named_in("A.h5::x[1:]")[1] is format_of("b.hdf5") is named_in("A.data::x", "h5")[1]
    with pytest.raises(OptionError, match="got 'csv'; must be one of"):
        named_in("A.npy", "csv")
    assert listed({}) == "no matrix"
    assert listed({f"a{i}": "x" for i in range(11)}).endswith("a7: x and 3 more")
    assert listed({"a\nb": "x"}) == r"'a\nb': x"


bounds = st.one_of(st.none(), st.integers(-9, 9))
slices = st.tuples(bounds, bounds)


@given(rows=slices, cols=slices, within=st.tuples(slices, slices))
def test_parts_are_those_of_numpy(rows, cols, within, tmp_path_factory):
    """And parts of parts; negative bounds, and bounds beyond the matrix, count as NumPy counts them."""
    path = tmp_path_factory.getbasetemp() / "parts.npy"
    if not path.exists():
        np.save(path, X)
    text = ", ".join(":".join("" if n is None else str(n) for n in each) for each in (rows, cols))
    wanted = X[cuts(rows, cols)]
    with rma_mm.open(f"{path}[{text}]") as opened:
        assert opened.shape == wanted.shape
        assert np.array_equal(opened.read(cuts()), wanted)
        assert np.array_equal(opened.read(cuts(*within)), wanted[cuts(*within)])
        if wanted.size:
            region = Region((Span([(0, 1), (len(wanted) - 1, len(wanted))]), Span.range(0, wanted.shape[1])))
            out = np.empty(region.shape)
            opened.again().read(region, out)
            assert np.array_equal(out, wanted[region.selector()])


def test_what_is_open():
    """What it is, into whose memory it is read, and what does not fit."""
    np.save("A.npy", np.asfortranarray(X))
    with rma_mm.open("A.npy[1:, :4]") as opened:
        assert (opened.shape, opened.dtype, opened.order, opened.chunks) == ((6, 4), np.float64, "F", None)
        assert "(6, 4)" in repr(opened) and "A.npy[1:, :4]" in repr(opened)
        out = np.zeros((6, 8))
        assert opened.read(cuts(), out[:, ::2]).base is out
        assert np.array_equal(out[:, ::2], X[1:, :4]) and not out[:, 1::2].any()
        opened.read(cuts((0, 0)), np.empty((0, 4)))
        for wrong in (np.zeros((6, 5)), np.zeros((6, 4), "f4"), np.zeros((6, 4), ">f8"), [[0.0]]):
            with pytest.raises(ShapeError, match="out: got"):
                opened.read(cuts(), wrong)
        fixed = np.zeros((6, 4))
        fixed.flags.writeable = False
        with pytest.raises(ShapeError, match="out: got one that is read-only"):
            opened.read(cuts(), fixed)
        for region in (
            (slice(0, 1),), slice(0, 1), (0, 1), (slice(None), slice(0, 4, 2)), (slice(None), slice(None, None, -1)),
            Region.whole((7, 5)), Region((Span.range(0, 7), Span.range(0, 4))), Region.whole((6, 4, 1)),
            Region((Span.range(0, 2),)), (slice("a"), slice(None)), np.s_[1.5:2, :],
        ):
            with pytest.raises(ShapeError, match="region: got"):
                opened.read(region)
        opened.close()
        opened.close()
        for call in (lambda: opened.read(cuts()), lambda: opened.chunks, opened.again):
            with pytest.raises(ClosedError, match="it is closed; open it again"):
                call()
    assert split("x.h5::a::b") == ("x.h5", "a::b")
