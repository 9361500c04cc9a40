"""Derivatives of what a product's epilogue applies."""

from __future__ import annotations

from collections.abc import Callable

import torch

KEEPS_SUMS = {"gelu"}
"""Activations whose derivative wants what they were applied to; others want no more than what became of it."""
DERIVATIVES: dict[str | None, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "relu": lambda dy, y, into: torch.ops.aten.threshold_backward.grad_input(dy, y, 0, grad_input=into),
    "gelu": lambda dy, z, into: torch.ops.aten.gelu_backward.grad_input(dy, z, grad_input=into),
}
"""By activation: a function of (gradient, its argument or result, where to put the gradient before it)."""
TWICE: dict[str | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda dy, y: dy * (y > 0),
    "gelu": torch.ops.aten.gelu_backward,
}
"""The same as functions that can be differentiated again."""
