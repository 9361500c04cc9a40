"""`rma_mm.classes.dataclass` against the decorator of the standard library, and when it compiles methods."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from functools import cached_property
from typing import Any

import pytest

from rma_mm.classes import dataclass


def family(decorate: Any) -> list[type]:
    """Return classes made with `decorate`, and two that inherit from one of them as users' classes do."""

    @decorate(frozen=True)
    class Frozen:
        """Fields of all kinds."""

        x: int
        y: list[int] = field(default_factory=list, compare=False)
        z: int = field(default=3, kw_only=True, repr=False)

        @cached_property
        def double(self) -> int:
            return self.x * 2

    @decorate(frozen=True, slots=True)
    class Slots:
        """No dictionary."""

        x: int
        y: tuple[int, ...] = ()

    @decorate
    class Changing:
        """Fields that are not given."""

        a: int = 1
        b: int = field(default=5, init=False)
        c: list[int] = field(init=False, default_factory=list)
        d: int = field(init=False)

        def __post_init__(self) -> None:
            self.d = self.a + 1

    @decorate(frozen=True)
    class Derived(Frozen):
        """Fields of its own beside those that it inherits."""

        w: str = "w"

    @decorate(frozen=True, eq=False, kw_only=True)
    class Same:
        """Equal to itself alone."""

        x: int

        def __repr__(self) -> str:
            return "written"

    @dataclasses.dataclass(frozen=True)
    class Foreign(Derived):
        """Derived by the standard decorator, as users do."""

        v: int = 0

    class Plain(Frozen):
        """No dataclass: attributes of its own may change."""

        own = 0

    return [Frozen, Slots, Changing, Derived, Same, Foreign, Plain]


def behaviour(decorate: Any) -> list[object]:
    """Return what the classes of `family` do, errors included."""
    frozen, slots, changing, derived, same, foreign, plain = family(decorate)
    one, two = frozen(1), frozen(1, [2])
    changed = changing(2)
    changed.a = 7
    objects = [one, two, frozen(1, z=4), slots(1, (2,)), changing(2), changed, derived(1, [], "v"), same(x=1)]
    objects += [foreign(1, v=2), plain(4)]
    seen: list[object] = [repr(each).replace(f"{family.__name__}.<locals>.", "") for each in objects]
    seen += [[a == b for b in [*objects, 3]] for a in objects]
    seen += [one.double, frozen(1).y is frozen(1).y, hash(one) == hash(two), {one, two, slots(1)} == {one, slots(1)}]
    seen += [[copy.copy(each) == each, copy.deepcopy(each) == each] for each in objects]
    seen += [dataclasses.asdict(each) for each in objects] + [dataclasses.replace(one, z=9) == frozen(1, z=9)]
    seen += [list(inspect.signature(each).parameters) for each in (frozen, slots, changing, derived, same)]
    attempts: list[Callable[[], object]] = [frozen, lambda: frozen(1, [], 2), lambda: changing(b=1), lambda: same(1)]
    attempts += [lambda: hash(changed), lambda: setattr(one, "x", 2), lambda: delattr(one, "x"), lambda: frozen(v=1)]
    attempts += [lambda: setattr(slots(1), "x", 2), lambda: setattr(derived(1), "w", "")]
    attempts += [lambda: setattr(foreign(1), "x", 2), lambda: setattr(foreign(1), "other", 2)]
    attempts += [lambda: setattr(plain(1), "x", 2), lambda: setattr(plain(1), "own", 2)]
    attempts += [lambda: decorate(type("Thawed", (frozen,), {}))]
    return seen + [_error(attempt) for attempt in attempts]


def _error(attempt: Callable[[], object]) -> type[Exception] | None:
    try:
        attempt()
    except Exception as error:
        return type(error)
    return None


def test_classes_behave_as_those_of_the_standard_library() -> None:
    assert behaviour(dataclass) == behaviour(dataclasses.dataclass)


def test_methods_are_compiled_when_they_are_first_called() -> None:
    frozen, *_ = family(dataclass)
    before = {name: frozen.__dict__[name] for name in ("__init__", "__eq__", "__hash__")}
    assert not any(inspect.isfunction(each) for each in before.values())
    assert frozen(1) == frozen(1)
    assert inspect.isfunction(frozen.__dict__["__init__"])
    assert inspect.isfunction(frozen.__dict__["__eq__"])
    assert frozen.__dict__["__hash__"] is before["__hash__"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A class that pickle finds by its name."""

    x: int
    y: tuple[int, ...] = ()


def test_frozen_objects_with_slots_are_pickled() -> None:
    again = pickle.loads(pickle.dumps(Sent(1, (2,))))
    assert again == Sent(1, (2,))
    with pytest.raises(FrozenInstanceError, match="'x'"):
        again.x = 2
