"""PyTorch's DTensor over gloo, one process a rank."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from bench.peers.cases import grid_of, share_of
from bench.peers.operands import Piece, part
from bench.peers.systems import Task


class DTensors:
    """A and B in blocks, gathered along rows and columns of the mesh; or split along k, and C reduced and scattered."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        torch.set_grad_enabled(False)
        store = f"file://{task.directory}/torch"
        dist.init_process_group("gloo", store, timedelta(seconds=600), world_size=task.ranks, rank=task.rank)
        case = task.case
        p, q, r = grid_of(case, task.ranks, k_parts=(1, task.ranks))
        self.case, self.is_split = case, r > 1
        mesh = init_device_mesh("cpu", (r,) if self.is_split else (p, q))
        if self.is_split:
            held, self.gathered = ((Shard(1),), (Shard(0),)), None
            self.rows, self.cols = share_of(case.m, r, task.rank), slice(0, case.n)
            inner = share_of(case.k, r, task.rank)
            blocks = ((slice(0, case.m), inner), (inner, slice(0, case.n)))
        else:
            i, j = divmod(task.rank, q)
            held = ((Shard(0), Shard(1)),) * 2
            self.gathered = ((Shard(0), Replicate()), (Replicate(), Shard(1)))
            self.rows, self.cols = share_of(case.m, p, i), share_of(case.n, q, j)
            blocks = ((self.rows, share_of(case.k, q, j)), (share_of(case.k, p, i), self.cols))
        self.a, self.b = (
            DTensor.from_local(
                torch.from_numpy(part(which, *block, case.dtype)), mesh, placement, shape=shape, stride=(shape[1], 1)
            )
            for which, block, placement, shape in zip(
                "AB", blocks, held, ((case.m, case.k), (case.k, case.n)), strict=True
            )
        )
        self.c: Any = None
        self.facts = {
            "torch": torch.__version__, "threads": torch.get_num_threads(), "grid": [p, q, r],
            "blas": torch.__config__.show().partition("BLAS_INFO=")[2].partition(",")[0], "result": "a new tensor",
        }

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def multiply(self) -> None:
        """C = A · B."""
        if self.gathered is None:
            c = self.a @ self.b
            assert c.placements == (Partial("sum"),), c.placements
            self.c = c.redistribute(placements=[Shard(0)])
        else:
            a, b = (x.redistribute(placements=to) for x, to in zip((self.a, self.b), self.gathered, strict=True))
            self.c = a @ b

    def pieces(self) -> Iterable[Piece]:
        """This rank's block."""
        yield Piece(self.rows, self.cols, self.c.to_local().numpy())
