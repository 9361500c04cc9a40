"""DTensors as matrices and back, on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed import get_rank, is_available, is_initialized
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rma_mm.errors import LayoutError, MeshError, ShapeError
from rma_mm.geometry.notations.dtensor import placements_of, sharded
from rma_mm.geometry.notations.sbp import Placed
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.torch.kept import KeptTensors
from rma_mm.torch.tensors import array_of, check_mesh, check_tensor

PLACEMENTS: dict[Placed, Placement] = {"S(0)": Shard(0), "S(1)": Shard(1), "B": Replicate(), "P": Partial("sum")}
"""Placements of PyTorch by their words in SBP."""


class TorchRanks:
    """The rank in torch.distributed of each rank of a mesh, asked for once."""

    def __init__(self, mesh: Mesh) -> None:
        with agreed(mesh.comm, "torch.distributed"):
            if not (is_available() and is_initialized()):
                raise MeshError(
                    "torch.distributed: it is not initialised on this rank; first call init_process_group('gloo', "
                    "init_method=…, world_size=mesh.size, rank=mesh.rank)"
                )
        self.ranks: list[int] = mesh.comm.allgather(get_rank())
        self._check_order(mesh)
        self.device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> TorchRanks:
        """Return the record kept with `mesh`, made at the first call.

        Collective when first asked for. Raises MeshError.
        """
        found = check_mesh(mesh).kept.get(cls)
        if found is None:
            found = mesh.kept[cls] = cls(mesh)
        assert isinstance(found, cls)
        return found

    def close(self) -> None:
        """Do nothing: no memory or handle of PyTorch is held."""

    def _check_order(self, mesh: Mesh) -> None:
        """Raise MeshError if ranks do not ascend along the axes: PyTorch's groups do, and mix up shards then."""
        grid = np.reshape(self.ranks[: mesh.grid.size], mesh.grid.dims)
        if any((np.diff(grid, axis=axis) <= 0).any() for axis in range(grid.ndim)):
            raise MeshError(
                f"torch.distributed: it has the mesh's ranks as {grid.tolist()}; they must ascend along "
                f"each axis: call init_process_group(…, rank=mesh.rank)"
            )

    def check(self, device_mesh: DeviceMesh, mesh: Mesh) -> None:
        """Raise MeshError if its ranks are not those of `mesh` in the same order."""
        grid = np.asarray(device_mesh.mesh.cpu().numpy())
        wanted = np.reshape(self.ranks[: mesh.grid.size], mesh.grid.dims)
        if device_mesh.device_type != "cpu":
            raise MeshError(f"device_mesh: got one of {device_mesh.device_type}; tiles lie in the memory of the CPU")
        if grid.shape != wanted.shape or (grid != wanted).any():
            raise MeshError(
                f"device_mesh: got the ranks {grid.tolist()}; those of the mesh {mesh.grid} are, in "
                f"torch.distributed, {wanted.tolist()}: rma_mm.torch.device_mesh(mesh) makes one of them"
            )


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's device mesh with the same ranks and axes.

    Collective over all ranks of torch.distributed at the first call.

    Parameters
    ----------
    mesh : Mesh
        The ranks.

    Returns
    -------
    DeviceMesh
        The device mesh.

    Raises
    ------
    MeshError
        If torch.distributed is not initialised.
    """
    known = TorchRanks.of(mesh)
    if known.device_mesh is None:
        grid = torch.tensor(known.ranks[: mesh.grid.size]).reshape(mesh.grid.dims)
        known.device_mesh = DeviceMesh("cpu", grid, mesh_dim_names=mesh.grid.names)
    return known.device_mesh


def from_dtensor(t: DTensor, mesh: Mesh) -> DistMatrix:
    """Return a DTensor as a matrix on the memory of its local tensors.

    Collective. The matrix keeps that memory alive until it is closed on every rank.

    Parameters
    ----------
    t : DTensor
        On the ranks of `mesh` in the same order, as on `device_mesh(mesh)`; without a gradient.
    mesh : Mesh
        The ranks.

    Returns
    -------
    DistMatrix
        The matrix.

    Raises
    ------
    MeshError, LayoutError, ShapeError, DtypeError
        If the DTensor does not fit.
    """
    known = TorchRanks.of(mesh)
    with agreed(mesh.comm, "from_dtensor") as facts:
        if not isinstance(t, DTensor):
            raise LayoutError(f"t: got {type(t).__name__}; must be a DTensor (DistMatrix.from_local takes tiles)")
        known.check(t.device_mesh, mesh)
        if len(t.shape) != 2:
            raise ShapeError(f"t: got a DTensor of shape {tuple(t.shape)}; a matrix has two dimensions")
        if t.requires_grad:
            raise LayoutError("t: got a DTensor that requires a gradient, which a matrix has none of; pass t.detach()")
        words = tuple(_word(placement) for placement in t.placements)
        shape = (t.shape[0], t.shape[1])
        layout = sharded(words, shape, mesh.grid)
        facts |= {"shape": shape, "placements": t.placements}
        local = check_tensor("t", t.to_local())
        array: Any = array_of(local.resolve_conj())
        wanted = layout.region(shape, mesh.grid, mesh.rank).shape
        if 0 in wanted and array.size == 0:
            array = array.reshape(wanted)
    return DistMatrix.from_local(array, shape, mesh, layout)


def _word(placement: Placement) -> Placed:
    """Return a placement's word. Raises LayoutError for what no layout is."""
    for word, known in PLACEMENTS.items():
        if type(placement) is type(known) and placement == known:
            return word
    raise LayoutError(
        f"placements: got {placement}; a matrix can be placed by Shard(0), Shard(1), Replicate() and Partial('sum'): "
        f"redistribute to one of them first"
    )


def to_dtensor(D: DistMatrix, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return a matrix as a DTensor on the memory of its tiles, which it keeps alive.

    Collective.

    Parameters
    ----------
    D : DistMatrix
        The matrix.
    device_mesh : DeviceMesh, optional
        That of the matrix's ranks; `device_mesh(mesh)` by default.

    Returns
    -------
    DTensor
        The DTensor.

    Raises
    ------
    MeshError
        If the ranks differ.
    LayoutError
        If DTensor cannot express the placement.
    """
    if not isinstance(D, DistMatrix):
        raise LayoutError(f"D: got {type(D).__name__}; must be a DistMatrix")
    mesh = D.mesh
    known = TorchRanks.of(mesh)
    own = device_mesh if device_mesh is not None else _device_mesh(mesh)
    with agreed(mesh.comm, "to_dtensor") as facts:
        facts["D"] = D.facts
        known.check(own, mesh)
        words = placements_of(D.layout, D.shape, mesh.grid)
        local = KeptTensors.of(mesh).lend(D)
    stride = (1, D.shape[0]) if D.flipped else (D.shape[1], 1)
    placements = [PLACEMENTS[word] for word in words]
    return DTensor.from_local(local, own, placements, run_check=False, shape=torch.Size(D.shape), stride=stride)


_device_mesh = device_mesh
