"""Tensors known to a mesh: which of them lie in which of its matrices."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, bfloat16, from_numpy

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.torch.pool import ResultPool, ResultSlot, ShownTile
from rma_mm.torch.tensors import TYPES, array_of, check_mesh, dense

EXPOSED = 256  # matrices on the memory of tensors that are kept; each has a window, of which MPI libraries bear few

Place = tuple[object, ...]  # address, type and shape of a tensor, and the placement of its matrix


class KeptTensors:
    """The tensors of one mesh. Nothing here is alike on all ranks: who uses it asks the others."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.shown: WeakValueDictionary[int, ShownTile] = WeakValueDictionary()  # tiles that tensors show, by address
        self.exposed: OrderedDict[tuple[int, Place], DistMatrix] = OrderedDict()
        """Matrices on the memory of tensors, by the identity of the tensor whose memory it is, while that lives.

        Oldest use first."""
        self.pools: dict[tuple[object, ...], ResultPool] = {}  # by shape, element type and placement
        self._owners: dict[int, tuple[ref[Tensor], int]] = {}
        """Tensors that own storage, each with the address of its storage."""

    @classmethod
    def of(cls, mesh: Mesh) -> KeptTensors:
        """Return the kept tensors of `mesh`, which closes them. Raise MeshError for anything but a mesh."""
        found = check_mesh(mesh).kept.get(cls)
        if found is None:
            found = mesh.kept[cls] = cls(mesh)
        assert isinstance(found, cls)
        return found

    def close(self) -> None:
        """Forget all. Tensors keep their memory."""
        self.exposed.clear()
        self._owners.clear()
        self.pools.clear()

    # -- tensors in matrices ----------------------------------------------------------------------

    def lend(self, matrix: DistMatrix) -> Tensor:
        return self.show(ResultSlot(matrix))

    def show(self, slot: ResultSlot) -> Tensor:
        """Return the tile of the matrix in a slot as a tensor. Local."""
        matrix = slot.matrix
        assert matrix is not None
        tile: NDArray[Any] = matrix.tile
        is_bfloat16 = tile.dtype == BFLOAT16
        shown = (tile.view(np.int16) if is_bfloat16 else tile).view(ShownTile)
        shown.matrix, slot.shown = matrix, ref(shown)
        tensor = from_numpy(shown)
        tensor = tensor.view(bfloat16) if is_bfloat16 else tensor
        if tile.size:
            self.shown[tensor.data_ptr()] = shown
        else:
            tensor.rma_mm_tile = shown  # it has no address
        return tensor

    def pool(self, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> ResultPool:
        return self.pools.setdefault((shape, dtype, layout), ResultPool(self.mesh, shape, dtype, layout))

    def give(self, matrix: DistMatrix) -> DistMatrix:
        """Return the matrix to its user, who decides from now on how long it lives. Local."""
        for pool in self.pools.values():
            for slot in pool.slots:
                if slot.matrix is matrix:
                    slot.matrix = None
        return matrix

    def layout_of(self, tensor: Tensor) -> Layout | None:
        """Return the placement of the matrix of the mesh whose tile this is; None for other tensors. Local."""
        matrix = self.find(tensor) if isinstance(tensor, Tensor) else None
        return None if matrix is None else matrix.layout

    def find(self, tensor: Tensor, layout: Layout | None = None) -> DistMatrix | None:
        """Return the matrix of this rank's tile, placed as `layout` says (None: in any placement). Local."""
        if tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        shown = self.shown.get(address) if address else getattr(tensor, "rma_mm_tile", None)
        if shown is not None and not shown.matrix.is_closed:
            matrix = shown.matrix if _shows(tensor, shown.matrix) else shown.matrix.T
            return matrix if layout in (None, matrix.layout) and _shows(tensor, matrix) else None
        owner = owner_of(tensor)
        if address and not self._knows(owner):  # one that `detach` was called on lies on the same memory
            begin = tensor.untyped_storage().data_ptr()
            others = [known() for known, its in list(self._owners.values()) if its == begin]
            owner = next((other for other in others if other is not None and self._knows(other)), owner)
        name = id(owner), place_of(tensor, layout)
        if name not in self.exposed or not self._knows(owner):
            return None
        self.exposed.move_to_end(name)
        return self.exposed[name]

    def expose(self, tensor: Tensor, shape: Shape, layout: Layout) -> DistMatrix:
        """Return a matrix on the tensor's own memory; on a copy where its elements are not dense. Collective."""
        tile = dense(tensor)
        wanted = layout.region(shape, self.mesh.grid, self.mesh.rank).shape
        array = array_of(tile).reshape(wanted) if tile.numel() == 0 else array_of(tile)
        matrix = DistMatrix(self.mesh, shape, array.dtype, layout, DistMatrix.adopted(self.mesh, array))
        if tile.data_ptr() == tensor.data_ptr() and tile.stride() == tensor.stride():
            self._keep(tensor, matrix)
        return matrix

    def _knows(self, owner: Tensor) -> bool:
        """True if kept matrices lie on this tensor's present memory."""
        kept = self._owners.get(id(owner))
        return kept is not None and kept[1] == owner.untyped_storage().data_ptr() and kept[0]() is owner

    def _keep(self, tensor: Tensor, matrix: DistMatrix) -> None:
        """Know the matrix on a tensor's memory again, as long as that tensor lives."""
        owner = owner_of(tensor)
        name = id(owner)
        if not self._knows(owner):
            self._forget(name)
            forget = ref(owner, lambda _: self._forget(name))
            self._owners[name] = forget, owner.untyped_storage().data_ptr()
        self.exposed[name, place_of(tensor, matrix.layout)] = matrix
        if len(self.exposed) > EXPOSED:
            self.exposed.popitem(last=False)

    def _forget(self, owner: int) -> None:
        """Release a tensor's matrices, once the tensors of all ranks are gone."""
        for name in list(self.exposed):
            if name[0] == owner:
                self.exposed.pop(name, None)  # which may be gone by now: other tensors end at any time
        self._owners.pop(owner, None)


def owner_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def place_of(tensor: Tensor, layout: Layout | None) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, layout


def _shows(tensor: Tensor, matrix: DistMatrix) -> bool:
    """True if a tensor that begins where a matrix's tile does is that tile."""
    tile = matrix.tile
    if tensor.shape != tile.shape or TYPES.get(tensor.dtype) != matrix.dtype:
        return False
    strides = zip(tensor.shape, tensor.stride(), tile.strides, strict=True)
    return all(mine * tile.itemsize == its or extent == 1 for extent, mine, its in strides)
