"""`bench.question` times real products in cells, and reckons who won; whether bars are met is not asked here."""

import json
from argparse import Namespace

import pytest

from bench.policy.__main__ import measure_all
from bench.policy.cases import Case
from bench.question import plot
from bench.question.__main__ import main
from bench.question.cells import COLUMNS, SETTINGS, SHAPES, Cell, cases, code_of, family, lines
from bench.question.tables import experiment_faults, experiment_lines
from tests.thorough import thorough


def contender(name, seconds, *, words=5, priced=5, same_as=None, movement="get", right=True):
    return {
        "algorithm": name, "seconds": seconds, "words": {"intra_node": words, "inter_node": 0}, "priced_words": priced,
        "same_as": same_as, "movement": {"A": movement, "B": "here", "C": "here"}, "right": right,
    }


def cell(*contenders, regret=1.0, chosen=0, best=1):
    record = {"case": "square on 4 ranks", "kind": "here", "shape": [1, 2, 3], "contenders": list(contenders)}
    return Cell({**record, "regret": regret, "chosen": chosen, "best": best})


def test_families_by_what_they_do():
    assert family(contender("stationary_c", 1)) == "pull"
    assert family(contender("stationary_a", 1, movement="accumulate")) == "push"
    assert family(contender("cannon:pull", 1)) == "pull"
    assert family(contender("cannon", 1, movement="shift")) == "Cannon"
    assert family(contender("solomonik_25d:cannon", 1)) == "2.5-D, 3-D"
    assert len(list(cases())) == len(SHAPES) * len(SETTINGS) == 84


def test_a_cell_knows_its_winner_and_what_is_off():
    found = cell(
        contender("summa_c", 3e-3), contender("cannon", 1e-3), contender("stationary_c", 2e-3, words=6),
        contender("t10_rotate:1,2,3", None, same_as=1), contender("queue", 4e-3, words=9), regret=1.2,
    )
    assert (found.winner, found.is_predicted, found.best["T10"]["seconds"]) == ("Cannon", False, 1e-3)
    assert found.wrong_words == ["stationary_c: 6 and 5"]
    (row,) = [line for line in lines([found]) if line.startswith("| square")]
    assert row.split(" | ")[5:] == ["2.00", "–", "3.00", "**1.00**", "–", "1.00", "–", "– |"]
    assert len(row.split(" | ")) == 5 + len(COLUMNS)
    said = lines([found])[-1]
    assert "winning family predicted in 0% of 1 cells, a plan within 5 % of the fastest in 0%; regret 1.200" in said
    assert cell(contender("pumma", 3e-3), contender("summa_c", 1e-3), regret=1.2).is_predicted
    good = cell(contender("summa_c", 1e-3), best=0)
    assert (code_of([good], []), code_of([found], []), code_of([good], ["fault"]), code_of([], [])) == (0, 1, 1, 1)


def experiment(**changes):
    entry = {
        "name": "SUMMA", "algorithm": "summa_c", "mesh": "2x2", "samples": [3.0, 1.0, 2.0], "words": 7e6,
        "priced_words": 7e6, "messages": 5, "peak_bytes": 2**21, "predicted": None, "right": True,
    }
    entries = [entry, {"name": "all-reduce", "samples": [4.0], "words": 9e6, "right": True} | changes]
    return {"case": "survey on 4 ranks", "kind": "survey", "ranks": 4, "shape": [1, 2, 3], "entries": entries,
            "limit": [1.5]}


def test_experiments_in_a_table():
    first, second = [line for line in experiment_lines([experiment()]) if line.startswith(("| SUMMA", "| all"))]
    assert first == "| SUMMA | summa_c | 2x2 | 2 | – | **1.00** | 7.0 | 7.0 | 5 | 2.0 |"
    assert second == "| all-reduce | – | – | 4 | – | 2.00 | 9.0 | – | – | – |"
    assert experiment_faults([experiment()]) == []
    assert experiment_faults([experiment(right=False, priced_words=8e6)]) == [
        "survey on 4 ranks: all-reduce on its mesh: wrong",
        "survey on 4 ranks: all-reduce on its mesh: 9000000.0 words, and 8000000 by its closed form",
    ]


def test_labels_lie_inside_the_pictures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    slow = cell(contender("summa_c", 3e-3), contender("cannon", 1e-3), contender("stationary_c", 2e-3))
    for figure in (plot._cells([slow] * 12), plot._experiments([experiment(name="a name that is rather long")] * 3)):
        figure.canvas.draw()
        for text in figure.findobj(lambda x: hasattr(x, "get_text") and x.get_text() and x.get_visible()):
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.y0 >= 0, text
            assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        pyplot.close(figure)
    where = {"date": "2026-11-26T00:00", "cpu": "a processor", "cores": 2, "blas": "a BLAS"}
    assert plot.plot([slow], [experiment()], where, tmp_path / "plots") == ""
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"cells.svg", "literature.svg"}


@thorough
def test_experiments_on_small_products():
    cases = [Case("depth", "depth", (64, 48, 80), 16), Case("ffn", "ffn", (8, 33, 16), 3, cores=(0, 1, 1))]
    how = Namespace(budget=None, quick=False, calibrated=True, limit=100)
    records, faults = [], []
    measure_all(cases, how, {}, records, faults, "bench.question.literature")
    assert (faults, experiment_faults(records)) == ([], [])
    assert [len(record["entries"]) for record in records] == [10, 4]


@thorough
def test_a_tiny_cell(tmp_path, capfd):
    file = tmp_path / "q.json"
    main(["--only", "small 256", "--settings", "one node, 4 ranks", "depth", "--quick", "--json", str(file)])
    found = json.loads(file.read_text())
    (record,) = found["results"]
    assert all(x["right"] for x in record["contenders"] if x["seconds"] is not None)
    assert "| small 256 | 256×256×256 |" in capfd.readouterr().out
    main(["--read", str(file)])
    assert "| small 256 | 256×256×256 |" in capfd.readouterr().out
