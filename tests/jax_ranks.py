"""`mpiexec -n 4 python -m tests.jax_ranks PORT`: arrays of JAX and matrices, both ways, on as many processes of JAX."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mpi4py import MPI

import rma_mm.jax as rj
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DtypeError, LayoutError, MeshError, ShapeError
from tests.mpi.test_library import same_error

SPECS = [("i", "j"), ("j", "i"), (("i", "j"), None), (None, ("j", "i")), (), (None, "j")]
TYPES = ("float32", "bfloat16", "int8", "complex64")


def main(port: str) -> None:
    comm = MPI.COMM_WORLD
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, (comm.rank + 1) % comm.size)
    with Mesh((2, 2), comm) as mesh:
        devices = rj.device_mesh(mesh)
        assert [device.process_index for device in devices.devices.flat] == [1, 2, 3, 0]
        for spec in SPECS:
            for dtype in TYPES:
                X = np.arange(96).reshape(8, 12).astype(dtype)
                x = placed(X, NamedSharding(devices, PartitionSpec(*spec)))
                D = rj.from_jax(x, mesh)
                assert (D.to_numpy() == X).all() and D.dtype == X.dtype
                D.tile[...] += 1  # of the matrix alone
                assert (part(x) == X[x.addressable_shards[0].index]).all()
                y = rj.to_jax(D)
                D.tile[...] = 0
                assert y.sharding.is_equivalent_to(x.sharding, 2) and y.dtype == x.dtype
                assert (part(y) == (X + np.ones((), dtype))[y.addressable_shards[0].index]).all()
        A, B = (rj.from_jax(placed(each, x.sharding), mesh) for each in (np.eye(8, dtype="f4"), X.real))
        assert (part(rj.to_jax(A @ B)) == (A @ B).tile).all() and ((A @ B).to_numpy() == X.real).all()
        line = jax.make_mesh((4,), ("rows",), (AxisType.Auto,), devices=devices.devices.flat)
        x = placed(X, NamedSharding(line, PartitionSpec("rows")))
        D = rj.from_jax(x, mesh)
        assert str(D.layout) == "P('i', None) on i=4"
        assert rj.to_jax(D).sharding.is_equivalent_to(x.sharding, 2)
        wrong(comm, mesh, x)
    jax.distributed.shutdown()


def wrong(comm, mesh, x):
    """What is no matrix, and what JAX has not."""
    last = comm.rank == comm.size - 1
    same_error(comm, LayoutError, lambda: rj.from_jax(np.eye(2) if last else x, mesh), "x: got ndarray")
    same_error(comm, LayoutError, lambda: rj.from_jax(jax.numpy.eye(2), mesh), "SingleDeviceSharding", "device_put")
    same_error(comm, ShapeError, lambda: rj.from_jax(jax.numpy.zeros(2), mesh), "(2,)")
    same_error(comm, DtypeError, lambda: rj.from_jax(jax.numpy.eye(2, dtype="float8_e5m2"), mesh), "float8_e5m2")
    same_error(comm, MeshError, lambda: rj.from_jax(x, None), "mesh: got NoneType")
    same_error(comm, LayoutError, lambda: rj.to_jax(None), "D: got NoneType")
    sorted_devices = jax.make_mesh((4,), ("i",), (AxisType.Auto,))
    other = placed(np.eye(4, dtype="f4"), NamedSharding(sorted_devices, PartitionSpec("i")))
    same_error(comm, MeshError, lambda: rj.from_jax(other, mesh), "[0, 1, 2, 3]", "[1, 2, 3, 0]")
    for layout, said in (("i, *", "5 into 2 equal parts"), ("i:cyclic(1), *", "cuts evenly"), ("*, *, i=0", "no pins")):
        D = DistMatrix.from_numpy(np.ones((5, 4), "f4"), mesh, layout)
        same_error(comm, LayoutError, lambda D=D: rj.to_jax(D), said)
    double = DistMatrix.from_numpy(np.ones((4, 4)), mesh)
    same_error(comm, DtypeError, lambda: rj.to_jax(double), "float64", "jax_enable_x64")
    with Mesh((3,), comm) as spare:
        same_error(comm, MeshError, lambda: rj.device_mesh(spare), "ranks beyond its grid")
    alone = Mesh((1,), MPI.COMM_SELF)
    same_error(comm, MeshError, lambda: rj.device_mesh(alone), "got 4 processes", "process_id=mesh.rank")
    alone.close()


def placed(X, sharding):
    return jax.make_array_from_callback(X.shape, sharding, lambda index: X[index])


def part(x):
    return np.asarray(x.addressable_shards[0].data)


if __name__ == "__main__":
    main(sys.argv[1])
