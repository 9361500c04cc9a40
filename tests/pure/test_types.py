"""Types of products: what the table in the docs says, and local products of every pair held to it."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from rma_mm import kernels
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, accumulator, parse_dtype, result_dtype
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.errors import DtypeError
from rma_mm.kernels.elementwise import cast, scalar
from tests import typed
from tests.processes import ROOT

PAIRS = list(product(SUPPORTED, SUPPORTED))


def documented():
    """(A, B) → (type of the sums, type of the result), by name, from the table in the docs; either order."""
    lines = (ROOT / "docs" / "reference" / "types.md").read_text().split("| one of |")[1].splitlines()[2:]
    found = {}
    for line in lines[: lines.index("")]:
        ones, others, summed, result = ([name.strip() for name in cell.split(",")] for cell in line.split("|")[1:-1])
        for pair in product(ones, others):
            for ordered in {pair, pair[::-1]}:
                assert ordered not in found, f"{ordered} stands in the table twice"
                found[ordered] = summed[0], result[0]
    return found


def decided(a, b):
    """The same from the code."""
    try:
        result = result_dtype(a, b)
    except DtypeError:
        return "refused", "refused"
    return accumulator(result).name, result.name


def test_the_table_in_the_docs_is_what_the_code_does():
    assert documented() == {(a.name, b.name): decided(a, b) for a, b in PAIRS}


WORDS = {"b": "bool", "iu": "integers", "f": "floats", "c": "complex"}


def test_the_table_of_semirings_is_the_registry():
    text = (ROOT / "docs" / "reference" / "types.md").read_text()
    lines = text.split("| name | ⊕ |")[1].split("\n\n")[0].splitlines()[2:]
    for line, x in zip(lines, SEMIRINGS.values(), strict=True):
        kinds = ", ".join(word for letters, word in WORDS.items() if set(letters) <= set(x.kinds))
        told = x.name, x.add.__name__, x.multiply.__name__, kinds, x.reduction.mpi
        assert tuple(cell.strip() for cell in line.split("|")[1:-1]) == told


def test_a_pair_without_a_common_type_is_told_which_types_serve():
    for name in ("float16", "int32"):
        with pytest.raises(DtypeError, match="no common element type") as caught:
            result_dtype(BFLOAT16, np.dtype(name))
        named = str(caught.value).split("one of ")[1].split(", or convert")[0].split(", ")
        for serves in named:
            assert result_dtype(BFLOAT16, np.dtype(name), parse_dtype(serves)).name == serves
        with pytest.raises(DtypeError, match="cannot hold"):
            result_dtype(BFLOAT16, np.dtype(name), np.dtype("float16"))


def scalars_of(summed):
    """alpha, beta: exact ones."""
    if summed.kind == "b":
        return (1, 0), (1, 1), (0, 1)
    if summed.kind in "iu":
        return (1, 0), (3, 2.0), (2, 1)
    return (1, 0), (0.5, 2), (-2, 0.5 + 1j if summed.kind == "c" else -0.5)


@pytest.mark.parametrize("kernel", ["auto", "numpy"])
def test_local_products_of_every_pair_are_formed_in_the_types_of_the_table(kernel):
    """Values that come out otherwise in a narrower type; exact, whatever the order of the sums."""
    rng = np.random.default_rng(1)
    for (a_type, b_type), role in product(PAIRS, typed.ROLES):
        summed, result = decided(a_type, b_type)
        if result == "refused":
            continue
        summed, result = parse_dtype(summed), parse_dtype(result)
        a = typed.numbers(rng, a_type, summed, (4, 7), role[0])
        b = typed.numbers(rng, b_type, summed, (7, 3), role[1])
        before = typed.numbers(rng, result, summed, (4, 3), "narrow")
        alpha, beta = scalars_of(summed)[rng.integers(3)]
        wanted = typed.product(a, b, summed, result, scalar(alpha, result, ""), scalar(beta, result, ""), before)
        got = kernels.matmul(a, b, before.copy(), alpha=alpha, beta=beta, kernel=kernel)
        assert got.dtype == result
        assert not wanted.faults(got).any(), f"{a_type}·{b_type}, {role}, alpha {alpha}, beta {beta}"


def test_local_products_of_every_semiring_and_pair():
    rng = np.random.default_rng(2)
    for (a_type, b_type), semiring in product(PAIRS, SEMIRINGS.values()):
        summed, result = decided(a_type, b_type)
        if semiring.name == "plus_times" or result == "refused":
            continue
        summed, result = parse_dtype(summed), parse_dtype(result)
        a, b = (typed.numbers(rng, x, summed, (4, 4), "even") for x in (a_type, b_type))
        if result.kind == "c" or (result.kind == "b") != (semiring.name == "or_and"):
            with pytest.raises(DtypeError, match=f"semiring {semiring.name}"):
                kernels.matmul(a, b, semiring=semiring.name)
            continue
        got, wanted = kernels.matmul(a, b, semiring=semiring.name), typed.by_semiring(a, b, summed, result, semiring)
        assert got.dtype == result
        assert np.array_equal(got, wanted), f"{a_type} {semiring.name} {b_type}"


def test_the_numbers_show_a_wrong_type():
    """What a product in a narrower type, or by way of one, gives is not taken for right."""
    rng = np.random.default_rng(3)
    for a_type, b_type, wrong in (
        ("complex64", "float64", "complex64"), ("float64", "float64", "float32"), ("float16", "float16", "float16"),
        ("bfloat16", "int8", "bfloat16"), ("int64", "int64", "float64"), ("uint64", "int64", "int64"),
        ("int8", "int16", "int8"), ("float32", "uint32", "float32"), ("uint64", "uint64", "float64"),
    ):
        a_type, b_type, wrong = parse_dtype(a_type), parse_dtype(b_type), parse_dtype(wrong)
        result = result_dtype(a_type, b_type)
        summed, missed = accumulator(result), 0
        for role in typed.ROLES:
            a = typed.numbers(rng, a_type, summed, (6, 7), role[0])
            b = typed.numbers(rng, b_type, summed, (7, 6), role[1])
            terms = np.zeros((6, 6), wrong)
            for k in range(7):
                with np.errstate(all="ignore"):
                    terms = (terms + a[:, k, None].astype(wrong) * b[None, k].astype(wrong)).astype(wrong)
            with np.errstate(all="ignore"):
                given = terms.astype(result)
            missed += not typed.product(a, b, summed, result).faults(given).any()
        assert missed < 3, f"{a_type}·{b_type} in {wrong}"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1e-50, "float32"), (1e-50j, "complex64"), (1e-46, "bfloat16"), (10**400, "int8"), (10**400, "float64"),
        (Fraction(10**400, 3), "float32"), (Fraction(10**400, 3), "int64"), (-1, "uint8"), (2, "bool"), (0.5, "int64"),
        (2**63, "int64"), (1 + 1j, "float64"), (float("nan"), "int32"), ("x" * 10_000, "float32"),
    ],
)
def test_scalars_that_the_type_of_the_sums_does_not_hold_are_refused(value, name):
    with pytest.raises(DtypeError, match=r"^alpha is .* cannot represent") as caught:
        scalar(value, parse_dtype(name), "alpha")
    assert len(str(caught.value)) < 300


def test_scalars_are_rounded_into_the_type_of_the_sums():
    for value, name in ((0.1, "float16"), (0.1, "bfloat16"), (1e-42, "float32"), (2**24 + 1, "float32")):
        assert scalar(value, parse_dtype(name), "alpha") == np.float32(value)
    assert scalar(2**63, np.dtype("uint64"), "alpha") == 2**63
    assert scalar(2 + 0j, np.dtype("int8"), "alpha") == 2


def test_a_cast_into_bfloat16_rounds_once():
    x = np.array([[1 + 2**-8 + 2**-30, 1 + 2**-8, -1 - 2**-8 - 2**-40]])
    made = np.empty(x.shape, BFLOAT16)
    cast(x, made)
    assert made.astype(float).tolist() == [[1 + 2**-7, 1, -1 - 2**-7]]
    assert x.astype(BFLOAT16).astype(float).tolist() == [[1, 1, -1]]  # which is why there is a cast of our own
