"""Facts about this processor that kernels are generated for: vectors, registers, instructions, caches."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from rma_mm.classes import dataclass
from rma_mm.kernels.compiling import compiled_for

BYTES, PAIRS, PAIRS_ADDED, BFLOATS = "vpdpbusd", "pmaddwd", "vpdpwssd", "dpbf16ps"
"""Instructions for the products of four bytes, of two 16-bit numbers (by themselves, or added to a sum), of two
bfloat16."""
AMX_BYTES, AMX_BFLOATS = "tdpb", "tdpbf16ps"
"""Instructions for whole tiles: 16 × 16 sums of the products of 64 bytes, or of 32 bfloat16."""
STEPS = {"": 1, BYTES: 4, PAIRS: 2, PAIRS_ADDED: 2, BFLOATS: 2, AMX_BYTES: 64, AMX_BFLOATS: 32}
"""Steps of k that each takes; one without any."""
_ASK_FOR, _TILES, _ARCH_PRCTL = 0x1023, 18, 158
"""Linux's numbers, on x86-64: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, and that of the system call."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL = {1: 32 << 10, 2: 512 << 10, 3: 4 << 20}


@dataclass(frozen=True)
class Cpu:
    """One core, as far as a kernel is concerned."""

    name: str  # what LLVM calls it
    vector_bytes: int  # width of a vector register
    registers: int  # number of vector registers
    dots: frozenset[str]  # instructions that multiply neighbours and add the products: keys of `emit.DOTS`
    caches: tuple[int, int, int]  # bytes of data that the first, second and third level hold

    @property
    def is_zen(self) -> bool:
        """True for AMD's processors since 2017."""
        return _is_zen(self.name)


def _is_zen(name: str) -> bool:
    return name.startswith("znver")


@cache
def host() -> Cpu:
    """The core that Numba compiles for: this process's own, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say else."""
    name, features = compiled_for()
    has = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has
    vector_bytes = 64 if wide else 32 if {"avx2", "fma"} <= has else 16
    sums = "avx512vnni" if wide else "avxvnni" if vector_bytes == 32 else ""
    dots = {dot for dot, needs in ((BYTES, sums), (PAIRS_ADDED, sums), (PAIRS, "sse2")) if needs in has}
    # a Zen 4 does 1.8 times as many products by it as of float32, an Intel Xeon 0.6 times as many
    dots |= {BFLOATS} if wide and "avx512bf16" in has and _is_zen(name) else set()
    if wide and "amx-tile" in has:
        amx = {dot for dot, needs in ((AMX_BYTES, "amx-int8"), (AMX_BFLOATS, "amx-bf16")) if needs in has}
        dots |= amx if amx and grants_tiles() else set()
    registers = 32 if wide or "neon" in has else 16
    return Cpu(name, vector_bytes, registers, frozenset(dots), _caches())


def grants_tiles() -> bool:
    """Ask Linux for the registers of AMX, which a process gets only if it asks, for all its threads."""
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR, _TILES) == 0)
    except (OSError, AttributeError):  # not a system with such calls
        return False


def _caches() -> tuple[int, int, int]:
    """Return the cache sizes that Linux reports, or usual ones."""
    sizes = dict(_USUAL)
    for entry in _CACHES.glob("index*"):
        try:
            level, kind = int((entry / "level").read_text()), (entry / "type").read_text().strip()
            text = (entry / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and level in sizes and text[:-1].isdecimal():
            sizes[level] = int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 10)
    return sizes[1], sizes[2], sizes[3]
