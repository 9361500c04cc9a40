"""Products as operations that PyTorch knows: `torch.compile` traces past them, and profilers name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rma_mm.errors import ClosedError
from rma_mm.torch.product import LinearRequest

ENTRIES: list[tuple[ref[Any], LinearRequest]] = []
"""(products that a mesh keeps, request) by number: operations take numbers and tensors only."""


def number_of(kept: Any, request: LinearRequest) -> int | None:
    """Return the number of a request for `multiply`, the same for the same request. Local.

    None if the shape of a rank's tile of y does not follow from the tiles of x and w.
    """
    y, cut = request.layout, request.w_layout.splits[0 if request.transpose_w else 1]
    if y is None or y.splits != (request.x_layout.splits[0], cut):
        return None
    for number, (known, other) in enumerate(ENTRIES):
        if known() is kept and other == request:
            return number
    ENTRIES.append((ref(kept), request))
    return len(ENTRIES) - 1


def _entry(number: int) -> tuple[Any, LinearRequest]:
    known, request = ENTRIES[number]
    kept = known()
    if kept is None:
        raise ClosedError("mesh: it is closed; make a new Mesh, and layers on it")
    return kept, request


@torch.library.custom_op("rma_mm::multiply", mutates_args=())
def multiply(x: Tensor, w: Tensor, bias: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """Return activation(x @ w + bias), and the sums that the activation was applied to, or nothing. Collective."""
    kept, asked = _entry(number)
    _, _, (seen, *applied) = kept.multiply(asked, (x, w, bias), (True, True, bias is not None))
    if not asked.keeps_sums:
        return seen, x.new_empty(0)
    torch.ops.aten.gelu.out(seen, out=applied[0])
    return applied[0], seen


@multiply.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    asked = ENTRIES[number][1]
    y = x.new_empty(x.shape[0], w.shape[0] if asked.transpose_w else w.shape[1])
    return y, torch.empty_like(y) if asked.keeps_sums else x.new_empty(0)


@torch.library.custom_op("rma_mm::multiply_backward", mutates_args=())
def multiply_backward(
    dy: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, seen: Tensor | None, number: int, wants: Sequence[bool]
) -> list[Tensor]:
    """Return the gradients that are wanted of x, w and bias; nothing for others. Collective."""
    kept, asked = _entry(number)
    product, a, b = kept.found(asked, (x, w, bias), tuple(wants))
    found = kept.gradients(product, (a, b), dy, seen, tuple(wants))
    return [
        dy.new_empty(0) if each is None else each.reshape(like.shape)
        for each, like in zip(found, (x, w, dy if bias is None else bias), strict=True)
    ]


@multiply_backward.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, seen: Tensor | None, number: int, wants: Sequence[bool]
) -> list[Tensor]:
    return [
        torch.empty_like(like) if is_wanted and like is not None else dy.new_empty(0)
        for like, is_wanted in zip((x, w, bias), wants, strict=True)
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, bias, number = inputs
    asked = ENTRIES[number][1]
    seen = (output[1] if asked.keeps_sums else output[0]) if asked.activation else None
    ctx.number, ctx.has_bias = number, bias is not None
    ctx.save_for_backward(x, w, bias, seen)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w, bias, seen = ctx.saved_tensors
    if dy is None:
        return None, None, None, None
    wants = list(ctx.needs_input_grad[:3])
    found = multiply_backward(dy, x, w, bias, seen, ctx.number, wants)
    return *(each if is_wanted else None for each, is_wanted in zip(found, wants, strict=True)), None


multiply.register_autograd(_backward, setup_context=_keep)
