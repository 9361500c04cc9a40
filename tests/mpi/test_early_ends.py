"""A rank that ends before the others, at any place: the job ends too, with the reason said."""

import time

import pytest

from tests.processes import mpirun
from tests.thorough import usually

PLANTED = """
import os, sys
how, who = sys.argv.pop(1), sys.argv.pop(1)
rank = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
import rma_mm.launch
rma_mm.launch.PARTING = 1.0 if who != "all" else 30.0
def fails(*_, **__):
    raise RuntimeError("planted")
def leaves(*_, **__):
    sys.exit(0)
if who in (rank, "all"):
    from rma_mm.command import launcher, signals
    from rma_mm.policy.planner import candidates
    from rma_mm.runtime.execution import executor
    if how == "import":
        sys.modules["rma_mm.command.frame"] = None
    elif how == "before":
        launcher._library = fails
    elif how == "refused":
        launcher.thread_problem = lambda: "planted: too few threads"
    elif how == "after":
        signals.Interruption.enlist = fails
    elif how == "planning":
        candidates.Candidate.__init__ = fails
    elif how == "product":
        executor.Executable.run = fails
    elif how == "leaves":
        executor.Executable.run = leaves
from rma_mm.run import main
sys.exit(main())
"""

CASES = [
    ("before", "2"), ("leaves", "0"), ("import", "1"), ("refused", "1"), ("after", "2"), ("planning", "2"),
    ("product", "2"), ("before", "0"), ("leaves", "2"), ("planning", "0"),
]


@pytest.mark.parametrize(("how", "who"), usually(1, CASES))
def test_a_rank_that_ends_early_ends_the_job(how, who):
    begun = time.monotonic()
    done = mpirun(3, ["-c", PLANTED, how, who, "--shape", "300,300,300", "--repeat", "5"], timeout=40)
    assert done.returncode not in (0, 2), done
    words = {"refused": "planted: too few threads", "leaves": "SystemExit", "import": "rma_mm.command.frame"}
    assert words.get(how, "planted") in done.stderr, done
    assert "right" not in done.stdout
    assert time.monotonic() - begun < 40


def test_ranks_that_are_refused_alike_end_without_a_banner():
    """One message, and the exit code of bad input, as soon as all of them are there."""
    done = mpirun(3, ["-c", PLANTED, "refused", "all", "--shape", "3,3,3"], timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "rma_mm: planted: too few threads\n"), done
