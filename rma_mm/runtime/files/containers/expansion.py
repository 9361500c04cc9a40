"""The size of a compressed chunk, found before it is decompressed: a small file can unpack to any size.

zstd, Blosc and LZ4 say it in their first bytes; of the others the bytes are counted, and not kept.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Callable, Collection
from typing import Any

from rma_mm.errors import FileFormatError, truncate

LEAST = 2**26  # bytes to which any chunk may unpack
FACTOR = 2  # times the bytes of its elements that a chunk may unpack to: headers and wider types on the way add some
STEP = 2**20  # bytes that are decompressed at a time to be counted
DEFLATE_MOST = 1032  # bytes that deflate makes of one, at most
ZSTD_BLOCK = 2**17  # bytes of a block of zstd at most
STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}
COMPRESSORS = frozenset(("zstd", "blosc", "lz4", *STREAMS))
"""The codecs that can make much of little, by the names that Zarr gives them."""


def limit_of(nbytes: int) -> int:
    return max(LEAST, FACTOR * nbytes)


def check_chunk_size(name: str, chunk_bytes: int, array_bytes: int) -> None:
    """Raise FileFormatError if a chunk is much larger than the whole matrix, as honest files have none."""
    if chunk_bytes > limit_of(array_bytes):
        raise FileFormatError(
            f"{name}: has chunks of {truncate(chunk_bytes)} bytes, and {truncate(array_bytes)} in all"
        )


def check_compressors(name: str, codecs: Collection[str]) -> None:
    """Raise FileFormatError if chunks are compressed twice, as their unpacked size cannot be known."""
    if len(codecs) > 1:
        found = truncate(", ".join(codecs))
        raise FileFormatError(f"{name}: is compressed more than once ({found}); save it with one codec")


def check_expansion(name: str, codec: str, raw: Callable[[int, int], bytes], size: int, nbytes: int) -> None:
    """Raise FileFormatError if a chunk unpacks to far more than its elements take.

    codec: what compressed it, or "". raw: (offset, count) → that part of its `size` bytes. nbytes: what its elements
    take.
    """
    most = limit_of(nbytes)
    if size > most:
        raise FileFormatError(f"{name}: a chunk of {truncate(nbytes)} bytes is stored in {truncate(size)}")
    if codec in STREAMS:
        is_small = codec in ("gzip", "zlib") and size * DEFLATE_MOST <= most
        is_over = not is_small and _streams_over(codec, raw, size, most)
    else:
        head = raw(0, 18)
        said = {"blosc": head[4:8], "lz4": head[:4]}.get(codec, b"")
        is_over = int.from_bytes(said, "little") > most or (codec == "zstd" and _zstd_bytes(head, raw, size) > most)
    if is_over:
        raise FileFormatError(f"{name}: a chunk of {size} bytes unpacks to more than {most}, and has {nbytes}")


def _streams_over(codec: str, raw: Callable[[int, int], bytes], size: int, most: int) -> bool:
    """True if more than `most` bytes come out. What is damaged is left to whoever reads it."""
    stream, rest, total = STREAMS[codec](), raw(0, size), 0
    try:
        while total <= most:
            total += len(stream.decompress(rest, STEP))
            if stream.eof:  # another stream may follow
                rest, stream = stream.unused_data, STREAMS[codec]()
                needs_input = True
            else:  # zlib gives back what it has not used, the others keep it
                rest = getattr(stream, "unconsumed_tail", b"")
                needs_input = getattr(stream, "needs_input", True)
            if needs_input and not rest:
                break
    except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError):
        pass
    return total > most


def _zstd_bytes(head: bytes, raw: Callable[[int, int], bytes], size: int) -> int:
    """Return the size of zstd frames (RFC 8878, 3.1.1): that in the first frame, or an upper bound."""
    at = total = 0
    while len(head) >= 6 and head[:4] == b"\x28\xb5\x2f\xfd":
        flags = head[4]
        is_single = bool(flags & 0x20)
        count = (int(is_single), 2, 4, 8)[flags >> 6]
        skip = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        if count and not at:
            return int.from_bytes(head[skip : skip + count], "little") + 256 * (count == 2)
        at, is_last = at + skip + count, False
        while at + 3 <= size and not is_last:
            block = int.from_bytes(raw(at, 3), "little")
            is_last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
            total += ZSTD_BLOCK if kind == 2 else length
            at += 3 + (1 if kind == 1 else length)
        at += 4 * (flags >> 2 & 1)
        head = raw(at, 18)
    return total


def pread(descriptor: int, start: int = 0) -> Callable[[int, int], bytes]:
    return lambda offset, count: os.pread(descriptor, count, start + offset)
