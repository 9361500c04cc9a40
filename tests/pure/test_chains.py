"""Chains of products: steps as text, and placements found together that no others can be cheaper than."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, prod
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import TYPICAL, described
from rma_mm.policy.planner import chain_search as placing
from rma_mm.policy.planner.candidates import Request, candidates, placed_problem
from rma_mm.policy.planner.chain_graph import Graph
from rma_mm.policy.planner.chain_places import (
    all_places,
    conversion_seconds,
    placements,
    product_seconds,
)
from rma_mm.policy.planner.chain_search import Question, greedily, jointly
from rma_mm.policy.planner.chain_steps import Factor, Step, requested_results, steps_of
from rma_mm.policy.planner.chain_text import graph_of
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from tests.strategies import meshes, pure
from tests.thorough import usually

MLP = ["H = X @ W1", "Y = H @ W2", "dH = dY @ W2.T", "dW2 = H.T @ dY", "dW1 = X.T @ dH"]


def steps_read(texts: list[str], shapes: dict[str, tuple[int, int]], dtype: str = "float32") -> tuple:
    """The steps of a chain, and the shapes of all its matrices."""
    graph = Graph()
    for name, shape in shapes.items():
        graph.input(name, shape, np.dtype(dtype))
    read = graph_of(texts, graph, {})
    found, nodes = steps_of(graph, requested_results(graph, read, None, None))
    return found, shapes | {step.result: graph.nodes[nodes[step.result]].shape for step in found}


# -- placements -----------------------------------------------------------------------------------


def texts(layouts: object) -> list[str]:
    return [str(layout) for layout in layouts]  # type: ignore[attr-defined]


def test_placements_are_those_known_and_equal_shares_each_once() -> None:
    mesh = MeshShape((2, 2))
    assert texts(placements(mesh, (8, 8), False)) == ["P('i', 'j')", "P(('i', 'j'), None)", "P(None, ('i', 'j'))"]
    assert texts(placements(mesh, (8, 8), True)) == [
        *("P('i', 'j')", "P(('i', 'j'), None)", "P(None, ('i', 'j'))", "P('j', 'i')")
    ]
    known = parse_layout("P('i+j', None)", mesh), parse_layout("P('i', None)", mesh)
    assert texts(placements(mesh, (8, 8), False, known)) == [
        *("P('i+j', None)", "P('i', None)", "P('i', 'j')", "P(None, ('i', 'j'))")
    ]
    assert texts(placements(MeshShape((4, 1)), (8, 8), True)) == ["P('i', 'j')", "P(None, ('i', 'j'))"]


# -- the search, on costs that are drawn ----------------------------------------------------------


def drawn_question(seed: int, steps: int, options: int, is_metric: bool, has_gaps: bool) -> Question:
    """A chain with costs of whole numbers; placements are numbers, too. Some steps are no products."""
    rng = Random(seed)
    inputs, made, found = ["A", "B", "C"][: rng.randint(1, 3)], [], []
    for number in range(steps):
        count = rng.choice((2, 2, 2, 1, 0))
        names = rng.choices([*inputs, *made], k=count + (rng.randrange(2) if count else 1))
        made.append(f"R{number}")
        factors = tuple(map(Factor, names))
        found.append(Step(made[-1], factors[:count], factors[count:]))
    read = {factor.name for step in found for factor in step.reads}
    inputs = [name for name in inputs if name in read]
    places = {name: tuple(range(options)) for name in [*inputs, *made]}
    given = {name: rng.randrange(options) for name in inputs if rng.randrange(2)}
    wanted = {name: rng.randrange(options) for name in made if not rng.randrange(3)}
    at = {name: [rng.randint(0, 9) for _ in range(options)] for name in places}
    moves = {
        (name, p, q): abs(at[name][p] - at[name][q]) + 2 if is_metric else rng.randint(0, 12)
        for name in places for p in range(options) for q in range(options)
    }
    prices = {
        key: inf if has_gaps and not rng.randrange(3) else rng.randint(0, 20)
        for number in range(steps)
        for key in product([number], *[range(options)] * (len(found[number].factors) + 1))
    }
    beside = {
        (number, place): None if has_gaps and not rng.randrange(5) else [rng.randrange(options) for _ in step.others]
        for number, step in enumerate(found) for place in range(options)
    }
    return Question(
        tuple(found), places, given, wanted, lambda number, layouts: prices[number, *layouts],
        lambda name, p, q: moves[name, p, q], lambda number, place: beside[number, place],
    )  # type: ignore[arg-type]


def brute_force(question: Question, may_convert: bool = True) -> float:
    """The least cost of all choices there are: a start for each free input, placements of every product's matrices."""
    options = question.options
    made = [step.result for step in question.steps]
    free = [name for name in options if name not in question.input_layouts and name not in made]
    ways = [product(*(options[x] for x in (*(f.name for f in s.factors), s.result))) for s in question.steps]
    ways = [list(each) for each in ways]
    best = inf
    for starts in product(*(options[name] for name in free)):
        for choice in product(*ways):
            there = {name: {layout} for name, layout in question.input_layouts.items()}
            there |= {name: {layout} for name, layout in zip(free, starts, strict=True)}
            total = 0.0
            for number, (step, places) in enumerate(zip(question.steps, choice, strict=True)):
                others = question.beside(number, places[-1])
                if others is None and step.others:
                    total = inf
                    break
                for factor, place in zip(step.reads, (*places[:-1], *(others or ())), strict=True):
                    total += _brought(question, there, factor.name, place, may_convert)
                total += question.price(number, places)
                there[step.result] = {places[-1]}
            else:
                total += sum(
                    _brought(question, there, name, place, True) for name, place in question.result_layouts.items()
                )
            best = min(best, total)
    return best


def _brought(question: Question, there: dict, name: str, place: object, may_convert: bool) -> float:
    if place in there[name]:
        return 0.0
    cost = min(question.conversion(name, source, place) for source in there[name]) if may_convert else inf
    there[name].add(place)
    return cost


def replayed(question: Question, answer: placing.Answer) -> float:
    """The cost of an answer, once everything in it is found to be there when it is used."""
    there = {name: {layout} for name, layout in answer.start.items()}
    made = [step.result for step in question.steps]
    assert set(there) == set(question.options) - set(made)
    assert question.input_layouts.items() <= answer.start.items()
    total = 0.0

    def convert(each: placing.PricedConversion) -> float:
        assert each.source in there[each.name]
        assert each.target not in there[each.name]
        there[each.name].add(each.target)
        assert each.seconds == question.conversion(each.name, each.source, each.target)
        return each.seconds

    for number, (step, placed) in enumerate(zip(question.steps, answer.steps, strict=True)):
        total += sum(map(convert, placed.conversions))
        *read, c = placed.layouts
        assert all(place in there[factor.name] for factor, place in zip(step.reads, read, strict=True))
        count = len(step.factors)
        assert not step.others or read[count:] == list(question.beside(number, c))
        there[step.result] = {c}
        assert placed.seconds == question.price(number, (*read[:count], c))
        total += placed.seconds
    total += sum(map(convert, answer.last))
    assert all(place in there[name] for name, place in question.result_layouts.items())
    assert answer.seconds == pytest.approx(total)
    return total


questions = st.builds(
    drawn_question,
    seed=st.integers(0, 2**32),
    steps=st.sampled_from((2, 3)),
    options=st.just(2),
    is_metric=st.booleans(),
    has_gaps=st.booleans(),
)
wider = st.builds(
    drawn_question, st.integers(0, 2**32), st.just(2), st.just(3), is_metric=st.booleans(), has_gaps=st.booleans()
)


@pure(150)
@given(st.one_of(questions, wider), st.booleans())
def test_no_placements_are_cheaper(question: Question, may_convert: bool) -> None:
    least = brute_force(question, may_convert)
    if least == inf:
        with pytest.raises(AlgorithmError, match="no placements"):
            jointly(question, may_convert)
        return
    answer = jointly(question, may_convert)
    assert replayed(question, answer) == least
    assert answer.is_exact
    assert may_convert or not any(placed.conversions for placed in answer.steps)


@pure(150)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(2, 7),
    options=st.integers(2, 4),
    is_metric=st.booleans(),
    has_gaps=st.booleans(),
    beam=st.sampled_from((1, 3, 2000)),
)
def test_together_is_never_dearer_than_one_after_the_other(
    seed: int, steps: int, options: int, is_metric: bool, has_gaps: bool, beam: int
) -> None:
    question = drawn_question(seed, steps, options, is_metric, has_gaps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "BEAM", beam)
        try:
            greedy = greedily(question)
        except AlgorithmError:
            return  # it ran into a dead end
        answer = jointly(question)
    assert replayed(question, answer) <= replayed(question, greedy)
    assert answer.is_exact or beam < 2000


def test_a_narrow_beam_says_that_it_is_not_exact() -> None:
    question = drawn_question(5, 6, 4, False, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "BEAM", 1)
        narrow = jointly(question)
    assert not narrow.is_exact
    assert narrow.seconds >= jointly(question).seconds


def test_states_beyond_the_beam_are_not_held_against_others() -> None:
    """Of thousands of states that no other makes needless, only those that are kept are looked at."""
    search = placing._Search(drawn_question(5, 6, 4, False, False))
    nodes = [placing._Node(float(n), tuple(1 for _ in search.alive[1])) for n in range(5)]
    assert search.pruned(reversed(nodes), 1, False, 3) == nodes[:3]


def test_greedy_loses_where_a_first_step_is_a_little_cheaper_elsewhere() -> None:
    steps, _ = steps_read(["H = X @ W", "Y = H @ V", "Z = H @ U"], dict.fromkeys("XWVU", (4, 4)))
    options = dict.fromkeys(("X", "W", "V", "U", "H", "Y", "Z"), ("rows", "blocks"))
    first = {"rows": 10, "blocks": 9}

    def price(number: int, layouts: tuple) -> float:
        return first[layouts[2]] if number == 0 else {"rows": 5, "blocks": 8}[layouts[0]]

    question = Question(
        steps, options, dict.fromkeys(["X", "W", "V", "U"], "rows"), {}, price, lambda *_: 2.0
    )  # type: ignore[arg-type]
    greedy, joint = greedily(question), jointly(question)
    assert (greedy.seconds, joint.seconds) == (9 + 8 + 8, 10 + 5 + 5)
    assert not joint.conversions
    # now the first result is needed in blocks at any rate: converting it, once for both later steps, pays
    first["rows"] = 30
    joint = jointly(question)
    assert joint.seconds == 9 + 2 + 5 + 5
    assert [(each.name, each.source, each.target) for each in joint.conversions] == [("H", "blocks", "rows")]


# -- the search, on real prices -------------------------------------------------------------------

CLUSTER = described(
    "cluster", cores=1, gflops=100, memory_rate=10e9, latency=20e-6, bandwidth=1e9, node_latency=1e-6, hidden=0.5
)
TARIFF = CostModel(CLUSTER)


def real_question(
    mesh: MeshShape, steps: list[str], shapes: dict, given: dict[str, str], cost_model: CostModel = TARIFF
) -> Question:
    """A chain whose products and conversions the planner prices."""
    found, shapes = steps_read(steps, shapes)
    places = {name: parse_layout(text, mesh) for name, text in given.items()}
    options = all_places(mesh, found, shapes, places, cost_model.machine.speeds_of(mesh.size))

    def price(number: int, layouts: tuple) -> float:
        step, (a, b, c) = found[number], layouts
        (m, n), (k, _) = (
            shapes[step.result],
            shapes[step.factors[1].name][:: -1 if step.factors[1].transposition else 1],
        )
        a, b = (x.T if factor.transposition else x for factor, x in zip(step.factors, (a, b), strict=True))
        return product_seconds(Request((m, n, k), mesh, (a, b, c), cost_model=cost_model))

    return Question(
        found, options, places, {}, price, lambda name, p, q: conversion_seconds(mesh, shapes[name], p, q, cost_model)
    )


@pure(8)
@given(meshes(max_ranks=4, axes=(1, 2)), st.data())
def test_real_prices_of_small_chains(mesh: MeshShape, data: st.DataObject) -> None:
    mesh = replace(mesh, dims=(mesh.size, 1), names=("i", "j"))  # two placements, so that all can be tried
    sizes = data.draw(st.lists(st.sampled_from((1, 5, 64, 300)), min_size=3, max_size=3))
    m, k, n = sizes
    given_text = data.draw(st.sampled_from(("P('i', 'j')", "P(None, ('i', 'j'))", "P(None, None)")))
    question = real_question(
        mesh, ["H = X @ W", "dW = X.T @ H"], {"X": (m, k), "W": (k, n)}, {"X": given_text}
    )
    joint, greedy = jointly(question), greedily(question)
    assert replayed(question, joint) <= replayed(question, greedy) * (1 + 1e-12)
    assert joint.seconds == pytest.approx(brute_force(question))


def test_a_tall_matrix_in_blocks_is_converted_once_for_forward_and_backward() -> None:
    """Four hosts: activations in blocks cross the network in every product, unless they are brought to rows."""
    mesh = MeshShape((2, 2), node_of_rank=(0, 1, 2, 3))
    shapes = {"X": (131072, 64), "W1": (64, 64), "W2": (64, 64), "dY": (131072, 64)}
    question = real_question(mesh, MLP, shapes, dict.fromkeys(shapes, "P('i', 'j')"))
    joint, greedy = jointly(question), greedily(question)
    assert joint.is_exact
    replayed(question, joint)
    assert joint.seconds < 0.9 * greedy.seconds
    converted = {each.name: str(each.target) for each in joint.conversions}
    assert converted["X"] == converted["dY"] == "P(('i', 'j'), None)"
    assert {str(placed.layouts[2]) for placed in joint.steps[:3]} == {"P(('i', 'j'), None)"}


# -- what a conversion costs ----------------------------------------------------------------------


def test_conversions_cost_their_words() -> None:
    """Beyond meetings: words between nodes at the wire's rate, and copies within a rank at the memory's."""
    mesh = MeshShape((4,), node_of_rank=(0, 1, 2, 3))
    rows, cols, none = (parse_layout(text, mesh) for text in ("P('i', None)", "P(None, 'i')", "P(None, None)"))
    size = 4096
    wire, memory = 4 * size * size / 4 / 1e9, 4 * size * size / 4 / 10e9

    def seconds(source: object, target: object) -> float:
        return conversion_seconds(mesh, (size, size), source, target, TARIFF)  # type: ignore[arg-type]

    assert seconds(rows, cols) == pytest.approx(0.75 * wire + 0.25 * memory, rel=0.05)
    assert seconds(rows, none) == pytest.approx(3 * wire + memory, rel=0.05)
    assert seconds(none, rows) == pytest.approx(memory, rel=0.1)
    summands = parse_layout("P(None, None, i=sum)", mesh)
    assert seconds(summands, rows) > 3 * wire
    assert np.isfinite(conversion_seconds(mesh, (0, 5), rows, cols, TARIFF))


@pytest.mark.parametrize("given", [{}, dict.fromkeys(("X", "W1", "W2"), "P('i', None)")], ids=["free", "rows"])
@pytest.mark.parametrize(("grid", "speeds"), usually(1, [((3,), (4, 2, 1)), ((2, 2), (4, 1, 1, 1))]))
def test_what_is_between_two_products_is_cut_by_speed(
    grid: tuple[int, ...], speeds: tuple[float, ...], given: dict[str, str]
) -> None:
    """An FFN: wherever its inputs are, what ranks multiply is within 5 % of what they should by their speeds."""
    mesh, total = MeshShape(grid), sum(speeds)
    cost_model = CostModel(replace(TYPICAL, speeds=tuple(speed * mesh.size / total for speed in speeds)))
    shapes = {"X": (1024, 1536), "W1": (1536, 4096), "W2": (4096, 1536)}
    question = real_question(mesh, ["H = X @ W1", "Y = H @ W2"], shapes, given, cost_model)
    answer = jointly(question)
    (m, n), (_, p) = (1024, 4096), shapes["W2"]
    for step, shape in zip(answer.steps, [(m, n, 1536), (m, p, n)], strict=True):
        request = Request(shape, mesh, step.layouts, cost_model=cost_model)
        best = next(each for each in candidates(request) if each.algorithm.order != "ticket")
        work = LoweringDecisions.of(best.algorithm, placed_problem(request, step.layouts)).work
        late = [work.region(shape, mesh, rank).size / speeds[rank] for rank in mesh.ranks]
        assert max(late) * total / prod(shape) <= 1.05
    shares = [answer.steps[0].layouts[2].region((m, n), mesh, rank).size for rank in mesh.ranks]
    assert [total * share / (m * n) for share in shares] == pytest.approx(speeds, rel=0.05)
