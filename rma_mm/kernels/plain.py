"""The kernel that is always there: numpy.matmul on blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.blocked import Blocking, Blocks, bind_blocked, shaped
from rma_mm.kernels.dtypes import accumulator
from rma_mm.kernels.product import Operands, Product


def plan_numpy(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], conj_a: bool, conj_b: bool) -> Blocking:
    """How operands of these types are cut; numpy.matmul takes any strides, but one type and no conjugate."""
    working = accumulator(c)
    return Blocking(working, a != working or conj_a, b != working or conj_b, accumulate=True, spare=True)


def bind_numpy(problem: Operands) -> Product:
    """The product by numpy.matmul, for every supported type."""
    types = problem.a.dtype, problem.b.dtype, problem.c.dtype
    return bind_blocked("numpy", problem, plan_numpy(*types, problem.conj_a, problem.conj_b), _step)


def _step(blocks: Blocks, scalars: tuple[Any, Any], conj: tuple[bool, bool], spare: NDArray[Any]) -> None:
    """Set c = a @ b + beta · c with beta 0 or 1; bool is or-and, since NumPy adds bools by or."""
    a, b, c = blocks
    target = c if scalars[1] == 0 else shaped(spare, c.shape)
    np.matmul(a, b, out=target)
    if target is not c:
        np.add(c, target, out=c)
