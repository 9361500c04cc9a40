"""Names and forms of the registry, and rows that users add to it."""

from __future__ import annotations

import pytest

from rma_mm.algorithms import ALGORITHMS, find_algorithm, list_algorithms, register
from rma_mm.dsl.scheduling import CANNON
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.planner.candidates import Request, candidates, choose, placed_problem
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.verify.checker import verify

NAMES = [
    "data_parallel", "column_parallel", "row_parallel", "gather_gemm", "gemm_scatter", "mixed_2d", "row_column_2d",
    "cannon", "summa_c", "summa_a", "summa_b", "pumma", "agarwal_3d", "johnson_3d",
    "solomonik_25d", "tesseract", "nus_3d", "t10_rotate", "pblas", "srumma", "stationary_c",
    "stationary_a", "stationary_b", "weighted", "queue", "cosma",
]
"""algorithms.md §2."""


def test_all_names_of_the_survey_are_there() -> None:
    assert sorted(list_algorithms()) == sorted(NAMES)
    assert all(algorithm.source and algorithm.summary for algorithm in ALGORITHMS.values())


@pytest.mark.parametrize("name", [name for name in NAMES if ALGORITHMS[name].form])
def test_forms_keep_their_name(name: str) -> None:
    form = {"t10_rotate": "2,1,1/1,1,1", "weighted": "columns", "stationary_c": "syrk"}.get(name, "pull")
    assert find_algorithm(f"{name}:{form}").name == f"{name}:{form}"
    with pytest.raises(AlgorithmError, match=f"got '{name}:other'; .*{name}"):
        find_algorithm(f"{name}:other")


@pytest.mark.parametrize("name", ["stationary_c:pull", "queue:", "cannon:", "cannon:pull:pull", "summa", "auto:pull"])
def test_what_is_no_form(name: str) -> None:
    with pytest.raises(AlgorithmError, match="algorithm: got"):
        find_algorithm(name)


REFUSED = [
    # algorithm, mesh, what the message says
    ("cannon", (4,), "needs a mesh of two axes, as (2, 2); this one is (4,)"),
    ("cannon", (2, 2, 2), "needs a mesh of two axes, as (2, 4); this one is (2, 2, 2)"),
    ("johnson_3d", (2, 4), "needs a mesh of three axes, as (2, 2, 2); this one is (2, 4)"),
    ("t10_rotate:2,2,1/2,2,1", (2, 3), "F_op (2, 2, 1) is for 4 ranks, and there are 6; t10_rotate:"),
    ("t10_rotate:2,3,1/2,2,1", (2, 3), "A's ring of 2 does not divide the 3 ranks along n; t10_rotate:"),
    ("cosma:2,2,2", (2, 3), "the grid (2, 2, 2) needs 8 ranks, and there are 6; cosma:"),
]


@pytest.mark.parametrize(("name", "grid", "words"), REFUSED)
def test_a_mesh_that_does_not_fit(name: str, grid: tuple[int, ...], words: str) -> None:
    with pytest.raises(AlgorithmError) as error:
        choose(Request((64, 64, 64), MeshShape(grid), algorithm=name))
    assert words in str(error.value)


def test_what_is_suggested_fits() -> None:
    for name, grid, words in REFUSED[3:]:
        with pytest.raises(AlgorithmError) as error:
            choose(Request((64, 64, 64), MeshShape(grid), algorithm=name))
        suggested = str(error.value).rpartition("; ")[2].removesuffix(" would fit")
        assert not choose(Request((64, 64, 64), MeshShape(grid), algorithm=suggested))[0].rejected, words


def test_auto_takes_no_face_and_leaves_no_rank_idle() -> None:
    for grid in ((2, 2, 2), (7,), (2, 3)):
        for found in candidates(Request((96, 96, 96), MeshShape(grid))):
            if not found.rejected and found.layouts:
                assert not any(layout.pins for layout in found.layouts), found.algorithm.name
                problem = placed_problem(Request((96, 96, 96), MeshShape(grid)), found.layouts)
                work = LoweringDecisions.of(found.algorithm, problem).work
                assert work.mesh(problem.mesh).size == problem.mesh.size


def test_a_row_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "mine", CANNON.algorithm("mine"))
    request = Request((8, 8, 8), MeshShape((2, 2)), algorithm="mine")
    best = choose(request)[0]
    assert best.layouts is not None
    verify(lower(best.algorithm, placed_problem(request, best.layouts)))
    for name, says in (("mine", "taken; pass replace=True"), ("cannon", "taken"), ("a:b", "colon"), ("auto", "auto")):
        with pytest.raises(AlgorithmError, match=says):
            register(CANNON.algorithm(name))
    other = CANNON.algorithm("mine")
    register(other, replace=True)
    assert find_algorithm("mine") is other
    with pytest.raises(AlgorithmError, match=r"did you mean cannon\?"):
        find_algorithm("Canon")
