"""Show or delete what is kept between jobs."""

from __future__ import annotations

import os

from rma_mm.command.frame import DONE, Frame
from rma_mm.command.options.cache import CacheOptions
from rma_mm.errors import FileFormatError
from rma_mm.kernels.cache import clean, home, refusal
from rma_mm.segments import stray_segments


def run(options: CacheOptions, frame: Frame) -> int:
    """Print the folder, or delete what is in it. Raises FileFormatError if that is not possible."""
    frame.has_begun = True
    try:
        folder = home()
        if options.action == "dir":
            frame.say(str(folder), *filter(None, [refusal()]))
            return DONE
        count, nbytes = clean()
        stray = stray_segments()
        for name in stray:
            os.unlink(name)
    except (OSError, RuntimeError) as error:
        raise FileFormatError(f"cache: {error}; name another folder by RMA_MM_CACHE") from None
    frame.say(f"deleted {count} files, {nbytes} bytes, in {folder}")
    if stray:
        frame.say(f"deleted {len(stray)} segments of shared memory that killed jobs left")
    return DONE
