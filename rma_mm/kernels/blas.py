"""The kernel for float32, float64, complex64 and complex128: the BLAS that NumPy brought along, by ctypes.

Unlike numpy.matmul it adds to a strided c without a temporary; unlike SciPy's wrappers it does not hold the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BLAS_TYPES, accumulator, supported_names
from rma_mm.errors import DtypeError
from rma_mm.kernels.blocked import Blocking, Blocks, bind_blocked
from rma_mm.kernels.numpy_gemm import bind_numpy
from rma_mm.kernels.product import LocalOperands, Product

_ROW_MAJOR, _COL_MAJOR = 101, 102
_AS_IT_IS, _TRANSPOSED = 111, 112
_CONJ_TRANSPOSED, _CONJ = 113, 114  # 114 is OpenBLAS's own
_REAL = {"f": ctypes.c_float, "d": ctypes.c_double, "F": ctypes.c_float, "D": ctypes.c_double}
LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}


@dataclass(frozen=True)
class Library:
    """A loaded BLAS with a C interface."""

    path: str  # the file it was loaded from
    handle: ctypes.CDLL  # the loaded library
    prefix: str  # what stands before `cblas_sgemm` in its symbols
    suffix: str  # suffix of the names; `64_` or `_64` if integers have 64 bits
    integer: type[ctypes.c_int] | type[ctypes.c_int64]  # the type of sizes and leading dimensions
    conjugates: bool  # true if it conjugates without transposing (OpenBLAS does)

    @property
    def most(self) -> int:
        return int(2 ** (8 * ctypes.sizeof(self.integer) - 1) - 1)

    def function(self, name: str) -> Callable[..., Any] | None:
        return _symbol(self.handle, f"{self.prefix}{name}{self.suffix}")

    def gemm(self, dtype: np.dtype[Any]) -> Callable[..., None]:
        found = self.function(f"cblas_{LETTER[dtype.char]}gemm")
        assert found is not None  # `_opened` looked
        return found


def _symbol(handle: ctypes.CDLL, name: str) -> Callable[..., Any] | None:
    try:
        found = handle[name]
    except AttributeError:
        return None
    found.restype = None
    return found


@cache
def library() -> Library | None:
    """NumPy's own BLAS, else another one that this process has loaded, else None."""
    import threadpoolctl

    loaded = [entry for entry in threadpoolctl.threadpool_info() if entry["user_api"] == "blas"]
    loaded.sort(key=lambda entry: "numpy" not in entry["filepath"])  # SciPy brings a second one
    for entry in loaded:
        found = _opened(entry["filepath"], entry["internal_api"] == "openblas")
        if found is not None and _works(found):
            return found
    return None


def _opened(path: str, openblas: bool) -> Library | None:
    """Return the library at `path` if it has all four functions under one of the usual names."""
    try:
        handle = ctypes.CDLL(path)
    except OSError:
        return None
    names = ((prefix, suffix) for suffix in ("64_", "_64", "") for prefix in ("scipy_", ""))
    for prefix, suffix in names:
        if all(_symbol(handle, f"{prefix}cblas_{letter}gemm{suffix}") for letter in LETTER.values()):
            wide = bool(suffix) or _wide_without_suffix(handle, prefix)
            return Library(path, handle, prefix, suffix, ctypes.c_int64 if wide else ctypes.c_int, openblas)
    return None


def _wide_without_suffix(handle: ctypes.CDLL, prefix: str) -> bool:
    """True if an OpenBLAS with plain names was built with 64-bit integers all the same."""
    config = _symbol(handle, f"{prefix}openblas_get_config")
    if config is None:
        return False
    config.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return b"USE64BITINT" in (config() or b"")


def _works(found: Library) -> bool:
    """True if a small product comes out right: a wrong guess about a foreign library must not reach a user."""
    a = np.array([[1, 2j], [3, 4]], np.complex64)
    b = np.array([[1j, 2], [0, 1]], np.complex64, order="F")
    c = np.full((2, 2), np.nan, np.complex64)
    prepared = arguments(found, a, b, c, 1, 0, found.conjugates, True)
    assert prepared is not None
    found.gemm(c.dtype)(*prepared)
    expected = (a.conj() if found.conjugates else a) @ b.conj()
    return bool(np.array_equal(c, expected))


def leading(x: NDArray[Any], row_major: bool) -> int | None:
    """The leading dimension of `x`: (r, s) read by rows or by columns, in elements; None if BLAS cannot read it so."""
    along = slice(None) if row_major else slice(None, None, -1)
    (long, short), (step, unit), size = x.shape[along], x.strides[along], int(x.itemsize)
    if (short > 1 and unit != size) or not x.flags.aligned:
        return None
    if long <= 1:  # never stepped along: NumPy may hold anything in that stride
        return max(1, int(short))
    ld, rest = divmod(int(step), size)
    return ld if rest == 0 and ld >= short else None


def _read(x: NDArray[Any], row_major: bool, conj: bool, conjugates: bool) -> tuple[int, int] | None:
    """BLAS's operation code and leading dimension for `x` in a product that is stored by rows or by columns."""
    ld = leading(x, row_major)
    if ld is not None and (conjugates or not conj):
        return (_CONJ if conj else _AS_IT_IS), ld
    ld = leading(x, not row_major)
    return None if ld is None else ((_CONJ_TRANSPOSED if conj else _TRANSPOSED), ld)


def arguments(
    lib: Library, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], alpha: Any, beta: Any, conj_a: bool, conj_b: bool
) -> tuple[Any, ...] | None:
    """Return the arguments of cblas_?gemm for arrays of one type, or None if their strides do not suit BLAS.

    A c stored by columns is asked for as such; BLAS then reads a and b as transposed or not in that light.
    """
    for row_major in (True, False):
        ld_c = leading(c, row_major)
        of_a = _read(a, row_major, conj_a, lib.conjugates)
        of_b = _read(b, row_major, conj_b, lib.conjugates)
        if ld_c is None or of_a is None or of_b is None:
            continue
        sizes = (c.shape[0], c.shape[1], a.shape[1])
        if max(*sizes, of_a[1], of_b[1], ld_c) > lib.most:
            return None
        m, n, k, lda, ldb, ldc = (lib.integer(x) for x in (*sizes, of_a[1], of_b[1], ld_c))
        first, second, third = (ctypes.c_void_p(x.ctypes.data) for x in (a, b, c))
        codes = (ctypes.c_int(x) for x in (_ROW_MAJOR if row_major else _COL_MAJOR, of_a[0], of_b[0]))
        one, two = scalar_of(alpha, c.dtype), scalar_of(beta, c.dtype)
        return (*codes, m, n, k, one, first, lda, second, ldb, two, third, ldc)
    return None


def scalar_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """Real scalars go by value, complex ones by address."""
    real = _REAL[dtype.char]
    if dtype.kind == "f":
        return real(value)
    return (real * 2)(np.real(value), np.imag(value))


def bind_blas(problem: LocalOperands) -> Product:
    """Return the product by BLAS; operands of other types or strides go through panels.

    Raises: DtypeError unless c is of a BLAS type, float16 or bfloat16.
    """
    check_type(problem.c.dtype)
    found = library()
    if found is None:
        return bind_numpy(problem)
    return _whole(found, problem) or _by_blocks(found, problem)


def fits(dtype: np.dtype[Any]) -> bool:
    return accumulator(dtype) in BLAS_TYPES


def check_type(dtype: np.dtype[Any]) -> None:
    """Raises: DtypeError unless `dtype` is a BLAS type, float16 or bfloat16."""
    if not fits(dtype):
        raise DtypeError(
            f"kernel 'blas' got a product of {dtype.name}: it multiplies {supported_names(BLAS_TYPES)}, float16 and "
            "bfloat16; use kernel 'auto', 'numba' or 'numpy'"
        )


def _whole(lib: Library, problem: LocalOperands) -> Product | None:
    """Return one call of BLAS, if types and strides allow."""
    a, b, c = problem.a, problem.b, problem.c
    if not a.dtype == b.dtype == c.dtype or c.dtype not in BLAS_TYPES:
        return None
    prepared = arguments(lib, a, b, c, problem.alpha, problem.beta, problem.conj_a, problem.conj_b)
    if prepared is None:
        return None
    return Product.by("blas", problem, lib.gemm(c.dtype), *prepared)


def plan_blas(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any]) -> Blocking | None:
    """Return how operands of these types, with unit strides, are cut; None for one call without scratch."""
    working = accumulator(c)
    if a == b == c == working:
        return None
    return Blocking(working, a != working, b != working, accumulate=c != working, spare=c != working)


def _by_blocks(lib: Library, problem: LocalOperands) -> Product:
    working = accumulator(problem.c.dtype)
    odd_c = not _suits(problem.c, working)
    blocking = Blocking(
        working,
        pack_a=not _suits(problem.a, working) or (problem.conj_a and not lib.conjugates),
        pack_b=not _suits(problem.b, working) or (problem.conj_b and not lib.conjugates),
        accumulate=odd_c,
        spare=odd_c,
    )

    def step(blocks: Blocks, scalars: tuple[Any, Any], conj: tuple[bool, bool], spare: NDArray[Any]) -> None:
        prepared = arguments(lib, *blocks, *scalars, *conj)
        assert prepared is not None  # what BLAS cannot read was packed, and blocks fit any integer
        lib.gemm(working)(*prepared)

    return bind_blocked("blas", problem, blocking, step)


def _suits(x: NDArray[Any], working: np.dtype[Any]) -> bool:
    return x.dtype == working and (leading(x, True) is not None or leading(x, False) is not None)
