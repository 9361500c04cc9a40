"""Every SBP signature as a row: against NumPy, and against the registry's rows for those that have names there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.dsl.signature import signed
from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import everywhere
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.sbp import PLACED, Sbp, deduce, sbp_text, sbp_to_layout, signatures
from rma_mm.policy.model.traffic import traffic
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, placements_taken
from rma_mm.schedule.algorithm import Algorithm, Layouts, PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning
from tests.pure.test_schedules import LIMITS, limits, run, words
from tests.strategies import Case, cases, pure
from tests.thorough import thorough, usually

SHAPE = (5, 7, 6)
MESHES = [MeshShape((2,)), MeshShape((2, 2)), MeshShape((2, 2, 2))]


def taken(algorithm: Algorithm, mesh: MeshShape) -> list[Layouts]:
    return placements_taken(algorithm, Request(SHAPE, mesh))


def needed(algorithm: Algorithm, mesh: MeshShape) -> Layouts:
    """The placements that a row asks for."""
    found = algorithm.placements(mesh) if algorithm.placements else ""
    assert not isinstance(found, str)
    a, b, c = found
    assert a and b and c
    return a, b, c


def as_deduced(c: Sbp, layouts: Layouts, mesh: MeshShape) -> Layouts:
    """A and B with a C of the signature `c`, summands and copies included."""
    return layouts[0], layouts[1], sbp_to_layout(c, mesh)


# -- against NumPy --------------------------------------------------------------------------------


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("mesh", usually(2, MESHES), ids=str)
def test_every_signature_multiplies_as_numpy(mesh: MeshShape, summed: bool) -> None:
    """On the placements of the signature itself."""
    for n, (a, b, c) in enumerate(signatures(mesh)):
        algorithm = signed(a, b, summed=summed)
        layouts = needed(algorithm, mesh)
        assert layouts[:2] == (sbp_to_layout(a, mesh), sbp_to_layout(b, mesh))
        if not summed:
            layouts = as_deduced(c, layouts, mesh)
        run(Case(algorithm, PlacedProblem(SHAPE, mesh, layouts, keeps_c=bool(n % 2)), Tuning(), 1, n % 2, "", n), n)


@thorough
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_on_every_placement_that_is_taken(mesh: MeshShape) -> None:
    """C in equal shares, with copies along B·B, and everywhere; A and B with each element held once, too."""
    for n, (a, b, _) in enumerate(signatures(mesh)):
        algorithm = signed(a, b, summed=bool(n % 3))
        for layouts in dict.fromkeys(taken(algorithm, mesh)):
            run(Case(algorithm, PlacedProblem(SHAPE, mesh, layouts), Tuning(), 1, 0, "", n), n)


@pure(120)
@given(st.data(), LIMITS, st.booleans(), st.booleans())
def test_any_mesh_and_shape(data: st.DataObject, changed: dict[str, int], summed: bool, pulls: bool) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    a, b, _ = data.draw(st.sampled_from(list(signatures(mesh))))
    algorithm = signed(a, b, summed=summed)
    case = data.draw(cases(algorithm.pulled if pulls else algorithm, max_ranks=12))
    with limits(changed):
        run(case, case.seed)


# -- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_split_operands_move_nothing(mesh: MeshShape) -> None:
    """As SBP promises: where no operand comes in summands, C is made where `deduce` has it. B·B shares C out."""
    for a, b, c in signatures(mesh):
        if "P" not in (*a, *b) and "B" not in c:
            algorithm = signed(a, b, summed=False)
            layouts = as_deduced(c, needed(algorithm, mesh), mesh)
            assert layouts in taken(algorithm, mesh)
            assert sum(words(algorithm, PlacedProblem(SHAPE, mesh, layouts)).words) == 0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_summands_that_are_not_added_stay_where_they_are(mesh: MeshShape) -> None:
    """Where no placement of C is asked for: split operands move nothing then."""
    for a, b, c in signatures(mesh):
        algorithm = signed(a, b, summed=False)
        layouts = taken(algorithm, mesh)[0]
        assert layouts[2].partial == tuple(axis for axis, x in zip(mesh.names, c, strict=True) if x == "P")
        if "P" not in (*a, *b) and "B" not in c:
            a_and_b = needed(algorithm, mesh)[:2]
            assert sum(words(algorithm, PlacedProblem(SHAPE, mesh, (*a_and_b, layouts[2]))).words) == 0


def test_summands_of_c_are_reduced_and_scattered() -> None:
    mesh, algorithm = MeshShape((3,)), signed("S(1)", "S(0)")
    outcome = words(algorithm, PlacedProblem((6, 4, 3), mesh, needed(algorithm, mesh)))
    assert outcome.words == [2 * 6 * 4 // 3] * 3  # each is sent its rows by the two others


@pytest.mark.parametrize("mesh", [MeshShape((4,)), MeshShape((2, 3)), MeshShape((3, 2))], ids=str)
@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("data_parallel", "S(0)", "B"),
        ("column_parallel", "B", "S(1)"),
        ("row_parallel", "S(1)", "S(0)"),
        ("mixed_2d", "S(0), B", "B, S(1)"),
        ("row_column_2d", "B, S(1)", "S(1), S(0)"),
    ],
)
def test_the_registry_comes_out_of_signatures(name: str, a: str, b: str, mesh: MeshShape) -> None:
    """The same placements are taken, and the same words moved on each; one word is for a mesh of one axis."""
    known, algorithm = ALGORITHMS[name], signed(a, b)
    assert algorithm.placements
    if isinstance(algorithm.placements(mesh), str):
        return
    assert needed(algorithm, mesh) == needed(known, mesh)
    for layouts in dict.fromkeys(taken(known, mesh)):
        problem = PlacedProblem(SHAPE, mesh, layouts)
        assert words(algorithm, problem).words == words(known, problem).words
        assert traffic(workload_of(algorithm, problem)) == traffic(workload_of(known, problem))


# -- what there is not ----------------------------------------------------------------------------


def valid(a: str, b: str) -> bool:
    try:
        deduce((a,), (b,))  # type: ignore[arg-type]
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize("pair", [(a, b) for a in PLACED for b in PLACED if not valid(a, b)], ids=str)
def test_other_pairs_are_refused(pair: Sbp) -> None:
    a, b = pair
    with pytest.raises(LayoutError, match="valid along an axis are") as error:
        signed(f"B, {a}", f"B, {b}")
    assert f"axis 1 has A {a} and B {b}" in str(error.value)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("S(2)", "B", "S splits dimension 0"),
        ("S(0), B", "B", "one word per mesh axis"),
        (", ".join("B" * 7), ", ".join("B" * 7), "more than one word per axis"),
        ("", "B", "got 0 words"),
    ],
)
def test_texts_that_are_no_signature(a: str, b: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        signed(a, b)


def test_a_mesh_that_does_not_fit_is_a_reason() -> None:
    algorithm = signed("S(0), B", "B, S(1)")
    assert algorithm.placements
    assert "this one is 2x2x2" in str(algorithm.placements(MESHES[2]))


def test_the_name_is_the_signature() -> None:
    algorithm = signed(("S(0)", "B"), ("B", "S(1)"))
    assert algorithm.name == f"{sbp_text(('S(0)', 'B'))}·{sbp_text(('B', 'S(1)'))}"
    assert signed("B", "B", name="shared").name == "shared"


def test_replicas_of_both_share_the_rows_of_c() -> None:
    mesh = MeshShape((2, 2))
    algorithm = signed("B, S(0)", "B, B")
    work = algorithm.work(PlacedProblem((8, 4, 4), mesh, (everywhere(), everywhere(), needed(algorithm, mesh)[2])))
    assert str(work) == "P(('j', 'i'), None, None)"
