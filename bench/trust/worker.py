"""`mpiexec -n P python -m bench.trust.worker JOURNAL SEED SETTING FROM TO`: many cases in one job, one after the other.

Before each case rank 0 writes its number to the journal, and behind it what became of it, so that who started the job
knows where it ended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, Any
from unittest import mock

from bench.trust import batches, chains, expressions, files
from bench.trust.cases import Case, Other, draw, is_watched, speeds_of
from bench.trust.own_semirings import registered
from bench.trust.trial import Trial
from bench.trust.wrong import Wrong
from rma_mm import Mesh
from rma_mm.errors import RmaError, ScheduleError, VerificationError
from rma_mm.runtime.execution import binding
from rma_mm.schedule.lowering import decisions, node_crossing
from rma_mm.windows.checks.checked import SWITCH

if TYPE_CHECKING:
    from mpi4py import MPI

TEXT = 2000
"""Characters of what went wrong that are told."""

Verdict = tuple[str, str]
"""(right, refused, wrong or raised; the error's class and text)."""


SMALL = ((node_crossing, "LEAST", 0), (decisions, "NARROW", 2), (decisions, "WORTH", 1), (binding, "SHORT", 4))
"""Limits that let small matrices be moved as large ones are, in half of the settings."""

OTHERS = {"batch": batches.run, "expression": expressions.run, "chain": chains.run, "file": files.run}
"""Kinds of cases that are drawn while they are done."""


class Worker:
    """One rank of a job: its meshes, and what earlier cases left alive."""

    def __init__(self, comm: MPI.Intracomm, seed: int, setting: str, directory: Path) -> None:
        self.comm, self.seed, self.setting, self.directory = comm, seed, setting, directory
        self.meshes: dict[tuple[int, ...], Mesh] = {}
        self.alive: list[tuple[int, Trial, Mesh]] = []
        """(number of the case after which it is dropped, what a case made, its mesh)."""
        self.stack = ExitStack()
        self.stack.enter_context(registered())
        for module, name, value in SMALL if Random(f"{seed} {setting} limits").random() < 0.5 else ():
            self.stack.enter_context(mock.patch.object(module, name, value))

    def case(self, number: int) -> tuple[Case | Other, Verdict]:
        """Do one case. Collective; the verdict is that of all ranks."""
        drawn = draw(self.seed, self.setting, self.comm.size, number) if self.comm.rank == 0 else None
        case: Case | Other = self.comm.bcast(drawn)  # drawing takes as long as a small product
        mesh = self.meshes.get(case.mesh) or self.open(case.mesh)
        verdict = common(self.comm, attempt(partial(self.do, case, mesh)))
        if case.closes:
            self.meshes.pop(case.mesh).close()
        return case, verdict

    def open(self, shape: tuple[int, ...]) -> Mesh:
        """A mesh, which stays. Every transfer on some of them is checked. Collective."""
        speeds = speeds_of(self.seed, self.setting, shape)
        with mock.patch.dict(os.environ, {SWITCH: "1"} if is_watched(self.seed, self.setting, shape) else {}):
            mesh = self.meshes[shape] = Mesh(shape, self.comm, speeds=speeds)
        return mesh

    def do(self, case: Case | Other, mesh: Mesh) -> None:
        """A case, and a look at what former ones left whose time is over. Collective."""
        if isinstance(case, Other):
            OTHERS[case.kind](mesh, Random(case.text))
        else:
            trial = Trial(case, mesh, self.seed, self.directory)
            trial.run()
            if case.keep:
                self.alive.append((case.number + case.keep, trial, mesh))
        over = [each for each in self.alive if each[0] <= case.number]
        self.alive = [each for each in self.alive if each[0] > case.number]
        for _, trial, its in over:
            trial.look_back(is_closed=its not in self.meshes.values())

    def close(self) -> None:
        """Close the meshes. Collective."""
        for mesh in self.meshes.values():
            mesh.close()
        self.stack.close()


def attempt(do: Callable[[], None]) -> Verdict:
    """What this rank sees of it."""
    try:
        do()
    except (ScheduleError, VerificationError) as error:  # what is found is a fault of ours, and no refusal
        return "raised", f"{type(error).__name__}: {error}"
    except RmaError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Wrong as error:
        return "wrong", str(error)
    except Exception:  # noqa: BLE001 - a traceback is what is looked for
        return "raised", traceback.format_exc()
    return "right", ""


def common(comm: MPI.Intracomm, mine: Verdict) -> Verdict:
    """What all ranks see of it: refused only if all heard the same. Collective."""
    from mpi4py import MPI

    from rma_mm.windows.waiting import wait

    flags = bytearray([mine[0] != "right"])
    wait(comm.Iallreduce(MPI.IN_PLACE, [flags, 1, MPI.UINT8_T], MPI.MAX))
    if not flags[0]:
        return mine
    told = comm.allgather(mine)
    if len(set(told)) == 1:
        return mine
    worst = max(told, key=lambda each: ("right", "refused", "raised", "wrong").index(each[0]))
    if worst[0] != "refused":
        return worst
    return "wrong", f"not the same error on all ranks: {Counter(told)}"


def work(comm: MPI.Intracomm, journal: IO[str] | None, seed: int, setting: str, numbers: range) -> None:
    """Do the cases, and write what became of each. Collective."""
    directory = Path(comm.bcast(tempfile.mkdtemp(prefix="bench-trust-") if comm.rank == 0 else None))
    worker = Worker(comm, seed, setting, directory)
    for number in numbers:
        note(journal, {"begun": number})
        case, (outcome, text) = worker.case(number)
        note(journal, {"number": number, "kind": case.kind, "outcome": outcome, "text": text[:TEXT]})
    worker.close()
    note(journal, {"ended": True})


def note(journal: IO[str] | None, line: dict[str, Any]) -> None:
    """Write a line, on the rank that has the journal."""
    if journal is not None:
        journal.write(json.dumps(line) + "\n")
        journal.flush()


def main() -> None:
    """One job."""
    from mpi4py import MPI

    faulthandler.register(signal.SIGUSR1)  # where a rank hangs, told on demand
    path, seed, setting, first, stop = sys.argv[1:]
    comm = MPI.COMM_WORLD.Dup()
    journal = open(path, "a") if comm.rank == 0 else None  # noqa: SIM115 - as long as the process
    work(comm, journal, int(seed), setting, range(int(first), int(stop)))
    comm.Free()


if __name__ == "__main__":
    main()
