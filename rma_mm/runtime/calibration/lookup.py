"""The machine that a product is priced by: named by the user, kept from earlier, or measured now."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from rma_mm.errors import MachineError
from rma_mm.flavours import DEFAULT
from rma_mm.policy.model.machine import COLLECTIVES, COPY, TYPICAL, Machine
from rma_mm.policy.model.machine_file import machine_text
from rma_mm.runtime.calibration import cache
from rma_mm.runtime.calibration.link import has_changed
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.rank_state import rank_state

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.runtime.calibration.run_calibration import Wanted

VARIABLE = "RMA_MM_MACHINE"  # environment variable: `typical`, or a file as `Machine.as_json` gives it
SHORT, BETWEEN, KERNEL = 2.2, 5.0, 0.5
"""Seconds of the automatic calibration, of that between nodes, and of that of one kernel."""
TRIES = 3  # jobs that measure again, one after the other, as rounds differed: on some machines they always do
Memo = dict[Any, Any]
_seen: set[str] = set()
"""Nodes of ranks between which the network was measured, or compared with what was kept, by this process as rank 0."""


def machine_of(
    comm: MPI.Intracomm, node_of: Sequence[int], *, threads: int, dtype: str, kernel: str, may_measure: bool,
    flavours: tuple[str, ...] = (DEFAULT.name,),
) -> Machine | None:
    """The machine for products of this type, by this kernel and through these windows; None if nothing is known.

    RMA_MM_MACHINE names one. Else rank 0 looks for what was kept; what it lacks is measured where that is allowed, in
    at most three seconds, five between nodes, and kept. All is measured again where the network has another bandwidth
    than what was kept says, or where rounds differed much; speeds of ranks, by each job, where those kept differ. The
    same on every rank; collective over `comm` when first asked this, of which a communicator remembers the answer.
    Raises MachineError, on every rank, for a file with a wrong figure.
    """
    if rank_state().is_pretended:  # pretended ranks have no speed
        return None
    memo = _memo(comm)
    asked = (tuple(node_of), threads, dtype, kernel, may_measure, flavours)
    if asked not in memo:
        memo[asked] = _machine_of(comm, _site(comm, memo, node_of, threads), dtype, kernel, may_measure, flavours)
    found: Machine | None = memo[asked]
    return found


def remember_correction(
    comm: MPI.Intracomm, node_of: Sequence[int], *, threads: int, corrections: Mapping[str, float]
) -> None:
    """Store measured over predicted time by kind of movement.

    Every rank passes the same, after `machine_of`, which gives it from now on; rank 0 writes it. No communication.
    """
    memo = _memo(comm)
    for asked, machine in memo.items():
        if isinstance(machine, Machine) and asked[:2] == (tuple(node_of), threads):
            memo[asked] = _corrected(machine, corrections)
    site = memo.get((tuple(node_of), threads))
    if comm.rank == 0 and site is not None and not os.environ.get(VARIABLE):
        key = cache.key_of(site)
        kept = cache.read(key)
        if kept is not None:
            cache.write(key, _corrected(kept, corrections), cache.tries(key))


def _corrected(machine: Machine, corrections: Mapping[str, float]) -> Machine:
    usable = {kind: ratio for kind, ratio in corrections.items() if isfinite(ratio) and ratio > 0}
    return replace(machine, corrections={**machine.corrections, **usable})


def _machine_of(
    comm: MPI.Intracomm, site: Site, dtype: str, kernel: str, may_measure: bool, flavours: tuple[str, ...]
) -> Machine | None:
    told: tuple[Any, bool, bool, int] | None = None
    with agreed(comm, "machine", dtype=dtype, kernel=kernel, may_measure=may_measure, flavours=flavours):
        if comm.rank == 0:
            named = _named(os.environ.get(VARIABLE, ""))
            kept = named or _whole(cache.read(cache.key_of(site)), site)
            nodes = " ".join(map(str, site.node_of))
            tries = cache.tries(cache.key_of(site)) if kept and kept.is_scattered else 0
            told = kept and kept.as_json(), named is not None, nodes not in _seen, tries
            _seen.update([nodes] * may_measure)
    given, is_named, is_new, tries = comm.bcast(told)
    base = None if given is None else Machine.from_json(given)
    if base is not None and is_new and not is_named and may_measure:
        is_stale = 0 < tries < TRIES or (site.has("between") and has_changed(comm, site, base))
        base = None if is_stale else _with_speeds_of_now(comm, site, base)
    wanted = None if is_named or not may_measure else _lacking(base, site, (dtype, kernel), flavours)
    if wanted is None:
        return base
    seconds = KERNEL if base is not None else BETWEEN if site.has("between") else SHORT
    from rma_mm.runtime.calibration.run_calibration import run_calibration

    machine = run_calibration(comm, site, wanted, seconds, base).machine
    if comm.rank == 0:
        cache.write(cache.key_of(site), machine, tries + 1)
    return machine


def _with_speeds_of_now(comm: MPI.Intracomm, site: Site, kept: Machine) -> Machine:
    """Return the machine, and keep it, with new speeds of its ranks if they were found to differ. Collective."""
    if len(kept.speeds) != comm.size:
        return kept
    from rma_mm.runtime.calibration.speeds import averaged

    machine, key = replace(kept, speeds=averaged(comm, site, kept.speeds)), cache.key_of(site)
    if comm.rank == 0:
        cache.write(key, machine, cache.tries(key))
    return machine


def _lacking(base: Machine | None, site: Site, product: tuple[str, str], flavours: tuple[str, ...]) -> Wanted | None:
    """Return the figures that must be measured before products can be priced; None if there are none."""
    products: tuple[tuple[str, str], ...] = (product,)
    missing = flavours
    if base is not None:
        links = [link for link in ("node", "between") if site.has(link)]
        missing = tuple(name for name in flavours if any(f"{name}.get" not in base.costs[link] for link in links))
        products = () if base.has(*product) else (product,)
    if not (products or missing):
        return None
    from rma_mm.runtime.calibration.run_calibration import Wanted

    return Wanted(products, missing, basis=base is None)


def _whole(machine: Machine | None, site: Site) -> Machine | None:
    """Return the machine, if it has the figures that every calibration gives."""
    links = [link for link in ("node", "between") if site.has(link)]
    if machine is None or any(name not in machine.costs[link] for link in links for name in COLLECTIVES):
        return None
    return machine if COPY in machine.costs["own"] else None


def _named(name: str) -> Machine | None:
    """Return the machine that the user named, if one was. Raises MachineError naming the file, and the figure."""
    if not name:
        return None
    if name == "typical":
        return TYPICAL
    rule = f"{VARIABLE} is 'typical', or a file as `python -m rma_mm.calibrate --json FILE` writes"
    try:
        return Machine.from_json(json.loads(machine_text(name)))
    except MachineError as error:
        raise MachineError(f"{name}: {error}; {rule}") from None
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{name}: it cannot be read as a machine ({error}); {rule}") from None


def _site(comm: MPI.Intracomm, memo: Memo, node_of: Sequence[int], threads: int) -> Site:
    """Return the site of the ranks, determined at the first call. Collective when first asked."""
    asked = (tuple(node_of), threads)
    if asked not in memo:
        memo[asked] = Site.of(comm, node_of, threads)
    found: Site = memo[asked]
    return found


@functools.cache
def _keyval() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def _memo(comm: MPI.Intracomm) -> Memo:
    """Return the figures remembered for a communicator, alike on all its ranks."""
    memo: Any = comm.Get_attr(_keyval())
    if memo is None:
        memo = {}
        comm.Set_attr(_keyval(), memo)
    found: Memo = memo
    return found
