"""Text of an algorithm, equal in two processes if the algorithms do the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType
from typing import Any


def in_text(value: Any) -> str:
    return blake2b(_words(value, ()).encode(), digest_size=8).hexdigest()


def _words(value: Any, inside: tuple[int, ...]) -> str:
    if id(value) in inside:  # a function that calls itself
        return "…"
    inside = (*inside, id(value))
    parts = _parts(value)
    if parts is None:
        return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)
    return f"{type(value).__qualname__}({','.join(_words(part, inside) for part in parts)})"


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a composite value, or None for a value that its own text describes."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, *value.co_consts]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, dict):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, tuple | list) else None
