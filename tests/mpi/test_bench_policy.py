"""`bench.policy` times real products, tells wrong ones, and reckons regrets; whether bars are met is not asked here."""

import json
from dataclasses import asdict, replace
from math import sqrt

import numpy as np
import pytest

from bench import measure
from bench.policy import jobs, report
from bench.policy.__main__ import code_of, main, selected
from bench.policy.__main__ import parsed as options_of
from bench.policy.cases import ANY, OWN, PLACEMENTS, SETTINGS, Case, drawn, table, uneven
from bench.policy.contest import QUICK, Contest
from bench.processes import marked
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels.threads import cores
from tests.launch import parallel
from tests.thorough import thorough

pytestmark = thorough

TINY = Case("tiny", "free", (30, 20, 10), 2, mesh="2x1")

# -- real runs ------------------------------------------------------------------------------------


def test_two_tiny_cases(tmp_path, capfd):
    file = tmp_path / "report.json"
    arguments = ["--ranks", "2", "--only", "small 256", "--quick", "--calibrated", "--limit", "100"]
    arguments += ["--json", str(file)]
    assert main(arguments) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert said.startswith("bench.policy on cpu ")
    assert "summary of the table cases" in said
    found = json.loads(file.read_text())
    assert [result["case"] for result in found["results"]] == ["small 256 on 2 ranks", "small 256 on 2 ranks, created"]
    assert found["machine"]["mpi"]
    assert (found["faults"], found["left_out"]) == ([], [])
    for result in found["results"]:
        _check_record(result)
    shared, created = found["results"]
    assert (shared["path"], created["path"]) == ("in place", "no wait")
    assert any("get" in x["movement"].values() for x in created["contenders"])
    assert main(["--read", str(file)]) == 0
    assert said.partition("case  ")[2] == capfd.readouterr().out.partition("case  ")[2]


def _check_record(result):
    """All contenders are right, and those that are timed have enough samples."""
    contenders = result["contenders"]
    timed = [x for x in contenders if x["samples"]]
    assert len(timed) > 5
    assert all(x["right"] is True and x["seconds"] in x["samples"] for x in timed)
    assert all(contenders[x["same_as"]]["samples"] for x in contenders if x not in timed)
    assert [x["chosen"] for x in contenders] == [True] + [False] * (len(contenders) - 1)
    fastest = min(timed, key=lambda x: x["seconds"])
    assert result["other"] != 0
    assert contenders[result["best"]] in (fastest, contenders[0])
    assert {len(samples) for samples in result["duel"].values()} == {QUICK.duel}
    assert result["regret"] == (1.0 if fastest["chosen"] else max(1.0, result["ratio"]))


def test_a_job_that_takes_too_long_is_ended_and_told_of(capfd, monkeypatch):
    monkeypatch.setattr(jobs.secrets, "token_hex", lambda _: "that-job")
    assert main(["--ranks", "2", "--only", "small 256 on 2 ranks", "--quick", "--calibrated", "--limit", "0"]) == 1
    said = capfd.readouterr().out
    assert "the job on 2 ranks, 1 nodes FAILED at small 256 on 2 ranks: no case was finished within 0 s" in said
    assert "left out: 2 cases" in said
    assert not marked(f"{jobs.MARKER}=that-job".encode())


class Mistaken(Contest):
    """Holds results against a product of which one element is another."""

    def __init__(self, case, comm, pace):
        super().__init__(case, comm, pace)
        self.whole["C"][17, 4] += 1


@parallel(ranks=(2,), env=("node",))
def test_a_wrong_product_is_told_and_not_timed(comm):
    with Mistaken(TINY, comm, QUICK) as contest:
        found = contest.run()
    assert found["error"] == "what was chosen could not be timed"
    tested = [x for x in found["contenders"] if x["same_as"] is None]
    assert all(x["right"] is False and not x["samples"] for x in tested)
    assert code_of([found], []) == measure.WRONG


@parallel(ranks=(2,), env=("node",))
def test_operands_of_the_caller_stay_where_they_lie(comm):
    case = replace(TINY, layouts=("P('i', None)", "P('i', None)", ""), own="AB", direct=True)
    with Contest(case, comm, QUICK) as contest:
        found = contest.run()
        chosen = contest.contenders[0]
        a, b, _ = chosen.operands
        assert not a.in_place
        assert not b.in_place
        np.testing.assert_array_equal(b.tile, contest.whole["B"][b.region.selector()])
        assert not np.array_equal(contest.whole["A"][:10, :10], contest.whole["B"][:10, :10])
    assert found["path"] == "no wait"
    assert {name: len(samples) for name, samples in found["direct"]["samples"].items()} == {"auto": 3, "named": 3}


@parallel(ranks=(2,), env=("node",))
def test_what_another_mpi_cannot_pretend_is_skipped(comm):
    with Contest(replace(TINY, nodes=2), comm, QUICK) as contest:
        assert contest.run() == {"skipped": "this MPI shows 1 nodes, not 2"}


@parallel(ranks=(2,), env=("node",))
def test_every_grid_competes_and_what_is_the_same_is_timed_once(comm):
    with Contest(replace(TINY, mesh=ANY), comm, QUICK) as contest:
        found = contest.run()
    assert {x["mesh"] for x in found["contenders"]} == {"1x2", "2x1"}
    same = [x for x in found["contenders"] if x["same_as"] is not None]
    assert len(same) > 5
    assert all(found["contenders"][x["same_as"]]["movement"] == x["movement"] and not x["samples"] for x in same)


@parallel(ranks=(4,), env=("cliques",))
def test_pretended_nodes(comm):
    places = PLACEMENTS["row"], PLACEMENTS["column"], PLACEMENTS["block"]
    with Contest(replace(TINY, ranks=4, nodes=2, mesh="2x2", layouts=places), comm, QUICK) as contest:
        found = contest.run()
    assert found["path"] is None
    assert all(x["words"]["inter_node"] > 0 for x in found["contenders"] if x["samples"])


# -- the cases ------------------------------------------------------------------------------------


def test_the_table_has_what_it_should():
    cases = table()
    assert len(cases) >= 60
    assert {(case.ranks, case.nodes) for case in cases} == set(SETTINGS)
    here = [case for case in cases if case.kind == "triple" and (case.ranks, case.nodes) == (4, 1)]
    assert {case.layouts for case in here} == {(a, b, c) for a, b, c in _triples()}
    assert {"created", "allocated"} < {case.window for case in cases}
    assert sum(case.window == "created" or bool(case.own) for case in cases) >= 4
    _check_places(cases)


def _triples():
    places = PLACEMENTS.values()
    return ((a, b, c) for a in places for b in places for c in places)


def _check_places(cases):
    for case in cases:
        if case.mesh not in (OWN, ANY):
            mesh = MeshShape(measure.grid(case.mesh))
            assert mesh.size == case.ranks
            for x, text in zip("ABC", case.layouts, strict=True):
                if text:
                    parse_layout(text, mesh).check(case.extent(x), mesh)


def test_drawn_cases_are_the_same_for_a_seed():
    cases = drawn(3, 150)
    assert cases == drawn(3, 150)
    assert cases != drawn(4, 150)
    assert {case.ranks for case in drawn(3, 20, [(4, 2)])} == {4}
    assert {"float32", "float64"} == {case.dtype for case in cases}
    assert any("cyclic" in text for case in cases for text in case.layouts)
    assert any(case.own for case in cases)
    _check_places(cases)


def test_uneven_cases_pin_more_ranks_to_one_core_than_to_the_other(tmp_path):
    cases = uneven(3, 20)
    assert cases == uneven(3, 20)
    assert len({case.title for case in cases}) == 20
    assert all(0 < case.cores.count(0) < case.ranks / 2 and case.ranks == len(case.cores) for case in cases)
    assert {case.nodes for case in cases} == {1, 2}
    assert Case("", "", (1, 1, 1), 3, cores=(0, 1, 1)).speeds == (1, 0.5, 0.5)
    assert cases[0] == Case.from_json(json.loads(json.dumps(asdict(cases[0]))))
    _check_places(cases)
    with jobs.Job(cases[:1], True, None) as job:
        ranks = " ".join(job.programs(["x"])).split(" : ")
    core = {word.split()[4] for word in ranks}
    assert len(ranks) == cases[0].ranks
    assert len(core) == min(2, len(cores()))


def test_selection():
    assert {case.ranks for case in selected(options_of(["--ranks", "2", "6", "--nodes", "1"]))} == {2, 6}
    assert selected(options_of(["--random", "1", "7"])) == drawn(1, 7)
    assert selected(options_of(["--ranks", "6", "4", "2", "4", "--random", "1", "7"])) == drawn(1, 7)
    assert {case.ranks for case in selected(options_of(["--ranks", "8", "--random", "1", "7"]))} == {8}
    assert len(selected(options_of(["--uneven", "1", "7"]))) == 7
    with pytest.raises(SystemExit):
        options_of(["--only", "no such case"])


# -- what is said of them -------------------------------------------------------------------------


def result(regret, seconds=1.0, predicted=1.0, **more):
    """A case of one contender."""
    contender = {
        "algorithm": "cannon", "mesh": "2x2", "predicted": predicted, "seconds": seconds, "samples": [seconds],
        "movement": {"A": "shift", "B": "shift", "C": "here"}, "error": None, "right": True,
        "bill": {"multiplying": 0.6, "moving": 0.3, "meeting": 0.1},
    }
    facts = {"case": f"of {regret}", "setting": "4 ranks", "kind": "free", "shape": [1, 2, 3], "dtype": "float32"}
    numbers = {"chosen": 0, "best": 0, "other": None, "ratio": None, "duel": {"chosen": [regret], "other": [1.0]}}
    paths = {"path": "in place", "kept": regret == 1, "faster": None if regret == 1 else 0.5}
    layouts = {"layouts": {"A": "P('i', None)", "B": "", "C": ""}, "planning": 0.01, "took": 2.0}
    return {**facts, **numbers, **paths, **layouts, "regret": regret, "contenders": [contender], **more}


def test_figures_and_their_bars():
    found = report.summary([result(1.0), result(1.21, predicted=0.5)])
    assert found["regret"] == {"found": pytest.approx(1.1), "bar": 1.05, "met": False}
    assert found["worst"] == {"found": 1.21, "bar": 1.25, "met": True}
    assert found["share"] == {"found": 0.5, "bar": 0.9, "met": False}
    assert found["direct"] == {"found": None, "bar": 1.02, "met": None}
    assert found["paths"] == {"in place": {"cases": 2, "kept": 1, "missed": 1}}
    random = report.summary([result(1.0, kind="random"), result(1.1, kind="random", direct={"ratio": 1.03})])
    assert random["regret"] == {"found": pytest.approx(sqrt(1.1)), "bar": 1.08, "met": True}
    assert (random["worst"]["met"], random["direct"]["met"]) == (None, False)


def test_lines_tell_of_everything():
    results = [
        result(1.0), result(1.21, seconds=2.0, predicted=1.0), result(1.0, kind="random", predicted=None),
        {"case": "none", "kind": "free", "setting": "x", "error": "no room"},
    ]
    said = "\n".join(report.lines(results))
    for part in ("(i,*), free, free", "NO, 0.50 with", "summary of the random cases", "none: FAILED: no room"):
        assert part in said
    (cannon,) = [line.split() for line in said.splitlines() if line.startswith("cannon ")]
    assert cannon == ["cannon", "2", "50%", "0.75", "0.55", "0.95", "60", "30", "10"]
    assert code_of(results, []) == 1
    assert code_of(results[:2], []) == 0
    assert code_of(results[:2], ["the job FAILED"]) == 1


def test_forms_that_are_numbers_are_one_family():
    names = ("cannon:pull", "t10_rotate:2,2,1", "summa_c")
    assert [report.family(name) for name in names] == ["cannon:pull", "t10_rotate", "summa_c"]
