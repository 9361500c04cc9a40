"""Pictures of schedules: what they say is what the operations do, for every row; and Cannon's skew can be seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from rma_mm.algorithms import ALGORITHMS, find_algorithm
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.planner.candidates import Request, candidates, placements_taken
from rma_mm.schedule.algorithm import Algorithm, PlacedProblem
from rma_mm.schedule.drawing import page as picture_html
from rma_mm.schedule.drawing.page import page
from rma_mm.schedule.drawing.text import WIDTH, Labels, drawn, place, scenes
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.lowering.redistribute import redistribution
from rma_mm.schedule.ops import Accumulate, Copy, Multiply, Reduce, Shift, foreign
from rma_mm.schedule.schedule import Schedule, expand
from tests.reference import kept
from tests.thorough import COVERING, covering, nightly, usually

MESHES = [
    MeshShape((3,)), MeshShape((2, 2)), MeshShape((2, 3), node_of_rank=(0, 0, 0, 1, 1, 1)), MeshShape((2, 2, 2)),
    MeshShape((1, 1)), MeshShape((1, 9)),
]
SHAPES = [(6, 6, 6), (7, 5, 4), (1, 3, 2), (3, 0, 2), (4, 3, 0)]

CANNON = """\
Mesh 3x3: 9 ranks. C (3 × 3) = A (3 × 3) · B (3 × 3).
Parts of m: 0 = 0:1; 1 = 1:2; 2 = 2:3
Parts of n: 0 = 0:1; 1 = 1:2; 2 = 2:3
Parts of k: 0 = 0:1; 1 = 1:2; 2 = 2:3
A12 is part 1 of the rows and part 2 of the columns of A; 0+1 both parts, * all, a:b indices.
Arrives before, from (rank): ← shifted, ⇐ broadcast or gathered, get pulled, view read in place.
Leaves after, to (rank): → added to its owner's C one-sidedly, ⇒ summed up by a reduction.

Where things lie
┌─(0,0)──────────┬─(0,1)──────────┬─(0,2)──────────┐
│ A00  0:1 × 0:1 │ A01  0:1 × 1:2 │ A02  0:1 × 2:3 │
│ B00  0:1 × 0:1 │ B11  1:2 × 1:2 │ B22  2:3 × 2:3 │
│ C00  0:1 × 0:1 │ C01  0:1 × 1:2 │ C02  0:1 × 2:3 │
├─(1,0)──────────┼─(1,1)──────────┼─(1,2)──────────┤
│ A11  1:2 × 1:2 │ A12  1:2 × 2:3 │ A10  1:2 × 0:1 │
│ B10  1:2 × 0:1 │ B21  2:3 × 1:2 │ B02  0:1 × 2:3 │
│ C10  1:2 × 0:1 │ C11  1:2 × 1:2 │ C12  1:2 × 2:3 │
├─(2,0)──────────┼─(2,1)──────────┼─(2,2)──────────┤
│ A22  2:3 × 2:3 │ A20  2:3 × 0:1 │ A21  2:3 × 1:2 │
│ B20  2:3 × 0:1 │ B01  0:1 × 1:2 │ B12  1:2 × 2:3 │
│ C20  2:3 × 0:1 │ C21  2:3 × 1:2 │ C22  2:3 × 2:3 │
└────────────────┴────────────────┴────────────────┘

Step 1 of 3
┌─(0,0)─────────────────┬─(0,1)─────────────────┬─(0,2)─────────────────┐
│ C00 := A00·B00  k 0:1 │ C01 := A01·B11  k 1:2 │ C02 := A02·B22  k 2:3 │
├─(1,0)─────────────────┼─(1,1)─────────────────┼─(1,2)─────────────────┤
│ C10 := A11·B10  k 1:2 │ C11 := A12·B21  k 2:3 │ C12 := A10·B02  k 0:1 │
├─(2,0)─────────────────┼─(2,1)─────────────────┼─(2,2)─────────────────┤
│ C20 := A22·B20  k 2:3 │ C21 := A20·B01  k 0:1 │ C22 := A21·B12  k 1:2 │
└───────────────────────┴───────────────────────┴───────────────────────┘

Step 2 of 3
┌─(0,0)─────────────────┬─(0,1)─────────────────┬─(0,2)─────────────────┐
│ A01 ← (0,1)           │ A02 ← (0,2)           │ A00 ← (0,0)           │
│ B10 ← (1,0)           │ B21 ← (1,1)           │ B02 ← (1,2)           │
│ C00 += A01·B10  k 1:2 │ C01 += A02·B21  k 2:3 │ C02 += A00·B02  k 0:1 │
├─(1,0)─────────────────┼─(1,1)─────────────────┼─(1,2)─────────────────┤
│ A12 ← (1,1)           │ A10 ← (1,2)           │ A11 ← (1,0)           │
│ B20 ← (2,0)           │ B01 ← (2,1)           │ B12 ← (2,2)           │
│ C10 += A12·B20  k 2:3 │ C11 += A10·B01  k 0:1 │ C12 += A11·B12  k 1:2 │
├─(2,0)─────────────────┼─(2,1)─────────────────┼─(2,2)─────────────────┤
│ A20 ← (2,1)           │ A21 ← (2,2)           │ A22 ← (2,0)           │
│ B00 ← (0,0)           │ B11 ← (0,1)           │ B22 ← (0,2)           │
│ C20 += A20·B00  k 0:1 │ C21 += A21·B11  k 1:2 │ C22 += A22·B22  k 2:3 │
└───────────────────────┴───────────────────────┴───────────────────────┘

Step 3 of 3
┌─(0,0)─────────────────┬─(0,1)─────────────────┬─(0,2)─────────────────┐
│ A02 ← (0,1)           │ A00 ← (0,2)           │ A01 ← (0,0)           │
│ B20 ← (1,0)           │ B01 ← (1,1)           │ B12 ← (1,2)           │
│ C00 += A02·B20  k 2:3 │ C01 += A00·B01  k 0:1 │ C02 += A01·B12  k 1:2 │
├─(1,0)─────────────────┼─(1,1)─────────────────┼─(1,2)─────────────────┤
│ A10 ← (1,1)           │ A11 ← (1,2)           │ A12 ← (1,0)           │
│ B00 ← (2,0)           │ B11 ← (2,1)           │ B22 ← (2,2)           │
│ C10 += A10·B00  k 0:1 │ C11 += A11·B11  k 1:2 │ C12 += A12·B22  k 2:3 │
├─(2,0)─────────────────┼─(2,1)─────────────────┼─(2,2)─────────────────┤
│ A21 ← (2,1)           │ A22 ← (2,2)           │ A20 ← (2,0)           │
│ B10 ← (0,0)           │ B21 ← (0,1)           │ B02 ← (0,2)           │
│ C20 += A21·B10  k 1:2 │ C21 += A22·B21  k 2:3 │ C22 += A20·B02  k 0:1 │
└───────────────────────┴───────────────────────┴───────────────────────┘"""


def made(algorithm: Algorithm, shape: tuple[int, int, int], mesh: MeshShape) -> Iterator[Schedule]:
    """The row's schedules on the placements that it takes on a mesh, if any; the cheapest where it leaves them open."""
    request = Request(shape, mesh, algorithm=algorithm.name)
    if algorithm.specialize or algorithm.placements is None:
        best = candidates(request)[0]
        algorithm, layouts = best.algorithm, [best.layouts] if best.layouts else []
    else:
        layouts = [] if isinstance(algorithm.placements(mesh), str) else [*placements_taken(algorithm, request)]
    for each in layouts:
        yield kept(lower(algorithm, PlacedProblem(shape, mesh, each)))


def named(name: str, shape: tuple[int, int, int], mesh: MeshShape) -> Schedule:
    """The first of `made`."""
    return next(made(find_algorithm(name), shape, mesh))


def cells_of(text: str) -> list[tuple[str, str]]:
    """(title and layers' names, what stands in the cell without spaces) of every cell of the text."""
    found: list[tuple[str, str]] = []
    names: list[str] = []
    row: list[str] = []
    for line in text.splitlines():
        if line[0:1] in "┌├└" and line:
            found += [(name, words) for name, words in zip(names, row, strict=True) if name]
            names = [] if line[0] == "└" else [part.strip("─") for part in re.split("[┬┼]", line[1:-1])]
            row = [""] * len(names)
        elif line.startswith("│"):
            row = [old + part.replace(" ", "") for old, part in zip(row, line[1:-1].split("│"), strict=True)]
    return found


def told(schedule: Schedule, rank: int) -> list[str]:
    """What must be said of a rank, from its operations alone, without spaces."""
    words = []
    for op in expand(schedule, rank):
        if isinstance(op, Multiply):
            words.append(f"k{op.a.region[1]}")
        sign = {Copy: "get", Shift: "←", Accumulate: "→", Reduce: "⇒", Multiply: "view"}.get(type(op), "⇐")
        words += [f"{sign}{place(schedule.mesh, other)}" for other, _, _ in foreign(op, rank)]
    return words


class Balanced(HTMLParser):
    """A reader that insists on every tag being closed in order."""

    VOID = ("meta", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.summaries: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed where it opens."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "summary":
            self.summaries.append(data)


def read(text: str) -> Balanced:
    """A page that is well formed and needs nothing from elsewhere."""
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.targets == []
    assert "://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#tip"}
    return parser


def test_cannons_skew_can_be_seen() -> None:
    """Row i starts i blocks further, column j starts j blocks further; then A moves left and B moves up."""
    assert drawn(named("cannon", (3, 3, 3), MeshShape((3, 3)))) == CANNON


@pytest.mark.parametrize("name", usually(3, sorted(ALGORITHMS, key=COVERING.__contains__, reverse=True), rest=nightly))
def test_pictures_say_what_operations_do(name: str) -> None:
    """All that is multiplied, and all that moves, with the right partner, in the cell of the rank that does it."""
    drawings = 0
    for mesh in MESHES:
        for shape in SHAPES:
            for schedule in made(ALGORITHMS[name], shape, mesh):
                text = drawn(schedule)
                assert max(map(len, text.splitlines())) <= WIDTH
                if "Too large for text" in text:
                    continue
                drawings += 1
                cells = cells_of(text)
                for rank in mesh.ranks:
                    said = " ".join(words for at, words in cells if at == place(mesh, rank))
                    assert said
                    assert [words for words in told(schedule, rank) if words not in said] == []
    assert drawings


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_scenes_hold_every_move_once(name: str) -> None:
    """As many words cross between each pair of ranks as the operations move."""
    for mesh in MESHES:
        for schedule in made(ALGORITHMS[name], (6, 6, 6), mesh):
            found = scenes(schedule)
            for rank in mesh.ranks:
                cells = [scene.cells[rank] for scene in found]
                moves = [move for cell in cells for move in [*cell.arrives, *cell.leaves] if move.kind != "view"]
                shown = sorted((move.source + move.to - rank, move.ref.region.size) for move in moves)
                ops = expand(schedule, rank)
                wanted = [(other, words) for op in ops for other, words, message in foreign(op, rank) if message]
                assert shown == sorted(wanted)
                products = [op for cell in cells for op in cell.products]
                assert products == [op for op in ops if isinstance(op, Multiply)]


@pytest.mark.parametrize("name", usually(2, COVERING))
def test_pages_are_whole(name: str) -> None:
    """Well formed, every rank, every picture, all operations."""
    for mesh in MESHES:
        for schedule in made(ALGORITHMS[name], (7, 5, 4), mesh):
            text = page(schedule, name)
            assert len(read(text).summaries) == mesh.size
            for rank in mesh.ranks:
                assert f">{place(mesh, rank)} rank {rank}</text>" in text
            assert text.count('<section class="scene">') == len(scenes(schedule)) + 1
            assert "left out" not in text


@pytest.mark.parametrize("name", usually(1, ["cannon", "summa_c", "queue", "agarwal_3d"]))
def test_pages_of_large_meshes_stay_small(name: str) -> None:
    """64 ranks fit into 3 MB."""
    mesh = MeshShape((4, 4, 4) if name == "agarwal_3d" else (8, 8))
    text = page(named(name, (2048, 2048, 2048), mesh), name)
    assert len(text.encode()) < 3 * 10**6
    assert len(read(text).summaries) == 64


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, operations, lines of a cell and arrows."""
    schedule = named("cannon", (3, 3, 3), MeshShape((3, 3)))
    monkeypatch.setattr(picture_html, "PICTURES", 12000)
    monkeypatch.setattr(picture_html, "OPERATIONS", 900)
    monkeypatch.setattr(picture_html, "LINES", 2)
    monkeypatch.setattr(picture_html, "ARROWS", 3)
    text = page(schedule, "small")
    read(text)
    assert re.search(r"The last \d of 4 pictures are left out", text)
    assert "more are left out" in text
    assert "1 more: see the list" in text
    assert "18 pairs of ranks exchange something: the arrows are left out." in text


def test_large_meshes_are_not_drawn() -> None:
    """Text says how large they are; so does the page beyond 64 ranks."""
    nine = drawn(named("cannon", (40, 40, 40), MeshShape((4, 4))))
    assert "Too large for text: 16 ranks" in nine
    assert "HTML" in nine
    many = page(named("summa_c", (20, 20, 20), MeshShape((9, 9))), "many")
    read(many)
    assert "this one has 81" in many


def test_titles_are_escaped() -> None:
    """Nothing in a title is read as HTML."""
    text = page(named("cannon", (2, 2, 2), MeshShape((2, 2))), "<script>alert(1)</script> & more")
    read(text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_colours_show_the_skew() -> None:
    """On a page every rank of Cannon's first turn has the colour of its diagonal."""
    text = page(named("cannon", (4, 4, 4), MeshShape((4, 4))), "Cannon")
    first = text.split('<section class="scene">')[2]
    assert "Step 1 of 4" in first
    hues = [int(hue) for hue in re.findall(r'fill="hsl\((\d+),75%,80%\)', first)]
    assert hues == [75 * ((i + j) % 4) for i in range(4) for j in range(4)]


def test_queues_say_that_tasks_are_claimed() -> None:
    """Who runs what is not known before."""
    schedule = named("queue", (6, 6, 6), MeshShape((2, 2)))
    assert "tasks are claimed by fetch-and-add" in drawn(schedule)
    assert "tasks are claimed by fetch-and-add" in page(schedule, "queue")


def test_ranks_without_work_are_named() -> None:
    """Also where nobody has any."""
    text = drawn(named("data_parallel", (2, 3, 3), MeshShape((3,))))
    assert "These ranks multiply nothing: (0)" in text
    assert "C  nothing" in text
    assert "Step" not in drawn(named("data_parallel", (0, 3, 3), MeshShape((3,))))


def test_barriers_stand_where_they_are_met() -> None:
    """Around the reduction, also where there is nothing to multiply and zeros are added."""
    for k in (4, 0):
        found = scenes(named("johnson_3d", (4, 4, k), MeshShape((2, 2, 2))))
        assert [(scene.title, scene.barriers) for scene in found] == [("Step 1 of 1", 1), ("At last", 1)]


def test_stages_and_barriers_are_drawn() -> None:
    """A plain operand is skewed first, behind which all ranks meet."""
    mesh = MeshShape((2, 2))
    schedule = list(made(find_algorithm("cannon"), (4, 4, 4), mesh))[3]
    text = drawn(schedule)
    assert "B+11  2:4 × 2:4" in text
    before, _, after = text.partition("All ranks meet at a barrier.")
    assert "Before the first turn" in before
    assert "B11 get (1,1)" in before
    assert "Step 1 of 2" in after
    assert "At last" in after  # C is wanted everywhere


def test_redistributions_are_drawn() -> None:
    """Also of summands, though nothing is multiplied."""
    mesh = MeshShape((2, 2))
    source, target = parse_layout("P('i', None, j=sum)", mesh), parse_layout("P(None, ('i', 'j'))", mesh)
    text = drawn(redistribution(mesh, (4, 4), source, target))
    assert "A (4 × 4) is moved into C" in text
    assert "(a summand)" in text
    assert "Moves" in text
    assert "Step" not in text
    assert "multiply nothing" not in text
    read(page(redistribution(mesh, (4, 4), source, target), "moves"))


def test_blocks_are_named_by_their_parts() -> None:
    """Numbers for whole parts, `*` for all of them, indices for less."""
    labels = Labels(named("summa_c", (12, 12, 12), MeshShape((2, 3))))
    layout = parse_layout("P('i', 'j')", MeshShape((2, 3)))
    assert labels.block("A", layout.region((12, 12), MeshShape((2, 3)), 4)) == "A(1,1+2)"
    whole, part = layout.region((12, 12), MeshShape((1, 3)), 0), layout.region((2, 6), MeshShape((2, 3)), 0)
    assert labels.block("C", whole) == "C*0"
    assert labels.block("A", part) == "A(0:1,0:2)"
