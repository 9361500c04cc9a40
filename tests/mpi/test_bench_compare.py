"""`bench.compare` on real ranks: jobs that measure in turn, what counts as worse, and the bars beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench.compare import worker
from bench.compare.__main__ import SIDES, CompareError, Job, Side, cases, commit_of, in_turn, summary, table
from bench.compare.__main__ import is_worse as is_slower
from bench.compare.bars import all_bars, bars_of
from tests.processes import ROOT
from tests.thorough import thorough

pytestmark = thorough


def test_a_job_measures_what_it_is_asked_for_and_sleeps_in_between(tmp_path):
    """With the interpreter and the package of this test."""
    script = tmp_path / "worker.py"
    shutil.copy(worker.__file__, script)
    jobs = []
    for name in SIDES:
        side = Side(name, tmp_path)
        side.folder.mkdir()
        side.python, side.environment["PYTHONPATH"] = sys.executable, str(ROOT)
        jobs.append(Job(side, "2 ranks", script, None))
    try:
        for name in ("execute 256³", "planning"):
            answers = [job.ask(name) for job in jobs]
            assert all(0 < answer["seconds"] < 10 and answer["peak"] > 2**14 for answer in answers), answers
        with pytest.raises(CompareError, match="no answer to 'nothing'"):
            jobs[1].ask("nothing")
    finally:
        for job in jobs:
            job.close()
    assert jobs[0].process.returncode == 0


def test_what_an_older_version_lacks_is_told(tmp_path, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(worker, "make", None)
    found = worker.prepared(MPI.COMM_SELF, None, lambda mesh: mesh.nothing)
    assert found == "AttributeError: 'NoneType' object has no attribute 'nothing'"


@pytest.mark.parametrize(
    ("times", "is_worse"),
    [
        ([[(1.1, 1.0)] * 3, [(1.08, 1.0)] * 3, [(1.2, 1.0)] * 3], True),
        ([[(1.1, 1.0)] * 3, [(1.01, 1.0)] * 3, [(1.2, 1.0)] * 3], False),  # it scatters
        ([[(1.1, 1.0)] * 3, [(1.03, 1.0)] * 3, [(1.07, 1.0)] * 3], True),
        ([[(1.04, 1.0)] * 3] * 3, False),
        ([[(0.8, 1.0)] * 3] * 3, False),
        ([[(1.1, 1.0), (1.1, 1.0), (9.0, 1.0)]] * 3, True),
    ],
)
def test_worse_is_what_was_so_each_time(times, is_worse):
    found = summary(times)
    assert found["low"] <= found["ratio"] <= found["high"]
    assert is_slower(found) == is_worse
    assert ("WORSE" in table({"import": found})[1]) == is_worse


def test_who_comes_first_takes_turns():
    order = []
    calls = [lambda side=side: order.append(side) or side for side in (1.0, 2.0)]
    assert [in_turn(calls, turn) for turn in range(3)] == [(1.0, 2.0)] * 3
    assert order == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]


def test_every_bar_is_guarded_by_something_that_is_measured():
    names = cases()
    assert 24 <= len(names) <= 35 and len(set(names)) == len(names)
    for bar in all_bars():
        assert {"what", "command", "guards"} <= set(bar)
        assert all(any(name.startswith(guard) for name in names) for guard in bar["guards"]), bar
        assert "bench." in bar["command"]
    assert any("limit" in bar for bar in bars_of("2 hosts, 5gbit: overlap 2048"))


def test_what_is_no_commit_is_refused():
    with pytest.raises(CompareError, match="COMMIT: got 'nowhere'; it is a commit, a tag or a branch"):
        commit_of("nowhere")
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", "nowhere"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("bench.compare: COMMIT: got 'nowhere'")
