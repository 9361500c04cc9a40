"""Check this installation, alone or as a job; works without MPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.command.frame import DONE, FAILED, Frame
from rma_mm.command.launcher import LauncherError, connect
from rma_mm.command.options.doctor import DoctorOptions
from rma_mm.errors import AbsentError, RmaError, count_of, display_path
from rma_mm.kernels.cache import cache_folder, home, refusal
from rma_mm.kernels.threads import cores, get_threads, threads_per_rank
from rma_mm.launch import launched_ranks
from rma_mm.segments import held_bytes, stray_segments
from rma_mm.unfinished import write_whole
from rma_mm.windows.hosts.shm_limits import SEGMENTS, free_segment_bytes, memory_free

OK, NOTE, FAULT = "ok", "note", "fault"
EXTRAS = {
    "h5py": "hdf5", "zarr": "zarr", "safetensors": "safetensors", "opt_einsum": "einsum", "scipy": "scipy",
    "torch": "torch", "jax": "jax", "prometheus_client": "metrics", "matplotlib": "plots",
}
"""Optional packages, by the extra that installs each."""
LITTLE_SHM = 256 * 2**20  # bytes of /dev/shm below which large matrices will not fit
PATIENCE = 60  # seconds for the job of two ranks that tries the windows
DAYS = 30  # age of a calibration from which on another one is advised
TRIAL = "from rma_mm.command.window_trial import main; main()"


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # OK, NOTE or FAULT
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:<5}  {self.what:<17}  {self.found}{f'; {self.remedy}' if self.remedy else ''}"


def run(options: DoctorOptions, frame: Frame) -> int:
    """Print the findings; the exit code says whether one is a fault. Collective over the ranks that were started."""
    frame.has_begun = True
    with frame.interruption:
        return _report(options, frame)


def _report(options: DoctorOptions, frame: Frame) -> int:
    findings = [_python()]
    try:
        frame.comm = connect()
        frame.interruption.enlist(frame.comm)
    except LauncherError as error:
        found, _, remedy = str(error).partition("; ")
        findings.append(Finding("MPI", FAULT, found, remedy))
    checks: list[Callable[[], Iterator[Finding]]] = [_memory, _blas, _caches, _calibration, _extras]
    if frame.comm is not None:
        findings += [*_mpi(), *_job(frame.comm), *_windows(frame.comm)]
    elif not frame.is_first:
        return FAILED
    for check in checks:
        try:
            findings += check()
        except ImportError as error:  # a fault that is known, if it is MPI's
            findings.append(Finding(check.__name__.strip("_"), NOTE, f"not checked: {error}"))
        except (OSError, RmaError, RuntimeError) as error:
            findings.append(Finding(check.__name__.strip("_"), FAULT, str(error)))
    code = FAILED if any(each.state == FAULT for each in findings) else DONE
    if frame.comm is not None:
        code = frame.comm.bcast(code)
    if options.json is None:
        frame.say(*map(str, findings))
    elif frame.is_first:
        content = json.dumps({"faults": code, "findings": [asdict(each) for each in findings]}, indent=1) + "\n"
        if options.json == "-":
            frame.say(content)
        else:
            write_whole(f"--json {display_path(options.json)}", options.json, content)
    return code


def _python() -> Finding:
    own = import_module("rma_mm").__version__
    numbers = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "mpi4py") if _has(name))
    return Finding("Python", OK, f"rma_mm {own} on Python {sys.version.split()[0]}, {numbers}")


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _mpi() -> Iterator[Finding]:
    """Yield what is known of the MPI library and its launcher."""
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().strip("\0").split("\n")[0].split())
    yield Finding("MPI library", OK, f"{library}, MPI {'.'.join(map(str, MPI.Get_version()))}")
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        yield Finding("threads of MPI", OK, "THREAD_MULTIPLE")
    else:
        yield Finding("threads of MPI", NOTE, "less than THREAD_MULTIPLE: transfers between nodes wait for multiplies",
                      "initialise MPI with MPI_THREAD_MULTIPLE, mpi4py's default")
    mpiexec = _mpiexec()
    if mpiexec is None:
        yield Finding("launcher", FAULT if launched_ranks() == 1 else NOTE, "no mpiexec beside this Python or on PATH",
                      "pip install 'rma_mm[mpich]', or load your site's MPI")
        return
    said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    theirs, ours = "Open MPI" in said, "Open MPI" in library
    if theirs != ours:
        name = "Open MPI" if theirs else "MPICH, or one like it"
        yield Finding("launcher", FAULT, f"{mpiexec} is of {name}, the library is not",
                      "use the mpiexec of that library, or install mpi4py for this one")
    else:
        yield Finding("launcher", OK, f"{mpiexec}, of the same library")


def _mpiexec() -> str | None:
    from rma_mm.runtime.ranks.launchers import own_mpiexec

    return own_mpiexec() or shutil.which("mpiexec")


def _job(comm: Any) -> Iterator[Finding]:
    """Yield what is known of the ranks of this job and of the memory that they share. Collective."""
    from mpi4py import MPI

    from rma_mm.windows.ranks import node_map

    nodes, hosts = node_map(comm), comm.allgather(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    how = "alone, without a launcher" if launched_ranks() == 1 and comm.size == 1 else "as one job"
    pretended = [name for name in ("MPIR_CVAR_NOLOCAL", "MPIR_CVAR_NUM_CLIQUES") if os.environ.get(name)]
    said = f"{count_of(comm.size, 'rank')} on {count_of(len(set(nodes)), 'node')}, {how}"
    if len(set(nodes)) <= len(set(hosts)):
        yield Finding("ranks", OK, said)
    elif pretended:
        yield Finding("ranks", NOTE, f"{said}; hosts count as several nodes", f"unset {' and '.join(pretended)}")
    else:
        there = count_of(len(set(hosts)), "host")
        yield Finding("ranks", FAULT, f"{said}, but {there}: ranks of a host share no memory",
                      "start the job with mpiexec" + ", or srun --mpi=pmi2" * ("MPICH" in MPI.Get_library_version()))
    free = free_segment_bytes()
    if free is None:
        yield Finding("shared memory", NOTE, f"{SEGMENTS} is not there")
    elif free < LITTLE_SHM:
        remedy = f"enlarge it (docker run --shm-size=1g, mount -o remount,size=2g {SEGMENTS}), or use --window created"
        yield Finding("shared memory", NOTE, f"{SEGMENTS} has {free // 2**20} MiB free", remedy)
    else:
        yield Finding("shared memory", OK, f"{SEGMENTS} has {free // 2**20} MiB free")
    if stray := stray_segments():
        held = held_bytes(stray) // 2**20
        said = f"{count_of(len(stray), 'segment')} of MPI processes that have ended hold {held} MiB"
        yield Finding("shared memory", NOTE, said, "rma-mm cache clean removes them")


def _windows(comm: Any) -> Iterator[Finding]:
    """Yield which windows work: tried on the ranks of this job, or on two ranks of a job of its own. Collective."""
    if comm.size > 1:
        from rma_mm.command.window_trial import tried

        results = tried(comm)
    else:
        results = _tried_apart()
    for name, (state, why) in results.items():
        yield Finding(f"window {name}", state, why)


def _tried_apart() -> dict[str, tuple[str, str]]:
    mpiexec = _mpiexec()
    if mpiexec is None or launched_ranks() > 1:
        return {"all": (NOTE, "not tried, as there is one rank and no mpiexec for two")}
    command = [mpiexec, "-n", "2", sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        results: dict[str, tuple[str, str]] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"all": (FAULT, f"a job of two ranks did not end within {PATIENCE} s: {' '.join(command[:3])}")}
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"all": (FAULT, f"a job of two ranks ended with {done.returncode}: {said}")}
    return results


def _memory() -> Iterator[Finding]:
    free, source = memory_free()
    few = free < 2**30
    yield Finding("memory", NOTE if few else OK, f"{source} {free / 2**30:.1f} GiB",
                  "large matrices will stay in their files" if few else "")


def _blas() -> Iterator[Finding]:
    """Yield the BLAS, and its threads against the cores that this process may use."""
    import threadpoolctl

    found = [each for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
    names = sorted({f"{each['internal_api']} {each.get('version') or ''}".strip() for each in found})
    ranks = int(os.environ.get("MPI_LOCALNRANKS") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    mine, bound = threads_per_rank(ranks), len(cores())
    used = f"{count_of(mine, 'thread')} a rank, {count_of(ranks, 'rank')} on {bound} cores"
    said = f"{', '.join(names) or 'unknown'}; {used}"
    if mine * ranks > max(bound, ranks):
        yield Finding("BLAS", NOTE, said, f"set OMP_NUM_THREADS={max(1, bound // ranks)}, or let it be chosen")
    elif ranks > bound and get_threads():
        yield Finding("BLAS", NOTE, f"{said}: more ranks than cores", "start fewer ranks, or bind them to more cores")
    else:
        yield Finding("BLAS", OK, said)
    try:
        from rma_mm.windows import libucp

        path, _, number = libucp.loaded()
        yield Finding("UCX", OK, f"{number} in {path}")
    except AbsentError as error:
        found_, _, remedy = str(error).partition("; ")
        yield Finding("UCX", NOTE, found_, remedy)


def _caches() -> Iterator[Finding]:
    if cache_folder() is not None:
        yield Finding("kernels' cache", OK, f"{home()} can be written to")
    else:
        found, _, remedy = (refusal() or f"{home()} cannot be written to; name another by RMA_MM_CACHE").partition("; ")
        yield Finding("kernels' cache", NOTE, found, remedy)


def _calibration() -> Iterator[Finding]:
    """Yield the age of the newest calibration, and what else keeps this machine busy."""
    from rma_mm.runtime.calibration.cache import every

    stored = every()
    advice = "mpiexec -n P rma-mm calibrate measures this machine"
    if not stored:
        yield Finding("calibration", NOTE, "none yet; the first product takes 3 s to measure what it needs", advice)
    else:
        days = (time.time() - stored[0][0].stat().st_mtime) / 86400
        said = f"{count_of(len(stored), 'machine')} stored, the newest {days:.0f} days ago"
        yield Finding("calibration", NOTE if days > DAYS else OK, said, advice if days > DAYS else "")
    load, count = os.getloadavg()[0], len(cores())
    busy = load > 0.5 * count
    yield Finding("load", NOTE if busy else OK, f"{load:.1f} on {count_of(count, 'core')}",
                  "others use this machine, and what is measured now will be off" if busy else "")


def _extras() -> Iterator[Finding]:
    there = [f"{name} {version(name)}" for name in EXTRAS if _has(name)]
    yield Finding("extras", OK, ", ".join(there) or "none")
    if missing := [name for name in EXTRAS if not _has(name)]:
        wanted = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        yield Finding("extras", OK, f"not installed: {', '.join(missing)}", f"pip install 'rma_mm[{wanted}]'")
