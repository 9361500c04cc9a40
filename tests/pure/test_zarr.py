"""Zarr stores: which arrays are read, and what is said of the others; arrays that are written, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rma_mm
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED
from rma_mm.errors import FileFormatError, OptionError, ShapeError
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.containers import zarr_source
from rma_mm.runtime.files.containers.zarr_store import CHUNK, _usual, open_array, open_matrix
from rma_mm.runtime.files.output import Saving
from rma_mm.unfinished import NEW, OLD, Unfinished, remove, temporary_name
from tests.processes import ROOT
from tests.thorough import usually

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

TYPES = [dtype for dtype in SUPPORTED if dtype != BFLOAT16]
ALL = (slice(None), slice(None))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def numbers(shape, dtype="f8"):
    """Elements of any type that tell their places."""
    return (np.arange(np.prod(shape)).reshape(shape) % 120).astype(dtype)


def array(name, x, chunks=(8, 5), **options):
    """An array that zarr writes."""
    made = zarr.create_array("data.zarr", name=name, shape=x.shape, dtype=x.dtype, chunks=chunks, **options)
    made[...] = x
    return made


X = numbers((37, 23), "f4")


READABLE = {
    "plain": lambda: array("plain", X, compressors=None),
    "group/zstd": lambda: array("group/zstd", X),
    "shards": lambda: array("shards", X, shards=(16, 10)),
    "blosc": lambda: array("blosc", X, compressors=zarr.codecs.BloscCodec()),
    "gzip": lambda: array("gzip", X, compressors=[zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]),
    "turned": lambda: array("turned", X, filters=[zarr.codecs.TransposeCodec(order=(1, 0))]),
    "swapped": lambda: array("swapped", X.astype(">i4"), zarr_format=2),
    "old/zlib": lambda: array("old/zlib", X, zarr_format=2, order="F", compressors=numcodecs.Zlib()),
    "old/blosc": lambda: array("old/blosc", X, zarr_format=2, compressors=numcodecs.Blosc()),
    "nested": lambda: array("nested", X, zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"}),
    "larger": lambda: array("larger", X, (100, 100)),
    "only gzip": lambda: array("only gzip", X, compressors=zarr.codecs.GzipCodec()),
    "old/lz4": lambda: array("old/lz4", X, zarr_format=2, compressors=numcodecs.LZ4()),
    "old/swapped": lambda: array("old/swapped", X.astype(">f4"), zarr_format=2, compressors=numcodecs.Zstd()),
    "big": lambda: array("big", X, serializer=zarr.codecs.BytesCodec(endian="big")),
    "summed": lambda: array("summed", X, compressors=zarr.codecs.Crc32cCodec()),
    "holes": lambda: array("holes", X, fill_value=-7).store.root.joinpath("holes/c/1/2").unlink(),
    "empty": lambda: array("empty", X[:0]),
}


BY_ZARR = ("shards", "gzip", "turned", "swapped", "old/zlib", "old/swapped", "big", "summed")
"""Arrays that only the zarr package decodes."""


@pytest.mark.parametrize("name", READABLE)
def test_arrays_are_read(name):
    """As zarr has them, whole and in parts: formats, codecs, orders, odd chunks, chunks that are not there."""
    READABLE[name]()
    wanted = zarr.open_array("data.zarr", path=name, mode="r")[...]
    assert (wanted == -7).sum() == 40 or name != "holes"
    for written in (f"data.zarr::{name}", f"data.zarr::/{name}/", f"data.zarr/{name}"):
        with rma_mm.open(written) as A:
            assert (A.shape, A.dtype, A.order) == (wanted.shape, wanted.dtype.newbyteorder("="), "C")
            assert A.chunks == {"shards": (16, 10), "larger": (100, 100)}.get(name, (8, 5))
            assert (A._live.node.decode is None) == (name in BY_ZARR)
            assert np.array_equal(A.read(ALL), wanted)
            assert np.array_equal(A.read((slice(1, -1), slice(2, 3))), wanted[1:-1, 2:3])
            again = np.empty(A.shape, A.dtype)
            A.again().read(Region.whole(A.shape), again)
            assert np.array_equal(again, wanted)
            A.check()
    part = rma_mm.open(f"data.zarr/{name}[1:3, :-1]")
    assert np.array_equal(part.read(ALL), wanted[1:3, :-1])


def test_a_store_that_is_an_array():
    """Needs no name, with a slash or without; a vector is one where an array will do."""
    zarr.create_array("root.zarr", shape=X.shape, chunks=(8, 5), dtype="f4")[...] = X
    for name in ("root.zarr", "root.zarr/", Path("root.zarr").absolute()):
        assert np.array_equal(rma_mm.open(name).read(ALL), X)
    array("v", X[0], (4,))
    vector = open_array("data.zarr::v")
    assert (vector.shape, vector.array, vector.chunks) == ((1, 23), (23,), None)
    out = np.empty((1, 4), "f4")
    vector.read(Region((Span.range(0, 1), Span([(1, 3), (20, 22)]))), out)
    assert np.array_equal(out[0], X[0, [1, 2, 20, 21]])


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6).map(Span)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(rows=spans, cols=spans, is_sharded=st.booleans())
def test_any_region_is_read_and_each_chunk_once(rows, cols, is_sharded):
    """However many runs it has; files of which it has nothing are not looked at."""
    name = f"any{is_sharded}"
    if not os.path.exists(f"data.zarr/{name}"):
        array(name, X, shards=(16, 10) if is_sharded else None)
    source, seen = open_matrix(f"data.zarr::{name}"), Counter()
    region = Region((rows & Span.range(0, 37), cols & Span.range(0, 23)))
    out = np.empty(region.shape, "f4")

    def looked_at(reader, box):
        seen.update(zarr_source.units_of(Region.box(*((x.start, x.stop) for x in box)), (8, 5)))
        return reader.array[box]

    def decoded(reader, file, is_read, content=zarr_source._Reader.content):
        assert is_read
        seen[tuple(map(int, file.split("/")[-2:]))] += 1
        return content(reader, file, is_read)

    source.read(region, out)
    assert np.array_equal(out, X[np.ix_(*(span.indices for span in region))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_source._Reader, "__getitem__", looked_at)
        patch.setattr(zarr_source._Reader, "content", decoded)
        source.read(region, out)
    assert seen == Counter({(i // 8, j // 5): 1 for i in region[0].indices for j in region[1].indices})


def meta(**changed):
    """Metadata of an array that are changed."""
    array("bad", X)
    path = Path("data.zarr/bad/zarr.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def raw_meta(raw, file="zarr.json"):
    os.makedirs("data.zarr/bad", exist_ok=True)
    Path("data.zarr/bad", file).write_bytes(raw)


def pickled():
    array("bad", X, zarr_format=2)
    path = Path("data.zarr/bad/.zarray")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"filters": [{"id": "pickle", "protocol": 5}]}))


BAD = {
    "vector": (lambda: array("bad", X[0], (4,)), "1 dimensions; a matrix has 2: x[:, None] makes a column"),
    "cube": (lambda: array("bad", X[None], (1, 4, 4)), "3 dimensions; a matrix has 2: reshape it"),
    "number": (lambda: array("bad", X[0, 0, None][0], ()), "0 dimensions"),
    "records": (lambda: array("bad", np.zeros((2, 2), [("x", "f4")]), (2, 2), zarr_format=2), "holds records"),
    "text": (lambda: array("bad", np.array([["ab"]]), (1, 1), zarr_format=2), "holds text or objects"),
    "strings": (lambda: array("bad", np.array([["ab"]], np.dtypes.StringDType()), (1, 1)), "holds text or objects"),
    "dates": (lambda: array("bad", np.zeros((2, 2), "M8[s]"), (2, 2), zarr_format=2), "supported element types are"),
    "no type": (lambda: meta(data_type="bfloat16"), "cannot be read or written as Zarr"),
    "group": (lambda: array("bad/x", X), "bad is a group; the store holds /bad/x: (37, 23) of float32; name one as"),
    "nothing": (lambda: array("x", X), "bad is not there; the store holds /x: (37, 23) of float32"),
    "no store": (lambda: os.makedirs("data.zarr/bad"), "is no Zarr store"),
    "no folder": (lambda: None, "data.zarr: No such file"),
    "a file": (lambda: Path("data.zarr").touch(), "is no folder, as Zarr stores are"),
    "no JSON": (lambda: raw_meta(b"{"), "is damaged"),
    "nested": (lambda: raw_meta(b"[" * 10**5), "is damaged"),
    "a list": (lambda: raw_meta(b"[]", ".zarray"), "is damaged"),
    "no shape": (lambda: raw_meta(b'{"zarr_format": 3, "node_type": "array"}'), "cannot be read or written as Zarr"),
    "codec": (lambda: meta(codecs=[{"name": "none such"}]), "cannot be read or written as Zarr"),
    "huge": (lambda: meta(shape=[2**40, 2**40]), "elements, rows or columns"),
    "pickles": (pickled, "pickled objects, which are never loaded"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_what_is_no_matrix(name):
    """One line that names store and array."""
    make, words = BAD[name]
    make()
    with pytest.raises(FileFormatError) as error:
        rma_mm.open("data.zarr::bad")
    text = str(error.value)
    assert words in text and text.startswith("data.zarr") and "\n" not in text and len(text) < 500


def test_names_that_cannot_be():
    array("x", X)
    for inner in ("..", "a//b", ".x", "a/__b", "./x"):
        for call in (lambda inner=inner: rma_mm.open(f"data.zarr::{inner}"), lambda inner=inner: make(f"::{inner}")):
            with pytest.raises(FileFormatError, match="is no name in a Zarr store"):
                call()
    for number in range(20):
        array(f"y{number}", X)
    with pytest.raises(FileFormatError, match=r"/x: \(37, 23\) of float32, /y0: .* and 13 more; name one as"):
        rma_mm.open("data.zarr")


CODECS = {
    "plain": {"compressors": None}, "zstd": {}, "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "shards": {"shards": (16, 10)}, "crc": {"compressors": zarr.codecs.Crc32cCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec()}, "plain2": {"compressors": None, "zarr_format": 2},
    "zlib2": {"compressors": numcodecs.Zlib(), "zarr_format": 2},
    "blosc2": {"compressors": numcodecs.Blosc(), "zarr_format": 2},
    "lzma2": {"compressors": numcodecs.LZMA(), "zarr_format": 2},
}
CUT = {"half": lambda raw: raw[: len(raw) // 2], "all": lambda raw: b"", "garbage": lambda raw: b"\xa5" * len(raw)}


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_that_are_damaged(codec):
    """Cut off anywhere, or of other bytes: an error that names the array; parts without them are read."""
    array("g/A", np.random.default_rng(0).random((37, 23)), **CODECS[codec])
    source = rma_mm.open("data.zarr::g/A")
    key = {"shards": "c/0/0"}.get(codec, "0.0" if codec.endswith("2") else "c/0/0")
    file = Path("data.zarr/g/A", key)
    raw = file.read_bytes()
    for how, change in CUT.items():
        if codec.startswith("plain") and how == "garbage":
            continue  # which is a chunk of other numbers
        file.write_bytes(change(raw))
        with pytest.raises(FileFormatError, match=r"data\.zarr::g/A: (is truncated|cannot be read)"):
            source.read(ALL)
        source.read((slice(16, 37), slice(10, 23)))


def test_an_array_that_changes():
    """Its metadata are replaced, or the array is: as long as it is open, and while it is read."""
    array("A", X)
    source = rma_mm.open("data.zarr::A")
    path = Path("data.zarr/A/zarr.json")
    text = path.read_text()
    path.unlink()
    with pytest.raises(FileFormatError, match="cannot be read any more"):
        source.check()
    path.write_text(text)
    for call in (source.check, lambda: source.read(ALL)):
        with pytest.raises(FileFormatError, match="was replaced or changed meanwhile"):
            call()
    with pytest.raises(FileFormatError, match="holds float32, but int8 was asked for"):
        rma_mm.open("data.zarr::A", "int8")


# -- writing -------------------------------------------------------------------------------------------------------


def make(name="", shape=(37, 23), dtype="f4", store="data.zarr", **options):
    """A sink."""
    return Saving.of(options).create(f"{store}{name}", shape, np.dtype(dtype))


def whole(sink, x):
    """Write all, in two parts, and give it its name."""
    half = sink.unit[0] * max(1, len(x) // sink.unit[0] // 2)
    for rows in (slice(0, min(half, len(x))), slice(min(half, len(x)), len(x))):
        region = Region((Span.range(rows.start, rows.stop), Span.range(0, x.shape[1])))
        sink.write(region, np.asfortranarray(x[rows]))
    back = np.empty_like(x)
    sink.source().read(Region.whole(x.shape), back)
    assert np.array_equal(back, x)
    sink.publish()


def stored(name="", store="data.zarr"):
    return zarr.open_array(store, path=name.strip(":"), mode="r")


@pytest.mark.parametrize("dtype", usually(4, TYPES), ids=str)
def test_what_is_written_is_read_by_zarr(dtype):
    """All types, by parts of any stride, in formats 3 and 2."""
    x = numbers((37, 23), dtype)
    array("old", X, zarr_format=2).store.root.rename("old.zarr")
    whole(make(dtype=dtype, chunks=(8, 5)), x)
    assert np.array_equal(stored()[...], x) and stored().dtype == dtype
    whole(make("::g/A", dtype=dtype, chunks=(8, 5), store="old.zarr"), x)
    made = stored("g/A", "old.zarr")
    assert np.array_equal(made[...], x) and made.dtype == dtype and made.metadata.zarr_format == 2
    assert sorted(os.listdir()) == ["data.zarr", "old.zarr"]


def test_zeros_are_kept_to_the_bit():
    """Also −0, which zarr takes for a fill value that need not be written."""
    x = np.full((4, 4), -0.0)
    whole(make(shape=x.shape, dtype="f8"), x)
    assert np.signbit(stored()[...]).all()


CHUNKED = [
    # options, chunks and shards that are made
    ({}, (37, 23), None), ({"chunks": (8, 5)}, (8, 5), None), ({"chunks": (50, 5), "compress": "zstd"}, (37, 5), None),
    ({"chunks": (8, 5), "shards": (16, 10)}, (8, 5), (16, 10)),
    ({"chunks": (1, 99), "compress": "none"}, (1, 23), None),
    ({"chunks": (8, 5), "shards": (8, 500)}, (8, 5), (8, 25)),
    ({"chunks": (99, 9), "shards": (99, 9)}, (37, 9), (37, 9)),
]


@pytest.mark.parametrize(("options", "chunks", "shards"), CHUNKED)
def test_chunks_and_shards(options, chunks, shards):
    """As asked, but not larger than the matrix; units are whole."""
    sink = make("::a/b/C", **options)
    assert sink.unit == (shards or chunks)
    whole(sink, X)
    made = stored("a/b/C")
    assert (made.chunks, made.shards) == (chunks, shards)
    assert np.array_equal(made[...], X)
    assert "zstd" in str(made.metadata.codecs).lower() or options.get("compress") == "none"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_matrices_without_elements(shape):
    whole(make(shape=shape), np.empty(shape, "f4"))
    assert stored().shape == shape == rma_mm.open("data.zarr").shape


@given(rows=st.integers(0, 2**40), cols=st.integers(0, 2**40), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_usual_chunks(rows, cols, itemsize):
    """1 to 4 MiB, where the matrix has as much; square, where it is no narrower."""
    one, other = _usual((rows, cols), itemsize)
    held = min(one, max(1, rows)) * min(other, max(1, cols)) * itemsize
    assert one * other * itemsize <= CHUNK and (held >= CHUNK // 4 or held >= rows * cols * itemsize)
    assert one == other or min(rows, cols) < max(one, other)


BAD_OPTIONS = {
    "shards: got (16, 12) with chunks of (8, 5)": {"chunks": (8, 5), "shards": (16, 12)},
    "shards: got (8, 8) with chunks of (16, 16)": {"chunks": (16, 16), "shards": (8, 8)},
    "shards: got (16, 12) without chunks": {"shards": (16, 12)},
    "bytes; a chunk has at most 2147483647": {"chunks": (2**16, 2**16), "shape": (2**20, 2**20)},
    "chunks: got (0, 1)": {"chunks": (0, 1)}, "compress: got 'gzip'": {"compress": "gzip"},
}


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_options_that_cannot_be(words):
    with pytest.raises(OptionError) as error:
        make(**BAD_OPTIONS[words])
    assert words in str(error.value) and os.listdir() == []


def consolidated(form):
    with pytest.warns(zarr.errors.ZarrUserWarning) if form == 3 else pytest.MonkeyPatch.context():
        array("A", X, zarr_format=form)
        zarr.consolidate_metadata("data.zarr")


BAD_PLACES = {
    "bfloat16": (lambda: None, {"dtype": BFLOAT16}, "Zarr has no bfloat16; use .safetensors or .npy"),
    "vector": (lambda: None, {"shape": (5,)}, r"not arrays of shape \(5,\); use .npy"),
    "cube": (lambda: None, {"shape": (5, 2, 2)}, "only matrices"),
    "a part": (lambda: None, {"name": "::A[0:2, :]"}, "names a part of a matrix"),
    "group": (lambda: array("g/A", X), {"name": "::g"}, "is a group in that store; name a matrix in it"),
    "root group": (lambda: array("g/A", X), {}, "data.zarr: is a group in that store"),
    "in an array": (lambda: array("A", X), {"name": "::A/B"}, "A is an array, which holds no others"),
    "folder": (lambda: os.mkdir("data.zarr"), {}, "is there, and no array or group of Zarr"),
    "folder inside": (lambda: (array("A", X), os.mkdir("data.zarr/x")), {"name": "::x/y"}, "is there, and no array"),
    "file": (lambda: Path("data.zarr").touch(), {"name": "::A"}, "is there, and no array or group"),
    "loop": (lambda: os.symlink("data.zarr", "data.zarr"), {}, "is there, and no array or group"),
    "no directory": (lambda: None, {"store": "none/x.zarr"}, "the directory .*none does not exist"),
    "copies": (lambda: consolidated(3), {"name": "::B"}, "has consolidated metadata"),
    "old copies": (lambda: consolidated(2), {"name": "::B"}, "has consolidated metadata"),
    "damaged": (lambda: (array("A", X), raw_meta(b"[")), {"name": "::bad"}, "is damaged"),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_places_where_none_can_be(name):
    """Nothing is left behind, and what was there stays as it is."""
    prepare, options, words = BAD_PLACES[name]
    prepare()
    before = sorted(Path().rglob("*"))
    with pytest.raises(FileFormatError, match=words) as error:
        make(**options)
    assert sorted(Path().rglob("*")) == before and "zarr" in str(error.value)


def test_shards_in_a_store_of_format_2():
    array("A", X, zarr_format=2)
    with pytest.raises(OptionError, match="store of Zarr format 2, which has none"):
        make("::B", chunks=(4, 4), shards=(8, 8))


def test_a_part_of_a_chunk_is_refused():
    """A fault of the caller's, by which the rest of the chunk would be lost."""
    sink = make(chunks=(8, 5))
    for rows, cols in (((0, 7), (0, 23)), ((1, 8), (0, 23)), ((0, 8), (0, 22)), ((32, 36), (0, 23))):
        region = Region.box(rows, cols)
        with pytest.raises(ShapeError, match=r"cuts a chunk of \(8, 5\)"):
            sink.write(region, X[region.selector()])
    sink.write(Region((Span([(8, 16), (32, 37)]), Span.range(20, 23))), X[np.r_[8:16, 32:37], 20:])
    with pytest.raises(FileFormatError, match="23 of its chunks are not on the disk"):
        sink.publish()
    sink.discard()
    assert os.listdir() == []


def test_nothing_is_seen_before_it_is_whole():
    """New stores, arrays added, arrays replaced: what was there is, until it is replaced; readers find nothing else."""
    first = make("::g/A", chunks=(8, 5))
    assert os.listdir() == [os.path.basename(first.temporary)] and os.stat(first.temporary).st_mode & 0o077 == 0
    whole(first, X)
    members = {"g", "g/A"}
    for name, new in (("::g/A", set()), ("::B", {"B"}), ("::h/i/C", {"h", "h/i", "h/i/C"})):
        sink = make(name, chunks=(10, 10))
        sink.write(Region.box((0, 10), (0, 10)), 2 * X[:10, :10])
        assert visible() == members and np.array_equal(stored("g/A")[...], X)
        sink.discard()
        whole(make(name, chunks=(10, 10)), X)
        members |= new
        assert visible() == members and np.array_equal(stored(name)[...], X)
    assert stored("g/A").chunks == (10, 10) and not list(Path().rglob(".*"))


def visible():
    """What zarr finds in the store; what it does not know it warns of."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        return {name for name, _ in zarr.open_group("data.zarr", mode="r").members(max_depth=None)}


def test_two_programs_that_write_at_once():
    """The second to end does not take away what the first has made."""
    one, other = make("::A", chunks=(37, 23)), make("::B", chunks=(37, 23))
    whole(one, X)
    with pytest.raises(FileFormatError, match=r"another program has made .*data\.zarr meanwhile"):
        whole(other, X)
    other.discard()
    one, other = (make("::A", chunks=(37, 23)) for _ in range(2))
    assert one.temporary != other.temporary
    whole(one, 2 * X)
    with pytest.raises(FileFormatError, match="replaced or changed meanwhile"):
        whole(other, X)
    other.discard()
    assert np.array_equal(stored("A")[...], 2 * X) and not list(Path().rglob(".*"))


def test_modes():
    """That of the folder that is replaced, or what the umask leaves."""
    before = os.umask(0o027)
    try:
        whole(make(), X)
        assert os.stat("data.zarr").st_mode & 0o777 == 0o750
        os.chmod("data.zarr", 0o705)
        whole(make(), X)
        assert os.stat("data.zarr").st_mode & 0o777 == 0o705
    finally:
        os.umask(before)


DIES = """
import os, sys
import numpy as np
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.output import Saving
sink = Saving(chunks=(8, 5)).create(sys.argv[1], (37, 23), np.dtype("f4"))
sink.write(Region.box((0, 16), (0, 23)), np.zeros((16, 23), "f4"))
if sys.argv[2] == "publishing":
    rename = os.rename
    def dies(a, b):
        if a == sink.held.content:
            os._exit(9)
        rename(a, b)
    os.rename = dies
    sink.write(Region.box((16, 37), (0, 23)), np.zeros((21, 23), "f4"))
    sink.publish()
os._exit(9)
"""


def dies(name, when="writing"):
    line = [sys.executable, "-c", DIES, name, when]
    assert subprocess.run(line, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 9


def test_what_dead_writers_left():
    """Nothing under the final name; the next writer of the name removes it, and not what is held or not of its kind."""
    dies("data.zarr::A")
    (left,) = os.listdir()
    held = make("::A", chunks=(37, 23))
    assert os.listdir() == [os.path.basename(held.temporary)] != [left]
    os.mkfifo(".data.zarr.7.partial")
    second = make("::B")
    assert os.path.exists(held.temporary)
    second.discard()
    whole(held, X)
    dies("data.zarr::A")
    assert np.array_equal(stored("A")[...], X)
    assert len(os.listdir("data.zarr")) == 3
    whole(make("::A"), 2 * X)
    assert sorted(os.listdir("data.zarr")) == ["A", "zarr.json"] and np.array_equal(stored("A")[...], 2 * X)


@pytest.mark.parametrize("inner", usually(1, ["::A", ""]))
def test_a_crash_while_one_replaces_another(inner):
    """Neither has the name then, and the next writer puts the old one back before it does anything."""
    whole(make(inner, chunks=(8, 5)), X)
    dies(f"data.zarr{inner}", "publishing")
    with pytest.raises(FileFormatError, match=r"No such file|not there"):
        rma_mm.open(f"data.zarr{inner}")
    held = make(inner)
    assert np.array_equal(stored(inner)[...], X)
    whole(held, 2 * X)
    assert np.array_equal(stored(inner)[...], 2 * X) and not [*Path().rglob(".*")]


def test_folders_that_end_early():
    """Whoever removes a folder while it is published puts back what it replaces; not over what is there."""
    whole(make(), X)
    held = Unfinished("output", "data.zarr", is_folder=True)
    os.makedirs(os.path.join(held.temporary, OLD))
    os.rename("data.zarr", os.path.join(held.temporary, OLD, "data.zarr"))
    remove(held.temporary)
    assert np.array_equal(stored()[...], X) and os.listdir() == ["data.zarr"]
    held.discard()
    held = Unfinished("output", "data.zarr", is_folder=True)
    os.makedirs(held.content)
    shutil.copytree("data.zarr", os.path.join(held.temporary, OLD, "data.zarr"))
    Path("data.zarr/mine").touch()
    held.discard()
    assert os.path.exists("data.zarr/mine") and os.listdir() == ["data.zarr"]
    os.symlink("data.zarr", temporary_name(os.path.realpath("x.zarr"), "5"))
    make(store="x.zarr").discard()
    assert os.path.exists("data.zarr/mine") and NEW not in os.listdir()


def test_without_the_package(monkeypatch):
    """The message names the extra."""
    array("A", X)
    monkeypatch.setitem(sys.modules, "zarr", None)
    for call in (lambda: rma_mm.open("data.zarr::A"), lambda: make("::B")):
        with pytest.raises(FileFormatError, match=r"pip install 'rma_mm\[zarr\]'"):
            call()
