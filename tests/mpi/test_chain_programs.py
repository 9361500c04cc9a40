"""Chains of products and what lies between them, on real ranks: gradients, memory, given results."""

from time import sleep
from unittest import mock

import numpy as np
import pytest

import rma_mm
from bench.trust.programs import by_numpy
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import DisagreementError, DtypeError, LayoutError, MemoryLimitError, OptionError, ShapeError
from rma_mm.runtime.chains import actions
from rma_mm.windows import channel
from tests.launch import parallel
from tests.mpi.test_chain import GRIDS, numbers, same_error
from tests.thorough import usually

MLP = ["Z = X @ W1 + b1", "H = gelu(Z)", "Y = H @ W2 + X"]
SHAPES = {"X": (37, 13), "W1": (13, 19), "b1": (1, 19), "W2": (19, 13), "dY": (37, 13)}


def arrays(seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("check", usually(1, [False, True]))
@parallel(ranks=(2, 4), env=("cliques",))
def test_an_mlp_with_bias_gelu_and_residual(comm, check):
    """Forward and backward, again on other matrices, into matrices of the caller; checked as it goes, too."""
    with Mesh(GRIDS[comm.size], comm) as mesh:
        free = {name: (shape, "float64") for name, shape in SHAPES.items()}
        forward = {name: x for name, x in free.items() if name != "dY"}
        with rma_mm.plan_chain(MLP, mesh, algorithm="stationary_c", **forward) as chain:
            steps = [*MLP, *chain.backward("Y")]
        with rma_mm.plan_chain(steps, mesh, outputs=["H"], check=check, **free) as chain:
            assert (len(chain.plans), len(chain.chain.steps)) == (6, 8 + 4 * check)  # element-wise work apart
            for turn in range(2):
                known = arrays(turn)
                given = {name: DistMatrix.from_numpy(x, mesh, chain.layouts[name]) for name, x in known.items()}
                names = ["Y", "dW1"] if turn else []
                out = {x: DistMatrix.empty(chain.outputs[x].shape, mesh, chain.layouts[x], float) for x in names}
                found, wanted = chain.execute(out=out, **given), by_numpy(steps, known)
                assert list(found) == ["H", "Y", "dW2", "db1", "dW1", "dX"]
                for name, x in found.items():
                    assert np.allclose(x.to_numpy(), wanted[name], rtol=1e-12, atol=1e-12), name
                    assert x is out.get(name, chain.outputs[name])


FUNCTIONS = [
    "S = softmax(X @ W1 * 0.25)", "N = layer_norm(S @ W2) * 2", "T = tanh(N) + sigmoid(N) ** 2",
    "M = max(T, 1) - max(T, 0)", "Y = where(T > M * 0.5, exp(T), sqrt(T * T + 1)) + X",
]


@parallel(ranks=(1, 4, 3), env=("node", "cliques"))
def test_functions_between_products_and_their_gradients(comm):
    """Largest elements and softmax along either axis, of matrices that lie in blocks, too."""
    with Mesh(comm.size, comm) as mesh:
        known = {name: x for name, x in arrays(3).items() if name != "b1"}
        for place in ("P('i', 'j')", "P(None, 'j')"):
            X = DistMatrix.from_numpy(known["X"], mesh, place)
            free = {name: (x.shape, "float64") for name, x in known.items() if name not in ("X", "dY")}
            with rma_mm.plan_chain(FUNCTIONS, mesh, X=X, **free) as chain:
                steps = [*FUNCTIONS, *chain.backward("Y")]
            free["dY"] = known["dY"].shape, "float64"
            with rma_mm.plan_chain(steps, mesh, outputs=["S", "M"], X=X, **free) as chain:
                given = {name: DistMatrix.from_numpy(known[name], mesh, chain.layouts[name]) for name in free}
                found, wanted = chain.execute(X=X, **given), by_numpy(steps, known)
                assert {"S", "M", "Y", "dX", "dW1", "dW2"} <= set(found)
                for name, x in found.items():
                    assert np.allclose(x.to_numpy(), wanted[name], rtol=1e-10, atol=1e-10), (name, place)
        chain = rma_mm.plan_chain(["S = softmax(X, 0)", "L = layer_norm(X, 0)"], mesh, X=X)
        found = chain.execute(X=X)
        assert np.allclose(found["S"].to_numpy().sum(0), 1) and np.allclose(found["L"].to_numpy().mean(0), 0)


ATTENTION = [
    "Q = split_heads(X @ Wq + bq, 4, 2)", "K = split_heads(X @ Wk, 4, 2)", "V = split_heads(X @ Wv, 4, 2)",
    "P = softmax(bmm_nt(Q, K, 8) * 0.5)", "Y = X + merge_heads(bmm(P, V, 8), 4, 2) @ Wo",
]


@parallel(ranks=(1, 4, 3, 6), env=("node", "cliques"))
def test_attention_of_batches_and_heads(comm):
    """Forward and backward, with as many batches as ranks, more and fewer; of both floats."""
    rng = np.random.default_rng(4)
    shapes = {"X": (20, 6), "Wq": (6, 6), "Wk": (6, 6), "Wv": (6, 6), "Wo": (6, 6), "bq": (1, 6), "dY": (20, 6)}
    with Mesh(comm.size, comm) as mesh:
        for dtype, close in (("float64", 1e-12), ("float32", 1e-5)):
            known = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
            free = {name: (shape, dtype) for name, shape in shapes.items() if name != "dY"}
            with rma_mm.plan_chain(ATTENTION, mesh, **free) as chain:
                steps = [*ATTENTION, *chain.backward("Y")]
            with rma_mm.plan_chain(steps, mesh, outputs=["P"], dY=(shapes["dY"], dtype), **free) as chain:
                assert "bmm_nt(Q, K, 8)" in str(chain) and "groups" in str(chain)
                given = {name: DistMatrix.from_numpy(x, mesh, chain.layouts[name]) for name, x in known.items()}
                found, wanted = chain.execute(**given), by_numpy(steps, known)
                assert {"Y", "P", "dX", "dWq", "dWk", "dWv", "dWo", "dbq"} <= set(found)
                for name, x in found.items():
                    assert np.allclose(x.to_numpy(), wanted[name], rtol=close, atol=close), name


@parallel(ranks=(3,), env=("node",))
def test_types_and_inputs_of_any_kind(comm):
    """Halves, summands, turned memory, uneven, cyclic, shifted placements, nothing at all; a rank beyond the mesh."""
    steps = ["H = gelu(X @ W1 + b1) * 0.5 - c", "Y = H @ W2 + X", "s = sum(H, 0)", "V = (X + 1).T @ Y"]
    steps += ["t = V.T - sum(V)"]
    shapes = {name: shape for name, shape in SHAPES.items() if name != "dY"} | {"c": (1, 37)}
    places = ("P('i', None)", "P('i:cyclic(3)', None)", "P('i:weights(1, 3)', None)", "P(None, None, i=sum)")
    with Mesh((2,), comm) as mesh:
        for kind, place in zip(("bfloat16", "float16", "float32", "float64"), places, strict=True):
            dtype, rng = parse_dtype(kind), np.random.default_rng(1)
            known = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
            given = {name: DistMatrix.from_numpy(x, mesh) for name, x in known.items()}
            given |= {"X": given["X"].redistribute(place), "c": given["c"].T}
            wanted = by_numpy(steps, {name: x.astype(float) for name, x in (known | {"c": known["c"].T}).items()})
            with rma_mm.plan_chain(steps, mesh, outputs=["H"], algorithm="stationary_c", **given) as chain:
                for name, x in chain.execute(**given).items():
                    close = {2: 0.05, 4: 1e-5, 8: 1e-12}[dtype.itemsize] * max(1, abs(wanted[name]).max())
                    assert x.dtype == dtype and np.all(abs(x.to_numpy().astype(float) - wanted[name]) < close), name
        X = DistMatrix.from_numpy(np.zeros((0, 5)), mesh)
        with rma_mm.plan_chain(["Y = gelu(X) + 1", "s = sum(X, 0)", "G = X.T @ Y + 1"], mesh, X=X) as chain:
            found = chain.execute(X=X)
            assert not found["s"].to_numpy().any() and np.array_equal(found["G"].to_numpy(), np.ones((5, 5)))
    with Mesh((1, 3), comm) as mesh:
        x = numbers((6, 6))
        X = DistMatrix.from_numpy(x, mesh).redistribute("P('i', 'j:skew(i)')")
        with rma_mm.plan_chain(["Y = X * 2 + sum(X, 0)", "G = X.T @ Y"], mesh, outputs=["Y"], X=X) as chain:
            found = chain.execute(X=X)
            y = 2 * x + x.sum(0)
            assert np.array_equal(found["Y"].to_numpy(), y) and np.array_equal(found["G"].to_numpy(), x.T @ y)


@parallel(ranks=(3,), env=("node",))
def test_sums_into_matrices_of_the_caller(comm):
    """Sums of parts that are brought together, and read on by later steps, on other placements too."""
    x, y = numbers((7, 6)), numbers((6, 4), 1)
    with Mesh((3,), comm) as mesh:
        X, Y = DistMatrix.from_numpy(x, mesh, "P('i', None)"), DistMatrix.from_numpy(y, mesh)
        layouts = {"s": "P(None, 'i')", "t": "P(None, 'i')"}
        steps = ["s = sum(X, 0)", "t = s * 2", "Z = s @ Y"]
        options = {"outputs": ["s"], "layouts": layouts, "joint": False}
        with rma_mm.plan_chain(steps, mesh, **options, X=X, Y=Y) as chain:
            ends = chain.answer.steps[0].layouts
            assert [str(x) for x in ends] == ["P('i', None)", "P(None, 'i')"]  # neither is converted
            wanted = by_numpy(steps, {"X": x, "Y": y})
            out = {"s": DistMatrix.from_numpy(numbers((1, 6), 2), mesh, layouts["s"])}
            for given in ({}, out, {"s": DistMatrix.from_numpy(numbers((6, 1), 3), mesh, "P('i', None)").T}):
                for name, found in chain.execute(out=given, X=X, Y=Y).items():
                    assert np.array_equal(found.to_numpy(), wanted[name]), name


# -- overlapped -----------------------------------------------------------------------------------


class Lagging:
    """Steps of which one rank comes late to each: what the others need of it is not there unless they wait."""

    def __init__(self, is_late):
        kinds = actions.Action.__subclasses__()
        self.patches = [mock.patch.object(kind, "work", self.slowed(kind.work)) for kind in kinds]
        self.is_late = is_late

    def slowed(self, work):
        def lag(action, here):
            sleep(0.01 * self.is_late)
            work(action, here)

        return lag

    def __enter__(self):
        for each in self.patches:
            each.start()

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()


@parallel(ranks=(3,), env=("node", "nolocal"))
def test_no_rank_reads_what_another_has_yet_to_make(comm):
    """Whichever is late: read in place, fetched, added up, moved by groups, summed; on new numbers each time."""
    steps = ["H = relu(X @ W)", "K = H.T @ X", "V = W @ K", "s = sum(V, 0)", "Y = V * 2 + s", "Z = Y @ W", "D = X @ Z"]
    shapes, total, rows = {"X": (30, 12), "W": (12, 9)}, 0, "P('i', None)"
    with Mesh((3,), comm) as mesh:
        for place, algorithm in ((rows, "stationary_c"), ("P(None, 'i')", "stationary_a"), (rows, "auto")):
            free = {name: (shape, "float64") for name, shape in shapes.items()}
            options = {"layouts": {"X": place, "V": place, "Z": "P(None, 'i')"}, "algorithm": algorithm}
            with rma_mm.plan_chain(steps, mesh, outputs=["s", "V"], **options, **free) as chain:
                for turn in range(3):
                    known = {name: numbers(shape, 10 * turn + n) for n, (name, shape) in enumerate(shapes.items())}
                    given = {name: DistMatrix.from_numpy(x, mesh, chain.layouts[name]) for name, x in known.items()}
                    with Lagging(comm.rank == turn):
                        found = chain.execute(**given)
                    wanted = by_numpy(steps, known)
                    for name, x in found.items():
                        assert np.array_equal(x.to_numpy(), wanted[name]), (name, algorithm, turn)
                total += sum(moment.meets for moment in chain._overlapped.moments)
    assert total


@parallel(ranks=(3,), env=("node",))
def test_sums_of_several_steps_are_under_way_at_once(comm):
    """Ranks add up what they send in pieces: each sum takes its own."""
    steps, rows = ["P = X.T @ Y", "Q = X.T @ Z", "S = Y.T @ Z"], "P('i', None)"
    with Mesh((3,), comm) as mesh, mock.patch.object(channel, "PIECE", 64):
        free = dict.fromkeys("XYZ", ((12, 12), "float64"))
        options = {"layouts": dict.fromkeys("XYZPQS", rows), "algorithm": "row_parallel"}
        with rma_mm.plan_chain(steps, mesh, **options, **free) as chain:
            assert not any(chain._overlapped.keeps_barriers)
            for turn in range(2):
                known = {name: numbers((12, 12), 10 * turn + n) for n, name in enumerate("XYZ")}
                given = {name: DistMatrix.from_numpy(x, mesh, rows) for name, x in known.items()}
                with Lagging(comm.rank == turn):
                    found, wanted = chain.execute(**given), by_numpy(steps, known)
                for name, x in found.items():
                    assert np.array_equal(x.to_numpy(), wanted[name]), name


@parallel(ranks=(4,), env=("node",))
def test_what_begins_early_keeps_to_the_order_of_its_groups(comm):
    """Where some ranks begin more of a step at once than others of a group, the next begins before it."""
    blocks, steps = "P('i', 'j')", ["F = A.T @ B", "G = D @ E"]
    places = "P('i:weights(0, 3)', 'j:bounds(0, 6, 13)')", "P('i:cyclic(3, 7)', 'j:bounds(0, 0, 6)')", blocks, blocks
    shapes = {"A": (6, 13), "B": (6, 6), "D": (13, 6), "E": (6, 6)}
    known = {name: numbers(shape, n) for n, (name, shape) in enumerate(shapes.items())}
    with Mesh((2, 2), comm) as mesh:
        pairs = zip(known.items(), places, strict=True)
        given = {name: DistMatrix.from_numpy(x, mesh, place) for (name, x), place in pairs}
        options = {"algorithm": "pumma", "joint": False, "layouts": {"F": "P(None, None)", "G": blocks}}
        with rma_mm.plan_chain(steps, mesh, **options, **given) as chain:
            assert chain._overlapped.moments[0].begins == [1, 0]
            for turn in range(4):
                with Lagging(comm.rank == turn):
                    found, wanted = chain.execute(**given), by_numpy(steps, known)
                assert all(np.array_equal(found[name].to_numpy(), wanted[name]) for name in "FG")


@parallel(ranks=(2,), env=("node",))
def test_ranks_that_have_little_to_do_meet_the_others(comm):
    """Where one has nothing behind a barrier of a step, and the other has."""
    steps, known = ["r = sum(X, 0)", "Y = (V.T @ r) * sum(V.T, 1)"], {"X": np.ones((2, 2)), "V": np.ones((1, 3))}
    with Mesh((2, 1), comm) as mesh:
        given = {name: DistMatrix.from_numpy(x, mesh, "P(('i', 'j'), None)") for name, x in known.items()}
        layouts = {"r": "P('i', 'j')", "Y": "P('i', 'j')"}
        with rma_mm.plan_chain(steps, mesh, layouts=layouts, joint=False, algorithm="stationary_a", **given) as chain:
            assert np.array_equal(chain.execute(**given)["Y"].to_numpy(), by_numpy(steps, known)["Y"])


@parallel(ranks=(2,), env=("nolocal",))
def test_weights_are_brought_while_the_steps_before_multiply(comm):
    """An MLP whose rows are cut: what ranks need of each other is there from the beginning."""
    with Mesh((2, 1), comm) as mesh:
        free = {name: (shape, "float64") for name, shape in SHAPES.items()}
        forward = {name: x for name, x in free.items() if name != "dY"}
        with rma_mm.plan_chain(MLP, mesh, **forward) as chain:
            steps = [*MLP, *chain.backward("Y")]
        rows = dict.fromkeys(("X", "dY", "W1", "W2", "Z", "H", "Y"), "P('i', None)")
        with rma_mm.plan_chain(steps, mesh, layouts=rows, algorithm="stationary_c", **free) as chain:
            products = [n for n, action in enumerate(chain._actions) if action.schedule]
            early = [m for n, moment in enumerate(chain._overlapped.moments) for m in moment.begins if m > n]
            assert set(early) & set(products[1:])
            known = arrays()
            given = {name: DistMatrix.from_numpy(x, mesh, chain.layouts[name]) for name, x in known.items()}
            moved = [0, 0]
            for turn in range(2):
                for name, x in chain.execute(**given).items():
                    assert np.allclose(x.to_numpy(), by_numpy(steps, known)[name], rtol=1e-12, atol=1e-12), name
                moved[turn] = sum(plan.words.words_inter for plan in chain.plans)
            assert moved[0] == moved[1] > 0


# -- memory ---------------------------------------------------------------------------------------


@parallel(ranks=(2,), env=("nolocal",))
def test_scratch_goes_to_the_step_that_needs_it(comm):
    """What two products need at least fits, also where one of them needs more than half of what is left."""
    shapes = {"X": (4, 4), "W": (4, 4), "U": (64, 96), "V": (96, 48)}
    known = {name: numbers(shape, n) for n, (name, shape) in enumerate(shapes.items())}
    steps = ["H = X @ W", "S = U @ V", "T = U @ (V * 2) + S"]
    with Mesh((2, 1), comm) as mesh:
        given = {name: DistMatrix.from_numpy(x, mesh, "P('i', None)") for name, x in known.items()}
        options = {"layouts": dict.fromkeys("HST", "P('i', None)"), "algorithm": "stationary_c"}
        with rma_mm.plan_chain(steps, mesh, **options, **given) as chain:
            rich = chain.peak_bytes
        limit, refusal = rich, ""
        while not refusal:  # down to the least that will do
            try:
                with rma_mm.plan_chain(steps, mesh, memory_limit=limit, **options, **given) as chain:
                    assert chain.peak_bytes <= limit
                    limit, least, plans = chain.peak_bytes - 1, chain.peak_bytes, [p.peak_bytes for p in chain.plans]
                    found = {name: x.to_numpy() for name, x in chain.execute(**given).items()}
                    wanted = by_numpy(steps, known)
                    assert all(np.array_equal(x, wanted[name]) for name, x in found.items())
            except MemoryLimitError as error:
                refusal = str(error)
        assert f"got {limit} bytes" in refusal and f"need {least}, 1 more" in refusal
        own = [8 * sum(np.prod(shapes.get(x, (64, 48))) // 2 for x in three) for three in ("XWX", "UVS", "UVT")]
        matrices = sum(8 * int(np.prod(shapes.get(x, (64, 48)))) // 2 for x in "XWUVXSTV")
        scratch = [peak - mine for peak, mine in zip(plans, own, strict=True)]
        assert least < rich
        assert max(scratch) > (least - matrices) / 3, (scratch, least, matrices)  # an even split refuses it


# -- misuse ---------------------------------------------------------------------------------------


@parallel(ranks=(2,), env=("node",))
def test_misuse_of_expressions(comm):
    """The same error on every rank, which names the step; and matrices for outputs that are not what they should be."""
    with Mesh((2, 1), comm) as mesh:
        X, W = DistMatrix.from_numpy(numbers((8, 6)), mesh), DistMatrix.from_numpy(numbers((6, 4)), mesh)

        def refused(kind, steps, *words, **inputs):
            same_error(comm, kind, lambda: rma_mm.plan_chain(steps, mesh, **inputs), *words)

        refused(OptionError, ["Y = gelu(X @ W"], "'Y = gelu(X @ W'", "never closed", "\n            ^", X=X, W=W)
        refused(OptionError, ["Y = Q + X"], "reads Q", "\n        ^", X=X)
        refused(ShapeError, ["Y = X @ W + X"], "X @ W is (8, 4), X is (8, 6)", "\n              ^", X=X, W=W)
        refused(DtypeError, ["Y = gelu(X)"], "int64", X=((4, 4), "int64"))
        refused(OptionError, ["Y = X @ W"], "outputs, only", X=X, W=W, only=["Y"], outputs=["Y"])
        refused(OptionError, ["Y = out + 1"], "out: ", out=X)
        refused(OptionError, ["Y = X @ W"], "lr: no step reads it", X=X, W=W, lr=0.5)
        refused(LayoutError, ["Y = X + 1"], "Y", "partial sums", X=X, layouts={"Y": "P(None, None, i=sum)"})
        refused(DisagreementError, ["Y = X * lr"], "lr", "rank 1", X=X, lr=0.5 + comm.rank)
        with rma_mm.plan_chain(["Z = X @ W", "Y = 2 * Z - b"], mesh, X=X, W=W, b=((1, 4), float)) as chain:
            b = DistMatrix.from_numpy(numbers((1, 4)), mesh, chain.layouts["b"])
            Y = DistMatrix.empty((8, 4), mesh, chain.layouts["Y"], float)

            def wrong(kind, *words, **out):
                same_error(comm, kind, lambda: chain.execute(X=X, W=W, b=b, out=out), *words)

            wrong(OptionError, "out: got 'Z'", "the outputs are Y", Z=Y)
            wrong(ShapeError, "Y: ", "(8, 6)", Y=X)
            same_error(comm, OptionError, lambda: chain.execute(X=X, W=W, b=b, out=[Y]), "out: got list")
            same_error(comm, OptionError, lambda: chain.execute(X=X, W=W), "b: it is missing")
            assert chain.execute(X=X, W=W, b=b, out={"Y": Y})["Y"] is Y
            wanted = 2 * (numbers((8, 6)) @ numbers((6, 4))) - numbers((1, 4))
            assert np.array_equal(Y.to_numpy(), wanted)
        with rma_mm.plan_chain(["Y = X + 1", "S = X @ W"], mesh, only=["Y"], X=X, W=W) as chain:
            same_error(comm, LayoutError, lambda: chain.execute(X=X, W=W, out={"Y": X}), "shares memory with X")
            assert np.array_equal(chain.execute(X=X, W=W)["Y"].to_numpy(), numbers((8, 6)) + 1)  # W is not needed
