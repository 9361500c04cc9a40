"""The errors a user can meet.

Every message names the argument, what was got, the rule, and what would fit. The same error is raised on
every rank: nothing is raised before all ranks have agreed on it (see `rma_mm.runtime.ranks.agreement`).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

QUOTED, NAMED = 80, 400
"""Characters of a value, and of a file's path, that a message repeats at most."""
LINES, LINE = 6, 1000
"""Lines of a message that a command prints, and characters of a line."""


def truncate(text: object, most: int = QUOTED) -> str:
    """Return the text of something that is repeated in a message, its middle left out where it is long.

    >>> truncate("a" * 100_000)
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa … aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'
    """
    shown = str(text)
    half = (most - 2) // 2
    return shown if len(shown) <= most else f"{shown[:half]} … {shown[-(most - 3 - half) :]}"


def quoted(value: object) -> str:
    """`value` as Python writes it, cut."""
    return truncate(repr(value))


def display_path(path: str | os.PathLike[str]) -> str:
    """Return a file's path for a message: in full, unless it is longer than any path that a user types.

    >>> display_path("x" * 400) == "x" * 400, " … " in display_path("x" * 401)
    (True, True)
    """
    return truncate(os.fspath(path), NAMED)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return some ranks in words.

    >>> ranks_in_words([2]), ranks_in_words([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def count_of(number: int, what: str) -> str:
    """Return a number of things in words.

    >>> count_of(1, "rank"), count_of(0, "node")
    ('1 rank', '0 nodes')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the beginning of a rule for a word that is not one of those known: the one that is nearest to it.

    Words of several parts, as summa_c, are also compared by their first one.

    >>> nearest("suma", ["srumma", "summa_c"]), nearest("x", ["srumma", "summa_c"])
    ('did you mean summa_c? ', '')
    """
    from difflib import get_close_matches  # slow to import, for errors alone

    listed = list(known)
    names = {name.lower().split("_")[0]: name for name in reversed(listed)} | {name.lower(): name for name in listed}
    close = get_close_matches(str(word)[:NAMED].lower(), names, 1)
    return f"did you mean {names[close[0]]}? " if close else ""


def brief(message: str, most: int = NAMED) -> str:
    """Return a message in which no word is longer than a path: it repeats a user's text, of which a part is enough.

    >>> len(brief("layout: got " + "(" * 100_000))
    412
    """
    return re.sub(rf"\S{{{most + 1},}}", lambda word: truncate(word[0], most), message)


def in_lines(message: str) -> str:
    """Return a message as a command says it: at most six lines of at most 1000 characters.

    >>> len(in_lines("x" * 5000)), len(in_lines("line" + chr(10) + "line"))
    (1001, 10)
    """
    half = LINE // 2
    lines = message.splitlines()[:LINES]
    return "".join((line if len(line) <= LINE else f"{line[:half]} … {line[3 - half :]}") + "\n" for line in lines)


class RmaError(Exception):
    """Base of every error this package raises on purpose. What it repeats of a user's text is cut."""

    def __init__(self, message: str = "") -> None:
        super().__init__(brief(message))


class LayoutError(RmaError, ValueError):
    """A placement text or value that is malformed, or does not fit its mesh or matrix."""


class ShapeError(RmaError, ValueError):
    """Shapes that do not fit together; the message holds the shapes of all operands."""


class DtypeError(RmaError, TypeError, ValueError):
    """Element types that have no rule, or a value that an element type cannot hold."""


class MeshError(RmaError, ValueError):
    """A mesh that does not fit the ranks at hand, or operands that live on different meshes."""


class AlgorithmError(RmaError, ValueError):
    """An unknown algorithm, or one that cannot serve the placements or the mesh at hand."""


class OptionError(RmaError, ValueError):
    """An option that is out of range, or does not go with the others."""


class IndexRangeError(RmaError, IndexError):
    """An index of a matrix that is out of range, or too many of them."""


class WindowError(RmaError, ValueError):
    """An unknown window flavour, or memory that cannot be exposed as asked."""


class AbsentError(WindowError):
    """A flavour of windows that is unavailable here; the message says why, and how to change that."""


class MemoryLimitError(RmaError, MemoryError, ValueError):
    """More memory would be needed than is allowed or free; the message says how much is missing."""

    def __init__(self, message: str = "", need: int = 0) -> None:
        """need: bytes that would do, where that is known."""
        super().__init__(message)
        self.need = need


class DisagreementError(RmaError, ValueError):
    """Ranks passed different arguments to a collective call; the message names them and their values."""


class MachineError(RmaError, ValueError):
    """A description of a machine with a figure that is missing or impossible."""


class ClosedError(RmaError, ValueError):
    """Use of a matrix, plan, mesh or window after it was closed."""


class NegativeCycleError(RmaError, ValueError):
    """A graph in which going round a cycle makes paths ever shorter."""


Fault = Literal[
    "barriers", "deadlock", "filled-twice", "misfit", "no-rank", "not-dense", "not-filled", "not-final", "not-once",
    "not-opened", "not-own", "opened-twice", "out-of-bounds", "race", "summand", "unmatched", "written-late",
]
"""Codes of the faults of a schedule, which stay the same when messages change."""


class ScheduleError(RmaError):
    """A schedule that breaks an invariant: found by `rma_mm.schedule.verify.checker`, never by a user's data.

    >>> ScheduleError("race", "rank 1 adds to C while rank 0 reads it").code
    'race'
    """

    def __init__(self, code: Fault | str, why: str = "") -> None:
        """code: without `why`, the whole text of an error as another rank had it."""
        super().__init__(f"{code}: {why}" if why else code)

    @property
    def code(self) -> str:
        """Return the code of the fault, one of `Fault`, with which the text begins."""
        return str(self).partition(":")[0]


class CheckError(RmaError):
    """A transfer, a slot or a product that is wrong: found where RMA_MM_CHECK=1 asks for checks, never else."""


class VerificationError(RmaError):
    """A product that is wrong: found by `rma_mm.verify`, by `check=` of a product, or by a command's --verify."""


class FileFormatError(RmaError, ValueError):
    """An input file that is missing, truncated, pickled or no matrix, or an output that cannot be written."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """An input file that does not exist."""


class Renamed:
    """The earlier name of the attribute or method `new`; reading it gives a DeprecationWarning."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(f"{self.name} is now called {self.new}", DeprecationWarning, stacklevel=2)
        return getattr(instance, self.new)
