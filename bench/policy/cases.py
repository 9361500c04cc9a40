"""The products that the planner is examined on: a fixed table, and fresh ones drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

from rma_mm.geometry.mesh import AXIS_NAMES, grids
from rma_mm.schedule.algorithm import OPERAND_DIMS

Shape = tuple[int, int, int]
Texts = tuple[str, str, str]

SETTINGS = ((2, 1), (4, 1), (6, 1), (4, 2), (6, 2))
"""(ranks, nodes) of the jobs; more than one node is pretended."""
FREE: Texts = ("", "", "")
OWN, ANY = "", "any"
"""Meshes: the one that the planner takes; the same, and the candidates of every grid of two axes compete with it."""


@dataclass(frozen=True)
class Case:
    """One product, where it runs, and what of it is given."""

    name: str
    kind: str
    """What it is an example of."""
    shape: Shape
    """m, n, k."""
    ranks: int
    nodes: int = 1
    mesh: str = OWN
    """As 2x2, or OWN, or ANY."""
    layouts: Texts = FREE
    """Placements of A, B, C; empty where the plan chooses."""
    dtype: str = "float32"
    window: str = "shared"
    own: str = ""
    """Operands that lie in the caller's own arrays, exposed in place."""
    direct: bool = False
    """Whether `matmul` that chooses is also timed against `matmul` that is told."""
    cores: tuple[int, ...] = ()
    """To which of two cores each rank is pinned; empty where they may run on any."""
    rate: str = ""
    """The rate of the links that join its nodes, as tc writes it; empty where nodes are pretended."""
    further: str = ""
    """A mesh whose candidates compete, too, where they are of algorithms that the own mesh does not have."""

    @property
    def setting(self) -> str:
        """Where it runs, in words."""
        nodes = f"hosts at {self.rate}" if self.rate else "nodes"
        where = f"{self.ranks} ranks" + (f", {self.nodes} {nodes}" if self.nodes > 1 else "")
        where += f", {self.window}" if self.window != "shared" else ""
        where += f", cores {''.join(map(str, self.cores))}" if self.cores else ""
        return where + (f", own {self.own}" if self.own else "")

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """How fast its ranks are, as they are pinned; None where that is to be measured."""
        return tuple(1 / self.cores.count(core) for core in self.cores) or None

    @property
    def title(self) -> str:
        """The case, unlike any other of its table."""
        return f"{self.name} on {self.setting}"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        m, n, k = self.shape
        return 2 * m * n * k

    def extent(self, operand: str) -> tuple[int, int]:
        """(rows, columns) of A, B or C."""
        rows, cols = OPERAND_DIMS[operand]
        return self.shape[rows], self.shape[cols]

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Case:
        """The case that `dataclasses.asdict` and JSON made a dict of."""
        m, n, k = given["shape"]
        a, b, c = given["layouts"]
        return cls(**{**given, "shape": (m, n, k), "layouts": (a, b, c), "cores": tuple(given["cores"])})


# -- the fixed table ------------------------------------------------------------------------------

FREE_SHAPES: dict[str, Shape] = {
    "square 1024": (1024, 1024, 1024),
    "tall": (8192, 256, 512),
    "wide": (256, 8192, 512),
    "k-dominant": (256, 384, 16384),
    "outer": (3072, 2048, 64),
    "small 256": (256, 256, 256),
    "small 512": (512, 512, 512),
    "mlp up": (1024, 3072, 768),
    "mlp down": (1024, 768, 3072),
}
"""Products whose placements and grid the planner chooses; an MLP's M, N, K are tokens, features out, features in."""

CONTESTED = {
    (4, 1): ("square 1024", "tall", "k-dominant", "mlp up"),
    (4, 2): ("square 1024", "k-dominant"),
    (6, 1): ("tall",),
}
"""Where other grids compete with the planner's."""

PLACEMENTS = {"row": "P(('i', 'j'), None)", "column": "P(None, ('i', 'j'))", "block": "P('i', 'j')"}
PLACED_SHAPE = (1200, 1100, 1000)
BLOCKS: Texts = ("P('i', 'j')",) * 3

REPLICATED: dict[str, tuple[str, Texts]] = {
    "A twice": ("2x2", ("P('i', None)", "P('i', 'j')", "P('i', 'j')")),
    "B twice": ("2x2", ("P('i', 'j')", "P(None, 'j')", "P('i', 'j')")),
    "A and B twice": ("2x2", ("P('i', None)", "P(None, 'j')", "P('i', 'j')")),
    "C twice": ("2x2", ("P('i', 'j')", "P('i', 'j')", "P('i', None)")),
    "A twice along l": ("2x1x2", ("P('i', 'j')", "P('l', 'i')", "P('i', ('j', 'l'))")),
}
"""Name → mesh of four ranks and placements; on six ranks the first axis has three."""

SHARDED: dict[str, tuple[Shape, Texts]] = {
    "mlp up, tensor parallel": ((1024, 3072, 768), ("P(None, None)", PLACEMENTS["column"], PLACEMENTS["column"])),
    "mlp down, tensor parallel": ((1024, 768, 3072), (PLACEMENTS["column"], PLACEMENTS["row"], PLACEMENTS["row"])),
    "mlp up, data parallel": ((1024, 3072, 768), (PLACEMENTS["row"],) * 3),
}
"""The layers of a GPT as they are spread over devices."""


def table() -> list[Case]:
    """The fixed cases."""
    made = [*free(), *triples(), *replicated(), *sharded(), *cyclic(), *exposed(), *direct()]
    assert len({case.title for case in made}) == len(made)
    return made


def free() -> Iterator[Case]:
    """Placements and grid are the planner's choice."""
    for (ranks, nodes), (name, shape) in product(SETTINGS, FREE_SHAPES.items()):
        yield Case(name, "free", shape, ranks, nodes, ANY if name in CONTESTED.get((ranks, nodes), ()) else OWN)
    for ranks, nodes in ((2, 1), (4, 1), (4, 2)):
        yield Case("square 1024 float64", "free", (1024, 1024, 1024), ranks, nodes, dtype="float64")


def triples() -> Iterator[Case]:
    """All triples of placements on four ranks of a node; elsewhere a share of them, another one in each setting."""
    for ranks, nodes, mesh, rest in ((4, 1, "2x2", None), (6, 1, "2x3", 0), (4, 2, "2x2", 1), (6, 2, "2x3", 2)):
        for places in product(range(3), repeat=3):
            if rest is None or sum(places) % 3 == rest:
                yield _placed([list(PLACEMENTS)[place] for place in places], ranks, nodes, mesh)
    for names in product(("row", "column"), repeat=3):
        yield _placed(names, 2, 1, "2x1")


def _placed(names: Sequence[str], ranks: int, nodes: int, mesh: str, kind: str = "triple", **more: Any) -> Case:
    """A, B and C placed by names of `PLACEMENTS`."""
    a, b, c = (PLACEMENTS[name] for name in names)
    return Case(f"{names[0]}·{names[1]}→{names[2]}", kind, PLACED_SHAPE, ranks, nodes, mesh, (a, b, c), **more)


def replicated() -> Iterator[Case]:
    """An operand or the result is held twice."""
    for ranks, nodes in ((4, 1), (4, 2), (6, 1)):
        for name, (mesh, layouts) in REPLICATED.items():
            grid = mesh if ranks == 4 else "3" + mesh[1:]
            yield Case(name, "replicated", PLACED_SHAPE, ranks, nodes, grid, layouts)


def sharded() -> Iterator[Case]:
    """Layers of a GPT, scaled down, on operands that are spread as training spreads them."""
    for (ranks, nodes, mesh), (name, (shape, layouts)) in product(
        ((4, 1, "2x2"), (4, 2, "2x2"), (6, 1, "2x3")), SHARDED.items()
    ):
        yield Case(name, "sharded", shape, ranks, nodes, mesh, layouts)


def cyclic() -> Iterator[Case]:
    """Block-cyclic placements, as ScaLAPACK's users have them."""
    for ranks, nodes, mesh, block in ((4, 1, "2x2", 64), (4, 2, "2x2", 64), (6, 1, "2x3", 32)):
        text = f"P('i:cyclic({block})', 'j:cyclic({block})')"
        yield Case(f"cyclic {block}", "cyclic", PLACED_SHAPE, ranks, nodes, mesh, (text, text, text))
    mixed = ("P('i:cyclic(64)', 'j:cyclic(64)')", "P('i', 'j')", "P('i', 'j')")
    yield Case("cyclic 64 A, blocks", "cyclic", PLACED_SHAPE, 4, 1, "2x2", mixed)


def exposed() -> Iterator[Case]:
    """Other windows than shared memory: where a rank's memory is its caller's own, a get waits for its owner."""
    square = (1024, 1024, 1024)
    yield Case("small 256", "exposed", (256, 256, 256), 2, 1, "2x1", window="created")
    for ranks, mesh in ((2, "2x1"), (4, "2x2")):
        yield Case("square 1024", "exposed", square, ranks, 1, mesh, window="created")
        yield Case("blocks", "exposed", square, ranks, 1, mesh, BLOCKS, own="AB")
    for window in ("created", "allocated"):
        yield Case("blocks", "exposed", square, 4, 1, "2x2", BLOCKS, window=window)
        yield _placed(("row", "column", "block"), 4, 1, "2x2", "exposed", window=window)
    yield _placed(("row", "row", "row"), 4, 1, "2x2", "exposed", own="AB")
    yield _placed(("row", "column", "block"), 4, 1, "2x2", "exposed", own="A")


def direct() -> Iterator[Case]:
    """What choosing costs over naming."""
    for ranks, mesh in ((2, "2x1"), (4, "2x2")):
        yield Case("2048", "direct", (2048,) * 3, ranks, 1, mesh, ("P('i', 'j')", "P('i', 'j')", ""), direct=True)


# -- fresh cases ----------------------------------------------------------------------------------

WORK = (2e8, 6e9)
"""The least and the most operations of a drawn product."""
ELEMENTS = 2**24
"""Elements of A, B and C together, at most."""
EXTENTS = (5, 14)
"""Powers of two between which extents lie."""


def drawn(seed: int, count: int, settings: Sequence[tuple[int, int]] = SETTINGS) -> list[Case]:
    """`count` random cases, the same for a seed: shape, type, mesh, placements, window."""
    random = Random(seed)
    return [_draw(random, f"random {seed}.{number}", settings) for number in range(count)]


JOBS = 5
"""Jobs over which drawn cases of uneven machines are spread: each is calibrated once."""


def uneven(seed: int, count: int) -> list[Case]:
    """`count` random cases on ranks of different speed: more of them are pinned to one core than to the other.

    Half of them leave grid and placements to the planner.
    """
    random, cases = Random(seed), []
    for job in range(JOBS):
        ranks = random.randint(3, 6)
        first = random.randint(1, (ranks - 1) // 2)
        cores = tuple(random.sample([0] * first + [1] * (ranks - first), ranks))
        settings = [(ranks, 2 if job % 2 else 1)]
        for number in range(job, count, JOBS):
            case = replace(_draw(random, f"uneven {seed}.{number}", settings), own="", cores=cores)
            cases.append(replace(case, mesh=OWN, layouts=FREE) if random.random() < 0.5 else case)
    return cases


HOST_WORK = (1e9, 6e10)
"""The least and the most operations of a drawn product between hosts."""


def between_hosts(seed: int, count: int, rates: Sequence[str]) -> list[Case]:
    """Draw `count` cases for each rate of the links, on two hosts of one rank and of two.

    Half of them leave grid and placements to the planner.
    """
    found = []
    for rate in rates:
        random = Random(f"{seed} {rate}")
        for number in range(count):
            case = _draw(random, f"hosts {seed}.{number}", [(2, 2), (4, 2)], HOST_WORK)
            case = replace(case, own="", window="shared", rate=rate)
            found.append(replace(case, mesh=OWN, layouts=FREE) if number % 2 else case)
    return found


def _draw(random: Random, name: str, settings: Sequence[tuple[int, int]], work: tuple[float, float] = WORK) -> Case:
    ranks, nodes = random.choice(settings)
    axes = random.choices((1, 2, 3), (1, 5, 2))[0]
    grid = random.choice(list(grids(ranks, axes)))
    a, b, c = (_placement(random, AXIS_NAMES[:axes]) if random.random() < 0.7 else "" for _ in "ABC")
    return Case(
        name, "random", _shape(random, work), ranks, nodes, "x".join(map(str, grid)), (a, b, c),
        dtype=random.choices(("float32", "float64"), (3, 1))[0],
        window=random.choices(("shared", "allocated", "created"), (8, 1, 1))[0],
        own="AB" if a and b and random.random() < 0.1 else "",
    )


def _shape(random: Random, work: tuple[float, float]) -> Shape:
    """Extents that are log-uniform, of a product neither too small nor too large."""
    while True:
        m, n, k = (round(2 ** random.uniform(*EXTENTS)) for _ in range(3))
        if work[0] <= 2 * m * n * k <= work[1] and m * k + k * n + m * n <= ELEMENTS:
            return m, n, k


def _placement(random: Random, axes: Sequence[str]) -> str:
    """Each axis cuts rows or columns, in blocks or block-cyclically, or holds copies."""
    cuts: dict[str, list[str]] = {"rows": [], "columns": [], "copies": []}
    for axis in random.sample(axes, len(axes)):
        blocks = f":cyclic({random.choice((16, 32, 64, 128))})" if random.random() < 0.25 else ""
        cuts[random.choices(list(cuts), (5, 5, 2))[0]].append(f"'{axis}{blocks}'")
    return f"P({_cut(cuts['rows'])}, {_cut(cuts['columns'])})"


def _cut(axes: Sequence[str]) -> str:
    """The axes that cut one dimension, as a placement names them."""
    return f"({', '.join(axes)})" if len(axes) > 1 else "".join(axes) or "None"
