"""Steps of chains as text: what is read, what is shared, dropped and done together, and where what is wrong stands."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

from bench.trust.programs import by_numpy, drawn, is_right
from rma_mm.elements import pointwise
from rma_mm.elements.dtypes import BFLOAT16, parse_dtype
from rma_mm.elements.pointwise import Constant, Pointwise, result_of
from rma_mm.errors import DtypeError, OptionError, ShapeError
from rma_mm.kernels.epilogue.groups import do_groups
from rma_mm.kernels.epilogue.pointwise import apply, reduce_axes
from rma_mm.policy.planner import chain_gradients
from rma_mm.policy.planner.chain_gradients import gradients
from rma_mm.policy.planner.chain_graph import Graph
from rma_mm.policy.planner.chain_steps import Factor, Step, requested_results, steps_of
from rma_mm.policy.planner.chain_text import graph_of

SHAPES = {"X": (7, 3), "W": (3, 5), "b": (1, 5), "V": (5, 3), "dY": (7, 3), "c": (7, 1)}
MLP = [
    "Z = X @ W + b", "H = gelu(Z)", "Y = H @ V + X", "dV = H.T @ dY", "dZ = (dY @ V.T) * gelu'(Z)", "dW = X.T @ dZ",
    "db = sum(dZ, 0)",
]


def read(
    steps: object, outputs: object = None, only: object = None, fuses: bool = True, dtype: str = "float32", **numbers
) -> tuple[Step, ...]:
    """The steps that are left of a chain on the matrices of SHAPES that it names."""
    graph, named = Graph(), re.findall(r"\b\w+\b", str(steps))
    for name, shape in SHAPES.items():
        if name in named:
            graph.input(name, shape, np.dtype(dtype))
    names = graph_of(steps, graph, numbers)
    return steps_of(graph, requested_results(graph, names, outputs, only), fuses)[0]


def texts(*args: object, **options: object) -> list[str]:
    return list(map(str, read(*args, **options)))


# -- what is read ---------------------------------------------------------------------------------


def test_steps_say_what_is_done() -> None:
    assert texts(MLP) == [
        "Z = (X @ W) + b", "H = gelu(Z)", "Y = (H @ V) + X", "dV = H.T @ dY", "dZ = (dY @ V.T) * gelu'(Z)",
        "dW = X.T @ dZ", "db = sum(dZ, 0)",
    ]
    assert read(" G=X.T@X  # Gram\n\n  # nothing\nY\t= G @ X.T") == (
        Step("G", (Factor("X", "T"), Factor("X"))),
        Step("Y", (Factor("G"), Factor("X", "T"))),
    )
    assert read("Y = relu(X @ W) - b * 2") == (
        Step("Y", (Factor("X"), Factor("W")), (Factor("b"),), work=read("Y = relu(X @ W) - b * 2")[0].work),
    )
    assert texts("Y = -X / 2 + 1.5\nS = sum(X)") == ["Y = ((-X) / 2) + 1.5", "S = sum(X)"]
    assert texts("Y = lr * X", lr=0.5) == ["Y = 0.5 * X"]
    assert texts(["Y = (X @ W).T @ (X @\n  W)"]) == ["Y#1 = X @ W", "Y = Y#1.T @ Y#1"]


def test_turns_meet() -> None:
    assert texts("Y = X.T.T @ W.conj() @ V.H.T.conj()") == texts("Y = X @ W @ V") == ["Y#1 = X @ W", "Y = Y#1 @ V"]
    kind = "complex64"
    assert texts("Y = X.H.T @ W.conj()", dtype=kind) == ["Y = X.conj() @ W.conj()"]
    assert texts("Y = X.H @ dY.conj().T.T", dtype=kind) == ["Y = X.H @ dY.conj()"]
    assert texts("Y = X.conj().T @ dY", dtype=kind) == ["Y = X.H @ dY"]
    assert texts("Y = W @ W.H - (X.T @ X).conj()", dtype=kind)[-1] == "Y = (W @ W.H) - Y#1.conj()"
    assert texts("Y = W.H.H", dtype=kind) == ["Y = W"]


def test_examples() -> None:
    assert doctest.testmod(pointwise).failed == doctest.testmod(chain_gradients).failed == 0


# -- what is done once, together, or not at all ----------------------------------------------------


def test_what_is_said_twice_is_done_once() -> None:
    twice = ["H = gelu(X @ W + b)", "dZ = (dY @ V.T) * gelu'(X @ W + b)", "G = X @ W"]
    found = texts(twice)
    assert sum("X @ W" in text for text in found) == 1
    assert texts(["A = X @ W", "B = X @ W"]) == ["A = X @ W", "B = A"]
    assert len(texts(["A = (X * 1) @ W", "B = (X * 1.0) @ W"])) == 4  # other types, where X is whole
    assert texts(["A = X / 0.0", "B = X / -0.0"]) == ["A = X / 0.0", "B = X / -0.0"]  # other signs


def test_what_nobody_wants_is_dropped() -> None:
    assert texts(MLP, only=["H"]) == ["H = gelu((X @ W) + b)"]
    assert texts(MLP, only=["db"])[-1] == "db = sum(dZ, 0)"
    assert not any(text.startswith(("Y", "dV", "dW")) for text in texts(MLP, only=["db"]))
    assert texts(["A = X @ W", "B = A + b"]) == ["B = (X @ W) + b"]
    assert texts(["A = X @ W", "B = A + b"], outputs=["A"]) == ["A = X @ W", "B = A + b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": ["Q"]}, ["only: got ['Q']", "A, B"]),
        ({"only": []}, ["only: got []"]),
        ({"outputs": "A"}, ["outputs: got 'A'", "A, B"]),
        ({"outputs": ["X"]}, ["outputs: got ['X']"]),
        ({"outputs": 3}, ["outputs: got 3"]),
        ({"outputs": [["A"]]}, ["outputs: got [['A']]"]),
        ({"outputs": ["A"], "only": ["A"]}, ["outputs, only", "use one of them"]),
    ],
)
def test_outputs_are_named(options: dict, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        read(["A = X @ W", "B = A + b"], **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_element_wise_work_goes_along_with_the_last_product_of_its_shape() -> None:
    assert texts("Y = X @ W * 2 + dY @ W") == ["Y#2 = X @ W", "Y = (Y#2 * 2) + (dY @ W)"]
    (step,) = read("Y = gelu(X @ W + b)")
    assert step.is_product and step.work == Pointwise(2, (("+", (0, 1)), ("gelu", (2,))), 3)
    assert len(read("Y = gelu(X @ W + b)", fuses=False)) == 2
    assert len(read("Y = (c.T @ X) + X")) == 2  # broadcast: the product has another shape
    assert len(read("Y = (X @ W).T + W.T @ X.T")) == 2
    assert len(read("Y = (X @ W) * (X @ W)")) == 1


# -- as NumPy does it -----------------------------------------------------------------------------


def run(steps: tuple[Step, ...], inputs: dict, made: dict) -> dict:
    """What the steps give, one after the other, put into `made`."""
    known = dict(inputs)

    def value(x: Factor) -> np.ndarray:
        found = known[x.name].T if x.transposed else known[x.name]
        return found.conj() if x.conjugated else found

    for step in steps:
        factors, out = list(map(value, step.factors)), made[step.result]
        if step.axes:
            reduce_axes(step.reduction, factors[0], step.axes, out)
        if step.is_product:
            np.matmul(*factors, out=out)
        if step.grouped is not None:
            do_groups(step.grouped[0], step.grouped[2], step.grouped[1], list(map(value, step.others)), out)
        if step.work is not None:
            apply(step.work, [*[out] * step.is_product, *map(value, step.others)], out)
        known[step.result] = out
    return known


def test_random_programs_are_grouped_right() -> None:
    """Interpreted step by step, 300 of them give what NumPy gives."""
    for seed in range(300):
        program = drawn(seed)
        graph = Graph()
        for name, x in program.inputs.items():
            graph.input(name, x.shape, x.dtype)
        steps, nodes = steps_of(
            graph, requested_results(graph, graph_of(program.steps, graph, {}), None, None), bool(seed % 2)
        )
        results = {step.result: graph.nodes[nodes[step.result]] for step in steps}
        made = {name: np.empty(node.shape, node.dtype) for name, node in results.items()}
        found, wanted = run(steps, program.inputs, made), by_numpy(program.steps, program.inputs)
        for name in wanted.keys() & results.keys():
            assert is_right(found[name], wanted[name], program), (seed, name)


# -- gradients ------------------------------------------------------------------------------------


def graph_with(steps: list[str], inputs: dict) -> Graph:
    graph = Graph()
    for name, x in inputs.items():
        graph.input(name, x.shape, x.dtype)
    graph_of(steps, graph, {})
    return graph


def slope(steps: list[str], inputs: dict, name: str, by: dict, change: dict) -> float:
    """The derivative of the sum of a result, times `by`, as inputs change, by central differences."""
    ends = []
    for sign in (1, -1):
        moved = {x: value + sign * 1e-5 * change[x] for x, value in inputs.items()}
        ends.append(float(np.sum(by_numpy(steps, moved)[name] * by)))
    return (ends[0] - ends[1]) / 2e-5


def check_gradients(steps: list[str], inputs: dict, name: str) -> None:
    rng = np.random.default_rng(len(steps))
    graph = graph_with(steps, inputs)
    by = rng.standard_normal(graph.nodes[graph.results[name]].shape)
    written = gradients(graph, name, "grad_")
    found = by_numpy([*steps, *written], inputs | {f"grad_{name}": by})
    change = {x: rng.standard_normal(value.shape) for x, value in inputs.items()}
    total = sum(float(np.sum(found[f"grad_{x}"] * change[x])) for x in inputs if f"grad_{x}" in found)
    assert total == pytest.approx(slope(steps, inputs, name, by, change), rel=1e-6, abs=1e-7), (steps, written)
    assert all(found[f"grad_{x}"].shape == value.shape for x, value in inputs.items() if f"grad_{x}" in found)
    graph_with([*steps, *written], inputs | {f"grad_{name}": by})  # and they can be planned together


def test_gradients_of_an_mlp_are_the_known_steps() -> None:
    inputs = {name: np.random.default_rng(n).standard_normal(shape) for n, (name, shape) in enumerate(SHAPES.items())}
    inputs = {name: inputs[name] for name in "XWbV"}
    steps = ["Z = X @ W + b", "H = gelu(Z)", "Y = H @ V + X"]
    assert gradients(graph_with(steps, inputs), "Y") == [
        "dH = dY @ V.T", "dZ = dH * gelu'(Z)", "dV = H.T @ dY", "db = sum(dZ, 0)", "dW = X.T @ dZ",
        "dX = dY + dZ @ W.T",
    ]
    check_gradients(steps, inputs, "Y")


SMOOTH = (
    "Y = exp(X) + log(X * X + 1) - sqrt(X * X + 2)", "Y = tanh(X)", "Y = sigmoid(X * 3)",
    "Y = X**3 - 2 ** X", "Y = (X * X + 1) ** (X + 2)", "Y = where(X > 0.1, X * X, exp(X))", "Y = softmax(X)",
    "Y = softmax(X, 0) * X", "Y = softmax(X, axis=1) @ W", "Y = layer_norm(X) * 2 + b", "Y = layer_norm(X, 0)",
    "Y = max(X, 1) * X", "Y = max(X)", "Y = max(X, 0)", "Y = X / bound(X * 0 + 2, 1)",
    "Y = sigmoid(X @ W) / (1 + exp(X @ W))", "Y = bmm_nt(B, C, 3) * 2", "Y = bmm(bmm_nt(B, C, 3), C, 3)",
    "Y = bmm_tn(B, B * 2, 3)", "Y = bmm_tn(B, tanh(B), 2)", "Y = merge_heads(softmax(bmm_nt(H, H, 6)), 3, 2)",
    "Y = split_heads(B, 3, 2) * 3", "Y = merge_heads(split_heads(B, 2, 4) ** 2, 2, 4) + B", "Y = merge_heads(H, 3, 2)",
)


@pytest.mark.parametrize("step", SMOOTH)
def test_functions_and_their_gradients(step: str) -> None:
    rng = np.random.default_rng(7)
    shapes = {"X": (5, 4), "W": (4, 3), "b": (1, 4), "B": (6, 4), "C": (9, 4), "H": (12, 2)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items() if re.search(rf"\b{name}\b", step)}
    graph = graph_with([step], inputs)
    steps, nodes = steps_of(graph, ["Y"])
    made = {each.result: np.empty(graph.nodes[nodes[each.result]].shape) for each in steps}
    np.testing.assert_allclose(run(steps, inputs, made)["Y"], by_numpy([step], inputs)["Y"], rtol=1e-12)
    check_gradients([step], inputs, "Y")


def test_the_gradient_of_a_largest_element_is_shared_among_equals() -> None:
    x = np.array([[1.0, 3, 3], [2, 0, 1]])
    graph = graph_with(["Y = max(X, 1)"], {"X": x})
    made = by_numpy(["Y = max(X, 1)", *gradients(graph, "Y")], {"X": x, "dY": np.array([[4.0], [5]])})["dX"]
    assert made.tolist() == [[0, 2, 2], [5, 0, 0]]


def test_softmax_does_not_overflow_and_types_are_kept() -> None:
    for dtype in ("float16", "float32", "float64", BFLOAT16):
        x = (np.arange(6).reshape(2, 3) * 300).astype(dtype)
        for text in ("softmax(X)", "layer_norm(X)", "sigmoid(X) ** 2", "where(X > 2, X, 0)", "max(X, 1)"):
            graph = graph_with([f"Y = {text}"], {"X": x})
            steps, nodes = steps_of(graph, ["Y"])
            kinds = {each.result: graph.nodes[nodes[each.result]] for each in steps}
            assert kinds["Y"].dtype == np.dtype(dtype), text
            found = run(steps, {"X": x}, {name: np.empty(node.shape, node.dtype) for name, node in kinds.items()})["Y"]
            assert np.isfinite(found.astype(float)).all(), (text, dtype)


def test_gradients_hold_numbers_that_have_no_literal() -> None:
    graph = Graph()
    graph.input("X", (2, 3), np.dtype(float))
    graph_of(["Y = X * a + X * b + X * c"], graph, {"a": np.inf, "b": -np.inf, "c": np.nan})
    (step,) = gradients(graph, "Y")
    made = by_numpy([step], {"dY": np.ones((2, 3))})["dX"]
    graph_with(["Y = X * 2", step], {"X": np.ones((2, 3)), "dY": np.ones((2, 3))})
    assert step.count("1e999") == 4 and np.isnan(made).all()


def test_gradients_of_random_programs_are_their_differences() -> None:
    count = 0
    for seed in range(600):
        program = drawn(seed)
        if any(x.dtype != np.float64 for x in program.inputs.values()) or not program.inputs:
            continue
        if re.search(r"relu|gelu'", " ".join(program.steps)):
            continue
        check_gradients(program.steps, program.inputs, program.steps[-1].split(" =")[0])
        count += 1
    assert count > 50


@pytest.mark.parametrize(
    ("steps", "dtype", "options", "kind", "words"),
    [
        (["Y = X @ W"], float, {"result": "Z"}, OptionError, ["got 'Z'", "the results are Y"]),
        (["dX = X @ W"], float, {"result": "dX"}, OptionError, ["dX", "taken", "prefix="]),
        (["Y = gelu'(X) * 2"], float, {"result": "Y"}, OptionError, ["gelu'(X)", "not available"]),
        (["Y = X * 2"], complex, {"result": "Y"}, DtypeError, ["complex128", "real numbers"]),
        (["Y = X * 2"], int, {"result": "Y"}, DtypeError, ["int64", "real numbers"]),
    ],
)
def test_gradients_that_there_are_not(
    steps: list[str], dtype: type, options: dict, kind: type, words: list[str]
) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name in re.findall(r"\w+", steps[0].split("=")[1])}
    graph = graph_with(steps, {name: np.ones(shape, dtype) for name, shape in shapes.items()})
    with pytest.raises(kind) as caught:
        gradients(graph, **options)
    assert all(word in str(caught.value) for word in words), caught.value


# -- what is wrong, and where ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "kind", "words", "column"),
    [
        ([], OptionError, ["pass a list", "NAME = EXPRESSION"], None),
        (3, OptionError, ["got 3", "pass a list"], None),
        ("", OptionError, ["pass a list"], None),
        ([b"Y = X"], OptionError, ["b'Y = X'"], None),
        (["Y = X W"], OptionError, ["'Y = X W'", "invalid syntax"], 6),
        (["Y = (X @ W"], OptionError, ["never closed"], 4),
        (["Y = X @@ W"], OptionError, ["invalid syntax"], 7),
        (["  Y.T = X"], OptionError, ["NAME = EXPRESSION"], 0),
        (["2Y = X"], OptionError, ["invalid"], 0),
        (["Y = Z = X"], OptionError, ["NAME = EXPRESSION"], 0),
        (["Y + X"], OptionError, ["NAME = EXPRESSION"], 0),
        (["Y = X.S @ W"], OptionError, [".conj()"], 4),
        (["Y = X[0]"], OptionError, ["there are + - * / ** @"], 4),
        (["Y = X % 2"], OptionError, ["there are + - * / ** @"], 6),
        (["Y = log(-2) * X"], OptionError, ["log(-2)"], 4),
        (["Y = 'X'"], OptionError, ["unterminated"], 4),
        (["Y = X @ Q"], OptionError, ["reads Q", "made before are X"], 8),
        (["Y = X @ Q", "Q = W"], OptionError, ["reads Q", "by this step or a later one"], 8),
        (["Y = Y + X"], OptionError, ["reads Y", "by this step"], 4),
        (["Y = X + X'"], OptionError, ["reads X'"], 8),
        (["A = X @ W", "A = X"], OptionError, ["'A = X'", "makes A", "made before"], 0),
        (["X = X @ W"], OptionError, ["makes X", "given"], 0),
        (["Y = bmm(X, X, 2)"], ShapeError, ["2 groups"], 4),
        (["Y = bmm_nt(X, W)"], OptionError, ["written bmm_nt(A, B, groups)"], 4),
        (["Y = bmm_nt(X, W, 0)"], OptionError, ["at least 1"], 17),
        (["Y = split_heads(X, 1, 2)"], ShapeError, ["2 heads"], 4),
        (["Y = bmm(X.T, X, 1)"], ShapeError, ["bmm_tn"], 4),
        (["Y = softmax(X, 2)"], OptionError, ["the axis is 0"], 15),
        (["Y = where(X, X)"], OptionError, ["written where(X > Y, A, B)"], 4),
        (["Y = X > W > X"], OptionError, ["there are"], 4),
        (["Y = erf(X)"], OptionError, ["no function erf", "gelu'"], 4),
        (["Y = gelu(X, W)"], OptionError, ["written gelu(X)"], 4),
        (["Y = gelu(3)"], OptionError, ["not the number 3"], 4),
        (["Y = X + sum(X, 2)"], OptionError, ["axis is 0"], 15),
        (["Y = sum(X, 0, 1)"], OptionError, ["sum(X, 0)"], 4),
        (["Y = sum(X, rows=1)"], OptionError, ["sum(X, 0)"], 4),
        (["Y = broadcast_to(b, (2,))"], ShapeError, ["two whole numbers"], 20),
        (["Y = broadcast_to(b, (2, 4))"], ShapeError, ["(1, 5)", "(2, 4)"], 4),
        (["Y = 2 * 3"], OptionError, ["makes a number, 6"], 6),
        (["Y = X * (1 / 0)"], OptionError, ["division by zero"], 11),
        (["Y = X @ 2"], OptionError, ["@ takes two matrices"], 6),
        (["Y = gelu(X @ V)"], ShapeError, ["X is (7, 3), V is (5, 3)", "3 and 5"], 11),
        (["Y = X.T @ (dY @ W)", "Q = Y @ X"], ShapeError, ["'Q = Y @ X'", "Y is (3, 5), X is (7, 3)"], 6),
        (["Y = X @ W + X"], ShapeError, ["X @ W is (7, 5), X is (7, 3)"], 10),
        (["Y = X + V"], ShapeError, ["X is (7, 3), V is (5, 3)", "1 in one"], 6),
        ([f"Y = {'-' * 3000}X"], OptionError, ["'Y = -----"], None),
        ([f"Y = {'+'.join('X' * 3000)}"], OptionError, ["nested too deeply"], None),
    ],
)
def test_what_is_wrong_is_said_with_a_caret_under_it(
    steps: object, kind: type, words: list[str], column: int | None
) -> None:
    with pytest.raises(kind) as caught:
        read(steps)
    message = str(caught.value)
    assert all(word in message for word in words), message
    if column is not None:
        *_, shown, caret = message.splitlines()
        assert caret.index("^") - 4 == column, message
        assert shown.strip() in " ".join(steps if isinstance(steps, list) else [str(steps)])


def test_the_caret_stands_right_in_long_steps_and_behind_other_letters() -> None:
    with pytest.raises(OptionError) as caught:
        read([f"Y = {' + '.join(['X'] * 80)} + Qß + {' + '.join(['X'] * 80)}"])
    shown, caret = str(caught.value).splitlines()[1:]
    assert shown[caret.index("^") :].startswith("Qß") and len(shown) < 120
    with pytest.raises(OptionError) as caught:
        read(["größe' = gelu'(X) + ü"])
    with pytest.raises(OptionError) as caught:
        read(["Größe = gelu'(X) + relu'(ü)"])
    shown, caret = str(caught.value).splitlines()[1:]
    assert shown[caret.index("^")] == "ü"
    with pytest.raises(OptionError) as caught:
        read("Y\t=\tX\t+ Q")
    shown, caret = str(caught.value).splitlines()[1:]
    assert "\t" not in shown and shown[caret.index("^")] == "Q"


@pytest.mark.parametrize(
    ("step", "dtype", "words"),
    [
        ("Y = gelu(X)", "int32", ["gelu(x) of int32", "real numbers"]),
        ("Y = relu(X)", "complex64", ["relu(x) of complex64"]),
        ("Y = X - X * 1", "bool", ["of bool"]),
        ("Y = X * 300", "int8", ["300", "wider type"]),
    ],
)
def test_types_that_have_no_rule(step: str, dtype: str, words: list[str]) -> None:
    with pytest.raises(DtypeError) as caught:
        read([step], dtype=dtype)
    assert all(word in str(caught.value) for word in [*words, step]), caught.value


@pytest.mark.parametrize(
    ("name", "operands", "wanted"),
    [
        ("*", ("bfloat16", 0.5), "bfloat16"),
        ("+", ("bfloat16", 2), "bfloat16"),
        ("*", ("bfloat16", 2j), "complex64"),
        ("+", ("bfloat16", "float32"), "float32"),
        ("-", ("int8", 3), "int8"),
        ("/", ("int8", "int8"), "float64"),
        ("*", ("float32", 0.1), "float32"),
        ("gelu'", ("float16",), "float16"),
    ],
)
def test_types_of_operations(name: str, operands: tuple, wanted: str) -> None:
    given = [parse_dtype(x) if isinstance(x, str) else Constant.of(x) for x in operands]
    assert result_of(name, given).name == wanted


def test_inputs_that_no_step_reads() -> None:
    graph = Graph()
    graph.input("X", (7, 3), np.dtype("float32"))
    with pytest.raises(OptionError, match="lr: no step reads it"):
        graph_of(["Y = X"], graph, {"lr": 0.5})
    graph.input("W", (3, 5), np.dtype("float32"))
    with pytest.raises(OptionError, match="W: no step reads it"):
        graph_of(["Z = X"], graph, {})
