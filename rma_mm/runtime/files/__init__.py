"""Matrices in files, read and written by all ranks: formats by suffix, and output that gets its name when whole."""

from rma_mm.runtime.files import npy
from rma_mm.runtime.files.containers import known

__all__ = ["known", "npy"]
