"""A file format from outside the package: elements by rows in `x.raw`, shape and type beside them in `x.raw.json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import DtypeError, FileFormatError, display_path, truncate
from rma_mm.runtime.files.dense import DenseFile, DenseSink
from rma_mm.runtime.files.formats import Format, register_format
from rma_mm.runtime.files.version import Version, identity_of, opened
from rma_mm.unfinished import Unfinished

SIDECAR = ".json"


@dataclass(frozen=True)
class RawFile(DenseFile):
    beside: Version | None = None

    def check(self) -> None:
        super().check()
        if self.beside is not None:
            self.beside.check()

    def again(self) -> RawFile:
        return self if self.beside is None else open_raw(self.path)


@dataclass(frozen=True)
class RawSink(DenseSink):
    beside: Unfinished | None = None

    def source(self) -> RawFile:
        version = Version.of(self.temporary)
        if version is None:
            raise FileFormatError(f"{display_path(self.temporary)}: is gone")
        file = RawFile(self.temporary, self.shape, self.dtype, False, 0, self.stored, version)
        file.check_size()
        return file

    def publish(self) -> None:
        assert self.beside is not None
        self.beside.publish()
        super().publish()

    def discard(self) -> None:
        if self.beside is not None:
            self.beside.discard()
        super().discard()


def open_raw(path: str | os.PathLike[str], dtype: Any = None) -> RawFile:
    given, beside = os.fspath(path), os.fspath(path) + SIDECAR
    try:
        with opened(beside, SIDECAR) as descriptor:
            told = Version(beside, identity_of(os.fstat(descriptor)))
            text = os.pread(descriptor, told.size, 0)
        with opened(given, ".raw") as descriptor:
            version = Version(given, identity_of(os.fstat(descriptor)))
    except OSError as error:
        raise FileFormatError(f"{display_path(given)}: cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
        rows, cols = (int(n) for n in header["shape"])
        element = parse_dtype(header["dtype"])
    except (ValueError, KeyError, TypeError, DtypeError) as error:
        raise FileFormatError(
            f"{display_path(beside)}: has no shape and dtype of a matrix: {truncate(error)}"
        ) from None
    if dtype is not None and np.dtype(dtype) != element:
        raise FileFormatError(f"{display_path(given)}: holds {element.name}, but {np.dtype(dtype).name} was asked for")
    file = RawFile(given, (rows, cols), element, False, 0, element, version, told)
    file.check_size()
    return file


def create_raw(path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]) -> RawSink:
    sink = RawSink.reserve(path, shape, dtype, dtype)
    try:
        beside = Unfinished(f"output {display_path(path)}", sink.path + SIDECAR)
        text = json.dumps({"shape": shape, "dtype": dtype.name}).encode()
        beside.reserve(text, len(text))
    except FileFormatError:
        sink.discard()
        raise
    return RawSink(**{**vars(sink), "beside": beside})


RAW = Format((".raw",), open_raw, create_raw)
register_format(RAW)
