"""Metadata of a Zarr store, and access to the package that reads and writes chunks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, cast

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, MissingFileError, display_path, truncate
from rma_mm.runtime.files.containers.expansion import COMPRESSORS, check_compressors
from rma_mm.runtime.files.containers.packages import package, refused_by
from rma_mm.runtime.files.external import check_unlinked
from rma_mm.runtime.files.formats import Path
from rma_mm.runtime.files.names import SEPARATOR, joined, listed, split
from rma_mm.runtime.files.version import Version, examined

METADATA = {"zarr.json": 3, ".zarray": 2, ".zgroup": 2}
"""The files that say what an array or a group is, and their Zarr format."""
LONGEST_METADATA = 2**23  # bytes of such a file at most
NATIVE = "<" if sys.byteorder == "little" else ">"
"""The first letter of Zarr 2's names for types in this machine's byte order."""
MOST_DIMENSIONS = 64  # dimensions of an array at most; NumPy has as many


@dataclass(frozen=True)
class ZarrNode:
    """An array, or a group of such, by its metadata."""

    folder: str
    version: Version  # of the file of metadata
    fields: Mapping[str, Any]  # what that says

    @staticmethod
    def of(folder: str) -> ZarrNode | None:
        """Read the node in a folder; None if there is none. Raise FileFormatError if its metadata are damaged."""
        for file in METADATA:
            path = os.path.join(folder, file)
            try:
                with examined(path) as (descriptor, version):
                    raw = os.pread(descriptor, min(version.size, LONGEST_METADATA), 0)
            except FileFormatError:  # it has none of this format, or not as a regular file
                continue
            check_unlinked(display_path(path), folder, path)
            if version.size > LONGEST_METADATA:
                raise FileFormatError(
                    f"{display_path(path)}: has {version.size} bytes; at most {LONGEST_METADATA} are read"
                )
            try:
                fields = json.loads(raw)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise FileFormatError(f"{display_path(path)}: is damaged, it holds no metadata of Zarr")
            return ZarrNode(folder, version, fields)
        return None

    @property
    def format(self) -> int:
        return METADATA[os.path.basename(self.version.path)]

    @property
    def is_array(self) -> bool:
        return self.version.path.endswith(".zarray") or self.fields.get("node_type") == "array"

    @property
    def is_consolidated(self) -> bool:
        """True if a group has a copy of the metadata of all that is in it."""
        is_old = self.format == 2 and os.path.exists(os.path.join(self.folder, ".zmetadata"))
        return is_old or bool(self.fields.get("consolidated_metadata"))

    @property
    def compressors(self) -> list[str]:
        """The codecs that compress an array's chunks, or the shards that they lie in."""
        outer = [self.fields.get("compressor"), *self._several("filters"), *self._several("codecs")]
        return _compressors(outer) + self.compressors_in_shards

    @property
    def compressors_in_shards(self) -> list[str]:
        return _compressors((self.shard or {}).get("codecs", []))

    @property
    def shard(self) -> Mapping[str, Any] | None:
        """The configuration of the codec that puts chunks into shards; None without shards."""
        found = [x.get("configuration") for x in self._several("codecs") if _is_sharding(x)]
        return found[0] if found and isinstance(found[0], dict) else None

    @property
    def is_blosc(self) -> bool:
        return self.compressors == ["blosc"] and not self.compressors_in_shards

    @cached_property
    def decode(self) -> Callable[[bytes], Any] | None:
        """Decode a chunk's file into its elements in memory order; None if only the zarr package can decode it."""
        f, of_elements = self.fields, {"name": "bytes", "configuration": {"endian": sys.byteorder}}
        if self.format == 3:
            first, *codecs = self._several("codecs") or [None]
            is_plain = first == of_elements and not f.get("storage_transformers")
        else:
            codecs = [f["compressor"]] if f.get("compressor") else []
            is_plain = f.get("order") == "C" and not f.get("filters") and str(f.get("dtype")).startswith(NATIVE)
        if not is_plain or [x.get("id", x.get("name")) for x in codecs] != self.compressors:
            return None
        if not codecs:
            return bytes
        how = codecs[0] if self.format == 2 else {"id": self.compressors[0]}
        codec = package("numcodecs", "zarr", self.folder).get_codec(how)
        return cast(Callable[[bytes], Any], codec.decode)

    @property
    def is_pickled(self) -> bool:
        """True if to decompress an array's chunks runs code that they hold."""
        codecs = [self.fields.get("compressor"), *self._several("filters")]
        return any(isinstance(x, dict) and x.get("id") == "pickle" for x in codecs)

    @property
    def extents(self) -> list[Any]:
        return self._several("shape")

    def check(self, name: str) -> None:
        """Raise FileFormatError for an array that would make the package use unbounded memory or run code."""
        if self.is_pickled:
            raise FileFormatError(f"{name}: holds pickled objects, which are never loaded")
        shape = self.extents
        if len(shape) > MOST_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
            raise FileFormatError(f"{name}: is damaged: {truncate(shape)} is no shape")
        check_compressors(name, self.compressors)
        inner = self.shard
        if inner and any(map(_is_sharding, inner.get("codecs", []))):
            raise FileFormatError(f"{name}: has shards within shards, which are not read")

    def __str__(self) -> str:
        kind = self.fields.get("data_type", self.fields.get("dtype"))
        with suppress(TypeError):  # a name that NumPy has none of
            kind = np.dtype(kind).name if isinstance(kind, str) else "records"
        return f"{truncate(tuple(self.extents))} of {truncate(kind)}"

    def _several(self, key: str) -> list[Any]:
        found = self.fields.get(key)
        return found if isinstance(found, list) else []


def _compressors(codecs: Any) -> list[str]:
    """Return the codecs among these that make much of little."""
    every = [x for x in codecs if isinstance(x, dict)] if isinstance(codecs, list) else []
    names = (str(x.get("name", x.get("id"))).removeprefix("numcodecs.") for x in every)
    return [name for name in names if name in COMPRESSORS]


def _is_sharding(codec: Any) -> bool:
    return isinstance(codec, dict) and codec.get("name") == "sharding_indexed"


def place_of(path: Path) -> tuple[str, str]:
    """(store, array in it). Raises FileFormatError for what is no name of one."""
    store, inner = split(path)
    store, inner = store.rstrip("/") or store, inner.strip("/")
    if inner and any(not word or word.startswith((".", "__")) for word in inner.split("/")):
        rule = "no part of one is empty or begins with . or __"
        raise FileFormatError(f"{display_path(path)}: {truncate(inner)} is no name in a Zarr store; {rule}")
    return store, inner


def name_of(store: str, inner: str) -> str:
    return display_path(joined(store, inner))


def array_of(store: str, inner: str) -> ZarrNode:
    """Return the array of a name. Raises FileFormatError, which lists those there are."""
    folder = os.path.join(store, inner)
    check_unlinked(name_of(store, inner), store, folder)
    node = ZarrNode.of(folder)
    if node is not None and node.is_array:
        return node
    if ZarrNode.of(store) is None:
        if not os.path.lexists(store):
            raise MissingFileError(f"{display_path(store)}: No such file or directory")
        what = "is no Zarr store" if os.path.isdir(store) else "is no folder, as Zarr stores are"
        raise FileFormatError(f"{display_path(store)}: {what}")
    kind = "not there" if node is None else "a group"
    raise FileFormatError(
        f"{display_path(store)}: {truncate(inner) or 'its root'} is {kind}; "
        f"the store holds {listed(_matrices(store))}; name one as {display_path(store)}{SEPARATOR}NAME"
    )


def _matrices(store: str) -> dict[str, str]:
    """Return the matrices in a store: name → shape and type."""
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
    """Return an array by the package, which is the root of its store. Raises what that raises."""
    package = library(folder)
    store = _removable(folder) if mode == "r+" else folder
    with package.config.set({"array.write_empty_chunks": True}):  # a file that is missing is a loss then
        return package.open_array(store, mode=mode)


def _removable(folder: str) -> Any:
    """Return a store that stays removed: the package's own makes its folder again with the next chunk."""
    import asyncio

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
    """Return the zarr package. Raises FileFormatError if it is not installed."""
    return package("zarr", "zarr", path)


@contextmanager
def zarr_errors(what: str) -> Iterator[None]:
    """Raise the package's errors as FileFormatError."""
    try:
        yield
    except (FileFormatError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - each codec raises errors of its own
        raise refused_by("Zarr", what, error) from None
