"""Products with vectors, by NumPy's rule: a row from the left, a column from the right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rma_mm.errors import LayoutError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.matrices.arguments import default_split, placed
from rma_mm.runtime.matrices.array import DistArray
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh


def dims_of(x: Any) -> int:
    """Return the number of dimensions of an operand; 2 of what is no array, which the product refuses."""
    try:
        return len(x.shape) if hasattr(x, "shape") else np.ndim(x)
    except ValueError:
        return 2


def product_of_vectors(matmul: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Return a product of which an operand is a vector. Collective.

    Vectors are kept as matrices of one row. So D @ v is multiplied as v @ Dᵀ, and its result is a row, too.

    Parameters
    ----------
    matmul : callable
        `matmul`, for matrices.
    arguments : dict
        All arguments of `matmul` by name.

    Returns
    -------
    DistArray or scalar
        A vector; of two vectors a number, on every rank.
    """
    options = dict(arguments)
    A, B = options.pop("A"), options.pop("B")
    mesh = options["mesh"]
    is_left, is_right = dims_of(A) == 1, dims_of(B) == 1
    with agreed(mesh.comm, "matmul", layout=options["layout"]):
        if max(dims_of(A), dims_of(B)) > 2:
            raise ShapeError(
                f"shapes: A is {np.shape(A)}, B is {np.shape(B)}; a batch times a vector is written as einsum, as "
                f"einsum('bmk,k->bm', A, B)"
            )
        _check_lengths(A, B, options["transpose_a"], options["transpose_b"])
        if not is_left:  # the transposed product
            A, B = B, A
            options["transpose_b"] = not options["transpose_a"]
            options["conjugate_a"], options["conjugate_b"] = options["conjugate_b"], options["conjugate_a"]
            if options["epilogue"] is not None and options["epilogue"].bias is not None:
                options["epilogue"] = replace(options["epilogue"], per="column")
        options["transpose_a"] = False
        out, place = options["out"], None
        for name in ("out", "c"):
            options[name] = _row_of(name, options[name])
        if is_left and is_right:
            options["transpose_b"] = True
        elif options["out"] is None and options["c"] is None:
            extent = np.shape(B)[0 if options["transpose_b"] else 1]
            place = _place(options["layout"], extent, mesh)
            options["layout"] = place.folded((extent,))
    made = matmul(_row(A), _row(B) if dims_of(B) == 1 else B, **options)
    if is_left and is_right:
        return made.to_numpy()[0, 0]
    if out is not None:
        return out
    return DistArray(made, made.shape[1:], place if place is not None else arguments["c"].layout)


def _check_lengths(A: Any, B: Any, transpose_a: bool, transpose_b: bool) -> None:
    a, b = np.shape(A), np.shape(B)
    k1, k2 = a[-1] if len(a) == 1 or not transpose_a else a[0], b[-1] if len(b) == 2 and transpose_b else b[0]
    if k1 != k2:
        raise ShapeError(f"shapes: A is {a}, B is {b}; the inner dimensions {k1} and {k2} must be equal")


def _place(layout: str | Layout | None, extent: int, mesh: Mesh) -> Layout:
    return default_split(mesh, (extent,)) if layout is None else placed(layout, (extent,), mesh)


def _row(x: Any) -> Any:
    """Return a vector as a matrix of one row, on the same memory."""
    return x.folded if isinstance(x, DistArray) else np.asarray(x)[None]


def _row_of(name: str, x: Any) -> Any:
    if x is None:
        return None
    if not isinstance(x, DistArray) or x.ndim != 1:
        raise LayoutError(f"{name}: got {x!r}; the product is a vector: pass a DistArray of one dimension")
    return x.folded
