"""A random product of batches, on arrays anywhere, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench.trust.operands import elements
from bench.trust.wrong import expect
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.elements.semiring import SEMIRINGS

Array = NDArray[Any]

DTYPES = ("float32", "float64", "complex64", "float16", "bfloat16", "int8", "int64", "bool")
CUTS = ("", "", ":cyclic(2)", ":cyclic(1)")
"""How an axis may cut a dimension."""


@dataclass
class Batch:
    """A product of batches; shapes are those of the stored A, B and C."""

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    transposed: str
    conjugated: str
    dtype: str
    semiring: str
    alpha: int
    beta: int


def draw(rng: Random) -> Batch:
    """Batches of one to three leading dimensions, some of them 1 or missing."""
    leading = [rng.choice((0, 1, 2, 3, 5, 7)) for _ in range(rng.randint(1, 3))]
    m, n, k = (rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(3))
    transposed, cut = rng.choice(("", "A", "B", "AB")), rng.choice(("", "", "A", "B"))
    own = {x: tuple(1 if rng.random() < 0.2 else extent for extent in leading) for x in "AB"}
    if cut:
        own[cut] = own[cut][rng.randint(1, len(leading)) :]
    a = (*own["A"], *((k, m) if "A" in transposed else (m, k)))
    b = (*own["B"], *((n, k) if "B" in transposed else (k, n)))
    c = (*np.broadcast_shapes(*own.values()), m, n)
    dtype, semiring = rng.choice((*((name, "plus_times") for name in DTYPES), ("float32", "min_plus")))
    alpha = rng.choice((1, 1, 2)) if semiring == "plus_times" and dtype != "bool" else 1
    conjugated = rng.choice(("", "A", "AB")) if semiring == "plus_times" else ""
    return Batch((a, b, c), transposed, conjugated, dtype, semiring, alpha, rng.choice((0, 0, 1, alpha)))


def place(rng: Random, mesh: Mesh, shape: tuple[int, ...], spare: tuple[str, ...] = ("",)) -> str | None:
    """A placement of an array of that shape; what an axis that cuts none of it does is one of `spare`. Or none."""
    if rng.random() < 0.4:
        return None
    words, rest = ["None"] * len(shape), []
    for axis in rng.sample(mesh.grid.names, len(mesh.grid.names)):
        dim, does = rng.randrange(len(shape) + 1), rng.choice(spare)
        if dim < len(shape) and words[dim] == "None":
            words[dim] = f"'{axis}{rng.choice(CUTS)}'"
        elif does:
            rest.append(f"{axis}={does if does == 'sum' else rng.randrange(mesh.grid.axis_size(axis))}")
    return f"P({', '.join([*words, *rest])})"


def by_numpy(batch: Batch, a: Array, b: Array, c: Array) -> Array:
    """alpha · op(A) @ op(B) + beta · C."""
    a, b = (x.swapaxes(-1, -2) if name in batch.transposed else x for name, x in (("A", a), ("B", b)))
    a, b = (x.conj() if name in batch.conjugated else x for name, x in (("A", a), ("B", b)))
    if batch.semiring != "plus_times":
        ring = SEMIRINGS[batch.semiring]
        terms = ring.multiply(a[..., :, :, None], b[..., None, :, :])
        least = ring.add.reduce(terms, axis=-2, initial=ring.identity(a.dtype))
        return np.asarray(ring.add(least, c) if batch.beta else least)
    wide = np.float32 if c.dtype.itemsize == 2 and c.dtype.kind != "i" else c.dtype
    made = np.matmul(a.astype(wide), b.astype(wide))
    if c.dtype.kind == "b":
        return np.asarray(made | c if batch.beta else made)
    return np.asarray((batch.alpha * made + batch.beta * c.astype(wide)).astype(c.dtype))


def run(mesh: Mesh, rng: Random) -> None:
    """One product. Collective; raises Wrong where it is not NumPy's."""
    batch, values = draw(rng), np.random.default_rng(rng.getrandbits(32))
    a, b, c = (elements(values, shape, batch.dtype) for shape in batch.shapes)
    spare = ("", "pinned", "sum") if batch.semiring == "plus_times" and batch.dtype != "bool" else ("", "pinned")
    given = []
    for x in (a, b):
        layout = place(rng, mesh, x.shape, spare)
        kind = DistMatrix if x.ndim == 2 else DistArray
        given.append(x if layout is None else kind.from_numpy(x, mesh).redistribute(layout))
    layout = place(rng, mesh, c.shape, ("", "pinned"))
    out = DistArray.from_numpy(c, mesh, layout) if batch.beta or rng.random() < 0.5 else None
    flags = {f"transpose_{x.lower()}": x in batch.transposed for x in "AB"}
    flags |= {f"conjugate_{x.lower()}": x in batch.conjugated for x in "AB"}
    found = rma_mm.matmul(
        *given, mesh, out, alpha=batch.alpha, beta=batch.beta, layout=None if out is not None else layout,
        semiring=batch.semiring, **flags,
    ).to_numpy()
    expect(by_numpy(batch, a, b, c), found, f"{batch} into {layout}")
