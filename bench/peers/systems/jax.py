"""JAX, one process a rank, collectives by gloo."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bench.peers.cases import grid_of
from bench.peers.operands import Piece, part
from bench.peers.systems import Task


class Jax:
    """A compiled `A @ B` of arrays in blocks on a mesh, or split along k; XLA inserts what has to move."""

    def __init__(self, task: Task) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(f"127.0.0.1:{task.port}", task.ranks, task.rank)
        case = task.case
        p, q, r = grid_of(case, task.ranks, k_parts=(1, task.ranks))
        mesh = jax.make_mesh((p, q, r), ("i", "j", "l"), (AxisType.Auto,) * 3)
        specs = [("i", ("j", "l")), (("i", "l"), "j"), (("i", "l"), "j")]
        a, b, c = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
        self.a = held("A", (case.m, case.k), a, case.dtype)
        self.b = held("B", (case.k, case.n), b, case.dtype)
        self.product = jax.jit(jax.numpy.matmul, out_shardings=c)
        self.c: Any = None
        self.facts = {
            "jax": jax.__version__, "grid": [p, q, r], "threads": int(os.environ["NPROC"]), "result": "a new array",
        }

    def barrier(self) -> None:
        """Wait for all ranks."""
        multihost_utils.sync_global_devices("bench")

    def multiply(self) -> None:
        """C = A · B."""
        self.c = self.product(self.a, self.b)
        self.c.block_until_ready()

    def pieces(self) -> Iterable[Piece]:
        """This rank's block."""
        for shard in self.c.addressable_shards:
            yield Piece(*spans(shard.index, self.c.shape), np.asarray(shard.data))


def held(which: str, shape: tuple[int, int], sharding: NamedSharding, dtype: str) -> Any:
    """A or B, each process making its own block."""
    return jax.make_array_from_callback(shape, sharding, lambda index: part(which, *spans(index, shape), dtype))


def spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[slice]:
    """An index with its ends filled in."""
    return [slice(*span.indices(extent)[:2]) for span, extent in zip(index, shape, strict=True)]
