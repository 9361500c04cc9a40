"""The rooms of the house: which may know which, that none is in a circle, and what a room and its face may hold."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

from tests.processes import ROOT
from tests.pure.test_floors import FILES, MODULES, PACKAGE, imported, parsed

ROOMS = {
    "geometry": {"notations": 1, "notation": 2},
    "schedule": {"passes": 1, "lowering": 2, "verify": 2, "interpret": 3, "drawing": 3},
    "policy": {"model": 0, "simulator": 1, "planner": 1},
    "runtime": {
        "watching": 0, "ranks": 1, "execution": 2, "files": 2, "calibration": 2, "pretended": 2,
        "verification": 3, "reports": 3, "matrices": 4, "products": 5, "chains": 6, "graphs": 6, "einsum": 7,
    },
}
"""Of the units that have rooms, on which level each is; modules beside them are on level 0."""
EXCEPTIONS = {("rma_mm.runtime.matrices.operators", "rma_mm.runtime.products.matmul")}
"""`A @ B` is written on matrices, and done by what is above them."""
FILES_IN_A_ROOM = 14
ROWS = f"{PACKAGE}/algorithms"
"""It has a file for each row."""
FACE = (ast.Import, ast.ImportFrom, ast.If)
"""What may stand in a face, beside its docstring and `__all__`."""
OWN_FACE = PACKAGE
"""The package's own has to load lazily: its public names import MPI."""


@cache
def arcs() -> frozenset[tuple[str, str, int]]:
    """(module, what it imports, line) within the package: functions' and TYPE_CHECKING's imports too."""
    found = ((module, target, line) for module in MODULES for line, target in imported(module) if target in MODULES)
    return frozenset(arc for arc in found if arc[0] != arc[1] and arc[:2] not in EXCEPTIONS)


def room(module: str) -> tuple[str, str]:
    """(unit, room) of a module: `rma_mm.runtime.ranks.mesh` → runtime, ranks."""
    parts = [*module.split("."), "", ""]
    return parts[1], parts[2]


def is_upwards(module: str, target: str) -> bool:
    """Whether an import goes to a room on the same level or above."""
    (unit, here), (other, there) = room(module), room(target)
    levels = ROOMS.get(unit, {})
    return unit == other and here != there and there in levels and levels[there] >= levels.get(here, 0)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that reach themselves, each set of them once."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    found = {tuple(sorted(other for other in reach[module] if module in reach[other])) for module in graph}
    return [list(each) for each in sorted(found) if each]


def test_rooms_know_only_those_below() -> None:
    wrong = [f"{MODULES[m].relative_to(ROOT)}:{line}: imports {t}" for m, t, line in arcs() if is_upwards(m, t)]
    assert not wrong, "\n".join(sorted(wrong))


def test_every_room_has_a_level() -> None:
    """A new one must be placed."""
    for unit, levels in ROOMS.items():
        rooms = {path.name for path in (ROOT / PACKAGE / unit).iterdir() if any(path.glob("*.py"))}
        assert rooms <= set(levels)


def test_no_circle() -> None:
    """Among all modules, imports inside functions and for types counted."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target, _ in arcs():
        graph[module].add(target)
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert is_upwards("rma_mm.runtime.ranks.mesh", "rma_mm.runtime.products.plan")
    assert is_upwards("rma_mm.schedule.ops", "rma_mm.schedule.lowering.lower")
    assert not is_upwards("rma_mm.runtime.products.plan", "rma_mm.runtime.ranks.mesh")


def test_faces_define_nothing() -> None:
    faces = [name for name, file in MODULES.items() if file.name == "__init__.py" and name != OWN_FACE]
    body = [(module, node) for module in faces for node in parsed(MODULES[module]).body if not isinstance(node, FACE)]
    rest = [x for x in body if not (isinstance(x[1], ast.Assign) and ast.unparse(x[1].targets[0]) == "__all__")]
    assert [f"{module}: {ast.unparse(node)[:60]}" for module, node in rest if not isinstance(node, ast.Expr)] == []


def test_no_room_is_crowded() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in FILES if file.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > FILES_IN_A_ROOM and name != ROWS} == {}


def test_public_classes_have_names_of_their_own() -> None:
    names = Counter(
        node.name
        for file in FILES
        for node in parsed(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
