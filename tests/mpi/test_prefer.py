"""Products that must neither get nor accumulate: by option, by environment, in chains and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import AlgorithmError, DisagreementError, OptionError
from rma_mm.policy.planner import candidates
from rma_mm.runtime.execution.footprint import all_ops
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.prices import best_grid
from rma_mm.schedule.ops import Accumulate, Claim, Copy
from tests.launch import parallel
from tests.processes import mpirun
from tests.thorough import thorough

ALONE = {"get", "accumulate"}


def acts_alone(comm, plan: Plan) -> bool:
    """Whether any rank gets or accumulates: as the plan says, which is what its operations do."""
    rank = plan.mesh.rank
    said = any(ALONE & set(way.split("+")) for way in plan.movement.values())
    does = any(
        isinstance(op, Claim) or (isinstance(op, Copy | Accumulate) and op.remote.rank != rank)
        for op in all_ops(plan.schedule, plan.mesh)
    )
    assert said == does or plan.schedule.pool
    return any(comm.allgather(does))


def placed(mesh: Mesh, x: np.ndarray, layout: str) -> DistMatrix:
    return DistMatrix.from_numpy(x, mesh, layout)


@parallel(ranks=(4,), env=("node", "nolocal"))
def test_no_get_and_no_accumulate(comm):
    """Placements that `auto` serves by gets or accumulates otherwise; transposed, replicated and uneven ones too."""
    rng, alone = np.random.default_rng(0), 0
    with Mesh((2, 2), comm) as mesh:
        assert mesh.prefer == "auto"
        blocks = "P('i', 'j')"
        m, n, k = 13, 12, 400
        a, b = rng.integers(-4, 5, (m, k)).astype(float), rng.integers(-4, 5, (k, n)).astype(float)
        uneven = f"P('i:bounds(0,2,{m})', 'j')"
        for at_a, at_b, at_c in (
            (blocks, blocks, blocks), (blocks, blocks, None), (uneven, blocks, uneven),
            ("P(None, ('i', 'j'))", "P(('i', 'j'), None)", None),
        ):
            A, B = placed(mesh, a, at_a), placed(mesh, b, at_b)
            with rma_mm.plan(A, B, mesh, layout=at_c) as usual:
                alone += acts_alone(comm, usual)
            with rma_mm.plan(A, B, mesh, layout=at_c, prefer="two-sided") as plan:
                assert not acts_alone(comm, plan), (at_a, at_b, at_c, plan.algorithm)
                assert np.array_equal(plan.execute(A, B).to_numpy(), a @ b)
                assert "prefer='two-sided' (or RMA_MM_PREFER) excludes" in " ".join(str(plan.decision).split())
        assert alone or mesh.num_nodes == 1


@thorough
@parallel(ranks=(6,), env=("cliques",))
def test_chains(comm):
    """No step and no conversion gets; where results are wanted elsewhere, that is refused."""
    with Mesh((3, 2), comm) as mesh:
        given = {"A": ((48, 36), float), "B": ((36, 24), float)}
        more = given | {"D": ((24, 30), float)}
        with rma_mm.plan_chain(["C = A @ B", "E = C @ D"], mesh, prefer="two-sided", **more) as chain:
            assert not chain.answer.conversions
            assert not any(acts_alone(comm, plan) for plan in chain.plans)
            arrays = {x: np.arange(float(np.prod(shape))).reshape(shape) % 7 for x, (shape, _) in more.items()}
            made = chain.execute(**{x: placed(mesh, y, chain.layouts[x]) for x, y in arrays.items()})
            assert np.array_equal(made["E"].to_numpy(), arrays["A"] @ arrays["B"] @ arrays["D"])
        for a, c in (("*, *", "i, j"), ("i, j", "j, i")):
            wanted = {"A": a, "B": "i, j", "C": c}
            with pytest.raises(AlgorithmError, match="without gets, as conversions are, and accumulates; prefer='two-"):
                rma_mm.plan_chain(["C = A @ B"], mesh, layouts=wanted, prefer="two-sided", **given)


@parallel(ranks=(4,), env=("cliques",))
def test_what_is_refused(comm):
    """One clear error on every rank for what cannot be done so, and for words that say nothing."""
    a = np.arange(64.0).reshape(8, 8)
    with Mesh((2, 2), comm) as mesh:
        A = placed(mesh, a, "P('i', 'j')")
        excludes = r"gets or accumulates here, which prefer='two-sided' \(or RMA_MM_PREFER\) excludes"
        for name in ("queue", "summa_c:pull", "srumma", "stationary_a"):
            with pytest.raises(AlgorithmError, match=f"^{name}: {excludes}"):
                rma_mm.matmul(A, A, algorithm=name, prefer="two-sided")
        R = placed(mesh, a, "P(None, None)")
        with pytest.raises(AlgorithmError, match="every algorithm for these placements gets or accumulates"):
            rma_mm.matmul(R, A, layout=A.layout, prefer="two-sided")
        with pytest.raises(OptionError, match="prefer: got 'rma'; must be 'auto' or 'two-sided'"):
            rma_mm.matmul(A, A, prefer="rma")
        with pytest.raises(DisagreementError, match="prefer"):
            rma_mm.matmul(A, A, prefer=("auto", "two-sided")[comm.rank % 2])
    with pytest.MonkeyPatch.context() as patch:
        for name, right, wrong, rule in (
            ("RMA_MM_PREFER", ("auto", "two-sided"), "allreduce", "must be 'auto' or 'two-sided'"),
            ("USE_ALLREDUCE", "01", "yes", "must be 1, as RMA_MM_PREFER=two-sided, or 0"),
        ):
            patch.setenv(name, wrong)
            with pytest.raises(OptionError, match=f"{name}: got '{wrong}'; {rule}"):
                Mesh((2, 2), comm)
            patch.setenv(name, right[comm.rank % 2])
            with pytest.raises(DisagreementError, match=name):
                Mesh((2, 2), comm)
            patch.delenv(name)
        patch.setenv("USE_ALLREDUCE", "1")
        with Mesh((2, 2), comm) as mesh:
            A = placed(mesh, a, "P('i', 'j')")
            with rma_mm.plan(A, A, mesh) as plan:
                assert not acts_alone(comm, plan)
            with pytest.raises(AlgorithmError, match=excludes):
                rma_mm.matmul(A, A, algorithm="queue")
            assert np.array_equal(rma_mm.matmul(A, A, algorithm="queue", prefer="auto").to_numpy(), a @ a)
        patch.setenv("RMA_MM_PREFER", "auto")
        with Mesh((2, 2), comm) as mesh:
            assert mesh.prefer == "auto"


@thorough
def test_the_command(tmp_path: Path) -> None:
    """`--prefer` and the environment, on two pretended nodes; the movements of the report say how it went."""
    line = ["-m", "rma_mm.run", "--shape", "64,48,56", "--quiet", "--json", "report.json"]
    variables = {"MPIR_CVAR_NUM_CLIQUES": "2", "RMA_MM_PREFER": "two-sided"}
    done = mpirun(4, line, cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert not ALONE & {way for each in report["movement"].values() for way in each.split("+")}
    done = mpirun(2, [*line, "--prefer", "two-sided", "--shape", "300,300,300"], cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0 and "view" in " ".join(report["movement"].values())
    assert any("ranks of a node read" in text and "in place" in text for text in report["fallbacks"])
    refused = mpirun(2, [*line, "--prefer", "two-sided", "--algorithm", "queue"], cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "queue: gets or accumulates here" in refused.stderr


@parallel(ranks=(2, 3, 4), env=("node", "cliques", "created"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_on_the_best_grid_prices_nothing_again(comm: MPI.Intracomm, dtype: str) -> None:
    """Ranks share the pricing for all grids, agree on one, and remember what they found."""
    grid = best_grid(comm, (96, 80, 64), parse_dtype(dtype))
    assert len(set(comm.allgather(grid))) == 1
    with Mesh(grid, comm) as mesh, mock.patch.object(candidates, "_best", side_effect=AssertionError("priced again")):
        a, b = ((96, 64), parse_dtype(dtype)), ((64, 80), parse_dtype(dtype))
        plan = rma_mm.plan(a, b, mesh)
    assert plan.choice.request.mesh.dims == grid
