"""The examples in the docstrings of the pure floors."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import rma_mm.algorithms
import rma_mm.elements
import rma_mm.geometry
import rma_mm.schedule

MODULES = [
    module.name
    for package in (rma_mm.algorithms, rma_mm.elements, rma_mm.geometry, rma_mm.schedule)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), raise_on_error=False).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 4
