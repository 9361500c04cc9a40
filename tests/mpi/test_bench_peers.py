"""`bench.peers` finds right results, tells wrong ones, skips by name, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest

from bench.peers.__main__ import main
from bench.peers.cases import CASES, Case, grid_of, received
from bench.peers.contest import batches
from bench.peers.jobs import free_port
from bench.peers.operands import Piece, uncovered, whole, wrong_rows
from bench.peers.registry import NUMPY, PEERS, RMA_MM, Peer
from bench.peers.report import met
from bench.peers.systems import OverMPI
from bench.peers.systems.solo import Solo
from bench.processes import kill_marked, marked
from tests.processes import ROOT
from tests.thorough import nightly, usually

pytestmark = nightly

HERE = "tests.mpi.test_bench_peers"
TEXTBOOK = ["Cannon", "SUMMA", "2.5-D", "3-D"]


class Wrong(Solo):
    """NumPy's product with one element changed."""

    def multiply(self):
        super().multiply()
        self.c[3, 5] += 1


class LaterWrong(Solo):
    """The first product is right."""

    count = 0

    def multiply(self):
        super().multiply()
        self.count += 1
        self.c[0, 0] += self.count > 1


class Failing(OverMPI):
    """One rank raises while the other waits for it."""

    def __init__(self, task):
        super().__init__(task)
        self.facts = {}

    def multiply(self):
        if self.rank == 1:
            raise ValueError("no more\nsecond line")
        self.comm.Barrier()


class Silent(Solo):
    """Never done."""

    def multiply(self):
        time.sleep(1000)


def run(tmp_path, *arguments, rounds=2):
    """The exit code and the records of a run in this process."""
    file = tmp_path / "peers.json"
    code = main([*arguments, "--rounds", str(rounds), "--json", str(file)])
    return code, json.loads(file.read_text())["results"]


def test_right_results(tmp_path, capsys):
    """Everything that needs only this environment; the table, the JSON and the Markdown agree."""
    names = [RMA_MM, NUMPY, *TEXTBOOK]
    page = tmp_path / "table.md"
    code, (two, four) = run(
        tmp_path, "--case", "48,40,56", "--ranks", "2", "4", "--peers", *names, "--markdown", str(page)
    )
    assert code == 0
    assert set(two["skipped"]) == {"Cannon", "2.5-D"}
    assert set(four["skipped"]) == {"2.5-D"}
    assert two["skipped"]["Cannon"] == "needs a square number of ranks, not 2"
    for record in (two, four):
        assert record["shape"] == [48, 40, 56]
        assert set(record["peers"]) == set(names) - set(record["skipped"])
        ours = record["peers"][RMA_MM]
        for found in record["peers"].values():
            assert found["error"] is None
            assert len(found["samples"]) == 2
            assert found["ratio"] == pytest.approx(ours["seconds"] / found["seconds"])
        others = {name: found["seconds"] for name, found in record["peers"].items() if name in TEXTBOOK}
        assert record["best"] == min(others, key=others.get)
        assert record["share"] == pytest.approx(record["peers"][NUMPY]["seconds"] / ours["seconds"])
        assert ours["products"] > 1, "a product of 0.2 Mflop takes less than a sample should"
    shown = capsys.readouterr().out
    assert "Cannon skipped, needs a square number of ranks, not 2 (48x40x56 on 2)" in shown
    assert f"{two['ratio']:.3f}" in shown
    assert f"| {two['best']} | {two['ratio']:.3f} |" in page.read_text()


@pytest.mark.parametrize(("shape", "ranks"), [("40,3,2", 4), ("13,11,17,float64", 8), ("4,2,40", 9)])
def test_textbook_on_uneven_blocks(tmp_path, shape, ranks):
    code, (record,) = run(tmp_path, "--case", shape, "--ranks", str(ranks), "--peers", *TEXTBOOK, rounds=1)
    assert code == 0
    assert {name: found["error"] for name, found in record["peers"].items()} == dict.fromkeys(
        [name for name in TEXTBOOK if PEERS[name].unfit(ranks) is None]
    )
    assert ("2.5-D" in record["peers"]) == (ranks == 8)


@pytest.mark.parametrize("target", usually(1, ["LaterWrong", "Wrong"]))
def test_a_wrong_result_is_reported(tmp_path, monkeypatch, capsys, target):
    monkeypatch.setitem(PEERS, "liar", Peer("liar", f"{HERE}:{target}", "one"))
    code, (record,) = run(tmp_path, "--case", "24,32,16", "--ranks", "2", "--peers", NUMPY, "liar", RMA_MM)
    assert code == 0
    assert record["peers"]["liar"]["error"] == "WRONG RESULT: 1 rows of parts of C are wrong"
    assert record["peers"]["liar"]["seconds"] is None
    assert record["peers"]["liar"]["samples"] == []
    assert record["best"] is None
    assert record["peers"][RMA_MM]["seconds"] > 0
    assert "liar FAILED: WRONG RESULT" in capsys.readouterr().out


def test_a_wrong_result_of_ours_decides_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setitem(PEERS, RMA_MM, replace(PEERS[RMA_MM], target=f"{HERE}:Wrong", start="one"))
    code, _ = run(tmp_path, "--case", "24,32,16", "--ranks", "2", "--peers", RMA_MM)
    assert code == 4


def test_failures_do_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(PEERS, "failing", Peer("failing", f"{HERE}:Failing", "mpi"))
    monkeypatch.setitem(PEERS, "silent", Peer("silent", f"{HERE}:Silent", "one"))
    absent = Peer("absent", "nowhere:None", "one", modules=("no_such_module",), install="pip install it")
    monkeypatch.setitem(PEERS, "absent", absent)
    names = ["failing", "silent", "absent", NUMPY]
    code, (record,) = run(tmp_path, "--case", "8,8,8", "--ranks", "2", "--peers", *names, "--limit", "4")
    assert code == 0
    assert record["skipped"] == {"absent": "not installed (no_such_module): pip install it"}
    assert record["peers"]["failing"]["error"] == "ValueError: no more"
    assert record["peers"]["silent"]["error"] == "no answer within 4 s"
    assert len(record["peers"][NUMPY]["samples"]) == 2


def test_another_launcher(tmp_path):
    """Ranks of a job under it find their coordinator; peers that it cannot start are skipped."""
    prefix = "env MPIR_CVAR_NUM_CLIQUES=2 {mpiexec}"
    names = [RMA_MM, "SUMMA", "DTensor"]
    code, (record,) = run(
        tmp_path, "--case", "24,32,16", "--ranks", "2", "--peers", *names, "--launcher", prefix,
        "--listen", f"127.0.0.1:{free_port()}",
    )
    assert code == 0
    assert record["skipped"] == {"DTensor": "it starts its processes on this host only"}
    assert all(found["seconds"] > 0 for found in record["peers"].values())


def test_ranks_that_cannot_reach_their_coordinator_say_so(tmp_path):
    """The launcher sends them elsewhere."""
    prefix = f"env BENCH_PEERS_ADDRESS={tmp_path}/elsewhere {{mpiexec}}"
    code, (record,) = run(
        tmp_path, "--case", "8,8,8", "--ranks", "2", "--peers", NUMPY, "SUMMA", "--launcher", prefix
    )
    assert code == 0
    assert "nobody answers at" in record["peers"]["SUMMA"]["error"]
    assert record["peers"][NUMPY]["seconds"] > 0


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_coordinator(sent, tmp_path):
    mark = f"BENCH_PEERS_TEST={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    command = ["-m", "bench.peers", "--case", "8,8,8", "--ranks", "2", "--rounds", "10000", "--peers", NUMPY, "SUMMA"]
    environment = os.environ | {name: value, "TMPDIR": str(tmp_path)}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here is ignored there
    try:
        coordinator = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **quiet)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        wait_for(lambda: len(marked(mark.encode())) >= 5)  # itself, NumPy, mpiexec, two ranks
        coordinator.send_signal(sent)
        coordinator.communicate(timeout=30)
        wait_for(lambda: not marked(mark.encode()))
    finally:
        kill_marked(mark.encode())
    assert list(tmp_path.iterdir()) == []
    assert coordinator.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[sent]


def wait_for(condition, seconds=30):
    """Return when a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def test_the_check_finds_one_wrong_element():
    case = Case("small", 20, 30, 70, "float32")
    right = whole("A", case) @ whole("B", case)
    rows, cols = slice(5, 15), slice(10, 30)
    part = right[rows, cols].copy()
    assert wrong_rows(case, Piece(rows, cols, part)) == 0
    part[4, 7] += 1
    part[9, 0] = np.nan
    assert wrong_rows(case, Piece(rows, cols, part)) == 2
    square = Case("square", 16, 16, 16, "float64")
    swapped = whole("B", square) @ whole("A", square)
    assert wrong_rows(square, Piece(slice(0, 16), slice(0, 16), swapped)) == 16


def test_the_check_finds_gaps_and_overlaps():
    case = Case("small", 4, 6, 1)
    assert uncovered(case, [(0, 4, 0, 3), (0, 2, 3, 6), (2, 4, 3, 6), (4, 4, 0, 6)]) is None
    assert uncovered(case, [(0, 4, 0, 3), (0, 2, 3, 6)]) == "18 elements of C are held, not 24"
    assert "overlap" in uncovered(case, [(0, 4, 0, 3), (0, 4, 2, 5)])


def test_grids_move_least():
    assert grid_of(CASES["4096"], 4) == (2, 2, 1)
    assert grid_of(CASES["4096"], 8) == (2, 2, 2)
    assert grid_of(CASES["k-dominant"], 4, k_parts=(1, 4)) == (1, 1, 4)
    assert grid_of(CASES["tall"], 4) == (4, 1, 1)
    assert received(CASES["tall"], (4, 1, 1)) == 512 * 512 * 3 / 4


def test_bars():
    case = Case("x", 1, 1, 1, share=0.9)
    assert met(1.02, 0.9, case) is True
    assert met(1.03, 0.95, case) is False
    assert met(1.0, 0.8, case) is False
    assert met(None, None, case) is None


def test_batches_fit_and_have_the_yardsticks():
    case = CASES["11520x12288x7680"]
    everyone = list(PEERS.values())
    found = list(batches(case, 4, everyone, memory=16 * 2**30))
    assert len(found) > 1
    assert all([peer.name for peer in batch[:2]] == [RMA_MM, NUMPY] for batch in found)
    assert [peer for batch in found for peer in batch[2:]] == everyone[2:]
    assert list(batches(CASES["256"], 2, everyone, memory=16 * 2**30)) == [everyone]


def test_no_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "ratios.png"
    code, _ = run(tmp_path, "--case", "8,8,8", "--ranks", "1", "--peers", NUMPY, "--plot", str(file))
    assert code == 0
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_list_and_earlier_runs(tmp_path, capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*CASES, *PEERS])
    _, results = run(tmp_path, "--case", "8,8,8", "--ranks", "1", "--peers", NUMPY)
    earlier = (tmp_path / "peers.json").rename(tmp_path / "earlier.json")
    assert run(tmp_path, "--add", str(earlier)) == (0, results)


BAD = {"--case": ("4,4", "neither M,N,K"), "--ranks": ("0", "1 or more"), "--peers": ("nobody", "nobody")}


@pytest.mark.parametrize("option", BAD)
def test_bad_arguments(option, capsys):
    value, told = BAD[option]
    with pytest.raises(SystemExit) as raised:
        main([option, value])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err
