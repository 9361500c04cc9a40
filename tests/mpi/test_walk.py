"""The way of A, as ARCHITECTURE.md has it, is the one that a product takes."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from tests.launch import parallel
from tests.processes import ROOT

SECTION = re.compile(r"^## The path of A\n(.*?)^## ", re.MULTILINE | re.DOTALL)
STAGE = re.compile(r"^- \*\*(\w+)\*\*: (.*?)(?=^\S|^$)", re.MULTILINE | re.DOTALL)
PACKAGE = str(ROOT / "rma_mm")
SKIPPED = re.compile(r"(.*\.)?<\w+>|serialized\.<locals>\.alone")
"""Names that are not counted: lambdas and comprehensions, and what `serialized` makes of a function."""


def documented() -> tuple[dict[str, list[str]], int]:
    """Stage → its functions, and the number that the document gives for all."""
    found = SECTION.search((ROOT / "ARCHITECTURE.md").read_text())
    assert found
    stages = {stage: re.findall(r"`([^`]+)`", line) for stage, line in STAGE.findall(found[1])}
    number = re.search(r"(\d+) in\s+all", found[1])
    return stages, int(number[1]) if number else 0


def stack_of(frame: FrameType | None) -> list[str]:
    """The package's functions on a stack, the first one called first."""
    names = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not SKIPPED.fullmatch(code.co_qualname):
            names.append(code.co_qualname)
        frame = frame.f_back
    return names[::-1]


@parallel(ranks=(1,), env=("node",))
def test_a_goes_the_way_that_is_drawn(comm: MPI.Intracomm) -> None:
    stages, number = documented()
    assert list(stages) == ["priced", "lowered", "bound", "multiplied"]
    stacks: dict[str, set[tuple[str, ...]]] = {way[-1]: set() for way in stages.values()}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in stacks:
            stacks[frame.f_code.co_qualname].add(tuple(stack_of(frame)))

    with Mesh((1,), comm) as mesh:
        A, B = (DistMatrix.from_numpy(np.ones(shape), mesh) for shape in ((41, 31), (31, 23)))
        multiply = rma_mm.matmul  # loaded before it is watched
        sys.setprofile(note)
        try:
            multiply(A, B, mesh)
        finally:
            sys.setprofile(None)
    for stage, way in stages.items():
        assert tuple(way) in stacks[way[-1]], (stage, sorted(stacks[way[-1]]))
    assert number == len({name for way in stages.values() for name in way})
