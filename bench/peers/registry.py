"""The peers: how each is started, what it needs, and which cases it cannot do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Literal

RMA_MM = "rma_mm"
NUMPY = "NumPy"


@dataclass(frozen=True)
class Peer:
    """One way to multiply matrices."""

    name: str
    target: str
    """module:class of its `bench.peers.systems.System`."""
    start: Literal["mpi", "processes", "one"]
    """Ranks of an MPI job, that many processes which find each other, or one process."""
    program: str = "bench.peers.worker"
    """The module that each process runs."""
    modules: tuple[str, ...] = ()
    """What must be importable."""
    libraries: tuple[str, ...] = ()
    """Shared libraries, one of which must be there."""
    install: str = ""
    """How to get it."""
    mebibytes: int = 100
    """Memory of one process beside the matrices."""
    unfit: Callable[[int], str | None] = lambda ranks: None
    """Why it cannot run on so many ranks."""
    threads: Literal["share", "all"] = "share"
    """BLAS threads of a process: its share of the cores, or all of them."""


def not_square(ranks: int) -> str | None:
    """Why Cannon's algorithm does not run here."""
    return None if isqrt(ranks) ** 2 == ranks else f"needs a square number of ranks, not {ranks}"


def no_layers(ranks: int) -> str | None:
    """Why 2.5-D does not run here."""
    return None if layers_of(ranks) else f"needs c·q² ranks, 2 ≤ c ≤ q, c dividing q; {ranks} is not such a number"


def layers_of(ranks: int) -> tuple[int, int] | None:
    """(c, q): layers, and the side of each, of 2.5-D."""
    for q in range(2, isqrt(ranks) + 1):
        c, rest = divmod(ranks, q * q)
        if rest == 0 and 2 <= c <= q and q % c == 0:
            return c, q
    return None


SYSTEMS = "bench.peers.systems"
SCALAPACK = ("libscalapack-mpich.so.2.2", "libscalapack-mpich.so.2.1", "libscalapack-openmpi.so.2.2")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(RMA_MM, f"{SYSTEMS}.rma:RmaMM", "mpi", install="pip install '.[mpich]'"),
        Peer(NUMPY, f"{SYSTEMS}.solo:Solo", "one", threads="all"),
        Peer("Cannon", f"{SYSTEMS}.textbook:Cannon", "mpi", unfit=not_square),
        Peer("SUMMA", f"{SYSTEMS}.textbook:Summa", "mpi"),
        Peer("2.5-D", f"{SYSTEMS}.textbook:Cannon25D", "mpi", unfit=no_layers),
        Peer("3-D", f"{SYSTEMS}.textbook:Agarwal3D", "mpi"),
        Peer(
            "ScaLAPACK", f"{SYSTEMS}.scalapack:Scalapack", "mpi", f"{SYSTEMS}.scalapack", libraries=SCALAPACK,
            install="apt-get install libscalapack-mpich2.2 libopenblas0-pthread (2.1 on older systems)",
        ),
        Peer(
            "DTensor", f"{SYSTEMS}.dtensor:DTensors", "processes", modules=("torch",), mebibytes=350,
            install="pip install torch",
        ),
        Peer(
            "heat", f"{SYSTEMS}.heat:Heat", "mpi", modules=("heat",), mebibytes=400,
            install="pip install heat, or in an environment of its own: --python heat=PATH",
        ),
        Peer("JAX", f"{SYSTEMS}.jax:Jax", "processes", modules=("jax",), install="pip install jax", mebibytes=350),
        Peer(
            "Dask", f"{SYSTEMS}.dask:Distributed", "one", modules=("dask.array", "distributed"), mebibytes=600,
            install="pip install dask distributed",
        ),
        Peer(
            "Dask threads", f"{SYSTEMS}.dask:Threaded", "one", modules=("dask.array",), mebibytes=200,
            install="pip install dask",
        ),
    )
}
"""Name → peer, in the order of the tables."""


def missing(peer: Peer, python: str = sys.executable) -> str | None:
    """Why a peer cannot be started here by this Python, in a line; None where it can."""
    absent = [name for name in peer.modules if not works(f"import {name}", python)]
    if peer.libraries and not any(works(FIND.format(name=name), python) for name in peer.libraries):
        absent.append(" or ".join(peer.libraries))
    return f"not installed ({', '.join(absent)}): {peer.install}" if absent else None


FIND = """
import ctypes
try:
    ctypes.CDLL({name!r})
except OSError as error:
    if {name!r} in str(error):  # else it is there, but not the MPI library that it wants: its job brings one
        raise
"""


@cache
def works(program: str, python: str) -> bool:
    """Whether this Python runs a program; in a process of its own, for imports leave threads and libraries behind."""
    return subprocess.run([python, "-W", "ignore", "-c", program], capture_output=True, check=False).returncode == 0
