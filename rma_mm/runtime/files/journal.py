"""Journal of the blocks that are complete in an output file, so that an interrupted job can be resumed.

A journal is a file of lines beside the output: first what is computed from what, then each block that is whole on the
disk, with its checksum. A line counts once it is on the disk, and only if its own checksum is right: the last may be
half written.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path, truncate
from rma_mm.geometry.span import Region
from rma_mm.unfinished import JOURNAL, Unfinished, remove_left_behind, sync, write_at

VERSION = 1  # of the form of journals
STRIP = 2**16  # elements that are summed up at a time


@dataclass
class Journal:
    """The journal of one output. Local; on one rank."""

    path: str
    facts: dict[str, Any]  # what it begins with
    blocks: dict[int, int] = field(default_factory=dict)  # number of each whole block → its checksum

    @staticmethod
    def begin(final: str, facts: Mapping[str, Any]) -> Journal:
        """Return a new one for the output of this name, on the disk. Raises FileFormatError, where one is there too."""
        made = Journal(final + JOURNAL, {"version": VERSION, **facts})
        file = Unfinished(f"journal {display_path(made.path)}", made.path)
        try:
            made._add(made.facts, file.temporary)
            try:
                os.link(file.temporary, made.path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                file.publish()
            sync(os.path.dirname(made.path))
        except FileExistsError:
            raise FileFormatError(interrupted(final)) from None
        except OSError as error:
            raise FileFormatError(f"journal {display_path(made.path)}: cannot be written: {error.strerror}") from None
        finally:
            file.discard()
        return made

    @staticmethod
    def resume(final: str) -> Journal:
        """Return the journal of an interrupted job, without a half-written line. Raises FileFormatError."""
        path = final + JOURNAL
        try:
            remove_left_behind(path)  # of one that was ended as it began
            with open(path, "rb") as file:
                raw = file.read()
        except OSError as error:
            raise FileFormatError(
                f"journal {display_path(path)}: there is nothing to resume: {error.strerror}"
            ) from None
        lines, length = [], 0
        for line in raw.splitlines(keepends=True):
            content = _read(line)
            if content is None:
                break
            lines.append(content)
            length += len(line)
        if not lines or lines[0].get("version") != VERSION:
            said = (
                f"is of version {truncate(lines[0].get('version'))}, and not {VERSION}"
                if lines
                else "has no first line"
            )
            raise FileFormatError(f"journal {display_path(path)}: {said}; remove it to start again")
        if length < len(raw):
            os.truncate(path, length)
        return Journal(path, lines[0], {line["block"]: line["sum"] for line in lines[1:]})

    def require(self, facts: Mapping[str, Any]) -> None:
        """Raise FileFormatError if the job differs from the one that began the journal."""
        for name, now in facts.items():
            was = self.facts.get(name)
            if was != json.loads(json.dumps(now)):
                raise FileFormatError(
                    f"journal {display_path(self.path)}: it was started with {name} {truncate(was)}, "
                    f"but now that is {truncate(now)}; finish it with the old value, or remove it to start again"
                )

    def note(self, block: int, checksum: int) -> None:
        """A block is whole, and on the disk. Raises FileFormatError."""
        try:
            self._add({"block": block, "sum": checksum})
        except OSError as error:
            raise FileFormatError(f"journal {display_path(self.path)}: cannot be written: {error.strerror}") from None
        self.blocks[block] = checksum

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)

    def _add(self, content: Mapping[str, Any], path: str | None = None) -> None:
        text = json.dumps(content)
        descriptor = os.open(path or self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            end = os.fstat(descriptor).st_size
            write_at(descriptor, f"{text} {zlib.crc32(text.encode()):08x}\n".encode(), end)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if the line is incomplete."""
    text, _, checksum = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or f"{zlib.crc32(text):08x}".encode() != checksum:
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def interrupted(final: str) -> str:
    """Return the message for a journal that an interrupted job has left beside an output."""
    done = "" if (known := _count(final + JOURNAL)) is None else f", with {known} blocks that are done"
    return (
        f"output {display_path(final)}: a job that was ended left {display_path(final + JOURNAL)}{done}; "
        "--resume continues it, or remove it to start again"
    )


def _count(path: str) -> int | None:
    """Blocks that are done; None if the journal cannot be read."""
    try:
        with open(path, "rb") as file:
            return sum(_read(line) is not None for line in file) - 1
    except OSError:
        return None


def checksum(region: Region, tile: NDArray[Any]) -> int:
    """Return the sum, modulo 2^64, of the bits of elements, each times a number that its place gives.

    Of parts of a matrix these add up to that of the whole, whoever has which part.
    """
    total = 0
    if not tile.size:
        return 0
    rows, cols = (_scattered(span.indices) for span in region)
    width = min(8, tile.itemsize)
    step = max(1, STRIP // max(1, len(cols)))
    for top in range(0, len(rows), step):
        bits = np.ascontiguousarray(tile[top : top + step]).view(f"u{width}").astype(np.uint64)
        bits = bits.reshape(bits.shape[0], len(cols), -1)
        places = (rows[top : top + step, None] ^ cols[None, :]) | np.uint64(1)
        for n in range(bits.shape[2]):  # of complex128, two words
            total += int((bits[:, :, n] * (places + np.uint64(2 * n))).sum(dtype=np.uint64))
    return total % 2**64


def _scattered(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Numbers of 64 bits that tell these apart (by the finisher of MurmurHash3, A. Appleby 2011)."""
    x = numbers.astype(np.uint64) + np.uint64(1)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))
