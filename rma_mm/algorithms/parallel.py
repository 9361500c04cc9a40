"""One-dimensional products, as training frameworks name them, and their two-dimensional mixtures.

Source: J. Yuan et al., "OneFlow: redesign the distributed deep learning framework from scratch" (2021), whose SBP
signatures these are; the mixtures are those of M. Shoeybi et al., "Megatron-LM" (2019). An operand that every rank
needs is gathered inside the product, unless it is placed so beforehand.
"""

from rma_mm.algorithms.from_table import algorithm_from_table

_SOURCE = "Yuan et al. 2021 (OneFlow)"

DATA_PARALLEL = algorithm_from_table(
    "data_parallel", _SOURCE, "rows of A and C are shared out; every rank has all of B",
    axes=1, a="m→i", b="", c="m→i", work="m→i", over="k", order="plain", grouped="BC", prefetch_all="B",
)

COLUMN_PARALLEL = algorithm_from_table(
    "column_parallel", _SOURCE, "columns of B and C are shared out; every rank has all of A",
    axes=1, a="", b="n→i", c="n→i", work="n→i", over="k", order="plain", grouped="AC", prefetch_all="A",
)

ROW_PARALLEL = algorithm_from_table(
    "row_parallel", _SOURCE, "k is shared out; C is summed by a reduce-scatter (and gathered where it is wanted whole)",
    axes=1, a="k→i", b="k→i", c="m→i", work="k→i", over="k", order="plain", result="reduce", grouped="C",
)

MIXED_2D = algorithm_from_table(
    "mixed_2d", "Shoeybi et al. 2019 (Megatron-LM)", "rows of A over i, columns of B over j, blocks of C",
    axes=2, a="m→i", b="n→j", c="m→i, n→j", work="m→i, n→j", over="k", order="plain", grouped="AB", prefetch_all="AB",
)

ROW_COLUMN_2D = algorithm_from_table(
    "row_column_2d", _SOURCE, "k over j and columns over i; C is summed along j by a reduce-scatter",
    axes=2, a="k→j", b="k→j, n→i", c="m→j, n→i", work="k→j, n→i", over="k", order="plain", result="reduce",
    grouped="AC", prefetch_all="A",
)
