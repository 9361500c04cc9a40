"""One kind of product of tensors and its gradients: plans that are made when first wanted, and kept."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rma_mm.errors import ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.products.make_plan import make_plan
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.torch.tensors import array_of


@dataclass(frozen=True)
class Asked:
    """What is asked of y = activation(x @ w + bias), apart from its tensors."""

    x_layout: Layout
    w_layout: Layout
    layout: Layout | None = None
    """Of y; None as the plan chooses."""
    transpose_w: bool = False
    """Whether w is given as (n, k)."""
    has_bias: bool = False
    activation: str | None = None
    keeps_sums: bool = False
    """Whether what the activation is applied to is kept: then the epilogue does not apply it."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # it is looked up with every product

    @property
    def facts(self) -> dict[str, object]:
        """What all ranks must have asked alike."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


def gradient_layout(layout: Layout) -> Layout:
    """Where the gradient of a matrix lies: with it; that of a summand is that of the sum, the same for each."""
    return replace(layout, partial=())


class TorchProduct:
    """y = activation(x @ w + bias) of one shape, element type and placement, with its gradients."""

    def __init__(self, mesh: Mesh, asked: Asked, x: Shape, w: Shape) -> None:
        """x, w: the shapes of the matrices. Raises ShapeError. Collective."""
        self.mesh, self.asked, self.shapes = mesh, asked, (x, w)
        (self.m, k), (inner, n) = x, (w[::-1] if asked.transpose_w else w)
        if k != inner:
            turned = " and transposed" * asked.transpose_w
            raise ShapeError(f"shapes: x is {x}, w is {w}{turned}; the inner dimensions {k} and {inner} must be equal")
        self.n = n
        self.serial = mesh.next_serial()
        self.plans: dict[tuple[object, ...], Plan] = {}
        """By what they compute, and whether node-mates can read their operands in place."""
        self.y_layout = asked.layout
        """Where y lies, once the first plan has decided that."""
        self.ones: DistMatrix | None = None
        """(m, 1), placed as the rows of y: what sums them up."""

    def plan(self, what: str, a: DistMatrix, b: DistMatrix) -> Plan:
        """The plan for "y" of x and w, or for the gradient of "x", "w" or "bias". Collective."""
        key = (what, a.in_place, b.in_place)
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = make_plan(a, b, self.mesh, **self._options(what, a.dtype))
            if what == "y":
                self.y_layout = found.layouts["C"]
        return found

    def _options(self, what: str, dtype: np.dtype[Any]) -> dict[str, Any]:
        """What each product is, of the operands that callers pass.

        y = x w, dx = dy w*, dw = x* dy (its transposed is dyᵀ x̄), dbias = 1ᵀ dy; * is for conjugate and transposed.
        """
        asked, conjugate = self.asked, dtype.kind == "c"
        if what == "y":
            epilogue = self._epilogue(dtype)
            return {"transpose_b": asked.transpose_w, "layout": self.y_layout, "epilogue": epilogue}
        if what == "x":
            layout = gradient_layout(asked.x_layout)
            return {"transpose_b": not asked.transpose_w, "conjugate_b": conjugate, "layout": layout}
        if what == "w":
            conjugated = "conjugate_b" if asked.transpose_w else "conjugate_a"
            return {"transpose_a": True, conjugated: conjugate, "layout": gradient_layout(asked.w_layout)}
        assert self.y_layout is not None
        return {"transpose_a": True, "layout": replace(self.y_layout, splits=((), self.y_layout.splits[1]))}

    def _epilogue(self, dtype: np.dtype[Any]) -> Epilogue | None:
        """With a bias that is put in before each product."""
        activation = None if self.asked.keeps_sums else self.asked.activation
        bias = np.zeros(self.n, dtype) if self.asked.has_bias else None
        if bias is None and activation is None:
            return None
        return Epilogue(bias, None if bias is None else "column", activation)

    # -- computing --------------------------------------------------------------------------------

    def y(self, x: DistMatrix, w: DistMatrix, bias: torch.Tensor | None) -> DistMatrix:
        """The product. Collective."""
        plan = self.plan("y", x, w)
        if bias is not None:
            self._put(plan, bias)
        return self._executed(plan, x, w)

    def dx(self, dy: DistMatrix, w: DistMatrix) -> DistMatrix:
        """The gradient of x. Collective."""
        return self._executed(self.plan("x", dy, w), dy, w)

    def dw(self, dy: DistMatrix, x: DistMatrix) -> DistMatrix:
        """The gradient of w, as w is given. Collective."""
        a, b = (dy, x) if self.asked.transpose_w else (x, dy)
        return self._executed(self.plan("w", a, b), a, b)

    def dbias(self, dy: DistMatrix) -> DistMatrix:
        """The gradient of the bias, (1, n). Collective."""
        if self.ones is None:
            layout = replace(dy.layout, splits=(dy.layout.splits[0], ()))
            self.ones = DistMatrix.allocated(self.mesh, (self.m, 1), dy.dtype, layout)
            self.ones.tile[...] = 1
        return self._executed(self.plan("bias", self.ones, dy), self.ones, dy)

    def _executed(self, plan: Plan, a: DistMatrix, b: DistMatrix) -> DistMatrix:
        """The plan's product in new memory, which its tensor is going to hold."""
        return plan.execute(a, b, DistMatrix.allocated(self.mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"]))

    def _put(self, plan: Plan, bias: torch.Tensor) -> None:
        """Let the plan add this rank's part of the bias; where products are checked, all of it (collective then)."""
        at, values = self.columns(self.mesh.rank), array_of(bias)
        plan.set_bias(values, at)
        if self.mesh.checks is not None:
            for others, part in self.mesh.comm.allgather((at, values)):
                plan.set_bias(part, others)

    def columns(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The columns of y that a rank holds, which are its part of the bias."""
        assert self.y_layout is not None
        return self.y_layout.region((self.m, self.n), self.mesh.shape, rank)[1].indices

    def close(self) -> None:
        """Give the plans' memory back, once all ranks have. Local."""
        for plan in self.plans.values():
            plan.close()
        self.plans.clear()
        self.ones = None
