"""Closed forms where A, B or both lie transposed on the same grid: A as m→j, k→i, and B as k→j, n→i.

A rank needs a box of each operand, and has one: it moves |needs| − |needs ∩ has| words, and one message for each other
owner of what it needs. Boxes are sets of indices here, whatever cuts them.
"""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import across, across_messages, along_i, along_j, rolling_messages
from .form import Figure, Form, Seat, none, part

Needs = Mapping[str, str]
"""Dimension → the axis over which a rank needs its own part of it, or `skew` for Cannon's window; all of the others."""


def parts(r: Seat, dim: str, axis: str, block: int) -> list[set[int]]:
    """A dimension cut over an axis: one block each, or blocks that are dealt out."""
    extent, count = getattr(r, dim), r.R if axis == "i" else r.C
    if not block:
        return [set(part(extent, n, count)) for n in range(count)]
    return [{x for x in range(extent) if x // block % count == n} for n in range(count)]


def wanted(r: Seat, x: str, dim: str, needs: Needs, block: int) -> set[int]:
    """What a rank needs of operand `x` along a dimension."""
    axis = needs.get(dim)
    if axis is None:
        return set(range(getattr(r, dim)))
    if axis != "skew":
        return parts(r, dim, axis, block)[getattr(r, axis)]
    start, width = r.i * r.K // r.R + r.j * r.K // r.C, r.K // (r.C if x == "A" else r.R)
    return {(start + n) % r.K for n in range(width)}


def moved(x: str, axes: str, needs: Needs, block: int) -> tuple[Figure, Figure]:
    """(words, messages) of an operand whose rows and columns are cut over two axes."""

    def met(r: Seat) -> tuple[list[int], list[int], int]:
        rows, cols = (
            [len(each & wanted(r, x, dim, needs, block)) for each in parts(r, dim, axis, block)]
            for dim, axis in zip({"A": "MK", "B": "KN"}[x], axes, strict=True)
        )
        return rows, cols, rows[getattr(r, axes[0])] * cols[getattr(r, axes[1])]

    def words(r: Seat) -> int:
        rows, cols, here = met(r)
        return sum(rows) * sum(cols) - here

    def messages(r: Seat) -> int:
        rows, cols, here = met(r)
        return sum(map(bool, rows)) * sum(map(bool, cols)) - bool(here)

    return words, messages


def forms(name: str, a: Needs, b: Needs, words: Figure = none, messages: Figure = none, block: int = 0) -> list[Form]:
    """A row with A, B or both transposed. words, messages: what it moves besides."""
    found = []
    dealt = f":cyclic({block})" if block else ""
    placed = {"A": f"m→{{}}{dealt}, k→{{}}{dealt}", "B": f"k→{{}}{dealt}, n→{{}}{dealt}"}
    for how in ("TN", "NT", "TT"):
        axes = {x: "ji" if turned == "T" else "ij" for x, turned in zip("AB", how, strict=True)}
        each = [moved(x, axes[x], needs, block) for x, needs in (("A", a), ("B", b))]

        def all_words(r: Seat, each: list[tuple[Figure, Figure]] = each) -> int:
            return words(r) + sum(of_one(r) for of_one, _ in each)

        def all_messages(r: Seat, each: list[tuple[Figure, Figure]] = each) -> int:
            return messages(r) + sum(of_one(r) for _, of_one in each)

        layouts = (placed["A"].format(*axes["A"]), placed["B"].format(*axes["B"]), f"m→i{dealt}, n→j{dealt}")
        found.append(Form(f"{name}, {how}", name, 2, layouts, all_words, all_messages))
    return found


TURNED = [
    *forms("summa_c", {"M": "i"}, {"N": "j"}),
    *forms("summa_a", {"M": "i", "K": "j"}, {"K": "j"}, along_j, lambda r: r.C - 1),
    *forms("summa_b", {"K": "i"}, {"K": "i", "N": "j"}, along_i, lambda r: r.R - 1),
    *forms("pblas:1", {"M": "i"}, {"N": "j"}, block=1),
    # brought upright, or skewed, and then as from there
    *forms("pumma", {"M": "i", "K": "j"}, {"K": "i", "N": "j"}, across, rolling_messages),
    *forms("cannon", {"M": "i", "K": "skew"}, {"K": "skew", "N": "j"}, across, across_messages),
]
