"""Thousands of random products and redistributions in one job, each compared with NumPy: `python -m bench.trust`."""
