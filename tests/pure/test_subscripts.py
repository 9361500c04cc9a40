"""Subscripts of einsum: what NumPy takes is read alike, what it refuses is refused by name, and orders of products."""

from itertools import pairwise

import numpy as np
import pytest

from rma_mm.errors import OptionError, ShapeError
from rma_mm.runtime.einsum.subscripts import parse, path


@pytest.mark.parametrize(
    ("text", "shapes", "output"),
    [
        ("ij,jk", [(2, 3), (3, 4)], "ik"),
        ("ba", [(2, 3)], "ab"),
        ("ii", [(3, 3)], ""),
        (" b i j , b j k -> k b i ", [(2, 3, 4), (2, 4, 5)], "kbi"),
        ("i,i->", [(1,), (4,)], ""),
        (",ij", [(), (2, 3)], "ij"),
    ],
)
def test_results_have_numpys_indices(text, shapes, output):
    found = parse(text, shapes)
    extents = dict(found.extents)
    assert found.output == tuple(output)
    expected = np.einsum(text, *(np.ones(shape) for shape in shapes)).shape
    assert tuple(extents[name] for name in found.output) == expected


def test_an_ellipsis_stands_for_the_last_dimensions_alike():
    found = parse("...ij,...jk", [(7, 2, 3), (5, 7, 3, 4)])
    assert found.operands == (("…1", "i", "j"), ("…2", "…1", "j", "k"))
    assert found.output == ("…2", "…1", "i", "k")
    assert parse("i...->...i", [(2,)]).output == ("i",)


@pytest.mark.parametrize(
    ("text", "shapes", "kind", "words"),
    [
        ("ij,jk->iik", [(2, 3), (3, 4)], OptionError, ["'i'", "twice"]),
        ("ij,jk->iz", [(2, 3), (3, 4)], OptionError, ["'z'", "no operand"]),
        ("ij,jk", [(2, 3), (4, 5)], ShapeError, ["'j'", "3 in operand 0", "4 in operand 1"]),
        ("ii", [(2, 3)], ShapeError, ["'i'", "2 and 3 in operand 0"]),
        ("...i,...i", [(2, 3), (4, 3)], ShapeError, ["-1 of '...'"]),
        ("ij", [(2, 3, 4)], ShapeError, ["operand 0", "(2, 3, 4)", "'ij'"]),
        ("ijk...", [(2, 3)], ShapeError, ["operand 0"]),
        ("ij,jk", [(2, 3)], OptionError, ["1 operands", "which has 2"]),
        ("i1->i", [(2, 3)], OptionError, ["'1'"]),
        ("...i...", [(2, 3)], OptionError, ["ellipsis"]),
        ("ij->i->j", [(2, 3)], OptionError, ["'-'"]),
        ("...i->i", [(2, 3)], OptionError, ["'...'", "1 dimensions"]),
        (7, [(2, 3)], OptionError, ["7"]),
    ],
)
def test_what_is_wrong_is_named(text, shapes, kind, words):
    with pytest.raises(kind) as caught:
        parse(text, shapes)
    assert all(word in str(caught.value) for word in words), caught.value


def replayed(steps, count):
    """Which operands are in each product, and how many are left."""
    held = [{n} for n in range(count)]
    for step in steps:
        made = set().union(*(held[n] for n in step))
        held = [x for n, x in enumerate(held) if n not in step] + [made]
    return held


def test_without_opt_einsum_products_go_from_left_to_right(monkeypatch):
    monkeypatch.setattr("rma_mm.runtime.einsum.subscripts.find_spec", lambda name: None)
    for count in range(1, 6):
        names = "abcdef"[: count + 1]
        text = ",".join(map("".join, pairwise(names)))
        steps = path(parse(text, [(2, 2)] * count))
        assert len(steps) == count - 1
        for n in range(1, count):
            assert replayed(steps[:n], count)[-1] == set(range(n + 1))


def test_with_opt_einsum_the_smallest_come_first():
    pytest.importorskip("opt_einsum")
    steps = path(parse("ij,jk,kl->il", [(100, 100), (100, 100), (100, 1)]))
    assert steps[0] == (1, 2)
    assert replayed(steps, 3) == [{0, 1, 2}]
