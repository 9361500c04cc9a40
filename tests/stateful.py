"""Programs of any operations on several meshes at once, every result checked against NumPy on every rank.

A step is a rule's name and a few whole numbers, of which the rule makes its choices: the same on every rank, so that
all keep the same model. `shared_programs` lets Hypothesis draw and shrink programs on rank 0; `walk` takes random ones,
as long as one likes:

    mpiexec -n 4 python -m tests.stateful --seed 7 --programs 100 --steps 200 [--meshes] [--log FILE]
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import AlgorithmError, ClosedError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region

Array = NDArray[Any]
Numbers = Sequence[int]
Step = tuple[str, Numbers]

DRAWN = 24
"""Numbers of a step."""
EXTENTS = (1, 2, 3, 5, 8, 13, 24)
TYPES = ("float64", "float32", "int32", "complex64", "float16")
GRIDS = ((1,), (2,), (3,), (4,), (2, 2), (2, 1), (1, 3), (3, 1, 1), (1, 2, 1), (5, 1, 1), (2, 3))
CUTS = ("", ":bounds", ":cyclic(1)", ":bounds", ":cyclic(2)", "", ":bounds")
ALGORITHMS = ("auto", "auto", "auto", *rma_mm.list_algorithms())
MESHES = 4
"""Open at a time."""
THINGS = 12
"""Matrices, plans or tiles kept at a time, of each kind."""


class Choices:
    """The numbers of a step, taken one after the other; 0 where there are no more."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers: Iterator[int] = iter(numbers)

    def below(self, stop: int) -> int:
        return next(self.numbers, 0) % stop

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]


@dataclass(eq=False)
class Known:
    """A matrix and what it must hold. `value` is a view where the matrix is one, and changes with it."""

    matrix: DistMatrix
    value: Array
    hidden: bool = False
    """Whether its content is undefined: nothing was written yet, or it is a sum's parts."""

    @property
    def mesh(self) -> Mesh:
        return self.matrix.mesh


@dataclass(eq=False)
class Tile:
    """A view kept while the matrix may go, and what it shows."""

    array: Array
    region: Region
    value: Array

    def check(self) -> None:
        np.testing.assert_array_equal(self.array, self.value[self.region.selector()])


@dataclass(eq=False)
class Prepared:
    """A plan or a chain, and the operands that it is for."""

    plan: Any
    a: Known
    b: Known
    c: Known | None = None
    """What an execution without `out` returned."""


@dataclass(eq=False)
class World:
    """What a program holds on this rank, and the rules by which it goes on. All collective over `comm`."""

    comm: MPI.Intracomm
    meshes: list[Mesh] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    stale: list[Any] = field(default_factory=list)
    """What belongs to closed meshes and is still held here, on some ranks longer than on others."""

    def step(self, name: str, numbers: Numbers) -> None:
        """Do one rule, where there is anything to do it with."""
        getattr(self, name)(Choices(numbers))

    # -- meshes ---------------------------------------------------------------------------------

    def open(self, draw: Choices) -> None:
        """A mesh, of some of the ranks or of all."""
        if len(self.meshes) == MESHES:
            self.close(draw)
        shape = draw.of([grid for grid in GRIDS if np.prod(grid) <= self.comm.size])
        self.meshes.append(Mesh(shape, self.comm, window=draw.of((None, *FLAVOURS))))

    def close(self, draw: Choices) -> None:
        """Close a mesh under whatever lives on it; what is held of it must go on or say that it is closed."""
        if not self.meshes:
            return
        mesh = self.meshes.pop(draw.below(len(self.meshes)))
        lost = [each for each in self.known if each.mesh is mesh]
        plans = [each for each in self.prepared if each.plan.mesh is mesh]
        mesh.close()
        for each in lost:
            raises_closed(lambda each=each: each.matrix.tile)
            raises_closed(lambda each=each: each.matrix @ each.matrix)
        for each in plans:
            raises_closed(lambda each=each: run(each, None))
        self.known = [each for each in self.known if each not in lost]
        self.prepared = [each for each in self.prepared if each not in plans]
        if draw.below(self.comm.size + 1) != self.comm.rank:
            self.stale += [*lost, *plans]

    def mesh(self, draw: Choices) -> Mesh:
        if not self.meshes:
            self.open(draw)
        return draw.of(self.meshes)  # type: ignore[no-any-return]

    # -- matrices -------------------------------------------------------------------------------

    def keep(self, matrix: DistMatrix, value: Array, hidden: bool = False) -> Known:
        assert matrix.shape == value.shape, (matrix.shape, value.shape)
        assert matrix.dtype == value.dtype, (matrix.dtype, value.dtype)
        self.known = self.known[-THINGS + 1 :]
        self.known.append(Known(matrix, value, hidden))
        return self.known[-1]

    def matrix(self, draw: Choices, mesh: Mesh | None = None) -> Known:
        """One that is there, or a new one."""
        found = [each for each in self.known if not each.hidden and mesh in (None, each.mesh)]
        return draw.of(found) if found else self.made(draw, mesh or self.mesh(draw))  # type: ignore[no-any-return]

    def make(self, draw: Choices) -> None:
        """A matrix, from wherever matrices come."""
        self.made(draw, self.mesh(draw))

    def made(self, draw: Choices, mesh: Mesh, shape: tuple[int, int] | None = None, dtype: str = "") -> Known:
        shape = shape or (draw.of(EXTENTS), draw.of(EXTENTS))
        x = numbers(draw, shape, dtype or draw.of(TYPES))
        layout = layout_of(draw, mesh, shape)
        how = draw.below(5)
        if how == 1:
            root = draw.below(mesh.shape.size)
            return self.keep(DistMatrix.from_numpy(x if mesh.rank == root else None, mesh, layout, root), x)
        if how == 2:
            return self.keep(DistMatrix.from_function(shape, lambda i, j: x[i, j], mesh, layout, x.dtype), x)
        if how == 3:
            region = parse_layout(layout, mesh.shape).region(shape, mesh.shape, mesh.rank)
            part = x[region.selector()].copy("CF"[draw.below(2)])
            return self.keep(DistMatrix.from_local(part, shape, mesh, layout), x)
        made = DistMatrix.from_numpy(x, mesh, layout)
        return self.keep(made, x)

    def redistribute(self, draw: Choices) -> None:
        """The same matrix placed otherwise."""
        known = self.matrix(draw)
        layout = layout_of(draw, known.mesh, known.value.shape, sums=True)
        self.keep(known.matrix.redistribute(layout), known.value.copy(), hidden="sum" in layout)

    def transpose(self, draw: Choices) -> None:
        """The transposed view, on the same memory."""
        known = self.matrix(draw)
        self.keep(known.matrix.T, known.value.T)

    def write(self, draw: Choices) -> None:
        """New elements, stored by their owners."""
        known = self.matrix(draw)
        known.value[...] = numbers(draw, known.value.shape, known.value.dtype)
        known.matrix.tile[...] = known.value[known.matrix.region.selector()]

    def read(self, draw: Choices) -> None:
        """The whole of a matrix, on every rank or one."""
        known = self.matrix(draw)
        root = draw.of((None, *range(self.comm.size)))
        got = known.matrix.to_numpy(root)
        assert (got is None) == (root not in (None, self.comm.rank))
        if got is not None:
            np.testing.assert_array_equal(got, known.value)

    def save(self, draw: Choices) -> None:
        """To a file and back."""
        known = self.matrix(draw)
        folder = self.comm.bcast(tempfile.mkdtemp() if self.comm.rank == 0 else None)
        path = Path(folder, "x.npy")
        known.matrix.save(path)
        made = rma_mm.load(path, known.mesh, layout_of(draw, known.mesh, known.value.shape))
        self.keep(made, known.value.copy())
        self.comm.barrier()
        if self.comm.rank == 0:
            path.unlink()
            path.parent.rmdir()

    def drop(self, draw: Choices) -> None:
        """Let go of a matrix, or close it."""
        if self.known:
            known = self.known.pop(draw.below(len(self.known)))
            if draw.below(2):
                known.matrix.close()
            if draw.below(self.comm.size + 1) == self.comm.rank:
                self.stale.append(known)

    def collect(self, draw: Choices) -> None:
        """Garbage is collected on some ranks, and what was held back there is let go."""
        if draw.below(2**self.comm.size) >> self.comm.rank & 1:
            self.stale.clear()
            gc.collect()

    # -- tiles ----------------------------------------------------------------------------------

    def keep_tile(self, draw: Choices) -> None:
        """Views of a matrix's memory that may outlive it and its mesh."""
        known = self.matrix(draw)
        self.tiles = self.tiles[-THINGS:]
        self.tiles += [Tile(array, region, known.value) for region, array in known.matrix.local.items()]

    def write_tile(self, draw: Choices) -> None:
        """Store through views of matrices that are gone: nothing else may change, and it must not crash."""
        for tile in self.tiles:
            if not any(np.shares_memory(tile.value, each.value) for each in self.known):
                tile.array[...] = tile.array.copy()

    # -- products -------------------------------------------------------------------------------

    def multiply(self, draw: Choices) -> None:
        """A product, into a new matrix or into one that holds NaN or what is added to."""
        algorithm, beta, has_out, cuts_c = draw.of(ALGORITHMS), draw.of((0, 0, 1)), draw.below(3), draw.below(3)
        a = self.matrix(draw)
        b = self.beside(draw, a)
        want = product(a.value, b.value)
        layout = "P(None, None)" if not cuts_c else layout_of(draw, a.mesh, want.shape)
        out = None
        if beta or has_out:
            x = numbers(draw, want.shape, want.dtype)
            held = x if beta else np.full_like(x, np.nan if want.dtype.kind in "fc" else 99)
            out = DistMatrix.from_numpy(held, a.mesh, layout)
            want = (want + beta * x).astype(want.dtype)
        try:
            place = layout if out is None and algorithm == "auto" else None
            made = rma_mm.matmul(a.matrix, b.matrix, out=out, beta=beta, algorithm=algorithm, layout=place)
        except AlgorithmError:  # not for this mesh or these placements
            return
        assert out is None or made is out
        self.checked(made, want)
        self.keep(made, want)

    def beside(self, draw: Choices, a: Known) -> Known:
        """A right operand for `a`: one that is there, or a new one."""
        found = [
            each for each in self.known
            if not each.hidden and each.mesh is a.mesh and each.value.shape[0] == a.value.shape[1]
            and each.value.dtype == a.value.dtype
        ]  # fmt: skip
        if found and draw.below(3):
            return draw.of(found)  # type: ignore[no-any-return]
        return self.made(draw, a.mesh, (a.value.shape[1], draw.of(EXTENTS)), a.value.dtype.name)

    def checked(self, matrix: DistMatrix, want: Array) -> None:
        """All of a result, this rank's part by itself first."""
        np.testing.assert_array_equal(matrix.tile, want[matrix.region.selector()])
        np.testing.assert_array_equal(matrix.to_numpy(), want)

    def plan(self, draw: Choices) -> None:
        """A plan or a chain to be executed later."""
        a = self.matrix(draw)
        b = self.beside(draw, a)
        self.prepared = self.prepared[-THINGS + 1 :]
        if draw.below(3) == 0:
            steps = ["C = A @ B", "D = C.T @ A"]
            made: Any = rma_mm.plan_chain(steps, A=a.matrix, B=b.matrix, outputs=["C"])
        else:
            try:
                made = rma_mm.plan(a.matrix, b.matrix, algorithm=draw.of(ALGORITHMS))
            except AlgorithmError:
                return
        self.prepared.append(Prepared(made, a, b))

    def execute(self, draw: Choices) -> None:
        """Run a plan or a chain."""
        if not self.prepared:
            return
        each = draw.of(self.prepared)
        for x in (each.a, each.b):
            if x.matrix._block is None:  # closed by `drop`
                raises_closed(lambda: run(each, None))
                self.prepared.remove(each)
                return
        want = product(each.a.value, each.b.value)
        if isinstance(each.plan, rma_mm.ChainPlan):
            got = run(each, None)
            self.checked(got["C"], want)
            self.checked(got["D"], product(want.T, each.a.value))
            return
        out = None
        if draw.below(2):
            held = np.full_like(want, np.nan if want.dtype.kind in "fc" else 99)
            out = DistMatrix.from_numpy(held, each.a.mesh, each.plan.layouts["C"])
        got = run(each, out)
        self.checked(got, want)
        if out is not None:
            self.keep(got, want)

    def abandon(self, draw: Choices) -> None:
        """Let go of a plan, or close it."""
        if self.prepared:
            each = self.prepared.pop(draw.below(len(self.prepared)))
            if draw.below(2):
                each.plan.close()
            if draw.below(self.comm.size + 1) == self.comm.rank:
                self.stale.append(each)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """What every rank holds by itself. Local."""
        for tile in self.tiles:
            tile.check()
        for each in self.known:
            if not each.hidden:
                want = each.value[each.matrix.region.selector()]
                np.testing.assert_array_equal(each.matrix.tile, want)

    def stop(self) -> None:
        """Close what is open after a failure. Collective."""
        for mesh in self.meshes:
            mesh.close()

    def end(self) -> None:
        """Read everything once more, close what is open and check the tiles that remain. Collective."""
        for each in self.known:
            np.testing.assert_array_equal(each.matrix.to_numpy(), each.value)
        while self.meshes:
            self.close(Choices([]))
        self.check()
        self.stale.clear()
        self.tiles.clear()
        gc.collect()


RULES = (
    "open", "close", "make", "redistribute", "transpose", "write", "read", "save", "drop", "collect",
    "keep_tile", "write_tile", "multiply", "plan", "execute", "abandon",
)  # fmt: skip
OFTEN = (*RULES, *["multiply"] * 6, "execute", "execute", "make", "redistribute", "keep_tile")
"""What `walk` draws from."""
MESHES_OFTEN = ("open", "open", "close", "make", "make", "multiply", "multiply", "multiply", "read", "drop", "collect")
"""What it draws from where meshes are to come and go."""


def run(each: Prepared, out: DistMatrix | None) -> Any:
    """Execute a plan or a chain on its operands."""
    if isinstance(each.plan, rma_mm.ChainPlan):
        return each.plan.execute(A=each.a.matrix, B=each.b.matrix)
    return each.plan.execute(each.a.matrix, each.b.matrix, out)


def product(a: Array, b: Array) -> Array:
    """a @ b in the type of both; whole numbers, so that it is exact."""
    with np.errstate(all="ignore"):
        wide = np.result_type(a.dtype, np.float32) if a.dtype == np.float16 else a.dtype
        return (a.astype(wide) @ b.astype(wide)).astype(a.dtype)


def numbers(draw: Choices, shape: tuple[int, ...], dtype: Any) -> Array:
    """Small whole numbers."""
    return np.random.default_rng(draw.below(2**16)).integers(-2, 3, shape).astype(dtype)


def layout_of(draw: Choices, mesh: Mesh, shape: tuple[int, ...], sums: bool = False) -> str:
    """A placement as text: axes cut a dimension in some way, replicate, pin, or hold summands."""
    axes: tuple[list[str], list[str]] = ([], [])
    extras = []
    for name, size in zip(mesh.shape.names, mesh.shape.shape, strict=True):
        role = draw.of(("rows", "cols", "rows", "cols", "all", "pinned", "sum" if sums else "all"))
        if role in ("rows", "cols"):
            dim = int(role == "cols")
            cut = draw.of(CUTS)
            if cut == ":bounds":
                inner = sorted((draw.below(shape[dim] + 1) + n) % (shape[dim] + 1) for n in range(size - 1))
                cut = f":bounds({', '.join(map(str, (0, *inner, shape[dim])))})" if not axes[dim] else ""
            axes[dim].append(f"'{name}{cut}'")
        elif role in ("pinned", "sum"):
            extras.append(f"{name}={'sum' if role == 'sum' else draw.below(size)}")
    return f"P({', '.join(['(' + ', '.join(each) + ',)' if each else 'None' for each in axes] + extras)})"


def raises_closed(call: Callable[[], object]) -> None:
    """`call` raises ClosedError."""
    try:
        call()
    except ClosedError:
        return
    raise AssertionError("what lives on a closed mesh, or was closed, was used without an error")


# -- who draws ------------------------------------------------------------------------------------


class Player:
    """The worlds of `strategies_mpi.shared_programs`, one after the other."""

    def __init__(self) -> None:
        self.world: World | None = None

    def __call__(self, comm: MPI.Intracomm, step: tuple[str, Numbers | None]) -> None:
        name, drawn = step
        if name == "begin":
            self.world = World(comm)
        assert self.world is not None
        if name in ("end", "stop"):
            world, self.world = self.world, None
            getattr(world, name)()
        elif drawn is not None:
            self.world.step(name, drawn)
            self.world.check()


def attempt(control: MPI.Intracomm, work: Callable[[], object]) -> None:
    """Do `work`; raises the same AssertionError on every rank where any failed. Collective."""
    text = ""
    try:
        work()
    except BaseException:  # whatever it is, every rank must hear of it
        text = traceback.format_exc()
    control.barrier()
    told = control.allgather(text)
    if any(told):
        raise AssertionError("\n".join(f"on rank {rank}:\n{each}" for rank, each in enumerate(told) if each))


def walk(
    comm: MPI.Intracomm, seed: int, steps: int, log: str | None = None, rules: Sequence[str] = OFTEN
) -> None:
    """A random program of `steps` steps, the same for a seed, checked after each. Collective over `comm`.

    log: a file to which rank 0 writes each step before it is done, so that a crash can be traced. Raises
    AssertionError on every rank with the steps so far.
    """
    rng, world, control = random.Random(seed), World(comm), comm.Dup()
    done: list[Step] = []
    try:
        for _ in range(steps):
            name, numbers = rng.choice(rules), tuple(rng.randrange(2**16) for _ in range(DRAWN))
            done.append((name, numbers))
            if log and comm.rank == 0:
                with Path(log).open("a") as out:
                    out.write(f"{done[-1]!r},\n")
            attempt(control, lambda name=name, numbers=numbers: (world.step(name, numbers), world.check()))
        attempt(control, world.end)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {len(done)} steps {done[-5:]!r}:\n{error}") from None
    finally:
        control.Free()


def main() -> None:
    """Many programs in one job."""
    parser = argparse.ArgumentParser(description="Random programs on several meshes, checked against NumPy.")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="of each program")
    parser.add_argument("--meshes", action="store_true", help="open and close meshes more often")
    parser.add_argument("--log", help="a file for each step before it is done, to trace a crash by")
    options = parser.parse_args()
    for n in range(options.programs):
        rules = MESHES_OFTEN if options.meshes else OFTEN
        walk(MPI.COMM_WORLD, options.seed + n, options.steps, options.log, rules)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{options.programs} programs of {options.steps} steps: all right")


if __name__ == "__main__":
    main()
