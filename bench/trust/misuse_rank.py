"""One rank of a program of `bench.trust.misuse`: `python -m bench.trust.misuse_rank FOLDER SEED NUMBER`.

Every rank draws the same program; what befalls it is noted in a file of its own. What it calls is what a user calls.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rma_mm import Plan

SIZE = 24
"""Rows and columns of the matrices."""
ALGORITHMS = ("auto", "queue", "stationary_c", "stationary_a", "cannon")
STEPS = ("matmul", "execute", "redistribute", "to_numpy", "from_function", "from_numpy", "chain", "reopen", "matmul")
MISUSES = (
    "skip", "swap", "close", "return", "exit", "raise", "exit in function", "callback", "calling callback", "threads",
    "comm", "register", "permuted", "environment", "forgotten mesh", "none",
)
SETTINGS = ("OMP_NUM_THREADS=1", "RMA_MM_CACHE=elsewhere", "RMA_MM_MACHINE=typical", "RMA_MM_WINDOW=created")


class Planted(Exception):
    """What a user's own code raises."""


@dataclass
class Program:
    """What all ranks are to do, and what some do otherwise."""

    seed: int
    number: int
    ranks: int = 2
    misuse: str = "none"
    at: int = 0
    """The step that is spoiled."""
    wrong: list[int] = field(default_factory=list)
    """The ranks that spoil it."""
    steps: list[tuple[str, int, str]] = field(default_factory=list)
    """(call, mesh, algorithm)."""
    catches: bool = False
    """Whether the ranks go on after an error."""
    by_mpi4py: bool = False
    """Whether it runs under `python -m mpi4py`."""
    setting: str = ""
    comm: str = ""


def draw(seed: int, number: int) -> Program:
    """The program of this number."""
    rng = random.Random(f"{seed} {number}")
    program = Program(seed, number, ranks=rng.randint(2, 4), misuse=MISUSES[number % len(MISUSES)])
    count = rng.randint(2, 5)
    program.steps = [(rng.choice(STEPS), rng.randrange(4), rng.choice(ALGORITHMS)) for _ in range(count)]
    program.at = rng.randrange(count)
    everyone = list(range(program.ranks))
    program.wrong = sorted(rng.sample(everyone, rng.randint(1, program.ranks - 1)))
    if program.misuse in ("callback", "calling callback", "comm", "threads") and rng.random() < 0.5:
        program.wrong = everyone
    program.catches, program.by_mpi4py = rng.random() < 0.4, rng.random() < 0.25
    program.setting = rng.choice(SETTINGS)
    program.comm = rng.choice(("null", "text", "freed", "inter"))
    return program


class Rank:
    """One rank at work."""

    def __init__(self, program: Program, folder: Path) -> None:
        from mpi4py import MPI

        self.program, self.folder, self.world = program, folder, MPI.COMM_WORLD
        self.is_wrong = self.world.rank in program.wrong
        self.step = 0

    def note(self, text: str) -> None:
        """A line in this rank's file."""
        with (self.folder / f"rank.{self.world.rank}").open("a") as file:
            file.write(f"{self.step}: {' '.join(text.split())}\n")

    def run(self) -> None:
        """The program. Raises what it meets, unless it is one that goes on."""
        program = self.program
        try:
            self.prepare()
            for number in self.order():
                self.step = number
                if self.is_wrong and self.step == program.at and self.misuse():
                    continue
                try:
                    self.call(*program.steps[self.step])
                except Exception as error:
                    self.note(f"error {type(error).__name__}: {error}")
                    if not program.catches:
                        raise
        except Exception as error:
            self.note(f"error {type(error).__name__}: {error}")
            raise
        except SystemExit:
            self.note("exit")
            raise
        self.note("end")

    def order(self) -> list[int]:
        """The numbers of the steps, as this rank takes them."""
        numbers = list(range(len(self.program.steps)))
        if self.program.misuse == "swap" and self.is_wrong:
            other = (self.program.at + 1) % len(numbers)
            numbers[self.program.at], numbers[other] = other, self.program.at
        return numbers

    def prepare(self) -> None:
        """Meshes on all ranks, on some, and on overlapping ones, each with a matrix and plans."""
        import numpy as np

        from rma_mm import DistMatrix, Mesh

        ranks, rank = self.world.size, self.world.rank
        parts = ([0, 1], list(range(1, ranks)))
        groups = [self.world.group.Incl(part) for part in parts]
        halves = [self.world.Create_group(g) if rank in part else None for part, g in zip(parts, groups, strict=True)]
        comms = [self.world, self.world.Dup(), *halves]
        self.x = np.random.default_rng(1).standard_normal((SIZE, SIZE))
        self.meshes = [Mesh((comm.size,), comm) if comm else None for comm in comms]
        self.matrices = [mesh and DistMatrix.from_numpy(self.x, mesh) for mesh in self.meshes]
        self.plans: dict[tuple[int, str], Plan] = {}

    def call(self, what: str, number: int, algorithm: str, x: object = None) -> None:
        """One step on one mesh, if this rank is on it."""
        import rma_mm
        from rma_mm import DistMatrix, Mesh

        mesh, matrix = self.meshes[number], self.matrices[number]
        if mesh is None or matrix is None:
            return
        if what == "matmul":
            rma_mm.matmul(matrix, matrix, algorithm=self.fitting(algorithm, mesh.size))
        elif what == "execute":
            self.plan(number, algorithm).execute(matrix, matrix)
        elif what == "redistribute":
            matrix.redistribute("None, i")
        elif what == "to_numpy":
            matrix.to_numpy()
        elif what == "from_function":
            DistMatrix.from_function((SIZE, SIZE), lambda i, j: i + 0.5 * j, mesh)
        elif what == "from_numpy":
            DistMatrix.from_numpy(self.x if x is None else x, mesh)
        elif what == "chain":
            rma_mm.plan_chain(["D = X @ X"], mesh, X=matrix).execute(X=matrix)
        elif what == "reopen":
            with Mesh((mesh.comm.size,), mesh.comm) as other:
                DistMatrix.empty((3, 3), float, other)

    def fitting(self, algorithm: str, size: int) -> str:
        """Cannon needs a square grid."""
        return "auto" if algorithm == "cannon" and size > 1 else algorithm

    def plan(self, number: int, algorithm: str) -> Plan:
        """A plan that is kept from step to step."""
        import rma_mm

        matrix, key = self.matrices[number], (number, algorithm)
        if key not in self.plans:
            self.plans[key] = rma_mm.plan(matrix, matrix, algorithm=self.fitting(algorithm, matrix.mesh.size))
        return self.plans[key]

    # -- what goes wrong --------------------------------------------------------------------------

    def misuse(self) -> bool:
        """Do what is wrong here; True where the step is not to be made beside."""
        act: Callable[[], bool | None] = getattr(self, "do_" + self.program.misuse.replace(" ", "_"), lambda: False)
        try:
            return bool(act())
        except Exception as error:
            self.note(f"error {type(error).__name__}: {error}")
            if not self.program.catches:
                raise
            return True

    def do_skip(self) -> bool:
        return True

    def do_close(self) -> bool:
        mesh = self.meshes[self.program.steps[self.program.at][1]]
        if mesh is not None:
            mesh.close()
        return True

    def do_return(self) -> None:
        self.note("return")
        raise Return

    def do_exit(self) -> None:
        sys.exit(1)

    def do_raise(self) -> None:
        raise Planted("a fault of the user's own")

    def do_exit_in_function(self) -> None:
        from rma_mm import DistMatrix

        mesh = next(mesh for mesh in self.meshes if mesh is not None)
        DistMatrix.from_function((SIZE, SIZE), lambda i, j: sys.exit(1), mesh)

    def do_callback(self) -> None:
        def fail(done: float, total: float) -> None:
            raise Planted("a fault in a callback")

        self.with_callback(fail)

    def do_calling_callback(self) -> None:
        def call(done: float, total: float) -> None:
            self.matrices[0].to_numpy()

        self.with_callback(call)

    def with_callback(self, callback: Callable[[float, float], None]) -> None:
        _, _, algorithm = self.program.steps[self.program.at]
        self.plan(0, algorithm).execute(self.matrices[0], self.matrices[0], progress=callback)

    def do_threads(self) -> None:
        """Two threads; elsewhere the step is made by one."""

        def work(count: int) -> None:
            for _ in range(count):
                try:
                    self.call("matmul", 0, "auto")
                    self.call("redistribute", 1, "auto")
                except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
                    self.note(f"error {type(error).__name__}: {error}")
                    return

        threads = [threading.Thread(target=work, args=(2,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def do_comm(self) -> bool:
        from mpi4py import MPI

        from rma_mm import Mesh

        comm: object = "a text"
        if self.program.comm == "null":
            comm = MPI.COMM_NULL
        elif self.program.comm == "freed":
            comm = MPI.COMM_SELF.Dup()
            comm.Free()
        elif self.program.comm == "inter" and len(self.program.wrong) == self.world.size:
            half = self.world.Split(self.world.rank == 0)
            comm = half.Create_intercomm(0, self.world, int(self.world.rank == 0))
        Mesh((self.world.size,), comm)
        return False

    def do_register(self) -> None:
        from dataclasses import replace

        from rma_mm.algorithms import ALGORITHMS, register

        base = ALGORITHMS["stationary_a" if self.world.rank % 2 else "stationary_c"]
        register(replace(base, name="mine"))

    def do_permuted(self) -> bool:
        self.call("from_numpy", self.program.steps[self.program.at][1], "", self.x[::-1].copy())
        return True

    def do_forgotten_mesh(self) -> bool:
        import rma_mm

        rma_mm.matmul(self.x, self.x)
        return True


class Return(BaseException):
    """The program's main function returns."""


def main() -> None:
    """The command."""
    folder, seed, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    program = draw(seed, number)
    launched = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    if program.misuse == "environment" and launched in program.wrong:
        name, _, value = program.setting.partition("=")
        os.environ[name] = str(folder / value) if name == "RMA_MM_CACHE" else value
    try:
        Rank(program, folder).run()
    except Return:
        return


if __name__ == "__main__":
    main()
