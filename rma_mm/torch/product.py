"""One kind of product of tensors and its gradients: plans that are made when first wanted, and kept."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rma_mm.classes import dataclass
from rma_mm.errors import ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.products.make_plan import make_plan
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.agreement import AgreedVotes
from rma_mm.torch.kept import KeptTensors
from rma_mm.torch.pool import ResultPool
from rma_mm.torch.tensors import array_of


@dataclass(frozen=True)
class LinearRequest:
    """A request for y = activation(x @ w + bias), without its tensors."""

    x_layout: Layout
    w_layout: Layout
    layout: Layout | None = None  # of y; None as the plan chooses
    transpose_w: bool = False  # true if w is given as (n, k)
    has_bias: bool = False
    activation: str | None = None
    keeps_sums: bool = False  # true if what the activation is applied to is kept: then the epilogue does not apply it

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # it is looked up with every product

    @property
    def facts(self) -> dict[str, object]:
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


def gradient_layout(layout: Layout) -> Layout:
    return replace(layout, partial=())


class TorchProduct:
    """y = activation(x @ w + bias) of one shape, element type and placement, with its gradients."""

    def __init__(self, kept: KeptTensors, asked: LinearRequest, x: Shape, w: Shape, dtype: np.dtype[Any]) -> None:
        """x, w: the shapes of the matrices. Raises ShapeError. Collective."""
        self.kept, self.mesh, self.request, self.shapes, self.dtype = kept, kept.mesh, asked, (x, w), dtype
        (self.m, k), (inner, n) = x, (w[::-1] if asked.transpose_w else w)
        if k != inner:
            turned = " and transposed" * asked.transpose_w
            raise ShapeError(f"shapes: x is {x}, w is {w}{turned}; the inner dimensions {k} and {inner} must be equal")
        self.n = n
        self.serial = self.mesh.next_serial()
        self.plans: dict[tuple[object, ...], Plan] = {}
        """Plans by what they compute, and by the key of their operands."""
        self.y_layout = asked.layout  # layout of y, once the first plan has decided it
        self.ones: DistMatrix | None = None
        self.known_pools: dict[str, ResultPool] = {}  # by what is to lie there
        self.key: tuple[object, ...] = ()  # under which it is kept
        self.results = ("y", "y") if asked.keeps_sums else ("y",)  # what a forward pass makes

    def plan(self, what: str, a: DistMatrix, b: DistMatrix) -> Plan:
        """Return the plan for "y" of x and w, or for the gradient of "x", "w" or "bias". Collective."""
        key = _key(what, a, b)
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = make_plan(a, b, self.mesh, **self._options(what, a.dtype))
            if what == "y":
                self.y_layout = found.layouts["C"]
        return found

    def _options(self, what: str, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return the options of each product, for the operands that callers pass.

        y = x w, dx = dy w*, dw = x* dy (its transposed is dyᵀ x̄), dbias = 1ᵀ dy; * is for conjugate and transposed.
        """
        asked, conjugate = self.request, dtype.kind == "c"
        if what == "y":
            epilogue = self._epilogue(dtype)
            return {"transpose_b": asked.transpose_w, "layout": self.y_layout, "epilogue": epilogue}
        if what == "x":
            layout = self._pool("x").layout
            return {"transpose_b": not asked.transpose_w, "conjugate_b": conjugate, "layout": layout}
        if what == "w":
            conjugated = "conjugate_b" if asked.transpose_w else "conjugate_a"
            return {"transpose_a": True, conjugated: conjugate, "layout": self._pool("w").layout}
        return {"transpose_a": True, "layout": self._pool("bias").layout}

    def _epilogue(self, dtype: np.dtype[Any]) -> Epilogue | None:
        """Return the epilogue, with a placeholder for the bias that is put in before each product."""
        activation = None if self.request.keeps_sums else self.request.activation
        bias = np.zeros(self.n, dtype) if self.request.has_bias else None
        if bias is None and activation is None:
            return None
        return Epilogue(bias, None if bias is None else "column", activation)

    def pools(self, *whats: str) -> list[ResultPool]:
        return [self._pool(what) for what in whats]

    def _pool(self, what: str) -> ResultPool:
        found = self.known_pools.get(what)
        if found is None:
            assert self.y_layout is not None
            shape, layout = {
                "y": ((self.m, self.n), self.y_layout), "dy": ((self.m, self.n), gradient_layout(self.y_layout)),
                "x": (self.shapes[0], gradient_layout(self.request.x_layout)),
                "w": (self.shapes[1], gradient_layout(self.request.w_layout)),
                "bias": ((1, self.n), replace(self.y_layout, splits=((), self.y_layout.splits[1]))),
            }[what]
            found = self.known_pools[what] = self.kept.pool(shape, self.dtype, layout)
        return found

    # -- computing --------------------------------------------------------------------------------

    def opening(self, what: str, a: DistMatrix | None, b: DistMatrix | None) -> tuple[int, ...]:
        """Return the facts for a ballot that is to open this product; empty if the product takes its own. Local."""
        if a is None or b is None:
            return ()
        plan = self.plans.get(_key(what, a, b))
        return () if plan is None else plan.opening(a, b)

    def y(self, x: DistMatrix, w: DistMatrix, bias: torch.Tensor | None, out: DistMatrix, opened: AgreedVotes) -> None:
        """The product. opened: see `Plan.execute`. Collective."""
        plan = self.plan("y", x, w)
        if bias is not None:
            self._put(plan, bias)
        plan.execute(x, w, out, opened=opened)

    def gradient(
        self, what: str, dy: DistMatrix, x: DistMatrix, w: DistMatrix, out: DistMatrix, opened: AgreedVotes
    ) -> None:
        """The gradient of "x", "w" or "bias". Collective."""
        if what == "bias" and self.ones is None:
            layout = replace(dy.layout, splits=(dy.layout.splits[0], ()))
            self.ones = DistMatrix.allocated(self.mesh, (self.m, 1), dy.dtype, layout)
            self.ones.tile[...] = 1
        a, b = self.operands(what, dy, x, w)
        assert a is not None and b is not None
        self.plan(what, a, b).execute(a, b, out, opened=opened)

    def operands(
        self, what: str, dy: DistMatrix | None, x: DistMatrix, w: DistMatrix
    ) -> tuple[DistMatrix | None, DistMatrix | None]:
        """Return the operands of the gradient of "x", "w" or "bias"; for the latter, a matrix of ones is made once."""
        if what == "x":
            return dy, w
        if what == "w":
            return (dy, x) if self.request.transpose_w else (x, dy)
        return self.ones, dy

    def _put(self, plan: Plan, bias: torch.Tensor) -> None:
        """Give the plan this rank's part of the bias; if products are checked, all of it (collective then)."""
        at, values = self.columns(self.mesh.rank), array_of(bias)
        plan.set_bias(values, at)
        if self.mesh.checks is not None:
            for others, part in self.mesh.comm.allgather((at, values)):
                plan.set_bias(part, others)

    def columns(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the columns of y that a rank holds, which are its part of the bias."""
        assert self.y_layout is not None
        return self.y_layout.region((self.m, self.n), self.mesh.grid, rank)[1].indices

    def close(self) -> None:
        """Give the plans' memory back, once all ranks have. Local."""
        for plan in self.plans.values():
            plan.close()
        self.plans.clear()
        self.known_pools.clear()
        self.ones = None


def _key(what: str, a: DistMatrix, b: DistMatrix) -> tuple[object, ...]:
    return what, a.in_place, b.in_place, a.block is b.block
