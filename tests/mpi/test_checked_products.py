"""`rma_mm.verify`, and products with `check=`: one element put off behind the product is found by every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import (
    DisagreementError,
    DtypeError,
    LayoutError,
    MeshError,
    OptionError,
    RmaError,
    ShapeError,
    VerificationError,
)
from rma_mm.runtime.chains.actions import Multiplication
from rma_mm.runtime.products.plan import Plan
from rma_mm.windows.checks.checked import SWITCH
from tests.launch import parallel

SHAPE = (13, 11, 17)
UNEVEN = {"layout": "P('i:bounds(0,2,13)', 'j:bounds(0,10,11)')"}
CASES = {
    "float32": {},
    "float64": {"alpha": 2, "beta": -1.5},
    "float16 transposed": {"transpose_a": True, "transpose_b": True},
    "bfloat16 uneven": UNEVEN,
    "complex64 conjugated": {"conjugate_a": True, "alpha": 1 - 2j, "beta": 1j},
    "int32": {"beta": 3},
    "uint8 uneven": UNEVEN,
    "bool": {"beta": True},
    "float32 everywhere": {"layout": "P(None, None)"},
    "int64 everywhere": {"layout": "P(None, 'i')"},
    "float64 min_plus": {"semiring": "min_plus"},
    "int32 max_plus": {"semiring": "max_plus", "beta": 1},
    "bool or_and": {"semiring": "or_and"},
    "float32 relu": {"epilogue": Epilogue(np.linspace(-1, 1, 11, dtype=np.float32), "column", "relu")},
    "float32 gelu in float16": {"epilogue": Epilogue(activation="gelu", dtype="float16")},
    "float32 pushed": {"algorithm": "stationary_a"},
}


@contextmanager
def unchecked() -> Iterator[pytest.MonkeyPatch]:
    """Meshes made now are checked by nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        yield patch


def put_off(C: DistMatrix, at: tuple[int, int] = (7, 5)) -> None:
    """An element is another, on the first rank that holds it."""
    rows, cols = (np.flatnonzero(span.indices == n) for span, n in zip(C.region, at, strict=True))
    mine = C.mesh.is_member and bool(rows.size and cols.size)
    if C.mesh.rank == C.mesh.comm.allgather(mine).index(True):
        spot = C.tile[rows[0], cols[0]]
        C.tile[rows[0], cols[0]] = not spot if C.dtype.kind == "b" else spot + C.dtype.type(40)


def spoil_products(patch: pytest.MonkeyPatch, which: set[int]) -> list[int]:
    """From now on products of those numbers are wrong, counted from 1, chains' too; how many there were."""
    done, run, finish = [0], Plan._run, Multiplication.finish

    def count(C: DistMatrix) -> None:
        done[0] += 1
        if done[0] in which:
            put_off(C)

    def spoiled(self, *given):
        run(self, *given)
        count(given[2])

    def spoiled_step(self, here):
        finish(self, here)
        count(here[self.result])

    patch.setattr(Plan, "_run", spoiled)
    patch.setattr(Multiplication, "finish", spoiled_step)
    return done


def operands(mesh: Mesh, name: str, options: dict) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """A, B, and C as it is before the product."""
    dtype, rng = parse_dtype(name.split(maxsplit=1)[0]), np.random.default_rng(3)
    m, n, k = SHAPE
    a = (k, m) if options.get("transpose_a") else (m, k)
    b = (n, k) if options.get("transpose_b") else (k, n)
    made = []
    for shape in (a, b, (m, n)):
        x = rng.integers(0, 2, shape) if dtype.kind == "b" else rng.integers(0 if dtype.kind == "u" else -4, 5, shape)
        made.append(x.astype(dtype))
    places = "P('i', 'j')", "P('j', 'i')", options.get("layout", "P('j', 'i')")
    A, B, C = (DistMatrix.from_numpy(x, mesh, place) for x, place in zip(made, places, strict=True))
    if (epilogue := options.get("epilogue")) and epilogue.dtype:
        C = DistMatrix.empty((m, n), mesh, places[2], epilogue.dtype)
    return A, B, C


def raised_alike(comm, mesh: Mesh, says: str, body) -> None:
    """Every rank gets the same VerificationError, and counts it."""
    before = mesh.metrics.tally.check_failures
    with pytest.raises(VerificationError, match=says) as caught:
        body()
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert mesh.metrics.tally.check_failures == before + 1


@parallel(ranks=(4,), env=("nolocal",))
def test_one_element_is_found(comm):
    """By `check=` when the product leaves it, by `verify` when it changes afterwards; what is right is never blamed."""
    with unchecked() as patch, Mesh((2, 2), comm) as mesh:
        done = spoil_products(patch, set(range(1, 99, 2)))
        for name, options in CASES.items():
            A, B, C = operands(mesh, name, options)
            C0 = DistMatrix.from_numpy(C.to_numpy(), mesh, "P('i', 'j')") if options.get("beta") else None
            start = C.tile.copy()
            others = {key: x for key, x in options.items() if key not in ("layout", "algorithm")}
            with rma_mm.plan(A, B, mesh, check=True, **options | {"layout": C.layout}) as plan:
                raised_alike(comm, mesh, "C is wrong", partial(plan.execute, A, B, C))
                C.tile[...] = start
                plan.execute(A, B, C)
            verify = partial(rma_mm.verify, A, B, C, C0=C0, **others)
            assert verify().how, name
            put_off(C)
            raised_alike(comm, mesh, r"verify of .*: C is wrong: (C.7, 5. is|replicas|1 rows .* is row 7)", verify)
        assert done[0] == 2 * len(CASES)


@parallel(ranks=(3,), env=("node",))
def test_each_nth_product(comm):
    """Of each plan and call by itself; a rank beyond the mesh hears of it too, and the mesh goes on."""
    with unchecked() as patch, Mesh((2, 1), comm) as mesh:
        A, B = (DistMatrix.from_numpy(np.arange(48.0).reshape(shape), mesh) for shape in ((8, 6), (6, 8)))
        spoil_products(patch, {1, 2, 3, 4, 6})
        for number in range(1, 8):
            if number in (3, 6):
                raised_alike(comm, mesh, "C is wrong", lambda: rma_mm.matmul(A, B, check="every=3"))
            else:
                rma_mm.matmul(A, B, check="every=3")
        rma_mm.matmul(A, B, check=True)
        with rma_mm.plan_chain(["D = A @ B", "E = D @ A"], mesh, A=A, B=B, check="every=2") as chain:
            chain.execute(A=A, B=B)
            patch.undo()
            patch.setenv(SWITCH, "0")
            spoil_products(patch, {2})
            raised_alike(comm, mesh, "C is wrong", lambda: chain.execute(A=A, B=B))
        assert mesh.metrics.tally.check_failures == 3


@parallel(ranks=(2,), env=("node",))
def test_what_cannot_be_checked(comm):
    """One clear error on every rank."""
    with unchecked(), Mesh((2,), comm) as mesh, Mesh((1,), comm) as other:
        A, B, C = (DistMatrix.from_numpy(np.ones(shape), mesh) for shape in ((4, 6), (6, 3), (4, 3)))
        wide, far = (DistMatrix.from_numpy(np.ones((4, 3), t), on) for t, on in (("f4", mesh), ("f8", other)))
        rule = r'must be True, False, or "every=N" for each N-th product'
        for check in ("every=0", "every=-1", "each", 100, None, 0.5, "every=1e3"):
            with pytest.raises(OptionError, match=f"check: got .*; {rule}"):
                rma_mm.matmul(A, B, check=check)
        cases: list[tuple[type[RmaError], str, tuple, dict]] = [
            (ShapeError, "C: got float64 of shape", (A, B, A), {}),
            (DtypeError, "C: got float32", (A, B, wide), {}),
            (MeshError, "C: it lives on", (A, B, far), {}),
            (LayoutError, "A: got ndarray; verify takes DistMatrix", (np.ones((4, 6)), B, C), {}),
            (LayoutError, "C: got NoneType", (A, B, None), {}),
            (OptionError, "beta: got 2; C is checked against the old C, so pass C0", (A, B, C), {"beta": 2}),
            (ShapeError, "C0: got", (A, B, C), {"beta": 2, "C0": A}),
            (OptionError, "semiring", (A, B, C), {"semiring": "plus"}),
            (DisagreementError, "alpha", (A, B, C), {"alpha": comm.rank}),
            (MeshError, "pass a Mesh", (1, 2, 3), {"mesh": 4}),
        ]
        for kind, says, given, options in cases:
            with pytest.raises(kind, match=says):
                rma_mm.verify(*given, **options)
        with pytest.raises(DisagreementError, match="check"):
            rma_mm.matmul(A, B, check=bool(comm.rank))
        assert mesh.metrics.tally.check_failures == 0
