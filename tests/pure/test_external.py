"""Files that name other files, and files that cost more than they hold: refused at once, without following anything."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from numcodecs import Zstd

import rma_mm
from bench.processes import ROOT
from rma_mm.errors import FileFormatError
from rma_mm.runtime.files.output import Saving
from tests.thorough import usually

WHOLE = (slice(None), slice(None))
SECRET = np.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, and beside it one that nothing should be read from."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    SECRET.tofile("../secret/raw")
    with h5py.File("../secret/x.h5", "w") as file:
        file["A"] = SECRET
    zarr.create_array("../secret/x.zarr", name="A", data=SECRET, chunks=(3, 4), compressors=None)
    rma_mm_save("../secret/x.safetensors::A")


def rma_mm_save(name):
    sink = Saving().create(name, SECRET.shape, SECRET.dtype)
    sink.write(_whole(), SECRET)
    sink.publish()


def _whole():
    from rma_mm.geometry.span import Region

    return Region.whole(SECRET.shape)


def storage():
    with h5py.File("E.h5", "w") as file:
        file.create_dataset("A", SECRET.shape, "f8", external=[("../secret/raw", 0, SECRET.nbytes)])
    return "E.h5::A"


def link():
    with h5py.File("E.h5", "w") as file:
        file["A"] = h5py.ExternalLink("../secret/x.h5", "/A")
    return "E.h5::A"


def soft_link_through_another():
    with h5py.File("E.h5", "w") as file:
        file["far"] = h5py.ExternalLink("../secret/x.h5", "/")
        file["A"] = h5py.SoftLink("/far/A")
    return "E.h5::A"


def virtual():
    layout = h5py.VirtualLayout(SECRET.shape, "f8")
    layout[...] = h5py.VirtualSource("../secret/x.h5", "A", SECRET.shape)
    with h5py.File("E.h5", "w") as file:
        file.create_virtual_dataset("A", layout)
    return "E.h5::A"


def virtual_of_a_link():
    layout = h5py.VirtualLayout(SECRET.shape, "f8")
    layout[...] = h5py.VirtualSource(".", "B", SECRET.shape)
    with h5py.File("E.h5", "w") as file:
        file["B"] = h5py.ExternalLink("../secret/x.h5", "/A")
        file.create_virtual_dataset("A", layout)
    return "E.h5::A"


def virtual_of_storage():
    layout = h5py.VirtualLayout(SECRET.shape, "f8")
    layout[...] = h5py.VirtualSource(".", "B", SECRET.shape)
    with h5py.File("E.h5", "w") as file:
        file.create_dataset("B", SECRET.shape, "f8", external=[("../secret/raw", 0, SECRET.nbytes)])
        file.create_virtual_dataset("A", layout)
    return "E.h5::A"


def store_with(name, target):
    """A store of which one file or folder is a link."""
    zarr.create_array("E.zarr", name="A", data=SECRET, chunks=(3, 4), compressors=None)
    place = Path("E.zarr", name)
    if place.is_dir():
        for file in sorted(place.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        place.rmdir()
    else:
        place.unlink()
    place.symlink_to(Path(target).resolve())
    return "E.zarr::A"


def index(file):
    Path("m.safetensors.index.json").write_text(json.dumps({"weight_map": {"A": file}}))
    return "m.safetensors.index.json::A"


NAMING = {
    "storage": storage, "link": link, "soft link through another": soft_link_through_another, "virtual": virtual,
    "virtual of a link": virtual_of_a_link, "virtual of storage": virtual_of_storage,
    "array is a link": lambda: store_with("A", "../secret/x.zarr/A"),
    "metadata are a link": lambda: store_with("A/zarr.json", "../secret/x.zarr/A/zarr.json"),
    "chunk is a link": lambda: store_with("A/c/0/0", "../secret/raw"),
    "chunks lie behind a link": lambda: store_with("A/c", "../secret/x.zarr/A/c"),
    "index goes up": lambda: index("../secret/x.safetensors"),
    "index is absolute": lambda: index(os.path.abspath("../secret/x.safetensors")),
}


@pytest.mark.parametrize("name", NAMING)
def test_other_files_are_read_on_request_only(name):
    """The error names the file, and how to allow it; then it is read, and read once more."""
    path = NAMING[name]()
    with pytest.raises(FileFormatError, match=r"secret.* which is not read unless you allow it: --allow-external"):
        rma_mm.open(path).read(WHOLE)
    opened = rma_mm.open(path, allow_external=True)
    assert np.array_equal(opened.read(WHOLE), SECRET)
    again, out = opened.again(), np.empty_like(SECRET)
    again.read(_whole(), out)
    assert np.array_equal(out, SECRET)


def test_links_within_a_file_are_followed():
    with h5py.File("x.h5", "w") as file:
        file["g/B"], file["A"], file["g/up"] = SECRET, h5py.SoftLink("g/up"), h5py.SoftLink("B")
        file["round"], file["nowhere"] = h5py.SoftLink("/round"), h5py.SoftLink("/none")
        layout = h5py.VirtualLayout(SECRET.shape, "f8")
        layout[...] = h5py.VirtualSource(".", "A", SECRET.shape)
        file.create_virtual_dataset("V", layout)
    for name in ("A", "g/up", "V", "./g//B"):
        assert np.array_equal(rma_mm.open(f"x.h5::{name}").read(WHOLE), SECRET)
    for name, words in (("round", "than 16 links"), ("nowhere", "not there"), ("g", "a group"), ("A/x", "not there")):
        with pytest.raises(FileFormatError, match=words):
            rma_mm.open(f"x.h5::{name}")


def test_files_that_name_one_another():
    for here, there in (("a", "b"), ("b", "a")):
        with h5py.File(f"{here}.h5", "w") as file:
            file["A"] = h5py.ExternalLink(f"{there}.h5", "/A")
    with pytest.raises(FileFormatError, match="links from file to file"):
        rma_mm.open("a.h5::A", allow_external=True)


def fifo_behind(make):
    """What `make` makes, with a FIFO in place of what it names."""
    name = make()
    for target in ("../secret/raw", "../secret/x.h5"):
        os.unlink(target)
        os.mkfifo(target)
    return name


def virtual_without_end():
    """A virtual dataset whose extent is that of its source, which the library looks up as it opens it."""
    space = h5py.VirtualLayout((3, 4), "f8", maxshape=(None, 4))
    source = h5py.VirtualSource("../secret/x.h5", "A", (3, 4), maxshape=(None, 4))
    space[:, :] = source[:, :]
    with h5py.File("E.h5", "w") as file:
        file.create_virtual_dataset("A", space)
    return "E.h5::A"


def chunk_that_is_a_fifo():
    zarr.create_array("E.zarr", name="A", data=SECRET, chunks=(3, 4))
    os.unlink("E.zarr/A/c/0/0")
    os.mkfifo("E.zarr/A/c/0/0")
    return "E.zarr::A"


def huge_metadata():
    zarr.create_array("E.zarr", name="A", data=SECRET, chunks=(3, 4))
    os.truncate("E.zarr/A/zarr.json", 3 * 2**30)
    return "E.zarr::A"


def metadata(**said):
    zarr.create_array("E.zarr", name="A", data=SECRET, chunks=(3, 4))
    file = Path("E.zarr/A/zarr.json")
    fields = json.loads(file.read_text())
    if "chunk_shape" in said:
        fields["chunk_grid"]["configuration"]["chunk_shape"] = said.pop("chunk_shape")
    file.write_text(json.dumps(fields | said))
    return "E.zarr::A"


def chunk(raw, **options):
    """An array of which the only chunk is `raw`."""
    zarr.create_array("E.zarr", name="A", data=SECRET, chunks=(3, 4), **options)
    Path("E.zarr/A/c/0/0" if options.get("zarr_format") != 2 else "E.zarr/A/0.0").write_bytes(raw)
    return "E.zarr::A"


def zstd_of_zeros(nbytes):
    """Frames of zstd are made by hand: blocks that repeat a byte, after a header that says no size."""
    blocks = -(-nbytes // 2**17)
    block = (2**17 << 3 | 2).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * (blocks - 1) + (2**17 << 3 | 3).to_bytes(3, "little") + b"\0"


def packed_twice():
    """A chunk of some 300 bytes that unpacks to 6 GiB."""
    raw = Zstd().encode(zstd_of_zeros(6 * 2**30))
    assert len(raw) < 400
    return chunk(raw, compressors=[zarr.codecs.ZstdCodec(), zarr.codecs.ZstdCodec()])


def deflated(nbytes):
    packer, step = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(2**20)
    return b"".join(packer.compress(step) for _ in range(nbytes >> 20)) + packer.flush()


def packed_hdf5(times):
    """A chunk that unpacks to 256 MiB."""
    raw = deflated(2**28)
    with h5py.File("E.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((3, 4))
        for _ in range(times):
            plist.set_deflate(9)
            raw = raw if times == 1 else zlib.compress(raw)
        data = h5py.h5d.create(file.id, b"A", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((3, 4)), plist)
        data.write_direct_chunk((0, 0), zlib_of(raw) if times == 1 else raw)
    return "E.h5::A"


def zlib_of(raw):
    """A stream of gzip as one of zlib."""
    body = raw[10:-8]
    return b"\x78\xda" + body + bytes(4)


def huge_header():
    """A million tensors, in a header of 93 MB."""
    entry = '"%07d":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1],"data_offsets":[%d,%d]}'
    text = "{" + ",".join(entry % (n, 4 * n, 4 * n + 4) for n in range(10**6)) + "}"
    Path("E.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4 * 10**6))
    return "E.safetensors::0000001"


def long_shape(count=1500):
    return [int("9" * 4000)] * count


def tensor_of_many_dimensions():
    text = json.dumps({"A": {"dtype": "F32", "shape": long_shape(), "data_offsets": [0, 4]}})
    Path("E.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4))
    return "E.safetensors::A"


def npy_of_many_dimensions():
    head = repr({"descr": "<f4", "fortran_order": False, "shape": tuple(long_shape())}).encode()
    Path("E.npy").write_bytes(b"\x93NUMPY\x02\x00" + len(head).to_bytes(4, "little") + head)
    return "E.npy"


def virtual_of_itself():
    layout = h5py.VirtualLayout((3, 4), "f8")
    layout[...] = h5py.VirtualSource(".", "A", (3, 4))
    with h5py.File("E.h5", "w") as file:
        file.create_virtual_dataset("A", layout)
    return "E.h5::A"


def virtual_of_two_in_a_circle():
    with h5py.File("E.h5", "w") as file:
        for here, there in (("A", "B"), ("B", "A")):
            layout = h5py.VirtualLayout((3, 4), "f8")
            layout[...] = h5py.VirtualSource(".", there, (3, 4))
            file.create_virtual_dataset(here, layout)
    return "E.h5::A"


def sparse_chunk():
    name = chunk(b"", compressors=None)
    os.truncate("E.zarr/A/c/0/0", 2**40)
    return name


COSTLY = {
    "storage on a FIFO": lambda: fifo_behind(storage), "link to a FIFO": lambda: fifo_behind(link),
    "virtual on a FIFO": lambda: fifo_behind(virtual), "virtual without end": lambda: fifo_behind(virtual_without_end),
    "a chunk is a FIFO": chunk_that_is_a_fifo, "metadata of 3 GiB": huge_metadata,
    "a shape of 1500 long numbers": lambda: metadata(shape=long_shape()),
    "chunks of 1500 long numbers": lambda: metadata(chunk_shape=long_shape()),
    "chunks without rows": lambda: metadata(chunk_shape=[0, 5]),
    "a chunk of 8 TB": lambda: metadata(chunk_shape=[10**6, 10**6]),
    "packed twice": packed_twice,
    "zstd": lambda: chunk(zstd_of_zeros(2**30)), "zstd that says so": lambda: chunk(Zstd().encode(bytes(2**30))),
    "gzip": lambda: chunk(deflated(2**28), compressors=zarr.codecs.GzipCodec()),
    "in shards": lambda: chunk(shard(zstd_of_zeros(2**30)), shards=(3, 4)),
    "sparse": sparse_chunk, "HDF5": lambda: packed_hdf5(1), "HDF5 twice": lambda: packed_hdf5(2),
    "a million tensors": huge_header, "a tensor of 1500 dimensions": tensor_of_many_dimensions,
    "npy of 1500 dimensions": npy_of_many_dimensions, "virtual of itself": virtual_of_itself,
    "virtual in a circle": virtual_of_two_in_a_circle,
}


def shard(raw):
    import google_crc32c

    index = np.array([0, len(raw)], "<u8").tobytes()
    return raw + index + google_crc32c.value(index).to_bytes(4, "little")


MEASURE = """
import os, resource, sys, time
import h5py, zarr, rma_mm
from rma_mm.errors import FileFormatError
whole = (slice(None), slice(None))
for line in sys.stdin:
    folder, path, allowed = line.rstrip("\\n").split("\\t")
    if os.fork():
        if os.wait()[1]:
            print("died", flush=True)
        continue
    os.chdir(folder)
    rma_mm.open("../secret/fine.h5::A").read(whole)
    rma_mm.open("../secret/x.zarr::A").read(whole)
    before, begun, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), "read"
    try:
        rma_mm.open(path, allow_external=allowed == "allowed").read(whole)
    except FileFormatError as error:
        said = str(error)
    print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, said, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def measured():
    """Seconds, kilobytes and the refusal of reading a path, in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:

        def ask(path, allowed):
            process.stdin.write(f"{Path.cwd()}\t{path}\t{allowed}\n")
            process.stdin.flush()
            seconds, kilobytes, said = process.stdout.readline().split(" ", 2)
            return float(seconds), float(kilobytes), said

        yield ask
        process.stdin.close()
        assert process.wait(60) == 0


QUICK = (
    "link to a FIFO", "virtual without end", "chunks without rows", "a chunk of 8 TB", "zstd", "in shards", "sparse",
    "virtual of itself",
)
"""Those that take no time to make."""


@pytest.mark.parametrize("name", usually(len(QUICK), [*QUICK, *(name for name in COSTLY if name not in QUICK)]))
def test_what_a_file_costs_is_bounded(measured, name):
    """It is refused within 2 s and 100 MB, whether other files are allowed or not."""
    path = COSTLY[name]()
    with h5py.File("../secret/fine.h5", "w") as file:
        file.create_dataset("A", data=SECRET, chunks=(3, 4), compression="gzip")
    for allowed in ("allowed", "") if "FIFO" in name or "virtual" in name else ("",):
        seconds, kilobytes, said = measured(path, allowed)
        assert said != "read\n" and len(said) < 600
        assert kilobytes < 100_000
        assert seconds < 20  # 2 s on a machine to itself
