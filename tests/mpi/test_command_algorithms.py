"""Algorithms, their forms and pictures on the command line."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused


@pytest.mark.parametrize(
    ("line", "a", "c"),
    [
        ("--algorithm cannon --mesh 2x2", "shift", "here"),
        ("--algorithm summa_c", "broadcast", "here"),
        ("--algorithm agarwal_3d --mesh 1x2x2", "all-gather", "reduce-scatter"),
        ("--algorithm johnson_3d --mesh 1x2x2", "broadcast", "reduce"),
        ("--algorithm solomonik_25d:pull --mesh 1x2x2", "view", "accumulate"),
        ("--algorithm t10_rotate:1,1,4/1,1,4", "here", "shift"),
    ],
)
@parallel(ranks=(4,), env=("node",))
def test_movement_is_reported(comm: MPI.Intracomm, tmp_path: Path, line: str, a: str, c: str) -> None:
    done = command(comm, f"{line} --shape 512,512,1024 --json r.json --quiet", tmp_path)
    assert done == (0, "", "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["verified"]
    assert (report["movement"]["A"], report["movement"]["C"]) == (a, c)
    assert report["algorithm"] == line.split()[1]


@parallel(ranks=(4,), env=("node",))
def test_pictures_and_the_frontier(comm: MPI.Intracomm, tmp_path: Path) -> None:
    done = command(comm, "--algorithm cannon --shape 8,8,8 --picture - --frontier --explain --dry-run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "│ C01 := A01·B11  k 4:8 │" in done.stdout
    assert "Cannon's placement" in done.stdout
    assert "lower bound for 4 ranks: 28" in done.stdout
    assert "xy->xy" in done.stdout
    done = command(comm, "--algorithm t10_rotate:2,2,1/2,1,1 --shape 8,8,8 --explain --dry-run", tmp_path)
    assert "A           f_s (2, 1), f_t (1, 2), rp (0, 4)" in done.stdout
    done = command(comm, "--algorithm cannon --shape 8,8,8 --picture p.html --dry-run --quiet", tmp_path)
    assert done == (0, "", "")
    HTMLParser().feed((tmp_path / "p.html").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--algorithm cannon --mesh 4", ["cannon", "two axes", "(2, 2)"]),
        ("--algorithm johnson_3d --mesh 2x2", ["johnson_3d", "three axes", "(1, 2, 2)"]),
        ("--algorithm cannon --layout-a P(None,'i') --mesh 2x2", ["needs A placed as P('i', 'j:skew(i)') or P("]),
        ("--algorithm summa_c --layout-b S(0),P --mesh 2x2", ["needs B placed as P('i', 'j')", "j=sum"]),
        ("--algorithm cannon:foo", ["cannon:foo", "cannon:pull"]),
        ("--algorithm t10_rotate:2,2,1/3,2,1", ["ring of 3", "would fit"]),
        ("--algorithm cosma:3,3,3", ["27 ranks", "would fit"]),
        ("--picture no/such/dir/p.html", ["--picture no/such/dir/p.html"]),
        ("--layout-a xy->xyz --mesh 2x2", ["xy->xyz"]),
        ("--layout-a (S(0),S(2)) --mesh 2x2", ["S(2)"]),
    ],
)
@parallel(ranks=(4,), env=("node",))
def test_what_does_not_fit_is_one_message(comm: MPI.Intracomm, tmp_path: Path, line: str, words: list[str]) -> None:
    refused(command(comm, f"{line} --shape 64,64,64", tmp_path), *words)
    assert not list(tmp_path.iterdir())
