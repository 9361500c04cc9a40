"""A matrix through a file of any format, written from one placement and loaded in another, whole and in part."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench.trust.operands import elements
from bench.trust.placements import Shape, draw_layout
from bench.trust.wrong import Wrong, expect
from rma_mm import DistMatrix, Mesh

Array = NDArray[Any]

TYPES = ("float64", "float32", "float16", "complex64", "int8", "uint16", "int64", "bool")
MORE = {".npy": ("bfloat16", "complex128"), ".safetensors": ("bfloat16",), ".h5": ("complex128",)}
"""Suffix → types that not every format has."""
NAMES = ("::x", "::group/x")
CONTAINERS = {".npy": "numpy", ".safetensors": "numpy", ".h5": "h5py", ".zarr": "zarr"}
"""Suffix → the package without which such files are not read."""


def by_its_library(path: Path, inner: str, x: Array, chunks: Shape, form: int, order: str) -> None:
    """Write the file anew, in chunks, by the package that others use for such files."""
    if path.suffix == ".h5" and x.size:
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset(inner, data=x, chunks=tuple(map(min, chunks, x.shape)), compression="gzip")
    elif path.suffix == ".zarr":
        import zarr

        shutil.rmtree(path)
        options = {"order": order} if form == 2 else {}
        made = zarr.create_array(
            path, name=inner or None, shape=x.shape, dtype=x.dtype, chunks=chunks, zarr_format=form, **options
        )
        made[...] = x


def as_its_library_reads(path: Path, inner: str) -> Array | None:
    """What stands in the file for the package that others use for it; None where there is none such."""
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path) as file:
            return np.asarray(file[inner][()])
    if path.suffix == ".zarr":
        import zarr

        return np.asarray(zarr.open_array(path, path=inner, mode="r")[...])
    return None


def formats() -> list[str]:
    """Suffixes of formats that can be read here."""
    found = []
    for suffix, package in CONTAINERS.items():
        with suppress(ImportError):
            __import__(package)
            found.append(suffix)
    return found


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
    here, there = (draw_layout(rng, mesh.shape, shape), draw_layout(rng, mesh.shape, extents))
    options = chunking(rng, suffix)
    again = rng.random() < 0.5, (rng.randint(1, 12), rng.randint(1, 12)), rng.choice((2, 3)), rng.choice("CF")
    x = elements(np.random.default_rng(rng.getrandbits(32)), shape, dtype)
    name = inner[2:] or ("C" if suffix == ".h5" else "")
    folder = Path(mesh.comm.bcast(tempfile.mkdtemp(prefix="bench-trust-files-") if mesh.rank == 0 else None))
    path = folder / f"x{suffix}"
    DistMatrix.from_numpy(x, mesh, here).save(f"{path}{inner}", **options)
    found = [(x, as_its_library_reads(path, name))]
    mesh.comm.Barrier()
    if again[0] and mesh.rank == 0:
        by_its_library(path, name, x, *again[1:])
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
