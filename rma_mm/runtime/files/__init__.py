"""Matrices in files, read and written by all ranks: formats by suffix, and output that gets its name when whole."""

from rma_mm.runtime.files import npy
from rma_mm.runtime.files.containers import hdf5, safetensors, zarr_store

__all__ = ["hdf5", "npy", "safetensors", "zarr_store"]
