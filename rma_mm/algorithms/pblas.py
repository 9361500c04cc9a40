"""The PBLAS product: block-cyclic placements, C stationary, panels broadcast.

Source: L. S. Blackford et al., "ScaLAPACK users' guide" (1997), PDGEMM. Block sizes of A, B and C need not match, and
sub-matrices may begin inside a block: `rma_mm.geometry.notations.pblas` turns descriptors into placements. The form
`:NB` names the block that is dealt out where nothing is placed yet.
"""

from __future__ import annotations

from dataclasses import replace

from rma_mm.algorithms.from_table import algorithm_from_table, one_sided, whole_numbers
from rma_mm.schedule.algorithm import Algorithm, Problem

BLOCK = 64  # rows and columns of a block, on matrices that have several for every rank
MOST_BLOCKS = 2**10
"""Blocks along a dimension for each rank of the mesh's longest axis; more cost time to plan, and balance no better."""


def _blocks(m: int, n: int, k: int) -> Algorithm:
    a = f"m→i:cyclic({m}), k→j:cyclic({k})"
    b = f"k→i:cyclic({k}), n→j:cyclic({n})"
    c = f"m→i:cyclic({m}), n→j:cyclic({n})"
    return algorithm_from_table(
        "pblas", "Blackford et al. 1997 (ScaLAPACK)", "block-cyclic placements; C stationary, panels are broadcast",
        axes=2, a=a, b=b, c=c, work="m→i, n→j", over="k", order="plain", grouped="AB",
        accepts_transposed="AB",
    )


def _fit(problem: Problem) -> Algorithm:
    """Blocks so small that every rank has two along each dimension, and no smaller; larger along a long dimension."""
    longest = max(problem.mesh.dims)
    size = min(BLOCK, min(problem.shape) // (2 * longest))
    return _blocks(*(max(1, size, -(-extent // (MOST_BLOCKS * longest))) for extent in problem.shape))


def _form(text: str) -> Algorithm | str:
    if size := whole_numbers(text, 1):
        return replace(_blocks(*size * 3), name=f"pblas:{text}", form=None)
    pull = one_sided(PBLAS)(text)
    return pull if isinstance(pull, Algorithm) else "pblas takes a block size, as pblas:64, or pblas:pull"


PBLAS = replace(_blocks(BLOCK, BLOCK, BLOCK), specialize=_fit, form=_form)
