"""The examples in docstrings, and that every module can be imported at all."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import bench
import rma_mm


def modules() -> Iterator[ModuleType]:
    """All of the package and of the benchmarks, but for those that need what is not installed."""
    for package in (rma_mm, bench):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                yield importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("rma_mm", "bench", "tests"):
                    raise


@pytest.mark.filterwarnings("ignore:rma_mm.algorithms:DeprecationWarning")  # modules at their earlier places
def test_examples() -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = [test for module in modules() for test in finder.find(module) if test.examples]
    assert len(examples) >= 60
    failed = [test.name for test in examples if runner.run(test).failed]
    assert not failed
