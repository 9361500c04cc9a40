"""Decisions as values: made, printed, written, read back and compared, without MPI."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.planner.candidates import Request, candidates, choose
from rma_mm.policy.planner.decision import COLUMNS, Decision, decide
from rma_mm.policy.planner.tables import lost_by, why_lost
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
    assert made.algorithm == found[0].algorithm.name == made.chosen.algorithm
    assert made.chosen.seconds == found[0].seconds
    assert sum(1 + len(each.also) for each in made.considered) + len(made.refused) == len(found)
    assert Decision.from_json(json.loads(json.dumps(made.as_json()))) == made == decide(request)
    assert made != replace(made, width=made.width + 1)
    said = str(made)
    assert max(map(len, said.splitlines())) <= COLUMNS
    assert all(f"{x} of {made.algorithm}: " in said for x in "ABC")


@pure(200)
@given(st.data(), meshes(max_ranks=8), st.tuples(*[st.integers(1, 5000)] * 3))
def test_parts_sum_to_the_difference_and_the_largest_is_named_first(
    data: st.DataObject, mesh: MeshShape, shape: tuple[int, int, int]
) -> None:
    """Corrections by earlier products are a part."""
    factors = st.dictionaries(st.sampled_from(["one-sided", "two-sided", "in place"]), st.floats(0.5, 2.0))
    machine = replace(TYPICAL, corrections=data.draw(factors))
    found = choose(Request(shape, mesh, cost_model=CostModel(machine)))
    for each in (each for each in found if not each.rejected):
        assert sum(each.parts.values()) == pytest.approx(each.seconds)
        lost, difference = lost_by(each, found[0]), each.seconds - found[0].seconds
        assert sum(lost.values()) == pytest.approx(difference, abs=1e-12)
        if difference > 0 and " slower: " in (why := why_lost(each, found[0], "auto", found)):
            assert max(lost, key=lambda name: lost[name]) in why.partition(": ")[2].partition(",")[0]


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0)])
def test_one_schedule_under_many_names_has_one_line(nodes: tuple[int, int]) -> None:
    made = decide(Request((512, 512, 512), MeshShape((2, 1), node_of_rank=nodes)))
    keys = [
        (each.placements, each.words, each.messages, each.held, tuple(each.parts.items())) for each in made.considered
    ]
    assert len(set(keys)) == len(keys)
    names = [name for each in made.considered for name in (each.algorithm, *each.also)]
    assert len(set(names)) == len(names) > len(made.considered)
    assert [each.seconds for each in made.considered] == sorted(each.seconds for each in made.considered)
    assert f"the same as {next(each.algorithm for each in made.considered if each.also)}: " in str(made)


def test_what_cannot_serve_is_one_line_a_reason() -> None:
    said = str(decide(Request((300, 200, 100), MeshShape((2, 2)))))
    assert said.count("cannot: ") == 1
    assert "agarwal_3d, agarwal_3d:pull" in said and "needs a mesh of three axes" in said


def test_anything_else_is_no_decision() -> None:
    with pytest.raises((KeyError, TypeError)):
        Decision.from_json({"shape": [1, 2, 3]})
