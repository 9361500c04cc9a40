"""Recently multiplied tensors: the same ones are recognized again without a closer look."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.torch.kept import place_of
from rma_mm.torch.product import LinearRequest, TorchProduct

REMEMBERED = 64  # calls on other tensors

Known = tuple[TorchProduct, DistMatrix, DistMatrix]  # A product, x and w


class RecentCalls:
    """The last calls on one mesh. Holds neither tensors nor matrices alive. Nothing here is alike on all ranks."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[int, ...], _Call] = OrderedDict()
        """Results by identity of the request and of the tensors, least recently used first."""

    def find(self, asked: object, tensors: Sequence[Any]) -> Known | None:
        """Return the result for these very tensors, if nothing has changed. Local."""
        name = _name(asked, tensors)
        call = self._calls.get(name)
        found = None if call is None else call.known(asked, tensors)
        if found is not None:
            self._calls.move_to_end(name)
        return found

    def keep(self, asked: LinearRequest, tensors: Sequence[Any], *known: Any) -> None:
        self._calls[_name(asked, tensors)] = _Call(asked, tensors, *known)
        if len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)

    def clear(self) -> None:
        self._calls.clear()


class _Call:
    def __init__(
        self, asked: LinearRequest, tensors: Sequence[Any], product: TorchProduct, a: DistMatrix, b: DistMatrix
    ) -> None:
        self.request, self.product, self.matrices = asked, product, (ref(a), ref(b))
        self.tensors = [None if each is None else (ref(each), _as_it_is(each)) for each in tensors]

    def known(self, asked: object, tensors: Sequence[Any]) -> Known | None:
        """Return the result, if nothing has changed since."""
        if asked is not self.request:
            return None
        for given, kept in zip(tensors, self.tensors, strict=True):
            if kept is not None and (kept[0]() is not given or kept[1] != _as_it_is(given)):
                return None
        a, b = (matrix() for matrix in self.matrices)
        return None if a is None or b is None or a.is_closed or b.is_closed else (self.product, a, b)


def _name(asked: object, tensors: Sequence[Any]) -> tuple[int, ...]:
    return id(asked), *map(id, tensors)


def _as_it_is(tensor: Tensor) -> tuple[object, ...]:
    return *place_of(tensor, None), tensor.is_conj(), tensor.is_neg()
