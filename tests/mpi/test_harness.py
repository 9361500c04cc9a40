"""The harness itself: a test that hangs, dies or fails on one rank costs that test and no other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch, processes
from tests.jobs import LOST_DAEMON, Kind, Pool
from tests.thorough import thorough

pytest.importorskip("mpi4py", exc_type=ImportError)

CASES = "tests.mpi.harness_cases"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of this module's own."""
    pool = Pool(launch.ENVS)
    yield pool
    pool.close()


def run(pool: Pool, name: str, *, ranks: int = 2, env: str = "node", timeout: float = 30, **arguments: Any) -> None:
    """Run one case on `ranks` ranks."""
    pool.run(Kind(ranks, env), CASES, name, launch.pickled(arguments), timeout)


def failure(pool: Pool, name: str, **options: Any) -> str:
    """The words of the failure of one case; the next test must pass on the same pool."""
    with pytest.raises(pytest.fail.Exception) as caught:
        run(pool, name, **options)
    run(pool, "case_good", ranks=options.get("ranks", 2))
    return str(caught.value)


def test_good(pool: Pool) -> None:
    """Test after test on one job."""
    run(pool, "case_good")
    job = pool.job
    run(pool, "case_good")
    assert pool.job is job


@thorough
def test_fewer_ranks_are_the_first_of_the_same_job(pool: Pool) -> None:
    """Whatever order they come in; the others neither take part nor answer."""
    run(pool, "case_good", ranks=3)
    job = pool.job
    for ranks in (1, 2, 3):
        run(pool, "case_good", ranks=ranks)
    assert pool.job is job
    assert "failed on rank 1 of 2" in failure(pool, "case_one_rank_fails")


def test_deadlock_times_out(pool: Pool) -> None:
    """The ranks that hang are named, with their stacks; the others are not."""
    started = time.monotonic()
    text = failure(pool, "case_deadlock", ranks=3, timeout=1)
    assert "timed out after 1 s on ranks 1, 2 of 3" in text
    assert "case_deadlock" in text
    assert "stack of rank 0" not in text
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("slower", "left"), [(1.0, -1), (3.0, 1)])
def test_a_limit_is_stretched_by_how_slow_the_machine_is_when_it_passes(monkeypatch, slower: float, left: int) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", 60.0 if slower == 1 else 1e-9)
    monkeypatch.setattr(processes, "PATIENCE", slower)
    limit = processes.Limit(0.5)
    assert limit.left > 0 and not limit.stretch  # nothing is measured before it passes
    limit.begun -= 0.6
    assert np.sign(limit.left) == left
    assert limit.stretch == slower


@thorough
def test_no_process_is_left(pool: Pool, tmp_path: Path) -> None:
    """Children of ranks end with them, even in a session of their own."""
    failure(pool, "case_deadlock_with_child", timeout=1, path=str(tmp_path / "pid"))
    child = Path("/proc") / (tmp_path / "pid").read_text()
    status = child / "status"
    assert not status.exists() or "State:\tZ" in status.read_text()


@thorough
def test_cause_of_a_hang_is_shown(pool: Pool) -> None:
    """An exception on one rank that leaves the others in a collective."""
    text = failure(pool, "case_failure_then_deadlock", timeout=1)
    assert "timed out after 1 s on rank 0 of 2" in text
    assert "failed on rank 1 of 2" in text
    assert "ValueError: the real cause" in text


def test_failing_rank_is_named(pool: Pool) -> None:
    """With its traceback and the locals of the assertion."""
    text = failure(pool, "case_one_rank_fails", ranks=3)
    assert "failed on rank 2 of 3" in text
    assert "assert measured <" in text
    assert "measured = 20" in text


@pytest.mark.parametrize(("name", "word"), [("case_segfault", "Segmentation fault"), ("case_abort", "about to abort")])
def test_dead_rank_fails_one_test(pool: Pool, name: str, word: str) -> None:
    """A crash costs the job, not the session."""
    text = failure(pool, name)
    assert "died" in text
    assert word in text


def test_exit_is_a_failure(pool: Pool) -> None:
    """On all ranks alike: told once."""
    text = failure(pool, "case_exit")
    assert "failed on ranks 0, 1 of 2" in text
    assert text.count("SystemExit: 3") == 1


def test_skips(pool: Pool) -> None:
    """All ranks skip, or the test fails."""
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run(pool, "case_skip")
    assert "1 of 2 ranks skipped" in failure(pool, "case_some_skip")


def test_early_leaver_gives_progress(pool: Pool) -> None:
    """A rank whose body has ended still serves the others' one-sided operations."""
    run(pool, "case_early_leaver", env="nolocal")


@thorough
def test_waiting_ranks_sleep(pool: Pool) -> None:
    """Between tests the ranks take no processor time."""
    run(pool, "case_good")
    assert pool.job is not None
    stats = [Path(f"/proc/{channel.pid}/stat") for channel in pool.job.channels]
    if not stats[0].exists():
        pytest.skip("needs /proc")
    before = [_ticks(stat) for stat in stats]
    time.sleep(0.5)
    assert all(_ticks(stat) - old <= 5 for stat, old in zip(stats, before, strict=True))


def _ticks(stat: Path) -> int:
    """Processor time in ticks of 10 ms."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_mpirun() -> None:
    """Exit code and output of a program of its own."""
    said = "import sys, time; print('out', flush=True); print('err', file=sys.stderr); time.sleep(0.5); sys.exit(2)"
    done = processes.mpirun(2, ["-c", said])  # Open MPI ends all ranks once one has left with an error
    assert done.returncode == 2
    assert done.stdout.count("out") == 2
    assert done.stderr.count("err") == 2


def test_missing_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names the extra that brings one."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\[mpich\]"):
        processes.find_mpiexec()


def test_which_ranks_an_environment_has() -> None:
    """On one node all numbers; elsewhere two, of which one is run each time in some; one rank has no second node."""
    body = launch.parallel()(lambda comm: None)
    values = body.pytestmark[0].args[1]  # type: ignore[attr-defined]
    kinds = [value.values[0] for value in values]
    usual = [value.values[0] for value in values if not value.marks]
    assert sorted(kind.ranks for kind in kinds if kind.env == launch.VARIANTS[0]) == list(launch.RANKS)
    for env in launch.VARIANTS[1:]:
        assert [kind.env for kind in usual].count(env) == (env in ("cliques", "ucx"))
        assert [kind.env for kind in kinds].count(env) == 2
    assert {launch.Kind(3, "cliques"), launch.Kind(6, "cliques")} <= set(kinds), "even nodes, and others"
    assert launch.Kind(1, "cliques") not in kinds


@pytest.mark.parametrize(("losses", "runs"), [(1, True), (2, False)])
def test_a_launcher_that_loses_its_daemon_is_called_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, losses: int, runs: bool
) -> None:
    """Open MPI's does, rarely, before any rank begins; twice is a failure."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/starts\n"
        f"if [ $(wc -l < {tmp_path}/starts) -gt {losses} ]; then exec {processes.find_mpiexec()} \"$@\"; fi\n"
        f"echo {LOST_DAEMON}\nexit 1\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(processes, "find_mpiexec", lambda: str(launcher))
    pool = Pool(launch.ENVS)
    with nullcontext() if runs else pytest.raises(pytest.fail.Exception, match=LOST_DAEMON):
        run(pool, "case_good")
    assert len((tmp_path / "starts").read_text()) == 2
    pool.close()


def test_unknown_environment() -> None:
    """A misspelt variant is an error at collection."""
    with pytest.raises(ValueError, match="unknown environments"):
        launch.parallel(env=("nodes",))
