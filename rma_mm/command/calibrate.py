"""Measure this machine for the planner, store the figures, and show them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np

from rma_mm.command.frame import DONE, Frame
from rma_mm.command.options.calibrate import TO_PARTS, CalibrateOptions
from rma_mm.command.progress import ProgressReport
from rma_mm.elements.dtypes import BFLOAT16, BLAS_TYPES
from rma_mm.errors import FileFormatError, RmaError, count_of, display_path
from rma_mm.flavours import DEFAULT
from rma_mm.kernels.choice.rates import CLASSES, FEWEST, LARGE, LONG, SMALL, measured
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.model.machine import Cost, Machine
from rma_mm.runtime.calibration import cache
from rma_mm.runtime.calibration.overlap import overlap_kind
from rma_mm.runtime.calibration.run_calibration import Measurements, Wanted, run_calibration
from rma_mm.runtime.calibration.sampling import rest
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.products.trials import tried
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.unfinished import write_whole


def run(options: CalibrateOptions, frame: Frame) -> int:
    if options.show or options.forget:
        with agreed(frame.comm):
            if frame.comm.rank == 0:
                frame.say(*(shown() if options.show else ()), *([forgotten()] if options.forget else ()))
        return DONE
    with Mesh((frame.comm.size,), frame.comm, threads=options.threads) as mesh:
        comm, site = mesh.comm, Site.of(mesh.comm, mesh.node_of, mesh.threads)
        where = _ranks(mesh.size, mesh.threads, mesh.num_nodes)
        frame.say(f"measuring for about {options.seconds:g} s on {where}")
        products = tuple((dtype.name, "blas") for dtype in BLAS_TYPES)
        progress = ProgressReport(options.progress, comm.rank == 0)
        with progress.stage(f"measuring for about {options.seconds:g} s"):
            found = run_calibration(
                comm, site, Wanted(products, options.flavours, thorough=True), TO_PARTS * options.seconds
            )
        with progress.stage("multiplying, to which the figures are fitted"):
            machine, factors = tried(mesh, found.machine, (1 - TO_PARTS) * options.seconds)
        progress.close()
        frame.has_begun = True
        with agreed(comm):
            if comm.rank == 0:
                kept = cache.write(cache.key_of(site), machine)
                frame.say(*table(found), factors_text(factors))
                frame.say(f"kept in {kept}" if kept else "not kept: the user's cache cannot be written")
                _write(found, machine, options)
        if options.kernels:
            if comm.rank == 0:
                with using_threads(mesh.threads):
                    say_kernels(frame)
            rest(comm)
    return DONE


def _ranks(size: int, threads: int, nodes: int) -> str:
    counts = {"rank": size, "thread": threads, "node": nodes}
    ranks, each, where = (count_of(count, noun) for noun, count in counts.items())
    return f"{ranks} with {each} each on {where}"


def _write(found: Measurements, machine: Machine, options: CalibrateOptions) -> None:
    """Write the files that were asked for. Raises FileFormatError."""
    try:
        if options.json:
            write_whole(
                f"--json {display_path(options.json)}", options.json, json.dumps(machine.as_json(), indent=1) + "\n"
            )
        if options.plot:
            picture = BytesIO()
            draw(found, picture, options.plot.rpartition(".")[2])
            write_whole(f"--plot {display_path(options.plot)}", options.plot, picture.getvalue())
    except (RmaError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise FileFormatError(f"cannot be written: {error}") from None


# -- what is kept -----------------------------------------------------------------------------------


def shown() -> Iterator[str]:
    """Yield lines that show each machine that is kept, the newest first."""
    found = cache.every()
    if not found:
        yield "nothing is kept: a machine is measured when a product is first planned by its price, or by this command"
    for file, key, machine in found:
        date = datetime.fromtimestamp(file.stat().st_mtime).astimezone().isoformat(" ", "minutes")
        nodes = str(key["nodes"]).split()
        yield f"{file}: {date}"
        where = _ranks(len(nodes), machine.threads, len(set(nodes)))
        yield f"  {where}; {key['cpu']}; {key['mpi'][:40]}"
        rates = ", ".join(f"{name} {_rate(machine, name, 1024):.0f} GF/s" for name in machine.kernels)
        yield f"  1024³: {rates}"
        for link in ["node"] * (len(nodes) > len(set(nodes))) + ["between"] * (len(set(nodes)) > 1):
            costs = {name: machine.costs[link].get(name) for name in (f"{DEFAULT.name}.get", "shift")}
            said = (f"{name} {1e-9 / cost.beta:.2f} GB/s" for name, cost in costs.items() if cost and cost.beta)
            yield f"  {link}: {', '.join(said)}"
        if machine.corrections:
            yield "  by products since: " + ", ".join(f"{kind} × {x:.2f}" for kind, x in machine.corrections.items())
        if machine.scatter:
            quiet = "measured while others were at work" if machine.is_scattered else "measured on a quiet machine"
            yield f"  rounds differed by {machine.scatter:.0%}: {quiet}"


def forgotten() -> str:
    """Delete the stored figures, and say so. Returns what to say. Raises FileFormatError."""
    try:
        count = cache.forget()
    except OSError as error:
        raise FileFormatError(f"--forget: cannot delete what is kept: {error}") from None
    return f"deleted what was kept of {count_of(count, 'machine')}; they are measured again when next needed"


# -- as text --------------------------------------------------------------------------------------


def table(found: Measurements) -> Iterator[str]:
    machine = found.machine
    yield f"{machine.name}; {machine.cores} cores a host; median of {found.rounds} rounds"
    yield f"{'link':8} {'movement':22} {'idle: µs':>9} {'GB/s':>7} {'busy: µs':>9} {'GB/s':>7}"
    for link, costs in machine.costs.items():
        for name, cost in costs.items():
            if (link, name) in found.points and not name.endswith(" busy"):
                yield f"{link:8} {name:22} {_figures(cost)} {_figures(costs.get(f'{name} busy'))}".rstrip()
    yield from _contention(found)
    yield f"{'product':24} {'256³: GF/s':>10} {'1024³: GF/s':>11}"
    for name in machine.kernels:
        yield f"{name:24} {_rate(machine, name, 256):10.1f} {_rate(machine, name, 1024):11.1f}"
    yield f"an operation takes {machine.operation * 1e6:.2f} µs, a meeting {machine.meeting * 1e6:.1f} µs a doubling"
    yield _speeds(found)
    if ("between", "shift") in found.points:
        shares = {overlap_kind(name): cost.hidden for name, cost in machine.costs["between"].items()}
        kinds = ("get", "get packed", "accumulate", "accumulate packed", "shift", "shift packed", "reduce")
        said = ", ".join(f"{kind} {shares[kind]:.0%}" for kind in kinds if kind in shares)
        yield f"hidden behind a multiply between nodes: {said}; packed: of what does not lie together"


def _speeds(found: Measurements) -> str:
    if found.machine.speeds:
        return f"ranks multiply at {', '.join(f'{speed:.2f}' for speed in found.machine.speeds)} of their mean speed"
    return "ranks count as equally fast" + ("; no two rounds were within 10 % of each other" if found.scattered else "")


def _figures(cost: Cost | None) -> str:
    if cost is None:
        return " " * 17
    return f"{cost.alpha * 1e6:9.2f} " + (f"{1e-9 / cost.beta:7.2f}" if cost.beta else f"{'':7}")


def _rate(machine: Machine, name: str, size: int) -> float:
    return 2e-9 * size**3 / machine.kernels[name].seconds(size, size, size) * (4 if name.startswith("complex") else 1)


def factors_text(factors: Mapping[str, float]) -> str:
    """Return the factors that the figures are multiplied by before they are stored, as text."""
    changed = (f"{kind} × {factor:.2f}" for kind, factor in factors.items() if abs(factor - 1) > 0.005)
    return f"as whole products took, and as is kept: {', '.join(changed) or 'all × 1'}"


def _contention(found: Measurements) -> Iterator[str]:
    for (link, flavour), (readers, ratio) in found.contention.items():
        yield f"{link}, {flavour}: {readers} readers of one owner take {ratio:.2f} times as long as of {readers} owners"


def say_kernels(frame: Frame) -> None:
    """Measure both kernels for every type that BLAS multiplies, keep the figures, and print the table."""
    large = f"{LONG} (l), or of {LARGE} (lll)"
    frame.say(f"GF/s, BLAS / generated code; extents m, n, k of {SMALL} (s) and {large}, or {FEWEST} rows (few)")
    frame.say(" ".join([f"{'':10}", *(f"{name:>11}" for name in CLASSES)]))
    for dtype in (*BLAS_TYPES, np.dtype(np.float16), *([BFLOAT16] if BFLOAT16 is not None else [])):
        found = measured(dtype, again=True)
        cells = (f"{found[name]['blas']:.0f} / {found[name]['numba']:.0f}" for name in CLASSES)
        frame.say(" ".join([f"{dtype.name:10}", *(f"{cell:>11}" for cell in cells)]))


# -- as a picture ---------------------------------------------------------------------------------


def draw(found: Measurements, file: BinaryIO, form: str) -> None:
    """Seconds against bytes of every movement, a panel for each class of link: idle solid, busy dashed."""
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    links = list(dict.fromkeys(link for link, _ in found.points))
    figure, panels = pyplot.subplots(1, len(links), figsize=(7 * len(links), 6), squeeze=False, layout="constrained")
    for link, panel in zip(links, panels[0], strict=True):
        _panel(found, link, panel, pyplot.get_cmap("tab20"))
    figure.suptitle(f"{found.machine.name}: targets idle (solid), and inside a multiply (dashed)")
    figure.savefig(file, format=form)
    pyplot.close(figure)


def _panel(found: Measurements, link: str, panel: Any, colours: Callable[[int], Any]) -> None:
    sizes = np.logspace(np.log10(8), np.log10(2**24), 60)
    names = dict.fromkeys(name.removesuffix(" busy") for where, name in found.points if where == link)
    for n, name in enumerate(names):
        for suffix, line in (("", "-"), (" busy", "--")):
            points = found.points.get((link, name + suffix))
            if points is None:
                continue
            cost = found.machine.costs[link][name + suffix]
            label = None if suffix else name
            panel.plot(sizes, [cost.seconds(size) for size in sizes], line, color=colours(n), label=label)
            marks = [(nbytes / transfers, seconds / transfers) for transfers, nbytes, seconds in points]
            panel.plot(*zip(*marks, strict=True), "o", color=colours(n), markersize=3)
    panel.set(xscale="log", yscale="log", title=link, xlabel="bytes", ylabel="seconds of a transfer")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
