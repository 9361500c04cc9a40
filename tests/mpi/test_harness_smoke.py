"""The harness on real ranks: what every other test here takes for granted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

from tests.jobs import VARIANT
from tests.launch import ENVS, parallel
from tests.strategies_mpi import shared_examples


@parallel()
@pytest.mark.parametrize("n", [1, 7])
def test_allreduce(comm: MPI.Comm, n: int) -> None:
    """Ranks talk to each other, and parameters reach them."""
    total = np.zeros(3)
    comm.Allreduce(np.full(3, n, dtype=float), total)
    assert total.tolist() == [n * comm.size] * 3


@parallel()
def test_environment_makes_nodes(comm: MPI.Comm) -> None:
    """The variants give one node, two, or as many as ranks."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    nodes = comm.allreduce(node.rank == 0)
    node.Free()
    expected = 1
    if "MPIR_CVAR_NUM_CLIQUES" in os.environ:
        expected = 2
    if "MPIR_CVAR_NOLOCAL" in os.environ:
        expected = comm.size
    assert nodes == expected


@parallel(ranks=(2,))
def test_environment_is_the_variant(comm: MPI.Comm) -> None:
    """Only the variables of the variant in use are set."""
    controlled = {name for variables in ENVS.values() for name in variables}
    assert {name: os.environ[name] for name in controlled & set(os.environ)} == ENVS[os.environ[VARIANT]]


@parallel(ranks=(3,), env=("node",))
def test_fixtures_reach_the_ranks(comm: MPI.Comm, tmp_path: Path) -> None:
    """Any fixture that can be pickled does."""
    (tmp_path / f"{comm.rank}").write_text("here")
    comm.Barrier()
    assert len(list(tmp_path.iterdir())) == comm.size


class Conformance:
    """Tests that subclasses inherit."""

    factor: int

    @parallel(ranks=(1, 2), env=("node",))
    def test_scale(self, comm: MPI.Comm) -> None:
        """Class attributes are those of the subclass."""
        assert comm.allreduce(self.factor) == self.factor * comm.size


class TestTwice(Conformance):
    """The first of two."""

    factor = 2


class TestThrice(Conformance):
    """The second of two."""

    factor = 3


@parallel(ranks=(1, 3, 6), env=("node", "nolocal"))
def test_shared_examples(comm: MPI.Comm) -> None:
    """Every rank sees the same examples, the pinned ones first."""
    seen: list[int] = []

    def body(comm: MPI.Comm, example: int) -> None:
        seen.append(example)
        assert comm.allgather(example) == [example] * comm.size

    shared_examples(comm, st.integers(0, 100), body, max_examples=10, examples=[-1])
    assert seen[0] == -1
    assert 5 < len(seen) <= 11


@parallel(ranks=(1, 3), env=("node",))
def test_shared_examples_shrink(comm: MPI.Comm) -> None:
    """A failure on one rank is shrunk, and raised on all with the least example."""

    def body(comm: MPI.Comm, example: dict[str, Any]) -> None:
        assert example["n"] < 50 or comm.rank != comm.size - 1

    with pytest.raises(AssertionError) as caught:
        shared_examples(comm, st.fixed_dictionaries({"n": st.integers(0, 1000)}), body)
    assert "{'n': 50}" in str(caught.value)
    assert f"rank {comm.size - 1}" in str(caught.value)
