"""`einsum`: sums of products in index notation, each a product of batches, or of two matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import as_dtype, check_dtype, result_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Distributes, Semiring, check_semiring, find_semiring
from rma_mm.errors import LayoutError, MemoryLimitError, MeshError, OptionError
from rma_mm.geometry.layout import Layout
from rma_mm.kernels import choose_kernel
from rma_mm.runtime.einsum.placing import multiplied, options_of
from rma_mm.runtime.einsum.subscripts import Indices, Pair, Subscripts, pairs, parse, summed_early
from rma_mm.runtime.einsum.term import Groups, Term, arranged, diagonal, dropped, parted, sum_over, whole
from rma_mm.runtime.execution.operands import Operand, ProductOptions, limit_of
from rma_mm.runtime.matrices.arguments import array_of, placed
from rma_mm.runtime.matrices.array import DistArray, as_array, kind_of
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.operators import Multiplicand
from rma_mm.runtime.products.batched.plan import BatchPlan
from rma_mm.runtime.products.make_plan import common_mesh, describe, planned
from rma_mm.runtime.products.matmul import PlanCache, matmul
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized


@serialized
def einsum(
    subscripts: str,
    *operands: Multiplicand | NDArray[Any],
    mesh: Mesh | None = None,
    layout: str | Layout | None = None,
    semiring: str = PLUS_TIMES.name,
    compute_dtype: DTypeLike | None = None,
    memory_limit: int | str | None = None,
    kernel: str = "auto",
) -> Any:
    """Evaluate an Einstein summation on distributed operands, as `numpy.einsum` does.

    Collective over the mesh's communicator.

    Parameters
    ----------
    subscripts : str
        Indices of the operands and of the result, as "bij,bjk->bik".
    *operands : DistMatrix, DistArray or ndarray
        NumPy arrays must be equal on every rank.
    mesh : Mesh, optional
        The mesh of an operand, or else the default mesh, if not given.
    layout : str or Layout, optional
        Placement of the result. By default the cheapest one.
    semiring, compute_dtype, memory_limit, kernel : optional
        As in `matmul`, for every product. With one operand, `memory_limit` is for this operand and the result.

    Returns
    -------
    DistMatrix, DistArray or scalar
        A DistMatrix if the result has two indices, a NumPy scalar on every rank if it has none, else a DistArray.

    Raises
    ------
    OptionError
        If `subscripts` cannot be read, the result repeats an index, or no operand has one of its indices.
    ShapeError
        If an index has two lengths.
    RmaError
        As `matmul`.

    Notes
    -----
    Diagonals are taken first, and indices of one operand alone are summed. The rest are products of two operands, in
    the order that opt_einsum finds if it is installed, else from left to right. Large products of matrices are placed
    together, as by `plan_chain`.
    """
    mesh = common_mesh(mesh, *operands)
    with agreed(mesh.comm, "einsum", subscripts=subscripts, layout=layout) as facts:
        given = [
            as_array(x) if isinstance(x, DistMatrix | DistArray) else array_of(f"operand {n}", x)
            for n, x in enumerate(operands)
        ]
        facts |= {"operands": [describe(x) for x in given], "semiring": semiring, "kernel": kernel}
        facts |= {"compute_dtype": compute_dtype, "memory_limit": memory_limit}
        for n, x in enumerate(given):
            check_dtype(x.dtype, f"operand {n}'s dtype")
            if isinstance(x, DistArray) and x.mesh is not mesh:
                raise MeshError(f"einsum: operand {n} lives on {x.mesh!r}; the others are on {mesh!r}")
        found = parse(subscripts, [x.shape for x in given])
        place = _place(layout, found, mesh)
        dtype = _common([x.dtype for x in given], compute_dtype)
        ring = find_semiring(semiring)
        check_semiring(ring, dtype, 1, 0, conjugates=False)
        choose_kernel(kernel, dtype, 1, 1, 1, ring)  # which raises if there is none
        limit = limit_of(memory_limit)
        sums = _Sums(mesh, found, dtype, ring, ProductOptions(
            compute_dtype=dtype.name, memory_limit=limit, kernel=kernel, semiring=semiring,
        ))
        sums.check(given)
        if len(given) == 1:
            sums.check_room(given[0], place)
    if any(extent == 0 and name not in found.output for name, extent in found.extents):
        return sums.nothing(place)
    terms = [
        Term(names, whole(x, dtype) if isinstance(x, DistArray) else x)
        for names, x in zip(found.operands, given, strict=True)
    ]
    lent = [x.folded.block.key for x in given if isinstance(x, DistArray)]
    return sums.finished(sums.product(terms, place), place, lent)


def _place(layout: str | Layout | None, subscripts: Subscripts, mesh: Mesh) -> Layout | None:
    """Return the layout of the result, as far as the caller gives it. Raises LayoutError."""
    if layout is None:
        return None
    if not subscripts.output:
        raise LayoutError(f"layout: got {layout}; the result has no index, and is a number on every rank: leave it out")
    return placed(layout, subscripts.shape, mesh)


def _common(dtypes: Sequence[np.dtype[Any]], compute: DTypeLike | None) -> np.dtype[Any]:
    """Return the element type of the result. Raises DtypeError."""
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = result_dtype(common, dtype)
    return common if compute is None else result_dtype(common, common, as_dtype(compute))


@dataclass(frozen=True, eq=False)
class _Sums:
    mesh: Mesh
    subscripts: Subscripts
    dtype: np.dtype[Any]
    semiring: Semiring
    options: ProductOptions

    def check(self, given: Sequence[NDArray[Any] | DistArray]) -> None:
        """Raise OptionError if sums come before products that may not, LayoutError for summands without +."""
        for n, x in enumerate(given):
            if isinstance(x, DistArray) and x.layout.partial and not self.semiring.is_arithmetic:
                raise LayoutError(
                    f"einsum: operand {n} is placed as {x.layout}, as partial sums; semiring {self.semiring.name} does "
                    f"not add, so place it without sum (redistribute does)"
                )
        may = self.semiring.is_arithmetic or self.semiring.distributes != Distributes.NOT_KNOWN
        early = None if may or len(given) == 1 else summed_early(self.subscripts, [x.shape for x in given])
        if early is not None:
            raise OptionError(
                f"einsum: index {early!r} is summed over before all operands are multiplied, which "
                f"{self.semiring.name} is not known to allow"
            )

    def check_room(self, x: NDArray[Any] | DistArray, layout: Layout | None) -> None:
        """Raise MemoryLimitError if one operand and its sums, placed by `layout`, or evenly, are too much."""
        limit, shape, mesh = self.options.memory_limit, self.subscripts.shape, self.mesh
        if limit is None or not shape:
            return
        own = x.layout if isinstance(x, DistArray) else Layout(((),) * x.ndim)
        least = _most(own, x.shape, mesh) * x.dtype.itemsize
        least += _most(placed(layout, shape, mesh), shape, mesh) * self.dtype.itemsize
        if least > limit:
            raise MemoryLimitError(
                f"memory_limit: got {limit} bytes; the operand and the result take {least} on the fullest rank: allow "
                f"more, or place them on more ranks"
            )

    def nothing(self, layout: Layout | None) -> Any:
        """Return the result of sums over an empty index. Collective."""
        shape, identity = self.subscripts.shape, self.semiring.identity(self.dtype)
        if not shape:
            return self.dtype.type(identity)
        made = kind_of(shape).empty(shape, self.mesh, layout, self.dtype)
        made.tile[...] = identity
        made.keep_first_summand()
        return made

    def product(self, terms: list[Term], layout: Layout | None) -> Term:
        """Return all operands multiplied, in an order of the result's indices that needs no copy. Collective."""
        terms = [diagonal(term) for term in terms]
        terms = [self._alone(n, terms, self.subscripts.output) for n in range(len(terms))]
        every = pairs(self.subscripts, [term.names for term in terms])
        if len(every) > 1 and all(pair.is_plain for pair in every) and (made := self._together(terms, every, layout)):
            return made
        live, count = dict(enumerate(terms)), len(terms)
        terms.clear()  # what was multiplied is not kept
        for n, pair in enumerate(every, count):
            live[n] = self._pair(live.pop(pair.a), live.pop(pair.b), pair)
        return live.popitem()[1]

    def _together(self, terms: list[Term], every: list[Pair], layout: Layout | None) -> Term | None:
        """Products of matrices, placed together; None if they cannot be. Collective."""
        matrices = {n: _matrix(term) for n, term in enumerate(terms)}
        names = {n: term.names for n, term in enumerate(terms)}
        made = multiplied(self.mesh, matrices, names, every, layout, self.options)
        return None if made is None else Term(every[-1].names, as_array(made))

    def _alone(self, number: int, terms: list[Term], output: Indices) -> Term:
        """Return an operand summed over indices of its own, without broadcast dimensions."""
        term, extents = terms[number], dict(self.subscripts.extents)
        term = dropped(term, [name for name in term.names if term.extent(name) != extents[name]])
        others = {name for n, other in enumerate(terms) if n != number for name in _long(other, extents)}
        return sum_over(term, [x for x in term.names if x not in others and x not in output], self.dtype, self.semiring)

    def _pair(self, a: Term, b: Term, pair: Pair) -> Term:
        batch, m, n, k = pair.batch, pair.m, pair.n, pair.k
        extents = dict(self.subscripts.extents)
        leading: list[Indices] = [] if pair.is_plain else [(name,) for name in batch] or [()]
        left, turn_a = _faced(a, leading, m, k)
        right, turn_b = _faced(b, leading, k, n)
        if pair.is_plain:
            made = matmul(
                _matrix(left), _matrix(right), self.mesh, transpose_a=turn_a, transpose_b=turn_b,
                **options_of(self.options),
            )
            return Term(pair.names, as_array(made))
        folds = tuple((x, tuple(extents[i] for i in names)) for x, names in zip("mnk", (m, n, k), strict=True))
        options = replace(
            self.options, transpose_a=turn_a, transpose_b=turn_b, folds=tuple(x for x in folds if len(x[1]) > 1)
        )
        return parted(self._multiplied(left, right, options), [*leading, m, n], extents)

    def _multiplied(self, left: Term, right: Term, options: ProductOptions) -> DistArray:
        """Return a product of batches, by a plan that is kept. Collective."""
        mesh = self.mesh
        a, b = (
            Operand(x.x.shape, x.dtype, *((x.x.layout, x.x.in_place) if isinstance(x.x, DistArray) else ()))
            for x in (left, right)
        )
        key = ("einsum", a, b, mesh.window_flavour, repr(options))
        plan, _ = PlanCache.of(mesh).plan(key, (), lambda _: planned(a, b, mesh, None, options))
        given = [
            x.x if isinstance(x.x, DistArray) else DistArray.from_numpy(x.x, mesh, plan.layouts[name])
            for name, x in zip("AB", (left, right), strict=True)
        ]
        out = DistArray.allocated(mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"])
        assert isinstance(plan, BatchPlan)
        return plan.execute(given[0], given[1], out)

    def finished(self, term: Term, layout: Layout | None, lent: Sequence[object]) -> Any:
        """Return the result on memory that is not the operands' (`lent` has their keys). Collective."""
        mesh, output = self.mesh, self.subscripts.output
        if not output:
            number = term.x if isinstance(term.x, np.ndarray) else term.x.to_numpy()
            assert number is not None
            found = self.dtype.type(number.reshape(-1)[0])
            if isinstance(term.x, np.ndarray):  # which is to be equal on every rank
                with agreed(mesh.comm, "einsum") as facts:
                    facts["sum of the array"] = found
            return found
        if isinstance(term.x, np.ndarray):
            x = arranged(term, [(name,) for name in output]).x
            assert isinstance(x, np.ndarray)
            return kind_of(x.shape).from_numpy(np.ascontiguousarray(x.astype(self.dtype, copy=False)), mesh, layout)
        made = arranged(term, [(name,) for name in output]).x
        assert isinstance(made, DistArray)
        if made.folded.block.key in lent or made.dtype != self.dtype:
            copied = DistArray.allocated(mesh, made.shape, self.dtype, made.layout)
            copied.tile[...] = made.tile
            made = copied
        if layout is None and made.layout.partial:
            layout = made.layout.single(mesh.grid)
        if layout is not None:
            made = made.redistribute(layout)
        return made.folded if made.ndim == 2 else made


def _most(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> int:
    return max(layout.region(shape, mesh.grid, rank).size for rank in range(mesh.grid.size))


def _long(term: Term, extents: dict[str, int]) -> list[str]:
    return [name for name in term.names if term.extent(name) == extents[name]]


def _faced(term: Term, leading: Groups, rows: Indices, cols: Indices) -> tuple[Term, bool]:
    """Return the operand as a batch of matrices, or of their transposes where it lies so; and whether it is these."""
    batch = tuple(name for group in leading for name in group)
    is_turned = term.names == (*batch, *cols, *rows) and bool(rows and cols)
    return arranged(term, [*leading, *((cols, rows) if is_turned else (rows, cols))]), is_turned


def _matrix(term: Term) -> DistMatrix | NDArray[Any]:
    return term.x if isinstance(term.x, np.ndarray) else term.x.folded
