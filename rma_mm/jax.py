"""Arrays of JAX as matrices and back, where JAX has one process, and one CPU device, a rank. Imported by name.

Both ways copy a rank's own part, and move nothing else: an array of JAX never changes, a matrix may.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from rma_mm.elements.dtypes import check_dtype
from rma_mm.errors import DtypeError, LayoutError, MeshError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import even_axes
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh

__all__ = ["device_mesh", "from_jax", "to_jax"]


class JaxRanks:
    """The process of JAX, and its device, of each rank of a mesh, asked for once."""

    def __init__(self, mesh: Mesh) -> None:
        with agreed(mesh.comm, "jax.distributed"):
            processes, devices = jax.process_count("cpu"), len(jax.local_devices(backend="cpu"))
            if (processes, devices) != (mesh.size, 1):
                raise MeshError(
                    f"jax.distributed: got {processes} processes, of which this has {devices} CPU devices; each of the "
                    f"{mesh.size} ranks needs a process and a device: before any other call of JAX, call "
                    f"jax.distributed.initialize(address, num_processes=mesh.size, process_id=mesh.rank)"
                )
            if mesh.grid.size != mesh.size:
                raise MeshError(f"mesh: {mesh!r} has ranks beyond its grid, which no mesh of JAX has")
        self.processes: list[int] = mesh.comm.allgather(jax.process_index("cpu"))
        found = {device.process_index: device for device in jax.devices("cpu")}
        self.devices = [found[process] for process in self.processes]
        """The devices of JAX, by rank."""

    @classmethod
    def of(cls, mesh: Mesh) -> JaxRanks:
        """Return the record kept with `mesh`, made at the first call.

        Collective when first asked for. Raises MeshError.
        """
        if not isinstance(mesh, Mesh):
            raise MeshError(f"mesh: got {type(mesh).__name__}; pass a Mesh")
        found = mesh.kept.get(cls)
        if found is None:
            found = mesh.kept[cls] = cls(mesh)
        assert isinstance(found, cls)
        return found

    def close(self) -> None:
        """Do nothing: no memory or handle of JAX is held."""

    def arranged(self, grid: MeshShape) -> JaxMesh:
        """Return the mesh of JAX whose devices are those of the ranks on a grid."""
        return JaxMesh(np.reshape(np.array(self.devices, object), grid.dims), grid.names)

    def layout(self, x: jax.Array, mesh: Mesh) -> Layout:
        """Return the layout of an array. Raises LayoutError, MeshError."""
        if mesh.size == 1:
            return Layout(((), ()))
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding):
            raise LayoutError(
                f"x: got an array placed by {type(sharding).__name__}; jax.device_put(x, NamedSharding(…)) gives one "
                f"that lies over ranks"
            )
        devices = sharding.mesh.devices
        found = [device.process_index for device in devices.flat]
        if found != self.processes:
            raise MeshError(
                f"x: it is on JAX's processes {found}; the ranks of the mesh {mesh.grid} are the processes "
                f"{self.processes}: rma_mm.jax.device_mesh(mesh) makes a mesh of these"
            )
        if getattr(sharding.spec, "unreduced", None) or getattr(sharding.spec, "reduced", None):
            raise LayoutError(f"x: got {sharding.spec}; complete the partial sums first")
        grid = None if devices.shape == mesh.grid.dims else MeshShape(devices.shape)
        names = dict(zip(sharding.mesh.axis_names, (grid or mesh.grid).names, strict=True))
        cuts = [() if cut is None else (cut,) if isinstance(cut, str) else cut for cut in sharding.spec]
        cuts += [()] * (2 - len(cuts))
        splits = tuple(tuple(Level((names[axis],)) for axis in cut) for cut in cuts)
        return Layout(splits, grid=grid)


def device_mesh(mesh: Mesh) -> JaxMesh:
    """Return JAX's mesh with the same ranks and axes.

    Collective at the first call.

    Parameters
    ----------
    mesh : Mesh
        The mesh.

    Returns
    -------
    jax.sharding.Mesh
        The mesh of JAX.

    Raises
    ------
    MeshError
        If JAX does not have one process with one CPU device for each rank.
    """
    return JaxRanks.of(mesh).arranged(mesh.grid)


def from_jax(x: jax.Array, mesh: Mesh) -> DistMatrix:
    """Copy an array of JAX into a matrix with the same placement.

    Collective.

    Parameters
    ----------
    x : jax.Array
        Two-dimensional, over the ranks' processes in their order, on a mesh of any shape.
    mesh : Mesh
        The ranks.

    Returns
    -------
    DistMatrix
        A new matrix.

    Raises
    ------
    MeshError, LayoutError, ShapeError, DtypeError
        If the array does not fit.
    """
    known = JaxRanks.of(mesh)
    with agreed(mesh.comm, "from_jax") as facts:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            raise LayoutError(f"x: got {type(x).__name__}; must be an array of JAX, outside of what jax.jit compiles")
        if x.ndim != 2:
            raise ShapeError(f"x: got an array of shape {x.shape}; a matrix has two dimensions")
        dtype, (rows, cols) = check_dtype(np.dtype(x.dtype), "x's dtype"), x.shape
        layout = known.layout(x, mesh)
        facts |= {"shape": (rows, cols), "dtype": dtype.name, "layout": layout}
        part = np.asarray(x.addressable_shards[0].data)  # which waits for what JAX still computes
    made = DistMatrix.allocated(mesh, (rows, cols), dtype, layout)
    made.tile[...] = part
    return made


def to_jax(D: DistMatrix) -> jax.Array:
    """Return a matrix as an array of JAX with a NamedSharding of the same placement.

    Collective.

    Parameters
    ----------
    D : DistMatrix
        The matrix.

    Returns
    -------
    jax.Array
        The array.

    Raises
    ------
    LayoutError
        If PartitionSpec cannot express the placement, or parts differ in size.
    DtypeError
        If the type has 64 bits and JAX has them disabled.
    MeshError
        As `device_mesh`.
    """
    if not isinstance(D, DistMatrix):
        raise LayoutError(f"D: got {type(D).__name__}; must be a DistMatrix")
    known = JaxRanks.of(D.mesh)
    with agreed(D.mesh.comm, "to_jax") as facts:
        facts["D"] = D.facts
        grid = D.layout.mesh(D.mesh.grid)
        if grid.size != D.mesh.size:
            raise LayoutError(
                f"layout: got {D.layout}, which leaves out ranks; an array of JAX must lie on all of them"
            )
        cuts = even_axes(replace(D.layout, grid=None), grid, "PartitionSpec")
        for extent, axes in zip(D.shape, cuts, strict=True):
            parts = prod(grid.axis_size(axis) for axis in axes)
            if extent % parts:
                raise LayoutError(
                    f"layout: got {D.layout} for a matrix of {D.shape}; JAX cuts {extent} into {parts} equal parts or "
                    f"not at all: redistribute to a layout that leaves that dimension whole"
                )
        if jax.dtypes.canonicalize_dtype(D.dtype) != D.dtype:
            raise DtypeError(f"D: got {D.dtype}; JAX supports it after jax.config.update('jax_enable_x64', True)")
    sharding = NamedSharding(known.arranged(grid), PartitionSpec(*(axes or None for axes in cuts)))
    part: Any = jax.device_put(np.array(D.tile), known.devices[D.mesh.rank])
    return jax.make_array_from_single_device_arrays(D.shape, sharding, [part])
