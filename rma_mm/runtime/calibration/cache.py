"""Store calibrations between jobs: one readable file for each key, beside the kernels' cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rma_mm.errors import MachineError
from rma_mm.kernels.cache import folder_of, read_own, write_own
from rma_mm.kernels.choice.rates import processor
from rma_mm.policy.model.machine import Machine
from rma_mm.runtime.calibration.site import Site

FORMAT = 4  # of the files; another one is not read
BROKEN = OSError, ValueError, KeyError, TypeError, RecursionError, MachineError
"""Errors of reading a file that is broken, of another form, or gone."""
FADES = 3600.0  # seconds in which half of a correction is forgotten
SETTINGS = re.compile(r"(MPIR_CVAR|UCX|FI|OMPI_MCA)_")  # environment variables that change what MPI does
FLEETING = re.compile(r".*(_verbose|HOSTNAME)$|OMPI_MCA_(orte_|ess_|pmix|initial_wdir|num_procs|PREFIXES).*")
"""Variables that launchers set anew for each job, or that only change messages."""

Key = dict[str, Any]


def key_of(site: Site) -> Key:
    """Return the facts that the figures depend on, as text and numbers for JSON."""
    from mpi4py import MPI

    return {
        "format": FORMAT,
        "version": import_module("rma_mm").__version__,  # of the whole package, which is above this floor
        "mpi": " ".join(MPI.Get_library_version().strip("\0").split()),
        "nodes": " ".join(map(str, site.node_of)),
        "ranks_per_node": max(map(len, site.nodes)),
        "nodes_per_host": site.nodes_per_host,
        "threads": site.threads,
        "cpu": processor().strip(),
        "cores": site.cores,
        "pools": " ".join(map(str, site.pool_of)),
        "settings": settings(os.environ),
    }


def settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that belong to the key.

    >>> settings({"UCX_TLS": "tcp", "FI_LOG_verbose": "1", "HOME": "/", "OMPI_MCA_initial_wdir": "/"})
    {'UCX_TLS': 'tcp'}
    """
    return {
        name: variables[name] for name in sorted(variables) if SETTINGS.match(name) and not FLEETING.fullmatch(name)
    }


def file_of(key: Key) -> Path | None:
    """Return the file of the machine with this key; None if nothing can be written."""
    folder = folder_of("machines")
    if folder is None:
        return None
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}.json"


def read(key: Key) -> Machine | None:
    """The machine that is kept under a key; None if there is none, or it is stale, broken or somebody else's."""
    file = file_of(key)
    if file is None:
        return None
    with suppress(*BROKEN):
        its_key, machine = _read(file)
        return machine if its_key == key and machine.measured else None
    return None


def _read(file: Path) -> tuple[Key, Machine]:
    """Return what a file holds; raise one of `BROKEN`. Corrections fade: the square root counts once in each `FADES`.

    A kind of product that was late once, as another job had the cores, is not chosen and so would not be corrected.
    """
    kept = json.loads(read_own(file) or b"")
    machine = Machine.from_json(kept["machine"])
    share = 0.5 ** (max(0.0, time.time() - file.stat().st_mtime) // FADES)
    faded = {kind: ratio**share for kind, ratio in machine.corrections.items()}
    return kept["key"], replace(machine, corrections=faded)


def tries(key: Key) -> int:
    """Return how often a machine was measured that is kept under a key, as rounds differed each time."""
    file = file_of(key)
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return int(json.loads((file and read_own(file)) or b"{}").get("tries", 1))
    return 1


def every() -> list[tuple[Path, Key, Machine]]:
    """Return all stored machines, the newest first: file, readable part of its key, machine."""
    folder, found = folder_of("machines"), []
    for file in sorted(folder.glob("*.json") if folder else (), key=lambda each: -each.stat().st_mtime):
        with suppress(*BROKEN):
            key, machine = _read(file)
            found.append((file, {name: str(key[name]) for name in ("nodes", "cpu", "mpi")}, machine))
    return found


def forget() -> int:
    """Delete all that is kept. Returns how many files there were. Raises OSError."""
    folder = folder_of("machines")
    files = list(folder.glob("*.json")) if folder else []
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def write(key: Key, machine: Machine, tries: int = 1) -> Path | None:
    """Keep a machine: under its name once it is complete. None if nothing can be written.

    tries: how often it was measured, as rounds differed each time.
    """
    file = file_of(key)
    if file is None:
        return None
    content = {"key": key, "machine": machine.as_json(), "tries": tries}
    try:
        write_own(file, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:  # a full disk, or the folder is gone
        return None
    return file
