"""`python -m bench.disk`: products of matrices in files, beside memory, the disk, Dask and Blosc2.

Three products: a square one in files of each format, the transpose of a tall matrix times itself, which is read once,
and the 600³ tensordot of Blosc2's table as the matrices (600 × 360,000) @ (360,000 × 600) of float64. Each is measured
in memory, and with its files in the system's cache and out of it, in new processes, in turn. The limit is the longer
of multiplying in memory and reading the files from first to last: `of limit` is the time over that. What is right was
compared exactly. Bars: 1.15 of the limit; of Dask's time 0.6, in less memory. The files go into a folder that is made
where `--folder` says, on the disk that is to be measured, and are removed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import measure
from bench.disk import files
from bench.disk.worker import ALONE
from bench.processes import clean_environment, mpiexec_of

RATIO, OF_DASK = 1.15, 0.6
"""Bars: of the limit, and of Dask's time."""
NEEDED = {"h5": "h5py", "zarr": "zarr", "b2nd": "blosc2"}
"""Format → the package that writes it."""


@dataclass(frozen=True)
class Product:
    """op(A) @ B in files, or Aᵀ @ A."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    """A's, and B's if there is a B."""
    dtype: str
    chunks: tuple[tuple[int, int], ...]
    limit: int
    """Bytes a rank."""
    kinds: tuple[str, ...]
    """Formats; a peer is measured on the one that it reads."""

    @property
    def turned(self) -> bool:
        """True for Aᵀ @ A."""
        return len(self.shapes) == 1


PEERS = {"zarr": "dask", "b2nd": "blosc2"}
"""Format → who else is measured on it, where there are two matrices of the tensordot."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the square product, float32 (8192)")
    parser.add_argument("--tall", type=int, default=200_000, help="rows of the tall matrix of 2000 columns (200000)")
    parser.add_argument("--depth", type=int, default=360_000, help="columns of A of the tensordot (360000)")
    parser.add_argument("--only", nargs="+", default=["square", "gram", "tensordot"], help="of these three products")
    parser.add_argument("--formats", nargs="+", default=["npy", "h5", "zarr", "safetensors"], help="of the square one")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, and threads of others (2)")
    parser.add_argument("--repeat", type=int, default=3, help="samples of each case (3)")
    parser.add_argument("--folder", default=".", help="where the files go (here)")
    options = parser.parse_args(arguments)
    size, depth, tall = options.size, options.depth, options.tall
    side, wide = min(512, size), min(600, depth)
    every = [
        Product("square", ((size, size),) * 2, "float32", ((side, side),) * 2, size * size * 6 // options.ranks,
                tuple(options.formats)),
        Product("gram", ((tall, min(2000, tall)),), "float32", ((500, 500),), 2**28, ("npy",)),
        Product("tensordot", ((wide, depth), (depth, wide)), "float64", ((wide, wide),) * 2, 2**28, ("zarr", "b2nd")),
    ]
    results = []
    for product in every:
        if product.name in options.only:
            with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=options.folder) as folder:
                results += Bench(product, Path(folder), options.ranks).results(options.repeat)
    names = {
        "product": "product", "kind": "files", "cache": "cache", "system": "by", "seconds": "seconds",
        "of_limit": "of limit", "reading": "reading s", "read": "MiB read", "held": "MiB held", "right": "right",
    }
    head, rows = list(names.values()), [[each[name] for name in names] for each in results]
    measure.publish(options.json, "disk", measure.machine(), ["", *measure.table(head, rows), *bars(results)],
                    results=results, ranks=options.ranks)
    return 0 if all(each["right"] for each in results) else measure.WRONG


class Bench:
    """One product, on files that are there while it is measured."""

    def __init__(self, product: Product, folder: Path, ranks: int) -> None:
        self.product, self.folder, self.ranks = product, folder, ranks
        left, right = product.shapes[0], product.shapes[-1]
        x = np.random.default_rng(34).integers(-3, 4, right[1]).astype(np.float64)
        self.x, y = x, files.times(right, x)
        self.expected = files.times(left, y, product.turned)

    def results(self, repeat: int) -> list[dict[str, Any]]:
        """A record of each case."""
        samples: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        for kind in self.product.kinds:
            if kind in NEEDED and find_spec(NEEDED[kind]) is None:
                print(f"left out: {kind} needs {NEEDED[kind]}", file=sys.stderr)
                continue
            paths = self.written(kind)
            for turn in range(repeat):
                for cache in ("warm", "cold"):
                    for system in self.systems(kind, cache)[:: 1 if turn % 2 else -1]:
                        samples[kind, cache, system].append(self.sample(system, paths, cache))
            for file in (each for path in paths for each in files.files(path)):
                file.unlink()
        return self.summed_up(samples)

    def systems(self, kind: str, cache: str) -> list[str]:
        """The systems that multiply files of a format."""
        peer = PEERS.get(kind) if self.product.name == "tensordot" else None
        own = [] if kind == "b2nd" else ["rma_mm", *(["in memory"] if cache == "warm" else [])]
        return own + [peer] * bool(peer and find_spec(peer))

    def written(self, kind: str) -> list[Path]:
        """The files."""
        found = []
        for name, shape, chunks in zip("AB", self.product.shapes, self.product.chunks, strict=False):
            found.append(self.folder / f"{name}.{kind}")
            files.made(found[-1], shape, self.product.dtype, chunks)
        return found

    def sample(self, system: str, paths: Sequence[Path], cache: str) -> dict[str, Any]:
        """Run once; return its report, the seconds of reading alone, and if the files were cached or cold as wanted."""
        is_as_said = True
        if cache == "cold":
            is_as_said = files.forget(*paths)
        else:
            files.seconds_to_read(*paths)  # and by that into the cache
        reading = files.seconds_to_read(*paths)
        if cache == "cold":
            is_as_said = files.forget(*paths) and is_as_said
        return self.run(system, paths) | {"reading": reading, "as_said": is_as_said}

    def run(self, system: str, paths: Sequence[Path]) -> dict[str, Any]:
        """One product in new processes. Raises RuntimeError where they fail."""
        product, job = self.product, self.folder / "job.json"
        names = [str(path) for path in paths]
        job.write_text(json.dumps({
            "system": system, "files": names if len(names) == 2 else names * 2, "limit": product.limit,
            "turned": product.turned, "ranks": self.ranks, "x": self.x.tolist(), "expected": self.expected.tolist(),
        }))
        line = [sys.executable, "-m", "bench.disk.worker", str(job)]
        if system not in ALONE:
            line = [str(mpiexec_of(sys.executable)), "-n", str(self.ranks), *line]
        done = subprocess.run(line, env=clean_environment(), capture_output=True, text=True, check=False)
        if done.returncode not in (0, measure.WRONG):
            raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def summed_up(self, samples: dict[tuple[str, str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """A record of each case, with what it is held against."""
        alone = [every for (_, _, system), every in samples.items() if system == "in memory"]
        multiplying, results = median(each["seconds"] for every in alone for each in every), []
        for (kind, cache, system), every in samples.items():
            seconds, reading = (median(each[name] for each in every) for name in ("seconds", "reading"))
            limit = max(multiplying, reading if system != "in memory" else 0)
            is_cold = all(each["as_said"] for each in every)
            results.append({
                "product": self.product.name, "kind": kind, "cache": cache if is_cold else "not cold",
                "system": system, "seconds": seconds, "of_limit": seconds / limit, "multiplying": multiplying,
                "reading": reading, "read": round(every[0].get("read", 0) / 2**20),
                "held": round(max(sum(each["peaks"]) for each in every) / 2**20),
                "right": all(each["right"] for each in every), "samples": every,
            })
        return results


def bars(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each bar that says if it is met."""
    found = {(each["product"], each["kind"], each["cache"], each["system"]): each for each in results}
    lines = [""]
    for (product, kind, cache, system), each in found.items():
        case = f"{product}, {kind}, {cache}"
        if system == "rma_mm":
            ratio = each["of_limit"]
            lines.append(f"{case}: {ratio:.2f} of the limit (bar {RATIO}): {measure.text(ratio <= RATIO)}")
        elif system == "dask" and (ours := found.get((product, kind, cache, "rma_mm"))):
            ratio, is_less = ours["seconds"] / each["seconds"], ours["held"] < each["held"]
            lines.append(f"{case}: {ratio:.2f} of Dask's time (bar {OF_DASK}): {measure.text(ratio <= OF_DASK)}")
            lines.append(f"{case}: {ours['held']} MiB beside Dask's {each['held']}: {measure.text(is_less)}")
    if any(each["cache"] == "not cold" for each in results):
        lines.append("not cold: this system kept files in its cache")
    return lines


if __name__ == "__main__":
    sys.exit(main())
