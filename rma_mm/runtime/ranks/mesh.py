"""A mesh of real ranks: a communicator of its own, the node map, and the memory that all its matrices share."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from rma_mm.errors import (
    AbsentError,
    ClosedError,
    DisagreementError,
    MeshError,
    OptionError,
    Renamed,
    WindowError,
    count_of,
    quoted,
    truncate,
)
from rma_mm.flavours import DEFAULT, FLAVOURS, Flavour, find_flavour
from rma_mm.geometry.mesh import MeshShape, near_square
from rma_mm.geometry.shares import speeds_problem
from rma_mm.kernels.cache import refusal
from rma_mm.kernels.threads import cores, threads_per_rank
from rma_mm.launch import launched_ranks
from rma_mm.policy.planner.preference import VARIABLES, preferred
from rma_mm.runtime.ranks.agreement import END, agree, agree_to_end, digest
from rma_mm.runtime.ranks.arena import Arena, Closable, Fallback, Holder
from rma_mm.runtime.ranks.launchers import check_launcher, require_start, start_command
from rma_mm.runtime.ranks.metrics import Metrics
from rma_mm.runtime.ranks.process_group import ProcessGroup, end_broken_job, serialized
from rma_mm.runtime.ranks.rank_state import rank_state
from rma_mm.runtime.ranks.uncaught import install
from rma_mm.windows import Checks, absent
from rma_mm.windows.checks.checked import SWITCH
from rma_mm.windows.hosts.liveness import VARIABLE as TIMEOUT
from rma_mm.windows.hosts.liveness import (
    Identity,
    NodeWatch,
    PeerProcess,
    by_sight,
    call_name,
    enter_call,
    leave_call,
    timeout_of,
)
from rma_mm.windows.hosts.shm_limits import segment_problem
from rma_mm.windows.waiting import Cores

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.windows.channel import Channel
    from rma_mm.windows.progress import Progress

SETTINGS = (
    "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RMA_MM_CACHE", "RMA_MM_MACHINE", "RMA_MM_WINDOW", SWITCH, TIMEOUT,
    *VARIABLES,
)
"""Variables of the environment that must be the same on all ranks."""


class Mesh:
    """Ranks 0…prod(shape) − 1 of a communicator, on a grid with named axes.

    Collective to make and to close. Ranks of `comm` beyond the grid own nothing but join every call.

    Parameters
    ----------
    shape : tuple of int, or int, optional
        Ranks along each axis. A number of ranks makes a grid of two axes, as near to a square as it can be. By default
        all ranks of `comm`.
    comm : mpi4py.MPI.Intracomm, optional
        COMM_WORLD by default; it is duplicated.
    names : tuple of str, optional
        Names of the axes; i, j, l, p, q, r by default.
    window : str, optional
        A flavour of windows, as `--list-windows` prints them. By default RMA_MM_WINDOW, or "shared".
    threads : int, optional
        BLAS threads of a rank; by default the node's cores divided by its ranks.
    speeds : sequence of float, optional
        Relative speed of each rank of the grid; "auto" cuts matrices by it. By default as calibrated.
    timeout : float, optional
        Seconds that a rank may stand still before the job ends. By default RMA_MM_TIMEOUT, or 20.

    Raises
    ------
    MeshError
        If `comm` is null or has fewer ranks than the grid.
    WindowError
        If there is no such flavour.
    DisagreementError
        If arguments or environment variables differ between ranks.

    Notes
    -----
    A rank calls from one thread at a time. All ranks make the same calls in the same order, on whatever meshes.
    """

    @serialized
    def __init__(
        self, shape: tuple[int, ...] | int | None = None, comm: MPI.Intracomm | None = None,
        names: tuple[str, ...] | None = None, window: str | None = None, threads: int | None = None,
        speeds: Sequence[float] | None = None, timeout: float | None = None,
    ) -> None:
        if "mpi4py.MPI" not in sys.modules and (problem := segment_problem()):
            raise MeshError(problem)  # the import below would end in a bus error
        install()
        require_start()
        from mpi4py import MPI

        from rma_mm.windows.ranks import node_map

        parent = checked_comm(comm if comm is not None else rank_state().world or MPI.COMM_WORLD)
        install(parent)
        if not rank_state().is_pretended:
            check_launcher()
        dims = dims_of(shape, parent.size)
        name = window_name(window)
        facts = {"shape": dims, "names": names, "window": name, "threads": threads, "speeds": speeds} | environment()
        facts["timeout"] = timeout
        facts["flavours"] = {each.name: digest(each) for each in FLAVOURS.values()}
        group = ProcessGroup.on(parent)
        wrong = self._problem(dims, names, name, threads, speeds, timeout, parent.size)
        agree(group.comm if group else parent, "Mesh", facts, wrong)
        self.flavour = find_flavour(name)
        """The flavour of windows that was asked for."""
        self.taken_over: dict[str, Fallback] = {}
        """The windows that took over, by the name of the flavour that could not be had."""
        self.group = group or ProcessGroup(parent)
        """Its ranks, which it may share with other meshes."""
        self._is_closed = False
        self._comm: MPI.Intracomm = MPI.Intracomm()
        try:
            self._comm = self.group.admit(dims)
            self.node_of = node_map(self._comm)
        except MPI.Exception as error:  # on every rank alike: MPICH has some 2000 communicators
            if self._comm != MPI.COMM_NULL:
                self._comm.Free()
                self.group.dismiss()
            raise MeshError(
                f"mesh: MPI makes no further communicator ({error.Get_error_string()}); close some of the "
                f"{len(rank_state().meshes)} meshes that are open"
            ) from None
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.identities: list[Identity] = self.comm.allgather(Identity.own(MPI.Get_processor_name()))
        """Host, process and shared page of each rank."""
        self.hosts = [each.host for each in self.identities]
        """The name of each rank's host."""
        self.grid = MeshShape(tuple(dims), tuple(names or ()), self.node_of)
        """The grid: shape, axis names, nodes."""
        self.num_nodes = len(set(self.node_of))
        self.is_member = self.rank < self.grid.size
        self.active: MPI.Intracomm = self.comm
        """The ranks on the grid (on the others, the ranks that are not)."""
        if self.grid.size < self.size:
            self.active = cast("MPI.Intracomm", self.comm.Split(self.is_member))
        beside = ranks_beside(self.comm, self.node_of)
        self.shares_cores = beside > len(cores())
        """True if more ranks than there are cores share those of this rank."""
        Cores.note(self.shares_cores)
        self.threads = threads_per_rank(beside, threads)
        self.speeds = None if speeds is None else tuple(map(float, speeds))
        """Speed of each rank of the grid, if given."""
        self.timeout = timeout_of(timeout, os.environ)
        """Seconds for which a rank may stand still."""
        self.checks = Checks() if Checks.wanted() else None
        """The checks of transfers and products; None if there are none."""
        self.fallbacks: list[str] = [*filter(None, [refusal(), rank_state().note])]
        """Choices that replaced the requested ones, and why."""
        self.prefer = preferred(os.environ)
        """Default for the products' `prefer`: one of `PREFERENCES`."""
        self.kept: dict[type, Closable] = {}
        """Objects that other parts of the package keep with a mesh, by class."""
        self.prepared: weakref.WeakSet[Holder] = weakref.WeakSet()
        """Plans and other objects that hold bound memory."""
        self.proved: set[object] = set()
        """Redistributions that all ranks have shown to be right."""
        self.trace: Any = None
        """The trace in which plans note what they do; None if nothing is traced."""
        self.metrics = Metrics(self)
        """Time, traffic and slow ranks of its products."""
        self.when_lost: Callable[[], str] = str
        """Called when a rank is lost, just before the job ends; says what the user will miss."""
        seen = by_sight(self.node_of, self.identities)
        self.progress = self._progress(seen)
        """The helper that drives progress while this rank multiplies."""
        self.require_progress(self.flavour)
        self._watch = NodeWatch(self.rank, self.identities, seen, self.timeout, self._last)
        self._serial = 0
        self._channels: dict[tuple[int, ...], Channel] = {}
        _closed_at_exit(self)
        _free_held(self._comm)

    def _last(self) -> str:
        return self.when_lost()

    def _problem(
        self, shape: Any, names: tuple[str, ...] | None, window: str, threads: int | None,
        speeds: Sequence[float] | None, timeout: float | None, size: int,
    ) -> Exception | None:
        try:
            mesh = MeshShape(tuple(shape), tuple(names or ()))
        except MeshError as error:
            return error
        except (TypeError, ValueError, AttributeError):
            return MeshError(
                f"mesh: got shape {shape!r}, names {names!r}; a shape is whole numbers, as (2, 3)"
            )
        if mesh.size > size:
            fix = f"start {mesh.size} with {start_command(mesh.size)}" if launched_ranks() == 1 else "start more ranks"
            return MeshError(
                f"mesh {mesh}: needs {mesh.size} ranks, and there are {size}; {fix}, or use a smaller mesh"
            )
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            return OptionError(f"threads: got {threads!r}; a rank uses a whole number of them, at least 1")
        try:
            Checks.wanted()
            if (only := rank_state().window) and window != only:
                return WindowError(f"window: got {quoted(window)}; pretended ranks have {only!r} only; leave it out")
            if reason := absent(window):
                return AbsentError(f"window {window}: {reason}")
            preferred(os.environ)
            timeout_of(timeout, os.environ)
        except (OptionError, WindowError) as error:
            return error
        if speeds is not None and (wrong := speeds_problem(speeds, mesh.size)):
            return OptionError(f"speeds: got {quoted(speeds)}; {wrong}")
        return None

    @property
    def mates(self) -> dict[int, PeerProcess]:
        """Return the other ranks of the node whose pages this process sees, by rank."""
        return self._watch.mates

    @property
    def window_flavour(self) -> str:
        """The name of the flavour of windows that new matrices lie in."""
        return self.granted(self.flavour).name

    def granted(self, flavour: Flavour) -> Flavour:
        """Return the flavour that windows of a flavour are opened as now: itself, or the one that took over."""
        while flavour.name in self.taken_over:
            flavour = self.taken_over[flavour.name].instead
        return flavour

    @property
    def comm(self) -> MPI.Intracomm:
        """The mesh's own communicator, ranks beyond the grid included. Raises ClosedError after `close`."""
        self.require_open()
        return self._comm

    @cached_property
    def arena(self) -> Arena:
        """The memory of this mesh's matrices."""
        self.require_open()
        return Arena(self)

    def _progress(self, seen: Sequence[int]) -> Progress:
        """Return the helper that drives progress while this rank multiplies. seen: see `Heartbeat`. Collective."""
        from rma_mm.windows.hosts.heartbeat import Heartbeat
        from rma_mm.windows.progress import Progress, can_help

        heartbeat = None
        if len(set(seen)) > 1 and all(self.comm.allgather(can_help())):
            heartbeat = Heartbeat(self.comm, seen, self.identities, self.timeout, self._last)
        return Progress(heartbeat=heartbeat)

    def require_progress(self, flavour: Flavour) -> None:
        """Have MPI called while this rank multiplies, if transfers of windows of a flavour wait for that. Local."""
        from rma_mm.windows.progress import can_help

        if self.num_nodes > 1 or (self.size > 1 and flavour.needs_progress):
            self.progress.require()
            note = "progress: only between multiplies, as MPI was not started with THREAD_MULTIPLE"
            if not can_help() and note not in self.fallbacks:
                self.fallbacks.append(note)

    def open_channels(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create the channels of these groups of grid ranks, each of which includes this rank.

        Collective over every group: all its members name it. In one order everywhere, so that none waits in a circle.
        """
        from rma_mm.windows.channel import Channel

        for group in sorted(set(groups) - set(self._channels)):
            members = self.comm.group.Incl(group)
            comm = self.comm.Create_group(members)
            members.Free()
            self._channels[group] = Channel(comm, group, self.node_of)

    def channel(self, group: tuple[int, ...]) -> Channel:
        """Return the channel of a group that was made before."""
        return self._channels[group]

    def next_serial(self) -> int:
        """Return a number for a new matrix or plan, the same on every rank."""
        self._serial += 1
        return self._serial

    def require_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._is_closed:
            raise ClosedError(f"mesh {self.grid}: it is closed; make a new Mesh")

    shape = Renamed("grid")
    nodes = Renamed("num_nodes")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return self.grid.names

    @property
    def coords(self) -> tuple[int, ...] | None:
        """This rank's coordinate along each axis; None for a rank beyond the grid."""
        return tuple(self.grid.coords(self.rank).values()) if self.is_member else None

    @serialized
    def close(self) -> None:
        """Free the windows and communicators, and with them all matrices and plans of this mesh.

        Collective. Arrays that show a matrix's memory (`DistMatrix.local`, `tile`) stay valid: their memory is freed
        later.

        Raises
        ------
        DisagreementError
            If another rank is in another call; the mesh stays open.
        """
        if not self._is_closed:
            agree(self._comm, "Mesh.close", {})
            self._close()

    def _close(self) -> None:
        self.metrics.close()
        self._is_closed = True
        rank_state().meshes.remove(self)
        for each in [*self.prepared, *self.kept.values()]:
            each.close()
        self.progress.close()
        for channel in self._channels.values():
            channel.comm.Free()
        self._channels.clear()
        if self.active is not self._comm:
            self.active.Free()
        if "arena" in self.__dict__:
            self.arena.let_go()
        rank_state().held.append(self)
        _free_held(self._comm)
        self.group.dismiss()
        self._watch.end()

    def leave(self) -> None:
        """Close at the end of the program; ranks that still call learn that this rank has ended.

        Collective.

        Raises
        ------
        DisagreementError
            If ranks can no longer agree on calls.
        """
        error = getattr(sys, "last_value", None)
        how = "" if error is None else f" ({type(error).__name__}: {truncate(error)})"
        enter_call(call_name(END))
        try:
            while not agree_to_end(self._comm, how):
                pass  # the others have raised; they call again, or end
            self._close()
        finally:
            leave_call()

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Return the mesh itself, so that deep copies of matrices and layers share it."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Mesh], tuple[object, ...]]:
        return open_mesh_of, (self.grid.dims, self.grid.names)  # a communicator is of its process

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the other ranks may never come to a collective close
            self.close()

    def __repr__(self) -> str:
        nodes = count_of(self.num_nodes, "node")
        return f"Mesh({self.grid}, axes {', '.join(self.names)}, {nodes}, window {self.window_flavour})"


def window_name(window: str | None) -> str:
    """Return the name of the flavour of windows of a mesh, which is the one given unless that is None."""
    return window or rank_state().window or os.environ.get("RMA_MM_WINDOW") or DEFAULT.name


def open_mesh_of(dims: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """Return the first open mesh of a shape, for an object that is unpickled. Local; raises MeshError without one."""
    mesh: Mesh
    for mesh in rank_state().meshes:
        if (mesh.grid.dims, mesh.grid.names) == (dims, names):
            return mesh
    grid = MeshShape(dims, names)
    raise MeshError(f"mesh: what is unpickled lies on a mesh {grid}, axes {', '.join(names)}; make such a Mesh first")


def default_mesh() -> Mesh:
    """Return the mesh of calls that name none: all ranks of COMM_WORLD, near square. Collective when first called."""
    state = rank_state()
    if not (state.default and state.default[0] in state.meshes):
        state.default = [Mesh()]
    found: Mesh = state.default[0]
    return found


def _closed_at_exit(mesh: Mesh) -> None:
    """Close the meshes that a program leaves open at its end, as MPI libraries complain of unfreed windows."""
    state = rank_state()
    if not (state.meshes or state.is_pretended):
        atexit.unregister(_close_all)  # once, and behind what was registered before the first mesh
        atexit.register(_close_all)
    state.meshes.append(mesh)


def _close_all() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        with suppress(DisagreementError):  # the job cannot go on, as is said now
            leave_meshes()
        end_broken_job()


def leave_meshes() -> None:
    """Close all meshes of this rank at the end of its program. Collective; raises DisagreementError."""
    state = rank_state()
    for mesh in reversed(list(state.meshes)):
        mesh.leave()
    for mesh in state.held:
        mesh.arena.leave()
        mesh._comm.Free()


def dims_of(shape: Any, ranks: int) -> Any:
    """Return the ranks along each axis for the argument `shape` of a mesh; what is no shape stays as it is."""
    if shape is None:
        return near_square(ranks)
    return near_square(int(shape)) if isinstance(shape, Integral) and int(shape) > 0 else shape


def checked_comm(comm: object) -> MPI.Intracomm:
    """`comm`, if ranks can meet in it. Raises MeshError, on this rank alone: there is nobody to agree with."""
    from mpi4py import MPI

    rule = "pass an intracommunicator, as MPI.COMM_WORLD, that is not freed"
    if not isinstance(comm, MPI.Comm):
        raise MeshError(f"comm: got {quoted(comm)}; {rule}")
    if comm == MPI.COMM_NULL:
        raise MeshError(f"comm: got COMM_NULL, or a communicator that was freed; {rule}")
    if comm.Is_inter():
        raise MeshError(f"comm: got an intercommunicator; {rule} (Merge makes one)")
    return comm if isinstance(comm, type(rank_state().world)) else MPI.Intracomm(comm)


def environment() -> dict[str, object]:
    return {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}


def _free_held(comm: MPI.Intracomm) -> None:
    """Free the memory of closed meshes on the ranks of `comm` that no array uses any more. Collective over `comm`."""
    from mpi4py import MPI

    held = rank_state().held
    for mesh in [each for each in held if comm.Compare(each._comm) != MPI.UNEQUAL]:
        _free(mesh)


def _free(mesh: Mesh) -> None:
    """Free a closed mesh's windows, and last its communicator, by which ranks agree on them. Collective."""
    if "arena" not in mesh.__dict__ or mesh.arena.freed():
        rank_state().held.remove(mesh)
        mesh._comm.Free()


def ranks_beside(comm: MPI.Intracomm, node_of: Sequence[int]) -> int:
    """Return the ranks that share this rank's cores: those of its node, or of its host if nodes are pretended.

    Open MPI binds ranks to cores, or to parts of a node: those elsewhere take nothing away. Collective.
    """
    from mpi4py import MPI

    host, mine = MPI.Get_processor_name(), cores()
    told = comm.allgather((host, mine))
    return sum(
        bool(theirs & mine) and (where == host or node == node_of[comm.rank])
        for (where, theirs), node in zip(told, node_of, strict=True)
    )
