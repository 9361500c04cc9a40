"""`bench.trust` counts what came out of every case, and goes on behind a death."""

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.trust.__main__ import counts, table
from bench.trust.jobs import Report, Setting, run

CASES = 24


def kill_a_rank(directory):
    """Kill a rank of the job whose journal lies under `directory`, once it is at work."""
    while not any(journal.read_text().count("\n") > 6 for journal in directory.glob("*/journal")):
        time.sleep(0.01)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if str(directory).encode() in command and b"mpiexec" not in command.split(b"\0")[0]:
                os.kill(int(process.name), signal.SIGKILL)
                return


def test_a_death_is_counted_and_the_rest_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killer = threading.Thread(target=kill_a_rank, args=(tmp_path,), daemon=True)
    killer.start()
    report = Report(Setting(2, "shared", "one"))
    run(report.setting, 5, range(CASES), time.monotonic() + 120, report)
    found = counts(report)
    assert found.total() == CASES
    assert found["died"] == len(report.faults) == 1
    assert found["right"] >= CASES / 2
    assert report.faults[0]["number"] > 0
    assert "2-shared-one" in table([report])
