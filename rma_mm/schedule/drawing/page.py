"""A schedule as one page of HTML: a picture of the mesh for every step, blocks coloured by their part of k.

The page needs nothing from elsewhere. Without JavaScript all pictures stand below each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import hypot

from rma_mm.classes import dataclass
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.drawing.text import (
    LEGEND,
    Cell,
    Labels,
    Scene,
    heading,
    idle,
    layers,
    meeting,
    place,
    scenes,
    step_numbers,
)
from rma_mm.schedule.ops import TransferSpec
from rma_mm.schedule.schedule import Schedule, expand

RANKS = 64  # ranks of the largest mesh that is drawn
PICTURES, OPERATIONS = 2 * 10**6, 7 * 10**5
"""Bytes of a page for pictures, and for the lists of operations; what goes beyond is left out, and said to be."""
LINES, LETTERS, ARROWS = 14, 56, 300
"""Lines of a cell, characters of a line, arrows of a picture: more are left out, and said to be."""
LINE, LETTER, GAP, ACROSS = 18, 7.3, 34, 8
"""Height of a line, width of a letter, space between cells (in pixels), cells in a row of a mesh with one axis."""
GREY = "#e4e4e4"
"""The colour of what has no single part of k."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #222; --cell: #fff }
@media (prefers-color-scheme: dark) { :root { --ground: #14181e; --ink: #ced6dd; --cell: #2a3038 } }
body { font: 15px/1.45 system-ui, sans-serif; margin: .8em 1.2em; color: var(--ink); background: var(--ground) }
h1 { font-size: 1.15em; margin: 0 } h2 { font-size: 1em; margin: .3em 0 }
svg { display: block; max-width: 100% } svg text { font: 12px ui-monospace, monospace; fill: #222 }
.cell { fill: var(--cell); fill-opacity: .8; stroke: #888 } svg .who { font-weight: bold; fill: var(--ink) }
.arrow { fill: none; stroke-width: 2; opacity: .75; marker-end: url(#tip) } .leaves { stroke-dasharray: 6 3 }
.view { stroke-dasharray: 2 3 } pre { overflow-x: auto; font-size: 12px }
.chip { padding: 0 .5em; margin-right: .3em; color: #222 }
nav { position: sticky; top: 0; background: var(--ground); padding: .3em 0 }
input { width: 20em; vertical-align: middle }
[hidden] { display: none }
"""
SCRIPT = """
const pictures = [...document.querySelectorAll("section.scene")], slider = document.querySelector("input");
function show(n) {
  slider.value = n = Math.max(0, Math.min(pictures.length - 1, n));
  pictures.forEach((picture, at) => picture.hidden = at !== n);
}
document.querySelector("nav").hidden = false;
slider.oninput = () => show(+slider.value);
document.querySelector("#back").onclick = () => show(+slider.value - 1);
document.querySelector("#next").onclick = () => show(+slider.value + 1);
show(0);
"""


def page(schedule: Schedule, title: str, about: str = "") -> str:
    """Return the schedule as one HTML page of at most about 3 MB, for meshes of up to RANKS ranks.

    title: one line. about: text that describes the plan, below the pictures.
    """
    labels = Labels(schedule)
    notes = [*_paragraphs(heading(schedule, labels)), *([f"<pre>{escape(about)}</pre>"] if about else [])]
    parts = []
    if schedule.mesh.size > RANKS:
        parts += [f"<p>Meshes of up to {RANKS} ranks are drawn; this one has {schedule.mesh.size}.</p>", *notes]
    else:
        found = scenes(schedule)
        parts += _within(PICTURES, _pictures(schedule, labels, found), "pictures", len(found) + 1)
        parts += ["<h2>How to read it</h2>", *_paragraphs([*LEGEND, *idle(schedule, found)]), _key(labels), *notes]
        parts += ["<h2>Operations by rank</h2>", "<p>In the order in which they are issued, behind their steps.</p>"]
        parts += [_operations(schedule, rank) for rank in schedule.mesh.ranks]
        parts.append(f"<script>{SCRIPT}</script>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    text = f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n{text}</html>\n'


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"<p>{escape(line)}</p>"


def _within(limit: int, pictures: Iterable[str], what: str, count: int) -> list[str]:
    """Return pictures up to `limit` bytes with their buttons, and the number of `count` that are left out."""
    kept: list[str] = []
    size = 0
    for picture in pictures:
        size += len(picture.encode())
        if kept and size > limit:
            break
        kept.append(picture)
    slider = f'<input type="range" min="0" max="{len(kept) - 1}" value="0" aria-label="picture">'
    steps = f'<nav hidden><button id="back">back</button> {slider} <button id="next">next</button></nav>'
    more = [f"<p>The last {count - len(kept)} of {count} {what} are left out: the page would be too large.</p>"]
    return [steps, TIP, *kept, *(more if len(kept) < count else [])]


TIP = (
    '<svg width="0" height="0" style="position:absolute"><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
    'markerWidth="4" markerHeight="4" orient="auto"><path d="M0 0 8 4 0 8Z" fill="#555"/></marker></defs></svg>'
)
"""The head of an arrow."""


def _key(labels: Labels) -> str:
    chips = [
        f'<span class="chip" style="background:{_colour(part, labels)}">{n}</span>'
        for n, part in enumerate(labels.parts[2])
    ]
    return f"<p>Parts of k: {''.join(chips)}</p>" if chips else ""


def _colour(k: Span, labels: Labels, lightness: int = 80) -> str:
    """Return the colour of indices of k: where they begin, or, if they go round the end, where they go on from."""
    extent = labels.extents[2]
    if not k or (len(k) == extent and len(labels.parts[2]) > 1):
        return GREY
    goes_round = k.start == 0 and k.stop == extent and len(k.runs) == 2
    return f"hsl({300 * k.runs[-1 if goes_round else 0][0] // extent},75%,{lightness}%)"


def _along_k(name: str, region: Region, labels: Labels) -> Span:
    """Return the indices of k of a box of a matrix; none for C."""
    dims = labels.dims(name)
    return region[dims.index(2)] if 2 in dims else Span()


# -- pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Positions of the cells, in pixels."""

    at: list[tuple[float, float]]  # upper left corners, by rank
    titles: list[tuple[str, float]]  # names of the layers, and the height at which they stand
    cell: tuple[float, float]
    whole: tuple[float, float]


Line = tuple[str, str]  # words and the colour behind them


def _pictures(schedule: Schedule, labels: Labels, found: Sequence[Scene]) -> Iterator[str]:
    """Yield a picture of the placements, then one for every scene."""
    mesh = schedule.mesh
    lies = [[(words, _colour(_along_k(words, box, labels), labels)) for words, box in labels.homes(rank)]
            for rank in mesh.ranks]
    told = [[_lines(cell, rank, labels) for rank, cell in enumerate(scene.cells)] for scene in found]
    sizes = _sizes(mesh, [lines for cells in [lies, *told] for lines in cells])
    yield _picture("Where things lie", [], mesh, sizes, lies, [])
    for scene, cells in zip(found, told, strict=True):
        notes = [*meeting(scene)]
        moves = _arrows(scene, sizes, labels)
        if len(moves) > ARROWS:
            notes.append(f"{len(moves)} pairs of ranks exchange something: the arrows are left out.")
            moves = []
        yield _picture(scene.title, notes, mesh, sizes, cells, moves)


def _lines(cell: Cell, rank: int, labels: Labels) -> list[Line]:
    """Return a cell in words and colours, in the order of time."""

    def moved(move: TransferSpec) -> Line:
        words = labels.move(move, rank)
        return words, _colour(_along_k(words, move.ref.region, labels), labels, 93)

    products = [(labels.product(op), _colour(op.a.region[1], labels)) for op in cell.products]
    return [*map(moved, cell.arrives), *products, *map(moved, cell.leaves)]


def _sizes(mesh: MeshShape, cells: Sequence[Sequence[Line]]) -> _Sizes:
    """Room for the largest cell at every place of the mesh; layers stand below each other."""
    longest = max((len(words) for lines in cells for words, _ in lines), default=0)
    width = 16 + LETTER * min(LETTERS, max(longest, 16))
    height = 10.0 + LINE * (1 + min(LINES + 1, max(map(len, cells))))
    at = [(0.0, 0.0)] * mesh.size
    titles = []
    y, right = 4.0, 0.0
    for title, rows in layers(mesh):
        if title:
            titles.append((title, y + 14))
            y += 24
        folds = range(0, len(rows[0]), ACROSS) if len(mesh.dims) == 1 else (0,)
        for row in [row[n : n + ACROSS] if len(folds) > 1 else row for row in rows for n in folds]:
            for column, rank in enumerate(row):
                at[rank] = (GAP + column * (width + GAP), y)
                right = max(right, at[rank][0] + width)
            y += height + GAP
    return _Sizes(at, titles, (width, height), (right + GAP, y))


def _picture(
    title: str, notes: list[str], mesh: MeshShape, sizes: _Sizes, cells: Sequence[Sequence[Line]], arrows: Sequence[str]
) -> str:
    boxes = [_cell(f"{place(mesh, rank)} rank {rank}", sizes, rank, cells[rank]) for rank in mesh.ranks]
    names = [f'<text class="who" x="{GAP}" y="{y:.0f}">{escape(name)}</text>' for name, y in sizes.titles]
    width, height = (f"{length:.0f}" for length in sizes.whole)
    drawing = "".join([*arrows, *names, *boxes])
    svg = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{drawing}</svg>'
    return f'<section class="scene"><h2>{escape(title)}</h2>{"".join(_paragraphs(notes))}{svg}</section>'


def _cell(name: str, sizes: _Sizes, rank: int, lines: Sequence[Line]) -> str:
    (x, y), (width, height) = sizes.at[rank], sizes.cell
    shown = [*lines] if len(lines) <= LINES else [*lines[:LINES], (f"{len(lines) - LINES} more: see the list", GREY)]
    text = f'<rect class="cell" width="{width:.0f}" height="{height:.0f}"/><text class="who" x="6" y="15">{name}</text>'
    for n, (words, colour) in enumerate(shown, start=1):
        words = words if len(words) <= LETTERS else f"{words[: LETTERS - 1]}…"
        top = 4 + n * LINE
        text += f'<rect x="3" y="{top}" width="{width - 6:.0f}" height="{LINE - 1}" fill="{colour}"/>'
        text += f'<text x="6" y="{top + 13}">{escape(words)}</text>'
    return f'<g transform="translate({x:.0f} {y:.0f})">{text}</g>'


def _arrows(scene: Scene, sizes: _Sizes, labels: Labels) -> list[str]:
    """Return an arrow for each pair of ranks between which something moves, in the colour of the first of it."""
    first: dict[tuple[int, int], tuple[TransferSpec, str]] = {}
    for cell in scene.cells:
        for kind, moves in (("arrives", cell.arrives), ("leaves", cell.leaves)):
            for move in moves:
                first.setdefault((move.source, move.to), (move, "view" if move.kind == "view" else kind))
    found = []
    for (source, to), (move, kind) in first.items():
        k = _along_k(labels.ref(move.ref), move.ref.region, labels)
        colour = _colour(k, labels, 42) if k else "#555"
        found.append(f'<path class="arrow {kind}" stroke="{colour}" d="{_curve(sizes, source, to)}"/>')
    return found


def _curve(sizes: _Sizes, source: int, to: int) -> str:
    """Return a bent line from the edge of one cell to that of another."""
    (x, y), (to_x, to_y), (width, height) = sizes.at[source], sizes.at[to], sizes.cell
    dx, dy = to_x - x, to_y - y
    inside = min(width / abs(dx) if dx else 9, height / abs(dy) if dy else 9) / 2
    x, y = x + width / 2, y + height / 2
    bend = 0.12 * hypot(dx, dy)
    if hypot(dx, dy) > 1.5 * hypot(width, height):
        bend = GAP + (height if abs(dx) > abs(dy) else width)  # between two rows or columns of cells
    back, down = bend * dy / hypot(dx, dy), bend * dx / hypot(dx, dy)
    (a, b), (c, d) = ((x + dx * share, y + dy * share) for share in (inside, 1 - inside))
    return f"M{a:.0f} {b:.0f}Q{x + dx / 2 - back:.0f} {y + dy / 2 + down:.0f} {c:.0f} {d:.0f}"


# -- operations -----------------------------------------------------------------------------------


def _operations(schedule: Schedule, rank: int) -> str:
    """Return a rank's operations as text, each behind the number of its step."""
    ops = expand(schedule, rank)
    left = OPERATIONS // schedule.mesh.size
    lines: list[str] = []
    for op, step in zip(ops, step_numbers(ops), strict=True):
        line = escape(f"{step + 1:4}  {type(op).__name__.lower():10}  {op}")
        left -= len(line.encode()) + 1
        if left < 0:
            lines.append(f"{len(ops) - len(lines)} more are left out: the page would be too large.")
            break
        lines.append(line)
    name = f"rank {rank} {place(schedule.mesh, rank)}: {len(ops)} operations"
    return f"<details><summary>{name}</summary><pre>{chr(10).join(lines)}</pre></details>"
