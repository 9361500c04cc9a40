"""Is a product right? Asked by a program of matrices that it holds."""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from rma_mm.elements.semiring import PLUS_TIMES
from rma_mm.errors import LayoutError, OptionError
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.execution.operands import Operands, ProductOptions
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.matrices.matrix import DistMatrix, check_matrix
from rma_mm.runtime.matrices.streamed import as_operands, read_again
from rma_mm.runtime.products.make_plan import common_mesh, describe, operand_of, operands_of
from rma_mm.runtime.products.symmetry import with_symmetry
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.runtime.verification.check import Verdict
from rma_mm.runtime.verification.checked_product import as_before, required


@serialized
def verify(
    A: DistMatrix | Opened,
    B: DistMatrix | Opened,
    C: DistMatrix,
    mesh: Mesh | None = None,
    *,
    alpha: Any = 1,
    beta: Any = 0,
    C0: DistMatrix | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    compute_dtype: DTypeLike | None = None,
    semiring: str = PLUS_TIMES.name,
    epilogue: Epilogue | None = None,
    symmetric: bool | str | None = None,
    fill: str = "both",
    fast: int = 0,
) -> Verdict:
    """Check that C = alpha · op(A) @ op(B) + beta · C0, without gathering a matrix.

    Collective over the mesh's communicator.

    Parameters
    ----------
    A, B : DistMatrix or Opened
        Operands in any placement. Operands in files are read again.
    C : DistMatrix
        The result to check; every replica is checked.
    mesh : Mesh, optional
        Needed only if both operands are in files.
    alpha, beta : optional
        As in the `matmul` that computed C.
    C0 : DistMatrix, optional
        C before the product; needed if `beta` is not 0.
    transpose_a, transpose_b, conjugate_a, conjugate_b : optional
        As in the `matmul` that computed C.
    compute_dtype, semiring, epilogue, symmetric, fill, fast : optional
        As in the `matmul` that computed C.

    Returns
    -------
    Verdict
        What was checked (`how`), and the largest error relative to its tolerance (`residual`).

    Raises
    ------
    VerificationError
        If C is wrong; it names the element or the rows. `Mesh.metrics` counts it.
    RmaError
        ShapeError, DtypeError, LayoutError, OptionError, MeshError or DisagreementError for arguments that do not fit.

    Notes
    -----
    Products of up to 2²⁸ multiply-adds are computed again. Larger products of floats are checked by random sums
    (R. Freivalds 1979): one element that is off by 100 standard deviations of its rounding error is found, except for
    one case in 10⁶.
    """
    mesh = common_mesh(mesh, A, B, C)
    A, B = as_operands(A, B, mesh)
    options = ProductOptions(
        alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b, compute_dtype=compute_dtype,
        semiring=semiring, epilogue=epilogue, symmetric=symmetric, fill=fill, fast=fast,
    )
    with agreed(mesh.comm, "verify") as facts:
        options = with_symmetry(options.normalised(), A, B)
        facts |= {"A": describe(A), "B": describe(B), "C": describe(C), "C0": describe(C0)} | vars(options)
        given = _checked_operands(A, B, C, C0, mesh, options)  # type: ignore[arg-type]  # as it finds out
    with using_threads(mesh.threads), read_again(A, B) as (a, b):
        before = None if C0 is None else as_before(given, C, C0)
        return required("verify", given, mesh.next_serial(), a, b, C, before, quick=False)


def _checked_operands(
    A: DistMatrix, B: DistMatrix, C: DistMatrix, C0: DistMatrix | None, mesh: Mesh, options: ProductOptions
) -> Operands:
    """Return the checked operands of the product. Raises what `verify` does."""
    each: dict[str, DistMatrix] = {"A": A, "B": B, "C": C} | ({} if C0 is None else {"C0": C0})
    for name, x in each.items():
        if not isinstance(x, DistMatrix):
            raise LayoutError(f"{name}: got {type(x).__name__}; verify takes DistMatrix")
    if options.beta != 0 and C0 is None:
        raise OptionError(f"beta: got {options.beta}; C is checked against the old C, so pass C0")
    given = operands_of(operand_of("A", A, mesh), operand_of("B", B, mesh), mesh, C.layout, options)
    for name, x in each.items():
        if name in ("C", "C0"):
            check_matrix(name, x, mesh, (given.c.dtype, given.c.shape, x.layout), False, "product")
    return given
