"""Products of every pair of types on real ranks: any algorithm, window, summands; what `verify` says of them."""

from itertools import combinations_with_replacement

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import SUPPORTED, accumulator, result_dtype
from rma_mm.errors import DtypeError
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels.elementwise import scalar
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.verification.check import verify
from tests import typed
from tests.launch import parallel
from tests.pure.test_types import scalars_of
from tests.thorough import thorough

WAYS = (
    "stationary_c", "stationary_a", "summa_a", "row_parallel", "gemm_scatter", "t10_rotate", "queue", "cannon", "auto",
    "summands of A", "summands of B", "summands of C",
)
"""Algorithms, which sum in different ways; or placements, by `auto`."""
ON_GRIDS = ("summa_a", "cannon", "pumma")
"""Those that need a mesh of two axes."""


def matrix(mesh, layout, parts, dtype):
    """The matrix whose summands these are, placed; and its value."""
    D = DistMatrix.empty(parts[0].shape, mesh, layout, dtype)
    if mesh.is_member:
        coords = mesh.grid.coords(mesh.rank)
        D.tile[...] = parts[coords[D.layout.partial[0]] if D.layout.partial else 0][D.region.selector()]
    return D, typed.total(parts, dtype) if len(parts) > 1 else parts[0]


def check(mesh, rng, types, way, alpha=None, beta=None):
    """One product against exact arithmetic, and `verify` of it."""
    result = result_dtype(*types)
    summed, (m, n, k) = accumulator(result), (5, 6, 7)
    alpha, beta = scalars_of(summed)[rng.integers(3)] if alpha is None else (alpha, beta)
    roles = typed.ROLES[2 if "summands" in way else rng.integers(3)]
    algorithm = "auto" if "summand" in way else way
    places = {x: "P(None, None, i=sum)" if way.endswith(f" of {x}") else None for x in "ABC"}
    shapes = (m, k), (k, n), (m, n)
    operands = [Operand(shape, x, placed(places[X], mesh)) for X, shape, x in zip("AB", shapes, types, strict=False)]
    with rma_mm.plan(*operands, mesh, layout=places["C"], algorithm=algorithm, alpha=alpha, beta=beta) as plan:
        made = []
        for X, shape, x, role in zip("ABC", shapes, (*types, result), (*roles, "narrow"), strict=True):
            count, towards = mesh.size if places[X] else 1, summed
            if places[X] and x.name in ("int8", "uint8"):
                towards = x  # its sum wraps around, before it is cast
            elif places[X] and summed.kind not in "iub":
                role = "narrow"
            parts = [typed.numbers(rng, x, towards, shape, role) for _ in range(count)]
            made.append(matrix(mesh, plan.layouts[X], parts, x))
        (A, a), (B, b), (C, c) = made
        before = DistMatrix.empty((m, n), mesh, C.layout, result)
        before.copy_from(C)
        plan.execute(A, B, out=C)
        verdict = verify(A, B, C, alpha=alpha, beta=beta, before=before)
        got = C.to_numpy()
    held = scalar(alpha, result, "alpha"), scalar(beta, result, "beta")
    wanted = typed.product(a, b, summed, result, *held, c)
    wanted.loose = places["C"]
    said = f"{types[0]}·{types[1]} {way} {roles} alpha {alpha}, beta {beta}"
    wrong = wanted.faults(got)
    assert got.dtype == result, said
    assert not wrong.any(), f"{said}: {got[wrong][0]} at {np.argwhere(wrong)[0]}"
    assert verdict.ok, f"{said}: {verdict}"


def placed(text, mesh):
    """A placement, or none."""
    return None if text is None else parse_layout(text, mesh.grid)


def pairs():
    """Every pair with a common type, the larger half of them turned round."""
    for number, pair in enumerate(combinations_with_replacement(SUPPORTED, 2)):
        try:
            result_dtype(*pair)
        except DtypeError:
            continue
        yield pair[:: 1 if number % 2 else -1]


def check_some(comm, start):
    """A third of the pairs, each in one way."""
    rng = np.random.default_rng(start)
    with Mesh((comm.size,), comm) as line, Mesh((2, 2) if comm.size == 4 else (1, comm.size), comm) as grid:
        for number, types in enumerate(list(pairs())[start::3]):
            way = WAYS[(number + start) % len(WAYS)]
            if way == "cannon" and comm.size != 4:  # it needs a square
                way = "pumma"
            check(grid if way in ON_GRIDS else line, rng, types, way)


@thorough
@parallel(ranks=(4,), env=("node",), timeout=120)
def test_every_pair_of_types_where_memory_is_shared(comm):
    check_some(comm, 0)


@parallel(ranks=(2,), env=("created",), timeout=120)
def test_every_pair_of_types_in_created_windows(comm):
    check_some(comm, 1)


@thorough
@parallel(ranks=(3,), env=("allocated",), timeout=120)
def test_every_pair_of_types_in_allocated_windows(comm):
    check_some(comm, 2)


@parallel(ranks=(2,), env=("node",), timeout=60)
def test_what_types_do_not_hold_is_refused_before_anything_runs(comm):
    rng = np.random.default_rng(0)
    halves, ints = np.ones((4, 4), np.float16), np.ones((4, 4), np.int32)
    with Mesh((2,), comm) as mesh:
        for a, options in (
            (halves, {"alpha": 1e-50}), (halves, {"alpha": 1j}), (halves, {"alpha": 10**400}), (ints, {"alpha": 0.5}),
            (ints, {"alpha": 2**31}), (ints, {"compute_dtype": "int16"}), (ints, {"compute_dtype": "float32"}),
            (halves, {"out": DistMatrix.empty((4, 4), mesh, dtype=np.float32)}),
        ):
            with pytest.raises(DtypeError):
                rma_mm.matmul(a, a, mesh, **options)
        small = np.full((4, 4), 2, np.float32) * np.float32(2**60)
        A = DistMatrix.from_numpy(small, mesh)
        C = rma_mm.matmul(A, A, mesh, alpha=1.4e-42)  # far from what float32 makes of it
        assert verify(A, A, C, alpha=1.4e-42).ok
        check(mesh, rng, (np.dtype(np.int8), np.dtype(np.float64)), "summands of A", 1, 0)
