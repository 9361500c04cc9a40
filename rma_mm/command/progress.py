"""A progress bar on rank 0's terminal, for products that take longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 1.0
"""Seconds that a product takes before the bar appears."""


@contextmanager
def progress_bar(title: str, wanted: bool) -> Iterator[Callable[[float, float], None] | None]:
    """A callback (done, total) that draws a bar on standard error; None where that is no terminal, or not `wanted`."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, desc=title, delay=DELAY, leave=False, bar_format=form, file=sys.stderr) as bar:

        def show(done: float, total: float) -> None:
            if total > 0:
                bar.update(done / total - bar.n)

        yield show
