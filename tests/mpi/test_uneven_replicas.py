"""A fault that was: a C wanted everywhere, cut otherwise than the work is. Put back, it is found by every check.

The work follows the uneven cut of an operand, while replicas of C share it out evenly, so that some elements of C are
made by nobody, or taken from a rank that did not make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import find_algorithm
from rma_mm.errors import CheckError, ScheduleError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.algorithm import Algorithm, PlacedProblem
from rma_mm.schedule.lowering.decisions import WIDTH, LoweringDecisions, placed_for
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.verify.checker import verify
from tests.launch import parallel
from tests.mpi.test_checks import switched
from tests.pure.test_schedules import Run
from tests.reference import prove
from tests.strategies import Case

maker = import_module("rma_mm.runtime.products.prepared")
PLACES = ("P('i:bounds(0,2,7)', 'j')", "P('i', 'j')", "P(None, None)")
WRONG = ["summa_c", "summa_c:pull", "pumma", "cannon:pull"]


@contextmanager
def put_back(with_proof: bool = False) -> Iterator[None]:
    """Rows are fitted without a look at where C is computed, and plans made without a proof unless `with_proof`."""

    def of(algorithm: Algorithm, problem: PlacedProblem, width: int = WIDTH) -> LoweringDecisions:
        read, staged = placed_for(algorithm, problem.reduced)
        return LoweringDecisions(algorithm, problem, read, staged, algorithm.work(read), width)

    with (
        mock.patch.object(LoweringDecisions, "of", of),
        nullcontext() if with_proof else mock.patch.object(maker, "prove"),
    ):
        yield


def case(name: str) -> Case:
    mesh = MeshShape((2, 2))
    a, b, c = (parse_layout(place, mesh) for place in PLACES)
    return Case(find_algorithm(name), PlacedProblem((7, 5, 12), mesh, (a, b, c)), Tuning(), 1, 0, "", 0)


@pytest.mark.parametrize("check", [verify, prove])
@pytest.mark.parametrize("name", WRONG)
def test_the_schedule_is_refused(name: str, check: Callable[..., object]) -> None:
    check(lower(case(name).row, case(name).problem))
    with put_back(), pytest.raises(ScheduleError):
        check(lower(case(name).row, case(name).problem))


@pytest.mark.parametrize("name", WRONG)
def test_the_interpreter_makes_another_c(name: str) -> None:
    """From a C of NaN, all replicas compared."""
    Run(case(name), lower(case(name).row, case(name).problem)).interpret(0)
    with put_back():
        runner = Run(case(name), lower(case(name).row, case(name).problem))
        with pytest.raises(AssertionError):
            runner.interpret(0)


def multiply(mesh: Mesh, name: str) -> NDArray[np.bool_]:
    """Which elements of this rank's C are right."""
    a, b = np.arange(84.0).reshape(7, 12), np.arange(60.0).reshape(12, 5)
    left, right = (DistMatrix.from_numpy(x, mesh, place) for x, place in zip((a, b), PLACES, strict=False))
    out = DistMatrix.from_numpy(np.full((7, 5), np.nan), mesh, PLACES[2])
    return rma_mm.matmul(left, right, out=out, algorithm=name).tile == a @ b


@parallel(ranks=(4,), env=("node",))
def test_real_ranks(comm):
    """Numbers are wrong where nothing looks; the proof of a plan, and RMA_MM_CHECK, refuse or tell, on all ranks."""
    with put_back(), Mesh((2, 2), comm) as mesh:
        assert all(not all(comm.allgather(multiply(mesh, name).all())) for name in WRONG)
    with put_back(with_proof=True), Mesh((2, 2), comm) as mesh:
        for name in WRONG:
            with pytest.raises(ScheduleError):
                multiply(mesh, name)
    with put_back(), switched("1"), Mesh((2, 2), comm) as mesh:
        for name in WRONG:
            with pytest.raises(CheckError, match="was not written"):
                multiply(mesh, name)
