"""Machines as text, their laws, and figures found again in seconds that were made by the laws."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import MachineError, WindowError
from rma_mm.flavours import CREATED, DEFAULT, FLAVOURS, Flavour, register
from rma_mm.kernels.cache import cache_folder
from rma_mm.policy.model.machine import COPY, PAGE, TYPICAL, Cost, Kernel, Machine, described
from rma_mm.runtime.calibration import cache
from rma_mm.runtime.calibration.fitting import cost_of, kernel_of, nonnegative
from rma_mm.runtime.calibration.local import SHAPES
from rma_mm.runtime.calibration.site import Site

MEASURED = Machine(
    "here",
    {
        "own": {COPY: Cost(1e-6, 1e-10)},
        "node": {
            "shared.get": Cost(2e-6, 2e-10), "created.get": Cost(4e-6, 5e-10), "created.get busy": Cost(5e-3, 0.0),
        },
        "between": {"broadcast": Cost(9e-6, 1e-9), "created.get": Cost(1e-5, 2e-9)},
    },
    {"float32 blas": Kernel(1e-6, 2e-11, 3e-11, 4e-11, 5e-11, 6e-11), "int8 numba": Kernel(2e-6, 1e-10)},
    cores=6, threads=2, nodes_per_host=2, operation=3e-7, meeting=4e-6, memory=2**30, measured=True,
    corrections={"accumulate": 1.25},
)


# -- as text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [MEASURED, TYPICAL])
def test_a_machine_survives_as_text(machine: Machine) -> None:
    assert Machine.from_json(json.loads(json.dumps(machine.as_json()))) == machine


def test_files_written_before_each_transfer_had_a_hidden_share_are_read() -> None:
    text = TYPICAL.as_json()
    for costs in text["links"].values():
        costs.update({name: figures[:2] for name, figures in costs.items()})
    found = Machine.from_json({**text, "hidden": 0.25})
    assert {cost.hidden for cost in found.costs["between"].values()} == {0.25}
    assert found.costs["between"]["shift"].beta == TYPICAL.costs["between"]["shift"].beta
    with pytest.raises(MachineError, match="from 0 to 1"):
        Machine.from_json({**text, "hidden": 1.5})


def figures(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every number of a machine's JSON."""
    if isinstance(found, dict):
        return [way for name, each in found.items() for way in figures(each, (*path, name))]
    if isinstance(found, list):
        return [way for at, each in enumerate(found) for way in figures(each, (*path, at))]
    return [path] if isinstance(found, int | float) and not isinstance(found, bool) else []


def changed(path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """The JSON of a machine, something done to one of its entries."""
    text: dict[str, Any] = json.loads(json.dumps(MEASURED.as_json()))
    at: Any = text
    for name in path[:-1]:
        at = at[name]
    change(at, path[-1])
    return text


NUMBERS = figures(MEASURED.as_json())
WRONG = [-1e-9, -0.0, math.nan, math.inf, None, "fast", True, [1.0]]


IMPOSSIBLE = [(path, wrong) for path in NUMBERS for wrong in WRONG if (path, wrong) != (("memory",), None)]


def test_an_impossible_figure_is_named() -> None:
    for path, wrong in IMPOSSIBLE:
        with pytest.raises(MachineError) as caught:
            Machine.from_json(changed(path, lambda at, name, wrong=wrong: at.__setitem__(name, wrong)))
        named = [str(name) for name in path if not isinstance(name, int)]
        assert named[-1] in str(caught.value), (path, wrong)
        assert repr(wrong) in str(caught.value), (path, wrong)


@pytest.mark.parametrize(
    "path", [("links",), ("links", "node"), ("kernels",), ("corrections",), ("operation",), ("meeting",)]
)
def test_a_missing_figure_is_named(path: tuple[str, ...]) -> None:
    with pytest.raises(MachineError, match=path[-1]):
        Machine.from_json(changed(path, lambda at, name: at.pop(name)))


def test_a_correction_that_makes_products_free_is_refused() -> None:
    given = MEASURED.as_json() | {"corrections": {"in place": 0.0}}
    with pytest.raises(MachineError, match=r"in place is 0.*above 0"):
        Machine.from_json(given)


@pytest.mark.parametrize("path", [("links", "own"), ("links", "between"), ("kernels",)])
def test_an_empty_table_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(MachineError, match="at least"):
        Machine.from_json(changed(path, lambda at, name: at[name].clear()))


@pytest.mark.parametrize("found", [[], "machine", 3, None, {"links": []}, {}])
def test_something_else_is_refused(found: Any) -> None:
    with pytest.raises(MachineError, match="links"):
        Machine.from_json(found)


# -- laws -----------------------------------------------------------------------------------------


def test_costs_fall_back_on_their_kin() -> None:
    created = MEASURED.costs["node"]["created.get"]
    assert MEASURED.cost("node", "get", "created") == created
    assert MEASURED.cost("node", "get", "created", busy=True) == Cost(5e-3, 0.0)
    assert MEASURED.cost("node", "accumulate", "created") == created
    assert MEASURED.cost("node", "get", "allocated", busy=True) == MEASURED.costs["node"]["shared.get"]
    assert MEASURED.cost("between", "reduce-scatter") == MEASURED.costs["between"]["broadcast"]
    assert MEASURED.cost("own", "get") == MEASURED.costs["own"][COPY]
    assert MEASURED.kernel("int8", "numba").point == 1e-10
    assert MEASURED.kernel("bool", "numpy") == MEASURED.kernels["float32 blas"]
    assert (MEASURED.has("int8", "numba"), MEASURED.has("int8", "blas")) == (True, False)


def test_a_flavour_that_was_not_measured_costs_what_those_like_it_do() -> None:
    with mock.patch.dict(FLAVOURS):
        register(Flavour(name="parcel", window="parcels:Window", like=CREATED))
        register(Flavour(name="quick", window="parcels:Window", like=FLAVOURS["parcel"], needs_progress=False))
        register(Flavour(name="plain", window="parcels:Window"))
        node = MEASURED.costs["node"]
        assert MEASURED.cost("node", "get", "parcel") == MEASURED.cost("node", "put", "parcel") == node["created.get"]
        assert MEASURED.cost("node", "get", "parcel", busy=True) == node["created.get busy"]
        assert MEASURED.cost("node", "get", "quick", busy=True) == node["created.get"]  # it need not wait for those
        assert MEASURED.cost("node", "accumulate", "plain", busy=True) == node["shared.get"]
        mine = {**node, "parcel.get": Cost(7e-6, 0.0)}
        machine = replace(MEASURED, costs={**MEASURED.costs, "node": mine})
        assert machine.cost("node", "get", "quick") == machine.cost("node", "get", "parcel") == Cost(7e-6, 0.0)
    for wrong in ("", "two words", "a.b", DEFAULT.name):
        with pytest.raises(WindowError, match=f"register: got the name '{wrong}'"):
            register(Flavour(name=wrong, window="parcels:Window"))
    with pytest.raises(WindowError, match="'module:Class'"):
        register(Flavour(name="parcel", window="parcels.Window"))
    with pytest.raises(WindowError, match="'parcel'; there are shared, allocated, created"):
        MEASURED.cost("node", "get", "parcel")


def test_seconds() -> None:
    assert Cost(2.0, 3.0).seconds(10, transfers=4) == 38.0
    assert Kernel(1, 2, 3, 4, 5).seconds(m=2, n=3, k=5) == 1 + 2 * 30 + 3 * 10 + 4 * 15 + 5 * 6
    assert [Kernel(0, 0, 0, 0, 5, 2).seconds(2, 3, 5, stride) for stride in (4000, 4096, 8192)] == [30, 42, 42]
    assert MEASURED.slots == 3
    assert [MEASURED.meet(ranks) for ranks in (1, 2, 8)] == [4e-6, 4e-6, 12e-6]


def test_a_described_machine_multiplies_at_its_rate() -> None:
    machine = described("m", cores=4, gflops=100, memory_rate=1e10, latency=1e-6, bandwidth=1e9)
    assert 2e-9 * 1000**3 / machine.kernel("float32").seconds(1000, 1000, 1000) == pytest.approx(100, rel=0.1)
    assert machine.cost("between", "get").seconds(1e9) == pytest.approx(1, rel=0.01)


# -- figures from seconds -------------------------------------------------------------------------

FIGURE = st.floats(1e-3, 1e3)


@given(FIGURE, FIGURE, st.integers(1, 9), st.integers(1, 9))
def test_a_cost_is_found_again(alpha: float, beta: float, calls: int, volume: int) -> None:
    points = [(calls, volume * size, calls * alpha + volume * size * beta) for size in (1.0, 64.0, 1024.0)]
    found = cost_of(points)
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=1e-6)


def test_a_cost_of_one_size() -> None:
    assert cost_of([(2.0, 16.0, 6.0)]) == Cost(3.0, 0.0)


@given(st.lists(st.floats(1e-7, 1e-2), min_size=3, max_size=3))
def test_a_cost_is_never_negative_whatever_was_measured(seconds: list[float]) -> None:
    found = cost_of([(1.0, size, each) for size, each in zip((2e3, 1e5, 2e6), seconds, strict=True)])
    assert found.alpha >= 0
    assert found.beta >= 0
    assert math.isfinite(found.seconds(1e6))


@given(st.lists(st.sampled_from([0.0, 1e-11, 1e-10, 1e-9]), min_size=6, max_size=6))
def test_a_kernel_is_found_again(parts: list[float]) -> None:
    made = Kernel(1e-6 + parts[0], 2e-11, *parts[2:])
    strides = [(m, n, k, PAGE if is_aliased else 64) for m, n, k, is_aliased in SHAPES]
    found = kernel_of(SHAPES, [made.seconds(*shape) for shape in strides])
    assert [found.seconds(*shape) for shape in strides] == pytest.approx([made.seconds(*shape) for shape in strides])
    assert found.point == pytest.approx(made.point, rel=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_least_squares_are_least_among_the_nonnegative(seed: int) -> None:
    """No step along an axis, nor from any one of many random points, does better."""
    rng = np.random.default_rng(seed)
    table, wanted = rng.standard_normal((8, 4)), rng.standard_normal(8)
    found = nonnegative(table, wanted)
    assert (found >= 0).all()
    slope = table.T @ (table @ found - wanted)  # the conditions of Karush, Kuhn and Tucker
    assert (slope >= -1e-9).all()
    assert np.abs(slope * found).max() <= 1e-9


# -- who moves what -------------------------------------------------------------------------------


def site(nodes: str, hosts: str = "", cores: int = 2, threads: int = 1) -> Site:
    """Ranks on nodes and hosts, a digit each."""
    return Site(0, tuple(map(int, nodes)), tuple(map(int, hosts or "0" * len(nodes))), cores, threads)


@pytest.mark.parametrize("nodes", ["01", "0000", "00011", "0101", "012", "00112233", "000001"])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("link", ["node", "between"])
def test_pairs_are_on_their_link(nodes: str, busy: bool, link: str) -> None:
    here = site(nodes)
    pairs = here.pairs(link, busy)
    assert bool(pairs) == here.has(link)
    for origin, target in pairs.items():
        assert origin != target
        assert (nodes[origin] == nodes[target]) == (link == "node")
    if busy:  # who multiplies moves nothing
        assert not set(pairs) & set(pairs.values())
    else:
        wanted = [rank for rank in range(len(nodes)) if link == "between" or nodes.count(nodes[rank]) > 1]
        assert sorted(pairs) == (wanted if here.has(link) else [])


@pytest.mark.parametrize("nodes", ["0000000", "00011", "0101", "012345"])
@pytest.mark.parametrize("link", ["node", "between"])
def test_groups_are_disjoint_and_on_their_link(nodes: str, link: str) -> None:
    here = site(nodes)
    groups = here.groups(link)
    members = [rank for group in groups for rank in group]
    assert len(set(members)) == len(members)
    assert bool(groups) == here.has(link)
    for group in groups:
        assert 2 <= len(group) <= 4
        assert len({nodes[rank] for rank in group}) == (1 if link == "node" else len(group))


def test_processors_are_shared_by_the_ranks_of_a_host() -> None:
    """Four ranks on two processors take twice as long; two nodes that are pretended share them too."""
    assert site("0000").pair_load("node", site("0000").pairs("node")) == (2.0, 2.0)
    assert site("0011").pair_load("node", site("0011").pairs("node")) == (2.0, 2.0)
    assert site("0011", "0011").pair_load("node", site("0011").pairs("node")) == (1.0, 1.0)
    assert site("0000", cores=8).pair_load("node", site("0000").pairs("node")) == (1.0, 1.0)
    assert site("0000", cores=8, threads=4).slots == 2
    busy = site("0000").pairs("node", busy=True)
    assert site("0000").pair_load("node", busy, busy=True) == (2.0, 2.0)  # those that multiply take processors too


def test_a_node_s_wire_is_shared_by_its_ranks() -> None:
    assert site("0011").pair_load("between", site("0011").pairs("between")) == (1.0, 2.0)
    uneven = site("00011")
    assert uneven.pair_load("between", uneven.pairs("between")) == (2.0, 3.0)  # one of two serves two


def test_readers() -> None:
    one, each = site("0000").readers("node")
    assert (set(one.values()), len(set(each.values()))) == ({0}, 3)
    assert set(one) == set(each) == {1, 2, 3}
    assert site("00").readers("node") == ({}, {})
    one, each = site("0011").readers("between")
    assert (one, each) == ({2: 0, 3: 0}, {2: 0, 3: 1})


# -- what is kept ---------------------------------------------------------------------------------

KEY = {"format": cache.FORMAT, "nodes": "0 0"}


@pytest.fixture
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of the test's own."""
    monkeypatch.setenv("RMA_MM_CACHE", str(tmp_path))
    cache_folder.cache_clear()
    yield tmp_path
    cache_folder.cache_clear()


def test_a_machine_is_kept_and_readable(folder: Any) -> None:
    assert cache.read(KEY) is None
    file = cache.write(KEY, MEASURED)
    assert file is not None
    assert list((folder / "machines").iterdir()) == [file]
    assert cache.read(KEY) == MEASURED
    assert json.loads(file.read_text())["key"] == KEY
    assert cache.read({**KEY, "nodes": "0 1"}) is None


def _cut(text: str) -> str:
    return text[: len(text) // 2]


BROKEN: dict[str, Callable[[str], str]] = {
    "truncated": _cut,
    "empty": lambda _: "",
    "no JSON": lambda _: "figures",
    "a list": lambda _: "[1, 2]",
    "deep": lambda _: "[" * 100_000,
    "another key": lambda text: text.replace('"0 0"', '"0 1"'),
    "another format": lambda text: text.replace(f'"format": {cache.FORMAT}', f'"format": {cache.FORMAT + 1}'),
    "no machine": lambda text: json.dumps({"key": json.loads(text)["key"]}),
    "a negative figure": lambda text: text.replace('"meeting": ', '"meeting": -'),
    "no number": lambda text: text.replace('"meeting": 4e-06', '"meeting": NaN'),
    "not measured": lambda text: text.replace('"measured": true', '"measured": false'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_counts_as_none(folder: Any, how: str) -> None:
    file = cache.write(KEY, MEASURED)
    assert file is not None
    broken = BROKEN[how](file.read_text())
    assert broken != file.read_text()
    file.write_text(broken)
    assert cache.read(KEY) is None
    assert cache.write(KEY, MEASURED) == file
    assert cache.read(KEY) == MEASURED


def test_bytes_that_are_no_text_count_as_none(folder: Any) -> None:
    file = cache.write(KEY, MEASURED)
    assert file is not None
    file.write_bytes(b"\xff\xfe\x00{")
    assert cache.read(KEY) is None


def test_where_nothing_can_be_written_nothing_is_kept(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("RMA_MM_CACHE", str(folder / "file" / "below"))
    cache_folder.cache_clear()
    assert cache.write(KEY, MEASURED) is None
    assert cache.read(KEY) is None


def test_settings_that_belong_to_the_key() -> None:
    lasting = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp", "FI_PROVIDER": "tcp", "OMPI_MCA_btl": "tcp,self"}
    fleeting = {
        "OMPI_MCA_initial_wdir": "/", "OMPI_MCA_num_procs": "2", "OMPI_MCA_opal_common_ucx_verbose": "-1",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "a", "HOME": "/", "XUCX_": "",
    }
    assert cache.settings({**fleeting, **lasting}) == lasting
