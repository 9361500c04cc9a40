"""`python -m rma_mm.calibrate`: measure what the choice of a local kernel rests on, and keep it for this machine.

From then on `kernel="auto"` takes the faster of BLAS and generated code for each type and class of shapes. BLAS uses as
many threads as OPENBLAS_NUM_THREADS or OMP_NUM_THREADS says, else all cores: measure with those that a rank will have.
"""

from __future__ import annotations

import argparse

import numpy as np

from .kernels.dtypes import BFLOAT16, BLAS_TYPES
from .kernels.rates import CLASSES, LARGE, SMALL, measured


def main() -> None:
    """Measure every type that BLAS multiplies, and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"GF/s, BLAS / generated code; extents m, n, k of {SMALL} (s) and {LARGE} (l)")
    print(f"{'':10}", *(f"{name:>11}" for name in CLASSES))
    for dtype in (*BLAS_TYPES, np.dtype(np.float16), *([BFLOAT16] if BFLOAT16 is not None else [])):
        found = measured(dtype, again=True)
        cells = (f"{found[name]['blas']:.0f} / {found[name]['numba']:.0f}" for name in CLASSES)
        print(f"{dtype.name:10}", *(f"{cell:>11}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
