"""Settings of the whole suite, and the life of the job that parallel tests share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

import rma_mm
from tests import launch
from tests.processes import ROOT

if Path(rma_mm.__file__ or "").parent != ROOT / "rma_mm":
    raise pytest.UsageError(f"the tests of {ROOT} would run against {rma_mm.__file__}: start pytest in the checkout")

hypothesis.settings.register_profile("suite", database=None, deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by the job they need."""
    items.sort(key=launch.order)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the job after its last test, which is blamed where the ranks do not leave cleanly."""
    kind = launch.kind_of(item)
    if kind and launch.kind_of(nextitem) != kind:
        launch.POOL.close()


def pytest_sessionfinish() -> None:
    """Leave no rank behind, whatever ended the session."""
    launch.POOL.kill()
