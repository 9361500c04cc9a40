"""The command `rma-mm` as people meet it: help, misspelt words, completion, progress, doctor, and odd launches."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import ROOT, find_mpiexec, is_open_mpi, job_environment, mpirun
from tests.thorough import thorough, usually

MODULE = [sys.executable, "-m", "rma_mm"]
COMMANDS = ("run", "calibrate", "simulate", "doctor", "cache", "completion")
HIDDEN = "import sys; sys.modules['mpi4py'] = None; from rma_mm.__main__ import main; sys.exit(main())"
"""The command on a machine without MPI."""


def alone(*words, cwd=None, code=None, **variables):
    command = [sys.executable, "-c", code, *words] if code else [*MODULE, *words]
    return subprocess.run(
        command, cwd=cwd, env=job_environment(variables), capture_output=True, text=True, timeout=100, check=False
    )


# -- help -----------------------------------------------------------------------------------------


LOCALES = {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": ""}
HELPFUL = [
    ["--help"], ["--version"], ["run", "--list"], ["run", "--list-windows"], ["cache", "dir"], ["completion", "bash"],
    *[[name, "--help"] for name in COMMANDS],
]


@pytest.mark.parametrize("words", HELPFUL)
def test_help_needs_no_mpi_and_any_locale(words):
    for variables in LOCALES:
        done = alone(*words, code=HIDDEN, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout and "\x1b" not in done.stdout
        if words[-1] == "--help":
            assert "exit codes:" in done.stdout and "examples:" in done.stdout
            assert max(map(len, done.stdout.splitlines())) <= 100


def test_help_loads_little():
    """By what is imported, as times are not asserted: neither MPI nor Numba nor what reads files."""
    for name in COMMANDS:
        code = (
            "import sys\nfrom rma_mm.command.frame import start\nassert start(sys.argv[1], ['--help']) == 0\n"
            "print([x for x in sys.modules if x.startswith(('mpi4py', 'numba', 'rma_mm.kernels', 'rma_mm.runtime'))],"
            " file=sys.stderr)"
        )
        assert alone(name, code=code).stderr == "[]\n"


def test_help_on_several_ranks_is_printed_once():
    done = mpirun(3, ["-m", "rma_mm", "run", "--help"])
    assert (done.returncode, done.stderr, done.stdout.count("exit codes:")) == (0, "", 1)


def test_earlier_names():
    for words in (["-m", "rma_mm.run"], ["-m", "rma_mm"], ["-m", "rma_mm", "run"]):
        done = mpirun(2, [*words, "--shape", "20,30,40", "--quiet"])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    assert "rma-mm simulate" in subprocess.run(
        [sys.executable, "-m", "rma_mm.simulate", "--help"], capture_output=True, text=True, check=True
    ).stdout


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "says"), [
    (["rum"], "did you mean run?"),
    (["frobnicate"], "use one of run, calibrate"),
    (["run", "--algoritm", "cannon"], "did you mean --algorithm?"),
    (["run", "--algorithm", "canon"], "did you mean cannon?"),
    (["run", "--dtype", "flaot32"], "did you mean float32?"),
    (["run", "--layout-a", "i:cylic(2),j"], "did you mean cyclic?"),
    (["run", "--compress", "zst"], "did you mean zstd?"),
    (["run", "--window", "shard"], "did you mean shared?"),
    (["run", "--kernel", "bals"], "did you mean blas?"),
    (["run", "--semiring", "min_pls"], "did you mean min_plus?"),
    (["cache", "cleen"], "did you mean clean?"),
    (["calibrate", "--secnds", "3"], "did you mean --seconds?"),
    (["doctor", "--jsn"], "did you mean --json?"),
    (["completion", "fish"], "bash"),
    (["run", "--algorithms", "none.py"], "--algorithms: none.py: FileNotFoundError"),
])
def test_a_misspelt_word_gets_the_nearest(words, says):
    done = alone(*words)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) <= 3, done
    assert says in done.stderr, done.stderr


def test_the_folder_of_the_data_is_not_imported_from(tmp_path):
    for name in ("json", "numpy", "dataclasses", "argparse", "socket", "random"):  # what Python loads first is its own
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the data')")
    for words in (["-m", "rma_mm.run"], ["-m", "rma_mm", "run"]):
        done = mpirun(2, [*words, "--shape", "8,8,8", "--quiet"], cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done


OWN = """
import rma_mm
from dataclasses import replace
rma_mm.register(replace(rma_mm.algorithms.find_algorithm("cannon"), name="mine", summary="my own Cannon"))
"""


def test_algorithms_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "empty.py").write_text("x = 1\n")
    listed = alone("run", "--algorithms", "mine.py", "--list", cwd=tmp_path)
    assert "mine " in listed.stdout and "my own Cannon" in listed.stdout
    line = ["-m", "rma_mm", "run", "--algorithms", "mine.py", "--algorithm", "mine", "--shape", "40,40,40"]
    done = mpirun(4, [*line, "--json", "-"], cwd=tmp_path)
    assert done.returncode == 0, done
    assert (json.loads(done.stdout)["algorithm"], json.loads(done.stdout)["verified"]) == ("mine", True)
    done = mpirun(4, [*line[:4], "empty.py"], cwd=tmp_path)
    assert done.returncode == 2 and "registers none" in done.stderr and len(done.stderr.splitlines()) == 1


def test_standard_output_closed_or_full():
    for words in (["run", "--help"], ["doctor"], ["completion", "bash"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*MODULE, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1 and done.stderr.splitlines() == ["rma_mm: standard output: No space left on device"]
        line = f"{' '.join([*MODULE, *words])} >&-"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
        assert "Traceback" not in done.stderr


# -- completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "wanted"), [
    (["rma-mm", "ca"], {"calibrate", "cache"}),
    (["rma-mm", "run", "--algori"], {"--algorithm", "--algorithms"}),
    (["rma-mm", "run", "--progress", ""], {"auto", "bar", "lines", "off"}),
    (["rma-mm", "cache", "c"], {"clean"}),
    (["rma-mm", "simulate", "--wea"], {"--weak"}),
    (["rma-mm", "run", "A"], set()),
])
def test_completion_in_bash(words, wanted):
    script = alone("completion", "bash").stdout
    line = " ".join(f"'{word}'" for word in words)
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rma_mm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted and done.stderr == ""


def test_completion_in_zsh():
    if subprocess.run(["sh", "-c", "command -v zsh"], capture_output=True, check=False).returncode:
        pytest.skip("there is no zsh here")
    done = subprocess.run(
        ["zsh", "-fc", f"autoload -Uz compinit && compinit -u -D\n{alone('completion', 'zsh').stdout}"],
        capture_output=True, text=True, check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "words", "kernel"), [
    (1, ["--shape", "1664,1664,1664"], "blas"),
    (2, ["--shape", "512,512,512", "--dtype", "int32", "--kernel", "numpy"], "numpy"),
])
def test_what_is_wanted_once_compiles_nothing(tmp_path, ranks, words, kernel):
    """Where BLAS multiplies it, though it is large enough to compare BLAS with generated code, or a kernel is named."""
    cache = tmp_path / "cache"
    variables = {"RMA_MM_CACHE": str(cache), "RMA_MM_MACHINE": ""}
    done = mpirun(ranks, ["-m", "rma_mm.run", *words, "-o", "C.npy"], cwd=tmp_path, variables=variables)
    assert (done.returncode, done.stderr) == (0, "") and f"kernel {kernel}" in done.stdout
    assert not list(cache.glob("kernels-*/*"))


def test_grids_for_other_semirings_measure_nothing(tmp_path):
    """As plans do: what is measured are products of numbers."""
    cache, words = tmp_path / "cache", ["--shape", "64,64,64", "--semiring", "min_plus", "-o", "C.npy"]
    variables = {"RMA_MM_CACHE": str(cache), "RMA_MM_MACHINE": ""}
    done = mpirun(2, ["-m", "rma_mm.run", *words], cwd=tmp_path, variables=variables)
    assert (done.returncode, done.stderr) == (0, "") and not list(cache.glob("machines/*"))


def test_cache(tmp_path):
    """Only what the package keeps there is deleted."""
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "machines").mkdir(mode=0o700)
    (tmp_path / "machines" / "a.json").write_text("12345")
    folder = str(tmp_path)
    assert alone("cache", "dir", RMA_MM_CACHE=folder).stdout.splitlines()[0] == folder
    done = alone("cache", "clean", RMA_MM_CACHE=folder)
    assert done.returncode == 0 and done.stdout.startswith(f"deleted 1 files, 5 bytes, in {folder}"), done
    assert os.listdir(tmp_path) == ["mine.txt"]


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_alone_and_under_a_launcher(tmp_path):
    done = alone("doctor", cwd=tmp_path)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "note") for line in lines)
    for what in ("MPI library", "launcher", "ranks", "shared memory", "window shared", "memory", "BLAS", "UCX", "cache",
                 "calibration", "load", "extras"):
        assert any(what in line for line in lines), what
    assert "on 2 ranks are right" in done.stdout
    done = mpirun(3, ["-m", "rma_mm", "doctor", "--json", "found.json"], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["faults"] == 0
    found = {each["what"]: each for each in report["findings"]}
    assert "3 ranks on 1 node" in found["ranks"]["found"]
    assert found["window shared"] == {
        "what": "window shared", "state": "ok", "found": "gets and accumulates on 3 ranks are right, memory is shared",
        "remedy": "",
    }


def test_doctor_without_mpi():
    done = alone("doctor", "--json", code=HIDDEN)
    assert (done.returncode, done.stderr) == (1, ""), done
    report = json.loads(done.stdout)
    (fault,) = [each for each in report["findings"] if each["state"] == "fault"]
    assert fault["what"] == "MPI" and "pip install 'rma_mm[mpich]'" in fault["remedy"]
    assert {"memory", "BLAS", "extras"} <= {each["what"] for each in report["findings"]}


@pytest.mark.skipif(is_open_mpi(), reason="MPICH's variables pretend several nodes")
def test_doctor_names_what_is_odd(tmp_path):
    done = mpirun(2, ["-m", "rma_mm", "doctor"], variables={"MPIR_CVAR_NOLOCAL": "1", "RMA_MM_CACHE": "/proc/none"})
    assert "hosts count as several nodes; unset MPIR_CVAR_NOLOCAL" in done.stdout, done
    assert "/proc/none" in done.stdout and "RMA_MM_CACHE" in done.stdout
    tmp_path.chmod(0o777)
    assert "chmod go-w" in alone("doctor", RMA_MM_CACHE=str(tmp_path / "kept")).stdout or os.geteuid()


# -- progress -------------------------------------------------------------------------------------

STAGES = """
import sys, time
from rma_mm.command import progress
progress.FIRST, progress.EVERY, progress.LOOK = 0.2, 0.3, 0.02
made = progress.ProgressReport({mode!r}, {wanted})
with made.stage("reading 3 MiB"):
    time.sleep({seconds})
with made.stage("product 1 of 2", lambda: "4 MiB read") as show:
    for done in range(8):
        time.sleep({seconds} / 5)
        if show: show(done, 8)
made.close()
"""


def staged(mode, wanted=True, seconds=0.5, **variables):
    return alone(code=STAGES.format(mode=mode, wanted=wanted, seconds=seconds), **variables).stderr


def test_lines_of_progress():
    said = staged("lines").splitlines()
    assert said[0].startswith("rma_mm: reading 3 MiB: ")
    assert any(line.startswith("rma_mm: product 1 of 2: ") and "%, " in line and "4 MiB read" in line for line in said)
    for named in (staged(None, RMA_MM_PROGRESS="lines"), staged("auto", RMA_MM_PROGRESS="off")):
        assert named.startswith("rma_mm: reading 3 MiB: ")
    for silent in (staged("off"), staged("lines", False), staged(None), staged("lines", seconds=0.02)):
        assert silent == ""


def test_a_bar_on_a_terminal():
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))  # a bar needs columns
    code = STAGES.format(mode="auto", wanted=True, seconds=0.5)
    with os.fdopen(follower, "wb") as terminal:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, env=job_environment({}), check=True, timeout=60)
        raw = b""
        while select.select([leader], [], [], 0.2)[0]:
            raw += os.read(leader, 10000)
    text = raw.decode()
    os.close(leader)
    assert "reading 3 MiB" in text and "product 1 of 2" in text and "%|" in text and "4 MiB read" in text


def test_the_plan_comes_before_the_product(tmp_path):
    """On standard output at once, and lines of progress on standard error; --quiet has neither."""
    line = [find_mpiexec(), "-n", "2", *MODULE, "run", "--progress", "lines", "--shape", "1500,1500,1500"]
    with open(tmp_path / "err", "w") as err:
        line += ["--repeat", "60"]
        job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=err, text=True, env=job_environment({}))
        begun = time.monotonic()
        assert job.stdout is not None
        first = [job.stdout.readline() for _ in range(3)]
        seconds = time.monotonic() - begun
        rest = job.stdout.read()
        job.stdout.close()
        whole = time.monotonic() - begun
    assert job.wait(60) == 0
    assert [text.split()[0] for text in first] == ["product", "ranks", "algorithm"]
    assert rest.startswith("A ") and "verified   right" in rest
    assert seconds < whole - 0.5
    assert whole < 2 or re.search(r"^rma_mm: [a-z].*: .*\d+ s$", (tmp_path / "err").read_text(), re.MULTILINE)
    done = mpirun(2, [*line[4:-4], "--shape", "9,9,9", "--quiet"])
    assert (done.stdout, done.stderr) == ("", "")


# -- launches -------------------------------------------------------------------------------------

PROGRAM = "import rma_mm\nrma_mm.Mesh()\nprint('no error')\n"


@pytest.mark.parametrize("words", usually(1, [["-m", "rma_mm", "run"], ["product.py"], ["-m", "mpi4py", "product.py"]]))
def test_tasks_of_a_srun_that_mpi_does_not_know(tmp_path, words):
    """As srun sets its variables where MPI was not told: each task would be alone."""
    (tmp_path / "product.py").write_text(PROGRAM)
    for rank in "01":
        environment = job_environment({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": rank, "SLURM_NTASKS": "4"})
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done
        lines = done.stderr.splitlines()
        assert len(lines) == (rank == "0"), done.stderr
        if lines:
            kind = "pmix" if is_open_mpi() else "pmi2"
            assert "srun: it started 4 tasks" in lines[0] and f"srun --mpi={kind} -n 4" in lines[0]


@pytest.mark.skipif(is_open_mpi(), reason="it is MPICH that aborts")
@pytest.mark.parametrize("words", usually(1, [["-m", "rma_mm", "run"], ["product.py"], ["-m", "mpi4py", "product.py"]]))
def test_variables_by_which_mpich_aborts(tmp_path, words):
    (tmp_path / "product.py").write_text(PROGRAM)
    done = mpirun(3, words, cwd=tmp_path, variables={"PMIX_NAMESPACE": "slurm.pmix.1.0"})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert "PMI_SIZE and PMIX_NAMESPACE are both set" in done.stderr and "env -u PMIX_NAMESPACE" in done.stderr


@pytest.mark.skipif(is_open_mpi(), reason="it is MPICH that aborts")
@pytest.mark.parametrize("words", usually(1, [["-m", "rma_mm", "run"], ["product.py"]]))
def test_tasks_of_a_srun_that_speaks_another_protocol(tmp_path, words):
    """As srun --mpi=pmix sets its variables: MPICH from pip knows no PMIx."""
    (tmp_path / "product.py").write_text(PROGRAM)
    pmix = {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "0"}
    environment = job_environment({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", **pmix})
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=60, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert "built without; use srun --mpi=pmi2 -n 4" in done.stderr


SLURM = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SlurmUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
MpiDefault=none
"""
DAEMONS = ("/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A real Slurm of two nodes on this host: where it is installed, and we are root."""
    if os.geteuid() or not all(os.access(path, os.X_OK) for path in DAEMONS):
        pytest.skip("needs root, and the packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    port = 21000 + os.getpid() % 2000 * 3
    text = SLURM.format(host=os.uname().nodename, port=port, first=port + 1, last=port + 2, folder=folder)
    (folder / "slurm.conf").write_text(text)
    environment = job_environment({"SLURM_CONF": str(folder / "slurm.conf")})
    munge = "mkdir -p /run/munge; chown munge: /run/munge; pgrep munged || su -s /bin/sh munge -c /usr/sbin/munged"
    subprocess.run(["sh", "-c", munge], check=False, capture_output=True)
    for command in (["slurmctld", "-c"], ["slurmd", "-N", "n0"], ["slurmd", "-N", "n1"]):
        subprocess.run([f"/usr/sbin/{command[0]}", *command[1:]], env=environment, check=True, capture_output=True)
        time.sleep(1)
    yield environment
    for file in folder.glob("*.pid"):
        subprocess.run(["kill", "-9", file.read_text().strip()], check=False, capture_output=True)


@thorough
def test_launches_under_slurm(slurm, tmp_path):
    """Each is right, or ends with 2 and the remedy within 5 s. PMIx of this Slurm works on one node alone."""
    (tmp_path / "product.py").write_text(PROGRAM.replace("rma_mm.Mesh()", "size = rma_mm.Mesh().size").replace(
        "'no error'", "'ranks', size"))
    run, program = [*MODULE, "run", "--shape", "50,50,50", "--json", "-"], [sys.executable, "product.py"]
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    right, other, kind = (["--mpi=pmix", "-n", "2"], "pmi2", "pmix") if is_open_mpi() else (
        ["--mpi=pmi2", "-n", "4"], "pmix", "pmi2")
    bound = ["--bind-to", "none", "-host", "n0:4"] if is_open_mpi() else []
    allocated = ["salloc", "-Q", "-N", "2", "-n", "4", mpiexec, *bound, "-n", "4"]
    for start, words, wanted in (
        (["srun", *right], run, f'"ranks": {right[-1]}'),
        *([] if is_open_mpi() else [(["srun", "-N", "2", *right], run, '"nodes": 2')]),
        (["srun", *right], program, f"ranks {right[-1]}"),
        (allocated, run, '"ranks": 4' if is_open_mpi() else '"nodes": 2'),
        (allocated, program, "ranks 4"),
        *((["srun", *how, "-n", "4"], words, "") for how in ([], [f"--mpi={other}"]) for words in (run, program)),
    ):
        begun = time.monotonic()
        done = subprocess.run([*start, *words], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=60,
                              check=False)
        if wanted:
            assert done.returncode == 0 and wanted in done.stdout, (start, done)
        else:
            assert done.returncode == 2 and done.stdout == "" and time.monotonic() - begun < 5, done
            assert done.stderr.count(f"use srun --mpi={kind} -n 4") == 1, done.stderr


@thorough
@pytest.mark.skipif(is_open_mpi(), reason="launches of MPICH")
def test_the_five_commands_of_the_documentation(slurm, tmp_path):
    """From pip to a product of one's own files under Slurm, word for word, in a shell that has nothing yet."""
    page = (ROOT / "docs" / "how-to" / "clusters.md").read_text()
    commands = page.partition("takes five commands")[2].partition("```{not-run}")[2].partition("```")[0]
    commands = commands.partition("\n")[2].strip()
    assert len(commands.splitlines()) == 5
    for name in ("rma_mm", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    a, b = np.random.default_rng(0).standard_normal((2, 300, 300))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    binaries = Path(sys.base_prefix) / "bin"
    variables = {"HOME": str(tmp_path), "PATH": f"{binaries}:/usr/bin:/bin", "SHELL": "/bin/bash"}
    variables["SLURM_STDINMODE"] = "none"  # else srun takes what is typed next
    kept = {name: value for name, value in slurm.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(["bash", "-e"], input=f"{commands}\n", cwd=tmp_path, env=kept | variables, text=True,
                          capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"
    assert "4 ranks on 2 nodes" in done.stdout and "right:" in done.stdout, done.stdout
    assert np.allclose(np.load(tmp_path / "C.npy"), a @ b)
