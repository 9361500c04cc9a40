"""Tensors as arrays on the same memory and back, and what tensors must be to be tiles of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED
from rma_mm.errors import DtypeError, LayoutError, MeshError, ShapeError, quoted
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.runtime.ranks.mesh import Mesh

TYPES: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, dtype.name): dtype for dtype in SUPPORTED if hasattr(torch, dtype.name)
}
"""Element types that both have; bfloat16 among them."""


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a CPU tensor as an array on the same memory; bfloat16 as that of ml_dtypes.

    That goes by its bits: by DLPack NumPy 2.4 takes no bfloat16 ("Unsupported dtype in DLTensor"), and gives none
    ("DLPack only supports signed/unsigned integers, float and complex dtypes").
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return np.asarray(plain.view(torch.int16).numpy()).view(TYPES[plain.dtype])
    return np.asarray(plain.numpy())


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return the elements of an array as a tensor on the same memory, which holds the array alive."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its rows or columns are dense in memory, as those of a tile are; else a copy."""
    strides, shape = tensor.stride(), tensor.shape
    is_dense = (1 in strides and 0 not in strides) or 1 in shape or 0 in shape
    return tensor.resolve_conj().resolve_neg() if is_dense else tensor.contiguous()


def check_mesh(mesh: object) -> Mesh:
    """`mesh`, if it is one. Raises MeshError."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh: got {type(mesh).__name__}; pass a Mesh")
    return mesh


def check_tensor(name: str, x: object) -> torch.Tensor:
    """`x`, if it can be a rank's tile of a matrix. Raises LayoutError, ShapeError, DtypeError."""
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"{name}: got {type(x).__name__}; must be a torch.Tensor, this rank's tile")
    if hasattr(x, "placements"):
        raise LayoutError(
            f"{name}: got a DTensor; pass its to_local() and its layout, or make it a matrix by from_dtensor"
        )
    if x.device.type != "cpu":
        raise LayoutError(f"{name}: got a tensor on {x.device}; tiles lie in the memory of the CPU: pass {name}.cpu()")
    if x.layout != torch.strided:
        raise LayoutError(f"{name}: got a tensor of {x.layout}; tiles are dense: pass {name}.to_dense()")
    if x.dim() != 2:
        raise ShapeError(f"{name}: got a tensor of shape {tuple(x.shape)}; a tile has two dimensions: reshape it")
    if x.dtype not in TYPES:
        raise DtypeError(f"{name}: got {x.dtype}; supported are {', '.join(dtype.name for dtype in TYPES.values())}")
    return x


def whole_shape(name: str, layout: Layout, tiles: list[tuple[int, ...]], mesh: MeshShape) -> tuple[int, int]:
    """Return the shape of the matrix whose tiles, by rank, have these shapes. Raises ShapeError, LayoutError."""
    grid = layout.mesh(mesh)
    base = dict.fromkeys(grid.names, 0) | dict(layout.pins)
    shape = []
    for dim, split in enumerate(layout.splits):
        axes = tuple(axis for level in split for axis in level.axes)
        shape.append(sum(tiles[grid.rank(at)][dim] for at in grid.along(axes, base)))
    rows, cols = shape
    layout.check((rows, cols), mesh)
    for rank, tile in enumerate(tiles):
        wanted = layout.region((rows, cols), mesh, rank).shape
        if tile != wanted and not (0 in tile and 0 in wanted):
            raise ShapeError(
                f"{name}: got a tile of {tile} on rank {rank}; of a matrix of {(rows, cols)}, as the tiles of all "
                f"ranks make it, the layout {quoted(str(layout))} gives it {wanted}"
            )
    return rows, cols
