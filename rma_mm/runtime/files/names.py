"""Names of matrices in files: a file, a matrix in it, and a part of that, as `data.h5::/group/A[0:1000, :]`.

What is said of a matrix in a file stands behind `::`; in a path through a file that holds several, as
`store.zarr/group/A`, it is the rest of the path. A part is a slice of NumPy's, of steps of 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path, quoted, truncate

SEPARATOR = "::"  # separator between a file and the matrix in it
MOST_LISTED = 8  # matrices of a file that a message names


@dataclass(frozen=True)
class Name:
    """A matrix in a file, or a part of one, as a user names it."""

    text: str  # all of it, as it was given
    path: str  # the file, or folder
    inner: str = ""  # which matrix of several in the file; empty if none is named
    part: tuple[slice, slice] | None = None  # its rows and columns; None for all

    @staticmethod
    def of(given: str | os.PathLike[str], folders: Collection[str] = ()) -> Name:
        """Return the name in a text. A file that is there under the whole text has that for its path.

        folders: suffixes of files that hold several matrices, through which a path may lead. Raises FileFormatError
        where the part is none.
        """
        text = os.fspath(given)
        found = None if os.path.lexists(text) else re.fullmatch(r"(.+)\[([^\[\]]*)\]", text, re.DOTALL)
        whole = found[1] if found else text
        path, inner = split(whole)
        if path == whole and (os.path.isdir(whole) or not os.path.lexists(whole)):
            path, inner = _through(whole, folders)
        return Name(text, path, inner, _part(text, found[2]) if found else None)

    @property
    def whole(self) -> str:
        return joined(self.path, self.inner)


def split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path into (file, matrix in it); an existing file's path is not split.

    >>> split("data.h5::/group/A")
    ('data.h5', '/group/A')
    """
    text = os.fspath(path)
    ends = [len(text), *(found.start() for found in re.finditer(f"{SEPARATOR}|(?<=.){os.sep}", text, re.DOTALL))]
    there = max((end for end in ends if os.path.lexists(text[:end])), default=0)
    file, _, inner = text[there:].partition(SEPARATOR)
    return text[:there] + file, inner


def joined(file: str, inner: str) -> str:
    """Join the parts that `split` returns.

    >>> joined("data.h5", "/group/A"), joined("A.npy", "")
    ('data.h5::/group/A', 'A.npy')
    """
    return f"{file}{SEPARATOR}{inner}" if inner else file


def no_matrix(
    file: str, inner: str, found: Mapping[str, str], kind: str = "not there", holder: str = "file"
) -> FileFormatError:
    """Return the error for a name that leads to no matrix, or that must name one of several.

    found: the matrices that are there, as `listed` has them. holder: what the file is.
    """
    what = f"{truncate(inner)} is {kind}" if inner else f"say which matrix, as {display_path(file)}{SEPARATOR}NAME"
    return FileFormatError(f"{display_path(file)}: {what}; the {holder} holds {listed(found)}")


def listed(found: Mapping[str, str]) -> str:
    """Return the matrices in a file, for a message: name → shape and type.

    >>> listed({"/A": "(2, 3) of float64", "/B": "(3, 2) of int8"})
    '/A: (2, 3) of float64, /B: (3, 2) of int8'
    """
    first = list(found.items())[:MOST_LISTED]
    shown = [f"{truncate(name) if name.isprintable() else quoted(name)}: {what}" for name, what in first]
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return ", ".join(shown) + more if shown else "no matrix"


def _through(text: str, folders: Collection[str]) -> tuple[str, str]:
    """(path, matrix in it) of a path that may lead through a file that holds several."""
    words = text.split(os.sep)
    for count, word in enumerate(words[:-1], 1):
        if any(word.lower().endswith(suffix, 1) for suffix in folders) and any(words[count:]):
            return os.sep.join(words[:count]), os.sep.join(words[count:])
    return text, ""


def _part(text: str, words: str) -> tuple[slice, slice]:
    """Return the rows and columns in brackets."""
    parts = [_slice(word.strip()) for word in words.split(",")]
    if len(parts) > 2 or None in parts:
        raise FileFormatError(
            f"{display_path(text)}: has the part [{words}]; a part is rows, or rows and columns, each from a first "
            "to before a last and in steps of 1, as [0:1000, :]"
        )
    rows, cols = (*parts, slice(None))[:2]
    assert rows is not None and cols is not None
    return rows, cols


def _slice(word: str) -> slice | None:
    """Return a slice of steps of 1; None if the word is none."""
    found = re.fullmatch(r"(-?\d{1,18})?\s*:\s*(-?\d{1,18})?\s*(:\s*1?)?", word)
    return slice(*(None if n is None else int(n) for n in found.groups()[:2])) if found else None
