"""One case on real ranks: made, done, read in the way that was drawn, and compared with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench.trust.cases import Case
from bench.trust.operands import Maker, elements, garbage, summands
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.elements.dtypes import BFLOAT16, parse_dtype
from rma_mm.elements.semiring import SEMIRINGS

Array = NDArray[Any]


class Wrong(Exception):
    """A result that is not NumPy's."""


class Trial:
    """A case under way. Its matrices live as long as it does."""

    def __init__(self, case: Case, mesh: Mesh, seed: int, directory: Path) -> None:
        self.case, self.mesh, self.directory = case, mesh, directory
        self.rng = np.random.default_rng([seed, case.number])
        self.maker = Maker(mesh, directory, text=case.text, root=case.root)
        self.kept: list[Any] = []
        self.differences: list[str] = []
        """What is not as in NumPy, on this rank: told in the end, for the others go on."""

    def run(self) -> None:
        """Do it. Collective; raises Wrong on the ranks that see it, and what the library raises."""
        self.work()
        if self.differences:
            raise Wrong("\n".join(self.differences))

    def work(self) -> None:
        """Make, do and compare."""
        a, x = self.made(self.case.a)
        if self.case.b is None:
            self.moved(a, x)
        else:
            self.multiplied(a, x)
        if isinstance(a, DistMatrix):
            self.check_tile("A afterwards", a, x)

    def made(self, given: Any) -> tuple[Any, Array]:
        """A matrix, and what it holds."""
        made, x = self.maker.make(given, elements(self.rng, given.shape, given.dtype), self.rng)
        self.kept.append(made)
        return made, x

    def moved(self, matrix: DistMatrix, x: Array) -> None:
        """A chain of redistributions."""
        self.check_tile("as it was made", matrix, x)
        for n, layout in enumerate(self.case.moves):
            matrix = matrix.redistribute(self.maker.place(layout))
            self.kept.append(matrix)
            self.check_tile(f"after move {n}", matrix, x)
        self.check(matrix, x)

    def multiplied(self, a: Any, x: Array) -> None:
        """A product, as often as it is wanted."""
        case = self.case
        assert case.b is not None
        b, y = self.made(case.b)
        out, old = self.made(case.c) if case.c else (None, None)
        if out is not None and not case.beta:
            out.tile[...] = garbage(out.dtype)
        options = self.options(case)
        layout = self.maker.place(case.layout)
        plan = rma_mm.plan(a, b, self.mesh, layout=out.layout if out else layout, **options) if case.planned else None
        self.kept.append(plan)
        for _ in range(case.times):
            c = plan.execute(a, b, out) if plan else rma_mm.matmul(a, b, self.mesh, out=out, layout=layout, **options)
            self.kept.append(c)
            old = self.expected(x, y, old)
            if c.dtype != old.dtype:
                self.differences.append(f"C is of {c.dtype}, and of {old.dtype} in NumPy")
            self.check(c, old)
        if isinstance(b, DistMatrix):
            self.check_tile("B afterwards", b, y)

    def options(self, case: Case) -> dict[str, Any]:
        """The arguments of matmul and plan."""
        return {
            "alpha": case.alpha, "beta": case.beta, "algorithm": case.algorithm, "memory_limit": case.memory,
            "compute_dtype": case.compute, "deterministic": case.deterministic, "kernel": case.kernel,
            "semiring": case.semiring, "epilogue": self.epilogue(),
            **{f"transpose_{x.lower()}": x in case.transposed for x in "AB"},
            **{f"conjugate_{x.lower()}": x in case.conjugated for x in "AB"},
        }  # fmt: skip

    def bias(self) -> Array:
        """The epilogue's vector, along the dimension that it belongs to."""
        case = self.case
        assert case.b is not None
        extent = case.a.shape if case.bias == "row" else case.b.shape
        is_turned = ("A" in case.transposed) if case.bias == "row" else ("B" in case.transposed)
        given = case.a if case.bias == "row" else case.b
        shape = extent[::-1] if given.turned != is_turned else extent
        return np.arange(shape[0] if case.bias == "row" else shape[1]) % 3

    def epilogue(self) -> Epilogue | None:
        """What is asked for besides the product."""
        case = self.case
        if not case.relu and not case.bias:
            return None
        bias = self.bias().astype("int8" if self.result().kind != "u" else "uint8") if case.bias else None
        return Epilogue(bias=bias, per=case.bias, activation="relu" if case.relu else None)

    def result(self) -> np.dtype[Any]:
        """The element type of C."""
        case = self.case
        assert case.b is not None
        given = (parse_dtype(x.dtype) for x in (case.a, case.b))
        return parse_dtype(case.compute) if case.compute else np.result_type(*given)

    def expected(self, x: Array, y: Array, old: Array | None) -> Array:
        """C in NumPy, worked out in a type that holds it exactly (integers wrap around)."""
        case, dtype = self.case, self.result()
        wide = np.dtype({"c": np.complex128, "f": np.float64, "V": np.float64}.get(dtype.kind, np.int64))
        if dtype == BFLOAT16:
            wide = np.dtype(np.float64)
        left, right = (self.as_used(name, each).astype(wide) for name, each in (("A", x), ("B", y)))
        before = None if old is None or not case.beta else old.astype(wide)
        with np.errstate(all="ignore"):
            if case.semiring not in ("plus_times", "or_and"):
                return self.by_semiring(left, right, before, dtype, wide)
            c = case.alpha * (left @ right)
            if before is not None:
                c = c + case.beta * before
            if case.bias:
                c = c + (self.bias()[:, None] if case.bias == "row" else self.bias()[None, :])
            if case.relu:  # of the sum as its type holds it
                c = np.maximum(np.asarray(c).astype(dtype) if dtype.kind in "iu" else c, 0)
            return np.asarray(c).astype(dtype)

    def as_used(self, name: str, x: Array) -> Array:
        """op(A) or op(B)."""
        x = x.T if name in self.case.transposed else x
        return x.conj() if name in self.case.conjugated else x

    def by_semiring(
        self, left: Array, right: Array, before: Array | None, dtype: np.dtype[Any], wide: np.dtype[Any]
    ) -> Array:
        """C in another arithmetic."""
        semiring = SEMIRINGS[self.case.semiring]
        terms = semiring.multiply(left[:, :, None], right[None, :, :])
        least = wide.type(semiring.identity(np.dtype(np.float32) if dtype == BFLOAT16 else dtype).astype(wide))
        if dtype.kind == "u" and least == -1:  # the largest of uint64, which no sum here reaches
            least = np.int64(2**62)
        c = semiring.add.reduce(terms, axis=1, initial=least)
        c = semiring.add(c, before) if before is not None else c
        top = np.dtype(dtype).type(semiring.identity(np.dtype(np.float32) if dtype == BFLOAT16 else dtype))
        return np.where(c == least, top, c.astype(dtype))

    # -- reading ----------------------------------------------------------------------------------

    def check(self, matrix: DistMatrix, x: Array) -> None:
        """Every rank's own tile, and the whole as it is to be read."""
        self.check_tile("its tile", matrix, x)
        getattr(self, "read_" + self.case.read)(matrix, x)

    def check_tile(self, what: str, matrix: DistMatrix, x: Array) -> None:
        """This rank's part; of summands none is known by itself."""
        self.compare(f"{what}: shape", np.array(matrix.shape), np.array(x.shape))
        if summands(matrix.layout, self.mesh) == 1:
            self.compare(what, matrix.tile, x[matrix.region.selector()])

    def compare(self, what: str, got: Array, want: Array) -> None:
        """Equal in every element."""
        if not np.array_equal(got, want):
            place = np.argwhere(got != want) if got.shape == want.shape else []
            self.differences.append(
                f"{what} on rank {self.mesh.rank}: {len(place)} of {want.size} differ; got\n{got}\nin place of\n{want}"
            )

    def read_tiles(self, matrix: DistMatrix, x: Array) -> None:
        """Box by box."""
        if summands(matrix.layout, self.mesh) == 1:
            for box, tile in matrix.local.items():
                self.compare(f"tile {box}", tile, x[box.selector()])

    def read_to_numpy(self, matrix: DistMatrix, x: Array) -> None:
        """The whole on every rank."""
        self.compare("to_numpy()", matrix.to_numpy(), x)

    def read_root(self, matrix: DistMatrix, x: Array) -> None:
        """The whole on one rank."""
        got = matrix.to_numpy(root=self.case.root)
        if self.mesh.rank == self.case.root:
            self.compare(f"to_numpy(root={self.case.root})", got, x)

    def read_transposed(self, matrix: DistMatrix, x: Array) -> None:
        """The transposed view, elsewhere."""
        self.compare("T.to_numpy()", matrix.T.to_numpy(), x.T)

    def read_redistribute(self, matrix: DistMatrix, x: Array) -> None:
        """In another placement."""
        assert self.case.onto is not None
        moved = matrix.redistribute(self.maker.place(self.case.onto))
        self.kept.append(moved)
        self.check_tile(f"redistributed to {self.case.onto}", moved, x)
        self.compare("redistributed and read", moved.to_numpy(), x)

    def read_save(self, matrix: DistMatrix, x: Array) -> None:
        """Through a file."""
        path = self.directory / "out.npy"
        matrix.save(path)
        if self.mesh.rank == 0:
            got = np.load(path)
            self.compare("save", got.view(BFLOAT16) if x.dtype == BFLOAT16 else got, x)
