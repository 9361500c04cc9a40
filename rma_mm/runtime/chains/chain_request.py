"""A chain as it was asked for, checked: its steps, its matrices, and the products among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any

import numpy as np

from rma_mm.algorithms import find_algorithm
from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import as_dtype, parse_dtype, result_dtype
from rma_mm.errors import DtypeError, LayoutError, OptionError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.pointwise import Fused
from rma_mm.policy.planner.chain_graph import Graph
from rma_mm.policy.planner.chain_steps import Step, requested_results, steps_of
from rma_mm.policy.planner.chain_text import graph_of
from rma_mm.runtime.execution.operands import Operand, Operands, ProductOptions
from rma_mm.runtime.matrices.arguments import checked_shape, placed
from rma_mm.runtime.matrices.array import DistArray
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.make_plan import operand_of, operands_of
from rma_mm.runtime.ranks.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain that was asked for, checked."""

    graph: Graph
    steps: tuple[Step, ...]
    matrices: dict[str, Operand]
    """Inputs, then results, in the order of the steps; with their placements as far as those are given."""
    inputs: tuple[str, ...]  # those that some step reads
    spare: tuple[str, ...]  # those that only steps read whose results nobody wants
    outputs: tuple[str, ...]
    products: dict[int, Operands]  # A, B and C of every step that multiplies
    options: ProductOptions  # what products have in common

    @property
    def input_layouts(self) -> dict[str, Layout]:
        return self._placed(self.inputs)

    @property
    def result_layouts(self) -> dict[str, Layout]:
        return self._placed([step.result for step in self.steps])

    def _placed(self, names: Collection[str]) -> dict[str, Layout]:
        found = {name: self.matrices[name].layout for name in names}
        return {name: layout for name, layout in found.items() if layout is not None}

    @classmethod
    def of(
        cls, mesh: Mesh, steps: str | Sequence[str], inputs: Mapping[str, object], outputs: Sequence[str] | None,
        only: Sequence[str] | None, layouts: Mapping[str, str | Layout], options: Mapping[str, Any],
    ) -> Chain:
        """Return the chain of these arguments. Local; raises as `plan_chain` does."""
        common = ProductOptions(**options).normalised()
        if common.algorithm != "auto":
            find_algorithm(common.algorithm)
        if not isinstance(layouts, Mapping):
            raise OptionError(f"layouts: got {layouts!r}; must be a dict of placements by the names of matrices")
        compute = None if common.compute_dtype is None else parse_dtype(common.compute_dtype)
        graph = Graph(partial(result_dtype, compute=compute))
        numbers = {name: _number(x) for name, x in inputs.items() if _is_number(x)}
        given = {name: _input(name, x, mesh, layouts.get(name)) for name, x in inputs.items() if name not in numbers}
        for name, x in given.items():
            graph.input(name, x.shape, x.dtype)
        read = graph_of(steps, graph, numbers)
        for name in layouts:
            if name not in (*given, *graph.results):
                raise OptionError(f"layouts: got {name!r}; there are {', '.join((*given, *graph.results))}")
        names = requested_results(graph, read, outputs, only)
        kept = {*names, *graph.needed_for(names, layouts)}
        found, nodes = steps_of(graph, kept, fuses=not common.check and mesh.checks is None)
        used = {each.name for step in found for each in step.reads}
        matrices, products = {name: x for name, x in given.items() if name in used}, {}
        for number, step in enumerate(found):
            node, layout = graph.nodes[nodes[step.result]], layouts.get(step.result)
            if step.is_product:
                products[number] = _product(mesh, step, matrices, layout, common)
            place = None if layout is None else placed(layout, node.shape, mesh)
            if place is not None and place.partial and not step.is_product:
                raise LayoutError(
                    f"layouts: got {place} for {step.result}; element-wise steps cannot make partial sums"
                )
            matrices[step.result] = products[number].c if step.is_product else Operand(node.shape, node.dtype, place)
        ins = tuple(name for name in given if name in used)
        spare = tuple(name for name in inputs if name not in used)
        return cls(graph, found, matrices, ins, spare, tuple(names), products, common)


def _product(
    mesh: Mesh, step: Step, matrices: Mapping[str, Operand], layout: str | Layout | None, common: ProductOptions
) -> Operands:
    """A, B and C of a step that multiplies."""
    a, b = step.factors
    fused = None if step.work is None else Fused(work=step.work)
    options = replace(
        common, transpose_a=a.transposed, transpose_b=b.transposed, conjugate_a=a.conjugated, conjugate_b=b.conjugated,
        epilogue=fused,
    )
    return operands_of(matrices[a.name], matrices[b.name], mesh, layout, options)


def as_matrix_on(mesh: Mesh, x: Any, layout: Layout | None) -> Any:
    """Return a vector as a matrix of one row, placed by `layout`; anything else as it is. Collective."""
    if isinstance(x, np.ndarray) and x.ndim == 1:
        return DistMatrix.from_numpy(x[None], mesh, layout)
    if isinstance(x, DistArray) and x.ndim == 1:
        return x.folded if layout in (None, x.folded.layout) else x.folded.redistribute(layout)
    return x


def _as_row(shape: Any) -> Any:
    """Return the shape of a vector as that of a matrix of one row, by NumPy's rule for broadcasting."""
    return (1, *shape) if isinstance(shape, tuple) and len(shape) == 1 else shape


def _is_number(x: object) -> bool:
    return isinstance(x, Number | np.generic) and not isinstance(x, bool | np.bool_)


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


def _input(name: str, x: object, mesh: Mesh, layout: str | Layout | None) -> Operand:
    """Return an input as an operand, placed where that is given. Raises what `plan_chain` does."""
    if isinstance(x, DistArray) and x.ndim == 1:
        x = x.folded
    elif isinstance(x, np.ndarray) and x.ndim == 1:
        x = x.shape, x.dtype
    if isinstance(x, tuple) and len(x) == 2:
        try:
            x = Operand(checked_shape(_as_row(x[0])), as_dtype(x[1]))
        except (ShapeError, DtypeError) as error:
            raise type(error)(f"{name}: {error}") from None
    if not isinstance(x, DistMatrix | Operand):
        raise OptionError(
            f"{name}: got {type(x).__name__}; pass a DistMatrix, (shape, dtype) of a matrix that is to be placed, or a "
            f"number"
        )
    operand = operand_of(name, x, mesh)
    if layout is None:
        return operand
    if isinstance(x, DistMatrix):
        raise LayoutError(f"layouts: got {layout} for {name}, which lies as {x.layout}; redistribute it, or leave this")
    return replace(operand, layout=placed(layout, operand.shape, mesh))
