"""The programs that README.md prints run as they stand, and print what stands below them.

Those of `docs/` are executed when the documentation is built.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, mpirun

PROGRAM = re.compile(r"```python\n(# (\w+\.py)[^\n]*\n.*?)```", re.DOTALL)
OUTPUT = re.compile(r"prints\n\n```\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text()
PROGRAMS = {name: text for text, name in PROGRAM.findall(README)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_documents(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(PROGRAMS[name])
    done = mpirun(4, ["-m", "mpi4py", name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (output,) = OUTPUT.findall(README)
    assert done.stdout == output
