"""ARCHITECTURE.md, CONTRIBUTING.md and the vocabulary name only what there is, and words where they are defined."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.processes import ROOT

DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reference/vocabulary.md")
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")
FILE = re.compile(r"(?<![\w/.-])(?:[\w.-]+/)+(?:[\w-]+\.\w+)?|(?<![\w/.-])[\w-]+\.(?:py|md|toml)\b")
"""A path in a text: folders end with a slash, files have a suffix."""
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
WORD = re.compile(r"((?:`[\w.]+`, )*`[\w.]+`) in `([\w/.]+)`")
"""Names, and the file in which they are said to be defined."""
RECIPES = "NAME"
"""What the reader of a recipe is to choose."""
OUTSIDE = {*dir(builtins), "sys.setprofile", "pytest"}
"""Names that are not the project's."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


@cache
def defined(file: Path) -> frozenset[str]:
    """What a file defines, parameters and fields too; what belongs to a class also as `Class.member`."""
    names: set[str] = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            found, inside = "", owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found = child.name
                inside = found if isinstance(child, ast.ClassDef) else owner
            elif isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
                found = child.id if isinstance(child, ast.Name) else child.attr
            elif isinstance(child, ast.arg):
                found = child.arg
            names.update({found, f"{owner}.{found}"} if found else ())
            visit(child, inside)

    visit(ast.parse(file.read_text()), "")
    return frozenset(names)


@cache
def known() -> frozenset[str]:
    """What the package and the tests define."""
    files = [file for folder in ("rma_mm", "tests") for file in (ROOT / folder).rglob("*.py")]
    return frozenset().union(*map(defined, files))


@cache
def inside() -> list[str]:
    """The files and folders of the package and the tests."""
    return [f"/{file.relative_to(ROOT)}" for folder in ("rma_mm", "tests") for file in (ROOT / folder).rglob("*")]


def is_there(path: str, document: str) -> bool:
    """Whether a path is one from the root, from beside the document, or the end of one of the package or the tests."""
    places = [ROOT / path, (ROOT / document).parent / path]
    return any(place.exists() for place in places) or any(file.endswith(f"/{path.rstrip('/')}") for file in inside())


def faults(text: str, document: str = DOCUMENTS[0]) -> Iterator[str]:
    """What the text of a document names and is not there."""
    for path in (*LINK.findall(text), *FILE.findall(text)):
        if RECIPES not in path and not is_there(path.rstrip("."), document):
            yield f"there is no {path}"
    for quoted in QUOTED.findall(text):
        name = quoted.partition("(")[0].removeprefix("rma_mm.")
        if not NAME.fullmatch(name) or FILE.fullmatch(name) or name in OUTSIDE or name == RECIPES:
            continue
        if ".".join(name.split(".")[-2:]) not in known():
            yield f"nothing is called {name}"
    for names, path in WORD.findall(text):
        file = ROOT / path
        missing = [name for name in QUOTED.findall(names) if file.is_file() and name not in defined(file)]
        yield from (f"{path} does not define {name}" for name in missing)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_named_is_there(document: str) -> None:
    assert list(faults(text_of(document), document)) == []


def test_what_is_not_there_is_found() -> None:
    text = "`Span` in `rma_mm/geometry/mesh.py`, `Spam`, `Span.spam`, `mesh.py`, `mess.py`, [x](docs/none.md), none/"
    assert list(faults(text)) == [
        "there is no docs/none.md", "there is no mess.py", "there is no docs/none.md", "there is no none/",
        "nothing is called Spam", "nothing is called Span.spam", "rma_mm/geometry/mesh.py does not define Span",
    ]


def test_rooms_and_words() -> None:
    """Each room that has modules has a line, and the words are in their order."""
    homes = [file.relative_to(ROOT).parts[:-1] for file in (ROOT / "rma_mm").rglob("*.py") if file.stem != "__init__"]
    rooms = {"/".join(home[: 3 if home[1] in ("policy", "runtime") else 2]) for home in homes if len(home) > 1}
    assert [room for room in sorted(rooms) if f"| `{room}/` |" not in text_of("ARCHITECTURE.md")] == []
    lines = text_of("docs/reference/vocabulary.md").splitlines()
    words = [line.split(" | ")[0] for line in lines if line.startswith("| ")][1:]
    assert words == sorted(words, key=str.lower)


def test_they_are_short() -> None:
    lengths = {document: len(text_of(document).splitlines()) for document in DOCUMENTS}
    assert lengths["ARCHITECTURE.md"] <= 150 and lengths["CONTRIBUTING.md"] <= 100, lengths
