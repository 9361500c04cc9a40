"""Objects that stand for one object on each pretended rank, and calls that run on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rma_mm.errors import ranks_in_words
from rma_mm.runtime.pretended.turns import StuckError, Turns, TurnTaker

ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
BY_RANK = {"rank", "coords", "tile", "local"}
"""Attributes that come as a list by rank even if they are the same on all ranks."""
COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
OTHERS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert, "len": len, "bool": bool,
    "int": int, "float": float, "complex": complex, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem, "contains": operator.contains,
}  # fmt: skip


class Everywhere:
    """An object on each of the ranks. What is done to it is done on all of them, at the same time.

    A result that is the same everywhere comes once; numbers and arrays that differ come as a list, by rank.
    """

    def __init__(self, turns: Turns, values: Sequence[Any]) -> None:
        self._turns, self._values = turns, list(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        act = _by_rank if name in BY_RANK else run_on_all
        return act(self._turns, getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_turns", "_values"):
            object.__setattr__(self, name, value)
        else:
            run_on_all(self._turns, setattr, (self, name, value), {})

    def __dir__(self) -> list[str]:
        return dir(self._values[0])

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance tells what it stands for
        return type(self._values[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_on_all(self._turns, lambda call, *a, **k: call(*a, **k), (self, *args), kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        def shown(value: Any) -> Any:
            return np.asarray(value, dtype)

        return run_on_all(self._turns, shown, (self,), {})

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        return run_on_all(self._turns, getattr(ufunc, method), args, kwargs)

    def __array_function__(self, function: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        return run_on_all(self._turns, function, args, kwargs)

    def __enter__(self) -> Everywhere:
        run_on_all(self._turns, lambda value: value.__enter__() and None, (self,), {})
        return self

    def __exit__(self, *error: Any) -> None:
        run_on_all(self._turns, lambda value: value.__exit__(*error), (self,), {})

    def __repr__(self) -> str:
        return self._in_words(repr)

    def __str__(self) -> str:
        return self._in_words(str)

    def _in_words(self, text_of: Callable[[Any], str]) -> str:
        texts = run_on_all(self._turns, text_of, (self,), {})
        return texts if isinstance(texts, str) else "\n".join(f"rank {n}: {text}" for n, text in enumerate(texts))

    def __hash__(self) -> int:
        return id(self)


def _method(act: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Everywhere, *args: Any) -> Any:
        return run_on_all(self._turns, act, (self, *args), {})

    return method


def _reflected(act: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Everywhere, other: Any) -> Any:
        return run_on_all(self._turns, act, (other, self), {})

    return method


for _name in ARITHMETIC:
    _act = getattr(operator, _name + "_" * (_name in ("and", "or")))
    setattr(Everywhere, f"__{_name}__", _method(_act))
    setattr(Everywhere, f"__r{_name}__", _reflected(_act))
    setattr(Everywhere, f"__i{_name}__", _method(getattr(operator, f"i{_name}")))
for _name in COMPARISONS:
    setattr(Everywhere, f"__{_name}__", _method(getattr(operator, _name)))
for _name, _act in OTHERS.items():
    setattr(Everywhere, f"__{_name}__", _method(_act))


def run_on_all(turns: Turns, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call on every rank, with each rank's own objects as arguments, and return the results as one."""
    return as_one(turns, _by_rank(turns, call, args, kwargs))


def _by_rank(turns: Turns, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    def task(rank: int) -> Callable[[], Any]:
        return lambda: call(*(_own(arg, rank) for arg in args), **{name: _own(x, rank) for name, x in kwargs.items()})

    takers = turns.run([task(rank) for rank in range(len(turns.takers))])
    _raise_error(takers)
    results = [taker.result for taker in takers]
    for taker in takers:
        taker.result = None
    return results


def _own(value: Any, rank: int) -> Any:
    """Return a rank's own object for an argument that stands for one on each."""
    if type(value) is Everywhere:
        return value._values[rank]
    if type(value) in (list, tuple):
        return type(value)(_own(each, rank) for each in value)
    if type(value) is dict:
        return {key: _own(each, rank) for key, each in value.items()}
    return value


def _raise_error(takers: Sequence[TurnTaker]) -> None:
    """Raise the error of the ranks; one that all have as it is, one of some with a note."""
    errors = {taker.rank: taker.error for taker in takers if taker.error is not None}
    if not errors:
        return
    causes = {rank: error for rank, error in errors.items() if not isinstance(error, StuckError)} or errors
    first = next(iter(causes.values()))
    alike = [rank for rank, error in causes.items() if (type(error), str(error)) == (type(first), str(first))]
    if len(alike) < len(takers) and not isinstance(first, StuckError):
        first.add_note(f"{ranks_in_words(alike)} of {len(takers)} raised this")
    raise first


def as_one(turns: Turns, values: Sequence[Any]) -> Any:
    """Return the values of all ranks as one: equal ones once, objects as `Everywhere`, others as a list."""
    first = values[0]
    if all(each is first for each in values) and (len(values) > 1 or not _is_object(first)):
        return first
    kinds = {(type(each), len(each) if isinstance(each, tuple | list) else 0) for each in values}
    if type(first) in (tuple, list) and len(kinds) == 1 and any(map(_is_object, first)):
        return type(first)(as_one(turns, each) for each in zip(*values, strict=True))
    if any(map(_is_object, values)):
        return Everywhere(turns, values)
    return first if all(_same(first, each) for each in values) else list(values)


def _is_object(value: Any) -> bool:
    """True for objects of the package that take part in calls, for methods and functions."""
    return callable(value) or hasattr(value, "mesh") or type(value).__module__.startswith("rma_mm.runtime")


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, float | complex) and one != one:
        return bool(other != other)
    return bool(one == other)
