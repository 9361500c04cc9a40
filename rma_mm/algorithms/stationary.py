"""Universal one-sided products by slicing: any placements of A, B and C, any replication.

One operand stays where it is and its owners do the work. With C stationary each rank pulls what it needs of A and
B; with A (or B) stationary it pulls the other and pushes partial C to the owners by accumulate.

Source: B. Brock and R. Golin, "Slicing Is All You Need" (2025), which generalises the stationary-A, -B and -C
forms of SUMMA (R. van de Geijn and J. Watts, 1997; M. Schatz, R. van de Geijn and J. Poulson, 2016).
"""

from rma_mm.schedule.row import Row, stationary

_SOURCE = "Brock and Golin 2025; van de Geijn and Watts 1997"

STATIONARY_C = Row(
    name="stationary_c",
    source=_SOURCE,
    summary="owners of C pull the A and B they need, in rotated order; any placements",
    work=stationary("C"),
    over="k",
)

STATIONARY_A = Row(
    name="stationary_a",
    source=_SOURCE,
    summary="owners of A pull B and push partial C by accumulate; any placements",
    work=stationary("A"),
    over="n",
    result="accumulate",
)

STATIONARY_B = Row(
    name="stationary_b",
    source=_SOURCE,
    summary="owners of B pull A and push partial C by accumulate; any placements",
    work=stationary("B"),
    over="m",
    result="accumulate",
)
