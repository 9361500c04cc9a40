"""Settings of the whole suite, who runs what, and the life of the job that parallel tests share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

import rma_mm
from tests import launch
from tests.jobs import Kind
from tests.processes import ROOT
from tests.strategies import DATABASE, NIGHT

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

if Path(rma_mm.__file__ or "").parent != ROOT / "rma_mm":
    raise pytest.UsageError(f"the tests of {ROOT} would run against {rma_mm.__file__}: start pytest in the checkout")

os.environ.setdefault("RMA_MM_MACHINE", "typical")  # plans are the same wherever they are tested, and wait for nothing

# Hypothesis draws constants of the modules that happen to be loaded: the same test would see others beside other tests.
providers._get_local_constants = providers.Constants

hypothesis.settings.register_profile(
    "suite", print_blob=bool(NIGHT), deadline=None, derandomize=not NIGHT and "CI" in os.environ, database=DATABASE
)
hypothesis.settings.load_profile("suite")

WORKERS = 4
"""The most processes that share the whole suite: one more than there are cores, as ranks wait much of the time."""
ON_POOL = re.compile(rf"\[(\d+)-({'|'.join(launch.ENVS)})\b")
"""What is in the name of a test on real ranks: how many, and their environment."""
SMOKE = re.compile(
    r"tests/pure/test_(?!streams|external|simul|liveness|picture|shares|docs|closed|verification|t10|zarr|hdf5|kernel)"
    r"|tests/mpi/test_session.*4-node|tests/mpi/test_windows.*3-(node|cliques)|tests/mpi/test_found.*-node"
)
"""The tests of a minute: without MPI, and of each mechanism on ranks."""
USUALLY = "not thorough and not nightly"
"""The marks that pyproject.toml asks for."""
MINUTES = {USUALLY: "3 minutes", "smoke": "1 minute", "thorough and not nightly": "3 minutes", "nightly": "15 minutes"}
"""How long the tests of some marks take on two cores that do nothing else."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share the whole suite among processes, as -n would; chosen tests, -n 0 and -p no:xdist have one process.

    A test that is named runs whatever its marks.
    """
    options = config.option
    if options.markexpr == USUALLY and any("::" in argument for argument in config.args):
        options.markexpr = ""
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    cores = len(os.sched_getaffinity(0))
    is_whole = config.args_source is not config.ArgsSource.ARGS
    if options.numprocesses is None and is_whole and cores > 1 and not options.usepdb:
        options.numprocesses = min(cores + 1, WORKERS)


class Shares:
    """What is registered where pytest-xdist shares the tests among processes."""

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> LoadScopeScheduling:
        """Tests on ranks of an environment stay together, so that each job starts once; and the others of a file."""
        from xdist.scheduler import LoadScopeScheduling

        class OneForJobs(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                on_pool = ON_POOL.search(nodeid)
                return Kind(int(on_pool[1]), on_pool[2]).scope if on_pool else nodeid.partition("::")[0]

        return OneForJobs(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Marks of xdist's own (loadgroup) do not reach its workers with pytest 9.2."""
    if config.pluginmanager.hasplugin("xdist") and config.option.dist in ("no", "load"):
        config.pluginmanager.register(Shares())


def pytest_report_header(config: pytest.Config) -> str:
    """How long it will take, where that is known."""
    is_whole = config.args_source is not config.ArgsSource.ARGS
    known = MINUTES.get(config.option.markexpr) if is_whole and not config.option.keyword else None
    return f"expected: {known} on two cores that do nothing else" if known else ""


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by the job they need, and mark those of a minute."""
    items.sort(key=launch.order)
    for item in items:
        if SMOKE.match(item.nodeid) and not any(map(item.get_closest_marker, ("thorough", "nightly"))):
            item.add_marker("smoke")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now those that are deselected are gone."""
    launch.make_room(session.items)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the job after its last test, which is blamed where the ranks do not leave cleanly."""
    kind, following = launch.kind_of(item), launch.kind_of(nextitem)
    if kind and (following is None or following.scope != kind.scope):
        launch.POOL.close()


def pytest_sessionfinish() -> None:
    """Leave no rank behind, whatever ended the session."""
    launch.POOL.kill()
