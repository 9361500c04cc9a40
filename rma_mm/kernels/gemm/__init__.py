"""Products by generated machine code, for every type and every semiring: packed panels around one kernel in registers.

Only what writes the code, from `sources` on, imports Numba, when code is wanted that this machine has
not compiled before.
"""
