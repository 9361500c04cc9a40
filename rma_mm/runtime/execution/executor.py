"""Runs one rank's operations over windows and kernels. It knows no algorithm's name.

Preparing turns each operation into a call on real memory (`binding`). Running makes the calls in order, and creates
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import add, sub
from time import perf_counter_ns

from rma_mm.kernels.threads import using_threads
from rma_mm.policy.model.machine import Machine
from rma_mm.runtime.execution.addressing import Memory, Places, Tickets
from rma_mm.runtime.execution.binding import Action, Binding, Scalars, Setup
from rma_mm.runtime.execution.checked_pushes import Pushes
from rma_mm.runtime.execution.tracing import Trace, call_noted
from rma_mm.runtime.ranks.agreement import abortable
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch
from rma_mm.runtime.ranks.process_group import within
from rma_mm.runtime.watching.retries import FAULTS, retry
from rma_mm.runtime.watching.transfers import timed
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows import Counters, Window
from rma_mm.windows.boxes.copying import CopyTransfer
from rma_mm.windows.channel import Channel
from rma_mm.windows.hosts.liveness import BARRIER, CELLS, DOING, END, PRODUCT
from rma_mm.windows.waiting import barrier

Progress = Callable[[float, float], None]


class Executable:
    """One rank's program on given memory, ready to run any number of times."""

    def __init__(
        self, schedule: Schedule, mesh: Mesh, memory: Memory, scalars: Scalars, trace: Trace | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.schedule, self.mesh, self.memory, self.scalars = schedule, mesh, memory, scalars
        self.rank = mesh.rank
        blocks = [*memory.homes.values(), *([memory.shadow] if memory.shadow else [])]
        if memory.tickets:
            blocks.append(memory.tickets.block)
        self.windows: list[Window] = list(dict.fromkeys(block.window for block in blocks))
        self.progress: Progress | None = None
        self.done_work = 0.0
        self.claims: list[int] = []  # tasks that this rank ran last
        places = Places(schedule, memory, mesh.rank)
        pushes = None if mesh.checks is None or not mesh.is_member else Pushes(mesh, mesh.checks, places)
        meet = self.meet if pushes is None else pushes.meeting(self.meet)
        self.setup = Setup(
            mesh, places, scalars, meet, self.claim, self.count_work, [], [], trace=trace, machine=machine
        )
        self.program = Binding(self.setup, schedule.program(mesh.rank) if mesh.is_member else [])
        self.is_plain = len(self.program.actions) == self.program.actions_of_steps and schedule.pool is None
        """True if this rank only copies and multiplies, between the meetings at the begin and the end."""
        self.program.actions.append(call_noted(trace, self.flush, "flush"))
        if pushes is not None:
            self.program.actions[:] = [pushes.begin, *self.program.actions, pushes.end]
            self.program.opening = slice(0)
            self.program.head, self.program.tail = 0, len(self.program.actions)  # its barriers are kept
        self.worked = 0  # the first action of `work`
        self.is_closed = False
        self.is_met = True
        """True if the schedule's barriers are kept, which it does not need where ranks move everything together."""
        leave = timed(mesh.metrics.tally, partial(barrier, mesh.comm), END)
        self.leave = call_noted(trace, leave, "wait", {"for": "all ranks to end"})
        """Meet all ranks at the end. Collective."""
        self.tasks: dict[int, Binding] = {}
        if (pool := schedule.pool) is not None and mesh.is_member:  # any task may fall to this rank
            self.tasks = {task: Binding(self.setup, pool.program(task, self.rank)) for task in range(pool.tasks)}
            self.setup.total_work /= schedule.mesh.size  # an equal share is expected

    def run(self, progress: Progress | None = None) -> None:
        """Run the program once, and meet. Collective over the mesh's communicator; the caller has met before.

        What one rank cannot do all raise, and nothing can be agreed on any more.
        """
        with under_way(self.mesh, self):
            self.begin(progress, self.program.opening)
            self.work()
            self.finish()
            self.leave()

    # -- in parts, where the caller lets ranks meet (within `under_way`) ---------------------------

    def begin(self, progress: Progress | None = None, opening: slice = slice(0)) -> None:
        """Begin the transfers that depend on A and B only. opening: actions that are done before it."""
        self.progress, self.done_work, self.claims = progress, 0.0, []
        self.sync()
        if self.memory.node_scratch is not None and self.memory.node_scratch.blocks:
            self.memory.node_scratch.begin()
        self.call(self.program.actions[opening])
        self.call(self.program.actions[: self.program.head])
        self.worked = opening.stop or self.program.head

    def work(self) -> None:
        self.call(self.program.actions[self.worked : self._tail])

    def finish(self) -> None:
        self.call(self.program.actions[self._tail :])
        self.count_views(self.program.viewed)

    @property
    def _tail(self) -> int:
        return self.program.tail if self.is_met else self.program.unmet_tail

    def sync(self) -> None:
        """Make local stores and the windows' transfers see each other."""
        for window in self.windows:
            window.sync()

    def flush(self) -> None:
        """Complete this rank's accumulates at their targets, and make its stores visible."""
        for window in self.windows:
            window.flush()
            window.sync()

    def traffic(self) -> tuple[int, int, int, int]:
        """Return all that this rank ever caused through these windows, in the order of the fields of `Counters`."""
        intra = inter = messages = messages_inter = 0
        movers: list[Window | Channel] = [*self.windows, *self.setup.channels]
        for mover in movers:
            counters = mover.counters
            intra += counters.words_intra
            inter += counters.words_inter
            messages += counters.messages
            messages_inter += counters.messages_inter
        return intra, inter, messages, messages_inter

    def close(self) -> None:
        self.is_closed = True
        for transfer in self.setup.transfers:
            transfer.close()
        self.tasks.clear()
        del self.program, self.setup  # they refer back to this object, and would wait for the garbage collector

    # -- running ----------------------------------------------------------------------------------

    def call(self, actions: list[Action]) -> None:
        for action in actions:
            action()

    def count_work(self, work: float) -> None:
        """Tell of a product's multiply-adds, where someone wants to know."""
        if self.progress:
            self.done_work += work
            self.progress(min(self.done_work, self.setup.total_work), self.setup.total_work)

    def meet(self) -> None:
        """A barrier of the schedule: everything before it is visible after it."""
        if not self.is_met:
            return
        self.flush()
        CELLS[DOING] = BARRIER
        barrier(self.mesh.active)
        self.sync()

    def claim(self) -> None:
        """Run tasks until none is left; every rank gets one ticket too many."""
        pool, tickets = self.schedule.pool, self.memory.tickets
        assert pool is not None and tickets is not None
        next_task = call_noted(self.setup.trace, partial(self.next_task, tickets), "claim")
        while (task := next_task()) < pool.tasks:
            self.claims.append(task)
            self.call(self.tasks[task].actions)
            self.count_views(self.tasks[task].viewed)
        tickets.first += pool.tasks + self.schedule.mesh.size

    def next_task(self, tickets: Tickets) -> int:
        """Return a ticket; where asking for one fails at once it is asked for again."""
        try:
            return tickets.next_task()
        except FAULTS as fault:
            return retry(fault, tickets.next_task, "fetch-and-add to rank 0", self.mesh.metrics.tally)

    @property
    def copies(self) -> list[CopyTransfer]:
        """The copies from other ranks' memory, of a plain program."""
        steps = self.program.steps
        return [step for step in steps if isinstance(step, CopyTransfer) and step.counters is not None]

    @property
    def words(self) -> Counters:
        """The words of other ranks that a plain program reads and copies."""
        total = replace(self.program.viewed)
        for copy in self.copies:
            total.add(copy.words, copy.messages, same_node=True)
        return total

    def count_views(self, viewed: Counters) -> None:
        """Add words read in place to the traffic of the first window."""
        counters = self.windows[0].counters
        counters.words_intra += viewed.words_intra
        counters.words_inter += viewed.words_inter


@contextmanager
def under_way(mesh: Mesh, kept: object) -> Iterator[None]:
    """Run a block of a product, as `abortable` says, while a helper gives MPI progress."""
    with abortable(mesh.group, kept), mesh.progress:
        yield


class Running:
    """One run of an executable, as metrics see it: `noted` surrounds it or its parts, `end` follows it."""

    def __init__(self, executable: Executable, watch: ProductWatch) -> None:
        self.executable, self.watch = executable, watch
        self._elapsed, self._multiplied, self._waited, self._worked = 0, 0, 0, 0.0
        self._moved = (0, 0, 0, 0)

    @property
    def words(self) -> Counters:
        return Counters(*self._moved)

    @contextmanager
    def noted(self) -> Iterator[None]:
        tally = self.watch.metrics.tally
        before, begun = self.executable.traffic(), perf_counter_ns()
        multiplying, waiting, work = tally.multiplying, tally.waiting, tally.work
        CELLS[PRODUCT] = tally.products + 1
        with using_threads(self.executable.mesh.threads):
            yield
        self._elapsed += perf_counter_ns() - begun
        self._multiplied += tally.multiplying - multiplying
        self._waited += tally.waiting - waiting
        self._worked += tally.work - work
        moved = map(sub, self.executable.traffic(), before)
        self._moved = tuple(map(add, self._moved, moved))

    def end(self) -> None:
        self.watch.note(self._elapsed, self._multiplied, self._waited, self._worked, self.words)


class Listener:
    """A user's progress callback whose error is kept until the product is complete, as others need this rank."""

    def __init__(self, tell: Progress) -> None:
        self.tell = tell
        self.error: BaseException | None = None

    def __call__(self, done: float, total: float) -> None:
        if self.error is not None:
            return
        within("progress")
        try:
            self.tell(done, total)
        except BaseException as error:  # noqa: BLE001 - raised at the end
            self.error = error
        finally:
            within("")
