"""Compiling once a machine: machine code is kept on disk, and one process at a time compiles.

Ranks that start together would otherwise all compile the same, and race for the files of Numba's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

from rma_mm.kernels.cache import alone, cache_folder

OPTIONS = {"nopython": True, "error_model": "numpy"}
"""What Numba is told about every function that is compiled here."""


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tells Numba's cache our folder, whose name changes with the sources."""

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


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Files

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk only costs time
            super().save_overload(sig, data)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def compiled(function: Callable[..., None], kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> Callable[..., None]:
    """`function` compiled for arguments of Numba's types `kinds`, callable with those of ctypes' types `arguments`.

    Calling it does not hold the GIL. Taken from the cache where a process of this machine has compiled it before.
    """
    made: Any = CFunc(function, (kinds, types.void), locals={}, options=OPTIONS)
    with alone():
        if cache_folder() is None:
            made.compile()
        else:
            made._cache = _Cache(function)
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
