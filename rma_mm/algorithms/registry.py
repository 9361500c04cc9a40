"""The registry of algorithms by their names; others can be added to it."""

from rma_mm.algorithms.cannon import CANNON
from rma_mm.algorithms.cosma import COSMA
from rma_mm.algorithms.cubes import AGARWAL_3D, JOHNSON_3D, NUS_3D, SOLOMONIK_25D, TESSERACT
from rma_mm.algorithms.parallel import COLUMN_PARALLEL, DATA_PARALLEL, MIXED_2D, ROW_COLUMN_2D, ROW_PARALLEL
from rma_mm.algorithms.pblas import PBLAS
from rma_mm.algorithms.pipelines import GATHER_GEMM, GEMM_SCATTER
from rma_mm.algorithms.queue import QUEUE
from rma_mm.algorithms.srumma import SRUMMA
from rma_mm.algorithms.stationary import STATIONARY_A, STATIONARY_B, STATIONARY_C
from rma_mm.algorithms.summa import PUMMA, SUMMA_A, SUMMA_B, SUMMA_C
from rma_mm.algorithms.t10 import T10_ROTATE
from rma_mm.algorithms.text import in_text
from rma_mm.algorithms.weighted import WEIGHTED
from rma_mm.errors import AlgorithmError, nearest
from rma_mm.schedule.algorithm import Algorithm

_ALGORITHMS = (
    *(STATIONARY_C, STATIONARY_A, STATIONARY_B, SRUMMA, QUEUE),
    *(DATA_PARALLEL, COLUMN_PARALLEL, ROW_PARALLEL, GATHER_GEMM, GEMM_SCATTER, MIXED_2D, ROW_COLUMN_2D),
    *(CANNON, SUMMA_C, SUMMA_A, SUMMA_B, PUMMA, PBLAS),
    *(AGARWAL_3D, JOHNSON_3D, SOLOMONIK_25D, TESSERACT, NUS_3D),
    *(T10_ROTATE, COSMA, WEIGHTED),
)
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}

REGISTERED: dict[str, str] = {}
"""Algorithms that users registered: name → the algorithm as text, by which ranks compare their registries."""


def find_algorithm(name: object) -> Algorithm:
    """Return the algorithm `name` or `name:form`. Raises AlgorithmError that lists the valid names or forms."""
    base, colon, form = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise AlgorithmError(f"algorithm: got {name!r}; {nearest(base, ALGORITHMS)}use auto or one of {known}")
    algorithm = ALGORITHMS[base]
    if not colon:
        return algorithm
    formed = algorithm.form(form) if algorithm.form else f"{base} has one form only"
    if isinstance(formed, str):
        raise AlgorithmError(f"algorithm: got {name!r}; {formed}")
    return formed


def list_algorithms() -> list[str]:
    """Return the names of the algorithms.

    Returns
    -------
    list of str
        Names for `algorithm=` and `--algorithm`.
    """
    return list(ALGORITHMS)


def register(algorithm: Algorithm, replace: bool = False) -> None:
    """Add an algorithm to the registry, for `algorithm=`, `--list` and "auto".

    Local; every rank must register the same.

    Parameters
    ----------
    algorithm : Algorithm
        The algorithm, with a name of its own.
    replace : bool
        Let it take the place of an algorithm of the same name (default False).

    Raises
    ------
    AlgorithmError
        If the name is taken, is "auto", or has a colon, which separates names from forms.
    """
    if ":" in algorithm.name or algorithm.name == "auto":
        raise AlgorithmError(f"register: got the name {algorithm.name!r}; it must not be auto or have a colon")
    if algorithm.name in ALGORITHMS and not replace:
        raise AlgorithmError(f"register: the name {algorithm.name!r} is taken; pass replace=True, or use another name")
    REGISTERED[algorithm.name] = in_text(algorithm)
    ALGORITHMS[algorithm.name] = algorithm
