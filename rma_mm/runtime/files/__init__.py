"""Matrices in files, read and written by all ranks: formats by suffix, and output that gets its name when whole."""

from rma_mm.runtime.files import hdf5, npy, safetensors_file

__all__ = ["hdf5", "npy", "safetensors_file"]
