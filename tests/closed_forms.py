"""Words and messages of each algorithm in closed form, for even blocks. No MPI: pure and MPI tests count against them.

algorithms.md §3. A mesh has R × C × D ranks, this rank is (i, j, l); a = MK, b = KN, c = MN. A rank counts what it
receives of A and B, and what it sends of C. Every formula is derived from the placements: what the rank multiplies,
less what it holds. Extents must be multiples of the number of ranks, so that all blocks are even.

Messages follow from the cut into chunks: an owner's part of what a rank needs is one chunk, and every chunk that
comes from another rank (or is added to another rank's C) is one message, be it got, broadcast, shifted or reduced.
A matrix that is read where it lies moves words, but no message. The counts of `srumma` and of `cannon:pull` are
those of blocks of k that are narrower than `rma_mm.schedule.boxes.NARROW`: then all of k is one panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from rma_mm.algorithms.survey import place
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.schedule.row import Problem

Grid = tuple[int, ...]
Extents = tuple[int, int, int]
"""(m, n, k)."""


@dataclass(frozen=True)
class Seat:
    """One rank of a product, in the letters of the formulas; where the mesh has fewer axes, C and D are 1."""

    i: int
    j: int
    l: int  # noqa: E741
    R: int
    C: int
    D: int
    M: int
    N: int
    K: int

    @property
    def P(self) -> int:
        return self.R * self.C * self.D

    @property
    def a(self) -> int:
        return self.M * self.K

    @property
    def b(self) -> int:
        return self.K * self.N

    @property
    def c(self) -> int:
        return self.M * self.N

    @property
    def K_i(self) -> range:
        return part(self.K, self.i, self.R)

    @property
    def K_j(self) -> range:
        return part(self.K, self.j, self.C)

    @property
    def K_l(self) -> range:
        return part(self.K, self.l, self.D)


def part(extent: int, n: int, count: int) -> range:
    """The nth of `count` even parts."""
    return range(extent * n // count, extent * (n + 1) // count)


def common(one: range, other: range) -> int:
    """|one ∩ other|."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def parts_in(r: Seat, count: int, needed: range) -> int:
    """How many of `count` parts of k meet `needed`."""
    return sum(common(part(r.K, n, count), needed) > 0 for n in range(count))


Figure = Callable[[Seat], int]


@dataclass(frozen=True)
class Form:
    """An algorithm on certain placements, with what each rank moves."""

    label: str
    """How tests call it."""
    name: str
    """The algorithm, as on the command line."""
    axes: int
    """Axes of the mesh; those for one axis take the ranks of any mesh as one ring."""
    placed: tuple[str, str, str]
    """A, B and C in the words of algorithms.md §2."""
    words_of: Figure
    messages_of: Figure
    viewed_of: Figure | None = None
    """Messages where A and B of node-mates are read in place, and all ranks share a node; None for the same."""

    def words(self, mesh: Grid, shape: Extents) -> list[int]:
        """Words that each rank moves."""
        return [self.words_of(seat) for seat in self.seats(mesh, shape)]

    def messages(self, mesh: Grid, shape: Extents, in_place: str = "") -> list[int]:
        """Messages of each rank. in_place: "" for none read in place, "AB" for both, all ranks on one node."""
        figure = self.viewed_of if in_place and self.viewed_of else self.messages_of
        return [figure(seat) for seat in self.seats(mesh, shape)]

    def seats(self, mesh: Grid, shape: Extents) -> Iterator[Seat]:
        """The ranks of a mesh in order."""
        rows, cols, layers = (*((prod(mesh),) if self.axes == 1 else mesh), 1, 1)[:3]
        for i, j, l in product(range(rows), range(cols), range(layers)):  # noqa: E741
            yield Seat(i, j, l, rows, cols, layers, *shape)

    def layouts(self, mesh: MeshShape) -> tuple[Layout, Layout, Layout]:
        """The placements of A, B and C."""
        a, b, c = (
            place(text, dims, mesh, self.axes) for text, dims in zip(self.placed, ("mk", "kn", "mn"), strict=True)
        )
        return a, b, c

    def problem(self, mesh: MeshShape, shape: Extents, in_place: str = "") -> Problem:
        """The product on those placements."""
        return Problem(shape, mesh, self.layouts(mesh), in_place=in_place)


def none(_: Seat) -> int:
    """Nothing."""
    return 0


# -- one axis: P = R ranks in a ring ----------------------------------------------------------------


def gathered_a(r: Seat) -> int:
    """All of A, less the P-th part that is here: (P − 1)/P · a."""
    return r.a - r.a // r.P


def gathered_b(r: Seat) -> int:
    """All of B, less the P-th part that is here: (P − 1)/P · b."""
    return r.b - r.b // r.P


def scattered_c(r: Seat) -> int:
    """Sums of all of C, of which the P-th part stays: (P − 1)/P · c, whoever adds them up on the way."""
    return r.c - r.c // r.P


def others(r: Seat) -> int:
    """One message for each other rank."""
    return r.P - 1


def in_pieces(r: Seat) -> int:
    """A block of rows travels in two pieces, one row cannot."""
    return min(2, r.M // r.P) * (r.P - 1)


ONE_AXIS = [
    Form("data_parallel", "data_parallel", 1, ("m→i", "", "m→i"), none, none),
    # B in equal shares is gathered
    Form("data_parallel, B k→i", "data_parallel", 1, ("m→i", "k→i", "m→i"), gathered_b, others),
    Form("column_parallel", "column_parallel", 1, ("", "n→i", "n→i"), none, none),
    Form("column_parallel, A m→i", "column_parallel", 1, ("m→i", "n→i", "n→i"), gathered_a, others),
    Form("row_parallel", "row_parallel", 1, ("k→i", "k→i", "m→i"), scattered_c, others),
    # an all-reduce is a reduce-scatter and an all-gather: 2(P − 1)/P · c
    Form(
        "row_parallel, C everywhere", "row_parallel", 1, ("k→i", "k→i", ""),
        lambda r: 2 * scattered_c(r), lambda r: 2 * others(r),
    ),
    Form("gather_gemm", "gather_gemm", 1, ("m→i", "n→i", "n→i"), gathered_a, in_pieces),
    Form("gemm_scatter", "gemm_scatter", 1, ("k→i", "k→i", "m→i"), scattered_c, in_pieces),
]  # fmt: skip


# -- two axes: C stationary ---------------------------------------------------------------------------


def across(r: Seat) -> int:
    """A's rows M_i and B's columns N_j, all of k, less the own blocks: a/R · (C−1)/C + b/C · (R−1)/R."""
    return r.a * (r.C - 1) // (r.R * r.C) + r.b * (r.R - 1) // (r.R * r.C)


def across_messages(r: Seat) -> int:
    """One for each other block in the rank's row and column of the mesh."""
    return r.C - 1 + r.R - 1


def kept(extent: int, width: int, moved: int) -> int:
    """What a circular window of `width` indices still covers after it has moved by `moved` of `extent` indices.

    Two windows that start d apart share max(0, w − d), and max(0, w − (K − d)) round the end.
    """
    return max(0, width - moved) + max(0, width + moved - extent) if moved else width


def skewing(r: Seat) -> int:
    """What the skewed blocks take from plain ones: (M/R) · (K/C − what the window keeps) of A, of B likewise.

    §3 has a/(RC) on ranks i ≠ 0 and b/(RC) on ranks j ≠ 0. That is so where nothing is kept: A's window of K/C
    indices moves by iK/R, far enough for any i ≠ 0 where R ≤ C; B's needs C ≤ R. Square meshes have both. Counted in
    unit hops, as on Cannon's machine of 1969, it is min(i, R − i) times that; here the skew is sent directly.
    """
    of_a = r.M // r.R * (r.K // r.C - kept(r.K, r.K // r.C, r.i * r.K // r.R))
    of_b = r.N // r.C * (r.K // r.R - kept(r.K, r.K // r.R, r.j * r.K // r.C))
    return of_a + of_b


def skewing_messages(r: Seat) -> int:
    """One from each other owner of the skewed windows."""
    return skew_owners(r.j, r.C, r.i, r.R) + skew_owners(r.i, r.R, r.j, r.C)


def skew_owners(own: int, count: int, step: int, steps: int) -> int:
    """Other owners of a window as wide as a block, which starts `step` of `steps` parts of k behind the own block.

    They are two blocks where it starts inside one, and one block else.
    """
    blocks, rest = divmod(step * count, steps)
    return len({(own + blocks + n) % count for n in range(1 + (rest > 0))} - {own})


def rolling_messages(r: Seat) -> int:
    """As SUMMA; where the walk starts inside a block of A (at iK/R, of blocks of K/C), that block comes in two."""
    block, rest = divmod(r.i * r.C, r.R)
    return across_messages(r) + (rest > 0 and block != r.j)


_BLOCKS = ("m→i, k→j", "k→i, n→j", "m→i, n→j")

STATIONARY_C = [
    Form(
        "cannon, placed skewed", "cannon", 2, ("m→i, k→j:skew(i)", "k→i:skew(j), n→j", "m→i, n→j"),
        across, across_messages,
    ),
    Form(
        "cannon, placed plain", "cannon", 2, _BLOCKS,
        lambda r: skewing(r) + across(r), lambda r: skewing_messages(r) + across_messages(r),
    ),
    # pulled from plain blocks nothing is skewed, and nothing comes twice
    Form("cannon:pull, placed plain", "cannon:pull", 2, _BLOCKS, across, across_messages, none),
    Form("summa_c", "summa_c", 2, _BLOCKS, across, across_messages),
    Form("pumma", "pumma", 2, _BLOCKS, across, rolling_messages),
    Form("srumma", "srumma", 2, _BLOCKS, across, across_messages, none),
    Form("mixed_2d", "mixed_2d", 2, ("m→i", "n→j", "m→i, n→j"), none, none),
    # in equal shares: A's rows are gathered along j, B's along i, which is what SUMMA moves
    Form("mixed_2d, in equal shares", "mixed_2d", 2, ("m→(i,j)", "k→i, n→j", "m→i, n→j"), across, across_messages),
]  # fmt: skip


# -- two axes: A or B stationary ----------------------------------------------------------------------


def along_j(r: Seat) -> int:
    """Sums of C's rows M_i (or of its columns, where those are cut over i), scattered over j: (C−1)/C · c/R."""
    return r.c * (r.C - 1) // (r.R * r.C)


def along_i(r: Seat) -> int:
    """Sums of C's columns N_j, scattered over i: (R−1)/R · c/C."""
    return r.c * (r.R - 1) // (r.R * r.C)


def rows_of_b(r: Seat) -> int:
    """B's rows K_j, of which blocks k→i, n→j hold K_i ∩ K_j of N/C columns here: b/C − (N/C)·|K_i ∩ K_j|."""
    return r.b // r.C - r.N // r.C * common(r.K_i, r.K_j)


def columns_of_a(r: Seat) -> int:
    """A's columns K_i, of which blocks m→i, k→j hold K_i ∩ K_j of M/R rows here: a/R − (M/R)·|K_i ∩ K_j|."""
    return r.a // r.R - r.M // r.R * common(r.K_i, r.K_j)


def rows_of_b_messages(r: Seat) -> int:
    """Other owners of B's rows K_j: C · |{i' : K_i' meets K_j}|, less the rank itself."""
    return r.C * parts_in(r, r.R, r.K_j) - (common(r.K_i, r.K_j) > 0)


def columns_of_a_messages(r: Seat) -> int:
    """Other owners of A's columns K_i: R · |{j' : K_j' meets K_i}|, less the rank itself."""
    return r.R * parts_in(r, r.C, r.K_i) - (common(r.K_i, r.K_j) > 0)


STATIONARY_AB = [
    Form(
        "summa_a", "summa_a", 2, ("m→i, k→j", "k→j, n→i", "m→i, n→j"),
        lambda r: r.b * (r.R - 1) // (r.R * r.C) + along_j(r), lambda r: r.R - 1 + r.C - 1,
    ),
    Form(
        "summa_a, B k→i, n→j", "summa_a", 2, _BLOCKS,
        lambda r: rows_of_b(r) + along_j(r), lambda r: rows_of_b_messages(r) + r.C - 1,
    ),
    Form(
        "summa_b", "summa_b", 2, ("m→j, k→i", "k→i, n→j", "m→i, n→j"),
        lambda r: r.a * (r.C - 1) // (r.R * r.C) + along_i(r), lambda r: r.C - 1 + r.R - 1,
    ),
    Form(
        "summa_b, A m→i, k→j", "summa_b", 2, _BLOCKS,
        lambda r: columns_of_a(r) + along_i(r), lambda r: columns_of_a_messages(r) + r.R - 1,
    ),
    Form(
        "row_column_2d", "row_column_2d", 2, ("k→j", "k→j, n→i", "m→j, n→i"),
        along_j, lambda r: r.C - 1,
    ),
    # A's columns K_j in equal shares are gathered along i: a/C · (R−1)/R more
    Form(
        "row_column_2d, A m→i, k→j", "row_column_2d", 2, ("m→i, k→j", "k→j, n→i", "m→j, n→i"),
        lambda r: r.a * (r.R - 1) // (r.R * r.C) + along_j(r), lambda r: r.R - 1 + r.C - 1,
    ),
]  # fmt: skip


# -- three axes ---------------------------------------------------------------------------------------


def thrice(r: Seat) -> int:
    """All-gathers of A along j and B along i, a reduce-scatter of C along l, each of parts a/P, b/P and c/P.

    On a cube of P = p³ ranks that is 3(p − 1)/p³ · n² = 3(n²/P^(2/3) − n²/P). A survey has n²/P for each, which is
    the block that a rank starts with and not the P^(1/3) − 1 blocks that it gets.
    """
    return ((r.C - 1) * r.a + (r.R - 1) * r.b + (r.D - 1) * r.c) // r.P


def thrice_messages(r: Seat) -> int:
    """One for each other member of the rank's three groups."""
    return r.C - 1 + r.R - 1 + r.D - 1


def from_faces(r: Seat) -> int:
    """A's block comes from the face j = 0, B's from i = 0, and C's sum goes to l = 0."""
    return (r.j > 0) * r.a // (r.R * r.D) + (r.i > 0) * r.b // (r.C * r.D) + to_first_layer(r)


def to_first_layer(r: Seat) -> int:
    """The sum of a block of C, where the rank is not on the layer that keeps it: c/(RC) for l > 0."""
    return (r.l > 0) * r.c // (r.R * r.C)


def layers(r: Seat) -> int:
    """A layer's SUMMA on its part K_l of k, from blocks of all of k on each layer: (M/R + N/C)(K/D) − o_A − o_B."""
    return (r.M // r.R + r.N // r.C) * r.K // r.D - own_share(r)


def own_share(r: Seat) -> int:
    """What the rank's own blocks of A and B cover: o_A = (M/R)·|K_j ∩ K_l| and o_B = (N/C)·|K_i ∩ K_l|."""
    return r.M // r.R * common(r.K_j, r.K_l) + r.N // r.C * common(r.K_i, r.K_l)


def layers_messages(r: Seat) -> int:
    """One from each other block of A and B that meets K_l."""
    is_own = (common(r.K_j, r.K_l) > 0) + (common(r.K_i, r.K_l) > 0)
    return parts_in(r, r.C, r.K_l) + parts_in(r, r.R, r.K_l) - is_own


def first_copies(r: Seat) -> int:
    """The blocks of A and B that come to a layer before its SUMMA: (a + b)/(RC) for l > 0."""
    return (r.l > 0) * (r.a + r.b) // (r.R * r.C)


def pulled_layers(r: Seat) -> int:
    """What K_l needs comes straight from layer 0, where o_A and o_B are the rank's own; on others nothing is."""
    return (r.M // r.R + r.N // r.C) * r.K // r.D - (r.l == 0) * own_share(r)


def pulled_layers_messages(r: Seat) -> int:
    """One from each part of K_l that has another owner; a rotated walk cuts the part that it starts in in two."""
    extent = len(r.K_l)
    start = (r.i * extent // r.R + r.j * extent // r.C + r.l * extent // r.D) % extent + r.K_l.start
    return pulled_parts(r, r.j, r.C, start) + pulled_parts(r, r.i, r.R, start)


def pulled_parts(r: Seat, own: int, count: int, start: int) -> int:
    """Parts of K_l, cut as `count` blocks of k cut it and at `start`, that are not the block `own` of this layer.

    Where one block is all of K_l, what is before the start follows what is behind it: they stay one part.
    """
    met = [block for n in range(count) if common(block := part(r.K, n, count), r.K_l)]
    foreign = [block for block in met if r.l > 0 or block != part(r.K, own, count)]
    halved = [block for block in foreign if max(block.start, r.K_l.start) < start < block.stop and len(met) > 1]
    return len(foreign) + len(halved)


def in_layers(r: Seat) -> int:
    """SUMMA on a layer's rows of A and C, with all of B in each layer: a/(RD) · (C−1)/C + b/C · (R−1)/R."""
    return r.a * (r.C - 1) // (r.R * r.C * r.D) + r.b * (r.R - 1) // (r.R * r.C)


_TESSERACT = "m→(i,l), k→j"
_FACES = ("m→i, k→j, l=0", "k→i, n→j, l=0", "m→i, n→j, l=0")

THREE_AXES = [
    Form("agarwal_3d", "agarwal_3d", 3, ("m→i, k→(l,j)", "k→l, n→(j,i)", "m→i, n→(j,l)"), thrice, thrice_messages),
    Form("nus_3d", "nus_3d", 3, ("m→(i,j), k→l", "k→l, n→(j,i)", "m→(i,l), n→j"), thrice, thrice_messages),
    Form(
        "johnson_3d", "johnson_3d", 3, ("m→i, k→l, j=0", "k→l, n→j, i=0", "m→i, n→j, l=0"),
        from_faces, lambda r: (r.j > 0) + (r.i > 0) + (r.l > 0),
    ),
    # Solomonik and Demmel's Cannon form starts layer l at block i + j + l·p/D of all of k, so that no layer owns one
    # range of it: p/D blocks of A and B a rank, the same words, if other ones
    Form(
        "solomonik_25d", "solomonik_25d", 3, _FACES,
        lambda r: first_copies(r) + layers(r) + to_first_layer(r),
        lambda r: layers_messages(r) + 3 * (r.l > 0),
    ),
    Form(
        "solomonik_25d:pull", "solomonik_25d:pull", 3, _FACES,
        lambda r: pulled_layers(r) + to_first_layer(r), lambda r: pulled_layers_messages(r) + (r.l > 0),
        lambda r: int(r.l > 0),
    ),
    Form(
        "tesseract, B on every layer", "tesseract", 3, (_TESSERACT, "k→i, n→j", "m→(i,l), n→j"),
        in_layers, across_messages,
    ),
    # each element of B once: the layers gather their blocks, (D−1)/D · b/(RC) on every rank
    Form(
        "tesseract", "tesseract", 3, (_TESSERACT, "k→(i,l), n→j", "m→(i,l), n→j"),
        lambda r: in_layers(r) + r.b * (r.D - 1) // r.P, lambda r: across_messages(r) + r.D - 1,
    ),
    # all of B on layer 0: a first copy of b/(RC) where l > 0, as many words of B in all as above
    Form(
        "tesseract, B l=0", "tesseract", 3, (_TESSERACT, "k→i, n→j, l=0", "m→(i,l), n→j"),
        lambda r: in_layers(r) + (r.l > 0) * r.b // (r.R * r.C), lambda r: across_messages(r) + (r.l > 0),
    ),
]  # fmt: skip

FORMS: dict[str, Form] = {form.label: form for form in (*ONE_AXIS, *STATIONARY_C, *STATIONARY_AB, *THREE_AXES)}
"""Every closed form, by label."""

MESHES: dict[int, list[Grid]] = {
    1: [(1,), (2,), (3,), (4,), (7,), (2, 3), (2, 2, 2)],
    2: [(1, 4), (3, 1), (2, 2), (3, 3), (2, 3), (3, 2), (2, 4), (3, 5), (6, 4)],
    3: [(1, 1, 4), (1, 4, 2), (3, 1, 2), (2, 2, 2), (3, 3, 3), (2, 3, 2), (3, 2, 4), (4, 2, 3)],
}
"""Axes → meshes to try: square, oblong, with axes of one rank, with factors in common and without."""


def even_shape(mesh: Grid, *factors: int) -> Extents:
    """(m, n, k) in blocks that are even however a mesh cuts them: `factors`, or 2, 3 and 4, indices for each rank."""
    m, n, k = (factor * prod(mesh) for factor in factors or (2, 3, 4))
    return m, n, k
