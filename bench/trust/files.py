"""A matrix through a file of any format, written from one placement and loaded in another, whole and in part."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from random import Random

import numpy as np

import rma_mm
from bench.trust.library_files import formats, read_by_its_library, write_anew
from bench.trust.operands import elements
from bench.trust.placements import draw_layout
from bench.trust.wrong import Wrong, expect
from rma_mm import DistMatrix, Mesh

TYPES = ("float64", "float32", "float16", "complex64", "int8", "uint16", "int64", "bool")
MORE = {".npy": ("bfloat16", "complex128"), ".safetensors": ("bfloat16",), ".h5": ("complex128",)}
"""Suffix → types that not every format has."""
NAMES = ("::x", "::group/x")


def chunking(rng: Random, suffix: str) -> dict[str, object]:
    """How C is to be written: in which chunks and shards, and compressed or not."""
    if suffix != ".zarr" or rng.random() < 0.4:
        return {}
    chunks = rng.randint(3, 12), rng.randint(3, 12)
    found: dict[str, object] = {"chunks": chunks}
    if rng.random() < 0.5:
        found["shards"] = chunks[0] * rng.randint(1, 3), chunks[1] * rng.randint(1, 3)
    return found | ({"compress": rng.choice(("zstd", "none"))} if rng.random() < 0.5 else {})


def run(mesh: Mesh, rng: Random) -> None:
    """One matrix. Collective; raises Wrong where a file or what is loaded is not what was saved."""
    suffix = rng.choice(formats())
    dtype = rng.choice((*TYPES, *MORE.get(suffix, ())))
    shape = rng.choice((0, 1, 7, 12, 23, 40)), rng.choice((1, 2, 8, 17, 40))
    part = [sorted(rng.choices(range(extent + 1), k=2)) for extent in shape]
    extents = part[0][1] - part[0][0], part[1][1] - part[1][0]
    inner = "" if suffix == ".npy" or rng.random() < 0.2 else rng.choice(NAMES)
    here, there = (draw_layout(rng, mesh.grid, shape), draw_layout(rng, mesh.grid, extents))
    options = chunking(rng, suffix)
    again = rng.random() < 0.5, (rng.randint(1, 12), rng.randint(1, 12)), rng.choice((2, 3)), rng.choice("CF")
    x = elements(np.random.default_rng(rng.getrandbits(32)), shape, dtype)
    name = inner[2:] or ("C" if suffix == ".h5" else "")
    folder = Path(mesh.comm.bcast(tempfile.mkdtemp(prefix="bench-trust-files-") if mesh.rank == 0 else None))
    path = folder / f"x{suffix}"
    DistMatrix.from_numpy(x, mesh, here).save(f"{path}{inner}", **options)
    found = [(x, read_by_its_library(path, name))]
    mesh.comm.Barrier()
    if again[0] and mesh.rank == 0:
        write_anew(path, name, x, *again[1:])
    mesh.comm.Barrier()
    (a, b), (c, d) = part
    kind = "bfloat16" if dtype == "bfloat16" else None
    loaded = rma_mm.load(f"{path}{inner}[{a}:{b}, {c}:{d}]", mesh, rng.choice((None, there)), kind)
    found += [(x[a:b, c:d], loaded.to_numpy())]
    found += [(x, DistMatrix.load(f"{path}{inner}", mesh, dtype=kind).to_numpy())]
    left = os.listdir(folder)
    mesh.comm.Barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder)
    said = f"{path.name}{inner} of {dtype} {shape} from {here}, {options}, {again}, [{a}:{b}, {c}:{d}] to {there}"
    if left != [path.name]:
        raise Wrong(f"{said}: it left {left}")
    for wanted, got in found:
        if got is not None:
            expect(wanted, got, said)
