"""Making plans: what the arguments decide, the choice among candidates, and the memory that must fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.algorithms import REGISTERED
from rma_mm.elements.dtypes import as_dtype, check_dtype
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS, check_semiring
from rma_mm.errors import LayoutError, MeshError, OptionError, ShapeError
from rma_mm.geometry.extents import too_large
from rma_mm.geometry.layout import Layout
from rma_mm.kernels import bind
from rma_mm.kernels.choice.choice import NAMES
from rma_mm.kernels.elementwise import check_cast, scalar
from rma_mm.kernels.epilogue.epilogue import Epilogue, check_epilogue
from rma_mm.kernels.gemm.form import FEW
from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.execution.operands import Operand, Operands, ProductOptions
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.matrices.arguments import array_of, checked_extents, checked_mesh, checked_shape, placed
from rma_mm.runtime.matrices.array import DistArray
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.streamed import FileMatrix, as_operands
from rma_mm.runtime.products.choosing import choose_plan
from rma_mm.runtime.products.memory import require_homes, require_memory
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.products.symmetry import checked_symmetry, with_symmetry
from rma_mm.runtime.products.workspace import check_workspace
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.windows.waiting import wait

if TYPE_CHECKING:
    from rma_mm.runtime.products.batched.batch_choice import BatchRequest
    from rma_mm.runtime.products.batched.plan import BatchPlan

Given = DistMatrix | DistArray | Opened | Operand | NDArray[Any] | tuple[tuple[int, ...], DTypeLike]  # as it is given


@serialized
def make_plan(
    A: Given, B: Given, mesh: Mesh | None = None, *, layout: str | Layout | None = None, alpha: Any = 1, beta: Any = 0,
    transpose_a: bool = False, transpose_b: bool = False, conjugate_a: bool = False, conjugate_b: bool = False,
    algorithm: str = "auto", memory_limit: int | str | None = None, compute_dtype: DTypeLike | None = None,
    deterministic: bool = False, kernel: str = "auto", semiring: str = PLUS_TIMES.name,
    epilogue: Epilogue | None = None, check: bool | str = False, prefer: str | None = None,
    symmetric: bool | str | None = None, fill: str = "both", fast: int = 0, workspace: NDArray[np.uint8] | None = None,
) -> Plan:
    """Prepare a product, to be executed many times: C = alpha · op(A) @ op(B) + beta · C.

    Collective over the mesh's communicator.

    Parameters
    ----------
    A, B : DistMatrix, DistArray, Opened, ndarray or tuple
        Operands as in `matmul`, or (shape, dtype) of operands that the plan may place.
    mesh : Mesh, optional
        The mesh of an operand, or else the default mesh, if not given.
    layout : str or Layout, optional
        Placement of C. By default the plan chooses it.
    alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b : optional
        As in `matmul`.
    algorithm, memory_limit, compute_dtype, deterministic, kernel, semiring, epilogue : optional
        As in `matmul`.
    check, prefer, symmetric, fill, fast : optional
        As in `matmul`.
    workspace : ndarray of uint8, optional
        The caller's memory for scratch that no other rank reaches, flat, of at least `Plan.scratch_bytes` bytes, which
        differ by rank. Plans that are executed one after the other may share it.

    Returns
    -------
    Plan
        The prepared product; for batches, a BatchPlan.

    Raises
    ------
    RmaError
        As `matmul`.
    """
    mesh = common_mesh(mesh, A, B)
    A, B = as_operands(A, B, mesh)
    options = ProductOptions(
        alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b, algorithm, memory_limit, compute_dtype,
        deterministic, kernel, semiring, epilogue, check, prefer, symmetric, fill,
        fast, "".join(name for name, x in (("A", A), ("B", B)) if not isinstance(x, DistMatrix | DistArray | Operand)),
    )
    with agreed(mesh.comm, "plan", symmetric=symmetric, fill=fill):
        options = with_symmetry(options, A, B, may_change=not (isinstance(A, FileMatrix) and A is B))
    return cast(Plan, planned(A, B, mesh, layout, options, workspace=workspace))


def planned(
    A: Given, B: Given, mesh: Mesh, layout: str | Layout | None, options: ProductOptions, before: Plan | None = None,
    workspace: NDArray[np.uint8] | None = None,
) -> Plan | BatchPlan:
    """Return `make_plan` for these options, or the plan `before` if it would be the same. Collective."""
    with using_threads(mesh.threads), agreed(mesh.comm, "plan", layout=layout, registered=REGISTERED) as facts:
        options = options.normalised()
        check_workspace(workspace)
        facts["workspace"] = "none" if workspace is None else "the caller's"
        facts |= {"semirings": SEMIRINGS, "A": describe(A), "B": describe(B)} | vars(options)
        a, b = operand_of("A", A, mesh), operand_of("B", B, mesh)
        request = _batch_of(a, b, mesh, layout, options) if max(len(a.shape), len(b.shape)) > 2 else None
        if request and options.fast:
            raise OptionError(f"fast: got {options.fast}; it is not supported for batches: leave it out")
        if request and workspace is not None:
            raise OptionError("workspace: is not supported for batches; leave it out")
        operands = request.operands if request else operands_of(a, b, mesh, layout, options)
    if operands.options.epilogue is not None:  # the plan's own: it may be given another bias
        own = operands.options.epilogue.apart()
        operands = replace(operands, options=replace(operands.options, epilogue=own))
    require_homes(mesh, request.operands if request else operands)
    operands = with_kernel(mesh, operands)
    if request:
        from rma_mm.runtime.products.batched.batch_choice import choose_batch
        from rma_mm.runtime.products.batched.plan import BatchPlan

        return BatchPlan(mesh, choose_batch(mesh, replace(request, operands=operands)))
    while (plan := _new_plan(mesh, operands, before, workspace)).prepared.is_outdated:
        plan.close()
    return plan


def _batch_of(
    a: Operand, b: Operand, mesh: Mesh, layout: str | Layout | None, options: ProductOptions
) -> BatchRequest:
    """Check the arguments of a product of batches and return the request."""
    from rma_mm.policy.planner.batches import Batch
    from rma_mm.runtime.products.batched.batch_choice import batch_request

    batch = Batch(a.shape, b.shape, "A" * options.transpose_a + "B" * options.transpose_b, options.folds)
    place = None if layout is None else placed(layout, batch.shape("C"), mesh)
    one, other = (replace(x, shape=(x.shape[-2], x.shape[-1])) for x in (a, b))
    return batch_request(batch, a, b, place, operands_of(one, other, mesh, None, options))


def _new_plan(mesh: Mesh, operands: Operands, before: Plan | None, workspace: NDArray[np.uint8] | None) -> Plan:
    """Return the plan that is best on the memory that the mesh has now. Collective."""
    choice = choose_plan(mesh, operands)
    if before is not None and choice.is_like(before.choice):
        return before
    return plan_of(mesh, choice, workspace)


def plan_of(mesh: Mesh, choice: PlanChoice, workspace: NDArray[np.uint8] | None = None) -> Plan:
    """Return the plan of a product as it was settled. Collective."""
    require_memory(mesh, choice)
    operands, later = choice.spec, []
    for x, operand in (("A", operands.a), ("B", operands.b)):
        if operand.in_place is None and x not in operands.options.arrays:  # it will be made after the plan
            problem = choice.problem
            parts = [problem.layout(x).region(problem.extent(x), mesh.grid, rank).size for rank in range(mesh.size)]
            later.append([size * operand.dtype.itemsize for size in parts])
    mesh.arena.reserve(later)
    return Plan(mesh, choice, workspace)


def with_kernel(mesh: Mesh, operands: Operands) -> Operands:
    """Return the same with rank 0's choice of the kernel, which rests on its own measurements. Collective."""
    choice = np.array([NAMES.index(operands.kernel)])
    wait(mesh.comm.Ibcast(choice))
    return replace(operands, kernel=NAMES[choice[0]])


def common_mesh(mesh: Mesh | None, *operands: object) -> Mesh:
    """Return the mesh that was given, the one that an operand lives on, or the default mesh. Raises MeshError."""
    on_meshes = (x.mesh for x in operands if isinstance(x, DistMatrix | DistArray))
    return checked_mesh(mesh if mesh is not None else next(on_meshes, None))


def describe(x: object) -> str:
    """Return an operand in a few words, equal on every rank when the operand is."""
    if isinstance(x, DistMatrix | DistArray):
        return f"{x!r}, matrix {x.facts}"
    if isinstance(x, np.ndarray):
        return f"array of {x.dtype}, shape {x.shape}"
    return repr(x)


def operand_of(name: str, x: Given, mesh: Mesh) -> Operand:
    """Return an operand with its layout, if it has one. Raises MeshError, ShapeError, LayoutError, DtypeError."""
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple):
        x = Operand(x[0], as_dtype(x[1]))
    if isinstance(x, Operand):
        if x.shape == ():
            raise ShapeError(f"{name}: got a number; matmul takes matrices and batches of them")
        x = replace(x, shape=checked_shape(x.shape) if len(x.shape) == 2 else checked_extents(x.shape))
        if x.layout is not None:
            placed(x.layout, x.shape, mesh)
        check_dtype(x.dtype, f"{name}'s dtype")
        return x
    if isinstance(x, DistMatrix | DistArray):
        if x.mesh is not mesh:
            raise MeshError(f"{name}: it lives on {x.mesh!r}; the product is on {mesh!r}")
        if isinstance(x, FileMatrix):
            return Operand(x.shape, x.dtype, x.layout, x.in_place, x.chunks, x.reading)
        return Operand(x.shape, x.dtype, x.layout, x.in_place, window=x.block.window.flavour)
    array = array_of(name, x)
    return Operand(array.shape, check_dtype(array.dtype, f"{name}'s dtype"))


def operands_of(a: Operand, b: Operand, mesh: Mesh, layout: str | Layout | None, options: ProductOptions) -> Operands:
    """A, B and C with everything that the arguments alone decide; raises where they do not fit."""
    for name, x in (("A", a), ("B", b)):
        if len(x.shape) != 2:
            raise ShapeError(f"{name}: got an array of shape {x.shape}; a matrix has two dimensions")
    m, k = a.shape[::-1] if options.transpose_a else a.shape
    k2, n = b.shape[::-1] if options.transpose_b else b.shape
    if k != k2:
        turned = ["A is transposed"] * options.transpose_a + ["B is transposed"] * options.transpose_b
        said = f" ({', '.join(turned)})" if turned else ""
        raise ShapeError(
            f"shapes: A is {a.shape}, B is {b.shape}{said}, C would be {(m, n)}; "
            f"the inner dimensions {k} and {k2} must be equal"
        )
    if reason := too_large((m, n)):
        raise ShapeError(f"shapes: A is {a.shape}, B is {b.shape}, C would be {(m, n)}; {reason}")
    place = placed(layout, (m, n), mesh) if layout is not None else None
    operands = Operands(a, b, Operand((m, n), a.dtype, place), options)
    product = operands.product_dtype
    operands = replace(operands, c=replace(operands.c, dtype=product))
    _check_semiring(operands)
    for name in ("alpha", "beta"):
        scalar(getattr(options, name), product, name)
    operands = checked_symmetry(operands)
    if options.epilogue is not None:
        operands = _with_epilogue(operands)
    operands = replace(operands, kernel=operands.choose_kernel())
    _probe(operands)
    return operands


def _check_semiring(operands: Operands) -> None:
    """Check the semiring; raise OptionError, DtypeError, or LayoutError for summands, which are always added by +."""
    semiring, o = operands.semiring, operands.options
    check_semiring(semiring, operands.c.dtype, o.alpha, o.beta, o.conjugate_a or o.conjugate_b)
    for name, x in zip("ABC", (operands.a, operands.b, operands.c), strict=True):
        if not semiring.is_arithmetic and x.layout is not None and x.layout.partial:
            raise LayoutError(
                f"{name}: it is placed as {x.layout}, as partial sums; semiring {semiring.name} does not add, so "
                f"place it without sum ({name}.redistribute does)"
            )


def _with_epilogue(operands: Operands) -> Operands:
    """Return the operands with C in the type that the epilogue gives it.

    Raises OptionError, ShapeError and DtypeError, and LayoutError for a C in summands.
    """
    o, c = operands.options, operands.c
    check_epilogue(o.epilogue)
    assert o.epilogue is not None
    stored = o.epilogue.check(c.shape, operands.product_dtype)
    if not operands.semiring.is_arithmetic:
        raise OptionError(f"epilogue: got semiring={o.semiring!r}; an epilogue follows a product by + and ×")
    if c.layout is not None and c.layout.partial:
        raise LayoutError(
            f"layout: C is placed as {c.layout}, as partial sums; an epilogue needs complete elements, so place C "
            "without sum"
        )
    if o.beta != 0:
        check_cast(stored, operands.accum_dtype, "C, which beta adds,", "the sum")
    return replace(operands, c=replace(c, dtype=stored))


def _probe(operands: Operands) -> None:
    """Try now if the kernel supports these types, and compile it if needed.

    Few rows have code of their own, which is compiled only if C has few.
    """
    rows, columns = (max(1, min(extent, FEW + 1)) for extent in operands.c.shape[-2:])
    dtypes = (operands.a.dtype, operands.b.dtype, operands.accum_dtype)
    a, b, c = map(np.zeros, ((rows, 2), (2, columns), (rows, columns)), dtypes)
    if operands.options.epilogue is not None:
        operands.options.epilogue.prepare(operands.accum_dtype, operands.c.shape, operands.kernel)
    for stored in (c, c.copy("F")):  # a C that is stored by columns may want other code
        bind(a, b, stored, operands.options.alpha, 0, kernel=operands.kernel, semiring=operands.semiring)


