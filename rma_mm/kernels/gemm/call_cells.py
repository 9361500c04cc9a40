"""Cells of the memory that a compiled call works on: lines by which ranks meet, its state, and its steps."""

ENTERED, DIGEST, COMPLETED = range(3)
"""Cells of a line: twice the number of the call, plus one if the rank waits here and not in MPI; the digest of its
arguments; the number of the last call whose work it has done."""
OVER, BEFORE, BEHIND = range(3)
"""Stages of a call: none is under way; it waits for ranks to enter it; it waits for ranks to complete it."""
(
    IS_DONE, STAGE, NUMBER, VALUE, ELAPSED, COPIED, MULTIPLIED, WAITED, BEGAN, ARRIVED, SECONDS,
    RANKS, STEPS, SPINS, BUDGET, THREADS, LINE, ACTIVITY, BEGINNING, MULTIPLYING, ENDING,
    CLOCK, YIELD, MEMCPY, GET_THREADS, SET_THREADS, GEMM, SIZE,
) = range(28)
"""Cells of a call's state. 1 if the call is done, 0 if it waits or another rank entered another call; stage; number and
digest of the call; nanoseconds in total, in copies, in products and in waiting for the end; two points in time, and the
address that the clock is read to; counts; nanoseconds to wait before that is left to the caller; threads of BLAS;
addresses of this rank's line and of the cell that shows its activity, with three values for it; and addresses of
functions."""
COPY, MULTIPLY = range(2)  # kinds of steps
ARGUMENTS = 12
"""Whole numbers of a step, behind its kind. Of a product those that BLAS takes besides its two scalars; of a copy two
addresses, of target and source, three counts of runs, the bytes of a run, three strides of the target and three of the
source."""
WIDTH = 1 + ARGUMENTS
SHARED_CORE, OWN_CORE = 0, 2000  # looks at a line before the core is offered to others
