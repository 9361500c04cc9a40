"""The house rules of `rma_mm`: who may import whom, and how long files and functions may be."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.flavours import FLAVOURS
from rma_mm.runtime.files.formats import FORMATS
from tests.processes import ROOT
from tests.thorough import thorough

PACKAGE = "rma_mm"
FLOORS = {"errors": 0, "classes": 0, "flavours": 0, "unfinished": 0, "segments": 0, "launch": 0, "elements": 0,
    "geometry": 0, "schedule": 1, "algorithms": 2, "dsl": 2, "policy": 3, "runtime": 4, "torch": 5, "command": 5}
HARDWARE = {"windows", "kernels"}
HARDWARE_MAY_IMPORT = {"errors", "classes", "flavours", "elements", "geometry"}
TOP = 5
"""The floor of run.py, of other modules at the top level, and of the package's public names."""

NO_MPI_UP_TO = 3
HEAVY = {"mpi4py", "numba"}
MAX_LINES = 600
MAX_FUNCTION_LINES = 40
SHORT_SHARE = 0.9

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES
}

IMPORT_ALL = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(HEAVY)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & set({sorted(HEAVY)!r}))
assert not loaded, loaded
"""


def unit(module: str) -> str:
    """`rma_mm.geometry.spans` → `geometry`; the package itself → ``."""
    return module.partition(".")[2].partition(".")[0]


def floor(name: str) -> int:
    """The floor of a unit."""
    return FLOORS.get(name, TOP)


@cache
def parsed(file: Path) -> ast.Module:
    """A file of the package, read once for all tests."""
    return ast.parse(file.read_text())


@cache
def imported(module: str) -> list[tuple[int, str]]:
    """Line and full name of everything `module` imports, inside functions and TYPE_CHECKING too."""
    return list(_imports(module))


def _imports(module: str) -> Iterator[tuple[int, str]]:
    is_package = MODULES[module].name == "__init__.py"
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                is_unit = base == PACKAGE and (ROOT / PACKAGE / alias.name).exists()
                yield node.lineno, whole if whole in MODULES or is_unit else base


def objection(module: str, target: str) -> str:
    """Why `module` may not import `target`; empty where it may."""
    here = unit(module)
    if target.partition(".")[0] in HEAVY and here in FLOORS and FLOORS[here] <= NO_MPI_UP_TO:
        return f"floors 0 to {NO_MPI_UP_TO} plan without MPI and numba"
    if target.partition(".")[0] != PACKAGE or unit(target) == here:
        return ""
    there = unit(target)
    if here in HARDWARE:
        return "" if there in HARDWARE_MAY_IMPORT else f"hardware knows only {sorted(HARDWARE_MAY_IMPORT)}"
    if there in HARDWARE:
        return "" if floor(here) > NO_MPI_UP_TO else "only the executor sees schedules and hardware"
    if floor(there) > floor(here):
        return f"floor {floor(here)} may not import from floor {floor(there)}"
    return ""


def test_imports_go_down() -> None:
    """A module imports only from its own floor and lower ones."""
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line}: imports {target}: {reason}"
        for module in MODULES
        for line, target in imported(module)
        if (reason := objection(module, target))
    ]
    assert not wrong, "\n".join(wrong)


def test_dataclasses_are_defined_fast() -> None:
    standard = re.compile(r"from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass")
    assert [m for m, file in MODULES.items() if standard.search(file.read_text())] == ["rma_mm.classes"]


def test_every_package_has_a_floor() -> None:
    """A new package must be placed."""
    packages = {path.name for path in (ROOT / PACKAGE).iterdir() if any(path.glob("*.py"))}
    assert packages <= set(FLOORS) | HARDWARE


def test_planning_imports_without_mpi() -> None:
    """Floors 0 to 3, and the package itself, load where mpi4py and numba are not installed."""
    planning = [name for name in MODULES if FLOORS.get(unit(name), TOP) <= NO_MPI_UP_TO]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, PACKAGE, *planning],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@thorough
def test_each_planning_module_imports_alone() -> None:
    """Any of them can be the first import: no cycle is hidden by a lucky order. Only NumPy is there before."""
    planning = [name for name in MODULES if FLOORS.get(unit(name), TOP) <= NO_MPI_UP_TO]
    code = "import os, sys, numpy\nfor name in sys.argv[1:]:\n  if os.fork() == 0:\n    __import__(name); os._exit(0)\n"
    code += "  assert os.wait()[1] == 0, name\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *planning],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def named_in(tree: ast.Module) -> Iterator[tuple[int, str, set[str]]]:
    """Line and text of every string that may be a name or hold one, and what it may name; docstrings apart."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "no name"
        if id(node) not in said and not re.search(r"\s", text.strip()):
            yield node.lineno, text, {text, *re.split(r"\W+", text)}


HOMES: dict[str, str] = {
    **dict.fromkeys(FLAVOURS, "flavours.py"),
    **dict.fromkeys(SEMIRINGS, "elements/semiring.py"),
    **{
        suffix: f"{kind.open.__module__.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py"
        for suffix, kind in FORMATS.items()
        if suffix and kind.open.__module__.startswith(f"{PACKAGE}.")  # others are registered by tests
    },
}
"""The file of each flavour, semiring and suffix of a format."""
KNOWN = "runtime/files/containers/known.py"  # registers formats whose files are imported when wanted


def test_a_name_stands_where_it_is_registered() -> None:
    """What depends on a flavour, a semiring or a format asks for a fact of it: a new one is one file and one line."""
    found = [
        (str(file.relative_to(ROOT / PACKAGE)), line, name)
        for file in FILES
        for line, _, words in named_in(parsed(file))
        for name in words & HOMES.keys()
    ]
    strays = [each for each in found if each[0] != HOMES[each[2]]]
    assert [each for each in strays if each[0] != KNOWN or each[2] not in FORMATS] == []
    assert {name for _, _, name in found} == HOMES.keys()


SPOKEN = [
    ('x == "shared"', {"shared"}),
    ('f"shared.{move}", "created.get"', {"shared.", "created.get"}),
    ('"""shared"""\nx = "use shared memory", "SharedWindow", shared', set()),
]


def test_how_names_are_found() -> None:
    """Names in comparisons and keys, and none in sentences."""
    for source, found in SPOKEN:
        assert {text for _, text, words in named_in(ast.parse(source)) if words & {"shared", "created"}} == found


def test_no_file_is_long() -> None:
    """A file is one noun."""
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_functions_are_short() -> None:
    """Nine in ten are under 40 lines, docstring included."""
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = sorted((name for name in lengths if lengths[name] >= MAX_FUNCTION_LINES), key=lengths.__getitem__)
    assert len(long) <= (1 - SHORT_SHARE) * len(lengths), long


SAMPLES = [
    ("rma_mm.policy.costs", "mpi4py.MPI", False),
    ("rma_mm.policy.costs", "rma_mm.schedule.passes", True),
    ("rma_mm.policy.costs", "rma_mm.windows.shared", False),
    ("rma_mm.schedule.passes", "rma_mm.policy.costs", False),
    ("rma_mm.schedule.passes", "rma_mm.schedule.operations", True),
    ("rma_mm.geometry.mesh", "rma_mm.errors", True),
    ("rma_mm.geometry.mesh", "rma_mm", False),
    ("rma_mm.windows.shared", "rma_mm.errors", True),
    ("rma_mm.windows.shared", "rma_mm.kernels.blas", False),
    ("rma_mm.windows.shared", "rma_mm.schedule.operations", False),
    ("rma_mm.windows.shared", "mpi4py.MPI", True),
    ("rma_mm.runtime.execution.executor", "rma_mm.kernels.blas", True),
    ("rma_mm.runtime.execution.executor", "rma_mm.run", False),
    ("rma_mm.run", "rma_mm.runtime.execution.executor", True),
    ("rma_mm", "rma_mm.runtime.execution.executor", True),
    ("rma_mm.run", "numpy", True),
]


def test_the_rule_itself() -> None:
    """The floors as the design draws them."""
    assert [each for each in SAMPLES if bool(objection(*each[:2])) is each[2]] == []
