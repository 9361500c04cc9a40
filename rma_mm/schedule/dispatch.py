"""Tables of methods, by type of operation, for readers of schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from rma_mm.schedule.ops import Op

P = ParamSpec("P")
AnOp = TypeVar("AnOp", bound=Op)
R = TypeVar("R")
Method = Callable[Concatenate[Any, AnOp, P], R]


class Dispatch(dict[type[Op], Callable[..., R]]):
    """Type of an operation → the method for it: `table[type(op)](self, op, …)`.

    A class makes its table first, and enters its methods as it defines them: `@table.on(Copy)`. What they take is
    checked against that type, or against what several have in common.
    """

    def on(self, *types: type[AnOp]) -> Callable[[Method[AnOp, P, R]], Method[AnOp, P, R]]:
        def enter(method: Method[AnOp, P, R]) -> Method[AnOp, P, R]:
            self.update(dict.fromkeys(types, method))
            return method

        return enter
