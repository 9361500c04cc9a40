"""The programs that README.md and docs/ print run as they stand, and print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, mpirun
from tests.thorough import usually

PROGRAM = re.compile(r"```python\n(# (\w+\.py)[^\n]*\n.*?)```", re.DOTALL)
OUTPUT = re.compile(r"prints\n\n```\n(.*?)```", re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {name: (text, path) for path in DOCUMENTS for text, name in PROGRAM.findall(path.read_text())}


@pytest.mark.parametrize("name", usually(2, ["product.py", *sorted({*PROGRAMS} - {"product.py"})]))
def test_programs_of_the_documents(tmp_path: Path, name: str) -> None:
    text, path = PROGRAMS[name]
    if match := re.search(r"^import (?:rma_mm\.)?(torch|jax)\b", text, re.MULTILINE):
        pytest.importorskip(match[1])
    (tmp_path / name).write_text(text)
    done = mpirun(4, ["-m", "mpi4py", name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if path.name == "README.md":
        (output,) = OUTPUT.findall(path.read_text())
        assert done.stdout == output
