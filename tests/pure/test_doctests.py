"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import rma_mm


def modules() -> Iterator[ModuleType]:
    """All of the package, but for those that need what is not installed."""
    for found in pkgutil.walk_packages(rma_mm.__path__, f"{rma_mm.__name__}."):
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(rma_mm.__name__):
                raise


def test_examples() -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = [test for module in modules() for test in finder.find(module) if test.examples]
    assert len(examples) >= 60
    failed = [test.name for test in examples if runner.run(test).failed]
    assert not failed
