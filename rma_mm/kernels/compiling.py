"""Compiling once a machine: machine code is kept on disk, and one process at a time compiles.

Ranks that start together would otherwise all compile the same. What is on disk is loaded by LLVM alone, by all ranks at
once and in a few hundredths of a second. Numba, which takes half a second and 80 MB, is imported only to compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rma_mm.kernels.cache import alone, cache_folder, read_own, write_own

OPTIONS = {"nopython": True, "error_model": "numpy"}  # options of Numba for every function that is compiled here
DIGEST = hashlib.sha256().digest_size  # bytes in front of machine code that is kept
SYMBOL = "<IBBHQQ"  # an entry of the symbol table of an ELF file: name, three facts of which the last is its section
RAISING = frozenset({
    "NRT_Free", "numba_do_raise", "numba_gil_ensure", "numba_gil_release", "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
})
"""Functions of Numba by which machine code tells of exceptions. What is compiled here raises none."""

Source = tuple[Callable[..., None], tuple[Any, ...]]
"""A function, and Numba's types of its arguments."""


def compiled(name: str, facts: object, arguments: tuple[Any, ...], source: Callable[[], Source]) -> Callable[..., None]:
    """Return a function as machine code, callable with ctypes' types `arguments`. Calling it does not hold the GIL.

    name, facts: what tells it from all others that this package compiles. source: returns what is compiled; it is
    called, and imports Numba, only if no process of this machine has compiled it before.
    """
    file = _file_of(name, facts)
    code = None if file is None else read_code(file)
    if code is None:
        with alone():
            code = None if file is None else read_code(file)  # another process may have compiled it meanwhile
            if code is None:
                code = _compile(*source())
                if file is not None:
                    with suppress(OSError):  # a full disk only costs time
                        write_code(file, code)
    engine, address = _load(code)
    call = ctypes.CFUNCTYPE(None, *arguments)(address)
    call.engine = engine  # type: ignore[attr-defined]  # keeps the machine code alive
    return call


@cache
def is_installed() -> bool:
    return find_spec("numba") is not None


@cache
def works() -> bool:
    """True if Numba is there, is not switched off, and is not broken, as it is where it is too old for this NumPy."""
    if not is_installed() or os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return False
    folder = cache_folder()
    if folder is not None and any(folder.glob(f"{_tools()}-*")):  # it has compiled here
        return True
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def compiled_for() -> tuple[str, str]:
    """Return the name and the features of the processor that is compiled for, as LLVM and Numba write them."""
    from llvmlite import binding

    name, features = (os.environ.get(f"NUMBA_CPU_{what}") for what in ("NAME", "FEATURES"))
    here = binding.get_host_cpu_features().flatten() if features is None else features
    return name or binding.get_host_cpu_name(), here


@cache
def _tools() -> str:
    """Return a name for what compiles, and for which processor."""
    import llvmlite

    found = find_spec("numba")
    told = Path((found and found.origin) or "numba").with_name("_version.py")  # importing Numba would take too long
    version = told.read_bytes() if told.exists() else b""
    facts = sys.version_info[:2], np.__version__, llvmlite.__version__, version, compiled_for()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _file_of(name: str, facts: object) -> Path | None:
    folder = cache_folder()
    key = hashlib.sha256(repr((name, facts)).encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{_tools()}-{key}.o"


def read_code(file: Path) -> bytes | None:
    """Return machine code that is kept; None if it is missing, damaged, or what another name stands for."""
    found = read_own(file) or b""
    code = found[DIGEST:]
    return code if code and found[:DIGEST] == _digest(file, code) else None


def write_code(file: Path, code: bytes) -> None:
    """Keep machine code, behind a digest of it and of its name. Raises OSError."""
    write_own(file, _digest(file, code) + code)


def _digest(file: Path, code: bytes) -> bytes:
    return hashlib.sha256(f"{file.parent.name}/{file.name}\n".encode() + code).digest()


def _compile(function: Callable[..., None], kinds: tuple[Any, ...]) -> bytes:
    """Return the machine code of a function, as an object file."""
    from numba.core import types
    from numba.core.ccallback import CFunc

    made: Any = CFunc(function, (kinds, types.void), locals={}, options=OPTIONS)
    made.compile()
    code: bytes = made._library._get_compiled_object()
    return code


def _load(code: bytes) -> tuple[Any, int]:
    """Return what keeps machine code in memory, and the address of its function."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    found = binding.ObjectFileRef.from_data(code)
    symbols, process = _symbols({each.name(): each.data() for each in found.sections()}), ctypes.CDLL(None)
    needed = {name for name, section in symbols.items() if not section and not hasattr(process, name)}
    if any(binding.address_of_symbol(name) is None for name in needed - RAISING):  # Numba tells LLVM of more functions
        from numba.core.registry import cpu_target

        cpu_target.target_context.refresh()
    for name in needed & RAISING:
        if binding.address_of_symbol(name) is None:
            binding.add_symbol(name, ctypes.cast(process.abort, ctypes.c_void_p).value or 0)
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(found)
    engine.finalize_object()
    return engine, engine.get_function_address(next(name for name in symbols if name.startswith("cfunc.")))


def _symbols(sections: dict[bytes, bytes]) -> dict[str, int]:
    """Return the names that an object file defines or needs, with the numbers of their sections: 0 if it needs them."""
    names, found = sections[b".strtab"], {}
    for at, _, _, section, _, _ in struct.iter_unpack(SYMBOL, sections[b".symtab"]):
        if at:
            found[names[at : names.index(b"\0", at)].decode()] = section
    return found
