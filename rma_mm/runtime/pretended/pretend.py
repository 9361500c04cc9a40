"""Pretended ranks: one process runs what several ranks do, slowly and exactly, without mpiexec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import isqrt
from types import TracebackType
from typing import Any

from rma_mm.errors import DisagreementError, MemoryLimitError, MeshError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.mesh import MeshShape
from rma_mm.launch import launched_ranks
from rma_mm.runtime.pretended.comm import PretendedComm, Shared
from rma_mm.runtime.pretended.everywhere import Everywhere, run_on_all
from rma_mm.runtime.pretended.turns import Turns
from rma_mm.runtime.pretended.window import PRETENDED
from rma_mm.runtime.ranks.mesh import Mesh, dims_of, leave_meshes
from rma_mm.runtime.ranks.rank_state import CONTROLLERS, RankState, rank_state
from rma_mm.runtime.ranks.uncaught import install
from rma_mm.windows.hosts.shm_limits import memory_free

WORLD = "COMM_WORLD"
OF_A_RANK, OF_A_PAIR = 2**20, 2**13
"""Bytes that a rank takes before it has matrices: by itself, and for each rank that it knows."""
NOTE = "pretended: {} ranks are threads of one process that take turns; their times say nothing of any machine"


class pretend:
    """Run what several ranks do in one process, without mpiexec: `with rma_mm.pretend((2, 3)) as mesh:`.

    Inside the context, calls with `mesh`, or without a mesh, run on all ranks at the same time, as if each rank had
    made them. A value that is the same on all ranks comes once; values that differ come as a list, by rank.
    `mesh.run(program)` calls `program(mesh)` on each rank, as a program under mpiexec runs. In a notebook use
    `mesh = ranks.start()` and `ranks.stop()` of `ranks = rma_mm.pretend((2, 3))`.

    The ranks are threads that take turns, so results, words and messages are exactly those of real ranks, and the
    same in every run. Times say nothing: plans predict none, and metrics refuse to give any.

    Parameters
    ----------
    shape : tuple of int, or int
        Ranks along each axis, as for `Mesh`.
    names : tuple of str, optional
        Names of the axes.

    Raises
    ------
    MeshError
        If the process is one of several ranks, if ranks are pretended already, or if the system starts too few threads.
    MemoryLimitError
        If memory does not suffice for so many ranks.

    Examples
    --------
    >>> import numpy as np, rma_mm
    >>> with rma_mm.pretend((2, 3)) as mesh:
    ...     C = rma_mm.matmul(np.ones((4, 5)), np.ones((5, 6)))
    ...     print(C.to_numpy()[0, 0], [tile.shape for tile in C.tile])
    5.0 [(2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2)]
    """

    def __init__(self, shape: tuple[int, ...] | int, names: tuple[str, ...] | None = None) -> None:
        from mpi4py import MPI

        install(MPI.COMM_WORLD)
        self.dims = dims_of(shape, 1)
        try:
            self.size = MeshShape(tuple(self.dims), tuple(names or ())).size
        except (TypeError, ValueError, AttributeError) as error:
            raise error if isinstance(error, MeshError) else MeshError(
                f"pretend: got shape {shape!r}, names {names!r}; a shape is whole numbers, as (2, 3)"
            ) from None
        self.names = names
        self._turns: Turns | None = None

    def start(self) -> Any:
        """Return the mesh, for notebooks, where a `with` block ends with its cell; `stop` ends it."""
        return self.__enter__()

    def stop(self) -> None:
        """Close the mesh and end the ranks."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Any:
        from mpi4py import MPI

        if CONTROLLERS or rank_state().is_pretended:
            raise MeshError("pretend: ranks are pretended already; leave that context first")
        self._require_alone(MPI.COMM_WORLD.size)
        self._require_memory()
        FLAVOURS[PRETENDED.name] = PRETENDED
        states = [RankState(window=PRETENDED.name, note=NOTE.format(self.size)) for _ in range(self.size)]
        turns = self._turns = Turns(states)
        shared = Shared(range(self.size), turns.get_on)
        for rank, state in enumerate(states):
            state.world = PretendedComm.of(shared, rank)
        self._world = MPI.COMM_WORLD
        setattr(MPI, WORLD, _NoWorld(self.size))
        CONTROLLERS.append(self._run)
        try:
            return run_on_all(turns, self._start, (), {})
        except BaseException:
            self._stop()
            raise

    def _start(self) -> PretendedMesh:
        mesh = PretendedMesh(self.dims, names=self.names)
        rank_state().default = [mesh]
        return mesh

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the main program on all ranks."""
        if call.__name__ == "__init__":  # the object would be one for all ranks
            what = call.__qualname__.partition(".")[0]
            raise MeshError(f"{what}: make it on pretended ranks, in a program: mesh.run(program)")
        for each in (*args, *kwargs.values()):
            mesh = each if isinstance(each, Mesh) else getattr(each, "mesh", None)
            if type(each) is not Everywhere and isinstance(mesh, Mesh):
                raise MeshError(
                    f"{call.__qualname__}: got an object of a mesh of real ranks among pretended ones; make it there"
                )
        assert self._turns is not None
        return run_on_all(self._turns, call, args, kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turns is None:
            return
        try:
            if not self._turns.is_over:
                run_on_all(self._turns, leave_meshes, (), {})
        except DisagreementError:
            pass  # raised before: these ranks can agree on nothing any more
        finally:
            self._stop()

    def _stop(self) -> None:
        from mpi4py import MPI

        CONTROLLERS.remove(self._run)
        setattr(MPI, WORLD, self._world)
        FLAVOURS.pop(PRETENDED.name, None)
        if self._turns is not None:
            self._turns.end()
        self._turns = None

    def _require_alone(self, ranks: int) -> None:
        ranks = max(ranks, launched_ranks())
        if ranks > 1:
            raise MeshError(
                f"pretend: mpiexec started {ranks} ranks, which are real; make rma_mm.Mesh({self.dims}) of them, or "
                f"start this program without mpiexec"
            )

    def _require_memory(self) -> None:
        free, where = memory_free()
        needed = self.size * (OF_A_RANK + OF_A_PAIR * self.size)
        if needed > free:
            most = isqrt(free // OF_A_PAIR + (OF_A_RANK // OF_A_PAIR // 2) ** 2) - OF_A_RANK // OF_A_PAIR // 2
            raise MemoryLimitError(
                f"pretend: {self.size} ranks need {needed} bytes before they have matrices, and {where} {free} bytes; "
                f"use at most {most} ranks"
            )


class PretendedMesh(Mesh):
    """A mesh of pretended ranks."""

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a program on each rank, as `program(mesh, *args, **kwargs)` or without the mesh if it takes none.

        Returns what it returns on each rank: once if that is the same on all ranks, as a list by rank if not.
        """
        takes = inspect.signature(program).parameters
        return program(*([self] if takes else []), *args, **kwargs)


class _NoWorld:
    """Stands for COMM_WORLD while ranks are pretended, as the program would see one rank there."""

    def __init__(self, size: int) -> None:
        self.__dict__["_size"] = size

    def __getattr__(self, name: str) -> Any:
        raise MeshError(
            f"MPI.COMM_WORLD.{name}: pretended ranks cannot call MPI, for which this process is one rank; use "
            f"mesh.comm, or start the program with mpiexec -n {self._size} instead of rma_mm.pretend"
        )
