"""Published algorithms, as values of `rma_mm.schedule.algorithm.Algorithm`, and their registry."""

from rma_mm.algorithms.registry import ALGORITHMS, REGISTERED, find_algorithm, list_algorithms, register

__all__ = ["ALGORITHMS", "REGISTERED", "find_algorithm", "list_algorithms", "register"]
