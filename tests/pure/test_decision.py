"""Decisions as values: made, printed, written, read back and compared, without MPI."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.planner.candidates import Request, candidates
from rma_mm.policy.planner.decision import COLUMNS, Decision, decide
from tests.strategies import meshes, pure

SHAPES = st.tuples(*[st.sampled_from([0, 1, 7, 100, 4001, 10**9])] * 3)


@pure(60)
@given(meshes(max_ranks=12), SHAPES, st.sampled_from(["auto", "cannon", "summa_c", "queue"]))
def test_a_decision_is_a_value(mesh: MeshShape, shape: tuple[int, int, int], algorithm: str) -> None:
    request = Request(shape, mesh, algorithm=algorithm)
    try:
        made = decide(request)
    except AlgorithmError:
        assert algorithm != "auto"
        return
    found = candidates(request)
    assert made.algorithm == found[0].row.name == made.chosen.algorithm
    assert made.chosen.seconds == found[0].seconds
    assert len(made.considered) + len(made.refused) == len(found)
    assert Decision.from_json(json.loads(json.dumps(made.as_json()))) == made == decide(request)
    assert made != replace(made, width=made.width + 1)
    said = str(made)
    assert max(map(len, said.splitlines())) <= COLUMNS
    assert all(f"{x} of {made.algorithm}: " in said for x in "ABC")


def test_what_cannot_serve_is_one_line_a_reason() -> None:
    said = str(decide(Request((300, 200, 100), MeshShape((2, 2)))))
    assert said.count("cannot: ") == 1
    assert "agarwal_3d, agarwal_3d:pull" in said and "needs a mesh of three axes" in said


def test_anything_else_is_no_decision() -> None:
    with pytest.raises((KeyError, TypeError)):
        Decision.from_json({"shape": [1, 2, 3]})
