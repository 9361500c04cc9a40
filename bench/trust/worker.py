"""`mpiexec -n P python -m bench.trust.worker JOURNAL SEED SETTING FROM TO`: many cases in one job, one after the other.

Before each case rank 0 writes its number to the journal, and behind it what became of it, so that who started the job
knows where it ended.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bench.trust.cases import Case, draw, speeds_of
from bench.trust.trial import Trial, Wrong
from rma_mm import Mesh
from rma_mm.errors import RmaError, ScheduleError

if TYPE_CHECKING:
    from mpi4py import MPI

TEXT = 2000
"""Characters of what went wrong that are told."""

Verdict = tuple[str, str]
"""(right, refused, wrong or raised; the error's class and text)."""


class Worker:
    """One rank of a job: its meshes, and what earlier cases left alive."""

    def __init__(self, comm: MPI.Intracomm, seed: int, setting: str, directory: Path) -> None:
        self.comm, self.seed, self.setting, self.directory = comm, seed, setting, directory
        self.meshes: dict[tuple[int, ...], Mesh] = {}
        self.alive: list[tuple[int, list[Any]]] = []
        """(number of the case after which it is dropped, what a case made)."""

    def case(self, number: int) -> tuple[Case, Verdict]:
        """Do one case. Collective; the verdict is that of all ranks."""
        drawn = draw(self.seed, self.setting, self.comm.size, number) if self.comm.rank == 0 else None
        case: Case = self.comm.bcast(drawn)  # drawing takes as long as a small product
        mesh = self.meshes.get(case.mesh)
        if mesh is None:
            speeds = speeds_of(self.seed, self.setting, case.mesh)
            mesh = self.meshes[case.mesh] = Mesh(case.mesh, self.comm, speeds=speeds)
        trial = Trial(case, mesh, self.seed, self.directory)
        verdict = common(self.comm, attempt(trial))
        self.alive = [(until, kept) for until, kept in self.alive if until > number]
        if case.keep:
            self.alive.append((number + case.keep, trial.kept))
        if case.closes:
            self.meshes.pop(case.mesh).close()
        return case, verdict

    def close(self) -> None:
        """Close the meshes. Collective."""
        for mesh in self.meshes.values():
            mesh.close()


def attempt(trial: Trial) -> Verdict:
    """What this rank sees of it."""
    try:
        trial.run()
    except ScheduleError as error:  # what verify finds is a fault of ours, and no refusal
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
        kind = "redistribution" if case.b is None else "product"
        note(journal, {"number": number, "kind": kind, "outcome": outcome, "text": text[:TEXT]})
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
