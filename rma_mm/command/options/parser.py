"""Parse command lines: what all commands have in common. Imports little, so that --help is quick."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn

from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import QUOTED, OptionError, RmaError, brief, nearest, quoted
from rma_mm.geometry.extents import parse_bytes
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.geometry.shares import speeds_problem
from rma_mm.windows.hosts.liveness import timeout_of

MOST, MOST_RANKS, DIGITS = 2**62, 2**31, 32
"""Limits: the largest whole number or number of bytes, the largest number of ranks, the most digits that are read."""
MOST_TIMES, MOST_THREADS = 10**9, 2**16
PROGRESS = ("auto", "bar", "lines", "off")  # ways to report progress
WIDTH = 100  # columns of the text above the options of --help


class Parser(argparse.ArgumentParser):
    """argparse, but errors are raised and not printed, misspelt words get a hint, and help is in groups."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog, usage=usage, description=description, epilog=epilog, add_help=False, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.description = "\n".join(textwrap.wrap(description, WIDTH))

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """Return the function that adds an option to a new group."""
        return self.add_argument_group(title).add_argument

    @property
    def actions(self) -> list[argparse.Action]:
        return self._actions

    @property
    def words(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"(?:unrecognized arguments: |ambiguous option: )(\S+)", message)
        hint = nearest(unknown[1].partition("=")[0], self.words) if unknown else self._nearest_choice(message)
        raise OptionError(f"{brief(message, QUOTED)}; {hint}{self.prog} --help lists the arguments")

    def _nearest_choice(self, message: str) -> str:
        wrong = re.match(r"argument \S+: invalid choice: '(\S+)' \(choose from (.*)\)", message)
        return nearest(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""


def check_plot(path: str | None) -> None:
    """Raise OptionError if a plot is wanted and cannot be drawn here."""
    if path and find_spec("matplotlib") is None:
        raise OptionError("--plot: needs matplotlib, which is not installed: pip install matplotlib, or use --json")


# -- what a flag takes: text in, a value out, or ArgumentTypeError with the rule -------------------


def count(least: int, most: int = MOST) -> Callable[[str], int]:
    return lambda text: _whole(text, least, most, f"a whole number of at least {least}")


def _whole(text: str, least: int, most: int, rule: str, within: str | None = None) -> int:
    """A whole number, alone or `within` several. Raises ArgumentTypeError, which says the rule and the limits."""
    if not text.strip().isdecimal() or (len(text) < DIGITS and int(text) < least):
        raise argparse.ArgumentTypeError(f"got {quoted(text if within is None else within)}; needs {rule}")
    if len(text) >= DIGITS or int(text) > most:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; must be at most {most}")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    """M, N and K; of batches their extents first."""
    rule = "three whole numbers M,N,K, as 100,200,300, or for batches BATCH,M,N,K, as 12,512,64,512"
    words = text.split(",")
    if len(words) < 3:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    return tuple(_whole(word, 0, MOST, rule, text) for word in words)


def extents(text: str) -> tuple[int, int]:
    rule = "two whole numbers of at least 1, as 1024,1024"
    words = text.split(",")
    if len(words) != 2:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    rows, cols = (_whole(word, 1, MOST, rule, text) for word in words)
    return rows, cols


def mesh(text: str) -> tuple[int, ...]:
    rule = f"one to {len(AXIS_NAMES)} sizes, as 4, 2x3 or 2x3x2"
    words = text.split("x")
    if not 1 <= len(words) <= len(AXIS_NAMES):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    return tuple(_whole(word, 1, MOST_RANKS, rule, text) for word in words)


def speeds(text: str) -> tuple[float, ...]:
    rule = "it takes a number for each rank, above 0, as 4,2,1"
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, {rule}") from None
    if speeds_problem(found):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, {rule}")
    return found


def timeout(text: str) -> float:
    """Return the seconds for which a rank may make no progress."""
    try:
        return timeout_of(text, {})
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("timeout: ")) from None


def dtype(text: str) -> str:
    """Return the name of an element type."""
    try:
        return parse_dtype(text).name
    except RmaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def scalar(text: str) -> complex:
    """Return the number as int, float or complex, whichever holds it exactly."""
    for kind in (int, float, complex):
        try:
            number: complex = kind(text)
            complex(number)
        except ValueError:
            continue
        except OverflowError:
            raise argparse.ArgumentTypeError(f"got {quoted(text)}; must be at most 1.8e308") from None
        return number
    raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs a Python number, as 2, -0.5 or -1-2j")


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; {error}") from None
