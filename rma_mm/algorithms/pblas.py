"""The PBLAS product: block-cyclic placements, C stationary, panels broadcast.

Source: L. S. Blackford et al., "ScaLAPACK users' guide" (1997), PDGEMM. Block sizes of A, B and C need not match, and
sub-matrices may begin inside a block: `rma_mm.geometry.pblas` turns descriptors into placements. The form `:NB` names
the block that is dealt out where nothing is placed yet.
"""

from __future__ import annotations

from dataclasses import replace

from ..schedule.row import Row, Setting
from .survey import one_sided, surveyed, whole_numbers

BLOCK = 64
"""Rows and columns of a block, on matrices that have several for every rank."""


def _blocks(size: int) -> Row:
    a, b, c = (f"{one}→i:cyclic({size}), {two}→j:cyclic({size})" for one, two in ("mk", "kn", "mn"))
    return surveyed(
        "pblas", "Blackford et al. 1997 (ScaLAPACK)", "block-cyclic placements; C stationary, panels are broadcast",
        axes=2, a=a, b=b, c=c, work="m→i, n→j", over="k", order="plain", grouped="AB",
    )  # fmt: skip


def _fit(setting: Setting) -> Row:
    """Blocks so small that every rank has two along each dimension, and no smaller."""
    most = 2 * max(setting.mesh.shape)
    return _blocks(max(1, min(BLOCK, min(setting.shape) // most)))


def _form(text: str) -> Row | str:
    if size := whole_numbers(text, 1):
        return replace(_blocks(size[0]), name=f"pblas:{text}", form=None)
    pull = one_sided(PBLAS)(text)
    return pull if isinstance(pull, Row) else "pblas takes a block size, as pblas:64, or pblas:pull"


PBLAS = replace(_blocks(BLOCK), fit=_fit, form=_form)
