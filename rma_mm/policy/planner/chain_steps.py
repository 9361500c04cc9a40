"""The steps of a chain: products, sums, and what is done to elements, grouped so that little goes through memory.

Of the steps as they are written those remain whose results somebody wants; what is said twice is done once;
element-wise operations that follow each other are one step, and go along with the product that they begin from. Pure:
no MPI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import field
from functools import cached_property

from rma_mm.classes import dataclass
from rma_mm.elements.pointwise import Constant, Pointwise
from rma_mm.errors import OptionError, truncate
from rma_mm.policy.planner.chain_graph import (
    BATCHED,
    GROUPED,
    PRODUCT,
    REDUCTIONS,
    SPREAD,
    SUM,
    TURN,
    TURNS,
    Graph,
    Value,
)

COPY = Pointwise(1, (), 0)  # what gives a matrix another name


@dataclass(frozen=True)
class Factor:
    """A matrix as a step reads it."""

    name: str
    transposition: str = ""
    """T for transposed, H for transposed and conjugated, conj for conjugated; empty for as it is."""

    @property
    def transposed(self) -> bool:
        return bool(self.transposition) and TURNS[self.transposition][0]

    @property
    def conjugated(self) -> bool:
        return bool(self.transposition) and TURNS[self.transposition][1]

    def __str__(self) -> str:
        return (
            f"{self.name}.{self.transposition}{'()' * (self.transposition == 'conj')}"
            if self.transposition
            else self.name
        )


@dataclass(frozen=True)
class Step:
    """One step of a chain: a product with its element-wise work, such work alone, or sums."""

    result: str
    factors: tuple[Factor, ...] = ()  # A and B of a product, or what is summed; they may lie anywhere
    others: tuple[Factor, ...] = ()
    """Operands of the element-wise work beside the product; they lie as the result does."""
    work: Pointwise | None = None  # element-wise work on the product, if it is one, and the others
    axes: tuple[int, ...] = ()  # those that are reduced
    reduction: str = SUM  # one of `REDUCTIONS`, if there are axes
    grouped: tuple[str, int, int] | None = None
    """Work on groups of rows of the others, each by itself: one of `GROUPED`, groups, heads."""

    @property
    def reads(self) -> tuple[Factor, ...]:
        return (*self.factors, *self.others)

    @property
    def is_product(self) -> bool:
        return len(self.factors) == 2

    def __str__(self) -> str:
        if self.axes:
            axis = f", {self.axes[0]}" if len(self.axes) == 1 else ""
            return f"{self.result} = {self.reduction}({self.factors[0]}{axis})"
        if self.grouped is not None:
            name, groups, heads = self.grouped
            numbers = (groups,) if name in BATCHED else (groups, heads)
            return f"{self.result} = {name}({', '.join(map(str, (*self.others, *numbers)))})"
        product = " @ ".join(map(str, self.factors))
        if self.work is None:
            return f"{self.result} = {product}"
        names = [*([f"({product})"] if product else []), *map(str, self.others)]
        return f"{self.result} = {truncate(self.work.text(names))}"


def requested_results(
    graph: Graph, read: Collection[str], outputs: Sequence[str] | None, only: Sequence[str] | None
) -> list[str]:
    """Return the results that are handed back, in the order in which they are made.

    read: the names that steps read. outputs: results beside those that no step reads; only: these and no others.
    Raises OptionError.
    """
    if outputs is not None and only is not None:
        raise OptionError("outputs, only: use one of them: outputs adds results, only replaces them")
    what, named = ("only", only) if only is not None else ("outputs", outputs or ())
    is_list = isinstance(named, Sequence) and all(isinstance(x, str) for x in named) and not isinstance(named, str)
    if not is_list or not all(name in graph.results for name in named) or (only is not None and not named):
        made = ", ".join(graph.results)
        raise OptionError(f"{what}: got {truncate(repr(named))}; must be a list of names that the steps make: {made}")
    return [name for name in graph.results if name in named or (only is None and name not in read)]


def steps_of(graph: Graph, kept: Collection[str], fuses: bool = True) -> tuple[tuple[Step, ...], dict[str, int]]:
    """Return the steps that make the results `kept`, and the node of each result.

    fuses: whether element-wise work may go along with a product.
    """
    grouping = _Grouping(graph, kept, fuses)
    return grouping.steps(), {name: n for n, name in grouping.names.items()} | graph.results


@dataclass
class _Grouping:
    """Decide which nodes become matrices in memory, and which are only passed through."""

    graph: Graph
    kept: Collection[str]
    fuses: bool
    group: dict[int, int] = field(default_factory=dict)
    """Element-wise node → the node whose elements become a matrix with it."""
    users: dict[int, set[int]] = field(default_factory=dict)  # node → the nodes that become matrices with its help
    in_memory: set[int] = field(default_factory=set)
    """Nodes that must be in memory, as something reads them from there."""

    def __post_init__(self) -> None:
        nodes, is_elementwise = self.graph.nodes, self.graph.is_elementwise
        live = {self.graph.results[name] for name in self.kept}
        self.in_memory |= live
        for n in range(len(nodes) - 1, -1, -1):
            if n not in live:
                continue
            live |= set(nodes[n].reads)
            users = self.users.get(n, set())
            self.group[n] = (
                next(iter(users)) if is_elementwise[n] and n not in self.in_memory and len(users) == 1 else n
            )
            for x in nodes[n].reads:
                self.users.setdefault(x, set()).add(self.group[n])
                if not is_elementwise[n]:
                    self.in_memory.add(x)
        self.live = live

    @cached_property
    def names(self) -> dict[int, str]:
        """Return the names of the matrices in memory: their step's, or one derived from the matrix they are part of."""
        first: dict[int, str] = {}
        for name, n in self.graph.results.items():
            first.setdefault(n, name)
        first |= {n: name for name, n in self.graph.inputs.items()}
        owner, parts = "", Counter[str]()
        for n in sorted(self.live, reverse=True):
            owner = first.get(n, owner)
            if n not in first and self.group[n] == n and self.graph.nodes[n].op != TURN:
                parts[owner] += 1
                first[n] = f"{owner}#{parts[owner]}"
        return first

    def steps(self) -> tuple[Step, ...]:
        nodes, found = self.graph.nodes, []
        roots = [n for n in sorted(self.live) if self.group[n] == n]
        fused = {self.fused(n) for n in roots} - {None}
        for n in roots:
            node = nodes[n]
            if self.graph.is_elementwise[n]:
                found.append(self.elementwise(n, self.names[n]))
            elif node.op in GROUPED:
                others = tuple(map(self.factor, node.reads))
                found.append(Step(self.names[n], others=others, grouped=(node.op, *node.note)))
            elif node.op in REDUCTIONS:
                found.append(Step(self.names[n], (self.factor(node.reads[0]),), axes=node.note, reduction=node.op))
            elif node.op == PRODUCT and n not in fused:
                found.append(Step(self.names[n], tuple(map(self.factor, node.reads))))
        for name in self.graph.results:  # other names for what has one
            n = self.graph.results[name]
            if name in self.kept and (self.names.get(n) != name or nodes[n].op == TURN):
                found.append(self.copy(n, name))
        return tuple(found)

    def copy(self, n: int, name: str) -> Step:
        """Return a step that copies a matrix, turned perhaps."""
        factor = self.factor(n)
        work = Pointwise(1, (("conj", (0,)),), 1) if factor.conjugated else COPY
        return Step(name, others=(_plain(factor),), work=work)

    def factor(self, n: int) -> Factor:
        node = self.graph.nodes[n]
        return Factor(self.names[node.reads[0]], node.note) if node.op == TURN else Factor(self.names[n])

    def members(self, root: int) -> list[int]:
        return [n for n in range(root + 1) if self.group.get(n) == root]

    def fused(self, root: int) -> int | None:
        """The product that an element-wise step goes along with: the last that nothing else reads, of its shape."""
        nodes, node = self.graph.nodes, self.graph.nodes[root]
        if not (self.fuses and self.graph.is_elementwise[root]):
            return None
        reads = {x for n in self.members(root) for x in nodes[n].reads}
        alike = [x for x in reads if (nodes[x].op, nodes[x].shape, nodes[x].dtype) == (PRODUCT, node.shape, node.dtype)]
        return max((x for x in alike if self.users[x] == {root} and x not in self.in_memory), default=None)

    def elementwise(self, root: int, name: str) -> Step:
        """Return the step that makes an element-wise node."""
        nodes, product = self.graph.nodes, self.fused(root)
        members = self.members(root)
        reads = dict.fromkeys(x for n in members for x in nodes[n].reads if x not in members and x != product)
        factors = {x: self.factor(x) for x in reads}
        others = list(dict.fromkeys(_plain(each) for each in factors.values()))
        begin = [] if product is None else [product]
        work = _Work(len(begin) + len(others), dict(zip(begin, (0, 0), strict=False)))
        for x, factor in factors.items():
            at: Value = len(begin) + others.index(_plain(factor))
            work.at[x] = work.do("conj", (at,)) if factor.conjugated else at
        for n in members:
            args = tuple(x if isinstance(x, Constant) else work.at[x] for x in nodes[n].args)
            work.at[n] = args[0] if nodes[n].op == SPREAD else work.do(nodes[n].op, args)
        done = Pointwise(work.reads, tuple(work.ops), work.at[root])
        return Step(name, () if product is None else tuple(map(self.factor, nodes[product].reads)), tuple(others), done)


@dataclass
class _Work:
    """Element-wise work as it is put together."""

    reads: int
    at: dict[int, Value]  # where the elements of each node are found
    ops: list[tuple[str, tuple[Value, ...]]] = field(default_factory=list)

    def do(self, name: str, args: tuple[Value, ...]) -> int:
        self.ops.append((name, args))
        return self.reads + len(self.ops) - 1


def _plain(factor: Factor) -> Factor:
    return Factor(factor.name, "T" if factor.transposed else "")

