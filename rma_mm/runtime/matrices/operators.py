"""NumPy's operators and functions on distributed matrices: each rank computes on its own tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, Self, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import as_dtype, check_dtype
from rma_mm.errors import DtypeError, LayoutError, MeshError, OptionError, ShapeError, quoted
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.matrices.arguments import checksum
from rma_mm.runtime.matrices.indexing import index_of, read
from rma_mm.runtime.matrices.reductions import reduced_over
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized

Ufunc = Callable[..., Any]
LINEAR = ("positive", "negative", "conjugate", "add", "subtract")
"""Functions that may be applied to the summands of matrices that are placed as partial sums."""
Axis = int | tuple[int, ...] | None


class Multiplicand(NDArrayOperatorsMixin):
    """Operators and methods that matrices share with NumPy's arrays.

    All are collective. Operands are matrices of the same shape and placement, numbers, and NumPy arrays that are equal
    on every rank and broadcast to the matrix's shape.
    """

    mesh: Mesh
    shape: Any
    dtype: np.dtype[Any]
    layout: Layout
    tile: Any

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        raise NotImplementedError

    @property
    def facts(self) -> tuple[object, ...]:
        """Return the facts that all ranks must agree on when they name this matrix."""
        raise NotImplementedError

    # -- products ---------------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        from rma_mm.runtime.products.matmul import matmul

        return matmul(self, other, self.mesh) if isinstance(other, Multiplicand | np.ndarray) else NotImplemented

    def __rmatmul__(self, other: Any) -> Any:
        from rma_mm.runtime.products.matmul import matmul

        return matmul(other, self, self.mesh) if isinstance(other, np.ndarray) else NotImplemented

    # -- element by element -----------------------------------------------------------------------

    @serialized
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if not all(isinstance(x, Multiplicand | np.ndarray | Number | np.generic) for x in inputs):
            return NotImplemented
        if ufunc is np.matmul and method == "__call__" and out is None and not options:
            a, b = inputs
            return a @ b if isinstance(a, Multiplicand) else b.__rmatmul__(a)
        return _applied(self.mesh, ufunc, method, inputs, out, options)

    def __eq__(self, other: object) -> Any:
        comparable = isinstance(other, Multiplicand | np.ndarray | Number)
        return np.equal(self, other) if comparable else NotImplemented  # type: ignore[call-overload]

    def __ne__(self, other: object) -> Any:
        comparable = isinstance(other, Multiplicand | np.ndarray | Number)
        return np.not_equal(self, other) if comparable else NotImplemented  # type: ignore[call-overload]

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.size != 1:
            raise OptionError(
                f"matrix of {self.shape}: it is neither true nor false as a whole; use .all() or .any()"
            )
        return bool(self.sum())

    @serialized
    def astype(self, dtype: DTypeLike) -> Self:
        """Return a copy with elements of another type, cast as NumPy casts.

        Collective.

        Parameters
        ----------
        dtype : dtype
            The new element type.

        Returns
        -------
        DistMatrix or DistArray
            A new matrix with the same placement; partial sums are summed first.

        Raises
        ------
        DtypeError
            If the type is not supported.
        """
        with agreed(self.mesh.comm, "astype", matrix=self.facts, dtype=dtype):
            element = as_dtype(dtype)
        x = self.summed()
        made = type(x).allocated(x.mesh, x.shape, element, x.layout)
        with np.errstate(invalid="ignore", over="ignore"):
            made.tile[...] = x.tile.astype(element)
        return made

    @serialized
    def copy(self) -> Self:
        """Return a copy with the same placement. Collective."""
        with agreed(self.mesh.comm, "copy", matrix=self.facts):
            pass
        made = type(self).allocated(self.mesh, self.shape, self.dtype, self.layout)
        made.tile[...] = self.tile
        return made

    def conj(self) -> Self:
        """Return the complex conjugate as a new matrix. Collective."""
        made: Any = np.conjugate(self)
        return cast(Self, made)

    @property
    def H(self) -> Self:
        """The conjugate transpose: of a complex matrix a new matrix (collective), else `T`."""
        return self.conj().T if self.dtype.kind == "c" else self.T

    @property
    def T(self) -> Self:
        """The transposed matrix, on the same memory."""
        raise NotImplementedError

    # -- what it is -------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    # -- to numbers and arrays --------------------------------------------------------------------

    @serialized
    def __getitem__(self, index: Any) -> Any:
        """Return a part of the matrix as a NumPy array on this rank; a NumPy scalar if `index` has only integers.

        Collective. Each rank may read a part of its own.

        Parameters
        ----------
        index : int, slice, Ellipsis, or a tuple of them
            As for a NumPy array.

        Returns
        -------
        ndarray or scalar
            The elements, as a copy.

        Raises
        ------
        IndexRangeError
            If an integer is out of range; it is an IndexError, too.
        OptionError
            If the index is of another kind.
        """
        with agreed(self.mesh.comm, "read of a part", matrix=self.facts):
            wanted = index_of(index, self.shape)
        return read(self.summed(), wanted)

    def summed(self) -> Self:
        """Return the matrix without partial sums: itself if it has none. Collective."""
        return self.redistribute(self.layout.single(self.mesh.grid)) if self.layout.partial else self

    def redistribute(self, layout: str | Layout) -> Self:
        """Return the same elements placed by `layout`. Collective. Raises LayoutError."""
        raise NotImplementedError

    @classmethod
    def allocated(cls, mesh: Mesh, shape: Any, dtype: np.dtype[Any], layout: Layout) -> Self:
        """Return one on new memory of the arena, everything agreed already. Collective."""
        raise NotImplementedError

    def sum(self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None) -> Any:
        """Return the sum of elements over some dimensions, or over all, as NumPy does.

        Collective.

        Parameters
        ----------
        axis : int or tuple of int, optional
            Dimensions to sum over; all by default.
        dtype : dtype, optional
            Type of the sum. By default NumPy's: int64 for integers and bool, else the matrix's own type. Sums of floats
            are formed in float64 or complex128.
        out : None
            For NumPy, which passes it.

        Returns
        -------
        ndarray or scalar
            Equal on every rank.

        Raises
        ------
        OptionError
            If an axis is out of range.
        """
        return reduced_over(self, np.add, axis, dtype, out)

    def mean(self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None) -> Any:
        """Return the arithmetic mean over some dimensions, or over all. Collective.

        Parameters
        ----------
        axis, dtype, out
            As of `sum`; the mean of integers is float64.

        Returns
        -------
        ndarray or scalar
            Equal on every rank.
        """
        floats = dtype or (np.float64 if self.dtype.kind in "biu" else self.dtype)
        total = self.sum(axis, np.complex128 if np.dtype(floats).kind == "c" else np.float64, out)
        count = self.size // max(1, np.size(total))
        return (total / count).astype(floats)

    def max(self, axis: Axis = None, out: None = None) -> Any:
        """Return the largest element along some dimensions, or of all; NaN if there is one. Collective.

        Parameters
        ----------
        axis, out
            As of `sum`.

        Returns
        -------
        ndarray or scalar
            Equal on every rank.

        Raises
        ------
        ShapeError
            If there is no element.
        """
        return reduced_over(self, np.maximum, axis, None, out)

    def min(self, axis: Axis = None, out: None = None) -> Any:
        """Return the smallest element along some dimensions, or of all; NaN if there is one. Collective.

        Parameters
        ----------
        axis, out
            As of `sum`.

        Returns
        -------
        ndarray or scalar
            Equal on every rank.

        Raises
        ------
        ShapeError
            If there is no element.
        """
        return reduced_over(self, np.minimum, axis, None, out)

    def all(self, axis: Axis = None, out: None = None) -> Any:
        """Return True if no element is zero. Collective.

        Parameters
        ----------
        axis, out
            As of `sum`.

        Returns
        -------
        ndarray or bool
            Equal on every rank.
        """
        return reduced_over(self, np.logical_and, axis, np.bool_, out)

    def any(self, axis: Axis = None, out: None = None) -> Any:
        """Return True if an element is not zero. Collective.

        Parameters
        ----------
        axis, out
            As of `sum`.

        Returns
        -------
        ndarray or bool
            Equal on every rank.
        """
        return reduced_over(self, np.logical_or, axis, np.bool_, out)

    def norm(self) -> Any:
        """Return the Frobenius norm, √Σ|x|², formed in float64. Collective.

        Returns
        -------
        float
            Equal on every rank.
        """
        return np.float64(np.sqrt(reduced_over(self, np.add, None, np.float64, None, square=True)))

    def keep_first_summand(self) -> None:
        """If the matrix is partial and every rank has all of it, zero all summands except the first. Local."""
        at = self.layout.coords(self.mesh.grid, self.mesh.rank)
        if at is not None and any(at[axis] for axis in self.layout.partial):
            self.tile[...] = 0

    def __getattr__(self, name: str) -> Any:
        is_numpys = not name.startswith("_") and hasattr(np.ndarray, name)
        remedy = f"; gather the matrix first: to_numpy().{name}" * is_numpys
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{remedy}")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole matrix on a mesh of one rank; else raise OptionError, as gathering is collective."""
        if self.mesh.size > 1:
            raise OptionError(
                f"matrix of {self.shape} over {self.mesh.size} ranks: to gather it into an array is collective, which "
                f"NumPy does not know: all ranks call to_numpy(), or take tile, their part of it"
            )
        return np.array(self.tile, dtype=dtype, copy=copy)


def _applied(
    mesh: Mesh, ufunc: Any, method: str, inputs: Sequence[Any], out: tuple[Any, ...] | None, options: dict[str, Any]
) -> Any:
    """Return a function of NumPy's, applied to every element. Collective."""
    name = ufunc.__name__
    with agreed(mesh.comm, name) as facts:
        if method != "__call__" or ufunc.nout != 1 or ufunc.signature is not None or set(options) - {"dtype"}:
            raise OptionError(
                f"{name}: this form of it takes no distributed matrices; use their methods, or gather one by to_numpy()"
            )
        facts["operands"] = [_described(x) for x in inputs]
        _check_mesh(name, mesh, (*inputs, *(out or ())))
        if out is not None and out[0].layout.partial:
            raise LayoutError(f"{name}: got {out[0].layout}, partial sums, to change in place; call redistribute first")
    if name not in LINEAR or not all(isinstance(x, Multiplicand) for x in inputs):
        inputs = [x.summed() if isinstance(x, Multiplicand) else x for x in inputs]
    with agreed(mesh.comm, name):
        like = _common(name, [x for x in (*inputs, *(out or ())) if isinstance(x, Multiplicand)])
        local = [_local(name, x, like) for x in inputs]
        dtype = _result_dtype(ufunc, inputs, options)
    if out is None:
        made = type(like).allocated(mesh, like.shape, dtype, like.layout)
    else:
        (made,) = out
    with agreed(mesh.comm, name):
        try:
            ufunc(*local, out=made.tile, **options)
        except TypeError as error:
            raise DtypeError(f"{name}: {error}; use astype, or assign the result to a new name") from None
        except ValueError as error:  # negative powers of integers, or memory that is read-only
            raise OptionError(f"{name}: {error}") from None
    return made


def _described(x: Any) -> object:
    if isinstance(x, Multiplicand):
        return x.facts
    return repr(x) if np.ndim(x) == 0 else (x.dtype, x.shape, checksum(x.reshape(as_matrix(x.shape))))


def _check_mesh(name: str, mesh: Mesh, inputs: Sequence[Any]) -> None:
    for x in inputs:
        if isinstance(x, Multiplicand) and x.mesh is not mesh:
            raise MeshError(f"{name}: got a matrix on {x.mesh!r}; the other is on {mesh!r}; both must be on one mesh")


def _common(name: str, matrices: Sequence[Multiplicand]) -> Multiplicand:
    """Return the first of several matrices of equal shape and placement. Raises ShapeError, LayoutError."""
    first = matrices[0]
    for other in matrices[1:]:
        if other.shape != first.shape:
            raise ShapeError(f"{name}: got matrices of shape {first.shape} and {other.shape}; shapes must be equal")
        if other.layout != first.layout:
            raise LayoutError(
                f"{name}: got matrices placed as {first.layout} and {other.layout}; both must be placed alike: "
                f"use other.redistribute(first.layout)"
            )
    return first


def _local(name: str, x: Any, like: Multiplicand) -> Any:
    """Return what an operand holds of this rank's part of `like`. Raises ShapeError."""
    if isinstance(x, Multiplicand):
        return x.tile
    if np.ndim(x) == 0:
        return x
    try:
        return np.broadcast_to(x, like.shape)[like.region.selector()]
    except ValueError:
        raise ShapeError(
            f"{name}: got an array of shape {x.shape}; it must broadcast to the matrix's shape {like.shape}"
        ) from None


def _result_dtype(ufunc: Any, inputs: Sequence[Any], options: dict[str, Any]) -> np.dtype[Any]:
    """Return the element type of the result, by NumPy's rules. Raises DtypeError."""
    samples = [x if np.ndim(x) == 0 and not isinstance(x, Multiplicand) else np.ones(1, x.dtype) for x in inputs]
    try:
        with np.errstate(all="ignore"):
            dtype: np.dtype[Any] = ufunc(*samples, **options).dtype
    except (TypeError, ValueError, OverflowError) as error:
        raise DtypeError(f"{ufunc.__name__}: {error}; operands are {', '.join(map(_kind, inputs))}") from None
    return check_dtype(dtype, f"{ufunc.__name__}: the result's dtype")


def _kind(x: Any) -> str:
    return str(x.dtype) if hasattr(x, "dtype") else quoted(x)
