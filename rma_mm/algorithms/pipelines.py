"""Products whose collective goes on while they multiply, in pieces round a ring.

Source: NVIDIA's cuBLASMp (AG+GEMM and GEMM+RS, 2024), after S. Wang et al., "Overlap communication with dependent
computation via decomposition in large deep learning models" (ASPLOS 2023). Block counts, shapes and transposes are
free here. The form `:pull` does the same by one-sided transfers.
"""

from rma_mm.algorithms.survey import surveyed
from rma_mm.schedule.row import in_pieces

_SOURCE = "cuBLASMp 2024; Wang et al. 2023"

GATHER_GEMM = surveyed(
    "gather_gemm", _SOURCE, "rows of A go round a ring, each block multiplied as it passes; C by columns",
    axes=1, a="m→i", b="n→i", c="n→i", work="n→i", over="m", grouped="A", grains=in_pieces(2),
)  # fmt: skip

GEMM_SCATTER = surveyed(
    "gemm_scatter", _SOURCE, "k is shared out; sums of C go round a ring, each rank adding its part, to their owner",
    axes=1, a="k→i", b="k→i", c="m→i", work="k→i", over="m", own_last=True, result="reduce", grouped="C",
    grains=in_pieces(2),
)  # fmt: skip
