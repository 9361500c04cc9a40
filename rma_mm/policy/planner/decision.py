"""The decision for a product and its alternatives: a value that is printed, written and compared without MPI."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, field, replace
from textwrap import wrap
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.policy.planner.candidates import Candidate, Request, choose
from rma_mm.policy.planner.tables import alike, same_lines, seconds_text, table, why_lost

COLUMNS = 100  # characters of a line, at most


@dataclass(frozen=True)
class Considered:
    """One candidate, in the figures that decide."""

    algorithm: str
    seconds: float  # what it was expected to take
    between: float  # words that cross between nodes
    within: float  # words copied within nodes
    in_place: float  # words read where they lie
    messages: float
    held: float  # elements that the fullest rank holds
    placements: tuple[str, ...]  # placements of A, B and C, as op(A), op(B) and C need them
    why: str  # why it was chosen, or lost
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds in products, transfers, calls, and what products like it took beyond their price; they sum to its own."""
    also: tuple[str, ...] = ()  # other names of the same schedule, which have no lines of their own

    @property
    def words(self) -> float:
        return self.between + self.within + self.in_place


@dataclass(frozen=True)
class Refused:
    algorithm: str
    why: str


@dataclass(frozen=True)
class Decision:
    """The candidate chosen for a product, all others by predicted time, and why each lost."""

    shape: tuple[int, int, int]  # (m, n, k)
    mesh: tuple[int, ...]
    asked: str  # the algorithm that was asked for, or auto
    algorithm: str
    width: int  # indices of a panel
    considered: tuple[Considered, ...]  # fastest first
    refused: tuple[Refused, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, int, int], mesh: tuple[int, ...], found: Iterable[Candidate], chosen: Candidate,
        asked: str,
    ) -> Decision:
        """Return the decision for `chosen` among the candidates that were found."""
        every = list(found)
        groups = alike([each for each in every if each.layouts is not None and not each.rejected], chosen)
        return cls(
            shape, mesh, asked, chosen.algorithm.name, chosen.width,
            tuple(_considered(group, chosen, asked, every) for group in groups),
            tuple(Refused(each.algorithm.name, each.rejected) for each in every if each.rejected),
        )

    @property
    def chosen(self) -> Considered:
        return next(each for each in self.considered if each.why.startswith("chosen"))

    def __str__(self) -> str:
        """Return a table of at most 100 columns: candidates, fastest first, then why others cannot run."""
        best = self.chosen
        rows = [["algorithm", "seconds", "words", "why"]]
        for each in self.considered:
            rows += [[each.algorithm, seconds_text(each.seconds), f"{each.words:,.0f}", each.why]]
        lines = table(rows).splitlines()
        for same in same_lines((each.algorithm, *each.also) for each in self.considered):
            lines += wrap(same, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
        lines += [f"{x} of {best.algorithm}: {at}" for x, at in zip("ABC", best.placements, strict=True)]
        for why in dict.fromkeys(each.why for each in self.refused):
            names = ", ".join(each.algorithm for each in self.refused if each.why == why)
            lines += wrap(f"cannot: {names}: {why}", COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…" for line in lines)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Decision:
        """The decision that `as_json` wrote, also after it was JSON. Raises KeyError, TypeError for anything else."""
        m, n, k = given["shape"]
        considered = [
            replace(found, placements=tuple(found.placements), also=tuple(found.also))
            for found in (Considered(**each) for each in given["considered"])
        ]
        return cls(
            (m, n, k), tuple(given["mesh"]), given["asked"], given["algorithm"], given["width"], tuple(considered),
            tuple(Refused(**each) for each in given["refused"]),
        )


def decide(request: Request) -> Decision:
    """Return the decision for a request without a memory limit. Raises AlgorithmError if nothing can serve."""
    found = choose(request)
    return Decision.of(request.shape, request.mesh.dims, found, found[0], request.algorithm)


def _considered(group: list[Candidate], chosen: Candidate, asked: str, every: list[Candidate]) -> Considered:
    """Return a candidate that can run, the first of identical ones."""
    candidate = group[0]
    words, layouts, others = (
        candidate.traffic, candidate.layouts or (), tuple(each.algorithm.name for each in group[1:]),
    )
    placements = tuple(_placed(x, layout, candidate.copied) for x, layout in zip("ABC", layouts, strict=True))
    return Considered(
        candidate.algorithm.name, candidate.seconds, words.between, words.within, words.in_place, words.messages,
        words.elements_held, placements, why_lost(candidate, chosen, asked, every), candidate.parts, others,
    )


def _placed(x: str, layout: Layout, copied: str) -> str:
    return f"{layout}{' copied' if x in copied else ''}"
