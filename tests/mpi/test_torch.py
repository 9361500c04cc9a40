"""`rma_mm.torch` beside PyTorch: products and their gradients, layers, DTensors, and what is wrong on every rank."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import warnings
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import torch

import rma_mm
import rma_mm.torch as rt
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import (
    DisagreementError,
    DtypeError,
    FileFormatError,
    LayoutError,
    MeshError,
    OptionError,
    ShapeError,
)
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.planner.adaptation import LOOKS
from rma_mm.torch.products import KeptProducts
from tests.launch import parallel
from tests.mpi.test_library import grid, same_error
from tests.mpi.test_steering import late
from tests.strategies import layouts
from tests.strategies_mpi import shared_examples

EXACT = {"rtol": 1e-12, "atol": 1e-12}
TYPES = ("float64", "float32", "complex128", "complex64", "bfloat16", "float16")


def whole(shape, dtype=torch.float64, seed=0):
    """Small whole numbers, whose products every type holds."""
    random = np.random.default_rng(seed)
    real = torch.from_numpy(random.integers(-2, 3, shape))
    return (real + 1j * torch.from_numpy(random.integers(-2, 3, shape)) if dtype.is_complex else real).to(dtype)


def tile(x, layout, mesh):
    """This rank's part of a whole tensor."""
    place = parse_layout(layout, mesh.grid) if isinstance(layout, str) else layout
    region = place.region(tuple(x.shape), mesh.grid, mesh.rank)
    part = x[np.ix_(*(span.indices for span in region))].clone()
    if place.partial and mesh.is_member:  # the rank at 0 along these axes holds all, the others summands of nothing
        part *= all(mesh.grid.coords(mesh.rank)[axis] == 0 for axis in place.partial)
    return part


def without_sum(layout):
    return Layout(layout.splits, layout.pins)


@st.composite
def products(draw, mesh):
    """Shapes, placements, whether w is transposed, type, and how the tensors lie in memory."""
    m, n, k = (draw(st.integers(1, 9)) for _ in range(3))
    transpose = draw(st.booleans())
    shapes = (m, k), (n, k) if transpose else (k, n), (m, n)
    kinds = ("even", "bounds", "cyclic")
    places = [draw(layouts(mesh, shape, kinds=kinds, skew=False)) for shape in shapes]
    places[2] = draw(st.sampled_from([None, without_sum(places[2])]))
    how = draw(st.sampled_from(["rows", "columns", "strided"]))
    return shapes, places, transpose, draw(st.sampled_from(TYPES)), how


def lying(x, how):
    """The same elements, in rows, in columns, or apart in both directions."""
    if how == "columns":
        return x.t().contiguous().t()
    return torch.empty(2 * x.shape[0], 2 * x.shape[1], dtype=x.dtype)[::2, ::2].copy_(x) if how == "strided" else x


def compare(mesh, example):
    """One product and its gradients; twice, for the second finds everything from the first."""
    shapes, (x_place, w_place, y_place), transpose, dtype, how = example
    dtype = getattr(torch, dtype)
    X, W, G = (whole(shape, dtype, seed) for seed, shape in enumerate(shapes))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wanted = [each.to(wide).requires_grad_() for each in (X, W)]
    Y = wanted[0] @ (wanted[1].T if transpose else wanted[1])
    Y.backward(G.to(wide))
    x, w = (lying(tile(each, place, mesh), how).detach() for each, place in ((X, x_place), (W, w_place)))
    before = [(each.data_ptr(), each.stride()) for each in (x, w)]
    x.requires_grad_()
    w.requires_grad_()
    for _ in range(2):
        x.grad = w.grad = None
        y = rt.mm(x, w, mesh, x_place, w_place, y_place, transpose_w=transpose)
        place = y_place or rt.matrix_of(y, mesh).layout
        assert torch.equal(y.detach().to(wide), tile(Y.detach(), place, mesh))
        y.backward(tile(G, place, mesh))
        for got, true, lies in ((x, wanted[0], x_place), (w, wanted[1], w_place)):
            assert torch.equal(got.grad.to(wide), tile(true.grad, without_sum(lies), mesh))
    assert before == [(each.data_ptr(), each.stride()) for each in (x, w)]


@parallel(ranks=(1, 3, 4), env=("node", "cliques"))
def test_products_and_gradients(comm):
    """Drawn placements of all three, replicas and summands among them, types, and tensors of any strides."""
    with Mesh(grid(comm), comm) as mesh:
        shape = MeshShape(mesh.grid.dims)
        shared_examples(comm, products(shape), lambda _, example: compare(mesh, example), max_examples=12)


@parallel(ranks=(1, 4), env=("node",))
def test_gradcheck(comm):
    """PyTorch's own check, by differences of what every rank computes of the same tensors."""
    torch.manual_seed(0)  # gradients that it draws are those of one replicated y
    with Mesh((comm.size,), comm) as mesh:
        for dtype in (torch.float64, torch.complex128):
            x, w = (whole(shape, dtype).requires_grad_() for shape in ((3, 4), (4, 2)))
            assert torch.autograd.gradcheck(lambda x, w: rt.mm(x, w, mesh, "*,*", "*,*", "*,*"), (x, w), fast_mode=True)
            turned = w.detach().mT.requires_grad_()
            assert torch.autograd.gradcheck(lambda x, w: rt.mm(x, w, mesh, "*,*", "*,*", "*,*", True), (x, turned))
            for given, is_turned in ((w, False), (turned, True)):
                def product(x, w, is_turned=is_turned):
                    return rt.mm(x, w, mesh, "*,*", "*,*", "*,*", is_turned)

                assert torch.autograd.gradgradcheck(product, (x, given), fast_mode=True)


@parallel(ranks=(4,), env=("node",))
def test_gradients_of_gradients(comm):
    """Of a penalty on gradients of two layers, as PyTorch's, on a grid with cut rows and columns."""
    with Mesh((2, 2), comm) as mesh:
        for activation in ("gelu", "relu", None):
            net, plain = pair(mesh, activation)
            X = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 9)))
            whole_x, x = X.clone().requires_grad_(), tile(X, net[0].layouts.x, mesh).requires_grad_()
            for module, given in ((plain, whole_x), (net, x)):
                (first,) = torch.autograd.grad((module(given) ** 2).sum(), given, create_graph=True)
                (first**2).sum().backward()
            torch.testing.assert_close(x.grad, tile(whole_x.grad, net[0].layouts.x, mesh), **EXACT)
            for layer, other in ((net[0], plain[0]), (net[1], plain[-1])):
                for name, part in layer.regions.items():
                    if other.get_parameter(name).grad is not None:
                        grad = other.get_parameter(name).grad[part.selector()]
                        torch.testing.assert_close(layer.get_parameter(name).grad, grad, **EXACT)


@parallel(ranks=(4,), env=("node",))
def test_what_is_kept_goes_with_its_tensors(comm):
    """New tensors in every step, dropped in another order on each rank: neither windows nor plans pile up."""
    with Mesh((2, 2), comm) as mesh:
        w = tile(whole((6, 5)), "j,i", mesh).requires_grad_()
        kept, counts = [], []
        for step in range(16):
            x = tile(whole((8, 6), seed=step), "i,j", mesh).requires_grad_(step % 2 == 0)
            y = rt.mm(x, w, mesh, "i,j", "j,i", "i,j")
            y.relu().sum().backward()
            kept.append((x, y))
            if step % (mesh.rank + 1) == 0:
                kept.clear()
            if step % 4 == 3:
                kept.clear()
                del x, y
                gc.collect()
                mesh.arena.collect()
                counts.append((len(mesh.arena.live), len(mesh.prepared)))
        assert counts[1] == counts[-1]


@parallel(ranks=(3,), env=("node",))
def test_what_is_known_opens_with_one_ballot(comm):
    """As `Plan.execute` has; each further gradient has its own. Ranks that differ then raise the same error."""
    with Mesh((3,), comm) as mesh:
        places, last = ("i,*", "*,*", "i,*"), mesh.rank == 2
        x, v, w = (whole(shape).requires_grad_() for shape in ((2, 3), (2, 3), (3, 4)))
        given, dy, other = x.detach(), whole((2, 4)), whole((3, 5)).requires_grad_()

        def calls(act):
            before = mesh.group.calls
            act()
            return mesh.group.calls - before

        def wrong(x=x, w=w):
            return lambda: rt.mm(x, w, mesh, *places)

        for _ in range(2):
            rt.mm(x, w, mesh, *places).backward(dy)
            rt.mm(v, w, mesh, *places).backward(dy)
        y = rt.mm(x, w, mesh, *places)
        assert calls(wrong()) == 1
        assert calls(lambda: y.backward(dy)) == 2
        with torch.no_grad():
            new = whole((2, 3), seed=7)
            assert calls(wrong(new)) > 1  # seen for the first time
            assert calls(wrong(new)) == calls(wrong(given)) == 1  # given is on memory that is known
            assert torch.equal(wrong(given)(), given @ w)
        for _ in range(2):
            same_error(comm, ShapeError, wrong(w=other if last else w), "w: got a tile of (3, 5) on rank 2")
            same_error(comm, ShapeError, wrong(x[:, :2] if last else x), "x: got a tile of (2, 2) on rank 2")
            same_error(comm, DisagreementError, wrong(x.float(), w.float()) if last else wrong(), "element type")
            same_error(comm, LayoutError, wrong(x.to("meta") if last else x), "x: got a tensor on meta", "rank 2")
            same_error(comm, DisagreementError, wrong(x.detach(), w.detach()) if last else wrong(), "gradients wanted")
            one, two = rt.mm(x, w, mesh, *places), rt.mm(v, w, mesh, *places)
            same_error(comm, DisagreementError, lambda: (one if last else two).backward(dy), "A: ")  # noqa: B023
            with torch.set_grad_enabled(not last):
                same_error(comm, DisagreementError, wrong(), "gradients wanted")
            assert torch.equal(wrong()(), x @ w)
        square = whole((3, 3), seed=4)
        changes = (x.mul_, 2), (setattr, x, "data", 3 * x.detach()), (square.t_,)
        with torch.no_grad():
            for change, *arguments in changes:  # the same tensors, with something else in them
                for given, place in ((x, "i,*"), (square, "*,*")):
                    assert torch.equal(rt.mm(given, w, mesh, place, "*,*", place), given @ w)
                change(*arguments)
            assert torch.equal(rt.mm(square, w, mesh, "*,*", "*,*", "*,*"), square @ w)


@parallel(ranks=(2,), env=("node",))
def test_plans_of_tensors_change_over_too(comm):
    """What takes longer than predicted goes on by groups, and is right before and after."""
    with late(comm) as mesh:
        x, w = (tile(whole((48, 48), seed=seed), "i,j", mesh).requires_grad_() for seed in (1, 2))
        wanted = [whole((48, 48), seed=seed).requires_grad_() for seed in (1, 2)]
        (wanted[0] @ wanted[1]).sum().backward()
        for _ in range(2 * LOOKS + 6):
            x.grad = w.grad = None
            rt.mm(x, w, mesh, "i,j", "i,j", "i,j").sum().backward()
            for mine, true in ((x, wanted[0]), (w, wanted[1])):
                assert torch.equal(mine.grad, tile(true.grad, "i,j", mesh))
        assert mesh.metrics.tally.plan_changes >= 3  # y, and the gradients of x and w


@parallel(ranks=(3,), env=("node",))
def test_the_same_tensors_in_other_places(comm):
    """A tensor by itself turned, as its own gradient, of a matrix that a rank has closed: others come after it."""
    with Mesh((3,), comm) as mesh:
        x, v, whole_places = whole((3, 4)), whole((3, 4), seed=1), ("*,*", "*,*", "*,*")
        for other in (x, v, x):
            y = rt.mm(x, other, mesh, *whole_places, True)
            assert torch.equal(y, x @ other.T)
        square, w = rt.empty((4, 4), mesh, "*,*", torch.float64), whole((4, 4), seed=2).requires_grad_()
        square[...] = whole((4, 4))
        for dy in (square, whole((4, 4), seed=3)):
            w.grad = None
            rt.mm(square, w, mesh, *whole_places).backward(dy)
            assert torch.equal(w.grad, square.T @ dy)
        D = rt.matrix_of(y, mesh)
        if comm.rank == 1:
            D.close()
        assert torch.equal(rt.mm(y, v, mesh, *whole_places), y @ v)


@parallel(ranks=(2,), env=("node",))
def test_tensors_that_live_on_do_not_use_up_the_windows(comm):
    """Slices of one tensor, each of which is seen once, and those that come again."""
    with Mesh((2,), comm) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rma_mm.torch.kept.EXPOSED", 4)
        for name, flavour in FLAVOURS.items():
            patch.setitem(FLAVOURS, name, replace(flavour, at_most=16))
        data, w = whole((40, 4)), whole((4, 3), seed=1)
        for n in (*range(20), 0, 19, 18, 0):
            x = data[2 * n : 2 * n + 2]
            assert torch.equal(rt.mm(x, w, mesh, "*,*", "*,*", "*,*"), x @ w)


def test_arrays_of_tensors_share_their_memory():
    """Both ways, of every type that both have."""
    for dtype in rt.tensors.TYPES:
        t = torch.arange(6).reshape(2, 3).to(dtype).t()
        array = rt.tensors.array_of(t)
        array[1, 1] = 0
        back = rt.tensors.tensor_of(array)
        assert (array.shape, array.dtype.name) == ((3, 2), str(dtype).removeprefix("torch."))
        assert t[1, 1] == 0 and torch.equal(back, t)
        assert (back.data_ptr(), back.stride()) == (t.data_ptr(), t.stride())


LINEAR = [((4,), "gelu"), ((2, 2), "relu"), ((2, 2), None)]


def pair(mesh, activation):
    """A column layer and a row layer, and what PyTorch makes of the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = [torch.nn.Linear(9, 11, dtype=torch.float64), torch.nn.Linear(11, 5, dtype=torch.float64)]
        torch.manual_seed(3 + mesh.rank)  # rank 0's counts
        first = rt.Linear(9, 11, mesh, activation=activation, dtype=torch.float64)
        second = rt.Linear(11, 5, mesh, placement="row", dtype=torch.float64)
    apply = {"gelu": torch.nn.GELU(), "relu": torch.nn.ReLU(), None: torch.nn.Identity()}[activation]
    return torch.nn.Sequential(first, second), torch.nn.Sequential(plain[0], apply, plain[1])


@parallel(ranks=(4,), env=("node",))
@pytest.mark.parametrize(("shape", "activation"), LINEAR)
def test_two_layers(comm, shape, activation):
    """Values, gradients and steps of an optimiser as PyTorch's, to 1e-12; the weights stay where they are."""
    with Mesh(shape, comm) as mesh:
        net, plain = pair(mesh, activation)
        X = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 9)))
        optimisers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
        places = [each.data_ptr() for each in net.parameters()]
        for _ in range(2):
            given = X.clone().requires_grad_()
            Y = plain(given)
            (Y**2).sum().backward()
            x = tile(X, net[0].layouts.x, mesh).requires_grad_()
            y = net(x)
            torch.testing.assert_close(y.detach(), tile(Y.detach(), net[1].layouts.y, mesh), **EXACT)
            (y**2).sum().backward()
            torch.testing.assert_close(x.grad, tile(given.grad, net[0].layouts.x, mesh), **EXACT)
            for layer, other in ((net[0], plain[0]), (net[1], plain[-1])):
                for name, part in layer.regions.items():
                    grad = other.get_parameter(name).grad[part.selector()]
                    torch.testing.assert_close(layer.get_parameter(name).grad, grad, **EXACT)
            with torch.no_grad():  # the activation is fused then
                torch.testing.assert_close(net(x), y.detach(), **EXACT)
            torch.testing.assert_close(net(x[None])[0], y, **EXACT)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
        assert places == [each.data_ptr() for each in net.parameters()]


@parallel(ranks=(3,), env=("node",))
def test_copies_of_layers_and_ranks_without_columns(comm):
    """A deep copy stays on its mesh; what is folded has as many rows where a rank has nothing of x."""
    with Mesh((3,), comm) as mesh:
        layer = rt.Linear(2, 4, mesh, placement="row", dtype=torch.float64)
        twin, x = copy.deepcopy(layer), tile(whole((6, 2)), layer.layouts.x, mesh)
        x, ends = x.reshape(2, 3, x.shape[1]), comm.allgather(x.shape[1])
        assert twin.mesh is mesh and min(ends) == 0
        assert (y := layer(x)).shape == (2, 3, 4) and torch.equal(twin(x), y)


@parallel(ranks=(3,), env=("node",))
def test_state_of_layers(comm, tmp_path):
    """Whole tensors in and out, from a file of them and from an index; each rank takes its own part."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    with Mesh((3,), comm) as mesh:
        net, plain = pair(mesh, None)
        begun = rt.full_state_dict(net)
        for name, value in plain.state_dict().items():
            assert torch.equal(begun[name.replace("2", "1")], value)
        new = {name: torch.arange(value.numel()).to(value).reshape(value.shape) for name, value in begun.items()}
        files = {name: f"{name[0]}.safetensors" for name in new}
        if comm.rank == 0:
            for file in set(files.values()):
                save_file({f"m.{name}": new[name] for name in new if files[name] == file}, tmp_path / file)
            index = {"weight_map": {f"m.{name}": file for name, file in files.items()}}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        comm.Barrier()
        rt.load_safetensors(net, tmp_path / "model.safetensors.index.json", "m.")
        got = rt.full_state_dict(net, root=1)
        assert got.keys() == (new.keys() if comm.rank == 1 else set())
        assert all(torch.equal(got[name], new[name]) for name in got)
        shards = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(begun)
        assert all(torch.equal(value, begun[name]) for name, value in rt.full_state_dict(net).items())
        net.load_state_dict(shards)
        assert all(torch.equal(value, new[name]) for name, value in rt.full_state_dict(net).items())
        one = tmp_path / "0.safetensors"
        same_error(comm, FileFormatError, lambda: rt.load_safetensors(net, one, "m."), "m.1.weight")
        same_error(comm, FileFormatError, lambda: rt.load_safetensors(net, tmp_path / "no"), "no tensor 0.weight")
        other = torch.nn.Sequential(rt.Linear(9, 4, mesh, dtype=torch.float64))
        same_error(comm, FileFormatError, lambda: rt.load_safetensors(other, one, "m."), "(11, 9)", "(4, 9)")
        same_error(comm, OptionError, lambda: rt.full_state_dict(torch.nn.Linear(2, 2)), "no rma_mm.torch.Linear")


@parallel(ranks=(1, 3), env=("node",))
def test_errors_are_the_same_on_every_rank(comm):
    """What is no tile, what does not fit, and what only some ranks ask for."""
    with Mesh((comm.size,), comm) as mesh:
        x, w = torch.ones(2, 3), torch.ones(3, 4)
        last = mesh.rank == mesh.size - 1

        def wrong(x=x, w=w, layouts=("*,*", "*,*", "*,*"), **options):
            return lambda: rt.mm(x, w, mesh, *layouts, **options)

        same_error(comm, LayoutError, wrong(x=np.ones((2, 3)) if last else x), "x: got ndarray")
        same_error(comm, LayoutError, wrong(w=w.to("meta")), "w: got a tensor on meta", "w.cpu()")
        same_error(comm, LayoutError, wrong(x=x.to_sparse()), "x.to_dense()")
        same_error(comm, ShapeError, wrong(x=x[0]), "(3,)", "two dimensions")
        same_error(comm, ShapeError, wrong(w=torch.ones(4, 4)), "x is (2, 3), w is (4, 4)", "3 and 4")
        same_error(comm, DtypeError, wrong(x=x.double()), "float64", "float32")
        same_error(comm, DtypeError, wrong(x=x.to(torch.float8_e5m2), w=w.to(torch.float8_e5m2)), "float8_e5m2")
        same_error(comm, LayoutError, wrong(layouts=("k,*", "*,*", None)), "'k'")
        same_error(comm, LayoutError, wrong(layouts=(3, "*,*", None)), "x_layout: got 3")
        same_error(comm, MeshError, lambda: rt.mm(x, w, None, "*,*", "*,*"), "mesh: got NoneType")
        same_error(comm, LayoutError, wrong(layouts=([] if last else "*,*", "*,*", None)), "x_layout: got []")
        same_error(comm, OptionError, lambda: rt.mm(x, w, mesh, "*,*", "*,*", None, x[0]), "transpose_w: got tensor")
        same_error(comm, LayoutError, lambda: rt.matrix_of(x, mesh), "(2, 3)")
        same_error(comm, LayoutError, lambda: rt.matrix_of(None, mesh), "tensor: got NoneType")
        for call in (lambda: rt.matrix_of(x, None), lambda: rt.empty((2, 3), None, "*,*", torch.float32)):
            same_error(comm, MeshError, call, "mesh: got NoneType")
        if comm.size > 1:
            same_error(comm, ShapeError, wrong(x=torch.ones(2 + last, 3)), "(3, 3) on rank 2", "(2, 3)")
            same_error(comm, DisagreementError, wrong(x=x.clone().requires_grad_(last)), "gradients wanted")
            same_error(comm, DisagreementError, wrong(layouts=("*,*", "*,*", "i,*" if last else "*,*")), "layout")
            same_error(comm, DisagreementError, wrong() if last else lambda: mesh.arena.mesh and DistMatrix.empty(
                (1, 1), mesh, dtype="f4"), "torch.mm on rank 2")
        same_error(comm, OptionError, lambda: rt.Linear(3, 4, mesh, activation="tanh"), "'tanh'", "relu, gelu")
        same_error(comm, OptionError, lambda: rt.Linear(3, 4, mesh, activation=["relu"]), "['relu']")
        for dtype in ("float32", torch.int32):
            given = dtype if last else torch.float32
            same_error(comm, DtypeError, lambda given=given: rt.Linear(3, 4, mesh, dtype=given), f"got {dtype!r}")
        same_error(comm, LayoutError, lambda: rt.Linear(3, 4, mesh, placement="*,i"), "x_layout")
        same_error(comm, LayoutError, lambda: rt.Linear(3, 4, mesh, placement="*,i", x_layout="*,i"), "bias")
        layer = rt.Linear(3, 4, mesh, dtype=torch.float32)
        layer.bias = torch.nn.Parameter(torch.ones(4 + (mesh.rank == 0)))
        for _ in range(2):  # what was refused is not known the next time
            same_error(comm, ShapeError, lambda: layer(x), "bias: got shape (5,) on rank 0")
        sums = Layout(((), ()), partial=("k",))
        same_error(comm, LayoutError, wrong(layouts=(sums, "*,*", None)), "x_layout", "k=sum")
        torch.testing.assert_close(wrong()(), x @ w)  # all goes on
        y = rt.mm(x.requires_grad_(), w, mesh, "*,*", "*,*", "*,*")
        with torch.no_grad():
            w += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@parallel(ranks=(2,), env=("node",))
def test_memory_of_many_kinds_is_bounded(comm):
    """Shapes that never come again: plans and the memory for their results go."""
    with Mesh((2,), comm) as mesh, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rma_mm.torch.products.PRODUCTS", 3)
        kept = KeptProducts.of(mesh)
        for m in range(2, 9):
            x, w = torch.ones(m, 4), torch.ones(4, 2)
            assert torch.equal(rt.mm(x, w, mesh, "*,*", "*,*", "*,*"), x @ w)
        assert (len(kept.kinds), len(kept.by_tiles), len(kept.tensors.pools)) == (3, 3, 3)
        y = rt.mm(x, w, mesh, "*,*", "*,*", "*,*")
        D = rt.matrix_of(y, mesh)  # from now on its user's
        del y
        assert not torch.equal(rt.mm(2 * x, w, mesh, "*,*", "*,*", "*,*"), torch.from_numpy(D.tile))
        again = rt.mm(x, w, mesh, "*,*", "*,*", "*,*")
        assert not np.shares_memory(again.numpy(), D.tile)


DTENSORS = [(8, 4), (5, 3), (1, 1)]


@parallel(ranks=(4,), env=("node",))
def test_dtensors(comm, tmp_path):
    """Both ways on the same memory, uneven shards and summands too, and what does not fit."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    with Mesh((2, 2), comm) as mesh:
        same_error(comm, MeshError, lambda: rt.device_mesh(mesh), "init_process_group")
        dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=4, rank=(comm.rank + 1) % 4)
        same_error(comm, MeshError, lambda: rt.device_mesh(mesh), "[[1, 2], [3, 0]]", "rank=mesh.rank")
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{tmp_path}/other", world_size=comm.size, rank=comm.rank)
        try:
            devices = rt.device_mesh(mesh)
            assert devices is rt.device_mesh(mesh)
            for dtype in (torch.float32, torch.bfloat16):
                for shape in DTENSORS:
                    X = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
                    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(1))):
                        t = distribute_tensor(X, devices, placements)
                        D = rt.from_dtensor(t, mesh)
                        assert torch.equal(torch.from_numpy(D.to_numpy().astype("f4")), X.float())
                        back = rt.to_dtensor(D, devices)
                        assert (back.placements, back.shape) == (placements, X.shape)
                        assert back.to_local().data_ptr() == t.to_local().data_ptr()
                        assert torch.equal(rt.to_dtensor(D.T).full_tensor(), X.T)
            sums = DTensor.from_local(X, devices, (Replicate(), Partial("sum")), run_check=False)
            assert (rt.from_dtensor(sums, mesh).to_numpy().astype("f4") == 2 * X.float().numpy()).all()
            assert rt.to_dtensor(rt.from_dtensor(sums, mesh)).placements == sums.placements
            line = Mesh((4,), comm)
            same_error(comm, MeshError, lambda: rt.from_dtensor(t, line), "[[0, 1], [2, 3]]", "[0, 1, 2, 3]")
            same_error(comm, LayoutError, lambda: rt.from_dtensor(t.clone().requires_grad_(), mesh), "t.detach()")
            average = DTensor.from_local(X, devices, (Replicate(), Partial("avg")), run_check=False)
            same_error(comm, LayoutError, lambda: rt.from_dtensor(average, mesh), "Partial('sum')")
            same_error(comm, LayoutError, lambda: rt.from_dtensor(X, mesh), "t: got Tensor")
            same_error(comm, ShapeError, lambda: rt.from_dtensor(distribute_tensor(X[0], devices), mesh), "(1,)")
            same_error(comm, LayoutError, lambda: rt.mm(t, t, mesh, "*,*", "*,*"), "DTensor", "to_local()")
            odd = DistMatrix.from_numpy(np.ones((5, 3)), mesh, "i,j")
            same_error(comm, LayoutError, lambda: rt.to_dtensor(odd), "P('i:bounds(0, 3, 5)', 'j:bounds(0, 2, 3)')")
            line.close()
        finally:
            dist.destroy_process_group()


@parallel(ranks=(3,), env=("node",))
def test_random_numbers_drawn_after_a_layer_are_alike(comm):
    """As after torch.nn.Linear on rank 0, whatever the seeds of other ranks were."""
    with Mesh((comm.size,), comm) as mesh, torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        torch.nn.Linear(5, 6)
        wanted = torch.randn(4)
        torch.manual_seed(7)
        rt.Linear(5, 6, mesh)
        assert torch.equal(torch.randn(4), wanted)
        torch.manual_seed(7 + mesh.rank)
        rt.Linear(5, 6, mesh)
        drawn = comm.allgather(torch.randn(4).tolist())
        assert drawn == [wanted.tolist()] * comm.size


@parallel(ranks=(1, 4), env=("node", "cliques"), timeout=120)
def test_habits_of_torch(comm):
    """Default layouts, rows of a batch, compiled and profiled code, pickles, and a batch that all ranks pass."""
    with Mesh(comm.size, comm) as mesh:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            rt.Linear(8, 12, mesh, activation="gelu"), rt.Linear(12, 4, mesh, placement="row", activation="relu"),
        ).double()
        rows, data = net[0].rows(10), torch.randn(10, 8, dtype=torch.float64)
        assert rows == net[0].layouts.x.region((10, 8), mesh.grid, mesh.rank)[0].as_slice()
        y = net(data[rows])
        y.sum().backward()
        wanted = [each.grad.clone() for each in net.parameters()]
        net.zero_grad()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        z = compiled(data[rows])
        z.sum().backward()
        assert torch.allclose(y, z, atol=1e-12)
        assert all(torch.allclose(a, b.grad, atol=1e-12) for a, b in zip(wanted, net.parameters(), strict=True))
        with torch.no_grad():
            assert torch.allclose(compiled(data[rows]), y, atol=1e-12)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            net(data[rows])
        assert sum(each.count for each in seen.key_averages() if each.key == "rma_mm::multiply") == 2
        for again in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
            assert torch.allclose(again(data[rows]), y, atol=1e-12)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(data[:7])
        said = [str(each.message) for each in caught if "passed the same numbers" in str(each.message)]
        assert comm.allgather(bool(said)) == [rank == 0 and mesh.grid[0] > 1 for rank in range(comm.size)]
        a, b = whole((6, 6)), whole((6, 6), seed=1)
        tiles = [torch.from_numpy(rma_mm.DistMatrix.from_numpy(each.numpy(), mesh).tile.copy()) for each in (a, b)]
        product = rt.mm(*tiles, mesh)
        assert np.array_equal(rt.matrix_of(product, mesh).to_numpy(), (a @ b).numpy())
        assert np.array_equal(rt.matrix_of(rt.mm(product, tiles[1], mesh), mesh).to_numpy(), (a @ b @ b).numpy())


@parallel(ranks=(2,), env=("node",))
def test_a_layer_is_unpickled_onto_an_open_mesh(comm):
    mesh = Mesh((1, 2), comm)
    raw = pickle.dumps(rt.Linear(4, 4, mesh))
    mesh.close()
    with pytest.raises(MeshError, match="on a mesh 1x2, axes i, j; make such a Mesh first"):
        pickle.loads(raw)
    with Mesh((1, 2), comm):
        assert pickle.loads(raw).mesh.grid.dims == (1, 2)


LAYER = [
    "N1 = layer_norm(X) * g1 + c1", "Q = split_heads(N1 @ Wq + bq, 4, 8)", "K = split_heads(N1 @ Wk + bk, 4, 8)",
    "V = split_heads(N1 @ Wv + bv, 4, 8)", "S = softmax(bmm_nt(Q, K, 32) * scale)",
    "A = X + merge_heads(bmm(S, V, 32), 4, 8) @ Wo + bo", "N2 = layer_norm(A) * g2 + c2",
    "Y = A + gelu(N2 @ W1 + b1) @ W2 + b2",
]
"""A transformer layer of 8 heads for a batch of 4, as PyTorch's with norm_first."""


@parallel(ranks=(4,), env=("node",), timeout=240)
def test_a_transformer_layer_as_one_chain(comm):
    """Forward and backward, 512 wide, of 128 positions, beside torch in float64."""
    wide, positions = 512, 128
    with Mesh(4, comm) as mesh, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            wide, 8, 2048, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).double()
        x = torch.randn(4, positions, wide, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        own = layer.self_attn
        cuts = [slice(n * wide, (n + 1) * wide) for n in range(3)]
        rows = {"bo": own.out_proj.bias, "g1": layer.norm1.weight, "c1": layer.norm1.bias, "g2": layer.norm2.weight,
                "c2": layer.norm2.bias, "b1": layer.linear1.bias, "b2": layer.linear2.bias}
        turned = {"Wo": own.out_proj.weight, "W1": layer.linear1.weight, "W2": layer.linear2.weight}

        def arrays(of):
            found = {name: of(each).detach().numpy()[None] for name, each in rows.items()}
            found |= {name: of(each).detach().numpy().T for name, each in turned.items()}
            weight, bias = of(own.in_proj_weight).detach().numpy(), of(own.in_proj_bias).detach().numpy()
            for name, cut in zip("qkv", cuts, strict=True):
                found |= {f"W{name}": weight[cut].T, f"b{name}": bias[cut][None]}
            return found | {"X": of(x).detach().numpy().reshape(-1, wide)}

        inputs, wanted = arrays(lambda each: each), arrays(lambda each: each.grad)
        free = {name: (each.shape, "float64") for name, each in inputs.items()} | {"scale": (wide // 8) ** -0.5}
        with rma_mm.plan_chain(LAYER, mesh, **free) as chain:
            steps = [*LAYER, *chain.backward("Y")]
        inputs["dY"] = dy.numpy().reshape(-1, wide)
        free["dY"] = inputs["dY"].shape, "float64"
        with rma_mm.plan_chain(steps, mesh, **free) as chain:
            given = {name: DistMatrix.from_numpy(each, mesh, chain.layouts[name]) for name, each in inputs.items()}
            found = {name: each.to_numpy() for name, each in chain.execute(**given, scale=free["scale"]).items()}
        assert {f"d{name}" for name in wanted} <= set(found)
        wanted = {f"d{name}": each for name, each in wanted.items()} | {"Y": y.detach().numpy().reshape(-1, wide)}
        for name, each in wanted.items():
            assert np.abs(found[name] - each).max() <= 1e-12 * max(1, np.abs(each).max()), name
