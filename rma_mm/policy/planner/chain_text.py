"""The steps of a chain as text: "H = gelu(X @ W + b)". Read by Python's own grammar. Pure: no MPI."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rma_mm.elements.pointwise import Constant
from rma_mm.errors import OptionError, RmaError, ShapeError, truncate
from rma_mm.policy.planner.chain_graph import BATCHED, GROUPED, REDUCTIONS, TURNS, Graph, Value

RULE = "a step reads NAME = EXPRESSION, as 'H = gelu(X @ W + b)' or 'dW = X.T @ dY'"
FUNCTIONS = (
    "gelu", "relu", "gelu'", "relu'", "exp", "log", "sqrt", "tanh", "sigmoid", "where", "sum", "max", "bound",
    "softmax", "layer_norm", "broadcast_to", *GROUPED,
)
ARGUMENTS = {"broadcast_to": (1, 1), "where": (2, 2), **dict.fromkeys(GROUPED, (2, 2))}
"""The least and most arguments behind the first, of functions that take any."""
ALONG = {"sum": None, "max": None, "bound": None, "softmax": 1, "layer_norm": 1}
"""Functions that take an axis, and the one that they take if none is named; None for both axes."""
PRIME = "ʹ"  # stands for ' behind a name, so that Python takes both for one; as wide, so that columns stay right
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}
COMPARISONS = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="}
SHOWN = 100  # characters of a step that are shown above the caret


class Fault(Exception):
    """Something wrong at a place of a text."""

    def __init__(self, kind: type[RmaError], message: str, node: ast.AST | None = None) -> None:
        super().__init__(message)
        self.kind, self.node = kind, node


class Assignment(NamedTuple):
    """A step as it was written."""

    text: str
    name: str
    value: ast.expr


def graph_of(steps: object, graph: Graph, numbers: Mapping[str, Any]) -> set[str]:
    """Read the steps of a chain, one text each, or one a line, into a graph; the names that they read.

    numbers: those that have names. Raises OptionError, ShapeError and DtypeError, naming the step, with a caret under
    the place; OptionError for inputs that no step reads.
    """
    texts = [line for line in steps.splitlines() if line.split("#")[0].strip()] if isinstance(steps, str) else steps
    if not isinstance(texts, Sequence) or not texts:
        raise OptionError(f"steps: got {truncate(repr(steps))}; pass a list of steps; {RULE}")
    statements = [_assignment(text) for text in texts]
    reader = _Reader(graph, numbers, [each.name for each in statements])
    for each in statements:
        reader.read(each)
    for name in (*graph.inputs, *numbers):
        if name not in reader.read_names:
            raise OptionError(f"{name}: no step reads it; leave it out")
    return reader.read_names


def _assignment(text: object) -> Assignment:
    """Return a step, taken apart. Raises OptionError."""
    if not isinstance(text, str):
        raise OptionError(f"steps: got {truncate(repr(text))}; {RULE}")
    text = re.sub(r"\s", " ", text.strip())  # tabs too: the caret counts characters
    prepared = re.sub(r"(?<=\w)'", PRIME, text)
    try:
        found = ast.parse(prepared).body
    except SyntaxError as error:
        raise _error(text, OptionError, f"{error.msg}; {RULE}", (error.offset or 1) - 1) from None
    except (RecursionError, MemoryError):
        raise _too_deep(text) from None
    except ValueError as error:
        raise OptionError(f"steps: {truncate(repr(text))}: {error}; {RULE}") from None
    target = found[0].targets[0] if len(found) == 1 and isinstance(found[0], ast.Assign) else None
    if not isinstance(target, ast.Name) or len(found[0].targets) != 1:  # type: ignore[attr-defined]
        raise _error(text, OptionError, RULE, 0)
    return Assignment(text, target.id.replace(PRIME, "'"), found[0].value)  # type: ignore[attr-defined]


def _error(text: str, kind: type[RmaError], message: str, column: int) -> RmaError:
    """Return an error in a step, with a caret under the place."""
    start = max(0, min(column - SHOWN // 2, len(text) - SHOWN))
    shown = f"{'… ' * (start > 0)}{text[start : start + SHOWN]}{' …' * (start + SHOWN < len(text))}"
    caret = " " * (column - start + 2 * (start > 0))
    return kind(f"steps: '{truncate(text)}': {message}\n    {shown}\n    {caret}^")


def _too_deep(text: str) -> OptionError:
    return OptionError(f"steps: '{truncate(text)}': it is nested too deeply; make several steps of it")


class _Reader:
    def __init__(self, graph: Graph, numbers: Mapping[str, Any], made: list[str]) -> None:
        self.graph, self.numbers, self.defined_in = graph, numbers, made
        self.read_names: set[str] = set()
        self.text = ""

    def read(self, statement: Assignment) -> None:
        """Read a step. Raises OptionError, ShapeError, DtypeError."""
        graph, (self.text, name, value) = self.graph, statement
        try:
            if name in (*graph.inputs, *self.numbers, *graph.results):
                how = "made before" if name in graph.results else "given"
                raise Fault(OptionError, f"it makes {name}, which is {how}; every matrix has a name of its own")
            if "'" in name:
                raise Fault(OptionError, f"{name} is no name; {RULE}")
            found = self.value(value)
            if isinstance(found, Constant):
                raise Fault(OptionError, f"it makes a number, {found.value}; a step makes a matrix", value)
            graph.results[name] = found
        except Fault as fault:
            raise _error(self.text, fault.kind, str(fault), self.column(fault.node)) from None
        except RecursionError:
            raise _too_deep(self.text) from None

    def column(self, node: ast.AST | None) -> int:
        """Return the column of an expression in the text; for an operation, that of its sign."""
        if node is None:
            return 0
        if isinstance(node, ast.BinOp):
            return self.at(node.left.end_col_offset or 0, node.right.col_offset)
        return self.at(getattr(node, "col_offset", 0))

    def at(self, start: int, end: int | None = None) -> int:
        """Return the column of a byte; with `end`, of the first sign between two."""
        raw = re.sub(r"(?<=\w)'", PRIME, self.text).encode()
        column = len(raw[:start].decode())
        between = raw[start:end].decode() if end is not None else ""
        sign = re.search(r"[-+*/@%^|&<>]", between)
        return column + (sign.start() if sign else 0)

    def value(self, node: ast.expr) -> Value:
        """Return the value of an expression."""
        try:
            return self._value(node)
        except Fault as fault:
            fault.node = fault.node or node
            raise
        except RmaError as error:
            raise Fault(type(error), f"{self.shapes(node)}{error}", node) from None

    def shapes(self, node: ast.expr) -> str:
        """Return the shapes of an operation's operands."""
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        found = [(ast.unparse(x).replace(PRIME, "'"), self.graph.shape(self.value(x))) for x in operands]
        return "".join(f"{text} is {shape}, " for text, shape in found)[:-2] + "; " * bool(found)

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return self.lookup(name.replace(PRIME, "'"))
            case ast.Constant(value=int() | float() | complex() as number) if not isinstance(number, bool):
                return Constant.of(number)
            case ast.UnaryOp(op=ast.UAdd(), operand=inner):
                return self.value(inner)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                found = self.value(inner)
                return Constant.of(-found.value) if isinstance(found, Constant) else self.graph.applied("neg", found)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
                return self.binary(SIGNS[type(sign)], self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
                return self.binary(COMPARISONS[type(sign)], self.value(left), self.value(right))
            case ast.Attribute(value=inner, attr=("T" | "H") as how):
                return self.transposed(self.value(inner), how)
            case ast.Call(func=ast.Attribute(value=inner, attr="conj"), args=[], keywords=[]):
                return self.transposed(self.value(inner), "conj")
            case ast.Call(func=ast.Name(id=name)):
                return self.call(name.replace(PRIME, "'"), node)
        raise Fault(OptionError, f"there are + - * / ** @ > >= < <=, .T, .H, .conj(), {', '.join(FUNCTIONS)}; {RULE}")

    def lookup(self, name: str) -> Value:
        self.read_names.add(name)
        if name in self.numbers:
            return Constant.of(self.numbers[name])
        found = self.graph.inputs.get(name, self.graph.results.get(name))
        if found is not None:
            return found
        there = ", ".join((*self.graph.inputs, *self.numbers, *self.graph.results)) or "none"
        later = ", but only by this step or a later one" if name in self.defined_in else ""
        raise Fault(OptionError, f"it reads {name}, which is not there{later}; given or made before are {there}")

    def binary(self, sign: str, a: Value, b: Value) -> Value:
        if isinstance(a, Constant) and isinstance(b, Constant):
            return _computed(sign, a.value, b.value)
        if sign != "@":
            return self.graph.applied(sign, a, b)
        if isinstance(a, Constant) or isinstance(b, Constant):
            raise Fault(OptionError, "@ takes two matrices; * multiplies by a number")
        return self.graph.product(a, b)

    def transposed(self, x: Value, how: str) -> Value:
        if not isinstance(x, Constant):
            return self.graph.transposed(x, how)
        return Constant.of(x.value.conjugate() if TURNS[how][1] else x.value)

    def call(self, name: str, node: ast.Call) -> Value:
        if name not in FUNCTIONS:
            raise Fault(OptionError, f"there is no function {name}; there are {', '.join(FUNCTIONS)}", node.func)
        keywords = [x.arg for x in node.keywords]
        second = [*node.args[1:], *(x.value for x in node.keywords if x.arg == "axis" and name in ALONG)]
        most = (0, 1) if name in ALONG else ARGUMENTS.get(name, (0, 0))
        if not node.args or not most[0] <= len(second) <= most[1] or keywords not in ([], ["axis"] * (name in ALONG)):
            takes = {"broadcast_to": "broadcast_to(b, (rows, columns))", "where": "where(X > Y, A, B)"}
            takes |= {op: f"{op}(A, B, groups)" for op in BATCHED}
            takes |= {op: f"{op}(X, groups, heads)" for op in GROUPED if op not in BATCHED}
            along = f"{name}(X, 0) or {name}(X, 1)" if name in ALONG else f"{name}(X)"
            raise Fault(OptionError, f"{name} is written {takes.get(name, along)}", node)
        x = self.value(node.args[0])
        if name == "broadcast_to":
            return self.graph.spread(x, _shape(second[0]))
        if isinstance(x, Constant):
            if name in ("exp", "log", "sqrt", "tanh"):
                return _of_number(name, x.value)
            raise Fault(OptionError, f"{name} takes a matrix, not the number {x.value}", node)
        if name in BATCHED:
            other = self.value(second[0])
            if isinstance(other, Constant):
                raise Fault(OptionError, f"{name} takes two matrices, not the number {other.value}", node)
            return self.graph.batched(name, x, other, _count(second[1]))
        if name in GROUPED:
            return self.graph.regrouped(name, x, _count(second[0]), _count(second[1]))
        if name in ALONG:
            axes = _axes(second) if second or ALONG[name] is None else (ALONG[name] or 0,)
            if name in REDUCTIONS:
                return self.graph.reduced(name, x, axes)
            return self.graph.softmax(x, axes) if name == "softmax" else self.graph.layer_norm(x, axes)
        return self.graph.applied(name, x, *map(self.value, second))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _axes(said: list[ast.expr]) -> tuple[int, ...]:
    """Return the axes that are summed: both where none is said."""
    if not said:
        return 0, 1
    axis = _literal(said[0])
    if axis not in (0, 1, -1, -2) or isinstance(axis, bool):
        raise Fault(OptionError, "the axis is 0, for sums of columns, or 1, for sums of rows", said[0])
    return (axis % 2,)


def _count(said: ast.expr) -> int:
    number = _literal(said)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise Fault(OptionError, "groups and heads are whole numbers of at least 1", said)
    return number


def _shape(said: ast.expr) -> tuple[int, int]:
    shape = _literal(said)
    if not (isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise Fault(ShapeError, "a shape is two whole numbers, as (3, 4)", said)
    return shape


def _of_number(name: str, x: Any) -> Constant:
    try:
        return Constant.of(getattr(math, name)(x))
    except (ValueError, TypeError, OverflowError) as error:
        raise Fault(OptionError, f"{name}({x}): {error}") from None


def _computed(sign: str, a: Any, b: Any) -> Constant:
    try:
        match sign:
            case "+":
                return Constant.of(a + b)
            case "-":
                return Constant.of(a - b)
            case "*":
                return Constant.of(a * b)
            case "/":
                return Constant.of(a / b)
            case "**":
                return Constant.of(a**b)
    except (ZeroDivisionError, OverflowError) as error:
        raise Fault(OptionError, f"{error}") from None
    if sign == "@":
        raise Fault(OptionError, "@ takes two matrices; * multiplies by a number")
    raise Fault(OptionError, f"{sign} compares two numbers; it takes a matrix")
