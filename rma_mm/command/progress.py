"""A progress bar on rank 0's terminal, for products that take longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

DELAY = 1.0
"""Seconds that a product takes before the bar appears."""


class Read(Protocol):
    """What was read of files so far."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def seconds(self) -> float:
        """In which they were."""


@contextmanager
def progress_bar(
    title: str, wanted: bool, files: Sequence[Read] = ()
) -> Iterator[Callable[[float, float], None] | None]:
    """A callback (done, total) that draws a bar on standard error; None where that is no terminal, or not `wanted`.

    files: what is read meanwhile, of which the bar says how much this rank has.
    """
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, desc=title, delay=DELAY, leave=False, bar_format=form, file=sys.stderr) as bar:

        def show(done: float, total: float) -> None:
            if files:
                bar.set_postfix_str(f"{sum(file.nbytes for file in files) / 2**20:.0f} MiB read", refresh=False)
            if total > 0:
                bar.update(done / total - bar.n)

        yield show
