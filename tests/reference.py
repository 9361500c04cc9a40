"""Plain helpers of the tests: matrices cut into tiles and put together again, the product itself, kept schedules.

Everything is small whole numbers in float64, so that every order of summation gives the same result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.proof import conclude
from rma_mm.schedule.verify.proof import nothing as no_part
from rma_mm.schedule.verify.rank_evidence import evidence

Matrix = NDArray[np.float64]


def whole_numbers(rng: np.random.Generator, shape: tuple[int, int]) -> Matrix:
    """A matrix of whole numbers from −4 to 4."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def distribute(x: Matrix, layout: Layout, mesh: MeshShape, rng: np.random.Generator) -> list[Matrix]:
    """The local array of every rank; of a partial matrix, random summands that add up to `x`."""
    count = prod(mesh.axis_size(axis) for axis in layout.partial)
    summands = [whole_numbers(rng, x.shape) for _ in range(count - 1)]
    summands.append(x - sum(summands))
    tiles = []
    for rank in mesh.ranks:
        summand = summands[_number(layout.partial, mesh, rank)]
        tiles.append(summand[_grid(layout, x.shape, mesh, rank)].copy())
    return tiles


def collect(tiles: list[Matrix], layout: Layout, mesh: MeshShape, shape: tuple[int, int]) -> Matrix:
    """The matrix that the tiles make up. Raises AssertionError where replicas differ or an element is missing."""
    replicas: dict[int, Matrix] = {}
    held: dict[int, NDArray[np.int64]] = {}
    for rank in mesh.ranks:
        replica = _number(layout.replicated_axes(mesh), mesh, rank)
        grid = _grid(layout, shape, mesh, rank)
        replicas.setdefault(replica, np.zeros(shape))[grid] += tiles[rank]
        held.setdefault(replica, np.zeros(shape, np.int64))[grid] += 1
    summands = prod(mesh.axis_size(axis) for axis in layout.partial)
    first = replicas[0]
    for replica, matrix in replicas.items():
        assert (held[replica] == summands).all(), f"replica {replica} of {layout} misses elements, or holds some twice"
        assert np.array_equal(matrix, first, equal_nan=True), f"replica {replica} differs from the first"
    return first


def nothing(layout: Layout, mesh: MeshShape, shape: tuple[int, int]) -> list[Matrix]:
    """Local arrays that must be overwritten before they are read: NaN throughout."""
    return [np.full(layout.region(shape, mesh, rank).shape, np.nan) for rank in mesh.ranks]


def expected(
    a: Matrix, b: Matrix, c: Matrix | None = None, alpha: float = 1, beta: float = 0, transposed: str = ""
) -> Matrix:
    """alpha · op(A) @ op(B) + beta · C, where `transposed` names the operands stored transposed."""
    left = a.T if "A" in transposed else a
    right = b.T if "B" in transposed else b
    product = alpha * (left @ right)
    return product if c is None or beta == 0 else product + beta * c


def kept(schedule: Schedule) -> Schedule:
    """The same schedule, with every rank's operations made once: who verifies and who interprets both want them all."""
    return replace(schedule, program=cache(schedule.program))


def prove(schedule: Schedule) -> None:
    """Conclude from what every rank brings, and one rank without a part, as ranks do when a plan is made."""
    brought = [*(evidence(schedule, rank) for rank in schedule.mesh.ranks), no_part()]
    sums = np.array([each.sums for each in brought], np.uint64).sum(axis=0)
    conclude(schedule, sums.tolist(), np.array([each.latest for each in brought]).max(axis=0).tolist())


def _number(axes: tuple[str, ...], mesh: MeshShape, rank: int) -> int:
    """The rank's combined coordinate along `axes`."""
    coords, number = mesh.coords(rank), 0
    for axis in axes:
        number = number * mesh.axis_size(axis) + coords[axis]
    return number


def _grid(layout: Layout, shape: tuple[int, int], mesh: MeshShape, rank: int) -> tuple[NDArray[np.int64], ...]:
    """What the rank holds of a matrix of `shape`, as a NumPy index."""
    return np.ix_(*(span.indices for span in layout.region(shape, mesh, rank)))
