"""One product in one call, on plans that are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.semiring import PLUS_TIMES
from rma_mm.errors import LayoutError, OptionError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.notations.pblas import text_of
from rma_mm.kernels.epilogue.epilogue import Epilogue, check_epilogue
from rma_mm.runtime.execution.operands import Operand, ProductOptions
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.matrices.arguments import array_of, placed
from rma_mm.runtime.matrices.array import DistArray, kind_of
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.operators import Multiplicand
from rma_mm.runtime.matrices.streamed import as_operands
from rma_mm.runtime.matrices.vectors import dims_of, product_of_vectors
from rma_mm.runtime.products.batched.plan import BatchPlan
from rma_mm.runtime.products.make_plan import common_mesh, describe, make_plan, operand_of, planned
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.symmetry import with_symmetry
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized

plan = make_plan  # the public name of `make_plan`
AnyPlan = Plan | BatchPlan
Steps = tuple[int, ...]
"""The steps by which each rank's share is shrunk; empty where a product does not depend on them."""
PLANS = 16  # plans that `matmul` keeps for a mesh, with their scratch memory


class Asked(NamedTuple):
    """A product that `matmul` was asked for lately, of two matrices, and how it was done."""

    options: tuple[object, ...]
    operands: tuple[object, ...]
    plan: Plan
    steps: Steps | None
    """The shares of slow ranks that the plan was made for; None where it does not depend on them."""

    def is_for(self, options: tuple[object, ...], operands: tuple[object, ...]) -> bool:
        """True if this is the same product of matrices of the same kind."""
        steps = self.plan.mesh.metrics.relief.steps
        is_same = self.operands == operands and all(map(is_, self.options, options))
        return is_same and (self.steps is None or self.steps == steps)


def kind_of_operands(A: object, B: object) -> tuple[object, ...]:
    """Return what a plan depends on of two matrices, and on what they have in common; nothing for others."""
    if type(A) is not DistMatrix or type(B) is not DistMatrix or A.block_or_none is None:
        return ()
    in_common = (A.flipped, B.flipped) if A.block_or_none is B.block_or_none else ()
    return (A.mesh, A.shape, A.dtype, A.layout, B.mesh, B.shape, B.dtype, B.layout, in_common)


class PlanCache:
    """The plans that a mesh keeps for `matmul`, by request. All ranks keep and forget alike."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[object, Steps], AnyPlan] = OrderedDict()
        """Plans by request and shares of slow ranks, least recently used first."""
        self._steps: dict[object, Steps] = {}  # the shares by which each product was done last
        self.recent: list[Asked] = []
        """Products that were asked for lately, the last new one first."""

    @classmethod
    def of(cls, mesh: Mesh) -> PlanCache:
        """Return the cache of `mesh`, which closes it."""
        found = mesh.kept.get(cls)
        if found is None:
            found = mesh.kept[cls] = cls()
        assert isinstance(found, cls)
        return found

    def plan(self, asked: object, steps: Steps, make: Callable[[Any], AnyPlan]) -> tuple[AnyPlan, bool]:
        """Return the plan for a request, with the shares of `Relief.steps`, and whether another plan served it last.

        make: returns the plan that it is passed, which did it last, where none is better; else a new one.
        """
        key, last = (asked, steps), self._steps.get(asked, steps)
        is_other = last != steps
        if key not in self.plans:
            if len(self.plans) >= PLANS:
                self._forget()
            before = self.plans.get((asked, last))
            self.plans[key] = made = make(before)
            if made is before:
                del self.plans[asked, last]
                is_other = False
        self.plans.move_to_end(key)
        self._steps[asked] = steps
        return self.plans[key], is_other

    def repeated(self, A: Any, B: Any, out: Any, options: tuple[object, ...]) -> DistMatrix | None:
        """Return a product that is done like one before, by a compiled call; None, if it cannot be. Collective."""
        operands = kind_of_operands(A, B)
        for asked in self.recent if operands else ():
            if asked.is_for(options, operands):
                if out is None:
                    return asked.plan.repeat_anew(A, B)
                return out if asked.plan.repeat(A, B, out) else None
        return None

    def remember(self, A: Any, B: Any, options: tuple[object, ...], plan: AnyPlan, steps: Steps | None) -> None:
        """Remember how a product was done."""
        operands = kind_of_operands(A, B)
        if operands and isinstance(plan, Plan):
            others = (each for each in self.recent if not each.is_for(options, operands))
            self.recent = [Asked(options, operands, plan, steps), *others][:PLANS]

    def _forget(self) -> None:
        """Drop the plan that was used longest ago."""
        key, plan = self.plans.popitem(last=False)
        if self._steps.get(key[0]) == key[1]:
            del self._steps[key[0]]
        plan.close()

    def close(self) -> None:
        self.plans.clear()
        self._steps.clear()
        self.recent.clear()


@serialized
def matmul(
    A: Multiplicand | Opened | NDArray[Any],
    B: Multiplicand | Opened | NDArray[Any],
    mesh: Mesh | None = None,
    out: DistMatrix | DistArray | None = None,
    alpha: Any = 1,
    beta: Any = 0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    layout: str | Layout | None = None,
    algorithm: str = "auto",
    memory_limit: int | str | None = None,
    compute_dtype: DTypeLike | None = None,
    deterministic: bool = False,
    kernel: str = "auto",
    semiring: str = PLUS_TIMES.name,
    epilogue: Epilogue | None = None,
    check: bool | str = False,
    prefer: str | None = None,
    c: DistMatrix | DistArray | None = None,
    symmetric: bool | str | None = None,
    fill: str = "both",
    fast: int = 0,
) -> Any:
    """Multiply two matrices, or two batches of matrices: C = alpha · op(A) @ op(B) + beta · C.

    Collective over the mesh's communicator: every rank calls it with equal arguments.

    Parameters
    ----------
    A : DistMatrix, DistArray, Opened or ndarray
        Left operand, (m, k), or (k, m) if `transpose_a`. A batch has the shape (…, m, k) and broadcasts as in NumPy.
        A NumPy array must be equal on every rank. What `rma_mm.open` returns stays in its file. A vector, of shape
        (k,), is a row as A and a column as B, and C has one dimension less, as in NumPy.
    B : DistMatrix, DistArray, Opened or ndarray
        Right operand, (k, n), or (n, k) if `transpose_b`.
    mesh : Mesh, optional
        The mesh of an operand, or else the default mesh, if not given.
    out : DistMatrix or DistArray, optional
        Receives C, and holds the values that `beta` multiplies. By default C is a new matrix.
    alpha, beta : scalar
        Factors of the product (default 1) and of the old C (default 0, which does not read the old C).
    transpose_a, transpose_b, conjugate_a, conjugate_b : bool
        Transpose or conjugate an operand (default False).
    layout : str or Layout, optional
        Placement of a new C. By default the plan chooses it.
    algorithm : str
        A name from `list_algorithms`, or "auto" (default) to choose by predicted time. Not for batches.
    memory_limit : int or str, optional
        Bytes, or text such as "2GiB", that a rank may hold of operands, result and scratch memory.
    compute_dtype : dtype, optional
        Element type of C. By default NumPy's promotion of the operands' types.
    deterministic : bool
        Use only algorithms that give the same bits each time (default False).
    kernel : {"auto", "blas", "numba", "numpy"}
        Local multiplication.
    semiring : str
        A name from `SEMIRINGS` that replaces + and ×. Then `alpha` must be 1, and `beta` 0 or 1.
    epilogue : Epilogue, optional
        Bias, activation and result type, applied after the sums are complete. Not for batches.
    check : bool or str
        True to verify each product, "every=N" to verify each N-th one. From N = 10 on the check is that of
        `rma_mm.verify`. Otherwise a cheaper one runs. In large products of floats it finds one wrong element only if
        that is off by about 350 standard deviations of its rounding error, instead of 100.
    prefer : {"auto", "two-sided"}, optional
        "two-sided" excludes algorithms that get or accumulate. By default RMA_MM_PREFER decides (USE_ALLREDUCE=1 also
        means "two-sided").
    c : DistMatrix or DistArray, optional
        Matrix that `beta` multiplies, instead of `out`. It is not changed, and not read if `beta` is 0.
    symmetric : bool or str, optional
        True if A · B equals its transpose, "hermitian" if it equals its conjugate transpose: then half of it is
        multiplied. By default a product of one DistMatrix and its transpose is recognised, as A @ A.T.
    fill : {"both", "lower"}
        Part of a symmetric C to compute; "lower" leaves zeros above the diagonal.
    fast : {0, 1, 2}
        How often Strassen's algorithm may cut a local product into 7 of half the size, instead of 8 (default 0). It
        does where halves have 768 rows, columns and steps of k or more, and A, B and C one type of 32 bits or more.
        Rounding errors of floats are larger, integers exact. Not for batches.

    Returns
    -------
    DistMatrix, DistArray or scalar
        C: `out`, or a new matrix. Of two vectors, a NumPy scalar on every rank.

    Raises
    ------
    RmaError
        ShapeError, DtypeError, LayoutError or OptionError for arguments that do not fit. AlgorithmError if no algorithm
        can run, MemoryLimitError if none fits, VerificationError if `check` finds an error. DisagreementError if ranks
        pass different arguments. Every rank raises the same error.

    See Also
    --------
    plan : Prepare a product once and execute it many times.

    Notes
    -----
    The mesh keeps the plans of recent products and uses them again. A later call may use another algorithm if a rank
    becomes slow.

    Examples
    --------
    >>> C = rma_mm.matmul(A, B, mesh)                          # doctest: +SKIP
    >>> rma_mm.matmul(A, B, out=C, alpha=2, beta=1)            # doctest: +SKIP
    """
    mesh = common_mesh(mesh, A, B)
    if 1 in (dims_of(A), dims_of(B)):
        return product_of_vectors(matmul, locals())
    asked = (
        mesh, layout, alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b, algorithm, memory_limit,
        compute_dtype, deterministic, kernel, semiring, epilogue, check, prefer, symmetric, fill, fast,
    )
    if c is None and (found := PlanCache.of(mesh).repeated(A, B, out, asked)) is not None:
        return found
    A, B = as_operands(A, B, mesh)
    options = ProductOptions(
        alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b, algorithm, memory_limit, compute_dtype,
        deterministic, kernel, semiring, epilogue, check, prefer, symmetric, fill, fast,
    )
    with agreed(mesh.comm, "matmul", layout=layout, **vars(options)) as facts:
        given = [x if isinstance(x, DistMatrix | DistArray) else array_of(n, x) for n, x in (("A", A), ("B", B))]
        check_epilogue(epilogue)
        facts |= {"A": describe(given[0]), "B": describe(given[1]), "out": describe(out), "c": describe(c)}
        place = _place(mesh, out, layout)
        place = _place(mesh, c, place, "c") if c is not None and out is None else place
        if out is None and c is None and np.any(beta != 0):
            raise OptionError(f"beta: got {beta}; beta other than 0 adds to C, so pass out, or c")
        options = with_symmetry(options, *given)
    plan = _cached(mesh, given, place, options, asked)
    left, right = (
        x if not isinstance(x, np.ndarray) else kind_of(x.shape).from_numpy(x, mesh, plan.layouts[name])
        for name, x in zip("AB", given, strict=True)
    )
    if out is None and c is None and isinstance(plan, Plan):
        return plan.execute_anew(cast(DistMatrix, left), cast(DistMatrix, right))
    if out is None:
        out = kind_of(plan.c_shape).allocated(mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"])
    return plan.execute(left, right, out, c=c)


def _place(
    mesh: Mesh, out: DistMatrix | DistArray | None, layout: str | Layout | None, name: str = "out"
) -> str | Layout | None:
    """C's placement, as far as the caller says, by `layout` and by a matrix. Raises LayoutError."""
    if out is not None and not isinstance(out, DistMatrix | DistArray):
        raise LayoutError(f"{name}: got {type(out).__name__}; must be a DistMatrix, of batches a DistArray")
    layout = text_of(layout)
    if layout is not None and not isinstance(layout, str | Layout):
        raise LayoutError(f"layout: got {layout!r}; write text as \"P('i', 'j')\", or pass a Layout")
    if out is None:
        return layout
    if layout is not None and placed(layout, out.shape, mesh) != out.layout:
        raise LayoutError(f"layout: got {layout}; {name} is placed as {out.layout}; leave one of them out")
    return out.layout


def _cached(
    mesh: Mesh, given: list[Any], layout: str | Layout | None, options: ProductOptions, asked: tuple[object, ...]
) -> Any:
    """Return a plan for these operands: kept from an earlier call, or new.

    All ranks keep and forget alike. Collective.
    """
    a, b = (
        Operand(x.shape, x.dtype) if isinstance(x, np.ndarray) else operand_of(name, x, mesh)
        for name, x in zip("AB", given, strict=True)
    )
    key = (a, b, layout, mesh.window_flavour, repr(options))
    is_open = None in (a.layout, b.layout, layout) and not options.deterministic
    steps = mesh.metrics.relief.steps if is_open else ()
    cache = PlanCache.of(mesh)
    plan, is_other = cache.plan(key, steps, lambda before: planned(a, b, mesh, layout, options, before))
    if is_other:
        mesh.metrics.changed_plan()
    if options.epilogue is None:
        cache.remember(given[0], given[1], asked, plan, steps if is_open else None)
    return plan
