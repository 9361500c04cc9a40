"""Reports as pages: their sums are those of the transports, a browser opens them with the network off, and traces."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
pytest.importorskip("bokeh")

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import AlgorithmError, FileFormatError, OptionError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.planner.candidates import Request
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.reports.page import ReportContent, report_page
from rma_mm.runtime.reports.timeline import predicted_run
from rma_mm.runtime.watching.exposed import exposed_share
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.pure.test_picture import named
from tests.pure.test_site import ASKS
from tests.thorough import nightly, thorough, usually

SUM = re.compile(r'id="words-sum">(\d+)<')
SHAPE = (48, 36, 24)
BROWSER = shutil.which("chromium")


def traced(mesh, name, path):
    """Write the report of a traced product; return the plan, and the words that all ranks' transports counted."""
    m, n, k = SHAPE
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    with rma_mm.plan(a, b, mesh, algorithm=name) as plan:
        plan.trace = Trace()
        with plan.trace.repetition():
            C = plan.execute(a, b)
        assert np.allclose(C.to_numpy(), a @ b)
        plan.report(path)
        return plan, mesh.comm.allreduce(plan.words.words_intra + plan.words.words_inter)


@parallel(ranks=(4,), env=("cliques", "node"))
def test_exposed_communication_is_what_multiplies_do_not_hide(comm, tmp_path):
    """By the time of the wire in the machine's figures."""
    file = Path(comm.bcast(os.fspath(tmp_path))) / "machine.json"
    if comm.rank == 0:
        file.write_text(json.dumps(replace(TYPICAL, measured=True).as_json()))
    comm.Barrier()
    a = np.ones((40, 40), np.float32)
    with patch.dict(os.environ, {"RMA_MM_MACHINE": str(file)}), Mesh((comm.size,), comm) as mesh:
        with rma_mm.plan(a, a, mesh, algorithm="stationary_c") as plan:
            plan.execute(a, a)
            words, last = comm.allgather(plan.words.words_inter), mesh.metrics.last
            seconds, multiplying = comm.allgather(last.seconds), comm.allgather(last.multiply)
            share = exposed_share(plan)
        if mesh.num_nodes == 1:
            assert share is None
            return
        wire = TYPICAL.cost("between", "get").beta * 4 * max(
            sum(x for x, at in zip(words, mesh.node_of, strict=True) if at == node) for node in set(mesh.node_of)
        )
        assert share == pytest.approx((max(seconds) - max(multiplying)) / wire)


@parallel(ranks=(1, 4, 6), env=("node",), timeout=120)
@pytest.mark.parametrize("name", usually(3, ["cannon", "queue", "stationary_a", *sorted(ALGORITHMS)], rest=nightly))
def test_the_sum_of_the_heat_map_is_what_was_counted(comm, tmp_path, name):
    half = max(1, comm.size // 2)
    for grid in ((comm.size // half, half), (1, comm.size // half, half), (comm.size,)):
        with Mesh(grid, comm) as mesh:
            try:
                _, words = traced(mesh, name, tmp_path / "r.html")
            except AlgorithmError:
                continue
        text = (tmp_path / "r.html").read_text()
        assert [int(each) for each in SUM.findall(text)] == [words]
        assert f"by {name}</h1>" in text and "moved between ranks" in text
        assert not ASKS.search(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
        return
    raise AssertionError(f"{name} takes none of these meshes")


def test_a_page_for_64_ranks_is_small():
    """As if all had been measured, too: every operation of 64 ranks, twice."""
    request = Request((4096, 4096, 4096), MeshShape((8, 8)), (None, None, None), algorithm="cannon")
    schedule = named("cannon", (4096, 4096, 4096), MeshShape((8, 8)))
    predicted = predicted_run(schedule, request.cost_model, 64, 64)
    measured = [each._replace(host="h", repetitions=[(0, 10**9)]) for each in predicted]
    traffic = np.arange(4096).reshape(64, 64)
    text = report_page(ReportContent("64 ranks", [("a", "b")], measured, predicted, traffic, memory=[("A", 7)]))
    assert len(text) <= 3 * 2**20, len(text)


@parallel(ranks=(4,), env=("node",))
def test_a_program_is_traced(comm, tmp_path):
    x = np.random.default_rng(0).standard_normal((60, 60))
    with Mesh((2, 2), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh)
        with rma_mm.plan(A, A, mesh, algorithm="summa_c") as plan:
            plan.execute(A, A)  # bound before, and again
            with rma_mm.trace(tmp_path / "t.json", mesh):
                C = plan.execute(A, A)
                D = rma_mm.matmul(C, A, mesh, algorithm="cannon")
            with rma_mm.trace(tmp_path / "t.html", mesh) as trace:
                plan.execute(A, A)
            count = len(trace.calls)
            plan.execute(A, A)
            assert count and len(trace.calls) == count and plan.trace is None
            words = comm.allreduce(plan.words.words_intra)
        assert np.allclose(D.to_numpy(), x @ x @ x)
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        for rank in range(4):
            names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
            assert any(name.startswith(f"rank {rank} ") for name in names)
        assert {"multiply", "wait"} <= {event["name"] for event in events}
        assert [int(each) for each in SUM.findall((tmp_path / "t.html").read_text())] == [words]
        with pytest.raises(KeyError), rma_mm.trace(tmp_path / "none.json", mesh):
            raise KeyError("mine")
        assert not (tmp_path / "none.json").exists() and mesh.trace is None
        with pytest.raises(FileFormatError, match="does not exist"), rma_mm.trace(tmp_path / "no" / "t.json", mesh):
            raise AssertionError("the block must not run")
        with rma_mm.trace(tmp_path / "u.json", mesh), pytest.raises(OptionError, match="is being traced already"):
            rma_mm.trace(tmp_path / "v.json", mesh).__enter__()


@parallel(ranks=(2,), env=("node",))
def test_a_path_that_cannot_be_written_is_found_before_the_product(comm, tmp_path):
    refused(command(comm, "--shape 64,64,64 --report none/r.html", tmp_path), "--report none/r.html", "does not exist")
    refused(command(comm, "--shape 64,64,64 --report /proc/r.html", tmp_path), "/proc/r.html", "cannot be written to")
    assert command(comm, "--shape 64,64,64 --report r.html --quiet", tmp_path) == (0, "", "")
    assert "rma-mm" in (tmp_path / "r.html").read_text()


@thorough
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@parallel(ranks=(4,), env=("node",), timeout=120)
def test_a_browser_opens_it_with_the_network_off(comm, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    with Mesh((2, 2), comm) as mesh:
        plan, words = traced(mesh, "auto", tmp_path / "r.html")
        candidates_of = plan.decision.considered
    if comm.rank:
        return
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        check_page(driver, tmp_path / "r.html", words, candidates_of)
    finally:
        driver.quit()


def check_page(driver, page: Path, words, candidates_of):
    driver.get(page.as_uri())
    wait_for(driver, "return window.Bokeh && Bokeh.documents.length && document.querySelectorAll('.bk-Figure').length")
    assert int(driver.find_element("id", "words-sum").text) == words
    table = driver.find_element("css selector", "#candidates table")
    assert not table.is_displayed()
    driver.find_element("css selector", "#candidates summary").click()
    assert table.is_displayed() and len(table.find_elements("tag name", "tr")) == 1 + len(candidates_of)
    figures = "Bokeh.documents[0].all_models"
    drawn = driver.execute_script(
        f"return [...{figures}].filter(m => m.type == 'ColumnDataSource' && m.get_column('words'))"
        ".flatMap(m => [...m.get_column('words')]).reduce((a, b) => a + b, 0)"
    )
    assert drawn == words
    hidden = driver.execute_script(
        f"const l = [...{figures}].find(m => m.type == 'Legend' && m.click_policy == 'hide');"
        "l.items[0].renderers[0].visible = false; return l.items[0].renderers[0].visible"
    )
    assert hidden is False
    requested = [json.loads(each["message"])["message"] for each in driver.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in requested if each["method"] == "Network.requestWillBeSent"]
    assert page.as_uri() in urls and [url for url in urls if url.startswith(("http", "ws"))] == []
    assert [each for each in driver.get_log("browser") if each["level"] == "SEVERE"] == []


def wait_for(driver, script):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20).until(lambda each: each.execute_script(script))


def test_pretended_ranks_report_no_times(tmp_path):
    if int(os.environ.get("PMI_SIZE", "1")) > 1:
        pytest.skip("pretended ranks need a process of their own")
    x = np.ones((24, 24))
    with rma_mm.pretend((2, 2)) as mesh:
        plan = rma_mm.plan(x, x, mesh, algorithm="cannon")
        plan.execute(x, x)
        plan.report(tmp_path / "r.html")
        with pytest.raises(OptionError, match="pretended ranks take turns"):
            rma_mm.trace(tmp_path / "t.json", mesh)
    text = (tmp_path / "r.html").read_text()
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "pretended ranks take turns" in shown and ">measured<" not in shown
    assert [int(each) for each in SUM.findall(text)] == [24 * 24 * 2]
