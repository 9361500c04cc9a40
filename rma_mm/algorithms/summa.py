"""SUMMA in its three stationary forms, and PUMMA.

Sources: R. van de Geijn and J. Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997); the forms
with A or B stationary after M. Schatz, R. van de Geijn and J. Poulson, "Parallel matrix multiplication: a systematic
journey" (2016). J. Choi, J. Dongarra and D. Walker, "PUMMA: parallel universal matrix multiplication algorithms on
distributed memory concurrent computers" (1994), after G. Fox's broadcast-multiply-roll. Blocks may be uneven, cyclic,
and cut differently in A and B. An operand may lie transposed on the same grid, as where C = AᵀB and A is stored by
k→i, m→j: its owners then join the groups that want their slices. In PUMMA, whose rows of the mesh start at different
places, it is brought upright first.
"""

from rma_mm.algorithms.from_table import algorithm_from_table

_SUMMA = "van de Geijn and Watts 1997"
_FLAME = "Schatz, van de Geijn and Poulson 2016"

SUMMA_C = algorithm_from_table(
    "summa_c", _SUMMA, "C stationary; panels of A are broadcast along rows of the mesh, of B along columns",
    axes=2, a="m→i, k→j", b="k→i, n→j", c="m→i, n→j", work="m→i, n→j", over="k", order="plain", grouped="AB",
    accepts_transposed="AB",
)

SUMMA_A = algorithm_from_table(
    "summa_a", _FLAME, "A stationary; panels of B are broadcast along columns of the mesh, of C summed along rows",
    axes=2, a="m→i, k→j", b="k→j, n→i", c="m→i, n→j", work="m→i, k→j", over="n", order="plain", result="reduce",
    grouped="ABC", accepts_transposed="AB",
)

SUMMA_B = algorithm_from_table(
    "summa_b", _FLAME, "B stationary; panels of A are broadcast along rows of the mesh, of C summed along columns",
    axes=2, a="m→j, k→i", b="k→i, n→j", c="m→i, n→j", work="k→i, n→j", over="m", order="plain", result="reduce",
    grouped="ABC", accepts_transposed="AB",
)

PUMMA = algorithm_from_table(
    "pumma", "Choi, Dongarra and Walker 1994", "C stationary; blocks of A are broadcast, those of B roll upwards",
    axes=2, a="m→i, k→j", b="k→i, n→j", c="m→i, n→j", work="m→i, n→j", over="k", rotate_by=("i",), grouped="AB",
    accepts_transposed="AB",
)
