"""Plans of products of batches: operands brought to where they are needed, and one batched product on each rank."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from math import prod
from operator import sub
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import ClosedError, DtypeError, LayoutError, MeshError, OptionError, ShapeError
from rma_mm.kernels.batched import Call, bind_batch
from rma_mm.kernels.elementwise import scalar
from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.matrices.array import DistArray, as_array
from rma_mm.runtime.matrices.matrix import DistMatrix, check_memory, copy_in
from rma_mm.runtime.matrices.move import Redistribution
from rma_mm.runtime.matrices.stored import identity_of
from rma_mm.runtime.products.batched.batch_choice import BatchChoice
from rma_mm.runtime.products.batched.checked import checked_batch
from rma_mm.runtime.products.prepared import OWN, BoundOperands
from rma_mm.runtime.ranks.agreement import Ballot, digest, disagree, in_words
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.windows import Counters, Window
from rma_mm.windows.hosts.liveness import CELLS, DOING, MULTIPLY, PRODUCT
from rma_mm.windows.waiting import barrier

BOUND = 8  # sets of operands that a product is kept bound to
Given = DistArray | DistMatrix | NDArray[Any]  # an operand as it is passed: an array is equal on every rank


@dataclass(frozen=True, eq=False)
class BoundBatch:
    """A rank's work for a product on given memory."""

    product: Call  # the local products
    windows: frozenset[Window]  # where operands and result are
    movers: frozenset[Window]  # what it moves them by

    def sync(self) -> None:
        """Make this rank's stores visible before the others read them."""
        for window in self.windows:
            window.sync()

    def traffic(self) -> tuple[int, int, int, int]:
        """Return all that this rank ever caused through these windows, in the order of `Counters`."""
        intra = inter = messages = messages_inter = 0
        for window in self.movers:
            counters = window.counters
            intra += counters.words_intra
            inter += counters.words_inter
            messages += counters.messages
            messages_inter += counters.messages_inter
        return intra, inter, messages, messages_inter


class BatchPlan:
    """C[…] = alpha · op(A[…]) @ op(B[…]) + beta · C[…], settled and prepared. Made by `plan`; collective to execute."""

    algorithm = "batch"

    def __init__(self, mesh: Mesh, choice: BatchChoice) -> None:
        self.mesh, self.choice = mesh, choice
        self.layouts = choice.layouts
        """Placements of A, B and C."""
        batch, operands = choice.request.batch, choice.request.operands
        self.options = operands.options
        each = (("A", operands.a), ("B", operands.b), ("C", operands.c))
        self._wanted = {x: (operand.dtype, batch.shape(x), choice.layouts[x]) for x, operand in each}
        """Element type, shape and placement of A, B and C."""
        self.serial = mesh.next_serial()
        self.ballot = Ballot(mesh.comm, "execute")
        self.words = Counters()
        """Words that this rank moved in the last execution."""
        self.watch = ProductWatch(mesh.metrics, ("batch", batch, operands.kind))
        self._latest: BoundOperands[BoundBatch] | None = None
        self._bound: OrderedDict[tuple[object, ...], BoundBatch] = OrderedDict()
        self._arrays = {x: self._allocated(x) for x in self.options.arrays}
        self._own_c: DistArray | None = None
        self._moving, self._redistributed = self._prepared()
        self._work = prod(map(self._extent, batch.extents))
        self._is_closed = False
        mesh.prepared.add(self)

    # -- what was decided -------------------------------------------------------------------------

    @property
    def c_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.choice.request.batch.shape("C")

    @property
    def c_dtype(self) -> np.dtype[Any]:
        """Element type of the result."""
        return self.choice.request.operands.c.dtype

    @property
    def kernel(self) -> str:
        """The local kernel."""
        return self.choice.request.operands.kernel

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest rank holds while the product runs."""
        return self.choice.load.nbytes

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of an execution."""
        return self.choice.load.seconds

    def explain(self, every: bool = False) -> str:
        """Explain how the product is cut, what that moves, and what alternatives would take."""
        return self.choice.explain()

    def __str__(self) -> str:
        return str(self.choice)

    # -- executing --------------------------------------------------------------------------------

    @serialized
    def execute(self, A: Given, B: Given, out: DistArray | None = None, c: DistArray | None = None) -> DistArray:
        """Multiply. Collective. Returns `out`, or the plan's own C. c: what beta multiplies instead of it.

        The operands must be placed as `layouts` says; arrays (for a plan that was made for arrays) must be equal on
        every rank, which is not checked here. Raises ShapeError, LayoutError, DtypeError, MeshError, OptionError,
        ClosedError; DisagreementError.
        """
        bound = self._latest
        if bound is None or bound.identities != tuple(map(identity_of, (A, B, out, c))):
            A, B, bound = self._agreed(A, B, out, c)
            self._latest = bound
        else:  # checked and bound already: only the other ranks remain to be asked
            assert not isinstance(A, np.ndarray) and not isinstance(B, np.ndarray)
            bound.executable.sync()
            self._vote(bound.facts, bound.digest, None)
        a, b, made = as_array(A), as_array(B), out if out is not None else self._c()
        added = c if self.options.beta != 0 else None
        with self._checks(a, b, made, added):
            if added is not None:
                made.tile[...] = added.tile
            self._run(bound.executable, a, b, made)
        return made

    def _checks(
        self, a: DistArray, b: DistArray, made: DistArray, added: DistArray | None
    ) -> AbstractContextManager[None]:
        """Return a context that checks the next products."""
        if self.mesh.checks is None:
            return nullcontext()
        request = self.choice.request
        return checked_batch(request.batch, request.operands, self.mesh.next_serial(), a, b, made, added)

    def _agreed(
        self, A: Given, B: Given, out: DistArray | None, c: DistArray | None
    ) -> tuple[DistArray | DistMatrix, DistArray | DistMatrix, BoundOperands[BoundBatch]]:
        """Return the operands, checked and bound, once all ranks have brought the same ones. Collective."""
        self.mesh.require_open()
        error: Exception | None = None
        facts: tuple[object, ...] = ()
        try:
            if self._is_closed:
                raise ClosedError("plan: it is closed; make a new one")
            if out is None and c is None and self.options.beta != 0:
                raise OptionError(f"beta: got {self.options.beta}; beta other than 0 adds to C, so pass out, or c")
            left, right = self._staged_input("A", A), self._staged_input("B", B)
            for matrix, said in ((out, "C"), (c, "c")):
                if matrix is not None:
                    self._check("C", matrix, said)
            folded = [None if x is None else x.folded for x in (out, c, self._own_c)]
            check_memory(as_array(left).folded, as_array(right).folded, *folded)
            added = None if c is None else c.facts
            facts = (self.serial, left.facts, right.facts, added, out.facts if out is not None else OWN)
            for window in {x.block.window for x in (left, right, out) if x is not None}:
                window.sync()  # what this rank stored, before the others may read it
        except Exception as caught:  # noqa: BLE001 - agreed on below, in one allreduce
            error = caught
        hashed = digest(facts)
        self._vote(facts, hashed, error)
        made = out if out is not None else self._c()
        executable = self._bind_once(as_array(left), as_array(right), made)
        return left, right, BoundOperands((left, right, out, c), executable, facts, hashed)

    def _vote(self, facts: tuple[object, ...], hashed: int, error: Exception | None) -> None:
        """Vote: one allreduce that is agreement and start barrier at once; details are exchanged only if it fails."""
        if not self.ballot.cast(hashed, error is not None, self.watch.piggyback()):
            disagree(self.ballot, in_words(dict(zip(("plan", "A", "B", "c", "C"), facts, strict=False))), error)
        self.watch.act_on_votes(self.ballot.votes)

    def _run(self, mine: BoundBatch, a: DistArray, b: DistArray, c: DistArray) -> None:
        tally, before, begun = self.mesh.metrics.tally, mine.traffic(), clock()
        multiplied, waited = tally.multiplying, tally.waiting
        CELLS[PRODUCT] = tally.products + 1
        for x, matrix in (("A", a), ("B", b)):
            if x in self._moving:
                self._moving[x].run(matrix.folded)
        with using_threads(self.mesh.threads):
            self._multiply(mine.product)
        if "C" in self._moving:
            self._move_c(c)
        self.words = Counters(*map(sub, mine.traffic(), before))
        took = clock() - begun, tally.multiplying - multiplied, tally.waiting - waited
        self.watch.note(*took, self._work, self.words)

    def _multiply(self, product: Call) -> None:
        tally, begun = self.mesh.metrics.tally, clock()
        CELLS[DOING] = MULTIPLY
        with self.mesh.progress:
            self.mesh.progress.during(product)
        tally.multiplying += clock() - begun
        tally.work += self._work

    def _move_c(self, c: DistArray) -> None:
        """Move the product to where C lies, and add it to C."""
        redistributions, made = self._moving["C"], self._redistributed["C"]
        made.folded.block.window.sync()
        barrier(self.mesh.comm)  # everyone's products are there
        redistributions.run(made.folded)
        tile, add = c.folded.tile, self.choice.request.operands.semiring.add
        with np.errstate(all="ignore"):
            if self.options.beta == 0:
                tile[...] = redistributions.result
            else:  # in the type of sums, and rounded once
                old = tile.astype(redistributions.result.dtype, copy=False)
                tile[...] = add(old * scalar(self.options.beta, self.c_dtype, "beta"), redistributions.result)

    # -- operands ---------------------------------------------------------------------------------

    def _staged_input(self, name: str, x: Given) -> DistArray | DistMatrix:
        """Return an operand, checked; one that is given as an array is copied into the plan's own."""
        if isinstance(x, DistArray | DistMatrix):
            self._check(name, x, name)
            return x
        if name not in self._arrays:
            raise LayoutError(f"{name}: got {type(x).__name__}; this plan was made for a DistArray")
        copy_in(name, x, self._arrays[name])
        return self._arrays[name]

    def _check(self, name: str, x: object, said: str) -> None:
        """Raise an error if the argument `said` is not the A, B or C (`name`) of this plan."""
        if not isinstance(x, DistArray | DistMatrix):
            raise LayoutError(f"{said}: got {type(x).__name__}; execute takes DistArray, or DistMatrix")
        if x.mesh is not self.mesh:
            raise MeshError(f"{said}: it lives on {x.mesh!r}; the plan is for {self.mesh!r}")
        got, wanted = (x.dtype, x.shape, x.layout), self._wanted[name]
        for mine, fits, kind in zip(got, wanted, (DtypeError, ShapeError, LayoutError), strict=True):
            if mine != fits:
                raise kind(
                    f"{said}: got {x.dtype} of shape {x.shape} placed as {x.layout}; the plan is for {wanted[0]} of "
                    f"shape {wanted[1]} placed as {wanted[2]}"
                )

    def _allocated(self, x: str) -> DistArray:
        """Return a new array for an operand, or for C. Collective."""
        dtype, shape, layout = self._wanted[x]
        return DistArray.allocated(self.mesh, shape, dtype, layout)

    def _c(self) -> DistArray:
        """Return the plan's own C, made when first wanted. Collective then."""
        if self._own_c is None:
            self._own_c = self._allocated("C")
        return self._own_c

    # -- preparing --------------------------------------------------------------------------------

    def _prepared(self) -> tuple[dict[str, Redistribution], dict[str, DistArray]]:
        """Return the redistributions of operands and of C, by name, and C as it is summed."""
        moving, brought = {}, {}
        for x, (shape, dtype, source, target) in self.choice.moves.items():
            if x == "C":
                brought[x] = DistArray.allocated(self.mesh, self.c_shape, dtype, self.choice.inner[x])
            result = np.empty(target.region(shape, self.mesh.grid, self.mesh.rank).shape, dtype)
            moving[x] = Redistribution(self.mesh, shape, dtype, source, target, result, None)
        return moving, brought

    def _extent(self, dim: str) -> int:
        """Indices of a dimension that this rank multiplies."""
        request, mesh = self.choice.request, self.mesh
        x = next(x for x in "CAB" if dim in request.batch.dims(x))
        region = self.choice.inner[x].region(request.batch.shape(x), mesh.grid, mesh.rank)
        return len(region[request.batch.dims(x).index(dim)])

    def _bind_once(self, a: DistArray, b: DistArray, c: DistArray) -> BoundBatch:
        """Return this rank's work with these operands, bound at their first use."""
        key = tuple((*x.block.key, x.folded.flipped) for x in (a, b, c))
        if key not in self._bound:
            if len(self._bound) >= BOUND:
                self._bound.popitem(last=False)
            moved = {x.block.window for x in (a, b, *self._redistributed.values())} if self._moving else set()
            moved |= {
                block.window for redistributions in self._moving.values() for block in redistributions.blocks.values()
            }
            windows = frozenset(x.block.window for x in (a, b, c))
            with using_threads(self.mesh.threads):  # products are cut for them
                self._bound[key] = BoundBatch(self._bind(a, b, c), windows, frozenset(moved))
        self._bound.move_to_end(key)
        return self._bound[key]

    def _bind(self, a: DistArray, b: DistArray, c: DistArray) -> Call:
        o, operands = self.options, self.choice.request.operands
        left, right, made = (self._local(x, array) for x, array in (("A", a), ("B", b), ("C", c)))
        if o.transpose_a:
            left = left.swapaxes(-1, -2)
        if o.transpose_b:
            right = right.swapaxes(-1, -2)
        beta = 0 if "C" in self._moving else o.beta
        kernel, semiring = operands.kernel, operands.semiring
        return bind_batch(left, right, made, o.alpha, beta, o.conjugate_a, o.conjugate_b, kernel, semiring)

    def _local(self, x: str, given: DistArray) -> NDArray[Any]:
        """This rank's part of an operand where it is needed, without keeping a matrix alive."""
        extents = self.choice.inner[x].region(self._wanted[x][1], self.mesh.grid, self.mesh.rank).shape
        if x in "AB" and x in self._moving:
            return self._moving[x].result.reshape(extents)
        folded = self._redistributed.get(x, given).folded
        local = folded.block.unheld().local
        return local.T if folded.flipped else local.reshape(extents)

    def close(self) -> None:
        """Give the plan's memory back, once all ranks have; its own C lives on while it is in use.

        Local, and may be repeated.
        """
        self._is_closed = True
        self._latest = None
        self._bound.clear()
        for redistributions in self._moving.values():
            redistributions.close()
        for array in (*self._arrays.values(), *self._redistributed.values()):
            array.close()
        self._own_c = None

    def forget(self, window: Window) -> None:
        """Drop bound operations because a window will be closed."""
        self._latest = None
        self._bound.clear()

    def __enter__(self) -> BatchPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
