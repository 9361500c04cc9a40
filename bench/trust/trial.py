"""One case on real ranks: made, done, read in the way that was drawn, and compared with NumPy."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench.trust.cases import Case
from bench.trust.operands import Maker, elements, enlarge, garbage, spoil, summands
from bench.trust.wrong import Wrong
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.elements.dtypes import BFLOAT16, parse_dtype
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.errors import ClosedError
from rma_mm.kernels.epilogue import epilogue as closing
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering import decisions

Array = NDArray[Any]


class Trial:
    """A case under way. Its matrices live as long as it does."""

    def __init__(self, case: Case, mesh: Mesh, seed: int, directory: Path) -> None:
        self.case, self.mesh, self.directory = case, mesh, directory
        self.rng = np.random.default_rng([seed, case.number])
        self.maker = Maker(mesh, directory, text=case.text, root=case.root)
        self.kept: dict[int, tuple[Any, Any]] = {}
        """By its id: what was made, and what it holds where it is a matrix."""
        self.differences: list[str] = []
        """What is not as in NumPy, on this rank: told in the end, for the others go on."""

    def run(self) -> None:
        """Do it. Collective; raises Wrong on the ranks that see it, and what the library raises."""
        with ExitStack() as stack:
            if self.case.narrows:
                stack.enter_context(mock.patch.object(decisions, "NARROW", 3))
                stack.enter_context(mock.patch.object(closing, "COMPILE_FROM", 0))
            self.work()
        self.judge()

    def judge(self) -> None:
        """Raise Wrong where something differed."""
        if self.differences:
            raise Wrong("\n".join(self.differences))

    def keep(self, made: Any, x: Any = None) -> None:
        """Hold what was made, which has the elements `x`."""
        self.kept[id(made)] = made, x

    def look_back(self, is_closed: bool) -> None:
        """What was kept is as it was left, whatever came after it; of a closed mesh nothing may be read."""
        for made, x in self.kept.values():
            if not isinstance(made, DistMatrix) or x is None:
                continue
            if not is_closed:
                self.check_tile(f"some cases after case {self.case.number}", made, x)
                continue
            try:
                self.differences.append(f"the mesh is closed, and a tile is {made.tile}")
            except ClosedError:
                continue
        self.judge()

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
        made, x = self.maker.make(given, self.numbers(given), self.rng)
        self.keep(made, x)
        return made, x

    def numbers(self, given: Any) -> Array:
        """The elements of a matrix as it is stored."""
        x, case = elements(self.rng, given.shape, given.dtype), self.case
        if case.values == "wild" and given is not case.c:
            return spoil(self.rng, x)
        return enlarge(self.rng, x, self.result(), given is case.c) if case.values == "large" else x

    def other(self, a: Any, x: Array) -> tuple[Any, Array]:
        """B, and what it holds."""
        case = self.case
        if not case.is_gram:
            return self.made(case.b)
        return (a, x) if case.is_same else (a.T, x.T)

    def moved(self, matrix: DistMatrix, x: Array) -> None:
        """A chain of redistributions."""
        self.check_tile("as it was made", matrix, x)
        for n, layout in enumerate(self.case.moves):
            matrix = matrix.redistribute(self.maker.place(layout))
            self.keep(matrix, x)
            self.check_tile(f"after move {n}", matrix, x)
        self.check(matrix, x)

    def multiplied(self, a: Any, x: Array) -> None:
        """A product, as often as it is wanted."""
        case = self.case
        assert case.b is not None
        b, y = self.other(a, x)
        out, old = self.made(case.c) if case.c else (None, None)
        if out is not None and not case.beta:
            out.tile[...] = garbage(out.dtype)
        options = self.options(case)
        layout = self.maker.place(case.layout)
        plan = rma_mm.plan(a, b, self.mesh, layout=out.layout if out else layout, **options) if case.planned else None
        self.keep(plan)
        for _ in range(case.times):
            c = plan.execute(a, b, out) if plan else rma_mm.matmul(a, b, self.mesh, out=out, layout=layout, **options)
            old = self.expected(x, y, old)
            self.keep(c, old)
            if c.dtype != old.dtype:
                self.differences.append(f"C is of {c.dtype}, and of {old.dtype} in NumPy")
            self.check(c, old)
        if plan and not case.checked:
            self.count(plan)
        if isinstance(b, DistMatrix):
            self.check_tile("B afterwards", b, y)

    def count(self, plan: rma_mm.Plan) -> None:
        """What the transports counted is what the interpreter counts, to the word. Collective."""
        found = plan.words.words_intra + plan.words.words_inter, plan.words.words_inter, plan.claims
        ranks = self.mesh.comm.gather(found)
        if ranks is None:
            return
        schedule = plan.schedule
        words, between, claims = (list(each) for each in zip(*ranks[: schedule.mesh.size], strict=True))
        homes = {x: [np.zeros(schedule.home(x, r).shape) for r in schedule.mesh.ranks] for x in schedule.homes}
        counted = interpret(schedule, homes, claims=dict(enumerate(claims)) if schedule.pool else None)
        if (words, sum(between)) != (counted.words, counted.words_between_nodes):
            self.differences.append(
                f"{words} words, {sum(between)} between nodes, and the interpreter counts {counted.words}, "
                f"{counted.words_between_nodes}"
            )

    def options(self, case: Case) -> dict[str, Any]:
        """The arguments of matmul and plan."""
        return {
            "alpha": case.alpha, "beta": case.beta, "algorithm": case.algorithm, "memory_limit": case.memory,
            "compute_dtype": case.compute, "deterministic": case.deterministic, "kernel": case.kernel,
            "semiring": case.semiring, "epilogue": self.epilogue(), "check": case.checked,
            **({"symmetric": case.symmetric, "fill": case.fill} if case.is_gram else {}),
            **{f"transpose_{x.lower()}": x in case.transposed for x in "AB"},
            **{f"conjugate_{x.lower()}": x in case.conjugated for x in "AB"},
        }

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
        if not case.relu and not case.bias and not case.stored:
            return None
        bias = self.bias().astype("int8" if self.result().kind != "u" else "uint8") if case.bias else None
        return Epilogue(bias=bias, per=case.bias, activation="relu" if case.relu else None, dtype=case.stored)

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
        if before is not None and case.symmetric == "hermitian":
            np.fill_diagonal(before, before.diagonal().real)
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
            c = np.asarray(c).astype(dtype)
            return self.filled(c.astype(case.stored) if case.stored else c)

    def filled(self, c: Array) -> Array:
        """C with what stands above the diagonal, where it is known to be symmetric."""
        case, below = self.case, np.tril(c, -1)
        if case.fill == "lower":
            return np.tril(c)
        if not case.symmetric:
            return c
        mirrored = below.T.conj() if case.symmetric == "hermitian" else below.T
        return np.where(np.tri(len(c), dtype=bool), c, mirrored)

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
        differ = (got != want) & ((got == got) | (want == want)) if got.shape == want.shape else np.array([])
        if got.shape != want.shape or differ.any():
            place = np.argwhere(differ)
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
        self.keep(moved, x)
        self.check_tile(f"redistributed to {self.case.onto}", moved, x)
        self.compare("redistributed and read", moved.to_numpy(), x)

    def read_save(self, matrix: DistMatrix, x: Array) -> None:
        """Through a file."""
        path = self.directory / "out.npy"
        matrix.save(path)
        if self.mesh.rank == 0:
            got = np.load(path)
            self.compare("save", got.view(BFLOAT16) if x.dtype == BFLOAT16 else got, x)
