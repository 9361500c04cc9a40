"""Closed forms on meshes of three axes."""

from __future__ import annotations

from .blocks import across_messages
from .form import Form, Seat, common, part, parts_in


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
]
