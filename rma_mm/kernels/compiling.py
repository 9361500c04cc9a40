"""Compiling once a machine: machine code is kept on disk, and one process at a time compiles.

Ranks that start together would otherwise all compile the same, and race for the files of Numba's cache. What is on
disk already is loaded by all at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from rma_mm.kernels.cache import alone, cache_folder, read_own, write_own

OPTIONS = {"nopython": True, "error_model": "numpy"}  # options of Numba for every function that is compiled here


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Locator that gives Numba's cache our folder, whose name changes with the sources."""

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return "as the folder says"

    def get_disambiguator(self) -> str:
        return "0"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls()


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class Entries:
    """One file for each function and signature, instead of Numba's index: unpickled only if it is ours and whole.

    In front stands a digest of its name and what follows, so that an entry that was damaged or swapped counts as none.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self.base = folder, hashlib.sha256(base.encode()).hexdigest()[:16]

    def load(self, key: object) -> Any:
        """Return the value stored under a key; None if it is missing or damaged."""
        file = self.file_of(key)
        found = read_own(file) or b""
        content = found[DIGEST:]
        return pickle.loads(content) if content and found[:DIGEST] == _digest(file, content) else None

    def save(self, key: object, data: object) -> None:
        content = dumps(data)
        write_own(file := self.file_of(key), _digest(file, content) + content)

    def flush(self) -> None:
        """Forget every entry of the function."""
        for file in self.folder.glob(f"{self.base}-*.nbc"):
            file.unlink()

    def file_of(self, key: object) -> Path:
        return self.folder / f"{self.base}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.nbc"


DIGEST = hashlib.sha256().digest_size  # bytes in front of an entry


def _digest(file: Path, content: bytes) -> bytes:
    return hashlib.sha256(f"{file.parent.name}/{file.name}/{numba.__version__}\n".encode() + content).digest()


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Files

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        super().__init__(function)
        self._cache_file = Entries(folder, self._impl.filename_base)

    @global_compiler_lock
    def has(self, sig: Any, context: Any) -> bool:
        context.refresh()  # takes half a second, which processes that then wait for each other have behind them
        return self._cache_file.file_of(self._index_key(sig, context.codegen())).exists()

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk only costs time
            super().save_overload(sig, data)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def compiled(function: Callable[..., None], kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Return `function` compiled for Numba's types `kinds`, callable with ctypes' types `arguments`.

    Calling it does not hold the GIL. Taken from the cache where a process of this machine has compiled it before.
    """
    made: Any = CFunc(function, (kinds, types.void), locals={}, options=OPTIONS)
    if (folder := cache_folder()) is None:
        made.compile()
    else:
        made._cache = _Cache(function, folder)
        is_there = made._cache.has(made._sig, made._targetdescr.target_context)
        with nullcontext() if is_there else alone():
            _compile(made)
    call = ctypes.CFUNCTYPE(None, *arguments)(made.address)
    call.made = made  # type: ignore[attr-defined]  # keeps the machine code alive
    return call


def _compile(made: Any) -> None:
    """Load the code or compile it; where the files are damaged, compile it and write them anew."""
    try:
        made.compile()
    except Exception:  # noqa: BLE001 - unpickling raises anything; what is wrong with the function comes again
        made._cache.flush()
        made.compile()
