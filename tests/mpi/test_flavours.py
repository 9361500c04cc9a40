"""Flavours of windows that are defined here: all that the package does, it does on them too."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.command.options.run import parser
from rma_mm.errors import (
    AbsentError,
    AlgorithmError,
    CheckError,
    DisagreementError,
    DtypeError,
    MemoryLimitError,
    WindowError,
)
from rma_mm.flavours import ALLOCATED, CREATED, DEFAULT, FLAVOURS, Flavour, register
from rma_mm.geometry.span import Region, Span
from rma_mm.policy.model.machine import TYPICAL, Cost
from rma_mm.runtime.calibration.measure import measure
from rma_mm.runtime.verification.check import verify
from rma_mm.windows import absent, open_window, shared, waiting
from rma_mm.windows.allocated import AllocatedWindow
from rma_mm.windows.checks.checked import SWITCH
from rma_mm.windows.created import CreatedWindow
from rma_mm.windows.progress import can_help
from rma_mm.windows.ranks import node_map
from rma_mm.windows.shared import SharedWindow
from tests.cabinet import CABINET, Errand
from tests.conformance import conform
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_windows import MpiWorld
from tests.thorough import usually

maker = import_module("rma_mm.runtime.products.make_plan")


class ParcelWindow(AllocatedWindow):
    """Memory that only MPI reaches."""

    flavour = "parcel"


class CommonWindow(SharedWindow):
    """Memory that ranks of a node have in common."""

    flavour = "common"


class LentWindow(CreatedWindow):
    """Memory that Python allocates, or the caller's own."""

    flavour = "lent"


PARCEL = Flavour(name="parcel", window=f"{__name__}:ParcelWindow", like=CREATED)
COMMON = Flavour(
    name="common", window=f"{__name__}:CommonWindow", loads_on_node=True, packed_by_mpi=False, when_too_small=PARCEL
)
LENT = Flavour(name="lent", window=f"{__name__}:LentWindow", takes_arrays=True)
OURS = (PARCEL, COMMON, LENT, CABINET)
BUILT_IN = tuple(FLAVOURS)


@contextmanager
def registered(*flavours: Flavour) -> Iterator[None]:
    """While these flavours are known."""
    known = dict(FLAVOURS)
    try:
        for flavour in flavours:
            register(flavour)
        yield
    finally:
        FLAVOURS.clear()
        FLAVOURS.update(known)


@contextmanager
def only_mpis() -> Iterator[None]:
    """While no windows but those of MPI are known."""
    with registered():
        for name in [name for name, flavour in FLAVOURS.items() if flavour.library != "MPI"]:
            del FLAVOURS[name]
        yield


def refused(comm: MPI.Intracomm, kind: type[Exception], window: str, *words: str) -> None:
    """No mesh is made on such windows: one error on all ranks, whose message holds `words`."""
    with pytest.raises(kind) as caught:
        Mesh((comm.size,), comm, window=window)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert all(word in str(caught.value) for word in words), caught.value


@parallel(ranks=(2, 3), env=("cliques",))
@pytest.mark.parametrize("flavour", [CABINET, *usually(1, OURS[:-1])], ids=lambda flavour: flavour.name)
def test_conforms(comm: MPI.Intracomm, flavour: Flavour) -> None:
    with registered(flavour):
        conform(MpiWorld(comm, flavour.name))


@parallel(ranks=(2, 4), env=("cliques",))
@pytest.mark.parametrize("flavour", OURS, ids=lambda flavour: flavour.name)
def test_products(comm: MPI.Intracomm, flavour: Flavour) -> None:
    """Of matrices that were made, brought to other places, and adopted; each is checked."""
    a, b = np.arange(30.0 * 44).reshape(30, 44) % 7, np.arange(44.0 * 26).reshape(44, 26) % 5
    with registered(*OURS), Mesh((2, comm.size // 2), comm, window=flavour.name) as mesh:
        A = DistMatrix.from_numpy(a, mesh, "j, i").redistribute("i, j")
        np.testing.assert_array_equal(A.to_numpy(), a)
        B = DistMatrix.from_local(DistMatrix.from_numpy(b, mesh, "i, j").tile.copy(), b.shape, mesh, "i, j")
        assert A.block.window.flavour == flavour.name
        assert flavour.for_arrays.name == ("lent" if flavour == LENT else "ucx_arrays")
        assert B.block.window.flavour == ("created" if absent(flavour.for_arrays.name) else flavour.for_arrays.name)
        assert (A.in_place, B.in_place) == (flavour.loads_on_node, False)
        for algorithm in ("stationary_c", "stationary_a", "srumma", "summa_c", "summa_c:pull", "queue", "cosma"):
            plan = rma_mm.plan(A, B, mesh, algorithm=algorithm)
            C = plan.execute(A, B)
            np.testing.assert_array_equal(C.to_numpy(), a @ b, err_msg=algorithm)
            assert verify(A, B, C).ok
            assert set(plan.choice.request.in_place) <= ({"A", "B"} if flavour.loads_on_node else set())
            C.tile[:1, :1] += comm.rank == 0
            assert not verify(A, B, C).ok
        assert not mesh.fallbacks or absent("ucx_arrays")


@parallel(ranks=(2,), env=("cliques",))
def test_transfers_of_any_window_are_checked(comm: MPI.Intracomm) -> None:
    a = np.arange(30.0 * 44).reshape(30, 44) % 7
    with pytest.MonkeyPatch.context() as patch, registered(CABINET):
        patch.setenv(SWITCH, "1")
        with Mesh((2,), comm, window="cabinet") as mesh:
            A = DistMatrix.from_numpy(a, mesh, "i, *")
            for algorithm in ("stationary_a", "stationary_c"):
                assert (rma_mm.matmul(A, A.T, mesh, algorithm=algorithm).to_numpy() == a @ a.T).all()
            if comm.rank == 0:
                patch.setattr(Errand, "start", lambda self: None)
            with pytest.raises(CheckError, match="that came from rank 1 are not what it holds"):
                A.redistribute("*, i")


@parallel(ranks=(2,), env=("node",))
def test_what_a_flavour_cannot_add_is_not_pushed(comm: MPI.Intracomm) -> None:
    a = np.arange(30.0 * 44).reshape(30, 44) % 7
    with registered(replace(CABINET, types=("int64",))), Mesh((2,), comm, window="cabinet") as mesh:
        for dtype, is_able in (("float64", False), ("int64", True)):
            A = DistMatrix.from_numpy(a.astype(dtype), mesh, "*, i")
            for algorithm in ("auto", "stationary_c", "stationary_a"):
                if algorithm == "stationary_a" and not is_able:
                    with pytest.raises(AlgorithmError, match="accumulates"):
                        rma_mm.plan(A, A.T, mesh, algorithm=algorithm, layout="i, *")
                    continue
                C = rma_mm.matmul(A, A.T, mesh, algorithm=algorithm, layout="i, *")
                assert (C.to_numpy() == a @ a.T).all()
        with pytest.raises(DtypeError, match="cabinet: cannot accumulate dtype float32 by SUM; use one of int64"):
            A.block.window.accumulate(0, A.block.patch(0, Region.box((0, 1), (0, 1))), np.ones((1, 1), np.float32),
                                      Span.range(0, 1), Span.range(0, 1))


@parallel(ranks=(2,), env=("node",))
def test_windows_are_counted_by_library(comm: MPI.Intracomm) -> None:
    few = replace(CREATED, name="lent", window=LENT.window, at_most=2)
    with registered(few, replace(CABINET, at_most=1)), Mesh((2,), comm, window="cabinet") as mesh:
        kept = [DistMatrix.from_numpy(np.ones((4, 4)), mesh)]
        with pytest.raises(WindowError, match="1 windows are open, of 1 that Python bears"):
            DistMatrix.from_numpy(np.ones((2000, 2000)), mesh)
    with registered(few), Mesh((2,), comm, window="lent") as mesh:
        kept += [DistMatrix.from_local(np.ones((4, 4)), (8, 4), mesh, "i, *") for _ in range(2)]
        with pytest.raises(WindowError, match="2 windows are open, of 2 that MPI bears"):
            DistMatrix.from_local(np.ones((4, 4)), (8, 4), mesh, "i, *")


@parallel(ranks=(2,), env=("node",))
def test_other_libraries_have_progress_while_ranks_wait_and_multiply(comm: MPI.Intracomm) -> None:
    polled = []
    with pytest.MonkeyPatch.context() as patch, registered(PARCEL), Mesh((2,), comm, window="parcel") as mesh:
        patch.setattr(waiting, "POLLERS", list(waiting.POLLERS))
        waiting.add_poller(lambda: polled.append(threading.current_thread().name))
        if comm.rank == 0:
            time.sleep(0.02)
        waiting.barrier(comm)
        assert comm.rank == 0 or set(polled) == {"MainThread"}
        if can_help():
            with mesh.progress:
                mesh.progress.during(lambda: time.sleep(0.05))
            assert "rma_mm progress" in polled


class LostWindow(LentWindow):
    """Memory that cannot be had."""

    flavour = "lost"

    @classmethod
    def absent(cls) -> str:
        return "nobody has it; install it"

    def __init__(self, comm: MPI.Intracomm, memory: object, **options: object) -> None:
        raise AbsentError("lost: nobody has it; install it")


@parallel(ranks=(2,), env=("node",))
def test_what_is_absent_is_refused_by_name_and_else_replaced(comm: MPI.Intracomm, tmp_path: Path) -> None:
    lost = Flavour(
        name="lost", window=f"{__name__}:LostWindow", takes_arrays=True, needs_progress=False, when_too_small=CREATED
    )
    with only_mpis(), registered(lost):
        refused(comm, AbsentError, "lost", "window lost: nobody has it; install it")
        with Mesh((2,), comm) as mesh:
            for _ in range(2):
                D = DistMatrix.from_local(np.ones((4, 8)), (8, 8), mesh, "i, *")
                assert D.block.window.flavour == "created"
            assert (rma_mm.matmul(D, D, mesh).to_numpy() == 8).all()
            says = "window: created in place of lost: lost: nobody has it; install it"
            assert [note for note in mesh.fallbacks if "window" in note] == [says]
            assert mesh.window_flavour == mesh.flavour.name == DEFAULT.name
        assert "lost" not in measure(comm, node_map(comm), threads=1, seconds=0.01, flavours=("lost",)).as_json()
        listed = command(comm, "--list-windows", tmp_path).stdout.splitlines()
        assert [line.split()[0] for line in listed] == list(FLAVOURS)
        assert [line for line in listed if line.endswith("; absent here: nobody has it; install it")] == listed[-1:]


@parallel(ranks=(2,), env=("node",))
def test_arrays_go_through_what_is_quickest_by_measurement(comm: MPI.Intracomm, tmp_path: Path) -> None:
    quick = Flavour(name="lent", window=LENT.window, takes_arrays=True, needs_progress=False)
    with only_mpis(), registered(quick), pytest.MonkeyPatch.context() as patch:
        for late in ("lent", "created", ""):
            betas = {name: 1e-8 if name == late else 1e-10 for name in ("lent", "created") if late}
            busy = {f"{name}.get busy": Cost(1e-6, beta) for name, beta in betas.items()}
            machine = replace(TYPICAL, costs=TYPICAL.costs | {"node": TYPICAL.costs["node"] | busy})
            file = tmp_path / f"{late}.json"
            if comm.rank == 0:
                file.write_text(json.dumps(machine.as_json()))
            comm.Barrier()
            patch.setenv("RMA_MM_MACHINE", str(file))
            with Mesh((2,), comm) as mesh:
                D = DistMatrix.from_local(np.ones((4, 8)), (8, 8), mesh, "i, *")
                assert D.block.window.flavour == ("created" if late == "lent" else "lent")


@parallel(ranks=(2,), env=("node",))
def test_too_little_memory_is_replaced_by_what_the_flavour_says(comm: MPI.Intracomm) -> None:
    x, scarce = np.ones((1500, 1500), np.float32), mock.patch.object(shared, "free_segment_bytes", return_value=2**20)
    with registered(*OURS), Mesh((2,), comm, window="common") as mesh:
        small = DistMatrix.from_numpy(np.eye(8), mesh)
        with scarce:
            for algorithm in ("stationary_a", "queue"):
                plan = rma_mm.plan(x, x, mesh, algorithm=algorithm)
                assert (plan.execute(x, x).to_numpy() == 1500).all()
                assert (plan.choice.request.in_place, plan.node_scratch) == ("", None)
        assert (mesh.window_flavour, mesh.flavour) == ("parcel", COMMON)
        assert [note[: note.index(":", 9)] for note in mesh.fallbacks] == ["window: parcel in place of common"]
        with mock.patch.object(maker, "_new_plan", wraps=maker._new_plan) as choosing:
            assert rma_mm.plan(small, small, mesh).choice.request.in_place == "AB"  # it still lies where it lay
        assert choosing.call_count == 1
    alone = replace(COMMON, when_too_small=None)
    with registered(alone), Mesh((2,), comm, window="common") as mesh, scarce:
        with pytest.raises(MemoryLimitError, match="missing"):
            DistMatrix.from_numpy(x, mesh)
        assert (mesh.flavour, mesh.fallbacks) == (alone, [])


@parallel(ranks=(2,), env=("node",))
@pytest.mark.skipif(not can_help(), reason="MPI was started without THREAD_MULTIPLE")
def test_a_rank_that_multiplies_is_helped_where_the_flavour_needs_it(comm: MPI.Intracomm) -> None:
    quick = replace(PARCEL, needs_progress=False)
    for flavour, is_helped in ((COMMON, True), (quick, False), (DEFAULT, False)):
        before = set(threading.enumerate())  # meshes that other tests left open have theirs
        with registered(*OURS[1:] if flavour == COMMON else [quick]), Mesh((2,), comm, window=flavour.name):
            new = set(threading.enumerate()) - before
            assert any(thread.name == "rma_mm progress" for thread in new) == is_helped


@parallel(ranks=(2,), env=("node",))
def test_ranks_know_the_same_flavours_or_hear_it(comm: MPI.Intracomm) -> None:
    refused(comm, WindowError, "parcel", "parcel", f"there are {', '.join(FLAVOURS)}")
    with registered(PARCEL):
        refused(comm, WindowError, "glass", "glass", ", ".join([*BUILT_IN, "parcel"]))
    with registered(*[PARCEL] * comm.rank):
        refused(comm, DisagreementError, DEFAULT.name, "flavours", "parcel")
    with registered(replace(PARCEL, needs_progress=comm.rank == 0)):
        refused(comm, DisagreementError, "parcel", "flavours")
    with registered(replace(PARCEL, window=ALLOCATED.window)), pytest.raises(WindowError, match="let it say 'parcel'"):
        open_window("parcel", comm, 8)


@parallel(ranks=(2,), env=("node",))
def test_it_is_measured(comm: MPI.Intracomm) -> None:
    with registered(PARCEL):
        machine = measure(comm, node_map(comm), threads=1, seconds=0.01, flavours=("parcel",))
        costs = machine.costs["node"]
        assert {"parcel.get", "parcel.get busy", "parcel.accumulate", "parcel.fetch_add"} <= set(costs)
        assert machine.cost("node", "get", "parcel", busy=True) == costs["parcel.get busy"]


@parallel(ranks=(2,), env=("node",))
def test_commands_know_it(comm: MPI.Intracomm, tmp_path: Path) -> None:
    product = "--shape 40,30,20 --verify --algorithm srumma"
    with registered(PARCEL):
        done = command(comm, f"{product} --window parcel --json -", tmp_path)
        assert done.returncode == 0, done
        assert '"window": "parcel"' in done.stdout
        with mock.patch.dict(os.environ, {"RMA_MM_WINDOW": "glass"}):
            done = command(comm, product, tmp_path)
        assert done.returncode == 2, done
        assert ", ".join([*BUILT_IN, "parcel"]) in done.stderr
        assert f"{', '.join(BUILT_IN)} or parcel" in " ".join(parser().format_help().split())
