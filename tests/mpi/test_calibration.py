"""Calibration on real ranks: figures that make sense and are the same everywhere, what is kept, what users name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm.elements.semiring import find_semiring
from rma_mm.errors import DtypeError, MachineError
from rma_mm.kernels.cache import cache_folder
from rma_mm.kernels.choice.choice import working_once
from rma_mm.policy.model.machine import COLLECTIVES, SCATTERED, TYPICAL, Machine
from rma_mm.policy.planner.candidates import FEW
from rma_mm.runtime.calibration import cache, lookup, machine_of, remember_correction, run_calibration
from rma_mm.runtime.calibration.measure import measure
from rma_mm.runtime.calibration.overlap import Overlap
from rma_mm.runtime.calibration.sampling import scatter, typical
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.products import prices
from rma_mm.windows.ranks import node_map
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import PRETENDED, refused
from tests.processes import ROOT, can_pretend_nodes, job_environment, mpirun
from tests.thorough import nightly, thorough, usually

FLAVOURS = ("shared", "allocated", "created")
FLOAT32 = {"threads": 1, "dtype": "float32", "kernel": "blas"}
QUICK = mock.patch.multiple(lookup, SHORT=0.01, BETWEEN=0.01, KERNEL=0.01)
"""As few rounds as there can be."""


def numbers(found):
    """All numbers of a machine's JSON."""
    if isinstance(found, dict | list):
        return [x for each in (found.values() if isinstance(found, dict) else found) for x in numbers(each)]
    return [found] if isinstance(found, int | float) and not isinstance(found, bool) else []


def check_same(comm, machine):
    """Finite figures, the same on every rank."""
    text = machine.as_json()
    assert all(math.isfinite(x) and x >= 0 for x in numbers(text))
    assert comm.bcast(text) == text
    assert Machine.from_json(text) == machine


def check_link(costs, flavours):
    """Every movement, each of which takes time."""
    for name in [*(f"{flavour}.{move}" for flavour in flavours for move in ("get", "accumulate", "fetch_add"))]:
        assert costs[name].seconds(2**20) > 0
        assert costs[f"{name} busy"].seconds(2**20) > 0
    for name in COLLECTIVES:
        assert costs[name].seconds(2**20) >= costs[name].seconds(2**10) > 0


def check_machine(comm, machine, nodes, flavours, dtypes):
    """What a calibration gives."""
    check_same(comm, machine)
    count = len(set(nodes))
    assert machine.measured
    assert machine.threads == 1 <= machine.cores <= len(os.sched_getaffinity(0))  # fewer where others are at work
    assert machine.costs["own"]["copy"].beta > 0
    if comm.size > count:
        check_link(machine.costs["node"], flavours)
    else:
        assert machine.costs["node"] == {"copy": machine.costs["own"]["copy"]}
    if count > 1:
        check_link(machine.costs["between"], flavours)
        assert all(0 <= cost.hidden <= 1 for cost in machine.costs["between"].values())
    else:
        assert machine.costs["between"] == TYPICAL.costs["between"]
    assert list(machine.kernels) == [f"{dtype} {kernel}" for dtype, kernel in dtypes]
    for kernel in machine.kernels.values():
        assert kernel.seconds(512, 512, 512) > 1.5 * kernel.seconds(256, 256, 256) > 0
    assert 0 < machine.meeting < 1
    assert machine.operation < 1e-3


def segments():
    """Shared memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/" in line or "SYSV" in line for line in lines)


@nightly
@parallel(ranks=(1, 4), env=("node", "cliques"), usual="cliques")
def test_a_short_calibration(comm):
    nodes = node_map(comm)
    comm.Barrier()
    begin = time.perf_counter()
    machine = measure(comm, nodes, threads=1, seconds=1.0)
    print(f"{comm.size} ranks on {len(set(nodes))} nodes: {time.perf_counter() - begin:.2f} s")
    check_machine(comm, machine, nodes, ("shared",), [("float32", "blas")])


@nightly
@parallel(ranks=(4,), env=("node", "cliques"))
def test_nothing_is_left_behind(comm):
    """No thread, and no window: MPI maps something new now and then, but a window at each calibration."""
    nodes, times = node_map(comm), 3
    measure(comm, nodes, threads=1, seconds=0.01)
    threads, mapped = threading.active_count(), segments()
    for _ in range(times):
        measure(comm, nodes, threads=1, seconds=0.01)
    assert threading.active_count() == threads
    assert segments() - mapped < times


@thorough
@parallel(ranks=(3,), env=("cliques",))
def test_all_windows_and_several_types(comm):
    """On two nodes one of these has a rank by itself."""
    nodes, dtypes = node_map(comm), (("float64", "blas"), ("int32", "numpy"), ("complex64", "blas"))
    machine = measure(comm, nodes, threads=1, dtypes=dtypes, seconds=0.01, flavours=FLAVOURS)
    check_machine(comm, machine, nodes, FLAVOURS, dtypes)


@thorough
@parallel(ranks=(2,), env=("node",))
def test_nodes_that_the_caller_makes_up(comm):
    """The node map may be finer than MPI's."""
    machine = measure(comm, (0, 1), threads=1, seconds=0.01, flavours=("created",))
    check_machine(comm, machine, (0, 1), (), [("float32", "blas")])
    assert machine.nodes_per_host == 2
    assert machine.cost("between", "get", "shared") == machine.costs["between"]["created.get"]


@parallel(ranks=(1, 3), env=("node",))
def test_what_cannot_be_multiplied_is_refused_everywhere(comm):
    """Also on ranks that would have rested; and nothing is left behind that would be in the way."""
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(DtypeError):
            measure(comm, node_map(comm), threads=1, dtypes=(("int8", "blas"),))
    assert threading.active_count() == before


# -- what is kept ---------------------------------------------------------------------------------


@contextmanager
def surroundings(comm, **variables) -> Iterator[Path]:
    """A cache of the test's own, and no other variables that choose a machine. Collective."""
    made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    folder = comm.bcast(made.name if made else None)
    changed = {"RMA_MM_CACHE": folder, "RMA_MM_MACHINE": "", **variables}
    with mock.patch.dict(os.environ, changed):
        cache_folder.cache_clear()
        yield Path(folder)
        comm.Barrier()
    cache_folder.cache_clear()
    if made:
        made.cleanup()


@contextmanager
def another(comm) -> Iterator[object]:
    """A communicator that remembers nothing."""
    other = comm.Dup()
    yield other
    other.Free()


def looked_up(comm, may_measure=True, **asked):
    """The machine as a new job would find it, and how often it was measured for that."""
    measuring = mock.patch.object(run_calibration, "run_calibration", wraps=run_calibration.run_calibration)
    with another(comm) as fresh, measuring as survey, QUICK:
        machine = machine_of(fresh, node_map(comm), may_measure=may_measure, **{**FLOAT32, **asked})
        again = machine_of(fresh, node_map(comm), may_measure=may_measure, **{**FLOAT32, **asked})
        assert again is machine
        return machine, survey.call_count


def the_file(comm, folder):
    """The one file of the cache."""
    comm.Barrier()
    [file] = (folder / "machines").iterdir()
    return file


@parallel(ranks=(1, 4), env=("node", "cliques"), usual="cliques")
def test_what_was_measured_is_kept(comm):
    with surroundings(comm) as folder:
        assert looked_up(comm, may_measure=False) == (None, 0)
        machine, count = looked_up(comm)
        assert count == 1
        check_machine(comm, machine, node_map(comm), ("shared",), [("float32", "blas")])
        file = the_file(comm, folder)
        written = file.stat().st_mtime_ns
        for may_measure in (True, False):
            assert looked_up(comm, may_measure) == (machine, 0)
        assert file.stat().st_mtime_ns == written
        kept = json.loads(file.read_text())
        assert kept["key"]["nodes"] == " ".join(map(str, node_map(comm)))
        assert kept["machine"] == machine.as_json()


@nightly
@parallel(ranks=(2,), env=("node",))
def test_what_scattered_is_measured_again_by_the_next_jobs(comm):
    """But not for ever: on some machines rounds always differ. `--explain` says so meanwhile."""
    with surroundings(comm) as folder:
        machine, _ = looked_up(comm)
        assert not machine.is_scattered
        file, counts = the_file(comm, folder), []
        for _ in range(lookup.TRIES + 2):
            comm.Barrier()
            if comm.rank == 0:
                kept = json.loads(file.read_text())
                kept["machine"]["scatter"] = 0.5
                file.write_text(json.dumps(kept))
            comm.Barrier()
            lookup._seen.clear()
            found, count = looked_up(comm)
            counts.append(count)
        assert counts == [1] * (lookup.TRIES - 1) + [0] * 3
        assert found.is_scattered
        with rma_mm.Mesh((2,), comm, threads=1) as mesh:
            a = np.ones((64, 64), np.float32)
            assert "measured while others were at work, its rounds differed by 50%" in rma_mm.plan(a, a, mesh).explain()


def test_rounds_that_differ_are_seen():
    """The first does not count; two that count are too few to tell by."""
    quiet = [np.array([1.0, 2.0, 0.0]) * factor for factor in (9, 1, 1.01, 1.02, 1)]
    loud = [np.array([1.0, 2.0, 0.0]) * factor for factor in (1, 1, 1.8, 1.1, 2.5)]
    assert scatter(quiet) < 0.05 < SCATTERED < scatter(loud)
    assert scatter(loud[:2]) == 0


def test_a_figure_is_that_of_the_quiet_rounds():
    """The first does not count, a stall in one of few changes nothing; a get alone has the mean of its two cases."""
    assert typical(np.array([[9.0], [1], [2], [3], [4], [5]])) == [2]
    assert typical(np.array([[9.0], [7], [2]])) == [2]
    rounds = np.array([[1.0, 9, 9], [1, 1, 1.5], [1, 3, 2.5]])
    for name, seconds in (("shared.get", 2), ("shared.get busy", 2), ("shared.accumulate", 1), ("broadcast", 1)):
        of = SimpleNamespace(name=name, load=(1, 1), size=0)
        assert Overlap.point(of, rounds)[2] == seconds, name


@thorough
def test_the_command_shows_and_forgets(tmp_path):
    variables = {"RMA_MM_CACHE": str(tmp_path / "cache")}
    assert "nothing is kept" in calibrate(1, tmp_path, "--show", **variables).stdout
    calibrate(2, tmp_path, "--seconds", "0.1", "--flavours", "shared", "--threads", "1", **variables)
    folder = tmp_path / "cache" / "machines"
    (folder / "broken.json").write_text('{"key": 3}')
    (folder / "broken.json").chmod(0o600)
    said = calibrate(1, tmp_path, "--show", **variables).stdout
    assert "2 ranks with 1 thread each on 1 node" in said and "float32 blas" in said and "node: shared.get" in said
    assert len(list(folder.glob("*.json"))) == 2
    done = calibrate(2, tmp_path, "--forget", **variables)
    assert (done.returncode, list(folder.glob("*.json"))) == (0, [])
    assert "deleted what was kept of 2 machines" in done.stdout


@nightly
@pytest.mark.parametrize("factor", usually(1, [300, 1 / 300], rest=nightly))
@parallel(ranks=(4,), env=("cliques",))
def test_another_network_is_measured_again(comm, factor):
    """A job on the same ranks whose links are faster, or slower, than what was kept says."""
    with surroundings(comm) as folder:
        machine, _ = looked_up(comm)
        costs = {
            name: replace(cost, alpha=cost.alpha * factor, beta=cost.beta * factor)
            for name, cost in machine.costs["between"].items()
        }
        file = the_file(comm, folder)
        if comm.rank == 0:
            kept = json.loads(file.read_text())
            kept["machine"] = replace(machine, costs={**machine.costs, "between": costs}).as_json()
            file.write_text(json.dumps(kept))
        comm.Barrier()
        assert looked_up(comm)[1] == 0  # this process has measured these nodes
        lookup._seen.clear()
        assert looked_up(comm)[1] == 1


@parallel(ranks=(4,), env=("cliques",))
def test_speeds_that_differ_are_averaged_with_those_of_each_job(comm):
    """A core that was slow while it was measured gets its even share back in time."""
    with surroundings(comm) as folder:
        machine, _ = looked_up(comm)
        file, spread = the_file(comm, folder), []
        for speeds in ((1.6, 1.6, 0.4, 0.4), None, None, None, None):
            comm.Barrier()
            if comm.rank == 0 and speeds:
                kept = json.loads(file.read_text())
                kept["machine"]["speeds"] = speeds
                file.write_text(json.dumps(kept))
            comm.Barrier()
            lookup._seen.clear()
            found, count = looked_up(comm)
            assert (count, replace(found, speeds=())) == (0, replace(machine, speeds=()))
            assert looked_up(comm) == (found, 0)
            assert Machine.from_json(json.loads(file.read_text())["machine"]) == found
            spread.append(max(found.speeds, default=1.0) - min(found.speeds, default=1.0))
        assert spread[0] < 1.1
        assert spread[-1] < 0.5


@parallel(ranks=(2,), env=("node",))
def test_what_is_lacking_is_added(comm):
    """Another type, and other windows; what was known stays as it was."""
    with surroundings(comm) as folder:
        first, _ = looked_up(comm)
        assert looked_up(comm, may_measure=False, dtype="float64") == (first, 0)
        both, count = looked_up(comm, dtype="float64")
        assert count == 1
        assert both.costs == first.costs
        assert (both.scatter, both.cores) == (first.scatter, first.cores)  # which belong to what was measured then
        assert both.kernels["float32 blas"] == first.kernels["float32 blas"]
        assert list(both.kernels) == ["float32 blas", "float64 blas"]
        more, count = looked_up(comm, flavours=("allocated", "shared"))
        assert count == 1
        assert set(more.costs["node"]) - set(first.costs["node"]) == {
            f"allocated.{move}{state}" for move in ("get", "accumulate", "fetch_add") for state in ("", " busy")
        }
        assert more.costs["node"]["shared.get"] == first.costs["node"]["shared.get"]
        assert more.kernels == both.kernels
        assert looked_up(comm, dtype="float64", flavours=("shared", "allocated")) == (more, 0)
        assert the_file(comm, folder).exists()


BROKEN = {
    "truncated": lambda text: text[: len(text) // 2],
    "foreign": lambda text: text.replace('"threads": 1,', '"threads": 7,', 1),
    "negative": lambda text: text.replace('"operation": ', '"operation": -'),
    "no number": lambda text: text.replace('"meeting": ', '"meeting": NaN, "x": '),
    "incomplete": lambda text: text.replace('"reduce-scatter"', '"reduce-gather"'),
}


@thorough
@pytest.mark.parametrize("how", usually(1, BROKEN, rest=nightly))
@parallel(ranks=(2,), env=("node",))
def test_a_broken_file_is_measured_again(comm, how):
    with surroundings(comm) as folder:
        looked_up(comm)
        file = the_file(comm, folder)
        if comm.rank == 0:
            text = file.read_text()
            assert BROKEN[how](text) != text
            file.write_text(BROKEN[how](text))
        comm.Barrier()
        assert looked_up(comm, may_measure=False) == (None, 0)
        machine, count = looked_up(comm)
        assert count == 1
        assert looked_up(comm) == (machine, 0)
        assert the_file(comm, folder) == file


@thorough
@parallel(ranks=(2,), env=("node",))
def test_threads_and_settings_make_other_machines(comm):
    with surroundings(comm) as folder:
        one, _ = looked_up(comm)
        two, count = looked_up(comm, threads=2)
        assert (count, two.threads) == (1, 2)
        with mock.patch.dict(os.environ, {"UCX_TLS": "tcp,self"}):
            assert looked_up(comm, may_measure=False) == (None, 0)
        assert looked_up(comm) == (one, 0)
        comm.Barrier()
        assert len(list((folder / "machines").iterdir())) == 2


@parallel(ranks=(2,), env=("node",))
def test_without_a_place_to_write(comm):
    with surroundings(comm) as folder:
        (folder / "file").touch()
        with mock.patch.dict(os.environ, {"RMA_MM_CACHE": str(folder / "file" / "below")}):
            cache_folder.cache_clear()
            machine, count = looked_up(comm)
            assert count == 1
            check_same(comm, machine)


@parallel(ranks=(2,), env=("node",))
def test_corrections_are_kept(comm):
    nodes = node_map(comm)
    with surroundings(comm):
        machine, _ = looked_up(comm)
        with another(comm) as fresh:
            machine_of(fresh, nodes, may_measure=False, **FLOAT32)
            wrong = {"shift": math.nan, "reduce": -1.0, "broadcast": math.inf}
            remember_correction(fresh, nodes, threads=1, corrections={"accumulate": 1.5, "view": 0.9, **wrong})
            remember_correction(fresh, nodes, threads=1, corrections={"view": 1.1})
            now = machine_of(fresh, nodes, may_measure=False, **FLOAT32)
            assert now.corrections == {"accumulate": 1.5, "view": 1.1}
            assert now.costs == machine.costs
        comm.Barrier()
        assert looked_up(comm) == (now, 0)


@parallel(ranks=(2,), env=("node",))
def test_corrections_fade(comm):
    """Half of each is forgotten in an hour, so that a kind which was late once is tried again."""
    nodes = node_map(comm)
    with surroundings(comm) as folder:
        machine, _ = looked_up(comm)
        with another(comm) as fresh:
            machine_of(fresh, nodes, may_measure=False, **FLOAT32)
            remember_correction(fresh, nodes, threads=1, corrections={"in place": 1.25})
        if comm.rank == 0:
            (file,) = (folder / "machines").glob("*.json")
            before = time.time() - 2.5 * cache.FADES
            os.utime(file, (before, before))
        comm.Barrier()
        now, count = looked_up(comm)
        assert (now.corrections, count) == ({"in place": pytest.approx(1.25**0.25)}, 0)
        assert now.costs == machine.costs


@thorough
@parallel(ranks=(3,), env=("node",))
def test_ranks_of_several_communicators(comm):
    """What a communicator remembers says nothing about others with some of its ranks."""
    with surroundings(comm), QUICK:
        for ranks in ((0, 1), (1, 2), (0, 2)):
            group = comm.group.Incl(ranks)
            if comm.rank in ranks:
                pair = comm.Create_group(group)
                for _ in range(2):
                    check_same(pair, machine_of(pair, (0, 0), may_measure=True, **FLOAT32))
                pair.Free()
            group.Free()


# -- what users name ------------------------------------------------------------------------------


@parallel(ranks=(1, 3), env=("node",))
def test_a_named_machine(comm):
    with surroundings(comm) as folder:
        with mock.patch.dict(os.environ, {"RMA_MM_MACHINE": "typical"}):
            assert looked_up(comm) == (TYPICAL, 0)
        file = folder / "machine.json"
        text = TYPICAL.as_json() | {"name": "mine", "piece": 0.25}
        if comm.rank == 0:
            file.write_text(json.dumps(text))
        comm.Barrier()
        with mock.patch.dict(os.environ, {"RMA_MM_MACHINE": str(file)}):
            machine, count = looked_up(comm, dtype="int8", kernel="numba")
            assert (machine.name, machine.piece, count) == ("mine", 0.25, 0)
            if comm.rank == 0:
                file.write_text(json.dumps(text | {"meeting": -1}))
            comm.Barrier()
            with pytest.raises(MachineError, match="meeting is -1") as caught:
                looked_up(comm)
            assert str(file) in str(caught.value)
            if comm.rank == 0:
                file.write_text(json.dumps(text)[:-20])
            comm.Barrier()
            with pytest.raises(MachineError, match=r"machine\.json"):
                looked_up(comm)
        with (
            mock.patch.dict(os.environ, {"RMA_MM_MACHINE": str(folder / "none")}),
            pytest.raises(MachineError, match=r"none: .*RMA_MM_MACHINE is 'typical'"),
        ):
            looked_up(comm)


@parallel(ranks=(2,), env=("node",))
def test_the_key_says_what_was_measured_on(comm):
    key = cache.key_of(Site.of(comm, node_map(comm), 3))
    assert (key["nodes"], key["ranks_per_node"], key["threads"]) == ("0 0", 2, 3)
    assert comm.bcast(key) == key


# -- the command line -----------------------------------------------------------------------------


def calibrate(ranks, folder, *arguments, **variables):
    """`mpiexec -n ranks python -m rma_mm.calibrate …`, with a cache of its own."""
    variables = {"RMA_MM_CACHE": str(folder / "cache"), **variables}
    return mpirun(ranks, ["-m", "rma_mm.calibrate", *arguments], variables=variables, cwd=folder, timeout=90)


@nightly
@pytest.mark.parametrize("pretended", usually(1, [True, False], rest=nightly))
def test_the_command(tmp_path, pretended):
    if pretended and not can_pretend_nodes():
        pytest.skip("nodes cannot be pretended here")
    arguments = ("--seconds", "0.1", "--flavours", "shared,created", "--threads", "1", "--json", "machine.json")
    done = calibrate(4, tmp_path, *arguments, **(PRETENDED if pretended else {}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    machine = Machine.from_json(json.loads((tmp_path / "machine.json").read_text()))
    assert list(machine.kernels) == [f"{dtype} blas" for dtype in ("float32", "float64", "complex64", "complex128")]
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    links = ["node", "between"] if pretended else ["node"]
    for name in (*COLLECTIVES, "shared.get", "created.accumulate", "shared.fetch_add"):
        assert [link for link, *more in rows if more == [name]] == ["own"] * name.endswith("accumulate") + links
    assert "allocated" not in done.stdout
    assert ("behind a multiply" in done.stdout) == pretended
    assert "readers of one owner" in done.stdout
    assert "as whole products took, and as is kept: " in done.stdout
    [file] = (tmp_path / "cache" / "machines").iterdir()
    assert f"kept in {file}" in done.stdout
    assert json.loads(file.read_text())["machine"] == machine.as_json()


@thorough
def test_code_is_compiled_only_for_products_that_need_it(tmp_path):
    """On a new machine, which is measured for this product: the loops for many rows, and not those for few."""
    variables = {"RMA_MM_CACHE": str(tmp_path), "RMA_MM_MACHINE": ""}
    line = ("-m", "rma_mm.run", "--shape", "200,150,100", "--kernel", "numba")
    done = mpirun(2, line, variables=variables, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "machines").iterdir())) == len(list(tmp_path.rglob("*.o"))) == 1


@thorough
def test_the_machine_is_measured_only_where_that_pays(tmp_path):
    """Not for C of a small product on one node, for which few plans are priced; but where figures are wanted, between
    nodes, and for much work.
    """
    np.save(tmp_path / "A.npy", np.ones((3, 64, 64)))
    np.save(tmp_path / "B.npy", np.ones((64, 64)))
    product = ("--shape", "64,64,64")

    def does(*options, **variables):
        """(whether it measures the machine, whether it prices few plans)"""
        variables |= {"RMA_MM_CACHE": str(tmp_path / "cache"), "RMA_MM_MACHINE": ""}
        line = ("-m", "rma_mm.run", *options, "--output", str(tmp_path / "C.npy"))
        done = mpirun(2, line, variables=variables, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        kept = list((tmp_path / "cache" / "machines").glob("*"))
        for file in kept:
            file.unlink()
        return bool(kept), f"of {len(FEW)} candidates" in done.stdout

    assert does(*product) == (False, True)
    assert does(str(tmp_path / "A.npy"), str(tmp_path / "B.npy")) == (False, False)  # a batch
    for options in (("--explain",), ("--repeat", "2")):
        assert does(*product, *options) == (True, False)
    assert does(*product, MPIR_CVAR_NOLOCAL="1") == (True, False)
    for work, pays in ((prices.MEASURED_FROM - 1, False), (prices.MEASURED_FROM, True), (math.inf, True)):
        with working_once(work):
            assert prices._may_measure(2, (0, 0), "auto", find_semiring("plus_times")) == pays


@nightly
def test_the_command_alone(tmp_path):
    """One process, without mpiexec."""
    environment = job_environment({"RMA_MM_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        [sys.executable, "-m", "rma_mm.calibrate", "--seconds", "0.1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "own      copy" in done.stdout
    assert "float64 blas" in done.stdout


def calibrated(comm, line, where):
    """What the command line ends with on ranks that have started, with a cache of its own."""
    with surroundings(comm):
        return command(comm, line, where, "calibrate")


@parallel(ranks=(2,), env=("node",))
def test_a_plot(comm, tmp_path):
    done = calibrated(comm, "--seconds 0.1 --flavours shared --plot costs.svg", tmp_path)
    if find_spec("matplotlib") is None:
        refused(done, "--plot", "pip install matplotlib")
        return
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = (tmp_path / "costs.svg").read_text()
    assert "<svg" in drawn
    assert "shared.get busy" in drawn or "shared.get" in done.stdout  # text may be drawn as paths


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--seconds 0", ("--seconds", "'0'")),
        ("--seconds nan", ("--seconds",)),
        ("--flavours shared,glass", ("--flavours", "glass", "created")),
        ("--threads 0", ("--threads",)),
        ("--frobnicate", ("--frobnicate",)),
        ("--json", ("--json",)),
    ],
)
@parallel(ranks=(2,), env=("node",))
def test_bad_options(comm, tmp_path, line, words):
    refused(calibrated(comm, line, tmp_path), *words)


@parallel(ranks=(2,), env=("node",))
def test_help(comm, tmp_path):
    done = calibrated(comm, "--help", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(option in done.stdout for option in ("--flavours", "--seconds", "--json", "--plot", "--kernels"))


@nightly
@parallel(ranks=(2,), env=("node",))
def test_files_that_cannot_be_written(comm, tmp_path):
    done = calibrated(comm, "--seconds 0.1 --flavours shared --json no/such/folder.json", tmp_path)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
