"""Closed forms on meshes of one axis, and of two."""

from __future__ import annotations

from .form import Figure, Form, Seat, common, none, parts_in

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


def in_pieces(dim: str) -> Figure:
    """A block travels in two pieces along the dimension that is walked, one index cannot."""
    return lambda r: min(2, getattr(r, dim) // r.P) * (r.P - 1)


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
    Form("gather_gemm", "gather_gemm", 1, ("m→i", "n→i", "n→i"), gathered_a, in_pieces("M")),
    Form("gather_gemm:a,columns", "gather_gemm:a,columns", 1, ("k→i", "n→i", "n→i"), gathered_a, in_pieces("K")),
    Form("gather_gemm:b", "gather_gemm:b", 1, ("m→i", "n→i", "m→i"), gathered_b, in_pieces("N")),
    Form("gather_gemm:b,rows", "gather_gemm:b,rows", 1, ("m→i", "k→i", "m→i"), gathered_b, in_pieces("K")),
    Form("gemm_scatter", "gemm_scatter", 1, ("k→i", "k→i", "m→i"), scattered_c, in_pieces("M")),
    Form("gemm_scatter:columns", "gemm_scatter:columns", 1, ("k→i", "k→i", "n→i"), scattered_c, in_pieces("N")),
]


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


BLOCKS = ("m→i, k→j", "k→i, n→j", "m→i, n→j")

STATIONARY_C = [
    Form(
        "cannon, placed skewed", "cannon", 2, ("m→i, k→j:skew(i)", "k→i:skew(j), n→j", "m→i, n→j"),
        across, across_messages,
    ),
    Form(
        "cannon, placed plain", "cannon", 2, BLOCKS,
        lambda r: skewing(r) + across(r), lambda r: skewing_messages(r) + across_messages(r),
    ),
    # pulled from plain blocks nothing is skewed, and nothing comes twice
    Form("cannon:pull, placed plain", "cannon:pull", 2, BLOCKS, across, across_messages, none),
    Form("summa_c", "summa_c", 2, BLOCKS, across, across_messages),
    Form("pumma", "pumma", 2, BLOCKS, across, rolling_messages),
    Form("srumma", "srumma", 2, BLOCKS, across, across_messages, none),
    Form("mixed_2d", "mixed_2d", 2, ("m→i", "n→j", "m→i, n→j"), none, none),
    # in equal shares: A's rows are gathered along j, B's along i, which is what SUMMA moves
    Form("mixed_2d, in equal shares", "mixed_2d", 2, ("m→(i,j)", "k→i, n→j", "m→i, n→j"), across, across_messages),
]


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
        "summa_a, B k→i, n→j", "summa_a", 2, BLOCKS,
        lambda r: rows_of_b(r) + along_j(r), lambda r: rows_of_b_messages(r) + r.C - 1,
    ),
    Form(
        "summa_b", "summa_b", 2, ("m→j, k→i", "k→i, n→j", "m→i, n→j"),
        lambda r: r.a * (r.C - 1) // (r.R * r.C) + along_i(r), lambda r: r.C - 1 + r.R - 1,
    ),
    Form(
        "summa_b, A m→i, k→j", "summa_b", 2, BLOCKS,
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
]
