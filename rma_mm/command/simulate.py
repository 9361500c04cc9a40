"""Estimate a product on a described machine, without running it. Needs no MPI."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from math import prod
from typing import Any

from rma_mm.algorithms import find_algorithm
from rma_mm.command.frame import DONE, Frame
from rma_mm.command.options.simulate import SIMULATED, SimulateOptions
from rma_mm.elements.dtypes import accumulator, parse_dtype
from rma_mm.errors import OptionError, display_path
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import Machine
from rma_mm.policy.model.machine_file import TYPICALLY, Description, read_machine
from rma_mm.policy.planner.sweep import Price, SweepProblem, draw, price_table, prices, strong, sweep_table, weak
from rma_mm.runtime.reports.timeline import predicted_records, simulated_by, timeline
from rma_mm.unfinished import write_whole


def run(options: SimulateOptions, frame: Frame) -> int:
    """Print the table, and write the requested files. Raises RmaError."""
    found = [prices(question) for question in questions(options)]
    first = found[-1][0].question
    shape = "x".join(map(str, options.shape or ()))
    title = f"{shape} {options.dtype} on {first.cost_model.machine.name}, {first.per_node} ranks a node"
    kind = "strong scaling: " if options.strong else "weak scaling from " if options.weak else f"{first.ranks} ranks: "
    frame.say(kind + title, sweep_table(found) if options.strong or options.weak else price_table(found[0]))
    made: dict[str, str | bytes] = {}
    if options.json:
        made["json"] = json.dumps(_document(options, found), indent=1, allow_nan=False) + "\n"
    if options.plot:
        picture = BytesIO()
        draw(found, picture, options.plot.rpartition(".")[2], kind + title)
        made["plot"] = picture.getvalue()
    if options.timeline:
        made["timeline"] = json.dumps(_timeline(found[0][0])) + "\n"
    frame.has_begun = True
    for name, content in made.items():
        path = getattr(options, name)
        write_whole(f"--{name} {display_path(path)}", path, content)
    return DONE


def questions(options: SimulateOptions) -> list[SweepProblem]:
    """Return the problems to be priced: one, or one for each number of ranks. Raises RmaError."""
    assert options.shape is not None
    known = TYPICALLY if options.machine == "typical" else read_machine(options.machine)
    known = known.of(options.nodes, options.ranks_per_node)
    if known.ranks_per_node is None:
        raise OptionError(f"--ranks-per-node: is missing; {options.machine} does not give the ranks of a node")
    if options.algorithm != "auto":
        find_algorithm(options.algorithm)
    machine = replace(known.machine, rooms=()) if options.memory_limit else known.machine
    question = SweepProblem(
        options.shape, _most(options, known), _cost_model(machine, options.dtype), known.ranks_per_node,
        options.mesh, options.algorithm, (options.layout_a, options.layout_b, options.layout_c),
        options.memory_limit or known.machine.memory,
    )
    if options.strong:
        return strong(question, options.strong)
    return weak(question, options.weak) if options.weak else [question]


def _most(options: SimulateOptions, known: Description) -> int:
    """Return the number of ranks, or the largest of several. Raises OptionError if the machine has fewer."""
    assert known.ranks_per_node is not None
    there = known.nodes * known.ranks_per_node if known.nodes else None
    sizes = [*(options.strong or options.weak or ()), prod(options.mesh) if options.mesh else options.ranks]
    wanted = max((size for size in sizes if size is not None), default=there)
    if wanted is None:
        raise OptionError(f"--ranks: is missing, and {options.machine} does not give the number of nodes")
    if there is not None and wanted > there:
        raise OptionError(
            f"ranks: got {wanted}; {options.machine} has {there}, {known.nodes} nodes of {known.ranks_per_node}: "
            f"change that with --nodes and --ranks-per-node"
        )
    return wanted


def _cost_model(machine: Machine, dtype: str) -> CostModel:
    """Return the cost model of products of this type. Raises OptionError if nothing is known of it."""
    element = parse_dtype(dtype)
    summed = accumulator(element)
    kernels = [name for name in machine.kernels if name.split()[0] == summed.name]
    if not kernels:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in machine.kernels))
        raise OptionError(f"--dtype: got {dtype}; {machine.name} has no figures for it, only for {known}")
    return CostModel(machine, summed.name, kernels[0].split()[-1], element.itemsize, summed.itemsize)


def _document(options: SimulateOptions, found: list[list[Price]]) -> dict[str, Any]:
    first = found[-1][0].question
    return {
        "machine": first.cost_model.machine.as_json(), "dtype": options.dtype, "ranks_per_node": first.per_node,
        "prices": [price.as_json() for each in found for price in each],
    }


def _timeline(price: Price) -> dict[str, Any]:
    """Return the predicted timeline of a product, in the format of Chrome traces. Raises OptionError."""
    ranks = price.question.ranks
    if ranks > SIMULATED:
        raise OptionError(f"--timeline: got {ranks} ranks; every operation is simulated of up to {SIMULATED}")
    if price.why_not:
        raise OptionError(f"--timeline: {price.algorithm}: {price.why_not}")
    simulated = simulated_by(price.schedule(), price.question.cost_model)
    mesh = price.request.mesh
    facts = {"algorithm": price.algorithm, "seconds": simulated.seconds, "priced": price.seconds} | price.as_json()
    return timeline(predicted_records(simulated, ranks), mesh, mesh.node_of_rank, facts)
