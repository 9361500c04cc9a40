"""`bench.question` times real products in cells, and reckons who won; whether bars are met is not asked here."""

import json

from bench.question import COLUMNS, SETTINGS, SHAPES, Cell, cases, code_of, family, lines, main
from tests.thorough import thorough


def contender(name, seconds, *, words=5, priced=5, same_as=None, movement="get", right=True):
    return {
        "algorithm": name, "seconds": seconds, "words": {"intra_node": words, "inter_node": 0}, "priced_words": priced,
        "same_as": same_as, "movement": {"A": movement, "B": "here", "C": "here"}, "right": right,
    }


def cell(*contenders, regret=1.0, chosen=0):
    record = {"case": "square on 4 ranks", "kind": "here", "shape": [1, 2, 3], "contenders": list(contenders)}
    return Cell({**record, "regret": regret, "chosen": chosen})


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
    assert "winner predicted in 0% of 1 cells, regret 1.200" in lines([found])[-1]
    good = cell(contender("summa_c", 1e-3))
    assert (code_of([good], []), code_of([found], []), code_of([good], ["fault"]), code_of([], [])) == (0, 1, 1, 1)


@thorough
def test_a_tiny_cell(tmp_path, capfd):
    file = tmp_path / "q.json"
    main(["--only", "small 256", "--settings", "one node, 4 ranks", "--quick", "--json", str(file)])
    found = json.loads(file.read_text())
    (record,) = found["results"]
    assert all(x["right"] for x in record["contenders"] if x["seconds"] is not None)
    assert "| small 256 | 256×256×256 |" in capfd.readouterr().out
    main(["--read", str(file)])
    assert "| small 256 | 256×256×256 |" in capfd.readouterr().out
