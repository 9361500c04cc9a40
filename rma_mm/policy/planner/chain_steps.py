"""Chains of products: their steps as text, where their matrices may be, and what that costs. Pure: no MPI.

`chain_search` chooses among the placements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from rma_mm.errors import OptionError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.shares import cuts_by_speed
from rma_mm.policy.model.locality import rank_sample
from rma_mm.policy.model.price import Tariff, bill
from rma_mm.policy.model.traffic import Account, Moved, Phase
from rma_mm.policy.model.volumes import summed
from rma_mm.policy.planner.candidates import Request, candidates, single_layouts
from rma_mm.schedule.lowering.fitted import NARROW
from rma_mm.schedule.row import same_place

NAME = r"[^\W\d]\w*"
STEP = re.compile(rf"\s*({NAME})\s*=\s*({NAME})(?:\.([TH]))?\s*@\s*({NAME})(?:\.([TH]))?\s*")
WHOLE = 1e12
"""Words that lie together where all do."""
RULE = "a step reads NAME = NAME[.T|.H] @ NAME[.T|.H], as 'dW = X.T @ dY'"

Shape = tuple[int, int]

# -- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """A matrix as a product reads it."""

    name: str
    turn: str = ""
    """T for transposed, H for transposed and conjugated; empty for as it is."""

    def shape(self, own: Shape) -> Shape:
        """(rows, columns) as the product reads them."""
        return own[::-1] if self.turn else own

    def __str__(self) -> str:
        return f"{self.name}.{self.turn}" if self.turn else self.name


@dataclass(frozen=True)
class Step:
    """One product of a chain."""

    result: str
    a: Factor
    b: Factor

    def __str__(self) -> str:
        return f"{self.result} = {self.a} @ {self.b}"


def parsed(steps: str | Sequence[str], inputs: Sequence[str]) -> tuple[Step, ...]:
    """The steps of a chain, one text each, or one a line.

    Raises OptionError where one is malformed, reads what is not there yet, or makes what is; and for unread inputs.

    >>> print(*parsed(["H = X @ W", "dW = X.T @ H"], ["X", "W"]), sep="; ")
    H = X @ W; dW = X.T @ H
    """
    texts = [line for line in steps.splitlines() if line.strip()] if isinstance(steps, str) else steps
    if not isinstance(texts, Sequence) or not texts:
        raise OptionError(f"steps: got {steps!r}; pass a list of products; {RULE}")
    found: list[Step] = []
    for text in texts:
        match = STEP.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise OptionError(f"steps: got {text!r}; {RULE}")
        result, a, turn_a, b, turn_b = match.groups()
        made = [step.result for step in found]
        for name in (a, b):
            if name not in (*inputs, *made):
                there = ", ".join((*inputs, *made)) or "none"
                raise OptionError(f"steps: {text!r} reads {name}, which is not there; given or made before are {there}")
        if result in (*inputs, *made):
            how = "given" if result in inputs else "made before"
            raise OptionError(f"steps: {text!r} makes {result}, which is {how}; every matrix has a name of its own")
        found.append(Step(result, Factor(a, turn_a or ""), Factor(b, turn_b or "")))
    read = {factor.name for step in found for factor in (step.a, step.b)}
    for name in inputs:
        if name not in read:
            raise OptionError(f"{name}: it is given, but no step reads it; leave it out")
    return tuple(found)


def problem(step: Step, shapes: Mapping[str, Shape]) -> tuple[int, int, int]:
    """(m, n, k) of a step. Raises ShapeError where its factors do not fit."""
    own = shapes[step.a.name], shapes[step.b.name]
    (m, k), (k2, n) = step.a.shape(own[0]), step.b.shape(own[1])
    if k != k2:
        raise ShapeError(
            f"steps: '{step}': {step.a.name} is {own[0]}, {step.b.name} is {own[1]}, {step.result} would be {(m, n)}; "
            f"the inner dimensions {k} and {k2} must be equal"
        )
    return m, n, k


def outputs_of(steps: Sequence[Step], named: Sequence[str]) -> tuple[str, ...]:
    """The results that no step reads, and those named, in the order in which they are made. Raises OptionError."""
    made = [step.result for step in steps]
    if isinstance(named, str) or not isinstance(named, Sequence) or not all(name in made for name in named):
        raise OptionError(f"outputs: got {named!r}; it is a list of names that the steps make: {', '.join(made)}")
    read = {factor.name for step in steps for factor in (step.a, step.b)}
    return tuple(name for name in made if name in named or name not in read)


# -- what may be chosen, and what it costs --------------------------------------------------------


def placements(
    mesh: MeshShape, shape: Shape, is_turned: bool, known: Sequence[Layout] = (), speeds: tuple[float, ...] = ()
) -> tuple[Layout, ...]:
    """The placements that a matrix may have: those known, then those that hold each element once in equal shares.

    is_turned: whether some product reads it transposed, so that what is blocks to that one is among them. speeds: of
    ranks that differ in speed, whose shares then do as well.
    """
    singles = _cut_singles(mesh, shape, speeds)
    turned = _cut_singles(mesh, shape[::-1], speeds) if is_turned else []
    found: list[Layout] = []
    for layout in (*known, *singles, *(each.T for each in turned)):
        if not any(same_place(layout, other, shape, mesh) for other in found):
            found.append(layout)
    return tuple(found)


def _cut_singles(mesh: MeshShape, shape: Shape, speeds: tuple[float, ...]) -> list[Layout]:
    """The placements that hold each element once; by speed also with cuts that are alike everywhere, as groups need."""
    ways = (True, False) if speeds else ()
    cut = [
        replace(layout, splits=cuts_by_speed(layout.splits, shape, mesh, speeds, NARROW, by_column))
        for layout in single_layouts(mesh) for by_column in ways
    ]  # fmt: skip
    return cut or list(single_layouts(mesh))


@lru_cache(maxsize=4096)
def product_seconds(request: Request) -> float:
    """Seconds of the best way to do a product; infinite where there is none."""
    best = candidates(request)[0]
    return inf if best.rejected else best.seconds


def conversion_seconds(mesh: MeshShape, shape: Shape, source: Layout, target: Layout, tariff: Tariff) -> float:
    """Seconds of bringing a matrix from one placement to another. The tariff speaks of it as A."""
    sample = rank_sample(mesh)
    phases = []
    if source.partial:
        phases.append(summed("A", mesh, shape, source))
        source = source.single(mesh)
    phases.append(Phase(_pulled(mesh, shape, target, source, tariff.flavour("A").loads_on_node)))
    return bill(Account(sample, phases, np.zeros(sample.count)), tariff).seconds


def _pulled(mesh: MeshShape, shape: Shape, target: Layout, source: Layout, in_place: bool) -> list[Moved]:
    """What ranks pull. in_place: whether they can load what node-mates hold.

    What others must send comes as it lies at its owner, and is put into place once it is there.
    """
    sample = rank_sample(mesh)
    rows, cols = sample.parts(target, shape)
    found = sample.spread(source, shape, (rows, cols), sample.holds(target))
    held = sample.spans(source, 1, shape[1])
    zero = np.zeros(sample.count)
    loaded = found.node if in_place else zero
    sent = found.foreign - loaded
    put = zero if cols.run <= held.run else sent  # else it lies in one stretch here, and comes there at once
    run = 2 * found.run if cols.run < held.run else WHOLE  # MPI packs what is in pieces on one side, its owner's
    calls = found.cuts[0] * found.cuts[1] / np.maximum(1.0, found.own + found.foreign)
    return [
        Moved("A", "get", found.own + put, zero, zero, zero, run=found.run),
        Moved("A", "get", zero, loaded, zero, calls * loaded, run=found.run),
        Moved("A", "get", zero, found.node - loaded, found.between, calls * sent, run=run),
    ]
