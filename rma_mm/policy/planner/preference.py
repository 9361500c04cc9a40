"""Preferred kinds of transfer: any, or only those in which all participants make a call (two-sided)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rma_mm.errors import OptionError, quoted

if TYPE_CHECKING:  # the command line, which answers --help at once, needs the names alone
    from rma_mm.policy.model.traffic import Workload
    from rma_mm.schedule.ops import Op

AUTO, TWO_SIDED = "auto", "two-sided"
PREFERENCES = (AUTO, TWO_SIDED)
VARIABLE, ALIAS = "RMA_MM_PREFER", "USE_ALLREDUCE"
VARIABLES = (VARIABLE, ALIAS)
"""Environment variables, the first one first; the second is known from other programs on such clusters."""
EXCLUDED = f"gets or accumulates here, which prefer={TWO_SIDED!r} (or {VARIABLE}) excludes"
"""The reason shown for an excluded candidate."""
UNSERVED = (
    f"prefer: got {TWO_SIDED!r} (or {VARIABLE}); every algorithm for these placements gets or accumulates; "
    f"leave more placements open, or place A, B and C in blocks, \"P('i', 'j')\", for summa_c"
)
"""Message if no candidate is left."""


def check_preference(prefer: object, name: str = "prefer") -> str:
    if prefer not in PREFERENCES:
        raise OptionError(f"{name}: got {quoted(prefer)}; must be {' or '.join(map(repr, PREFERENCES))}")
    return str(prefer)


def preferred(environment: Mapping[str, str]) -> str:
    """Return the preference that the environment gives for products without one of their own. Raises OptionError."""
    alias = environment.get(ALIAS) or "0"
    if alias not in ("0", "1"):
        raise OptionError(f"{ALIAS}: got {quoted(alias)}; must be 1, as {VARIABLE}={TWO_SIDED}, or 0")
    return check_preference(environment.get(VARIABLE) or PREFERENCES[int(alias)], VARIABLE)


def pulls_or_pushes(workload: Workload) -> bool:
    """True if ranks get from others or accumulate to them, by an account."""
    from rma_mm.policy.model.machine import ONE_SIDED

    moved = (each for phase in workload.phases for each in phase.moved if each.how in ONE_SIDED)
    return any(phase.claims for phase in workload.phases) or any(x.node.any() or x.between.any() for x in moved)


def acts_alone(ops: Iterable[Op], rank: int) -> bool:
    from rma_mm.policy.model.machine import ONE_SIDED
    from rma_mm.schedule.ops import Claim

    return any(
        isinstance(op, Claim) or any(move.kind in ONE_SIDED and move.source != move.to for move in op.moves(rank))
        for op in ops
    )
