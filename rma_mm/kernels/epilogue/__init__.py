"""Epilogues: bias, activation, and the cast of C's elements after they are summed."""
