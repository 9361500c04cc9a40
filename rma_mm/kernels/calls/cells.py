"""Cells of the memory that a compiled call works on: lines by which ranks meet, its state, and its steps."""

from rma_mm.kernels.gemm.product import ARGUMENTS

ENTERED, DIGEST, COMPLETED = range(3)
"""Cells of a line: twice the number of the call, plus one if the rank waits here and not in MPI; the digest of its
arguments; the number of the last call whose work it has done."""
OVER, BEFORE, BEHIND = range(3)
"""Stages of a call: none is under way; it waits for ranks to enter it; it waits for ranks to complete it."""
(
    IS_DONE, STAGE, NUMBER, VALUE, ELAPSED, COPIED, MULTIPLIED, WAITED, BEGAN, ARRIVED, SECONDS,
    RANKS, STEPS, SPINS, BUDGET, THREADS, LINE, ACTIVITY, BEGINNING, MULTIPLYING, ENDING,
    SCRATCH, CLOCK, YIELD, MEMCPY, GET_THREADS, SET_THREADS, GEMM, SIZE,
) = range(29)
"""Cells of a call's state. 1 if the call is done, 0 if it waits or another rank entered another call; stage; number and
digest of the call; nanoseconds in total, in copies, in products and in waiting for the end; two points in time, and the
address that the clock is read to; counts; nanoseconds to wait before that is left to the caller; threads of BLAS;
addresses of this rank's line and of the cell that shows its activity, with three values for it, and of scratch; and
addresses of functions."""
COPY, BLAS, LOOPS = range(3)  # kinds of steps: products are by BLAS or by generated code
OF_BLAS = 12  # whole numbers that a product by BLAS takes besides its two scalars
WIDTH = 2 + len(ARGUMENTS)
"""Whole numbers of a step. Behind its kind lie those that BLAS takes; or the address of compiled loops and what they
take; or, of a copy, two addresses, of target and source, three counts of runs, the bytes of a run, three strides of the
target and three of the source."""
SHARED_CORE, OWN_CORE = 0, 2000  # looks at a line before the core is offered to others
