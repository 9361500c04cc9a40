"""Local products: c = alpha · op(a) @ op(b) + beta · c on arrays of one process.

`matmul` multiplies, `bind` prepares a product once, to be called many times. `KERNELS` holds the ways to do it: "blas"
for the four BLAS types and what is cast into them, "numba" and "numpy" for every supported type. `SEMIRING_KERNELS`
holds those that take something else instead of + and ×.
"""

from rma_mm.kernels.binders import KERNELS, SEMIRING_KERNELS
from rma_mm.kernels.choice.choice import COMPILE_FROM, choose_kernel
from rma_mm.kernels.local import bind, matmul, scratch_bytes
from rma_mm.kernels.product import Product

__all__ = [
    "COMPILE_FROM", "KERNELS", "SEMIRING_KERNELS", "Product", "bind", "choose_kernel", "matmul", "scratch_bytes",
]
