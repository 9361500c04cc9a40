"""`python -m bench`: list the benchmarks."""

from __future__ import annotations

COMMANDS = {
    "mpiexec -n P python -m bench.square": "4096³ against one process's numpy.matmul on all cores",
    "mpiexec -n 2 python -m bench.overhead": "what plan.execute adds to a small multiply; growth over 10 000 of them",
    "mpiexec -n P python -m bench.words": "words that the transports counted against the interpreter's count",
    "mpiexec -n P python -m bench.memory": "resident memory against plan.peak_bytes; growth over 5000 matmul calls",
    "mpiexec -n P python -m bench.chain": "an MLP's forward and backward pass, placed jointly, greedily and in blocks",
    "mpiexec -n P python -m bench.orientations": "products of operands that lie transposed beside those that do not",
    "mpiexec -n 2 python -m bench.gram": "A · Aᵀ, half of it multiplied, against the general product; int8 relations",
    "mpiexec -n P python -m bench.batches": "products of batches: rate beside NumPy, overhead of small ones, words",
    "mpiexec -n 3 python -m bench.uneven": "ranks pinned 1 + 2 to two cores: shares by speed against even ones",
    "mpiexec -n 3 python -m bench.slowed": "a rank loses half of its core for a while: shares that follow",
    "mpiexec -n 2 python -m bench.windows": "transfers through each kind of window, by size, their owners idle or busy",
    "python -m bench.peers": "beside NumPy, ScaLAPACK, DTensor, heat, JAX, Dask and the textbooks' algorithms",
    "python -m bench.disk": "products of files, cached and cold, beside memory, the disk, Dask and Blosc2",
    "python -m bench.policy": "the planner: regrets of what it chooses, predicted against measured seconds",
    "python -m bench.question": "pull, push, SUMMA, Cannon, 2.5-D, T10, auto: 12 shapes in 7 settings (some need root)",
    "python -m bench.hosts --bars": "several hosts on this machine (needs root): times and words between nodes",
    "python -m bench.compare": "this checkout against an earlier commit, in turn: is anything slower or larger?",
    "python -m bench.trust --seed S": "random products and redistributions by the thousand, compared with NumPy",
    "python -m bench.kernels": "generated kernels against OpenBLAS, NumPy and the core's peak, by type and shape",
    "python -m bench.epilogue": "what bias, ReLU and GELU add to a product, fused and by NumPy passes",
    "mpiexec -n 4 python -m bench.torch_linear": "a linear layer forward and backward beside DTensor over gloo",
    "python -m bench.planned": "the planner's figures for 200 random requests, to compare two checkouts byte by byte",
    "python -m bench.start": "seconds of importing the package, and of a 64³ product on the command line",
}

if __name__ == "__main__":
    width = max(map(len, COMMANDS))
    for command, summary in COMMANDS.items():
        print(f"{command:<{width}}  {summary}")
    print("Each takes --help, and all but bench.planned --json FILE.")
