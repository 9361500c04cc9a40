"""Boxes of positions in strided memory: copied, described to MPI, or cut into stretches."""
