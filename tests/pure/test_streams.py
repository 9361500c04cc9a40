"""Commands whose streams, or working directory, are not what is usual: no traceback, and the exit code tells."""

import os
import subprocess
import sys

import pytest

from bench.processes import ROOT, clean_environment
from tests.thorough import nightly, usually

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)


def run(*words, shell="", **variables):
    """A command of the package without a launcher, its streams as `shell` has them."""
    command = [sys.executable, "-m", *words]
    if shell:
        command = ["/bin/sh", "-c", f'"$@" {shell}', "sh", *command]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, timeout=100, check=False)


PRODUCT = ("rma_mm.run", "--shape", "30,30,30")


@pytest.mark.parametrize(
    "words",
    usually(4, [
        ("rma_mm.run", "--help"), (*PRODUCT, "--picture", "-", "--dry-run"), (*PRODUCT, "--explain", "--dry-run"),
        PRODUCT, ("rma_mm.run", "--list"), ("rma_mm.simulate", "--help"), ("rma_mm.calibrate", "--help"),
    ], several=False),
)
@pytest.mark.parametrize("encoding", usually(1, ["ascii", "latin-1"], rest=nightly))
def test_encodings_that_lack_characters(words, encoding):
    """They are written in ASCII."""
    done = run(*words, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b""), done
    assert b"?" not in done.stdout.replace(b"progress?", b"")
    done.stdout.decode(encoding)


@pytest.mark.parametrize("words", [("rma_mm.run", "--help"), PRODUCT, ("rma_mm.simulate", "--help")])
def test_a_full_disk_behind_standard_output(words):
    """One line, and the exit code of a failure."""
    done = run(*words, shell=">/dev/full")
    assert (done.returncode, done.stderr) == (1, b"rma_mm: standard output: No space left on device\n"), done


@pytest.mark.parametrize("shell", usually(1, ["<&- >&- 2>&-", ">&-", "2>&-", ">&- 2>&-"], rest=nightly))
def test_streams_that_are_closed(shell):
    done = run(*PRODUCT, shell=shell)
    assert (done.returncode, done.stderr) == (0, b""), done


def test_a_reader_that_goes_away():
    done = run("rma_mm.run", "--help", shell="| head -1")
    assert (done.returncode, done.stderr, done.stdout.count(b"\n")) == (0, b"", 1), done


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (PRODUCT, 0, b""),
        (("rma_mm.run", "A.npy", "B.npy"), 2, b"rma_mm: A.npy: the working directory was removed; change to another\n"),
        ((*PRODUCT, "-o", "C.npy"), 2, b"rma_mm: C.npy: the working directory was removed; change to another\n"),
        ((*PRODUCT, "--json", "r.json"), 2, b"rma_mm: r.json: the working directory was removed; change to another\n"),
    ],
)
def test_a_working_directory_that_is_gone(words, code, said, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    done = run(*words)
    assert (done.returncode, done.stderr) == (code, said), done


INTERRUPTED = """
import os, signal, sys
import rma_mm.run
class Finder:
    def find_spec(self, *_):
        os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["x", "--list"]
sys.meta_path.insert(0, Finder())
rma_mm.run.main()
"""


def test_ctrl_c_while_it_imports():
    """It ends by the signal, with nothing said."""
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-2, b""), done
