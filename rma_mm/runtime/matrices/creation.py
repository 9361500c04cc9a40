"""Matrices made from a rule: zeros, ones, the identity, random elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import as_dtype
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.files.generated import generated
from rma_mm.runtime.matrices.array import DistArray, kind_of
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized

Made = DistMatrix | DistArray


@serialized
def zeros(
    shape: int | tuple[int, ...], mesh: Mesh | None = None, layout: str | Layout | None = None,
    dtype: DTypeLike = np.float64,
) -> Made:
    """Make a matrix, or an array of another dimension, of zeros.

    Collective.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of the whole.
    mesh : Mesh, optional
        The ranks that hold it; the default mesh if not given.
    layout : str or Layout, optional
        Placement; blocks by default.
    dtype : dtype
        Element type; float64 by default.

    Returns
    -------
    DistMatrix or DistArray
        A DistMatrix if the shape has two dimensions.

    Raises
    ------
    ShapeError, LayoutError, DtypeError, MeshError
        If the arguments do not fit.
    """
    return _filled(0, shape, mesh, layout, dtype)


@serialized
def ones(
    shape: int | tuple[int, ...], mesh: Mesh | None = None, layout: str | Layout | None = None,
    dtype: DTypeLike = np.float64,
) -> Made:
    """Make a matrix, or an array of another dimension, of ones. Collective.

    Parameters
    ----------
    shape, mesh, layout, dtype
        As of `zeros`.

    Returns
    -------
    DistMatrix or DistArray
        A DistMatrix if the shape has two dimensions.
    """
    return _filled(1, shape, mesh, layout, dtype)


@serialized
def eye(
    n: int, m: Any = None, mesh: Mesh | None = None, layout: str | Layout | None = None,
    dtype: DTypeLike = np.float64,
) -> DistMatrix:
    """Make a matrix with ones on its diagonal and zeros elsewhere. Collective.

    Parameters
    ----------
    n : int
        Rows.
    m : int, optional
        Columns; n by default.
    mesh, layout, dtype
        As of `zeros`.

    Returns
    -------
    DistMatrix
        The matrix.
    """
    if isinstance(m, Mesh):  # eye(n, mesh)
        mesh, m = m, None
    return DistMatrix.from_function((n, n if m is None else m), lambda i, j: i == j, mesh, layout, dtype)


@serialized
def random(
    shape: int | tuple[int, ...], mesh: Mesh | None = None, layout: str | Layout | None = None,
    dtype: DTypeLike = np.float64, seed: int = 0,
) -> Made:
    """Make a matrix, or an array of another dimension, of random elements.

    Collective. The elements depend on the seed alone, not on the mesh or the placement.

    Parameters
    ----------
    shape, mesh, layout, dtype
        As of `zeros`.
    seed : int
        Seed of the elements (default 0).

    Returns
    -------
    DistMatrix or DistArray
        Floats are uniform in [0, 1), complex numbers in both parts. Integers are from -8 to 8, unsigned ones from 0 to
        16, bool is either.
    """
    extents, element = _shape(shape), as_dtype(dtype)
    draw = generated(seed, "random", element)

    def elements(*indices: NDArray[np.int64]) -> NDArray[Any]:
        row: Any = np.zeros((1, 1), np.int64)
        for index, extent in zip(indices[:-1], extents[:-1], strict=True):
            row = row * extent + index
        drawn: NDArray[Any] = draw(row.reshape(-1, 1), indices[-1].reshape(1, -1))
        drawn = drawn.reshape(np.broadcast_shapes(*(index.shape for index in indices)))
        if element.kind in "biu":
            return drawn
        one = element.type(1 + 1j) if element.kind == "c" else element.type(1)
        scaled: NDArray[Any] = (drawn + one) / element.type(2)
        return scaled

    return kind_of(extents).from_function(extents, elements, mesh, layout, element)  # type: ignore[no-any-return]


def _filled(value: int, shape: Any, mesh: Mesh | None, layout: str | Layout | None, dtype: DTypeLike) -> Made:
    extents = _shape(shape)
    made: Made = kind_of(extents).empty(extents, mesh, layout, dtype)
    made.tile[...] = value
    if value:
        made.keep_first_summand()
    return made


def _shape(shape: Any) -> Any:
    """Return a shape as a tuple, an int as one of one dimension; others are refused when ranks have agreed."""
    return (shape,) if isinstance(shape, int | np.integer) else shape
