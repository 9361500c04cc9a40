"""`bench.trust` counts what came out of every case, and goes on behind a death."""

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bench.trust import jobs
from bench.trust.__main__ import counts, table
from bench.trust.jobs import Report, Setting, run
from tests.thorough import nightly

pytestmark = nightly

CASES = 24


def signal_a_rank(directory, number):
    """Send a signal to a rank of the job whose journal lies under `directory`, once it is at work."""
    while not any(journal.read_text().count("\n") > 6 for journal in directory.glob("*/journal")):
        time.sleep(0.01)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if str(directory).encode() in command and b"mpiexec" not in command.split(b"\0")[0]:
                os.kill(int(process.name), number)
                return


@pytest.fixture
def cases_with(tmp_path, monkeypatch):
    """Do CASES cases, one rank of whose first job is sent a signal."""

    def ran(number):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        threading.Thread(target=signal_a_rank, args=(tmp_path, number), daemon=True).start()
        report = Report(Setting(2, "shared", "one"))
        run(report.setting, 5, range(CASES), time.monotonic() + 120, report)
        assert counts(report).total() == CASES
        assert counts(report)["right"] >= CASES / 2
        assert len(report.faults) == 1
        return report

    return ran


def test_a_death_is_counted_and_the_rest_is_done(cases_with):
    report = cases_with(signal.SIGKILL)
    assert counts(report)["died"] == 1
    assert report.faults[0]["number"] > 0
    assert "2-shared-one" in table([report])


def test_a_hang_is_counted_with_where_it_was(cases_with, monkeypatch):
    monkeypatch.setattr(jobs, "LIMIT", 5.0)
    report = cases_with(signal.SIGSTOP)
    assert counts(report)["hung"] == 1
    assert "worker.py" in report.faults[0]["text"]
