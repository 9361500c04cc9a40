"""The registry of algorithms: one row a file, all of them values of `rma_mm.schedule.row.Row`."""

from ..errors import AlgorithmError
from ..schedule.row import Row
from .queue import QUEUE
from .srumma import SRUMMA
from .stationary import STATIONARY_A, STATIONARY_B, STATIONARY_C

ALGORITHMS: dict[str, Row] = {row.name: row for row in (STATIONARY_C, STATIONARY_A, STATIONARY_B, SRUMMA, QUEUE)}


def find_algorithm(name: str) -> Row:
    """The row called `name`; raises AlgorithmError listing the valid names."""
    if name not in ALGORITHMS:
        raise AlgorithmError(f"algorithm: got {name!r}; there are auto, {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def list_algorithms() -> list[str]:
    """Names of the registry."""
    return list(ALGORITHMS)
