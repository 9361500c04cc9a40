"""The earlier place of `rma_mm.dsl.scheduling`, kept for one version."""

from warnings import warn

from rma_mm.dsl.scheduling import product

__all__ = ["product"]

warn("rma_mm.algorithms.scheduling is now rma_mm.dsl.scheduling", DeprecationWarning, stacklevel=2)
