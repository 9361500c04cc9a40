"""Gradients of a chain, written as steps: reverse mode on its graph. Pure: no MPI.

The steps name what the chain made by the names that it has there, and repeat what has none; planned together, what is
said twice is done once.
"""

from __future__ import annotations

from collections.abc import Iterator

from rma_mm.elements.dtypes import rank
from rma_mm.elements.pointwise import OPERATIONS, Constant, bare
from rma_mm.errors import DtypeError, OptionError, quoted
from rma_mm.policy.planner.chain_graph import (
    BATCHED,
    BOUND,
    GROUPED,
    INPUT,
    MAX,
    PRODUCT,
    REDUCTIONS,
    SPREAD,
    SUM,
    TURN,
    Graph,
    Node,
    Shape,
    Value,
)


def gradients(graph: Graph, result: str, prefix: str = "d") -> list[str]:
    """The steps that make gradients of a result by all inputs that it depends on, and by named results on the way.

    They read the gradient by the result, as "dY", and make "dX" for each X. Raises OptionError for names that are not
    there, or that are taken, and for derivatives of derivatives; DtypeError for other than real numbers.

    >>> import numpy as np
    >>> from rma_mm.policy.planner.chain_text import graph_of
    >>> graph = Graph()
    >>> _ = [graph.input(name, shape, np.dtype("float32")) for name, shape in {"X": (4, 3), "W": (3, 2)}.items()]
    >>> _ = graph_of(["Y = gelu(X @ W)"], graph, {})
    >>> gradients(graph, "Y")
    ["dY_1 = dY * gelu'(X @ W)", 'dW = X.T @ dY_1', 'dX = dY_1 @ W.T']
    """
    if result not in graph.results:
        raise OptionError(f"backward: got {quoted(result)}; the results are {', '.join(graph.results)}")
    return list(_Reverse(graph, result, prefix).steps())


class _Reverse:
    def __init__(self, graph: Graph, result: str, prefix: str) -> None:
        self.graph, self.result, self.prefix = graph, result, prefix
        self.names = {n: name for name, n in reversed(graph.results.items())}
        self.names |= {n: name for name, n in graph.inputs.items()}
        self.terms: dict[int, list[str]] = {graph.results[result]: [f"{prefix}{result}"]}
        """Node → the terms whose sum is its gradient."""
        self.parts = 0

    def steps(self) -> Iterator[str]:
        begin = self.graph.results[self.result]
        for n in range(begin, -1, -1):
            if n in self.terms:
                node, gradient = self.graph.nodes[n], " + ".join(self.terms[n])
                if rank(node.dtype) != 2:
                    raise DtypeError(f"backward: {self.text(n)} is {node.dtype.name}; gradients are of real numbers")
                if (n in self.names and n != begin) or not node.args or not gradient.isidentifier():
                    name = self.name(n)
                    yield f"{name} = {gradient}"
                    gradient = name
                for x, term in self.pulled(n, node, gradient):
                    self.terms.setdefault(x, []).append(term)

    def name(self, n: int) -> str:
        """Return the name of the gradient with respect to a node."""
        known = self.names.get(n)
        if known is None:
            self.parts += 1
        name = f"{self.prefix}{self.result}_{self.parts}" if known is None else f"{self.prefix}{known}"
        if name in (*self.graph.inputs, *self.graph.results) or not name.isidentifier():
            raise OptionError(f"backward: it would make {name}, which is taken, or no name; pass another prefix=")
        return name

    def pulled(self, n: int, node: Node, g: str) -> Iterator[tuple[int, str]]:
        """Yield the contributions of the gradient `g` of a node to the gradients of its operands."""
        texts = [self.text(x) for x in node.args]
        if node.op == INPUT:
            return
        if node.op == PRODUCT:
            a, b = node.reads
            yield a, f"{g} @ {_transposed(texts[1])}"
            yield b, f"{_transposed(texts[0])} @ {g}"
        elif node.op == TURN:
            yield node.reads[0], f"{g}.T"
        elif node.op == BOUND:
            return
        elif node.op in GROUPED:
            yield from zip(node.reads, grouped_gradients(node, texts, g), strict=True)
        elif node.op == MAX:  # shared among equal ones, as by torch.amax
            of, axes = texts[0], f", {node.note[0]}" * (len(node.note) == 1)
            hit = f"where({bare(of)} >= {self.text(n)}, {of} * 0 + 1, {of} * 0)"
            yield node.reads[0], f"broadcast_to({g} / sum({hit}{axes}), {self.graph.shape(node.reads[0])}) * {hit}"
        elif node.op == SUM:
            yield node.reads[0], f"broadcast_to({g}, {self.graph.shape(node.reads[0])})"
        else:
            slopes = [g] if node.op == SPREAD else self.slopes(node.op, texts, g)
            for x, slope in zip(node.args, slopes, strict=False):
                if not isinstance(x, Constant) and slope:
                    yield x, self.gathered(slope, node.shape, self.graph.shape(x))

    def slopes(self, op: str, texts: list[str], g: str) -> list[str]:
        """Return the derivatives of an element-wise operation by its operands, times `g`, all in the result's shape."""
        x, y = (*texts, "")[:2]
        if op in (">", ">=", "<", "<="):
            return ["", ""]  # they are 0 wherever there is one
        if op.endswith("'"):
            if op == "relu'":
                return [""]  # it is 0 wherever there is one
            raise OptionError(f"backward: {self.result} depends on {op}({x}), whose derivative is not available")
        inner = bare(x)
        return {
            "+": [g, g], "-": [g, f"-{g}"], "*": [f"{g} * {y}", f"{x} * {g}"],
            "/": [f"{g} / {y}", f"-({g} * {x}) / ({y} * {y})"], "neg": [f"-{g}"],
            "**": [f"{g} * ({y} * {x} ** ({y} - 1))", f"{g} * ({x} ** {y} * log({inner}))"],
            "where": ["", f"where({inner}, {g}, 0)", f"where({inner}, 0, {g})"], "exp": [f"{g} * exp({inner})"],
            "log": [f"{g} / {x}"], "sqrt": [f"{g} / (2 * sqrt({inner}))"], "tanh": [f"{g} * (1 - tanh({inner}) ** 2)"],
            "sigmoid": [f"{g} * (sigmoid({inner}) * (1 - sigmoid({inner})))"],
        }.get(op, [f"{g} * {op}'({bare(x)})"])

    def gathered(self, text: str, shape: Shape, own: Shape) -> str:
        """Return a gradient of `shape` summed over the axes that were broadcast from the shape `own`."""
        axes = [axis for axis in (0, 1) if own[axis] != shape[axis]]
        return text if not axes else f"sum({text}{f', {axes[0]}' * (len(axes) == 1)})"

    def text(self, x: Value) -> str:
        """Return a node as it is written: by its name, or as an operand of something."""
        if isinstance(x, Constant):
            written = str(x.value).replace("inf", "1e999").replace("nan", "(1e999 - 1e999)")  # those have no literal
            return f"({written})" if written.startswith("-") else written
        if x in self.names:
            return self.names[x]
        node = self.graph.nodes[x]
        texts = [self.text(each) for each in node.args]
        if node.op == PRODUCT:
            return f"({texts[0]} @ {texts[1]})"
        if node.op == TURN:
            return f"{texts[0]}.T"
        if node.op in GROUPED:
            numbers = node.note[:1] if node.op in BATCHED else node.note
            return f"{node.op}({', '.join([*map(bare, texts), *map(str, numbers)])})"
        if node.op in REDUCTIONS:
            return f"{node.op}({bare(texts[0])}{f', {node.note[0]}' * (len(node.note) == 1)})"
        if node.op == SPREAD:
            return f"broadcast_to({bare(texts[0])}, {node.shape})"
        template = OPERATIONS[node.op].text
        return template.format(*(map(bare, texts) if template[0].isalpha() else texts))


def grouped_gradients(node: Node, texts: list[str], g: str) -> list[str]:
    """Return the gradients of the operands of work on groups of rows, for the gradient `g` of its result."""
    groups, heads = node.note
    if node.op not in BATCHED:
        reverse = "merge_heads" if node.op == "split_heads" else "split_heads"
        return [f"{reverse}({g}, {groups}, {heads})"]
    a, b = map(bare, texts)
    one, other = {
        "bmm": (f"bmm_nt({g}, {b}", f"bmm_tn({a}, {g}"), "bmm_nt": (f"bmm({g}, {b}", f"bmm_tn({g}, {a}"),
        "bmm_tn": (f"bmm_nt({b}, {g}", f"bmm({a}, {g}"),
    }[node.op]
    return [f"{one}, {groups})", f"{other}, {groups})"]


def _transposed(text: str) -> str:
    return text.removesuffix(".T") if text.endswith(".T") else f"{text}.T"
