"""The cache on disk: whose it is, who may write there, and that nothing is loaded that was not kept by us."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rma_mm.kernels import cache
from rma_mm.kernels.compiling import read_code, write_code


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RMA_MM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def others_may_write(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


def is_anothers(path: Path) -> None:
    os.chown(path, 4321, 4321)


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
OPENED = [others_may_write, pytest.param(is_anothers, marks=NEEDS_ROOT)]


@pytest.mark.parametrize("open_up", OPENED)
@pytest.mark.parametrize("at", ["", "..", "kernels-x", "link"])
def test_a_cache_that_others_could_write_to_is_not_used(
    home: Path, at: str, open_up: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_sources", lambda: "x")
    folder = cache.cache_folder.__wrapped__()
    assert folder == home / "kernels-x"
    assert home.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    assert cache.refusal() == ""
    if at == "link":
        home.rename(home.parent / "elsewhere")
        home.symlink_to("elsewhere")
        assert cache.cache_folder.__wrapped__() == home.parent / "elsewhere" / "kernels-x"
    opened = (home / at.removeprefix("link")).resolve()
    open_up(opened)
    assert cache.cache_folder.__wrapped__() is None
    assert f"{opened} " in cache.refusal()
    assert "RMA_MM_CACHE" in cache.refusal()


def test_a_cache_in_a_sticky_folder_is_used(home: Path) -> None:
    home.mkdir()
    home.chmod(0o1777)
    assert cache.folder_of("machines") == home / "machines"
    assert cache.refusal() == ""


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RMA_MM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, place in (("there", ".cache"), ("", ".cache"), (str(tmp_path / "there"), "there")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.folder_of("x") == tmp_path / place / "rma_mm" / "x"


@pytest.mark.parametrize("open_up", [*OPENED, "link", "hard link", "pipe"])
def test_a_file_that_others_could_write_is_not_read(tmp_path: Path, open_up: Any) -> None:
    file = tmp_path / "file"
    file.symlink_to("planted")
    cache.write_own(file, b"ours")
    assert not (tmp_path / "planted").exists()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.read_own(file) == b"ours"
    assert list(tmp_path.iterdir()) == [file]
    if callable(open_up):
        open_up(file)
    elif open_up == "hard link":
        os.link(file, tmp_path / "other")
    else:
        file.rename(tmp_path / "other")
        os.mkfifo(file) if open_up == "pipe" else file.symlink_to("other")
    assert cache.read_own(file) is None


def test_code_that_was_damaged_or_swapped_counts_as_none(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert read_code(one) is None
    write_code(one, b"code")
    write_code(two, b"other code")
    assert [read_code(file) for file in (one, two)] == [b"code", b"other code"]
    sound = one.read_bytes()
    flipped = bytearray(sound)
    flipped[-1] ^= 1
    for content in (sound[:-1], bytes(flipped), two.read_bytes(), b"", b"x"):
        one.write_bytes(content)
        assert read_code(one) is None
    one.write_bytes(sound)
    assert read_code(one) == b"code"


COMPILES = """
import ctypes, sys
from math import log1p
import numpy as np
from rma_mm.kernels.compiling import compiled, works

def source():
    from numba import types

    return logarithm, (types.CPointer(types.float64),)

def logarithm(number):
    number[0] = log1p(number[0])

assert works()
x = np.array([3.0])
compiled("logarithm", NAME, (ctypes.c_void_p,), source)(x.ctypes.data)
assert x[0] == log1p(3.0)
print("numba" in sys.modules)
"""


def has_imported_numba(name: str = "one", **environment: str) -> bool:
    """Call compiled code in a new process: True if that has imported Numba."""
    program = COMPILES.replace("NAME", repr(name))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip() == "True"


def test_code_that_is_in_the_cache_is_loaded_without_numba(home: Path) -> None:
    assert has_imported_numba()
    (file,) = home.rglob("*.o")
    assert not has_imported_numba()
    assert has_imported_numba("another")
    assert has_imported_numba(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse2")
    file.write_bytes(file.read_bytes()[:-1])
    assert has_imported_numba()
    assert not has_imported_numba()


def test_code_that_is_in_the_cache_is_loaded_while_another_process_compiles(home: Path) -> None:
    assert has_imported_numba()
    with next(home.rglob("lock")).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not has_imported_numba()
