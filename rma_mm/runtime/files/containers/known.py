"""The formats of this folder by their suffixes; a format's module is imported when the first file of it is opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from rma_mm.runtime.files.formats import Format, register_format


def _wanted(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls one of a format's module, which is imported when it is called."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module(call.__module__), name)(*given, **named)

    call.__module__ = f"{__package__}.{module}"
    return call


hdf5, tensors, zarr = (partial(_wanted, module) for module in ("hdf5", "safetensors", "zarr_store"))
register_format(Format(
    (".h5", ".hdf5", ".hdf"), hdf5("open_dataset"), hdf5("create"), hdf5("open_array"), holds_many=True,
    sink=hdf5("Hdf5Sink"),
))
register_format(Format(
    (".safetensors",), tensors("open_tensor"), tensors("create"), tensors("open_array"), holds_many=True,
    sink=tensors("SafetensorsSink"),
))
register_format(Format(
    (".safetensors.index.json",), tensors("open_indexed"), tensors("refuse"), tensors("open_indexed_array"),
    holds_many=True,
))
register_format(Format(
    (".zarr",), zarr("open_matrix"), zarr("create"), zarr("open_array"), holds_many=True,
    options=("chunks", "shards", "compress"), sink=zarr("ZarrSink"),
))
