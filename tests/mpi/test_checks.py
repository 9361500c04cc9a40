"""RMA_MM_CHECK=1: faults planted behind every other check, which pass without a word unless it is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import CheckError, DisagreementError, OptionError
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.matrices import move as transport
from rma_mm.runtime.products.plan import Plan
from rma_mm.schedule.ops import Accumulate, Copy, Op, Slot
from rma_mm.windows import Checks, open_window, reach
from rma_mm.windows import mpi as transfers
from rma_mm.windows.boxes.copying import CopyTransfer
from rma_mm.windows.checks.checked import SWITCH
from tests.conformance import WindowConformance
from tests.launch import parallel
from tests.mpi.test_windows import MpiWorld

BOTH = ("node", "nolocal")


@contextmanager
def switched(value: str) -> Iterator[pytest.MonkeyPatch]:
    """Meshes made now are checked, or not; patches end with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, value)
        yield patch


def check_found(comm, body: Callable[[Mesh, pytest.MonkeyPatch], object], message: str, shape=(2, 2)) -> None:
    """The fault in `body` passes without checks; with them every rank gets the same error, which says `message`."""
    with switched("0") as patch, Mesh(shape, comm) as mesh:
        body(mesh, patch)
    with switched("1") as patch, Mesh(shape, comm) as mesh:
        with pytest.raises(CheckError, match=message) as caught:
            body(mesh, patch)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert mesh.checks.findings == []


def drop(plan: Plan, rank: int, is_fault: Callable[[Op], bool]) -> None:
    """The last operation of that kind is not done on one rank, though the plan was verified with it."""
    program = plan.schedule.program
    lost = [op for op in program(rank) if is_fault(op)][-1]
    ops = [op for op in program(rank) if op is not lost]
    schedule = replace(plan.schedule, program=lambda r: ops if r == rank else program(r))
    plan.prepared.choice = replace(plan.choice, schedule=schedule)


def some(mesh: Mesh, shape=(13, 11), dtype=float, layout=None, seed=0) -> DistMatrix:
    values = np.random.default_rng(seed).integers(-4, 5, shape) + (0.25 if np.dtype(dtype).kind == "f" else 0)
    return DistMatrix.from_numpy(values.astype(dtype), mesh, layout)


@parallel(ranks=(4,), env=BOTH)
@pytest.mark.parametrize("dtype", ["float64", "float16", "complex64", "int32", "bool"])
def test_a_replica_of_c_that_is_not_written(comm, dtype):
    """C wanted in other copies than the work is cut: one rank does not fetch what another has made."""

    def body(mesh, patch):
        A, B = some(mesh, (7, 12), dtype, "P('i:bounds(0,2,7)', 'j')"), some(mesh, (12, 5), dtype, "P('i', 'j')")
        out = DistMatrix.empty((7, 5), mesh, "P(None, None)", dtype)
        out.tile[...] = np.nan if out.dtype.kind in "fc" else 1
        with rma_mm.plan(A, B, mesh, layout=out.layout, algorithm="summa_c:pull") as plan:
            drop(plan, 2, lambda op: isinstance(op, Copy) and op.dst.buffer == "C")
            plan.execute(A, B, out)

    says = "not what its owner holds" if dtype == "int32" else "on rank 2 was not written"
    check_found(comm, body, says)


@parallel(ranks=(4,), env=("nolocal",))
def test_a_slot_read_after_its_content_is_over(comm):
    """A fetch is forgotten, and what the frame held last is right by chance."""

    def body(mesh, patch):
        A, B, again = some(mesh), some(mesh, (11, 9)), some(mesh)
        with rma_mm.plan(A, B, mesh, algorithm="stationary_c") as plan:
            first = plan.execute(A, B).to_numpy()
            drop(plan, 1, lambda op: isinstance(op, Copy) and isinstance(op.dst.buffer, Slot))
            assert np.array_equal(plan.execute(again, B).to_numpy(), first)

    check_found(comm, body, r"stationary_c of float64 13 x 11 .* rank 1 .* or made of scratch that was not filled")


@parallel(ranks=(4,), env=BOTH)
def test_a_get_that_is_over_before_it_has_moved_anything(comm):
    """The place still holds the same elements from the product before."""

    def body(mesh, patch):
        A, B = some(mesh, layout="i,j"), some(mesh, (11, 9), layout="i,j")
        with rma_mm.plan(A, B, mesh, algorithm="summa_c:pull", layout="i,j") as plan:
            first = plan.execute(A, B).to_numpy()
            kind = transfers.MpiTransfer if mesh.num_nodes > 1 else CopyTransfer
            if mesh.rank == 3:
                patch.setattr(kind, "start", lambda self: None)
            assert np.array_equal(plan.execute(A, B).tile, first[plan._c().region.selector()])

    with switched("0"), Mesh((2, 2), comm) as mesh:
        if mesh.num_nodes == 1:  # what a node-mate holds is read in place, but for what is redistributed
            return check_found(comm, moved_again, r"C@1\[.* elements that came from rank \d are not what it holds")
    return check_found(comm, body, r"A@\d.* elements that came from rank \d are not what it holds: position")


def moved_again(mesh, patch):
    A = some(mesh, layout="i,j")
    made = DistMatrix.empty(A.shape, mesh, "j,i", A.dtype)
    for _ in range(2):
        transport.move(A, made.layout, made.tile, made.block)
        if mesh.rank == 1:
            patch.setattr(CopyTransfer, "start", lambda self: None)
    assert made.tile.tolist() == np.array(made.tile).tolist()


@parallel(ranks=(4,), env=("node",))
def test_a_get_that_moves_other_bytes(comm):
    """Strides that are wrong by one row."""

    def body(mesh, patch):
        true = reach.paired_views
        if mesh.rank == 2:
            patch.setattr(
                reach, "paired_views", lambda *boxes: [(to, source[::-1]) for to, source in true(*boxes)]
            )
        some(mesh, layout="i,j").redistribute("j,i")

    check_found(comm, body, r"C@2\[.*\] := A@\d\[.*of \d+ elements that came from rank \d are not what it holds")


@parallel(ranks=(4,), env=BOTH)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_an_accumulate_that_is_lost(comm, dtype):
    def body(mesh, patch):
        A, B = some(mesh, dtype=dtype), some(mesh, (11, 9), dtype)
        true = transfers.MpiTransfer.start
        with rma_mm.plan(A, B, mesh, algorithm="stationary_a", layout="i,j") as plan:
            assert any(isinstance(op, Accumulate) for op in plan.schedule.program(1))
            if mesh.rank == 1:
                patch.setattr(transfers.MpiTransfer, "start", lambda self: None if self.op else true(self))
            plan.execute(A, B)

    check_found(comm, body, r"elements of C on rank \d are not what was added up.*what ranks \[.*1.*\] added")


def spoiled(where: Callable[[Mesh], bool], spoil: Callable[[np.ndarray], None]) -> Callable[..., None]:
    """An execution that leaves something else in C."""
    true = Plan._run

    def run(plan, *given):
        true(plan, *given)
        if where(plan.mesh):
            tile = next(iter(plan.prepared.bound.values())).memory.result
            spoil(tile)

    return run


def next_float(tile):
    tile[0, 0] = np.nextafter(tile[0, 0], np.inf)


@parallel(ranks=(4,), env=("node",))
def test_replicas_of_c_that_differ_by_a_bit(comm):
    def body(mesh, patch):
        patch.setattr(Plan, "_run", spoiled(lambda mesh: mesh.rank == 3, next_float))
        rma_mm.matmul(some(mesh), some(mesh, (11, 9)), mesh, layout="i,*")

    check_found(comm, body, r"C\[6, 0\] on rank 3 is .* not what its owner holds")


@parallel(ranks=(2,), env=("node",))
def test_an_element_of_c_that_is_wrong_everywhere(comm):
    bias = Epilogue(bias=np.arange(9.0), per="column", activation="relu")
    cases = [
        ("float32", {"alpha": -2}), ("float64", {"beta": 3}), ("bfloat16", {}), ("complex128", {"conjugate_b": True}),
        ("int16", {"alpha": 3, "beta": 2}), ("uint64", {}), ("float64", {"semiring": "min_plus"}),
        ("int32", {"semiring": "max_plus"}), ("float64", {"epilogue": bias}),
    ]

    def spoil(tile):
        tile[0, 0] += 64

    for dtype, options in cases:

        def body(mesh, patch, dtype=dtype, options=options):
            A, B, out = some(mesh, dtype="f4"), some(mesh, (11, 9), "f4"), some(mesh, (13, 9), "f4", seed=1)
            A, B, out = (DistMatrix.from_numpy(x.to_numpy().astype(parse_dtype(dtype)), mesh)
                         for x in (A, B, out))
            rma_mm.matmul(A, B, mesh, out=out, **options)
            patch.setattr(Plan, "_run", spoiled(lambda _: True, spoil))
            rma_mm.matmul(A, B, mesh, out=out, **options)

        check_found(comm, body, "C is wrong, computed again", (2,))


@parallel(ranks=(4,), env=BOTH)
@pytest.mark.parametrize(
    ("source", "target"), [("i,j", "*,j"), ("j,*", "i,j"), ("i,*,j=sum", "j,i"), ("i,j", "i,*,j=sum")]
)
def test_a_redistribution_that_leaves_a_part_out(comm, source, target):
    def body(mesh, patch):
        A = some(mesh, layout="i,j").redistribute(source)
        true = transport.redistribution

        def faulty(*given):
            schedule = true(*given)
            program = schedule.program
            return replace(schedule, program=lambda rank: program(rank)[: -1 if rank == 2 else None])

        patch.setattr(transport, "redistribution", faulty)
        patch.setattr(transport, "prove_once", lambda *_: None)  # which would find it before it runs
        A.redistribute(target)

    check_found(comm, body, r"redistribution of float64 13 x 11 in .*the result\[\d+, \d+\] on rank 2 is nan")


@parallel(ranks=(4,), env=BOTH)
def test_replicas_of_a_source_that_differ(comm):
    def body(mesh, patch):
        A = some(mesh, layout="i,*")
        if mesh.rank == 1:
            next_float(A.tile)
        A.redistribute("*,i")

    check_found(comm, body, r"the source\[0, 0\] on rank 1 is")


@parallel(ranks=(3,), env=BOTH)
@pytest.mark.parametrize("flavour", ["shared", "ucx", "ucx_arrays"])
@pytest.mark.parametrize("case", ["case_get_patches", "case_accumulate_concurrently", "case_counters"])
def test_checked_windows_are_windows(comm, case, flavour):
    """They do, and count, what others do, and find nothing where nothing is wrong."""
    checks = Checks()
    world = MpiWorld(comm, flavour)
    world.open = lambda nbytes, chunk_bytes=None: open_window(
        flavour, comm, nbytes, node_of=world.node_of, chunk_bytes=chunk_bytes, checks=checks
    )
    getattr(WindowConformance(), case)(world)
    if case != "case_counters":  # there ranks read what others add to
        assert checks.findings == []


@parallel(ranks=(2,), env=("node",))
def test_the_switch_is_one_for_all_ranks(comm):
    with switched("yes"), pytest.raises(OptionError, match="RMA_MM_CHECK: got 'yes'"):
        Mesh((2,), comm)
    with switched(str(comm.rank)), pytest.raises(DisagreementError, match="RMA_MM_CHECK: '0' on rank 0"):
        Mesh((2,), comm)
