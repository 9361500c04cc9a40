"""What is in a Zarr store, by its metadata, and the package that reads and writes chunks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.errors import FileFormatError, cut, named
from rma_mm.runtime.files.containers.packages import package, refused_by
from rma_mm.runtime.files.formats import Path
from rma_mm.runtime.files.names import SEPARATOR, joined, listed, split
from rma_mm.runtime.files.version import Version, examined

METADATA = {"zarr.json": 3, ".zarray": 2, ".zgroup": 2}
"""The files that say what an array or a group is, and their Zarr format."""


@dataclass(frozen=True)
class ZarrNode:
    """An array, or a group of such, by its metadata."""

    folder: str
    version: Version
    """Of the file of metadata."""
    fields: Mapping[str, Any]
    """What that says."""

    @staticmethod
    def of(folder: str) -> ZarrNode | None:
        """That in a folder; None where it holds none. Raises FileFormatError where the metadata are damaged."""
        for file in METADATA:
            path = os.path.join(folder, file)
            try:
                with examined(path) as (descriptor, version):
                    raw = os.pread(descriptor, version.size, 0)
            except FileFormatError:  # it has none of this format, or not as a regular file
                continue
            try:
                fields = json.loads(raw)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise FileFormatError(f"{named(path)}: is damaged, it holds no metadata of Zarr")
            return ZarrNode(folder, version, fields)
        return None

    @property
    def format(self) -> int:
        """The Zarr format."""
        return METADATA[os.path.basename(self.version.path)]

    @property
    def is_array(self) -> bool:
        """Whether it is no group."""
        return self.version.path.endswith(".zarray") or self.fields.get("node_type") == "array"

    @property
    def is_consolidated(self) -> bool:
        """Whether a group has a copy of the metadata of all that is in it."""
        is_old = self.format == 2 and os.path.exists(os.path.join(self.folder, ".zmetadata"))
        return is_old or bool(self.fields.get("consolidated_metadata"))

    @property
    def is_blosc(self) -> bool:
        """Whether an array's chunks are compressed by Blosc, each in a file."""
        codecs = [self.fields.get("compressor"), *self._several("codecs")]
        return any(isinstance(x, dict) and "blosc" in (x.get("id"), x.get("name")) for x in codecs)

    @property
    def is_pickled(self) -> bool:
        """Whether to decompress an array's chunks runs code that they hold."""
        codecs = [self.fields.get("compressor"), *self._several("filters")]
        return any(isinstance(x, dict) and x.get("id") == "pickle" for x in codecs)

    @property
    def extents(self) -> list[Any]:
        """The shape of an array, unchecked."""
        return self._several("shape")

    def __str__(self) -> str:
        """Shape and type of an array."""
        kind = self.fields.get("data_type", self.fields.get("dtype"))
        with suppress(TypeError):  # a name that NumPy has none of
            kind = np.dtype(kind).name if isinstance(kind, str) else "records"
        return f"{tuple(self.extents)} of {cut(kind)}"

    def _several(self, key: str) -> list[Any]:
        found = self.fields.get(key)
        return found if isinstance(found, list) else []


def place_of(path: Path) -> tuple[str, str]:
    """(store, array in it). Raises FileFormatError for what is no name of one."""
    store, inner = split(path)
    store, inner = store.rstrip("/") or store, inner.strip("/")
    if inner and any(not word or word.startswith((".", "__")) for word in inner.split("/")):
        rule = "no part of one is empty or begins with . or __"
        raise FileFormatError(f"{named(path)}: {cut(inner)} is no name in a Zarr store; {rule}")
    return store, inner


def name_of(store: str, inner: str) -> str:
    """An array, for messages."""
    return named(joined(store, inner))


def array_of(store: str, inner: str) -> ZarrNode:
    """The array of a name. Raises FileFormatError, which lists those there are."""
    node = ZarrNode.of(os.path.join(store, inner))
    if node is not None and node.is_array:
        return node
    if ZarrNode.of(store) is None:
        what = "is no Zarr store" if os.path.isdir(store) else "is no folder, as Zarr stores are"
        raise FileFormatError(f"{named(store)}: {what if os.path.lexists(store) else 'No such file or directory'}")
    kind = "not there" if node is None else "a group"
    raise FileFormatError(
        f"{named(store)}: {cut(inner) or 'its root'} is {kind}; the store holds {listed(_matrices(store))}; "
        f"name one as {named(store)}{SEPARATOR}NAME"
    )


def _matrices(store: str) -> dict[str, str]:
    """The matrices in a store: name → shape and type."""
    found: dict[str, str] = {}
    for folder, inside, _ in os.walk(store):
        try:
            node = ZarrNode.of(folder)
        except FileFormatError:  # damaged, and none of its own
            continue
        is_array = node is not None and node.is_array
        inside[:] = [] if is_array else sorted(name for name in inside if not name.startswith("."))
        if node is not None and is_array and len(node.extents) == 2:
            found["/" + os.path.relpath(folder, store).removeprefix(".")] = str(node)
    return found


def open_folder(folder: str, mode: str) -> Any:
    """An array by the package, which is the root of its store. Raises what that raises."""
    package = library(folder)
    store = _removable(folder) if mode == "r+" else folder
    with package.config.set({"array.write_empty_chunks": True}):  # a file that is missing is a loss then
        return package.open_array(store, mode=mode)


def _removable(folder: str) -> Any:
    """A store that stays removed: the package's own makes its folder again with the next chunk."""
    from zarr.storage import LocalStore

    class Removable(LocalStore):  # type: ignore[misc]
        async def _open(self, *args: Any, **options: Any) -> None:
            os.stat(self.root)
            await super()._open(*args, **options)

        async def set(self, key: str, value: Any) -> None:
            await asyncio.to_thread(_put, folder, key, value.as_buffer_like())

    return Removable(folder)


def _put(root: str, key: str, raw: Any) -> None:
    """Write a file in a folder, and the folders between. Raises OSError, also where the folder is gone."""
    *between, name = key.split("/")
    for word in between:
        root = os.path.join(root, word)
        with suppress(FileExistsError):
            os.mkdir(root)
    with open(os.path.join(root, name), "wb") as file:
        file.write(raw)


def library(path: str) -> Any:
    """The zarr package. Raises FileFormatError where it is not installed."""
    return package("zarr", "zarr", path)


@contextmanager
def zarr_errors(what: str) -> Iterator[None]:
    """What the package raises as FileFormatError."""
    try:
        yield
    except (FileFormatError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - each codec raises errors of its own
        raise refused_by("Zarr", what, error) from None
