"""What operations say of themselves, and that whoever reads schedules knows all of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import MemoryLimitError, ScheduleError
from rma_mm.policy.simulator.simulate import _Program
from rma_mm.runtime.execution.binding import Binding
from rma_mm.runtime.ranks.agreement import common_error, describe
from rma_mm.schedule import mirror_ops, ops
from rma_mm.schedule.interpret import _Machine
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.ops import GroupOp, Op, Ref, Slot, counted
from rma_mm.schedule.schedule import expand
from rma_mm.schedule.verify.checker import _Checker
from rma_mm.schedule.verify.rank_evidence import _RankEvidence
from tests.strategies import Case, cases, pure

CLASSES = [each for each in (vars(ops) | vars(mirror_ops)).values() if isinstance(each, type) and issubclass(each, Op)]
TYPES = {each for each in CLASSES if "kind" in vars(each)}
"""All types of operations."""
GROUPED = [algorithm for algorithm in ALGORITHMS.values() if algorithm.grouped and not algorithm.specialize]


@pytest.mark.parametrize(
    ("table", "absent"),
    [
        (_Machine.handlers, set()),
        (_Program.handlers, set()),
        (Binding.handlers, set()),
        (_Checker.handlers, {ops.Barrier, ops.Claim}),  # it looks at the epochs of expanded schedules
        (_RankEvidence.handlers, {ops.Claim}),
    ],
    ids=["interpret", "simulate", "binding", "verify", "witness"],
)
def test_every_reader_knows_every_operation(table: dict[type[Op], object], absent: set[type[Op]]) -> None:
    assert len(TYPES) == 14
    assert set(table) == TYPES - absent


@pure(40)
@given(st.sampled_from(GROUPED).flatmap(lambda algorithm: cases(algorithm, max_ranks=12)))
def test_what_one_rank_sends_in_a_group_another_expects(case: Case) -> None:
    """Both name the same movement, route, operand and box, and each move counts on one of them."""
    schedule = lower(case.row, case.problem, case.tuning)
    sent, expected, count = Counter[object](), Counter[object](), 0
    for rank in schedule.mesh.ranks:
        for op in expand(schedule, rank):
            count += len(counted(op, rank)) if isinstance(op, GroupOp) else 0
            for move in op.moves(rank) if isinstance(op, GroupOp) else ():
                assert rank in (move.source, move.to) and move.source != move.to
                side = sent if move.source == rank else expected
                side[move.kind, move.source, move.to, move.ref.operand, move.ref.region] += 1
    assert sent == expected
    assert count == sum(sent.values())


@pure(40)
@given(st.sampled_from(list(ALGORITHMS.values())).flatmap(lambda algorithm: cases(algorithm, max_ranks=6)))
def test_an_operation_on_other_slots(case: Case) -> None:
    """Slots are renamed wherever they stand, others' in a reduction apart, and nothing else is changed."""
    schedule = lower(case.row, case.problem, case.tuning)
    for op in expand(schedule, 0):
        renamed = op.on_slots(lambda slot: replace(slot, name=slot.name + "'"))
        assert [slot.name for slot in renamed.slots] == [slot.name + "'" for slot in op.slots]
        assert renamed.on_slots(lambda slot: replace(slot, name=slot.name[:-1])) == op
        names = [each.name for each in fields(op)]  # type: ignore[arg-type]
        others = [name for name in names if not isinstance(getattr(op, name), Ref | Slot | tuple)]
        assert [getattr(op, name) for name in others] == [getattr(renamed, name) for name in others]


def test_a_fault_keeps_its_code_on_its_way_to_other_ranks() -> None:
    told = describe(ScheduleError("race", "rank 1, Copy: too early"))
    assert told is not None
    error = common_error({1: told}, 2)
    assert isinstance(error, ScheduleError)
    assert (error.code, str(error)) == ("race", "race: rank 1, Copy: too early (rank 1)")


def test_missing_memory_is_a_memory_error_on_every_rank() -> None:
    """NumPy raises one of a class of its own."""
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 59)
    told = describe(caught.value)
    assert told is not None
    error = common_error({2: told}, 4)
    assert isinstance(error, MemoryLimitError)
    assert re.fullmatch(r"memory: Unable to allocate .* \(rank 2\)", str(error))
