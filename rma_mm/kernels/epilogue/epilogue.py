"""Epilogues of products: C = cast(activation(alpha · op(A) @ op(B) + beta · C + bias)).

An `Epilogue` is what a user asks for; a `EpilogueTile` is the same for one tile, between the array in which it is
summed and the array in which it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import accumulator, check_dtype, parse_dtype, rank
from rma_mm.elements.pointwise import ACTIVATIONS, SIDES
from rma_mm.errors import DtypeError, OptionError, ShapeError, quoted
from rma_mm.kernels.elementwise import STEP_BYTES, cast, pieces
from rma_mm.kernels.epilogue.activations import activate, bind_compiled

BLOCK_BYTES = 16 << 20
"""Bytes of C after whose product its epilogue is applied: these are still in the third-level cache."""
BLOCK_LEAST = 2048
"""Rows and columns of such a block at least. What it shares with the next is packed again by BLAS: 2048³ in float32
takes 9 % longer in blocks of 256 rows, 4.5 % in blocks of 512 and 2 % in blocks of 1024 (measured), while bias and GELU
in one go over all of C take 1 to 3 %."""
MOST_STEPS = 256  # pieces of a tile whose calls are prepared one by one, at the most (roughly)
SCRATCH = 16 * STEP_BYTES  # bytes of temporaries at the most
COMPILE_FROM = 2**14  # elements of C from which a compiled pass is taken


@dataclass(frozen=True, eq=False)
class Epilogue:
    """Element-wise work on C after its sums are complete, followed by one rounding into `dtype`."""

    bias: Any = None
    """A vector that is added, equal on every rank; it is copied."""
    per: str | None = None
    """Direction of the bias: "column" (n values, one for each column of C) or "row" (m values, one for each row). By
    default as NumPy broadcasts: (n,) and (1, n) are per column, (m, 1) is per row."""
    activation: str | None = None
    """"relu", or "gelu": x/2 · (1 + erf(x/√2)), the exact form."""
    dtype: Any = None
    """The element type of C; None for that of the product."""

    def __post_init__(self) -> None:
        if self.bias is not None:
            kept = np.array(self.bias)
            per = self.per
            if kept.ndim == 2 and 1 in kept.shape:
                kept, per = kept.ravel(), per or SIDES[kept.shape[0] != 1]
            kept.flags.writeable = False
            object.__setattr__(self, "bias", kept)
            object.__setattr__(self, "per", per or ("column" if kept.ndim == 1 else None))

    def apart(self) -> Epilogue:
        """Return the same with a bias of its own, so that `put` changes no other's."""
        return self if self.bias is None else replace(self)

    def put(self, at: Any, values: Any) -> None:
        """Let the bias have other values at these indices; plans are told by `Plan.set_bias`. `text` stays.

        Raises ShapeError for values or indices that do not fit, DtypeError for values that its type does not hold.
        """
        given = np.asarray(values)
        try:
            wanted = self.bias[at].shape
        except IndexError as error:
            raise ShapeError(f"at: got {quoted(at)} for a bias of {self.bias.size} values: {error}") from None
        if given.shape != wanted:
            raise ShapeError(f"values: got some of shape {given.shape}; here it is {wanted}")
        _check_ladder(check_dtype(given.dtype, "values"), self.bias.dtype, f"got {given.dtype} for {self.bias.dtype}")
        self.bias.flags.writeable = True
        self.bias[at] = given
        self.bias.flags.writeable = False

    @cached_property
    def text(self) -> str:
        """All that it says, the same on every rank where the epilogue is; of the bias a hash."""
        bias = None
        if self.bias is not None:
            bias = f"{self.bias.dtype}{self.bias.shape}:{blake2b(self.bias.tobytes(), digest_size=8).hexdigest()}"
        dtype = None if self.dtype is None else getattr(self.dtype, "__name__", str(self.dtype))
        return f"Epilogue(bias={bias}, per={self.per!r}, activation={self.activation!r}, dtype={dtype})"

    def __repr__(self) -> str:
        return self.text

    def words(self, stored: np.dtype[Any], summed: np.dtype[Any]) -> str:
        """Return a description for people."""
        done = [f"bias per {self.per}"] if self.bias is not None else []
        done += [self.activation] if self.activation else []
        done += [f"summed in {summed.name} and stored as {stored.name}"] if self.dtype is not None else []
        return ", ".join(done) or "nothing"

    def check(self, shape: tuple[int, int], product: np.dtype[Any]) -> np.dtype[Any]:
        """Return the element type of C, for a C of `shape` whose product has type `product`.

        Raises OptionError, ShapeError and DtypeError if the epilogue does not fit.
        """
        summed = accumulator(product)
        if self.bias is None and self.per is not None:
            raise OptionError(f"epilogue: got per={self.per!r} without a bias; pass bias, or leave per out")
        if self.bias is not None:
            self._check_bias(shape, summed)
        self._check_activation(summed)
        if self.dtype is None:
            return product
        stored = element_type(self.dtype)
        _check_ladder(summed, stored, f"got dtype={stored.name} for a product summed in {summed.name}")
        return stored

    def _check_bias(self, shape: tuple[int, int], summed: np.dtype[Any]) -> None:
        bias = self.bias
        if self.per not in SIDES:
            raise OptionError(
                f"epilogue: got per={self.per!r} with a bias of {bias.size} values; name what each is added to: "
                f"per='column' takes {shape[1]} values for a C of {shape}, per='row' takes {shape[0]}"
            )
        if bias.ndim != 1:
            raise ShapeError(f"epilogue: got a bias of shape {bias.shape}; must be a vector: pass bias.ravel()")
        wanted = dict(zip(("row", "column"), shape, strict=True))
        if bias.size != wanted[self.per]:
            other = next((side for side in SIDES if wanted[side] == bias.size), None)
            hint = f"; per={other!r} would fit" if other else ""
            raise ShapeError(
                f"epilogue: got a bias of {bias.size} values; C is {shape}, and per={self.per!r} takes one for each "
                f"{self.per}, {wanted[self.per]}{hint}"
            )
        check_dtype(bias.dtype, "epilogue: the bias's dtype")
        _check_ladder(bias.dtype, summed, f"got a bias of {bias.dtype.name} for a product summed in {summed.name}")
        with np.errstate(all="ignore"):
            held = bias.astype(summed)
        lost = np.isfinite(bias) & ~np.isfinite(held) if rank(summed) > 1 else held != bias
        if lost.any():
            raise DtypeError(
                f"epilogue: bias[{lost.argmax()}] is {bias[lost.argmax()]}, which {summed.name}, in which C is summed, "
                f"cannot hold; name a wider compute_dtype"
            )

    def _check_activation(self, summed: np.dtype[Any]) -> None:
        if self.activation is None:
            return
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise OptionError(f"epilogue: got activation={self.activation!r}; use {', '.join(ACTIVATIONS)} or None")
        if rank(summed) not in ACTIVATIONS[self.activation]:
            takes = {"relu": "integers and real numbers", "gelu": "real numbers"}[self.activation]
            fix = "compute_dtype='float32'" if rank(summed) < 2 else "leave it out"
            raise DtypeError(f"epilogue: got {self.activation} of {summed.name}; needs {takes}: {fix}")

    def prepare(self, summed: np.dtype[Any], shape: tuple[int, int], kernel: str) -> None:
        """Compile the code that such products will need."""
        if compiles(kernel, shape) and (self.bias is not None or self.activation is not None):
            one = np.zeros((1, 1), summed)
            EpilogueTile(one, None, None, self.activation or "relu", True).bound(one)

    def tile_work(self, rows: slice, cols: slice, compiles: bool) -> TileWork | None:
        """Return the element-wise work that replaces bias and activation on this part of a rank's C, or None."""

    def scratch_bytes(self, shape: tuple[int, int], summed: np.dtype[Any]) -> int:
        """Return the scratch bytes for a tile of `shape`: its bias, code that adds to each row, temporaries."""
        bias = 0 if self.bias is None else self.bias.nbytes
        temporaries = min(SCRATCH, 16 * shape[0] * shape[1] * summed.itemsize)
        return int(bias + 2 * sum(shape) * summed.itemsize + temporaries)


class TileWork(Protocol):
    """Element-wise work on a part of C, in place."""

    @property
    def T(self) -> TileWork:
        """The same for the transposed part."""

    def part(self, rows: slice, cols: slice) -> TileWork:
        """Return the same for a part of the part."""

    def __call__(self, c: NDArray[Any]) -> None:
        """Apply the work to `c`, in place."""


def compiles(kernel: str, shape: tuple[int, int]) -> bool:
    return kernel != "numpy" and shape[0] * shape[1] >= COMPILE_FROM


def check_epilogue(epilogue: object) -> None:
    """Check that the argument is an Epilogue or None; raise OptionError otherwise."""
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise OptionError(f"epilogue: got {type(epilogue).__name__}; pass rma_mm.Epilogue(bias=…, …), or None")


def _check_ladder(src: np.dtype[Any], dst: np.dtype[Any], got: str) -> None:
    """Check that a cast loses no kind of number (complex to real, real to integer); raise DtypeError otherwise."""
    if rank(src) > rank(dst):
        raise DtypeError(
            f"epilogue: {got}; values go up the ladder bool, integer, real, complex, never down: name another type, or "
            f"a compute_dtype that holds both"
        )


def element_type(dtype: Any) -> np.dtype[Any]:
    """Return the element type that was named, in NumPy's way or ours. Raises DtypeError."""
    try:
        return check_dtype(np.dtype(dtype))
    except TypeError:
        return parse_dtype(str(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class EpilogueTile:
    """An epilogue for one tile of C."""

    result: NDArray[Any]  # (rows, columns): where the tile is stored; the array in which it is summed, or another
    bias: NDArray[Any] | None = None  # in the type in which the tile is summed
    per: str | None = None  # as in `Epilogue`
    activation: str | None = None
    compiles: bool = False  # true if to use compiled code where there is some
    work: TileWork | None = None  # element-wise work that is done instead of these

    def part(self, rows: slice, cols: slice) -> EpilogueTile:
        """Return the same for a part of the tile."""
        bias = None if self.bias is None else self.bias[cols if self.per == "column" else rows]
        work = None if self.work is None else self.work.part(rows, cols)
        return replace(self, result=self.result[rows, cols], bias=bias, work=work)

    @property
    def T(self) -> EpilogueTile:
        per = {"column": "row", "row": "column", None: None}[self.per]
        return replace(self, result=self.result.T, per=per, work=None if self.work is None else self.work.T)

    def bound(self, c: NDArray[Any]) -> Callable[[], None]:
        """Return the call that closes the tile summed in `c`; if `result` is another array, `c` is then undefined.

        Compiles here, and not in the first call.
        """
        if abs(c.strides[0]) < abs(c.strides[1]):
            return self.T.bound(c.T)
        is_apart = not _is_same(self.result, c)
        if not (self.changes or is_apart):
            return _nothing
        if not self.changes:
            return partial(cast, c, self.result)
        whole = self._compiled(c)
        if whole is None:
            return partial(self._by_numpy, c, is_apart)
        if not is_apart:
            return whole
        steps: list[Callable[[], None]] = []
        for at in pieces(c, max(4 * STEP_BYTES, c.nbytes // MOST_STEPS)):
            part = self.part(*at)
            step = part._compiled(c[at])
            assert step is not None  # as for the whole
            steps += [step, partial(cast, c[at], part.result)]
        return partial(run_all, steps)

    def _by_numpy(self, c: NDArray[Any], is_apart: bool) -> None:
        """Close the tile in pieces that stay in the cache from pass to pass."""
        for at in pieces(c, STEP_BYTES):
            part = self.part(*at)
            if part.work is not None:
                part.work(c[at])
            else:
                activate(c[at], part._broadcast(), self.activation)
            if is_apart:
                cast(c[at], part.result)

    @property
    def changes(self) -> bool:
        return self.bias is not None or self.activation is not None or self.work is not None

    def _compiled(self, c: NDArray[Any]) -> Callable[[], None] | None:
        if not self.compiles or self.work is not None:
            return None
        return bind_compiled(c, self.bias, self.per, self.activation)

    def _broadcast(self) -> NDArray[Any] | None:
        return self.bias[:, None] if self.bias is not None and self.per == "row" else self.bias


def run_all(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def blocks(c: NDArray[Any]) -> list[tuple[slice, slice]]:
    """Return the parts of `c` whose epilogue follows their product at once, few enough not to slow the product."""
    if abs(c.strides[0]) < abs(c.strides[1]):
        return [(rows, cols) for cols, rows in blocks(c.T)]
    return list(pieces(c, BLOCK_BYTES, BLOCK_LEAST))


def _nothing() -> None:
    pass


def _is_same(x: NDArray[Any], y: NDArray[Any]) -> bool:
    return x is y or (
        x.dtype == y.dtype and x.shape == y.shape and x.strides == y.strides and x.ctypes.data == y.ctypes.data
    )
