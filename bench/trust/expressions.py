"""A random expression of `rma_mm.einsum`, on arrays and matrices anywhere, against NumPy."""

from __future__ import annotations

from functools import reduce
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench.trust.batches import place
from bench.trust.wrong import Wrong, expect
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.elements.semiring import SEMIRINGS, Semiring

Array = NDArray[Any]
Shapes = list[tuple[int, ...]]

LABELS = "abcde"
DTYPES = ("float64", "float32", "int64", "int8", "complex128", "bool")


def draw(rng: Random) -> tuple[str, Shapes]:
    """Subscripts of one to four operands, of which some dimensions are 1 where others are not, and their shapes."""
    count = rng.choice((1, 1, 2, 2, 2, 2, 3, 4))
    extents = {label: rng.choice((0, 1, 2, 3, 3, 4, 5)) for label in LABELS}
    lengths = (0, 1, 2, 2, 3, 3, 4) if count < 4 else (1, 2)
    terms = ["".join(rng.choice(LABELS) for _ in range(rng.choice(lengths))) for _ in range(count)]
    used = sorted(set("".join(terms)))
    text = ",".join(terms)
    if rng.random() < 0.75:
        text += "->" + "".join(rng.sample(used, rng.randint(0, min(len(used), 4))))
    shapes = []
    for term in terms:
        own = {label: extents[label] if rng.random() < 0.95 else 1 for label in LABELS}
        shapes.append(tuple(own[label] for label in term))
    return text, shapes


def spread(x: Array, mesh: Mesh, rng: Random) -> Any:
    """An operand, sometimes as an array, else in any placement of its own; a matrix sometimes transposed."""
    layout = place(rng, mesh, x.shape) if x.ndim else None
    if layout is None:
        return x
    if x.ndim == 2:
        is_turned = rng.random() < 0.3
        made = DistMatrix.from_numpy(x.T if is_turned else x, mesh, layout)
        return made.T if is_turned else made
    return DistArray.from_numpy(x, mesh, layout)


def by_definition(text: str, arrays: list[Array], ring: Semiring) -> Array:
    """⊕ over ⊗ of all operands, every index spread out."""
    left, _, output = text.partition("->")
    names = sorted(set(left) - {","})
    parts = []
    for term, x in zip(left.split(","), arrays, strict=True):
        own = "".join(sorted(set(term)))
        x = np.einsum(f"{term}->{own}", x)  # no index twice, in the order of `names`
        parts.append(x.reshape([x.shape[own.index(name)] if name in own else 1 for name in names]))
    whole = reduce(ring.multiply, parts)
    summed = tuple(n for n, name in enumerate(names) if name not in output)
    made = ring.add.reduce(whole, axis=summed, initial=ring.identity(arrays[0].dtype)) if summed else whole
    kept = [name for name in names if name in output]
    return np.transpose(made, [kept.index(name) for name in output])


def run(mesh: Mesh, rng: Random) -> None:
    """One expression. Collective; raises Wrong where the result is not NumPy's."""
    text, shapes = draw(rng)
    dtype, numbers = rng.choice(DTYPES), np.random.default_rng(rng.getrandbits(32))
    arrays = [numbers.integers(-2, 3, shape).astype(dtype) for shape in shapes]
    is_least = rng.random() < 0.15 and dtype == "float64" and "->" in text
    ring = SEMIRINGS["min_plus" if is_least else "plus_times"]
    expected = np.einsum(text, *arrays) if ring.is_arithmetic else by_definition(text, arrays, ring)
    found = rma_mm.einsum(text, *(spread(x, mesh, rng) for x in arrays), mesh=mesh, semiring=ring.name)
    said = f"{text} of {dtype} {shapes} by {ring.name}"
    if np.ndim(expected):
        if not isinstance(found, DistMatrix if expected.ndim == 2 else DistArray):
            raise Wrong(f"{said} is a {type(found).__name__}")
        found = found.to_numpy()
    expect(expected, found, said)
