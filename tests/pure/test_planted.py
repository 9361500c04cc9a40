"""What somebody else has planted where files are cleaned, replaced or restored: nothing outside the output changes.

A store or a folder that was unpacked from an archive may hold links, FIFOs, devices, and folders that look like what a
dead writer has left. Each case plants some, writes over, into or beside it, and looks at a decoy folder afterwards.
"""

import os
import random
import shutil
import signal
import stat
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import rma_mm
from rma_mm.errors import FileFormatError
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.output import Saving
from rma_mm.unfinished import NEW, OLD, remove, temporary_name
from tests.thorough import nightly

X = np.arange(12.0).reshape(3, 4)
OTHER = 12345
"""Another user, to whom root gives files."""
NAMES = {
    "npy": "C.npy", "h5": "C.h5::g/C", "safetensors": "C.safetensors::C", "zarr": "C.zarr::g/C", "store": "C.zarr",
    "long": "C" * 240 + ".zarr",
}
KINDS = (
    "link to folder", "link to file", "link to store", "link to nothing", "fifo", "device", "hard link", "file",
    "folder", "another's file", "another's folder",
)


def write(name, x=X):
    """A matrix in a file; returns what is being made."""
    sink = Saving().create(name, x.shape, x.dtype)
    try:
        sink.write(Region.whole(x.shape), x)
        sink.publish()
    finally:
        sink.discard()
    return sink


def decoys():
    """The folder that must stay as it is."""
    Path("decoy/inside").mkdir(parents=True)
    Path("decoy/file").write_bytes(b"mine")
    Path("decoy/inside/file").write_bytes(b"mine too")
    zarr.create_array("decoy/x.zarr", name="C", data=X)
    with h5py.File("decoy/x.h5", "w") as file:
        file["C"] = X


def seen(path):
    """All that is in a folder: names, kinds, modes, owners, contents."""
    found = []
    for folder, folders, files in os.walk(path):
        for name in sorted([*folders, *files, "."]):
            at = os.lstat(os.path.join(folder, name))
            raw = Path(folder, name).read_bytes() if stat.S_ISREG(at.st_mode) else b""
            found.append((folder, name, at.st_mode, at.st_uid, at.st_gid, at.st_mtime_ns if raw else 0, raw))
    return found


def plant(kind, at, draw):
    """Something of a kind at a path, whose folder is made."""
    folder = os.path.dirname(at)
    if os.path.realpath(folder) != os.path.abspath(folder):  # behind what was planted before
        return
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(at):
        return
    if kind.startswith("link to"):
        to = {"folder": "decoy", "file": "decoy/file", "store": draw.choice(["decoy/x.zarr", "decoy/x.zarr/C"])}
        os.symlink(os.path.abspath(to.get(kind.split()[-1], "none")), at)
    elif kind == "hard link":
        os.link("decoy/file", at)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    elif kind in ("fifo", "device"):
        os.mkfifo(at)
    elif "folder" in kind:
        os.makedirs(at)
        Path(at, "content").write_bytes(b"planted")
        for _ in range(draw.randrange(3)):
            with suppress(FileExistsError):
                os.symlink(os.path.abspath("decoy"), os.path.join(at, draw.choice(["old", "new", "C", "decoy"])))
    else:
        Path(at).write_bytes(b"planted")
    if kind.startswith("another") and os.geteuid() == 0:
        os.chown(at, OTHER, OTHER)


def places(name, draw):
    """Where something is planted: temporary names, what is in them, and the inside of what is there already."""
    path, _, inner = name.partition("::")
    real = os.path.realpath(path)
    if path.endswith(".zarr"):
        real = os.path.join(real, draw.choice([inner, "g", ""])) if inner else real
    token = draw.choice(["6", "77-0123abcd", str(os.getpid()), "x", "1.2"])
    temporary = temporary_name(real.rstrip("/"), token)
    entry = os.path.basename(real.rstrip("/"))
    within = [
        "", OLD, NEW, f"{OLD}/{entry}", f"{OLD}/..{entry}", f"{OLD}/.{entry}", f"{OLD}/decoy", f"{OLD}/C", f"{NEW}/c",
        f"{NEW}/zarr.json", f"{OLD}/{entry}/c/0",
    ]
    yield os.path.join(temporary, draw.choice(within)).rstrip("/")
    if path.endswith(".zarr"):
        inside = ["g", "g/C", "g/C/c", "g/zarr.json", "zarr.json", "C", "c"]
        yield os.path.join(os.path.realpath(path), draw.choice(inside))


def case(seed):
    """One planting, and what is done beside it: 1 where it was written, 0 where it was refused."""
    draw = random.Random(seed)
    name, before, act = draw.choice([*NAMES.values()]), draw.choice(["new", "replaced", "added"]), draw.randrange(4)
    if before == "replaced" or (before == "added" and "::" not in name):
        write(name)
    elif before == "added":
        write(name.replace("::g/C", "::g/B").replace("::C", "::B"))
    for _ in range(draw.randrange(1, 4)):
        for place in places(name, draw):
            with suppress(FileExistsError, NotADirectoryError, PermissionError):
                plant(draw.choice(KINDS), place, draw)
    if name.endswith("h5::g/C") and os.path.isfile("C.h5") and draw.random() < 0.5:
        with h5py.File("C.h5", "a") as file:
            for key in ("g/C", "g"):
                if key in file and draw.random() < 0.7:
                    del file[key]
                    links = [h5py.ExternalLink("decoy/x.h5", to) for to in ("/", "/C")]
                    file[key] = draw.choice([*links, h5py.SoftLink("/nowhere")])
                    break
    try:
        if act == 0:  # it ends early
            sink = Saving().create(name, X.shape, X.dtype)
            sink.write(Region.whole(X.shape), X)
            with suppress(OSError):
                remove(sink.temporary)
            sink.discard()
            return 0
        if act == 1:  # whoever ends a job removes what is under a temporary name, whatever that is
            path = name.partition("::")[0]
            for entry in [e for e in os.listdir() if e.endswith(".partial") and path in e]:
                with suppress(OSError):
                    remove(os.path.abspath(entry))
        write(name, 2 * X)
    except FileFormatError:
        return 0
    assert np.array_equal(rma_mm.open(name).read((slice(0, 3), slice(0, 4))), 2 * X)
    return 1


def run(seeds, tmp_path, monkeypatch):
    """Cases, each in a folder of its own; returns how many were written."""
    written = 0
    signal.signal(signal.SIGALRM, _hung)
    for seed in seeds:
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        decoys()
        before = seen("decoy")
        signal.alarm(60)
        try:
            written += case(seed)
            assert seen("decoy") == before
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            signal.alarm(0)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / "work")
    return written


def _hung(*_):
    raise AssertionError("it hung")


def test_nothing_outside_the_output_changes(tmp_path, monkeypatch):
    assert run(range(60), tmp_path, monkeypatch) > 10


@nightly
def test_nothing_outside_the_output_changes_in_many_cases(tmp_path, monkeypatch):
    assert run(range(60, 2060), tmp_path, monkeypatch) > 500


def test_a_folder_behind_a_link_is_not_moved(tmp_path, monkeypatch):
    """As an unpacked store can have it: `old` in what looks like a dead writer's folder leads elsewhere."""
    monkeypatch.chdir(tmp_path)
    decoys()
    before = seen("decoy")
    write("C.zarr::B")
    os.mkdir("C.zarr/.C.6.partial")
    os.symlink(os.path.abspath("decoy"), "C.zarr/.C.6.partial/old")
    write("C.zarr::C")
    assert seen("decoy") == before
    assert sorted(os.listdir("C.zarr")) == ["B", "C", "zarr.json"]


@pytest.mark.parametrize("entry", ["D", "C.zarr", ".C", "zarr.json"])
def test_only_what_a_store_expects_comes_back(entry, tmp_path, monkeypatch):
    """Not a folder of another name, as would be a second array, from what looks like a dead writer's folder."""
    monkeypatch.chdir(tmp_path)
    write("C.zarr::B")
    shutil.copytree("C.zarr/B", f"C.zarr/.C.6.partial/old/{entry}")
    write("C.zarr::C")
    assert sorted(os.listdir("C.zarr")) == ["B", "C", "zarr.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("place", [".C.npy.6.partial", ".C.zarr.6.partial", ".C.zarr.6.partial/old"])
def test_what_another_user_left_stays(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs(f"{place}/C.zarr") if "zarr" in place else Path(place).touch()
    os.chown(place, OTHER, OTHER)
    write("C.npy")
    write("C.zarr")
    assert os.path.lexists(place) and os.path.exists("C.zarr/zarr.json")


def test_nothing_is_written_through_links_in_a_store(tmp_path, monkeypatch):
    """To a group, or an array, elsewhere; of HDF5, to another file."""
    monkeypatch.chdir(tmp_path)
    decoys()
    before = seen("decoy")
    write("C.zarr::B")
    os.symlink(os.path.abspath("decoy/x.zarr"), "C.zarr/g")
    os.symlink(os.path.abspath("decoy/x.zarr/C"), "C.zarr/C")
    with h5py.File("C.h5", "w") as file:
        file["g"], file["C"] = h5py.ExternalLink("decoy/x.h5", "/"), h5py.ExternalLink("decoy/x.h5", "/C")
    for name in ("C.zarr::g/new", "C.zarr::g/C", "C.zarr::C", "C.h5::g/C", "C.h5::g/new", "C.h5::C"):
        with pytest.raises(FileFormatError, match="nothing is written through one"):
            write(name)
    assert seen("decoy") == before
