"""One random case as a small value: drawn from a seed and a number, printed, and repeated."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from random import Random

import numpy as np

from bench.trust.own_semirings import OWN
from bench.trust.placements import Shape, draw_layout, draw_mesh, recut
from rma_mm.algorithms import find_algorithm
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.planner.candidates import Request, every_form, placements_taken
from rma_mm.schedule.algorithm import Algorithm, Problem

EXTENTS = (0, 1, 1, 2, 3, 5, 7, 7, 8, 11, 12, 13, 17, 23, 31, 40)
"""Lengths of m, n and k: nothing, one, primes, and some that divide."""
LARGE = (64, 129, 257, 700)
"""Lengths of one in a hundred: panels are cut, kernels compiled, transfers split."""
TYPES = (
    *("float64", "float32", "complex64", "complex128", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
MIXED = (
    *(("float32", "float64"), ("int8", "int32"), ("uint8", "int16"), ("float32", "complex64"), ("bool", "int32")),
    *(("float64", "complex64"), ("int32", "float64"), ("float16", "float32"), ("bfloat16", "float32")),
)
"""Pairs of element types that have a common one in which small whole numbers stay exact."""
WIDER = {"int8": "int32", "uint8": "int32", "int16": "int64", "float32": "float64", "float16": "float32",
         "bfloat16": "float32", "complex64": "complex128"}
SOURCES = ("from_numpy", "from_numpy", "root", "function", "moved", "moved", "local", "file")
"""Whence a distributed matrix comes."""
STRIDES = ("C", "F", "padded C", "padded F", "offset", "stepped", "stepped F")
"""How a caller's own array lies in memory; all are taken in place."""
READS = ("tiles", "to_numpy", "root", "save", "redistribute", "transposed")
"""How a result is read, besides by each rank's own tile."""
ALGORITHMS = tuple(algorithm.name for algorithm in every_form())
FORMS = ("solomonik_25d:cannon", "pblas:2", "pblas:5")
"""Further forms, of those that fit any number of ranks."""
KERNELS = {"float32": ("blas", "numba"), "float64": ("blas",), "complex64": ("blas",), "int8": ("numba",)}
"""Local kernels that are named, besides numpy: compiling is slow, so for two types only."""
GRAMS = 0.07
"""How often a product is that of a matrix and its transpose."""
AUTO = 0.15
"""How often no algorithm is named, at least: the planner takes many times as long as the product."""
KINDS = tuple("product" if n % 2 == 0 or n in (1, 7, 13) else
              {3: "file", 5: "batch", 9: "expression", 11: "file", 15: "chain"}.get(n, "redistribution")
              for n in range(20))
"""What cases are, by their numbers: of each twenty thirteen products."""
VALUES = ("whole",) * 10 + ("large", "wild", "wild", "wild")
"""What matrices hold: small whole numbers; near the largest of their type; NaN and infinities among them."""
SYMMETRIC = ("auto", "stationary_c:syrk", "stationary_c:triangles", "stationary_c:summands")
"""Algorithms of products of a matrix and its transpose."""


@dataclass(frozen=True)
class Given:
    """A matrix, and how it is made."""

    source: str
    """One of SOURCES, `array`: a NumPy array, equal on all ranks, or `opened`: it stays in its file."""
    order: str
    """The memory order of an array or a file: one of STRIDES."""
    shape: Shape
    """As it is stored: turned round where `turned`."""
    dtype: str
    layout: Layout | None
    """As it is stored; None for an array, or where the library chooses."""
    before: Layout | None = None
    """Where it was before it was redistributed."""
    turned: bool = False
    """Whether its transposed view is passed."""


@dataclass(frozen=True)
class Case:
    """A product C = alpha · op(A) @ op(B) + beta · C, or (where b is None) a chain of redistributions of A."""

    number: int
    mesh: tuple[int, ...]
    a: Given
    b: Given | None = None
    c: Given | None = None
    """What is passed as `out`."""
    layout: Layout | None = None
    """What is passed as `layout`."""
    moves: tuple[Layout, ...] = ()
    """Where A is brought, one after the other."""
    transposed: str = ""
    """Those of A and B that are passed transposed."""
    conjugated: str = ""
    alpha: complex = 1
    beta: complex = 0
    algorithm: str = "auto"
    semiring: str = "plus_times"
    kernel: str = "auto"
    compute: str | None = None
    bias: str | None = None
    """What the values of the epilogue's bias belong to."""
    relu: bool = False
    stored: str | None = None
    """The type in which the epilogue leaves C."""
    deterministic: bool = False
    memory: int | None = None
    planned: bool = False
    """Whether by a plan, rather than by matmul."""
    times: int = 1
    """How often it is done."""
    text: bool = False
    """Whether placements are passed as text."""
    read: str = "to_numpy"
    root: int = 0
    """The rank that reads the result, or gives a matrix."""
    onto: Layout | None = None
    """The placement in which the result is read."""
    keep: int = 0
    """For how many further cases its matrices stay alive."""
    closes: bool = False
    """Whether its mesh is closed afterwards."""
    values: str = "whole"
    """One of VALUES."""
    checked: bool = False
    """Whether the library is to check the product, too."""
    narrows: bool = False
    """Whether panels are cut from 3 indices on, and small epilogues compiled."""
    symmetric: bool | str | None = None
    """What is said of a product of A and its transpose."""
    fill: str = "both"

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return "redistribution" if self.b is None else "product"

    @property
    def is_same(self) -> bool:
        """Whether one of A and B is transposed: a product of a matrix and its transpose is then passed A twice."""
        return len(self.transposed) == 1

    @property
    def is_gram(self) -> bool:
        """Whether B is A, or its transpose."""
        return self.b is not None and self.b.source == "twin"

    def __str__(self) -> str:
        """All that is not as usual."""
        said = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                said.append(f"{each.name}={_text(value)}")
        return "\n  ".join(said)


def _text(value: object) -> str:
    if isinstance(value, Given):
        turned = ".T" if value.turned else ""
        before = f", before: {value.before}" if value.before else ""
        return f"{value.source} ({value.order}) {value.dtype}{value.shape}{turned} in {value.layout}{before}"
    if isinstance(value, tuple) and value and isinstance(value[0], Layout):
        return "; ".join(map(str, value))
    return str(value) if isinstance(value, Layout) else repr(value)


@dataclass(frozen=True)
class Other:
    """A case that is drawn while it is done, alike on all ranks."""

    number: int
    kind: str
    mesh: tuple[int, ...]
    text: str
    """From which it is drawn."""
    keep: int = 0
    closes: bool = False


def kind_of(number: int) -> str:
    """What case `number` is, in any setting."""
    return KINDS[number % len(KINDS)]


def draw(seed: int, setting: str, ranks: int, number: int) -> Case | Other:
    """Case `number` of a setting: always the same one."""
    text, kind = f"{seed} {setting} {number}", kind_of(number)
    rng = Random(text)
    if kind == "redistribution":
        return _redistribution(rng, ranks, number)
    if kind == "product":
        return _product(rng, ranks, number) if rng.random() >= GRAMS else _gram(rng, ranks, number)
    return Other(number, kind, draw_mesh(rng, ranks, axes=(2,) if kind == "chain" else (1, 2, 2, 2, 3)), text)


def speeds_of(seed: int, setting: str, mesh: tuple[int, ...]) -> tuple[float, ...] | None:
    """The speeds that ranks of a mesh are said to have, in two of five settings; None where none are given."""
    rng = Random(f"{seed} {setting} {mesh}")
    return tuple(rng.choice((1.0, 1.0, 2.0, 5.0)) for _ in range(prod(mesh))) if rng.random() < 0.4 else None


def is_watched(seed: int, setting: str, mesh: tuple[int, ...]) -> bool:
    """Whether every transfer on a mesh is checked, which takes longer."""
    return Random(f"{seed} {setting} {mesh} watched").random() < 0.2


def _redistribution(rng: Random, ranks: int, number: int) -> Case:
    mesh = draw_mesh(rng, ranks)
    place = MeshShape(mesh)
    shape = rng.choice(EXTENTS), rng.choice(EXTENTS)
    a = _given(rng, place, shape, rng.choice(TYPES), draw_layout(rng, place, shape))
    moves = tuple(draw_layout(rng, place, shape) for _ in range(rng.choice((1, 1, 2, 3))))
    return Case(number, mesh, a, moves=moves, **_frame(rng, ranks, place, shape))


def _product(rng: Random, ranks: int, number: int) -> Case:
    m, n, k = (rng.choice(LARGE if rng.random() < 0.01 else EXTENTS) for _ in range(3))
    types = rng.choice(MIXED) if rng.random() < 0.15 else (rng.choice(TYPES),) * 2
    if rng.random() < 0.5:
        types = types[::-1]
    mesh, algorithm, layouts = _placed(rng, ranks, (m, n, k))
    place = MeshShape(mesh)
    transposed, conjugated = (rng.choice(("", "", "", "A", "B", "AB")) for _ in range(2))
    a = _operand(rng, place, (m, k), types[0], layouts[0], "A" in transposed)
    b = _operand(rng, place, (k, n), types[1], layouts[1], "B" in transposed)
    if "opened" in (a.source, b.source):
        algorithm = rng.choice(("auto", "auto", "stationary_c"))
    arithmetic = _arithmetic(rng, types)
    if arithmetic.get("semiring") or not {"complex64", "complex128"} & set(types):
        conjugated = ""
    c = layout = None
    result = arithmetic.pop("result")
    if arithmetic.get("beta") or rng.random() < 0.5:
        c = _given(rng, place, (m, n), arithmetic.get("stored") or result, layouts[2])
    elif rng.random() < 0.7:
        layout = layouts[2]
    values = rng.choice(VALUES)
    has_nan = result.startswith(("float", "bfloat")) and arithmetic.get("alpha", 1) != 0
    if "bias" in arithmetic or not (has_nan if values == "wild" else "semiring" not in arithmetic):
        values = "whole"
    return Case(
        number, mesh, a, b, c, layout, transposed=transposed, conjugated=conjugated, algorithm=algorithm,
        kernel=rng.choice(("numpy", *KERNELS.get(result, ()))) if rng.random() < 0.06 else "auto",
        deterministic=rng.random() < 0.1, memory=rng.choice((2**12, 2**16, 2**24)) if rng.random() < 0.06 else None,
        planned=rng.random() < 0.3, values=values, checked=rng.random() < 0.15, narrows=rng.random() < 0.5,
        **arithmetic, **_frame(rng, ranks, place, (m, n)),
    )


def _gram(rng: Random, ranks: int, number: int) -> Case:
    """The product of a matrix and its transpose, or conjugate transpose."""
    m, k, dtype = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice(TYPES)
    mesh = draw_mesh(rng, ranks)
    place, is_complex = MeshShape(mesh), dtype.startswith("complex")
    transposed, conjugated = (rng.choice(("", "", "A", "B", "AB")) for _ in range(2))
    a = _operand(rng, place, (m, k), dtype, draw_layout(rng, place, (m, k)), "A" in transposed)
    if a.source == "opened" and len(transposed) != 1:  # it has no transposed view
        a = replace(a, source="array", order="C")
    shape = a.shape[::-1] if a.turned else a.shape
    is_same = len(transposed) == 1
    b = Given("twin", "C", shape if is_same else shape[::-1], dtype, None)
    beta = rng.choice((0, 0, 2)) if dtype != "bool" else 0
    is_hermitian = is_complex and len(conjugated) == 1
    said = rng.choice((None, "hermitian" if is_hermitian else True))
    layout = draw_layout(rng, place, (m, m))
    c = _given(rng, place, (m, m), dtype, layout) if beta or rng.random() < 0.3 else None
    return Case(
        number, mesh, a, b, c, None if c else layout, transposed=transposed, beta=beta, symmetric=said,
        conjugated=conjugated if is_complex else "", fill=rng.choice(("both", "both", "lower")),
        algorithm=rng.choice(SYMMETRIC), checked=rng.random() < 0.3, narrows=rng.random() < 0.5,
        relu=not is_complex and not beta and rng.random() < 0.2, **_frame(rng, ranks, place, (m, m)),
    )


def _frame(rng: Random, ranks: int, mesh: MeshShape, shape: Shape) -> dict[str, object]:
    """How a result is read, and what is kept."""
    return {
        "text": rng.random() < 0.3, "read": rng.choice(READS), "root": rng.randrange(ranks),
        "onto": draw_layout(rng, mesh, shape), "keep": rng.choice((0, 0, 0, 1, 3, 10, 60)),
        "closes": rng.random() < 0.03,
    }


def _arithmetic(rng: Random, types: tuple[str, str]) -> dict[str, object]:
    """Scalars, semiring, types and epilogue that go together; `result` is the type of C."""
    result = str(np.result_type(*map(parse_dtype, types)))
    found: dict[str, object] = {}
    if types[0] == types[1] and types[0] in WIDER and rng.random() < 0.1:
        found["compute"] = result = WIDER[types[0]]
    is_complex, is_bool = result.startswith("complex"), result == "bool"
    if is_bool or (not is_complex and rng.random() < 0.12):
        own = [name for name, kinds in OWN.items() if np.dtype(parse_dtype(result)).kind in kinds]
        known = ("or_and",) if is_bool else ("min_plus", "max_plus", "max_min")
        found["semiring"] = rng.choice((*known, *own))
        found["beta"] = rng.choice((0, 0, 1))
        return found | {"result": result, "times": rng.choice((1, 1, 2))}
    scalars = [1, 1, 1, 2, 0, *([] if result.startswith("u") else [-1]), *([1j, 1 - 2j] if is_complex else [])]
    found["alpha"] = rng.choice(scalars)
    found["beta"] = rng.choice((0, 0, 0, *scalars[1:]))
    if not is_complex and rng.random() < 0.15:
        found["relu"] = rng.random() < 0.5
        found["bias"] = rng.choice((None, "row", "column"))
        if result.startswith("float") or not found["beta"]:
            found["stored"] = rng.choice((None, None, "float32", "float64"))
    is_half = result in ("float16", "bfloat16")
    return found | {"result": result, "times": 1 if is_half and found["beta"] else rng.choice((1, 1, 1, 2, 3))}


def _operand(rng: Random, mesh: MeshShape, shape: Shape, dtype: str, layout: Layout | None, transposed: bool) -> Given:
    """What is passed as A or B, for op(A) or op(B) of `shape`."""
    if transposed:
        shape, layout = shape[::-1], layout.T if layout else None
    if rng.random() < 0.06:
        return Given("opened", rng.choice(("C", "F", "chunks")), shape, dtype, None)
    if layout is None or rng.random() < 0.1:
        return Given("array", rng.choice(("C", "F")), shape, dtype, None)
    return _given(rng, mesh, shape, dtype, layout)


def _given(rng: Random, mesh: MeshShape, shape: Shape, dtype: str, layout: Layout | None) -> Given:
    """A matrix of `shape` in `layout`, in the end."""
    turned = rng.random() < 0.2
    if turned:
        shape, layout = shape[::-1], layout.T if layout else None
    source = rng.choice(SOURCES)
    if layout is None:
        source = "from_numpy"
    before = draw_layout(rng, mesh, shape) if source == "moved" else None
    order = rng.choice(STRIDES) if source == "local" else rng.choice(("C", "F"))
    return Given(source, order, shape, dtype, layout, before, turned)


Placed = tuple[Layout | None, Layout | None, Layout | None]


def _placed(rng: Random, ranks: int, shape: tuple[int, int, int]) -> tuple[tuple[int, ...], str, Placed]:
    """A mesh, an algorithm that can use it, and placements of op(A), op(B) and C that it takes."""
    names = rng.sample((*ALGORITHMS, *FORMS), 3) if rng.random() >= AUTO else []
    for name in names:
        algorithm = find_algorithm(name)
        for _ in range(4):
            mesh = draw_mesh(rng, ranks)
            found = _taken(rng, algorithm, MeshShape(mesh), shape)
            if found is not None:
                return mesh, name, found
    mesh = draw_mesh(rng, ranks)
    return mesh, "auto", _any(rng, MeshShape(mesh), shape)


def _any(rng: Random, mesh: MeshShape, shape: tuple[int, int, int]) -> Placed:
    a, b, c = (None if rng.random() < 0.08 else draw_layout(rng, mesh, extents) for extents in _extents(shape))
    return a, b, c


def _extents(shape: tuple[int, int, int]) -> tuple[Shape, Shape, Shape]:
    m, n, k = shape
    return (m, k), (k, n), (m, n)


def _taken(rng: Random, algorithm: Algorithm, mesh: MeshShape, shape: tuple[int, int, int]) -> Placed | None:
    """Placements that `row` takes on this mesh, half of them cut elsewhere; None where it cannot use the mesh."""
    if algorithm.specialize is not None:
        fitted = algorithm.specialize(Problem(shape, mesh))
        if isinstance(fitted, str):
            return None
        algorithm = fitted
    if algorithm.placements is None:
        return _any(rng, mesh, shape)
    try:
        taken = rng.choice(placements_taken(algorithm, Request(shape, mesh)))
    except AlgorithmError:
        return None
    is_free = algorithm.name.partition(":")[0] not in ("cosma", "t10_rotate", "pblas") and rng.random() < 0.5
    a, b, c = (
        recut(rng, layout, mesh, extents) if is_free and rng.random() < 0.7 else layout
        for layout, extents in zip(taken, _extents(shape), strict=True)
    )
    return a, b, c
