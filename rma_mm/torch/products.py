"""Products of tensors, each rank's tensor being its tile of a matrix, with gradients."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rma_mm.errors import DtypeError, LayoutError, RmaError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.runtime.execution.operands import flag
from rma_mm.runtime.matrices.arguments import checksum, default_layout, in_order
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.ranks.agreement import Ballot, digest, in_words, require_alike
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.torch.derivatives import DERIVATIVES, KEEPS_SUMS, TWICE
from rma_mm.torch.kept import KeptTensors
from rma_mm.torch.pool import SLOTS, ResultPool, ResultSlot, free_slots, taken
from rma_mm.torch.product import LinearRequest, TorchProduct, gradient_layout
from rma_mm.torch.recent import RecentCalls
from rma_mm.torch.tensors import TYPES, array_of, check_mesh, check_tensor, tensor_of, whole_shape

PRODUCTS = 64  # kinds of products that are kept for a mesh, with the scratch memory of their plans
GRADIENTS = ("x", "w", "bias")
NONE = (False, False, False)  # where no gradient is wanted


def mm(
    x: Tensor, w: Tensor, mesh: Mesh, x_layout: str | Layout | None = None, w_layout: str | Layout | None = None,
    layout: str | Layout | None = None, transpose_w: bool = False,
) -> Tensor:
    """Return the product y = x @ w, or x @ w.T, of which each rank passes and gets its tile; differentiable.

    Collective, as is the backward pass: all ranks run it on the same graph.

    Parameters
    ----------
    x : Tensor
        This rank's tile of a matrix (m, k).
    w : Tensor
        This rank's tile of a matrix (k, n), or (n, k) if `transpose_w`, of the same type.
    mesh : Mesh
        The ranks.
    x_layout, w_layout : str or Layout, optional
        Placements of x and w. By default those of the matrices whose tiles they are (results, `empty`), else blocks.
    layout : str or Layout, optional
        Placement of y; by default the plan chooses it (see `matrix_of`).
    transpose_w : bool
        True for x @ w.T (default False).

    Returns
    -------
    Tensor
        This rank's tile of y, in memory of the mesh.

    Raises
    ------
    RmaError
        LayoutError, ShapeError, DtypeError or MeshError for arguments that do not fit. DisagreementError, also if only
        some ranks want a gradient.

    Notes
    -----
    Tensors are multiplied where they lie: in memory of the mesh (results, `empty`), or behind a window that opens when
    a tensor is first seen and stays while it lives. A tensor whose rows and columns are both strided is copied.
    Gradients lie as their tensors do. The gradient of a replicated tile is the whole gradient on each rank; for a
    replicated y every rank must pass the same one. That of a summand is the gradient of the sum. With create_graph=True
    gradients can be differentiated again.
    """
    if x_layout is None or w_layout is None:
        tensors, blocks = KeptTensors.of(mesh), default_layout(mesh)
        x_layout, w_layout = (
            place if place is not None else tensors.layout_of(each) or blocks
            for place, each in ((x_layout, x), (w_layout, w))
        )
    return multiplied(mesh, x, w, None, x_layout, w_layout, layout, transpose_w, None)


def multiplied(
    mesh: Mesh, x: Tensor, w: Tensor, bias: Tensor | None, x_layout: str | Layout, w_layout: str | Layout,
    layout: str | Layout | None, transpose_w: bool, activation: str | None,
) -> Tensor:
    """activation(x @ w + bias): `mm` with an epilogue. bias: this rank's columns of it. Collective."""
    kept, given = KeptProducts.of(mesh), (x, w, bias)
    is_trained = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in given)
    asked: LinearRequest | RmaError
    try:
        for name, place in (("x_layout", x_layout), ("w_layout", w_layout), ("layout", layout)):
            if not isinstance(place, str | Layout) and (name != "layout" or place is not None):
                raise LayoutError(f"{name}: got {place!r}; write text as \"P('i', 'j')\", or pass a Layout")
        options = bias is not None, activation, is_trained and activation in KEEPS_SUMS
        asked = request_of(mesh.grid, x_layout, w_layout, layout, flag("transpose_w", transpose_w), *options)
    except RmaError as error:  # the others must hear of it
        asked = error
    y: Tensor
    with torch.profiler.record_function("rma_mm::multiply"):
        if is_trained:
            y = _Multiply.apply(x, w, bias, kept, asked)
        else:
            _, _, (y,) = kept.multiply(asked, given, NONE)
    return y


@lru_cache(maxsize=256)
def request_of(
    mesh: MeshShape, x_layout: str | Layout, w_layout: str | Layout, layout: str | Layout | None, transpose_w: bool,
    has_bias: bool, activation: str | None, keeps_sums: bool,
) -> LinearRequest:
    """Return the arguments as values. Raises LayoutError."""
    places: list[Layout | None] = []
    for name, place in (("x_layout", x_layout), ("w_layout", w_layout), ("layout", layout)):
        places.append(parse_layout(place, mesh) if isinstance(place, str) else place)
        if isinstance(place, Layout):
            _check_axes(name, place, mesh)
    x_place, w_place, y_place = places
    assert x_place is not None and w_place is not None
    return LinearRequest(x_place, w_place, y_place, transpose_w, has_bias, activation, keeps_sums)


def _check_axes(name: str, place: Layout, mesh: MeshShape) -> None:
    """Check that the mesh has these axes; raise LayoutError otherwise."""
    grid = place.mesh(mesh)
    named = {*place.split_axes, *place.skew_axes, *place.partial, *(axis for axis, _ in place.pins)}
    if grid.size > mesh.size or not named <= set(grid.names):
        raise LayoutError(f"{name}: got {place}; the mesh {mesh} has the axes {', '.join(mesh.names)}")


def empty(
    shape: Shape, mesh: Mesh, layout: str | Layout | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return this rank's tile of a new matrix with undefined elements, in memory of the mesh.

    Collective. Products use the tile in place, and ranks of a node read it in place.

    Parameters
    ----------
    shape : tuple of int
        (rows, columns) of the whole matrix.
    mesh : Mesh
        The ranks.
    layout : str or Layout, optional
        Placement; blocks by default.
    dtype : torch.dtype
        Element type; float32 by default.

    Returns
    -------
    Tensor
        The tile.

    Raises
    ------
    LayoutError, ShapeError, DtypeError, MeshError
        If the arguments do not fit.
    """
    mesh, layout, dtype = in_order(mesh, layout, dtype)
    return KeptTensors.of(mesh).lend(DistMatrix.empty(shape, mesh, layout, TYPES.get(dtype, dtype)))


def matrix_of(tensor: Tensor, mesh: Mesh) -> DistMatrix:
    """Return the matrix whose tile this tensor is.

    Local.

    Parameters
    ----------
    tensor : Tensor
        A result of `mm` or `Linear`, or made by `empty`.
    mesh : Mesh
        The ranks.

    Returns
    -------
    DistMatrix
        The matrix.

    Raises
    ------
    LayoutError
        If the tensor is no tile of a matrix.
    MeshError
        If the mesh is closed.
    """
    kept = KeptTensors.of(mesh)
    found = kept.find(check_tensor("tensor", tensor))
    if found is None:
        raise LayoutError(
            f"tensor: got one of shape {tuple(tensor.shape)} that is no whole tile of a matrix on {mesh!r}; results of "
            f"mm are, DistMatrix.from_local takes others (by .numpy())"
        )
    return kept.give(found)


class KeptProducts:
    """The products of tensors that a mesh keeps. All ranks keep and forget alike."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.tensors = mesh, KeptTensors.of(mesh)
        self.kinds: OrderedDict[tuple[object, ...], TorchProduct] = OrderedDict()
        """Products by request, shapes and element type, least recently used first."""
        self.by_tiles: dict[tuple[object, ...], tuple[object, ...]] = {}
        """The key of what was computed last of tiles of such shapes."""
        self.recent = RecentCalls()
        self.ballot, self.backward = Ballot(mesh.comm, "torch.mm"), Ballot(mesh.comm, "the backward pass of torch.mm")

    @classmethod
    def of(cls, mesh: Mesh) -> KeptProducts:
        """Return the products kept with `mesh`, which closes them."""
        found = check_mesh(mesh).kept.get(cls)
        mesh.require_open()
        if found is None:
            found = mesh.kept[cls] = cls(mesh)
        assert isinstance(found, cls)
        return found

    def close(self) -> None:
        self.kinds.clear()
        self.by_tiles.clear()
        self.recent.clear()

    # -- what is multiplied -----------------------------------------------------------------------

    @serialized
    def multiply(
        self, asked: LinearRequest | RmaError, tensors: Sequence[Any], wants: tuple[bool, ...]
    ) -> tuple[TorchProduct, tuple[DistMatrix, DistMatrix], list[Tensor]]:
        """Return the product of x, w and bias, where x and w lie, and the results. Collective.

        wants: of which of them a gradient is wanted. The ballot that opens the plan's execution is the only one where
        all ranks know all of it from before.
        """
        product, a, b = self.known(asked, tensors)
        pools: list[ResultPool] = []
        told: tuple[int, ...] = ()
        value = 0
        if product is not None and product.y_layout is not None and a is not None and b is not None:
            pools, told = product.pools(*product.results), product.opening("y", a, b)
            value = digest(product.serial, a.facts, b.facts, wants, bool(told))
        free = free_slots(pools)
        is_known = self.ballot.cast(value, not pools, (*_twice(free), *told))
        most, least, *opened = self.ballot.votes
        if not is_known:
            told = ()
            product, a, b = self._settled(asked, tensors, wants, a, b)
            pools = product.pools(*product.results)
        assert product is not None and a is not None and b is not None
        self.kinds.move_to_end(product.key)
        slots = taken(pools, free if is_known and most == -least else None)
        shown = [self.tensors.show(slot) for slot in slots]
        assert slots[0].matrix is not None
        product.y(a, b, tensors[2], slots[0].matrix, opened if told else None)
        return product, (a, b), shown

    def known(
        self, asked: LinearRequest | RmaError, tensors: Sequence[Any]
    ) -> tuple[TorchProduct | None, DistMatrix | None, DistMatrix | None]:
        """Return this rank's knowledge of such tensors; nothing if they are not what they should be."""
        if (recent := self.recent.find(asked, tensors)) is not None:
            return recent
        if isinstance(asked, RmaError) or _fault(tensors) is not None:
            return None, None, None
        x, w, _ = tensors
        product = self.kinds.get(self.by_tiles.get(_by_tiles(asked, tensors), ()))
        a, b = self.tensors.find(x, asked.x_layout), self.tensors.find(w, asked.w_layout)
        if product is not None and a is not None and b is not None:
            self.recent.keep(asked, tensors, product, a, b)
        return product, a, b

    @serialized
    def found(
        self, asked: LinearRequest, tensors: Sequence[Any], wants: tuple[bool, ...]
    ) -> tuple[TorchProduct, DistMatrix, DistMatrix]:
        """Return the product of tensors, and where x and w lie, as ranks know it from before or settle it. Collective.

        A compiled backward pass may bring the tensors of the forward pass as other objects.
        """
        product, a, b = self.known(asked, tensors)
        if product is None or a is None or b is None:
            self.backward.cast(0, failed=True)
        elif self.backward.cast(digest("found", product.serial, a.facts, b.facts)):
            return product, a, b
        return self._settled(asked, tensors, wants, a, b)

    def _settled(
        self, asked: LinearRequest | RmaError, tensors: Sequence[Any], wants: tuple[bool, ...],
        *found: DistMatrix | None,
    ) -> tuple[TorchProduct, DistMatrix, DistMatrix]:
        """Resolve tensors that ranks do not know, or know differently, and expose those outside the mesh's memory.

        Collective.
        """
        error = asked if isinstance(asked, RmaError) else _fault(tensors)
        facts: dict[str, object] = {"gradients wanted of x, w and bias": wants}
        if error is None:
            assert isinstance(asked, LinearRequest)
            facts |= asked.facts | {"element type": tensors[0].dtype}
        require_alike(self.ballot, in_words(facts), error)
        assert isinstance(asked, LinearRequest)
        shapes = [None if each is None else tuple(each.shape) for each in tensors]
        everyone = self.mesh.comm.allgather((shapes, [None if each is None else each.facts for each in found]))
        product = self._product(asked, [shapes for shapes, _ in everyone], tensors)
        places = []
        for n, (tensor, matrix) in enumerate(zip(tensors, found, strict=False)):
            is_common = matrix is not None and all(facts[n] == matrix.facts for _, facts in everyone)
            layout = (asked.x_layout, asked.w_layout)[n]
            places.append(matrix if is_common else self.tensors.expose(tensor, product.shapes[n], layout))
        a, b = places
        assert a is not None and b is not None
        _warn_of_equal_tiles(self.mesh, asked.x_layout, product.shapes[0], tensors[0])
        product.plan("y", a, b)
        self._check_bias(product, [shapes[2] for shapes, _ in everyone])
        self.by_tiles[_by_tiles(asked, tensors)] = product.key
        return product, a, b

    def _product(self, asked: LinearRequest, tiles: list[Any], tensors: Sequence[Any]) -> TorchProduct:
        """Return the product of matrices whose tiles, by rank, have these shapes.

        Collective. ShapeError, LayoutError.
        """
        x = whole_shape("x", asked.x_layout, [shapes[0] for shapes in tiles], self.mesh.grid)
        w = whole_shape("w", asked.w_layout, [shapes[1] for shapes in tiles], self.mesh.grid)
        key = (asked, x, w, tensors[0].dtype)
        if key not in self.kinds:
            made = TorchProduct(self.tensors, asked, x, w, TYPES[tensors[0].dtype])
            if len(self.kinds) >= PRODUCTS:
                self._forget()
            made.key = key
            self.kinds[key] = made
        return self.kinds[key]

    def _forget(self) -> None:
        """Drop the product that was used longest ago, and the memory for results of none but it."""
        key, product = self.kinds.popitem(last=False)
        product.close()
        self.recent.clear()
        self.by_tiles = {tiles: kind for tiles, kind in self.by_tiles.items() if kind != key}
        used = {id(pool) for kind in self.kinds.values() for pool in kind.known_pools.values()}
        self.tensors.pools = {name: pool for name, pool in self.tensors.pools.items() if id(pool) in used}

    def _check_bias(self, product: TorchProduct, shapes: list[Any]) -> None:
        """Raise ShapeError if a rank's bias does not match its columns of y."""
        for rank, shape in enumerate(shapes):
            if shape is not None and shape != (len(product.columns(rank)),):
                raise ShapeError(
                    f"bias: got shape {shape} on rank {rank}; with y placed as {product.y_layout} it has the columns "
                    f"of y that the rank holds, {len(product.columns(rank))} values"
                )

    @serialized
    def gradients(
        self, product: TorchProduct, matrices: tuple[DistMatrix, DistMatrix], dy: Tensor, seen: Tensor | None,
        wants: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Return the gradients of x, w and bias that are wanted, of that of activation(x @ w + bias). Collective.

        matrices: x and w. seen: what the activation's derivative is taken of; None if nothing was applied.
        """
        wanted = [what for what, is_wanted in zip(GRADIENTS, wants, strict=True) if is_wanted]
        pools = product.pools("dy", *wanted)
        free = free_slots(pools)
        own = pools[0].slots[free[0]] if free[0] < len(pools[0].slots) else None
        matrix = self.tensors.find(dy, pools[0].layout) if seen is None else None
        name = 0 if matrix is None else 2 * matrix.block.serial + matrix.flipped
        if matrix is None and own is not None:  # before the ballot, which shows that it is there on every rank
            matrix = _filled(own, product, dy, seen)
        told = product.opening(wanted[0], *product.operands(wanted[0], matrix, *matrices))
        value = digest("backward", product.serial, wants, bool(told), *(each.facts for each in matrices))
        is_known = self.backward.cast(value, False, (*_twice(free), name, -name, *told))
        most, least, high, low, *opened = self.backward.votes
        if not is_known:
            facts = {"y": ((product.m, product.n), str(product.y_layout)), "gradients wanted of x, w and bias": wants}
            require_alike(self.backward, in_words(facts), None)
        slot, *slots = taken(pools, free if most == -least else None)
        is_found = high == -low != 0
        if not is_found and matrix is not slot.matrix:
            matrix = _filled(slot, product, dy, seen)
        assert matrix is not None
        opens = bool(told) and is_known and (is_found or (most == -least and high == -low))
        found: list[Tensor | None] = [None] * len(GRADIENTS)
        for what, slot in zip(wanted, slots, strict=True):
            shown = self.tensors.show(slot)
            assert slot.matrix is not None
            product.gradient(what, matrix, *matrices, slot.matrix, opened if opens else None)
            found[GRADIENTS.index(what)], opens = shown, False
        return found


def _warn_of_equal_tiles(mesh: Mesh, layout: Layout, shape: Shape, x: Tensor) -> None:
    """Warn on rank 0 if ranks that hold different rows of x passed the same numbers: each the whole batch.

    Collective. Tiles of a single number do not count.
    """
    grid = layout.mesh(mesh.grid)
    mine = layout.region(shape, mesh.grid, mesh.rank)
    is_varied = bool(mine) and x.numel() > 1 and bool((x != x.reshape(-1)[0]).any())
    print_ = checksum(array_of(x.contiguous())) if is_varied else ""
    everyone = mesh.comm.allgather((str(mine[0]), str(mine[1]), print_))
    by_content: dict[tuple[str, str], set[str]] = {}
    for rows, columns, content in everyone[: grid.size]:
        if content:
            by_content.setdefault((columns, content), set()).add(rows)
    most = max(map(len, by_content.values()), default=0)
    if mesh.rank == 0 and most > 1:
        warnings.warn(
            f"x: {most} ranks passed the same numbers as different rows of a matrix of {shape[0]} rows; each rank "
            f"passes its own rows, as x[layer.rows(len(x))], or names an x_layout that replicates them",
            stacklevel=5,
        )


def _filled(slot: ResultSlot, product: TorchProduct, dy: Tensor, seen: Tensor | None) -> DistMatrix:
    """Return the gradient of x @ w + bias in its final place. Local."""
    assert slot.matrix is not None
    into = tensor_of(slot.matrix.tile)
    if seen is None:
        into.copy_(dy)
    else:
        DERIVATIVES[product.request.activation](dy, seen, into)
    return slot.matrix


def _by_tiles(asked: LinearRequest, tensors: Sequence[Any]) -> tuple[object, ...]:
    """Return the facts of a product that this rank sees."""
    x, w, bias = tensors
    return asked, x.shape, w.shape, x.dtype, bias if bias is None else bias.shape


def _fault(tensors: Sequence[Any]) -> RmaError | None:
    """Return the error of x, w and bias on this rank, or None."""
    try:
        for name, each in zip("xw", tensors, strict=False):
            check_tensor(name, each)
        bias = tensors[2]
        if bias is not None:
            check_tensor("bias", bias[None] if isinstance(bias, Tensor) and bias.dim() == 1 else bias)
        types = [each.dtype for each in tensors if each is not None]
        if len(set(types)) > 1:
            got = ", ".join(map(str, types))
            raise DtypeError(f"x, w{', bias' * (bias is not None)}: got {got}; they must have one type: convert by .to")
    except RmaError as error:
        return error
    return None


def _twice(free: tuple[int, ...]) -> tuple[int, int]:
    """Return two numbers whose maxima over ranks show if all ranks have the same slots free."""
    code = 0
    for slot in free:
        code = code * (SLOTS + len(free) + 1) + slot
    return code, -code


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, kept: KeptProducts, asked: LinearRequest
    ) -> Tensor:
        product, matrices, (seen, *applied) = kept.multiply(asked, (x, w, bias), ctx.needs_input_grad[:3])
        if asked.keeps_sums:
            torch.ops.aten.gelu.out(seen, out=applied[0])
        if any(ctx.needs_input_grad):
            ctx.kept, ctx.product, ctx.matrices = kept, product, matrices
            again = bias if asked.keeps_sums else None  # what the sums are made of, if they are to be a function
            ctx.save_for_backward(x, w, again, seen if asked.activation else None)  # to hear of changes made in place
        return applied[0] if applied else seen

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Collective. Differentiable again, by products of the same kind, where a graph of it is wanted."""
        x, w, bias, seen = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(ctx.product, dy, (x, w, bias), seen, ctx.needs_input_grad)
        else:
            found = ctx.kept.gradients(ctx.product, ctx.matrices, dy, seen, ctx.needs_input_grad[:3])
        shapes = x.shape, w.shape, (-1,)
        return *(each if each is None else each.reshape(to) for each, to in zip(found, shapes, strict=True)), None, None


def _differentiable(
    product: TorchProduct, dy: Tensor, tensors: Sequence[Tensor], seen: Tensor | None, wants: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of x, w and bias as differentiable functions of y's gradient. Collective."""
    x, w, bias = tensors
    asked, mesh = product.request, product.mesh
    assert product.y_layout is not None
    y_layout, turned = gradient_layout(product.y_layout), asked.transpose_w
    if asked.keeps_sums:  # what gelu's derivative is taken of, as a function too
        seen = multiplied(mesh, x, w, bias, asked.x_layout, asked.w_layout, product.y_layout, turned, None)
    if seen is not None:
        dy = TWICE[asked.activation](dy, seen)
    found: list[Tensor | None] = [None, None, None]
    if wants[0]:
        found[0] = mm(dy, w.conj(), mesh, y_layout, asked.w_layout, gradient_layout(asked.x_layout), not turned)
    if wants[1]:
        a, a_layout, b, b_layout = x.mH, asked.x_layout.T, dy, y_layout
        if turned:
            a, a_layout, b, b_layout = dy.mT, y_layout.T, x.conj(), asked.x_layout
        found[1] = mm(a, b, mesh, a_layout, b_layout, gradient_layout(asked.w_layout))
    if wants[2]:
        rows = replace(y_layout, splits=((), y_layout.splits[0]))
        ones = dy.new_ones((1, dy.shape[0]))
        found[2] = mm(ones, dy, mesh, rows, y_layout, replace(y_layout, splits=((), y_layout.splits[1])))
    return found
