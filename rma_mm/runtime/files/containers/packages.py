"""The packages that read formats: where one is not installed, and what it raises, as one message."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rma_mm.errors import FileFormatError, display_path, truncate

LONGEST = 200  # characters of a package's own message that are repeated


def package(module: str, extra: str, path: str) -> Any:
    """Return a module that reads the file at `path`. Raises FileFormatError if it is not installed.

    extra: of rma_mm, with which it is.
    """
    try:
        return import_module(module)
    except ImportError:
        fix = f"pip install 'rma_mm[{extra}]'"
        raise FileFormatError(f"{display_path(path)}: needs {module}, which is not installed: {fix}") from None


def refused_by(package: str, what: str, error: Exception) -> FileFormatError:
    """Return the error of a package that reads, or writes, `what`, in a line."""
    found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    brief = truncate(" ".join(found.split()) or type(error).__name__, LONGEST)
    return FileFormatError(f"{what}: cannot be read or written as {package}: {brief}")
