"""Products of matrices, one on the result of another, on placements that a chain finds for all of them together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.layout import Layout
from rma_mm.policy.planner.chain_search import Answer
from rma_mm.policy.planner.chain_steps import Step
from rma_mm.runtime.chains.chain_request import Chain
from rma_mm.runtime.chains.prices import Prices
from rma_mm.runtime.einsum.subscripts import Indices, Pair
from rma_mm.runtime.execution.operands import Operand, ProductOptions
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.matmul import matmul
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh

Matrix = DistMatrix | NDArray[Any]
OPTIONS = ("memory_limit", "compute_dtype", "kernel", "semiring")  # what the products have in common
KEPT = 64  # expressions whose placements are kept for a mesh
LARGE = 1 << 27  # multiply-adds from which products are placed together: to find out how takes up to a second, once


@dataclass(frozen=True, eq=False)
class PlacedProducts:
    """The products in order, and where each of them has its operands and its result."""

    steps: tuple[Step, ...]
    answer: Answer


class Placements:
    """Placements found for expressions on a mesh. All ranks keep and drop them alike.

    All ranks keep and forget alike.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[object, PlacedProducts | None] = OrderedDict()
        """None if no placements do for all of them. Oldest use first."""

    @classmethod
    def of(cls, mesh: Mesh) -> Placements:
        """Return the placements kept with `mesh`, which closes them."""
        found = mesh.kept.setdefault(cls, cls())
        assert isinstance(found, cls)
        return found

    def close(self) -> None:
        self.known.clear()


def options_of(options: ProductOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in OPTIONS}


def multiplied(
    mesh: Mesh, matrices: Mapping[int, Matrix], names: Mapping[int, Indices], pairs: Sequence[Pair],
    layout: Layout | None, options: ProductOptions,
) -> DistMatrix | None:
    """Return the last product of `pairs`; None if they are small, or a chain has no placements for all. Collective.

    matrices: operands by number, whose indices are `names`. layout: where the result is to be, if that matters.
    """
    extents = {name: extent for n, x in matrices.items() for name, extent in zip(names[n], x.shape, strict=True)}
    if sum(prod(extents[name] for name in (*pair.names, *pair.k)) for pair in pairs) < LARGE:
        return None
    placed = _kept(mesh, matrices, names, pairs, layout, options)
    if placed is None:
        return None
    there = {_name(n): {x.layout: x} for n, x in matrices.items() if isinstance(x, DistMatrix)}
    for n, x in matrices.items():
        if not isinstance(x, DistMatrix):
            place = placed.answer.start[_name(n)]
            there[_name(n)] = {place: DistMatrix.from_numpy(x, mesh, place)}
    for step, where in zip(placed.steps, placed.answer.steps, strict=True):
        for each in where.conversions:
            there[each.name][each.target] = there[each.name][each.source].redistribute(each.target)
        (a, b), (at_a, at_b, at_c) = step.factors, where.layouts
        left, right = there.pop(a.name)[at_a], there.pop(b.name)[at_b]
        made: DistMatrix = matmul(
            left, right, mesh, transpose_a=a.transposed, transpose_b=b.transposed, layout=at_c, **options_of(options)
        )
        there[step.result] = {at_c: made}
    return made


def _name(number: int) -> str:
    return f"X{number}"


def _kept(
    mesh: Mesh, matrices: Mapping[int, Matrix], names: Mapping[int, Indices], pairs: Sequence[Pair],
    layout: Layout | None, options: ProductOptions,
) -> PlacedProducts | None:
    """Return the placed products of these operands, found earlier or now. Collective."""
    texts, indices = [], dict(names)
    for n, pair in enumerate(pairs, len(names)):
        factors = (
            f"{_name(x)}{'' if indices[x] == wanted else '.T'}"
            for x, wanted in ((pair.a, (*pair.m, *pair.k)), (pair.b, (*pair.k, *pair.n)))
        )
        texts.append(f"{_name(n)} = {' @ '.join(factors)}")
        indices[n] = pair.names
    given = {
        _name(n): Operand(x.shape, x.dtype, *((x.layout, x.in_place) if isinstance(x, DistMatrix) else ()))
        for n, x in matrices.items()
    }
    key = (*texts, tuple(given.values()), layout, mesh.window_flavour, repr(options))
    found = Placements.of(mesh).known
    if key not in found:
        if len(found) >= KEPT:
            found.popitem(last=False)
        with agreed(mesh.comm, "einsum"):
            layouts = {} if layout is None else {_name(len(names) + len(pairs) - 1): layout}
            chain = Chain.of(mesh, texts, given, None, None, layouts, options_of(options))
        try:
            found[key] = PlacedProducts(chain.steps, Prices(mesh, chain).chosen(joint=True)[0])
        except AlgorithmError:  # the same on every rank
            found[key] = None
    found.move_to_end(key)
    return found[key]
