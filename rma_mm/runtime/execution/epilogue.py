"""Close this rank's part of C: apply the epilogue, and round once into the stored type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.kernels.epilogue.epilogue import Epilogue, EpilogueTile, compiles
from rma_mm.runtime.execution.addressing import Places
from rma_mm.schedule.lowering.fused_finish import closing
from rma_mm.schedule.ops import Op, Ref


@dataclass
class EpilogueBinder:
    """The closings of a rank's own C, in parts."""

    places: Places
    epilogue: Epilogue | None
    kernel: str  # what multiplies

    @cached_property
    def bias(self) -> NDArray[Any] | None:
        """The rank's part of the bias, in the type in which C is summed."""
        if self.epilogue is None or self.epilogue.bias is None:
            return None
        memory = self.places.memory
        summed = memory.result.dtype if memory.shadow is None else memory.shadow.dtype
        part: NDArray[Any] = self.epilogue.bias[self.own].astype(summed)
        return part

    @property
    def own(self) -> NDArray[Any]:
        return self.places.schedule.home("C", self.places.rank)[self.axis].indices

    def refresh(self) -> None:
        """Read the bias again after its values have changed. What is bound already reads it where it is."""
        if self.bias is not None and self.epilogue is not None:
            self.bias[...] = self.epilogue.bias[self.own]

    @property
    def axis(self) -> int:
        return int(self.epilogue is not None and self.epilogue.per == "column")

    @property
    def needed(self) -> bool:
        return self.epilogue is not None or self.places.memory.shadow is not None

    def of(self, c: Ref) -> EpilogueTile:
        """Return the call that closes a part of the rank's C."""
        result = self.places.result_part(c.region)
        if self.epilogue is None:
            return EpilogueTile(result)
        at = self.places.schedule.home("C", self.places.rank).locate(c.region)
        bias = None if self.bias is None else self.bias[at[self.axis].as_slice()]
        is_compiled = compiles(self.kernel, self.places.schedule.homes["C"].shape)
        work = self.epilogue.tile_work(at[0].as_slice(), at[1].as_slice(), is_compiled)
        return EpilogueTile(result, bias, self.epilogue.per, self.epilogue.activation, is_compiled, work)

    def call(self, c: Ref) -> Callable[[], None]:
        return self.of(c).bound(self.places.array(c, summing=True))

    def by_products(self, ops: Sequence[Op]) -> set[int]:
        return closing(ops) if self.needed else set()
