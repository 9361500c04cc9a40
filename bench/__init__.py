"""Benchmarks: one module a bar, each a command that prints a table. `python -m bench` lists them."""
