"""The tests: `pure` needs no ranks, `mpi` runs on real ones through `tests.launch`."""
