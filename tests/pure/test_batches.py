"""Products of batches, planned: shapes that broadcast, the ways to cut them, what each moves and holds."""

import pytest

from rma_mm.errors import ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.planner.batches import Batch, BatchPrices, batch_load, best, candidates, cuts_text

MESH = MeshShape((2, 2))
BYTES, SHARED = dict.fromkeys("ABC", 4), dict.fromkeys("ABC", "shared")
PRICES = BatchPrices(TYPICAL, ("float32", "blas"), BYTES, BYTES, SHARED)


def shares(batch, layouts=None, may_sum=True):
    """What the busiest rank has to do for each way to cut a product, by its name."""
    found = {}
    for cuts in candidates(batch, MESH, layouts or {}, may_sum):
        each = [batch_load(batch, MESH, rank, cuts, layouts or {}, PRICES) for rank in MESH.ranks]
        found[cuts_text(cuts, batch)] = max(each, key=lambda one: (one.words, one.seconds))
    return found


def test_shapes_broadcast_as_numpys() -> None:
    batch = Batch((5, 1, 2, 3), (7, 4, 3), "B")
    assert batch.shape("C") == (5, 7, 2, 4)
    assert batch.dims("B") == ("1", "n", "k")
    with pytest.raises(ShapeError, match="batch axis -3 has 2 in A and 3 in B"):
        Batch((2, 4, 4), (3, 4, 4))
    with pytest.raises(ShapeError, match=r"inner dimensions 3 and 5 must be equal"):
        Batch((2, 4, 3), (2, 5, 4))


def test_a_batch_that_is_cut_over_all_ranks_moves_nothing() -> None:
    batch = Batch((8, 16, 16), (8, 16, 16))
    placed = parse_layout("P(('i', 'j'), None, None)", MESH, 3)
    found = shares(batch, {"A": placed, "B": placed})
    whole = found["batch axis 0 over i, j"]
    assert whole.words == 0
    assert whole.seconds == min(each.seconds for each in found.values())
    assert whole.nbytes == 3 * 2 * 16 * 16 * 4
    assert found["batch axis 0 over i; rows over j"].words > 0


def test_few_large_products_are_cut_themselves() -> None:
    found = shares(Batch((1, 512, 512), (1, 512, 512)))
    fastest = min(found, key=lambda name: found[name].seconds)
    assert fastest.startswith(("rows over", "columns over"))
    assert not any("batch" in name for name in found)


def test_sums_are_cut_where_they_may_be_and_then_pushed() -> None:
    batch = Batch((1, 4, 64), (1, 64, 4))
    assert not any("sums" in name for name in shares(batch, may_sum=False))
    cuts = next(
        cuts for cuts in candidates(batch, MESH, {}, may_sum=True) if cuts_text(cuts, batch) == "sums over i, j"
    )
    assert batch.layout("C", cuts) == Layout(((), (), ()), partial=("i", "j"))
    assert batch.lying("C", cuts, MESH).is_single(MESH)
    assert shares(batch)["sums over i, j"].words > 0


def test_dimensions_that_are_several_in_one_are_cut_each_by_itself() -> None:
    batch = Batch((1, 6, 4), (1, 4, 1), folds=(("m", (2, 3)),))
    cuts = [cuts["m"] for cuts in candidates(batch, MESH, {}, may_sum=False) if "m" in cuts]
    assert {level.fold for split in cuts for level in split} == {((2, 3), 0), ((2, 3), 1)}


def test_the_fastest_that_fits_is_taken() -> None:
    found = list(shares(Batch((8, 16, 16), (8, 16, 16))).values())
    assert best(found, None) is not None
    assert best(found, 0) is None
    least = min(range(len(found)), key=lambda n: (found[n].nbytes, found[n].seconds))
    assert found[best(found, found[least].nbytes)].nbytes == found[least].nbytes
