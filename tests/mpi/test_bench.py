"""The benchmarks run, find right results and write what they measured; whether a bar is met is for quiet machines."""

import json
import subprocess
import sys

import pytest
from llvmlite import binding

from bench import kernels
from rma_mm.policy.planner.candidates import SYMMETRIC
from tests.processes import ROOT, mpirun
from tests.thorough import nightly

pytestmark = nightly

MACHINE = {"cpu", "cores", "load", "date", "python", "numpy", "blas", "mpi4py", "rma_mm"}
RANKS_TOO = MACHINE | {"mpi", "ranks", "hosts", "window"}


def report(tmp_path, name, *arguments, ranks=2):
    """The JSON of `bench.name`, run on a few ranks with tiny sizes."""
    file = tmp_path / "report.json"
    done = mpirun(ranks, ["-m", f"bench.{name}", *arguments, "--json", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["bench"] == name
    assert set(found["machine"]) >= RANKS_TOO
    assert done.stdout.startswith(f"bench.{name} on cpu ")
    return found


def test_square(tmp_path):
    found = report(tmp_path, "square", "--size", "64", "--repeat", "2", "--dtype", "float32")
    (result,) = found["results"]
    assert result["right"] is True
    assert result["bar"] == 0.97
    assert found["machine"]["mesh"] == "2x1"
    assert {"ratio", "ratio_out", "ratio_strict", "gflops", "seconds", "resting_share", "met"} <= set(result)
    assert {name: len(samples) for name, samples in result["samples"].items()} == {
        "numpy": 2,
        "rma_mm": 2,
        "numpy, out": 2,
        "rma_mm, out": 2,
    }


def test_overhead(tmp_path):
    found = report(tmp_path, "overhead", "--size", "32", "--repeat", "1", "--growth", "20")
    assert found["right"] is True
    assert {"us", "overhead_us", "matmul_us", "bar_us", "met", "samples_us"} == set(found["overhead"])
    calls = {"execute", "matmul, out", "matmul"}
    assert calls | {"multiply, free", "multiply, together"} == set(found["overhead"]["us"])
    grew = found["growth"]["grew"]
    assert {"rss", "mappings", "descriptors", "objects", "slabs", "windows", "blocks"} == set(grew)
    assert (grew["slabs"], grew["windows"], grew["blocks"]) == (0, 0, 0)


def test_gram(tmp_path):
    """Words are exact, and no other program can disturb them."""
    found = report(tmp_path, "gram", "--size", "512", "--dtype", "float64", "--relations", "300,64", "--repeat", "2")
    (result,) = found["results"]
    assert result["right"] and found["relations"]["right"]
    assert {each["row"]: each["of_closed_form"] <= 1.05 for each in found["named"]} == dict.fromkeys(SYMMETRIC, True)
    assert all(each["right"] and each["met"] for each in found["named"])
    assert {"ratio", "general_ms", "gram_ms", "row", "met"} <= set(result)


def test_words(tmp_path):
    """The one bar that no other program can disturb: counts are exact."""
    few = ("--windows", "shared", "created", "--algorithms", "stationary_c", "srumma", "queue", "--mesh", "2x1")
    found = report(tmp_path, "words", *few)
    assert found["met"] is True
    assert all(result["met"] and result["words"] == result["interpreted"] for result in found["results"])
    assert any(result["closed_form"] for result in found["results"])
    assert {result["algorithm"] for result in found["results"]} >= {"stationary_c", "srumma", "queue"}


def test_memory(tmp_path):
    small = ("--size", "64", "--calls", "20", "--windows", "shared", "created", "--algorithms", "stationary_c", "queue")
    found = report(tmp_path, "memory", *small)
    assert [peak["right"] for peak in found["peaks"]] == [True] * 4
    keys = {"peak_bytes", "own_peak_bytes", "private", "shared", "held", "fullest", "held_together", "left", "met"}
    assert all(keys <= set(peak) for peak in found["peaks"])
    for growth in found["growth"].values():
        assert (growth["grew"]["slabs"], growth["grew"]["windows"]) == (0, 0)


@pytest.mark.parametrize("arguments", [("bench.start", "--repeat", "1", "--json"), ("bench",)])
def test_single_process(tmp_path, arguments):
    file = [str(tmp_path / "report.json")] if "--json" in arguments else []
    done = subprocess.run(
        [sys.executable, "-m", *arguments, *file], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    if not file:
        assert all(f"bench.{name}" in done.stdout for name in ("square", "overhead", "words", "memory", "start"))
        return
    found = json.loads((tmp_path / "report.json").read_text())
    assert set(found["machine"]) == MACHINE
    assert [result["numba"] for result in found["results"]] == ["not loaded"] * 3
    commands = {command["ranks"]: command for command in found["commands"]}
    assert set(commands) == {2, 4}
    assert all(each["seconds"] == pytest.approx(each["product"] - each["start"]) for each in commands.values())


def test_disk(tmp_path):
    """Files of a format that needs no package; in memory none is cold."""
    file, sizes = tmp_path / "report.json", ("--size", "200", "--tall", "900", "--formats", "npy", "safetensors")
    line = [sys.executable, "-m", "bench.disk", *sizes, "--only", "square", "gram", "--repeat", "1"]
    subprocess.run([*line, "--folder", tmp_path, "--json", file], cwd=ROOT, check=True, timeout=120)
    found = json.loads(file.read_text())["results"]
    assert all(each["right"] for each in found)
    streamed = [each for each in found if each["system"] == "rma_mm"]
    assert {(each["product"], each["kind"]) for each in streamed} == {
        ("square", "npy"), ("square", "safetensors"), ("gram", "npy"),
    }
    assert all(each["samples"][0]["read"] > 0 and each["held"] > 0 for each in streamed)
    assert not list(tmp_path.glob("bench-disk-*"))


def test_uneven(tmp_path):
    found = report(tmp_path, "uneven", "--shape", "300,280,64", "--repeat", "1", ranks=3)
    assert set(found["results"]) == {"auto", "even", "even auto", "weighted", "queue", "data_parallel"}
    assert found["results"]["even"]["share"] < 0.35
    assert all(result["of ideal"] > 0 for result in found["results"].values())


def test_orientations(tmp_path):
    found = report(tmp_path, "orientations", "--shape", "60,50,70", "--repeat", "1", ranks=4)
    each = found["results"]
    names = ("auto", "summa_c", "summa_b", "cannon")
    assert set(each) == {f"{name} {way}" for name in names for way in ("NN", "TN", "NT", "TT")}
    assert each["summa_b TN"]["words"] < each["summa_b NN"]["words"] < each["summa_b NT"]["words"]


def test_kernels(tmp_path, monkeypatch, capsys):
    file = tmp_path / "report.json"
    assert kernels.main(["--kind", "float32", "--shape", "64³", "--repeat", "1", "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["right"] and result["gflops"]["numba"] > 0
    has = dict(binding.get_host_cpu_features()) | {"avx512f": False}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: has)
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--set", "avx512"])
    assert "avx512: this processor has no avx512f" in capsys.readouterr().err
