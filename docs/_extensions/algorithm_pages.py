"""A page for each algorithm, written before the pages are read: picture, placements, words beside their formula.

Each product is done on pretended ranks; the build fails if the words that were counted differ from the formula.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

M, N, K = 24, 36, 48
OF_A, OF_B, OF_C = M * K, K * N, M * N  # elements
DIMS = {2: (2, 2), 3: (2, 2, 2)}
"""Meshes of the pages, by their axes: few ranks, which start soon."""
OTHERS = {2: (2, 3), 3: (2, 2, 3)}
"""Meshes on which formulas are checked, too."""


class Words(NamedTuple):
    """Words that all ranks move together, for even blocks."""

    text: str  # in a = MK, b = KN, c = MN and a mesh R × C × D of P ranks
    count: Callable[[int, int, int, int], int] | None  # of R, C, D, P; None if it differs from run to run
    axes: int = 2
    layouts: tuple[str, str, str] | None = None  # of A, B, C; None for those that the plan chooses
    form: str = ""  # of the algorithm, behind a colon


BLOCKS = ("i,j", "i,j", "i,j")
STATIONARY = Words("(C − 1)·a + (R − 1)·b", lambda R, C, D, P: (C - 1) * OF_A + (R - 1) * OF_B, layouts=BLOCKS)
OWN = STATIONARY._replace(layouts=None)
CUBE = Words(
    "(C − 1)·a + (R − 1)·b + (D − 1)·c", lambda R, C, D, P: (C - 1) * OF_A + (R - 1) * OF_B + (D - 1) * OF_C, axes=3
)
ALL_A, ALL_B, ALL_C = (
    Words(f"(P − 1)·{name}", lambda R, C, D, P, size=size: (P - 1) * size)
    for name, size in (("a", OF_A), ("b", OF_B), ("c", OF_C))
)


FORMULAS: dict[str, Words] = {
    "stationary_c": STATIONARY,
    "stationary_a": Words(
        "(R − 1)·b + (C − 1)·c", lambda R, C, D, P: (R - 1) * OF_B + (C - 1) * OF_C, layouts=("i,j", "j,i", "i,j")
    ),
    "stationary_b": Words(
        "(C − 1)·a + (R − 1)·c", lambda R, C, D, P: (C - 1) * OF_A + (R - 1) * OF_C, layouts=("j,i", "i,j", "i,j")
    ),
    "srumma": STATIONARY,
    "queue": Words("none: it depends on which rank claims which box", None, layouts=BLOCKS),
    "data_parallel": ALL_B,
    "column_parallel": ALL_A,
    "row_parallel": ALL_C,
    "gather_gemm": ALL_A,
    "gemm_scatter": ALL_C,
    "mixed_2d": OWN,
    "row_column_2d": Words("(R − 1)·a + (C − 1)·c", lambda R, C, D, P: (R - 1) * OF_A + (C - 1) * OF_C),
    "cannon": OWN,
    "summa_c": STATIONARY,
    "summa_a": Words("(R − 1)·b + (C − 1)·c", lambda R, C, D, P: (R - 1) * OF_B + (C - 1) * OF_C),
    "summa_b": Words("(C − 1)·a + (R − 1)·c", lambda R, C, D, P: (C - 1) * OF_A + (R - 1) * OF_C),
    "pumma": STATIONARY,
    "pblas": OWN,
    "agarwal_3d": CUBE,
    "johnson_3d": CUBE,
    "solomonik_25d": Words(
        "(C + D − 2)·a + (R + D − 2)·b + (D − 1)·c",
        lambda R, C, D, P: (C + D - 2) * OF_A + (R + D - 2) * OF_B + (D - 1) * OF_C, axes=3,
    ),
    "tesseract": Words("(C − 1)·a + (R·D − 1)·b", lambda R, C, D, P: (C - 1) * OF_A + (R * D - 1) * OF_B, axes=3),
    "nus_3d": CUBE,
    "t10_rotate": Words(
        "(ring of A − 1)·a + (ring of B − 1)·b, with rings of 2 ranks here",
        lambda R, C, D, P: OF_A + OF_B, form=":2,2,1/2,2,1",
    ),
    "cosma": Words("(pₙ − 1)·a + (pₘ − 1)·b + (pₖ − 1)·c, on a grid pₘ × pₙ × pₖ, here 1 × 2 × 2",
                   lambda R, C, D, P: OF_A + OF_C, form=":1,2,2"),
    "weighted": ALL_B,
}
"""Algorithm → its words, on the placements that are named, or on those that the plan chooses."""


class Found(NamedTuple):
    """What a product on pretended ranks was like."""

    words: int
    messages: int
    placements: dict[str, str]
    movement: dict[str, str]
    bytes: int
    page: str


def product(mesh: Any, name: str, words: Words) -> Found:
    """Multiply on pretended ranks. Collective."""
    import rma_mm

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    layouts = words.layouts or (None, None, None)
    operands = [
        x if layout is None else rma_mm.DistMatrix.from_numpy(x, mesh, layout)
        for x, layout in ((a, layouts[0]), (b, layouts[1]))
    ]
    plan = rma_mm.plan(*operands, mesh, algorithm=name + words.form, layout=layouts[2])
    result = plan.execute(*operands)
    assert np.allclose(result.to_numpy(), a @ b), name
    return Found(
        mesh.comm.allreduce(plan.words.words_intra), mesh.comm.allreduce(plan.words.messages),
        {x: str(layout) for x, layout in plan.layouts.items()}, dict(plan.movement), plan.peak_bytes, plan.page(),
    )


def write_pages(app: Sphinx) -> None:
    """Write a page for each algorithm into the source folder."""
    import rma_mm
    from rma_mm.algorithms import ALGORITHMS

    folder = Path(app.srcdir) / "reference" / "algorithms"
    drawings = Path(app.srcdir) / "_static" / "schedules"
    drawings.mkdir(parents=True, exist_ok=True)
    assert set(FORMULAS) == set(ALGORITHMS), set(FORMULAS) ^ set(ALGORITHMS)
    for dims in (*OTHERS.values(), *DIMS.values()):
        with rma_mm.pretend(dims) as mesh:
            for name, words in FORMULAS.items():
                if words.axes != len(dims) or (words.form and dims in OTHERS.values()):
                    continue
                found = mesh.run(product, name, words)
                R, C, D = (*dims, 1)[:3]
                if words.count is not None and words.count(R, C, D, R * C * D) != found.words:
                    wanted = words.count(R, C, D, R * C * D)
                    logger.warning("%s: %d words were counted, and the formula has %d", name, found.words, wanted)
                if dims in DIMS.values():
                    write(drawings / f"{name}.html", found.page)
                    write(folder / f"{name}.md", text_of(name, ALGORITHMS[name], words, dims, found))


def text_of(name: str, algorithm: Any, words: Words, dims: tuple[int, ...], found: Found) -> str:
    grid = "x".join(map(str, dims))
    ranks = int(np.prod(dims))
    about, file = described(name)
    layouts = "" if words.layouts is None else "".join(
        f" --layout-{x} '{layout}'" for x, layout in zip("abc", words.layouts, strict=True)
    )
    placed = "\n".join(f"| {x} | `{found.placements[x]}` | {found.movement[x]} |" for x in "ABC")
    R, C, D = (*dims, 1)[:3]
    counted = found.words
    if words.count is None:
        beside = f"Counted in one run: {counted} words, {found.messages} messages."
    else:
        wanted = words.count(R, C, D, ranks)
        beside = f"The formula gives {wanted} words here. Counted: {counted} words, in {found.messages} messages."
    return f"""# {name}

{algorithm.summary[0].upper()}{algorithm.summary[1:]}. Source: {algorithm.source}.

<iframe class="schedule" title="Schedule of {name}, step by step" src="../../_static/schedules/{name}.html"></iframe>

A {M} × {K} product with {K} × {N} on a mesh of {grid} ranks; step through it with the buttons.

## Placements and movement

| matrix | placement | how it moves |
|---|---|---|
{placed}

## Words

All ranks together move, for even blocks on a mesh {"R × C × D" if words.axes == 3 else "R × C"} of P ranks, with
a = M·K, b = K·N and c = M·N elements:

{words.text}

{beside} The fullest rank holds {found.bytes} bytes. On a machine that sends a message in α seconds and a word in β, and
multiplies at F operations a second, a rank takes about 2MNK / (P·F) + α · messages + β · words of its own; `--explain`
prints these with the figures of your machine.

## Run it

```{{command}}
:lines: 24

mpiexec -n {ranks} rma-mm run --algorithm {name}{words.form} --mesh {grid} --shape {M},{N},{K} --dtype float64{layouts}
```

## How it is written

{about}

```{{literalinclude}} {file}
:language: python
```
"""


def described(name: str) -> tuple[str, str]:
    """Return a sentence that says where an algorithm is defined, and the path of that file from its page."""
    import rma_mm.algorithms as algorithms

    for module in pkgutil.iter_modules(algorithms.__path__):
        loaded = import_module(f"{algorithms.__name__}.{module.name}")
        if module.name != "registry" and getattr(loaded, name.upper(), None) is algorithms.ALGORITHMS[name]:
            file = f"rma_mm/algorithms/{module.name}.py"
            return f"As a value, in `{file}`:", f"../../../{file}"
    raise LookupError(f"no file of rma_mm/algorithms defines {name.upper()}")


def write(path: Path, text: str) -> None:
    """Write a file unless it holds the same already, so that Sphinx reads only pages that changed."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
