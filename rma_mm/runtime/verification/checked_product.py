"""A product, or a redistribution, whose result is checked; and how what was found is told to all ranks.

Whoever asks whether a product is right comes to `verdict_of`: `rma_mm.verify`, the option `check` of a product, the
command's --verify, and RMA_MM_CHECK.

What is checked while RMA_MM_CHECK is 1, of every mesh made then. Nothing else changes, and nothing is counted.

- Every get begins on a poisoned place, and what it brought is compared with what its target holds
  (`windows.checks.checked`).
- What ranks accumulate between two meetings is compared with what the memory of each target has become
  (`execution.checked_pushes`).
- A frame of scratch is poisoned when it is given to another slot, and when its last slot is done with
  (`execution.poisoned_slots`).
- For beta = 0 C is poisoned before the first operation; none of that may be left. All replicas of C must hold the same
  bits, and C is verified from the tiles of A and B, which collectives move and no window (here).
- What is redistributed is poisoned first, and compared with its source element by element, in all replicas
(`contents`).

What is found becomes one CheckError on every rank, at the end of the product or the redistribution. Poison is NaN of
bits of its own, or bytes A5. Of integers poison that was left shows only as a wrong element of C, or as replicas that
differ. It takes several times as long and copies of what is moved: C, and all that is accumulated between two meetings.

The switch is read where a mesh is made, and nowhere else; without it binding makes the calls that it always made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import CheckError, VerificationError
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.execution.operands import Operands
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.contents import LocalMatrix, differences
from rma_mm.runtime.verification.parts import MatrixView, Transposable
from rma_mm.schedule.symmetry import Symmetry
from rma_mm.windows.checks.poison import poison, poisoned, shows_poison

if TYPE_CHECKING:
    from rma_mm.runtime.verification.check import Verdict


class OnMesh(MatrixView, Protocol):
    """A distributed matrix, or a view of one."""

    @property
    def mesh(self) -> Mesh:
        """Return the mesh, whose `checks` apply."""

    @property
    def T(self) -> OnMesh:
        """The transposed matrix, on the same memory."""


class Result(OnMesh, Protocol):
    """One that can be placed anew."""

    @property
    def T(self) -> Result:
        """The transposed matrix, on the same memory."""

    def redistribute(self, layout: Layout) -> Result:
        """Return the same matrix placed by `layout`. Collective."""


SELDOM = 10
"""Products of which one is checked, from which on that is done thoroughly: it takes up to a third of a product."""
SHOWN_BY_RANK = 4  # sentences that each rank tells
SHOWN = 8  # sentences of an error at the most


@contextmanager
def checked_product(
    name: str, given: Operands, seed: int, A: OnMesh, B: OnMesh, C: Result, added: Result | None = None
) -> Iterator[None]:
    """Check a product by the algorithm `name`, on whose operands all ranks have agreed. Collective; raises CheckError.

    seed: for what is drawn, the same on every rank. added: what beta adds, where that is not C.
    """
    mesh = C.mesh
    before = as_before(given, C, added)
    if before is None:
        poison(C.tile)
    yield
    what = f"{name} of {in_words(A)} and {in_words(B)} into {in_words(C)}"
    found = differences(C, C, "C") if not C.layout.partial else iter(())
    tell(mesh, what, [*unwritten(C, before is None), *found])
    verdict = verdict_of(given, A, B, whole_of(given, C), before, seed)
    tell(mesh, what, [] if verdict.ok else [f"C is wrong, computed again: {verdict.reason}"])


def required(
    name: str, given: Operands, seed: int, A: OnMesh, B: OnMesh, C: Result, before: MatrixView | None, quick: bool
) -> Verdict:
    """The verdict on a product by `name`. Collective; raises VerificationError on every rank where C is wrong."""
    verdict = verdict_of(given, A, B, whole_of(given, C), before, seed, quick)
    if not verdict.ok:
        C.mesh.metrics.tally.check_failures += 1
        what = f"{name} of {in_words(A)} and {in_words(B)} into {in_words(C)}"
        raise VerificationError(f"{what}: C is wrong: {verdict.reason}")
    return verdict


def verdict_of(
    given: Operands, A: Transposable, B: Transposable, C: MatrixView, before: MatrixView | None, seed: int,
    quick: bool = False,
) -> Verdict:
    """Verify that C is the product of A, B and the old C with these options, on which all ranks have agreed.

    Collective.
    """
    from rma_mm.runtime.verification.check import verify

    o = given.options
    return verify(
        A.T if o.transpose_a else A, B.T if o.transpose_b else B, C, alpha=o.alpha, beta=o.beta, before=before,
        conj_a=o.conjugate_a, conj_b=o.conjugate_b, seed=seed, semiring=given.semiring, epilogue=o.epilogue,
        product=given.product_dtype, quick=quick, fast=o.fast,
    )


def as_before(given: Operands, C: Result, added: Result | None) -> LocalMatrix | None:
    """Return the C that beta multiplies: `added`, which does not change, or a copy."""
    if given.options.beta == 0:
        return None
    if given.options.symmetric is not None:
        source = C if added is None else added
        return _completed(source, given.options.symmetric, np.ones(source.tile.shape, bool))
    before = local_matrix(C if added is None else added)
    if added is None:
        before.tile = C.tile.copy()
    return before


def whole_of(given: Operands, C: Result) -> MatrixView:
    """C with its upper triangle, of which a product that leaves zeros there left it out. Collective.

    Where there is something else it stays, so that it is found wrong.
    """
    known = given.options.symmetric
    return C if known is None or known.fill == "both" else _completed(C, known, C.tile == 0)


def _completed(C: Result, known: Symmetry, where: NDArray[Any]) -> LocalMatrix:
    """C with elements of its upper triangle replaced by the mirror image of the lower. where: which.

    Of a Hermitian one those on the diagonal are real.
    """
    rows, cols = (span.indices for span in C.region)
    image = C.T.redistribute(C.layout).tile
    found = local_matrix(C)
    is_mirrored = (rows[:, None] < cols[None, :]) & where
    found.tile = np.where(is_mirrored, np.conjugate(image) if known.conjugates else image, C.tile)
    if known.conjugates:
        found.tile.imag[(rows[:, None] == cols[None, :]) & where] = 0
    return found


def in_words(x: OnMesh) -> str:
    return f"{x.dtype} {x.shape[0]} x {x.shape[1]} in {x.layout}"


def unwritten(C: OnMesh, was_poisoned: bool) -> Iterator[str]:
    """Yield the places where this rank's part of C still has its value from before the first operation."""
    if not (was_poisoned and shows_poison(C.dtype)):
        return
    left = poisoned(C.tile)
    if left.any():
        rows, cols = (span.indices for span in C.region)
        i, j = np.argwhere(left)[0]
        yield (
            f"C[{rows[i]}, {cols[j]}] on rank {C.mesh.rank} was not written, or made of scratch that was not filled, "
            f"as were {left.sum() - 1} others of its {left.size} elements"
        )


def local_matrix(matrix: OnMesh) -> LocalMatrix:
    return LocalMatrix(matrix.mesh, matrix.shape, matrix.dtype, matrix.layout, matrix.tile)


def checked_move(source: OnMesh, layout: Layout, tile: NDArray[Any]) -> AbstractContextManager[None]:
    """Check a redistribution of `source` that fills `tile`, this rank's part as placed by `layout`.

    Where there is something to check it is collective, and raises CheckError.
    """
    if source.mesh.checks is None:
        return nullcontext()
    return _checked_move(source, LocalMatrix(source.mesh, source.shape, source.dtype, layout, tile))


@contextmanager
def _checked_move(source: OnMesh, copy: LocalMatrix) -> Iterator[None]:
    poison(copy.tile)
    yield
    what = f"redistribution of {in_words(source)} into {copy.layout}"
    found = [] if source.layout.partial else list(differences(source, local_matrix(source), "the source"))
    tell(source.mesh, what, [*found, *differences(source, copy, "the result")])


def tell(mesh: Mesh, what: str, found: list[str]) -> None:
    """Raise the findings of all ranks on every rank. Collective."""
    assert mesh.checks is not None
    noted, mesh.checks.findings = mesh.checks.findings + found, []
    told = mesh.comm.allgather((noted[:SHOWN_BY_RANK], len(noted)))
    lines = [line for each, _ in told for line in each]
    count = sum(number for _, number in told)
    if lines:
        more = f"; and {count - SHOWN} more" if count > SHOWN else ""
        raise CheckError(f"{what}: {'; '.join(lines[:SHOWN])}{more}")
