"""Which kernel is taken, what it refuses, and the small parts: scaling, casts, scalars, types, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rma_mm import kernels
from rma_mm.elements import dtypes
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, accumulator, parse_dtype, rank, result_dtype
from rma_mm.errors import AlgorithmError, DtypeError, LayoutError, OptionError, ShapeError
from rma_mm.kernels import blas, elementwise, threads
from rma_mm.kernels.choice import choice, rates
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.kernels.gemm.cpu import host
from tests.thorough import nightly, usually

NAMES = sorted(dtype.name for dtype in SUPPORTED)

# -- choosing ------------------------------------------------------------------------------------------------------


def test_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    big = (1024, 1024, 1024)
    monkeypatch.setattr(choice, "rates", lambda dtype: None)
    assert kernels.choose_kernel("auto", np.dtype("f4"), *big) in ("blas", "numpy")
    assert kernels.choose_kernel("auto", np.dtype("i4"), *big) == "numba"
    assert kernels.choose_kernel("auto", np.dtype("i4"), 64, 64, 64) == "numpy"
    one = np.ones((1, 1))
    assert {name: kernels.bind(one, one, one.copy(), kernel=name).kernel for name in ("numba", "numpy")} == {
        "numba": "numba",
        "numpy": "numpy",
    }


def test_auto_takes_what_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each class of shapes, which is measured when a large product of it is first wanted."""
    if blas.library() is None:
        pytest.skip("there is no BLAS to choose")
    table = {name: {"blas": 50.0, "numba": 50.5 if name.endswith("s") else 60.0} for name in rates.CLASSES}
    for known, new in ((table, {}), (None, table)):
        monkeypatch.setattr(choice, "rates", lambda dtype, known=known: known)
        monkeypatch.delenv("RMA_MM_MACHINE", raising=False)
        monkeypatch.setattr(choice, "measured", lambda dtype, classes, new=new: {name: new[name] for name in classes})
        single, half = np.dtype("f4"), np.dtype("f2")
        assert kernels.choose_kernel("auto", half, 512, 512, 512) == "numba"
        assert kernels.choose_kernel("auto", single, 2048, 2048, 2048) == "numba"
        assert kernels.choose_kernel("auto", single, 8192, 8192, 64) == "blas"  # hardly slower
        assert kernels.choose_kernel("auto", single, 8, 8192, 8192) == "numba"
        assert kernels.choose_kernel("auto", single, 8192, 16, 8192) == "numba"
        assert kernels.choose_kernel("auto", single, 8, 512, 512) == "blas"  # too small for that
        assert kernels.choose_kernel("auto", single, 1023, 2048, 2048) == "blas"
        said = choice.reason("numba", single, 2048, 2048, 2048)
        assert said == ("blas 50, numba 60 GF/s on products of this kind here" if known else "")
        assert choice.reason("blas", single, 512, 512, 512) == ""


@pytest.mark.parametrize(("folder", "machine"), [(None, ""), (Path("/"), "typical"), (Path("/"), "")])
def test_what_blas_does_well_is_compared_where_that_can_be_kept(
    folder: Path | None, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if the user has not named a machine to plan for."""
    if blas.library() is None:
        pytest.skip("there is no BLAS to choose")
    monkeypatch.setattr(choice, "rates", lambda dtype: None)
    monkeypatch.setattr(choice, "measured", lambda dtype, classes: {classes[0]: {"blas": 1.0, "numba": 2.0}})
    monkeypatch.setattr(choice, "cache_folder", lambda: folder)
    monkeypatch.setenv("RMA_MM_MACHINE", machine)
    expected = "numba" if folder and not machine else "blas"
    assert kernels.choose_kernel("auto", np.dtype("f4"), 2048, 2048, 2048) == expected
    assert kernels.choose_kernel("auto", np.dtype("f4"), 4096, 4096, 64) == expected  # small k: from a quarter on
    assert kernels.choose_kernel("auto", np.dtype("f4"), 4096, 4096, 63) == "blas"
    assert kernels.choose_kernel("auto", np.dtype("c8"), 4096, 4096, 64) == "blas"
    assert kernels.choose_kernel("auto", np.dtype("f2"), 2048, 2048, 2048) == "numba"


def test_what_is_done_once_is_compared_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is known which kernel is faster."""
    if blas.library() is None:
        pytest.skip("there is no BLAS to choose")
    found = {name: {"blas": 1.0, "numba": 2.0} for name in rates.CLASSES}
    monkeypatch.setattr(choice, "rates", lambda dtype: None)
    monkeypatch.setattr(choice, "measured", lambda dtype, classes: {name: found[name] for name in classes})
    monkeypatch.setattr(choice, "cache_folder", lambda: Path("/"))
    monkeypatch.delenv("RMA_MM_MACHINE", raising=False)
    single, half = np.dtype("f4"), np.dtype("f2")
    large, few_rows = (2048, 2048, 2048), (8, 8192, 8192)
    for dtype, shape, pays_from in ((single, large, 2**42), (half, large, 2**39), (single, few_rows, 2**39)):
        with choice.working_once(pays_from - 1):
            assert kernels.choose_kernel("auto", dtype, *shape) == "blas"
        with choice.working_once(pays_from):  # as of many such products
            assert kernels.choose_kernel("auto", dtype, *shape) == "numba"
        assert kernels.choose_kernel("auto", dtype, *shape) == "numba"  # whose number nobody knows
    monkeypatch.setattr(choice, "rates", lambda dtype: found)
    with choice.working_once(1):
        assert kernels.choose_kernel("auto", single, *large) == "numba"


def test_code_is_compiled_where_that_pays() -> None:
    """For whole numbers, which no BLAS multiplies."""
    number = np.dtype("i4")
    cases = ((512, inf, "numba"), (512, 2**30, "numba"), (512, 2**30 - 1, "numpy"), (511, inf, "numpy"))
    for size, work, expected in cases:
        with choice.working_once(work):
            assert kernels.choose_kernel("auto", number, size, size, size) == expected
            assert kernels.choose_kernel("numba", number, size, size, size) == "numba"


@nightly
def test_rates_are_kept_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was measured is read again by the next process; a file that cannot be read is as good as none."""
    if blas.library() is None:
        pytest.skip("there is no BLAS to measure")
    monkeypatch.setattr(rates, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(rates, "SECONDS", 1e-4)
    rates._table.cache_clear()
    try:
        assert rates.rates(np.dtype("f4")) is None
        few = rates.measured(np.dtype("f4"), [rates.FEW_ROWS])
        assert list(few) == [rates.FEW_ROWS]
        found = rates.measured(np.dtype("f4"))
        assert found[rates.FEW_ROWS] == few[rates.FEW_ROWS]
        assert rates.measured(np.dtype("f4")) == found  # and not measured again
        assert {name: sorted(by) for name, by in found.items()} == {name: ["blas", "numba"] for name in rates.CLASSES}
        rates._table.cache_clear()
        assert rates.rates(np.dtype("f4")) == found
        assert rates.rates(np.dtype("f8")) is None
        (file,) = tmp_path.iterdir()
        for damaged in (file.read_text()[:40], "[]", '{"float32": {"sss": 1}}'):
            file.write_text(damaged)
            rates._table.cache_clear()
            assert rates.rates(np.dtype("f4")) is None
        monkeypatch.setattr(rates, "cache_folder", lambda: None)
        monkeypatch.setattr(rates, "_unwritten", {})
        rates._table.cache_clear()
        kept = rates.measured(np.dtype("f4"))
        assert rates.rates(np.dtype("f4")) is not None
        assert rates.measured(np.dtype("f4")) == kept
    finally:
        rates._table.cache_clear()


def test_without_a_blas_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "library", lambda: None)
    monkeypatch.setattr(blas, "library", lambda: None)
    a, c = np.eye(3, dtype=np.float32), np.ones((3, 3), np.float32)
    for kernel in ("auto", "blas"):
        bound = kernels.bind(a, a, c, 2, 0, kernel=kernel)
        bound()
        assert bound.kernel == "numpy"
        np.testing.assert_array_equal(c, 2 * a)


def test_every_loaded_blas_can_be_called() -> None:
    """SciPy brings one with other names and narrower integers; NumPy's own is still preferred."""
    pytest.importorskip("scipy.linalg")
    import threadpoolctl

    entries = [entry for entry in threadpoolctl.threadpool_info() if entry["user_api"] == "blas"]
    opened = [blas._opened(entry["filepath"], entry["internal_api"] == "openblas") for entry in entries]
    assert all(blas._works(found) for found in opened if found is not None)
    blas.library.cache_clear()
    assert (found := blas.library()) is None or "numpy" in found.path or len(entries) == 1
    for found in opened:
        if found is not None:
            a = np.arange(12.0).reshape(3, 4)
            c = np.ones((3, 3), order="F")
            prepared = blas.arguments(found, a, a.T, c, 2.0, 1.0, False, False)
            assert prepared is not None
            found.gemm(c.dtype)(*prepared)
            np.testing.assert_array_equal(c, 2 * (a @ a.T) + 1)


def test_refusals() -> None:
    one = np.ones((2, 2), np.int32)
    with pytest.raises(DtypeError, match=r"int32.*float32.*numba"):
        kernels.bind(one, one, one.copy(), kernel="blas")
    with pytest.raises(DtypeError, match="kernel 'blas'"):
        kernels.bind(one[:0], one, one[:0], kernel="blas")
    with pytest.raises(AlgorithmError, match="auto, blas, numba, numpy"):
        kernels.bind(one, one, one.copy(), kernel="cublas")
    with pytest.raises(ShapeError, match=r"\(2, 2\).*\(3, 2\)"):
        kernels.bind(one, np.ones((3, 2), np.int32), one.copy())
    with pytest.raises(DtypeError, match=r"complex64.*float32"):
        kernels.bind(one.astype("c8"), one, one.astype("f4"))
    fixed = one.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.bind(one, one, fixed)


@pytest.mark.parametrize("kernel", usually(2, ["auto", "numpy", "numba"], rest=nightly))
def test_matmul_alone(kernel: str) -> None:
    """The package by itself: types, out, scalars, an epilogue and a semiring."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape) for shape in ((33, 21), (21, 40)))
    x, y = a.astype("i1"), b.astype("i1")
    np.testing.assert_array_equal(kernels.matmul(x, y, compute_dtype="int32", kernel=kernel), a @ b)
    np.testing.assert_array_equal(kernels.matmul(x, y, kernel=kernel), (a @ b).astype("i1"))
    out = np.ones((33, 40), np.float16)
    assert kernels.matmul(a.astype("f2"), b.astype("f2"), out, alpha=2, beta=-1, kernel=kernel) is out
    np.testing.assert_array_equal(out, (2 * (a @ b) - 1).astype("f2"))
    bias = np.arange(33, dtype=np.float32)
    epilogue = Epilogue(bias=bias, per="row", activation="relu", dtype="float64")
    found = kernels.matmul(a.astype("f4"), b.astype("f4"), kernel=kernel, epilogue=epilogue)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.maximum(a @ b + bias[:, None], 0))
    least = (a[:, :, None] + b[None]).min(axis=1)
    np.testing.assert_array_equal(kernels.matmul(a, b, kernel=kernel, semiring="min_plus"), least)


def test_matmul_refuses() -> None:
    x, y = np.zeros((9, 9), np.float32), np.zeros((3, 9), np.float32)
    with pytest.raises(LayoutError, match="memory with a"):
        kernels.matmul(x, x.copy(), out=x)
    with pytest.raises(LayoutError, match="memory with b"):
        kernels.matmul(x[:3].copy(), x, out=x[6:])
    half = np.zeros((9, 9), np.float16)
    with pytest.raises(LayoutError, match="memory with a"):
        kernels.matmul(half, half.copy(), out=half, epilogue=Epilogue(activation="relu"))
    with pytest.raises(OptionError, match="min_plus"):
        kernels.matmul(y, x, semiring="min_plus", epilogue=Epilogue(activation="relu"))
    with pytest.raises(OptionError, match="Epilogue"):
        kernels.matmul(y, x, epilogue="relu")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="activation"):
        kernels.matmul(y, x, epilogue=Epilogue(activation=["relu"]))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="'foo'"):
        kernels.matmul(y, x, compute_dtype="foo")
    with pytest.raises(DtypeError, match="got list"):
        kernels.matmul(y, x, out=[[1]])  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="float64; the result is float32"):
        kernels.matmul(y, x, out=np.zeros((3, 9)))
    with pytest.raises(DtypeError, match="foreign byte order"):
        kernels.matmul(y.astype(y.dtype.newbyteorder()), x)
    with pytest.raises(DtypeError, match="compute_dtype"):
        kernels.matmul(y, x, compute_dtype="int32")
    with pytest.raises(OptionError, match="pass out"):
        kernels.matmul(y, x, beta=1)
    with pytest.raises(ShapeError, match="matrices"):
        kernels.matmul(y[0], x)
    disjoint = np.zeros((9, 20), np.float32)
    kernels.matmul(disjoint[:, :9], x, out=disjoint[:, 10:19])


def test_scratch_bytes() -> None:
    f4, f2, i4 = (np.dtype(t) for t in ("f4", "f2", "i4"))
    assert kernels.scratch_bytes(2048, 2048, 2048, f4, f4, f4, "blas") == 0
    most = threads.get_threads() * ((16 << 20) + 2 * host().caches[1])
    assert 0 < kernels.scratch_bytes(10**5, 10**5, 10**5, f2, f2, f4, "blas") <= (8 << 20) + (64 << 10)
    assert 0 < kernels.scratch_bytes(10**5, 10**5, 10**5, f2, f2, f4, "numba") <= most
    assert 0 < kernels.scratch_bytes(10**5, 10**5, 10**5, i4, i4, i4) <= most
    assert kernels.scratch_bytes(0, 5, 5, i4, i4, i4) == 0


# -- elementwise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_scale(name: str) -> None:
    c = np.array([[0, 1, 2, 3], [4, 5, 0, 7]]).astype(parse_dtype(name))[:, ::2]
    old = c.copy()
    elementwise.scale(c, 1)
    assert np.array_equal(c, old)
    if c.dtype.kind != "b":
        elementwise.scale(c, 2)
        assert np.array_equal(c, (old * np.asarray(2, old.dtype)).astype(old.dtype))
    if rank(c.dtype) >= 2:
        c[...] = np.nan
    elementwise.scale(c, 0)
    assert not c.any()


def test_cast_rounds_once_and_never_goes_down() -> None:
    src = np.array([[1 + 2**-11 + 2**-20, 1e9, np.nan]], np.float32)
    for dst in (np.zeros((1, 3), dtype) for dtype in SUPPORTED if accumulator(dtype) != dtype):
        elementwise.cast(src, dst)
        with np.errstate(all="ignore"):
            expected = src.astype(dst.dtype).astype("f4")
        assert np.array_equal(dst.astype("f4"), expected, equal_nan=True)
    with pytest.raises(DtypeError, match=r"float32.*int32"):
        elementwise.cast(src, np.zeros((1, 3), np.int32))


@pytest.mark.parametrize(
    ("value", "name"),
    [(1j, "float32"), (0.5, "int8"), (300, "int8"), (-1, "uint8"), (2, "bool"), (float("nan"), "int64"),
     (1e300, "float32"), ("2", "float32"), (10**400, "float64"), (np.complex64(1j), "float16"), (2**64, "uint64")],
)
def test_scalar_refuses(value: Any, name: str) -> None:
    with pytest.raises(DtypeError, match=rf"beta is .*{name} cannot represent.*use "):
        elementwise.scalar(value, np.dtype(name), "beta")


@pytest.mark.parametrize(
    ("value", "name", "held"),
    [(2 + 0j, "int8", 2), (2.0, "uint64", 2), (True, "bool", 1), (np.float64(0.5), "float32", 0.5),
     (2**64 - 1, "uint64", 2**64 - 1), (1j, "complex64", 1j), (float("-inf"), "float16", float("-inf")),
     (np.array(3), "int32", 3), (complex(2, -0.0), "float32", 2)],
)
def test_scalar_accepts(value: Any, name: str, held: Any) -> None:
    got = elementwise.scalar(value, np.dtype(name), "alpha")
    assert got == held
    assert got.dtype == accumulator(np.dtype(name))


# -- types ---------------------------------------------------------------------------------------------------------


def test_result_dtype() -> None:
    for a in SUPPORTED:
        assert result_dtype(a, a) == a
        for b in SUPPORTED:
            if BFLOAT16 not in (a, b):
                assert result_dtype(a, b) == np.result_type(a, b)
    assert result_dtype(np.dtype("i1"), np.dtype("i1"), np.dtype("i4")) == np.int32
    assert result_dtype(np.dtype("f2"), np.dtype("f2"), np.dtype("f4")) == np.float32
    if BFLOAT16 is not None:
        assert result_dtype(BFLOAT16, np.dtype("f4")) == np.float32
        assert result_dtype(BFLOAT16, BFLOAT16, np.dtype("f4")) == np.float32
        with pytest.raises(DtypeError, match="no common element type"):
            result_dtype(BFLOAT16, np.dtype("f2"))
        with pytest.raises(DtypeError, match="bfloat16 cannot hold"):
            result_dtype(np.dtype("f4"), np.dtype("f4"), BFLOAT16)


@pytest.mark.parametrize(("dtype", "compute"), [("i4", "i1"), ("c8", "f4"), ("f4", "f2"), ("i1", "u4"), ("i4", "f4")])
def test_compute_dtype_never_narrows(dtype: str, compute: str) -> None:
    with pytest.raises(DtypeError, match=r"compute_dtype .* cannot hold .* use one of "):
        result_dtype(np.dtype(dtype), np.dtype(dtype), np.dtype(compute))


@pytest.mark.parametrize("bad", ["O", "U3", "M8[s]", "i4,i4", "g"])
def test_unsupported_types(bad: str) -> None:
    with pytest.raises(DtypeError, match=r"supported element types are .*float32"):
        result_dtype(np.dtype(bad), np.dtype("f4"))


def test_foreign_byte_order_names_the_fix() -> None:
    with pytest.raises(DtypeError, match=r"\.astype\('float32'\)"):
        result_dtype(np.dtype("f4").newbyteorder(), np.dtype("f4"))


def test_parse_dtype() -> None:
    assert [parse_dtype(name).name for name in NAMES] == NAMES
    with pytest.raises(DtypeError, match=r"'float31'.*float32, .*bool"):
        parse_dtype("float31")
    assert dtypes.supported_names() == ", ".join(dtype.name for dtype in SUPPORTED)


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(threads.own_function(threads.SET) is None, reason="needs OpenBLAS")
@pytest.mark.skipif(len(threads.cores()) < 2, reason="needs two cores")
@pytest.mark.parametrize("name", ["", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_commands_start_threads_of_the_blas_when_they_are_set(name: str) -> None:
    """Not for all cores, in every rank, unless the environment says so, which is as it was."""
    said, before = ({name: "2"}, 2) if name else ({}, 1)
    code = (
        "import os\nfrom rma_mm.launch import on_all_ranks\ndef command():\n"
        "    from rma_mm.kernels.threads import get_threads, set_threads\n"
        "    print(get_threads(), os.environ.get('OPENBLAS_NUM_THREADS'))\n"
        "    set_threads(2)\n    return get_threads()\n"
        "print(on_all_ranks(command))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | said
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"{before} {said.get('OPENBLAS_NUM_THREADS')}", "2"]


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = len(threads.cores())
    assert threads.threads_per_rank(1, None) == cores
    assert threads.threads_per_rank(10**6, None) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert threads.threads_per_rank(1, None) == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert threads.threads_per_rank(1, None) == 5
    assert threads.threads_per_rank(1, 7) == 7
    with pytest.raises(ValueError, match="threads is 0"):
        threads.threads_per_rank(1, 0)


def test_set_threads() -> None:
    before = threads.get_threads()
    threads.set_threads(1)
    assert threads.get_threads() == 1
    threads.set_threads(before)
    assert threads.get_threads() == before
