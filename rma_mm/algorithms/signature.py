"""The earlier place of `rma_mm.dsl.signature`, kept for one version."""

from warnings import warn

from rma_mm.dsl.signature import signed

__all__ = ["signed"]

warn("rma_mm.algorithms.signature is now rma_mm.dsl.signature", DeprecationWarning, stacklevel=2)
