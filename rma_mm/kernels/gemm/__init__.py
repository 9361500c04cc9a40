"""Products by generated machine code, for every type and every semiring: packed panels around one kernel in registers.

Nothing here is imported before such a product is wanted: Numba alone takes 80 MB.
"""
