"""The words of a command line, and how a process ends, without ranks."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rma_mm import segments
from rma_mm.command import signals
from rma_mm.command.options import run as arguments
from rma_mm.command.options.run import parse
from rma_mm.errors import MachineError, OptionError
from tests.processes import ROOT


def test_defaults() -> None:
    """What README's first command asks for."""
    o = parse([])
    assert (o.files, o.shape, o.dtype, o.alpha, o.beta, o.repeat, o.warmup) == ((), (2048,) * 3, None, 1, 0, 1, None)
    assert o.is_checked
    assert not parse(["A.npy", "B.npy"]).is_checked


@pytest.mark.parametrize(
    ("line", "is_streamed", "untimed"),
    [("", False, 1), ("A.npy B.npy", False, 1), ("A.npy B.npy", True, 0), ("A.npy B.npy -o C.npy", False, 0),
     ("A.npy B.npy -o C.npy --repeat 2", False, 1), ("A.npy B.npy -o C.npy --warmup 2", True, 2),
     ("-o C.npy", False, 0)],
)
def test_who_wants_a_result_does_not_wait_for_another(line: str, is_streamed: bool, untimed: int) -> None:
    assert parse(line.split()).untimed(is_streamed) == untimed


def test_flags_may_stand_between_files() -> None:
    """Anywhere."""
    o = parse(["--mesh", "2x3", "A.npy", "--quiet", "B.npy", "-o", "C.npy", "--transpose-b"])
    assert o.files == ("A.npy", "B.npy")
    assert (o.mesh, o.quiet, o.output, o.transpose_a, o.transpose_b) == ((2, 3), True, "C.npy", False, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1-2j", -1 - 2j), ("-0.5", -0.5), ("-j", -1j), ("2", 2), ("-9007199254740993", -9007199254740993),
     ("(1+2j)", 1 + 2j), ("-inf", float("-inf")), ("1e-3", 1e-3), ("-1e3j", -1e3j)],
)
@pytest.mark.parametrize("form", ["--alpha {}", "--alpha={}", "A.npy --alpha {} B.npy"])
def test_scalars(text: str, value: complex, form: str) -> None:
    """Python literals, negative and complex ones as words of their own; integers stay exact."""
    o = parse(form.format(text).split())
    assert o.alpha == value
    assert type(o.alpha) is type(value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), ("2G", 2**31), ("500MB", 5 * 10**8), ("1.5KiB", 1536), ("1000", 1000), ("1t", 2**40)],
)
def test_sizes(text: str, count: int) -> None:
    """Bytes with a unit, decimal or binary."""
    assert parse(["--memory-limit", text]).memory_limit == count


BAD = {
    "A.npy": "files: got 1 (A.npy); name two",
    "A B C": "files: got 3 (A, B, C)",
    "A B --shape 1,2,3": "--shape: got (1, 2, 3) together with files",
    "--beta 2": "--c C0.npy",
    "--alpha": "--alpha: expected one argument",
    "--alpha x": "got 'x'; needs a Python number",
    "--shape 3": "got '3'; needs three whole numbers",
    "--shape 3,4,-5": "M,N,K",
    "--mesh 2x": "got '2x'; needs one to 6 sizes",
    "--mesh 2x0": "sizes",
    "--mesh 1x1x1x1x1x1x1": "sizes",
    "--dtype float31": "float16, bfloat16, float32",
    "--memory-limit 2XB": "bytes with a unit",
    "--memory-limit -1": "--memory-limit",
    "--repeat 0": "at least 1",
    "--threads 0": "at least 1",
    "--seed -1": "--seed",
    "A B -o C --metrics C": "--metrics: got C, which is the file of --output too",
    "--json x --metrics x": "--metrics: got x, which is the file of --json too",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--mes 2": "unrecognized arguments",
    "-o": "expected one argument",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_arguments(line: str) -> None:
    """One line that names the argument."""
    with pytest.raises(OptionError) as caught:
        parse(line.split())
    assert BAD[line] in str(caught.value)
    assert "usage" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_commands_end_without_a_search_for_reference_cycles() -> None:
    code = (
        "import atexit, gc\n"
        "from rma_mm.launch import on_all_ranks\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"  # called last
        "on_all_ranks(lambda: print(gc.get_freeze_count() > 1000) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_list_and_help_need_nothing_else() -> None:
    """Even with a half-written command line."""
    assert parse(["--list", "A.npy"]).list
    assert parse(["--help"]).help
    text = arguments.parser().format_help()
    for flag in ("--shape", "--memory-limit", "--layout-c", "--dry-run"):
        assert flag in text


def run(*words: str, **variables: str) -> Any:
    """`python -m rma_mm.run` as a process of its own, without a launcher."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_COMM"))}
    return subprocess.run(
        [sys.executable, "-m", "rma_mm.run", *words],
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_an_mpi_library() -> None:
    """The message names the extra."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    done = run("--dry-run", MPI4PY_LIBMPI="/nowhere/libmpi.so", MPI4PY_MPIABI="")
    assert done.returncode == 2
    assert "pip install 'rma_mm[mpich]'" in done.stderr
    assert len(done.stderr.splitlines()) <= 6
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("prefix", ["PMI", "OMPI_COMM_WORLD"])
def test_started_by_another_mpi(prefix: str) -> None:
    """The launcher's environment speaks of three ranks, the library of one; only the launcher's rank 0 says so."""
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    done = [run("--dry-run", **{f"{prefix}_SIZE": "3", f"{prefix}_RANK": rank}) for rank in "02"]
    assert [d.returncode for d in done] == [2, 2]
    assert "it started 3 ranks" in done[0].stderr
    assert "mpiexec" in done[0].stderr
    assert len(done[0].stderr.splitlines()) <= 6
    assert done[1].stderr == done[0].stdout == done[1].stdout == ""


WATCHED = """
import ctypes, os, sys
from rma_mm.command.signals import Interruption

class Alone:
    rank = 0
    def allgather(self, item):
        return [item]

open("unfinished", "w").close()
with Interruption() as interruption:
    interruption.enlist(Alone())
    interruption.unfinished, interruption.losing = "unfinished", "C.npy"
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never comes back to Python
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_inside_a_long_call(number: signal.Signals, tmp_path: Any) -> None:
    """The thread ends the process, and takes the unfinished file with it."""
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert f"interrupted by {number.name}; C.npy was not written" in errors
    assert not (tmp_path / "unfinished").exists()


LARGE = [
    "--memory-limit=1" + "0" * 400, "--memory-limit=1e400", "--repeat=1" + "0" * 5000, "--threads=" + "9" * 30,
    "--mesh=2x" + "9" * 40, "--shape=1," + "9" * 5000 + ",1", f"--shape=0,0,{2**60}", f"--shape=1,{2**40},{2**40}",
    "--alpha=1" + "0" * 400, "--seed=" + "9" * 5000, "--kernel" + "x" * 100_000, "--semiring=" + "x" * 100_000,
]


@pytest.mark.parametrize("word", LARGE, ids=range(len(LARGE)))
def test_sizes_are_bounded(word: str) -> None:
    """One short message, whatever the number; what it repeats of it is cut."""
    with pytest.raises(OptionError) as caught:
        parse([word])
    assert len(str(caught.value)) < 400


LINES = ["a b -o r --json ./r", "a b --json a", "--json r --trace r", "-o r --picture x/../r", "a a -o a --json r"]


@pytest.mark.parametrize("line", LINES)
def test_reports_have_names_of_their_own(line: str) -> None:
    """Else they would be written over the result, an operand or each other."""
    with pytest.raises(OptionError, match=r"is the file of .* too; name another"):
        parse(line.split())


def test_segments_of_dead_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are named where a message speaks of /dev/shm: this user's, old, and mapped by nobody."""
    monkeypatch.setattr(segments, "SEGMENTS", f"{tmp_path}/")
    monkeypatch.setattr(signals, "SEGMENTS", f"{tmp_path}/")
    monkeypatch.setattr(segments, "PREFIXES", (f"{tmp_path}/mpich",))
    for name in ("mpich_shm_1_0", "mpich_new", "mpich_used", "other"):
        (tmp_path / name).write_bytes(b"x" * 4096)
        os.utime(tmp_path / name, (0, 0) if name != "mpich_new" else None)
    with open(tmp_path / "mpich_used", "rb") as file, mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ) as memory:
        assert memory[0] == ord("x")
        os.utime(tmp_path / "mpich_used", (0, 0))
        assert segments.stray_segments() == [f"{tmp_path}/mpich_shm_1_0"]
        said = signals.cleaning(f"too little of {tmp_path}")
    assert "4096 bytes" in said and f"rm {tmp_path}/mpich_shm_1_0" in said
    assert signals.cleaning("something else") == ""


@pytest.mark.parametrize("kind", ["device", "fifo", "large", "folder"])
def test_what_is_no_machine_file_is_refused_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --machine and by RMA_MM_MACHINE alike."""
    from rma_mm.policy.model.machine_file import read_machine
    from rma_mm.runtime.calibration.lookup import _named

    file = tmp_path / "machine.json"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "large":
        file.write_bytes(b" " * (2**22 + 1))
    name = {"device": "/dev/zero", "folder": str(tmp_path)}.get(kind, str(file))
    for read in (read_machine, _named):
        with pytest.raises(MachineError, match=r"cannot be read: (it is not a regular file|it has more|Is a dir)"):
            read(name)
