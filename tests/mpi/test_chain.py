"""Chains of products on real ranks: results, conversions between steps, memory, errors that all ranks hear alike."""

import gc
import json
import os
from unittest import mock

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import (
    AlgorithmError,
    ClosedError,
    DisagreementError,
    DtypeError,
    LayoutError,
    MemoryLimitError,
    MeshError,
    OptionError,
    ShapeError,
)
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.model.machine import described
from rma_mm.runtime.matrices.move import Redistribution, scratch_bytes
from rma_mm.windows.waiting import barrier
from tests.launch import parallel
from tests.processes import mpirun
from tests.thorough import nightly, thorough, usually
from tests.worker import descriptors

GRIDS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (2, 3)}
MLP = ["H = X @ W1", "Y = H @ W2", "dH = dY @ W2.T", "dW2 = H.T @ dY", "dW1 = X.T @ dH"]
SHAPES = {"X": (37, 13), "W1": (13, 19), "W2": (19, 13), "dY": (37, 13)}


def numbers(shape, seed=0, dtype="float64"):
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def operands(seed=0):
    return {name: numbers(shape, seed + n) for n, (name, shape) in enumerate(SHAPES.items())}


def backward(x):
    """What the steps of MLP give, by NumPy."""
    h, dh = x["X"] @ x["W1"], x["dY"] @ x["W2"].T
    return {"Y": h @ x["W2"], "dW2": h.T @ x["dY"], "dW1": x["X"].T @ dh, "H": h, "dH": dh}


def placed(arrays, mesh, layouts):
    return {name: DistMatrix.from_numpy(x, mesh, layouts[name]) for name, x in arrays.items()}


def same_error(comm, kind, call, *words):
    """`call` raises the same error of `kind` on every rank, and its message holds `words`."""
    with pytest.raises(kind) as caught:
        call()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]


class Slow:
    """A machine on whose network chains convert what they read more than once; for meshes made meanwhile."""

    def __init__(self, comm, folder):
        slow = described("slow", cores=1, gflops=1000, memory_rate=100e9, latency=1e-9, bandwidth=1e6)
        file = comm.bcast(os.path.join(folder, f"slow.{os.getpid()}"))
        if comm.rank == 0:
            with open(file, "w") as out:
                json.dump(slow.as_json(), out)
        barrier(comm)
        self.patch = mock.patch.dict(os.environ, {"RMA_MM_MACHINE": file})

    def __enter__(self):
        self.patch.start()

    def __exit__(self, *_):
        self.patch.stop()


# -- results --------------------------------------------------------------------------------------


@parallel(ranks=(4,), env=("cliques", "nolocal"), timeout=120)
def test_what_is_read_more_than_once_is_converted_once(comm, tmp_path):
    """Where the network is slow: inputs in columns, of which products want rows; matrices change between executions."""
    steps = ["P = X @ A", "Q = X @ B", "R = X @ C", "S = P.T @ X"]
    shapes = {"X": (96, 24), "A": (24, 4), "B": (24, 20), "C": (24, 20)}
    with Slow(comm, str(tmp_path)), Mesh((comm.size, 1), comm) as mesh:
        arrays = {name: numbers(shape, n) for n, (name, shape) in enumerate(shapes.items())}
        given = {"X": DistMatrix.from_numpy(arrays["X"], mesh, "P(None, 'i')")}
        rest = {name: (shape, float) for name, shape in shapes.items() if name != "X"}
        chain = rma_mm.plan_chain(steps, mesh, **given, **rest)
        assert [(each.name, str(each.target)) for each in chain.answer.conversions] == [("X", "P('i', 'j')")]
        assert chain.answer.seconds < chain.greedy.seconds
        assert "convert X" in str(chain)
        given |= placed({name: arrays[name] for name in rest}, mesh, chain.layouts)
        for turn in range(4):
            x = arrays["X"] + turn
            given["X"].tile[...] = x[given["X"].region.selector()]
            if turn == 3:  # on other memory
                given["X"] = DistMatrix.from_numpy(x, mesh, "P(None, 'i')")
            found = {name: matrix.to_numpy() for name, matrix in chain.execute(**given).items()}
            p = x @ arrays["A"]
            wanted = {"Q": x @ arrays["B"], "R": x @ arrays["C"], "S": p.T @ x}
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted), turn
        chain.close()


@parallel(ranks=(4,), env=("cliques",))
def test_transposes_conjugates_types_and_options(comm):
    x, y = numbers((9, 7)) + 1j * numbers((9, 7), 1), numbers((9, 5), 2)
    with Mesh(GRIDS[comm.size], comm) as mesh:
        given = {"X": DistMatrix.from_numpy(x, mesh, "P('i', 'j')").T.T, "Y": DistMatrix.from_numpy(y.T, mesh, "j,i").T}
        steps = "G = X.H @ Y\nK = X.H @ X\nZ = G.T @ K"
        with rma_mm.plan_chain(steps, mesh, outputs=["G", "K"], deterministic=True, **given) as chain:
            found = {name: matrix.to_numpy() for name, matrix in chain.execute(**given).items()}
        g, k = x.conj().T @ y, x.conj().T @ x
        for name, wanted in {"G": g, "K": k, "Z": g.T @ k}.items():
            assert np.array_equal(found[name], wanted), name
            assert found[name].dtype == np.complex128
        small = {"A": DistMatrix.from_numpy(numbers((6, 6), dtype="int8"), mesh)}
        with rma_mm.plan_chain(["B = A @ A", "C = B @ A.T"], mesh, compute_dtype="int32", **small) as chain:
            (found,) = chain.execute(**small).values()
            a = numbers((6, 6), dtype="int32")
            assert found.dtype == np.int32
            assert np.array_equal(found.to_numpy(), a @ a @ a.T)


@parallel(ranks=(4,), env=("node", "nolocal"))
def test_placements_asked_for_and_named_algorithms(comm):
    """A row that takes only blocks, on matrices in rows: operands are converted before it, results after it."""
    x, y = numbers((12, 8)), numbers((8, 10), 1)
    with Mesh((2, 2), comm) as mesh:
        rows, columns = "P(('i', 'j'), None)", "P(None, ('i', 'j'))"
        given = {"A": DistMatrix.from_numpy(x, mesh, rows)}
        layouts = {"B": columns, "C": rows, "D": columns}
        for joint in (True, False):
            chain = rma_mm.plan_chain(
                ["C = A @ B", "D = C.T @ A"], mesh, outputs=["C"], layouts=layouts, algorithm="summa_c", joint=joint,
                **given, B=((8, 10), "float64"),
            )
            assert {plan.algorithm for plan in chain.plans} == {"summa_c"}
            assert {each.name for each in chain.answer.conversions} >= {"A", "B", "C", "D"}
            assert {name: str(chain.layouts[name]) for name in layouts} == layouts
            found = chain.execute(**given, B=DistMatrix.from_numpy(y, mesh, columns))
            assert {name: str(matrix.layout) for name, matrix in found.items()} == {"C": rows, "D": columns}
            assert np.array_equal(found["C"].to_numpy(), x @ y)
            assert np.array_equal(found["D"].to_numpy(), (x @ y).T @ x)


@parallel(ranks=(2, 4), env=("node", "nolocal"), usual="nolocal")
def test_inputs_of_any_kind(comm, tmp_path):
    """Summands, replicas, windows, a caller's own arrays, a single rank's; where copies pay, and where they do not."""
    x = numbers((12, 10))
    with Slow(comm, str(tmp_path)), Mesh((comm.size, 1), comm) as mesh:
        for layout in ("P(None, None, i=sum)", "P(None, None)", "P(None, 'i:cyclic(3)')", "P(None, None, i=1)", "own"):
            if layout == "own":
                rows = parse_layout("P('i', None)", mesh.grid).region(x.shape, mesh.grid, comm.rank)
                X = DistMatrix.from_local(np.asfortranarray(x[rows.selector()]), x.shape, mesh, "P('i', None)")
            else:
                X = DistMatrix.from_numpy(x, mesh).redistribute(layout)
            chain = rma_mm.plan_chain(["A = X @ X.T", "B = X.T @ X", "C = X @ B", "D = A @ C"], mesh, X=X)
            (found,) = chain.execute(X=X).values()
            assert np.array_equal(found.to_numpy(), x @ x.T @ x @ (x.T @ x)), layout


# -- conversions ----------------------------------------------------------------------------------

LAYOUTS = (
    *("P('i', 'j')", "P(('i', 'j'), None)", "P(None, ('i', 'j'))", "P('j', 'i')", "P(None, None)", "P('i', None)"),
    *("P('i:cyclic(2)', 'j')", "P('j', None, i=1)", "P('i', None, j=sum)", "P('i', 'j:skew(i)')"),
)


@pytest.mark.parametrize("third", usually(1, range(3)))
@parallel(ranks=(4,), env=("cliques", "created"), usual="created")
def test_every_conversion_again_and_again(comm, third):
    """Between any two placements, from changing memory; the scratch is what was said before. A third of them a test."""
    kind = parse_dtype("bfloat16")
    with Mesh(GRIDS[comm.size], comm) as mesh:
        for target in LAYOUTS:
            place = parse_layout(target, mesh.grid)
            for source in LAYOUTS[(third + LAYOUTS.index(target)) % 3 :: 3]:
                made = DistMatrix.empty((15, 14), mesh, place, kind)
                x = numbers((15, 14), 1).astype(kind)
                X = DistMatrix.from_numpy(x, mesh).redistribute(source)
                redistributions = Redistribution(mesh, (15, 14), kind, X.layout, place, made.tile, made.block)
                flipped = DistMatrix.from_numpy(x.T, mesh).redistribute(X.layout.T).T
                for given in (X, flipped, X):
                    made.tile[...] = 99
                    barrier(comm)
                    redistributions.run(given)
                    assert np.array_equal(made.to_numpy(), x), (source, target)
                stages = [block.local for name, block in redistributions.blocks.items() if name != "C"]
                held = sum(area.nbytes for area in [*redistributions.frames.values(), *stages])
                assert held == scratch_bytes(mesh, (15, 14), kind, X.layout, place)
                redistributions.close()


# -- memory ---------------------------------------------------------------------------------------


@thorough
@parallel(ranks=(4,), env=("node", "created"))
def test_nothing_grows(comm, tmp_path):
    """Fifty executions take no window, block, channel or descriptor."""
    with Slow(comm, str(tmp_path)), Mesh((2, 2), comm) as mesh:
        given = placed(operands(), mesh, dict.fromkeys(SHAPES, "P(None, ('i', 'j'))"))
        chain = rma_mm.plan_chain(MLP, mesh, **given)
        held = []
        for turn in range(51):
            found = chain.execute(**given)
            if turn in (0, 50):
                gc.collect()
                slabs, live = len(mesh.arena.slabs), list(mesh.arena.live)
                held.append((slabs, live, len(mesh._channels), mesh._serial, descriptors()))
        assert held[0][:-1] == held[1][:-1]
        opened = held[1][-1] - held[0][-1]  # what MPI or an earlier test had open may be closed meanwhile
        assert not opened, opened
        wanted = backward(operands())
        assert all(np.array_equal(x.to_numpy(), wanted[name]) for name, x in found.items())
        chain.close()
        assert np.array_equal(found["Y"].to_numpy(), wanted["Y"])  # outputs live on
        gc.collect()
        comm.Barrier()  # by now all ranks have dropped them
        mesh.arena.collect()
        assert len(mesh.arena.live) == len(given) + len(found)


@thorough
@parallel(ranks=(4,), env=("nolocal",))
def test_memory_limit(comm, tmp_path):
    shapes = {"X": (640, 64), "W": (64, 64), "V": (64, 64)}
    steps = ["H = X @ W", "Y = X @ V", "G = X.T @ H"]
    arrays = {name: numbers(shape, n) for n, (name, shape) in enumerate(shapes.items())}
    h = arrays["X"] @ arrays["W"]
    wanted = {"Y": arrays["X"] @ arrays["V"], "G": arrays["X"].T @ h}
    with Slow(comm, str(tmp_path)), Mesh((4, 1), comm) as mesh:
        given = placed(arrays, mesh, dict.fromkeys(shapes, "P(None, 'i')"))
        rich = rma_mm.plan_chain(steps, mesh, **given)
        assert rich.answer.conversions
        matrices = 8 * (3 * 640 * 64 + 3 * 64 * 64) // 4
        assert rich.peak_bytes > matrices
        for limit in (rich.peak_bytes, rich.peak_bytes - 1000, matrices * 5 // 2):
            chain = rma_mm.plan_chain(steps, mesh, memory_limit=limit, **given)
            assert chain.peak_bytes <= limit
            assert chain.answer.conversions or limit < rich.peak_bytes
            found = chain.execute(**given)
            assert all(np.array_equal(found[name].to_numpy(), wanted[name]) for name in wanted)
        for limit in (1000, matrices - 1):
            call = lambda: rma_mm.plan_chain(steps, mesh, memory_limit=limit, **given)  # noqa: B023, E731
            same_error(comm, MemoryLimitError, call, f"{limit} bytes", f"take {matrices}", "more")
        call = lambda: rma_mm.plan_chain(steps, mesh, memory_limit=matrices + 100, **given)  # noqa: E731
        same_error(comm, MemoryLimitError, call, f"{matrices + 100} bytes", "too little", "'H = X @ W'")


# -- the benchmark --------------------------------------------------------------------------------


@nightly
def test_bench(tmp_path):
    file = tmp_path / "report.json"
    small = ("--rows", "64", "--width", "8", "--hidden", "6", "--repeat", "2", "--json", str(file))
    done = mpirun(2, ["-m", "bench.chain", *small])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("bench.chain on cpu ")
    found = json.loads(file.read_text())
    assert [result["inputs"] for result in found["results"]] == ["blocks", "columns", "free"]
    for result in found["results"]:
        assert result["right"] is True
        assert {name: len(samples) for name, samples in result["samples"].items()} == dict.fromkeys(
            result["seconds"], 2
        )
        assert result["gain"] == result["seconds"]["greedy"] / result["seconds"]["joint"]
        assert result["ratio_limit"] == result["seconds"]["joint"] / max(result["limits"].values())
        assert set(result["limits"]) == {"multiply", "wire"} and all(result["limits"].values())


# -- words and errors -----------------------------------------------------------------------------


@parallel(ranks=(2,), env=("node",))
def test_a_chain_says_what_it_does(comm):
    with Mesh((2, 1), comm) as mesh:
        chain = rma_mm.plan_chain(MLP, mesh, **{name: (shape, "float32") for name, shape in SHAPES.items()})
        text = str(chain)
        assert "chain of 5 products" in text
        assert all(step in text for step in MLP)
        assert all(plan.algorithm in text for plan in chain.plans)
        assert f"{chain.peak_bytes} bytes" in text
        assert "by greedy choice" in text
        assert "not measured here" in text  # in tests nothing is
        assert chain.predicted_seconds is None
        assert chain.greedy_seconds is None
        chain.close()
        assert str(chain) == text


@parallel(ranks=(1, 2, 4), env=("node",))
def test_misuse_of_plan_chain(comm):
    with Mesh(GRIDS[comm.size], comm) as mesh, Mesh((comm.size,), comm) as other:
        X, W = DistMatrix.from_numpy(numbers((8, 6)), mesh), DistMatrix.from_numpy(numbers((6, 4)), mesh)

        def refused(kind, steps, *words, **inputs):
            same_error(comm, kind, lambda: rma_mm.plan_chain(steps, mesh, **inputs), *words)

        refused(OptionError, ["H = X W"], "'H = X W'", "NAME = EXPRESSION", "\n          ^", X=X, W=W)
        refused(OptionError, [], "pass a list", X=X)
        refused(OptionError, ["H = X @ V"], "V", "not there", X=X, W=W)
        refused(OptionError, ["H = X @ W", "H = X @ W"], "'H = X @ W'", "made before", X=X, W=W)
        refused(OptionError, ["H = X @ X.T"], "W: no step reads it", X=X, W=W)
        refused(OptionError, ["H = X @ W"], "outputs", "Z", X=X, W=W, outputs=["Z"])
        refused(OptionError, ["H = X @ W"], "layouts", "'Z'", X=X, W=W, layouts={"Z": "i,j"})
        refused(OptionError, ["H = X @ W"], "layouts", "dict", X=X, W=W, layouts="i,j")
        refused(OptionError, ["H = X @ W"], "W: got ndarray", "DistMatrix", X=X, W=numbers((6, 4)))
        refused(OptionError, ["H = X @ W"], "memory_limit", "-1", X=X, W=W, memory_limit=-1)
        refused(ShapeError, ["H = X @ W.T"], "(8, 6)", "W.T is (4, 6)", "6 and 4", X=X, W=W)
        refused(OptionError, ["H = X @ W"], "outputs", "3", X=X, W=W, outputs=3)
        refused(ShapeError, ["H = X @ W"], "W: shape", "-4", X=X, W=((6, -4), "float64"))
        refused(ShapeError, ["H = X @ W"], "W: shape", "got 6", X=X, W=(6, 4))
        refused(DtypeError, ["H = X @ W"], "W: ", "object", X=X, W=((6, 4), "object"))
        refused(LayoutError, ["H = X @ W"], "'q'", X=X, W=((6, 4), "float64"), layouts={"W": "q,*"})
        refused(LayoutError, ["H = X @ W"], "W", "lies as", X=X, W=W, layouts={"W": "i,*"})
        refused(LayoutError, ["H = X @ W"], "'q'", X=X, W=W, layouts={"H": "q,*"})
        refused(AlgorithmError, ["H = X @ W"], "canon", X=X, W=W, algorithm="canon")
        refused(MeshError, ["H = X @ W"], "X", X=DistMatrix.from_numpy(numbers((8, 6)), other), W=W)
        if comm.size == 2:
            refused(AlgorithmError, ["H = X @ W"], "'H = X @ W'", "agarwal_3d", X=X, W=W, algorithm="agarwal_3d")
        given = {"X": ((2, 2), float), "W": ((2, 2), float)}
        same_error(comm, MeshError, lambda: rma_mm.plan_chain(["H = X @ W"], "x", **given), "mesh: got 'x'")


@parallel(ranks=(2, 4), env=("node", "created"))
def test_misuse_of_execute(comm):
    with Mesh(GRIDS[comm.size], comm) as mesh, Mesh((comm.size,), comm) as other:
        X, W = DistMatrix.from_numpy(numbers((8, 8)), mesh), DistMatrix.from_numpy(numbers((8, 8)), mesh)
        chain = rma_mm.plan_chain(["H = X @ W", "Y = H @ W"], mesh, X=X, W=W)
        found = chain.execute(X=X, W=W)
        same_error(comm, OptionError, lambda: chain.execute(X=X), "W: it is missing", "X=, W=")
        same_error(comm, OptionError, lambda: chain.execute(X=X, W=W, Z=W), "Z", "X=, W=")
        same_error(comm, LayoutError, lambda: chain.execute(X=X, W=W.to_numpy()), "W: got ndarray")
        turned = DistMatrix.from_numpy(numbers((8, 8)), mesh, "P(None, 'i')")
        same_error(comm, LayoutError, lambda: chain.execute(X=turned, W=W), "P(None, 'i')", "P('i', 'j')")
        wide = DistMatrix.from_numpy(numbers((8, 9)), mesh)
        same_error(comm, ShapeError, lambda: chain.execute(X=wide, W=W), "(8, 9)", "(8, 8)")
        whole = DistMatrix.from_numpy(numbers((8, 8), dtype="int32"), mesh)
        same_error(comm, DtypeError, lambda: chain.execute(X=whole, W=W), "int32", "float64")
        elsewhere = DistMatrix.from_numpy(numbers((8, 8)), other)
        same_error(comm, MeshError, lambda: chain.execute(X=elsewhere, W=W), "X: it lives on")
        if X.in_place:
            mine = DistMatrix.from_local(X.tile.copy(), X.shape, mesh, X.layout)
            same_error(
                comm, LayoutError, lambda: chain.execute(X=mine, W=W), "X: other ranks cannot read its memory in place"
            )
        if found["Y"].layout == X.layout:
            same_error(comm, LayoutError, lambda: chain.execute(X=found["Y"], W=W), "shares memory with Y")
        another = DistMatrix.from_numpy(numbers((8, 8)), mesh)
        odd = another if comm.rank == 1 else X
        same_error(comm, DisagreementError, lambda: chain.execute(X=odd, W=W), "X", "rank 1")
        assert np.array_equal(chain.execute(X=X, W=W)["Y"].to_numpy(), np.linalg.multi_dot([numbers((8, 8))] * 3))
        chain.close()
        chain.close()
        same_error(comm, ClosedError, lambda: chain.execute(X=X, W=W), "closed")
        X.close()
        chain = rma_mm.plan_chain(["Y = X @ W"], mesh, X=((8, 8), "float64"), W=W, layouts={"X": X.layout})
        same_error(comm, ClosedError, lambda: chain.execute(X=X, W=W), "closed")
    same_error(comm, ClosedError, lambda: chain.execute(X=another, W=W), "closed")


@parallel(ranks=(2, 4), env=("node",))
def test_ranks_that_disagree_all_hear_who_differs(comm):
    odd = comm.rank == 1
    with Mesh(GRIDS[comm.size], comm) as mesh:
        X = DistMatrix.from_numpy(numbers((8, 8)), mesh)
        other = DistMatrix.from_numpy(numbers((8, 8)), mesh)

        def differ(call, *words):
            same_error(comm, DisagreementError, call, *words)

        differ(lambda: rma_mm.plan_chain(["Y = X @ X.T" if odd else "Y = X @ X"], mesh, X=X), "steps", "rank 1")
        differ(lambda: rma_mm.plan_chain(["Y = X @ X"], mesh, X=other if odd else X), "input X", "rank 1")
        differ(lambda: rma_mm.plan_chain(["Y = X @ X"], mesh, X=X, joint=odd), "joint", "rank 1")
        differ(lambda: rma_mm.plan_chain(["Y = X @ X"], mesh, X=X, layouts={"Y": "i,*"} if odd else None), "layouts")
        call = lambda: rma_mm.plan_chain(["Y = X @" if odd else "Y = X @ X"], mesh, X=X)  # noqa: E731
        same_error(comm, OptionError, call, "'Y = X @'", "rank 1")
        assert np.array_equal(
            rma_mm.plan_chain(["Y = X @ X"], mesh, X=X).execute(X=X)["Y"].to_numpy(), numbers((8, 8)) @ numbers((8, 8))
        )


@parallel(ranks=(2,), env=("node",))
def test_matrices_that_are_called_as_options_are(comm):
    """In a dict they may have any name; by keyword the message says so."""
    with Mesh((comm.size, 1), comm) as mesh:
        names = ("steps", "check", "out", "inputs", "mesh", "self", "joint", "B")
        x = {name: numbers((5, 5), n) for n, name in enumerate(names)}
        matrices = {name: DistMatrix.from_numpy(each, mesh) for name, each in x.items()}
        text = ["C = steps @ check", "D = out @ inputs", "E = mesh @ self", "F = joint @ B"]
        wanted = [x["steps"] @ x["check"], x["out"] @ x["inputs"], x["mesh"] @ x["self"], x["joint"] @ x["B"]]
        B = matrices.pop("B")
        for named in ({}, {"steps": text}):
            with rma_mm.plan_chain(*([] if named else [text]), mesh=mesh, inputs=matrices, B=B, **named) as chain:
                found = chain.execute(matrices, B=B)
                assert all(np.array_equal(found[name].to_numpy(), y) for name, y in zip("CDEF", wanted, strict=True))
                same_error(comm, OptionError, lambda c=chain: c.execute(matrices | {"B": B}, B=B), "B", "pass it once")
                same_error(comm, OptionError, lambda c=chain: c.execute([B]), "inputs: got list")
        with rma_mm.plan_chain(["C = steps @ self"], steps=B, self=B) as chain:
            assert np.array_equal(chain.execute(steps=B, self=B)["C"].to_numpy(), x["B"] @ x["B"])
        for name in ("check", "out", "joint", "outputs", "algorithm"):
            call = lambda name=name: rma_mm.plan_chain([f"C = {name} @ B"], B=B, **{name: B})  # noqa: E731
            same_error(comm, OptionError, call, f"{name}: plan_chain or execute has an option", "in a dict")
