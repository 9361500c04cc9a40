"""Docstrings read plainly: how they begin, how long their sentences are, and what public ones say of parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rma_mm import _PUBLIC
from tests.processes import ROOT
from tests.thorough import thorough

BEGINNINGS = {"What", "Whether", "Where", "How", "Who", "Of", "Those"}
"""Words that hide the noun a docstring is about."""
LONGEST, SHORTEST = 30, 6
"""Words of a sentence of a public docstring at most, and of a docstring of private code at least."""
PUBLIC = {f"rma_mm{module.replace('.', '/')}.py" for module in _PUBLIC.values() if module != ".algorithms"} | {
    "rma_mm/algorithms/registry.py", "rma_mm/dsl/scheduling.py", "rma_mm/dsl/signature.py",
    "rma_mm/elements/semiring.py", "rma_mm/errors.py", "rma_mm/flavours.py", "rma_mm/geometry/mesh.py",
    "rma_mm/geometry/notation.py", "rma_mm/jax.py", "rma_mm/runtime/files/formats.py",
    "rma_mm/runtime/matrices/operators.py", "rma_mm/runtime/matrices/stored.py",
    "rma_mm/runtime/products/batched/plan.py",
    "rma_mm/runtime/products/make_plan.py", "rma_mm/torch/dtensors.py", "rma_mm/torch/linear.py",
    "rma_mm/torch/products.py", "rma_mm/torch/state.py", "rma_mm/windows/base.py",
}
"""Files with names that users call or implement."""
CALLED = {
    "closure", "einsum", "list_algorithms", "load", "matmul", "make_plan", "open", "plan_chain", "verify", "mm",
    "empty", "matrix_of", "Linear", "device_mesh", "from_dtensor", "to_dtensor", "full_state_dict", "load_safetensors",
    "from_jax", "to_jax", "register", "register_format", "register_semiring", "product", "signed", "parse_layout",
    "Loops.distribute", "Loops.divide", "Loops.split", "Loops.reorder", "Loops.communicate", "Loops.rotate",
    "Loops.algorithm", "Mesh", "Mesh.close", "Mesh.leave", "Opened.read", "Plan.execute", "Plan.explain",
    "Plan.prepare", "Plan.set_bias", "Plan.close", "Plan.picture", "Plan.page", "Plan.frontier", "ChainPlan.execute",
    "ChainPlan.backward", "ChainPlan.close", "Distributed.empty", "Distributed.from_numpy", "Distributed.from_function",
    "DistMatrix.from_local", "DistMatrix.load", "DistMatrix.from_source", "DistMatrix.redistribute",
    "DistMatrix.to_numpy", "DistMatrix.save", "DistMatrix.aslinearoperator", "DistMatrix.copy_from",
    "DistArray.from_local", "DistArray.redistribute", "DistArray.to_numpy", "DistArray.save", "DistArray.copy_from",
    "DistArray.close", "Stored.close", "zeros", "ones", "eye", "random", "Multiplicand.astype", "Multiplicand.sum",
    "Multiplicand.mean", "Multiplicand.max", "Multiplicand.min", "Multiplicand.all", "Multiplicand.any",
    "Multiplicand.norm",
}
"""Functions and methods that users call: numpydoc's sections are complete there."""
CHECKS = {"GL03", "GL07", "GL08", "PR01", "PR02", "PR03", "PR07", "PR10", "RT03", "SS02", "SS03", "SS05", "YD01"}
"""Of numpydoc's validator: sections in order, every parameter described, a summary that is a sentence in imperative."""


class Text(NamedTuple):
    """A docstring, or the string behind a field or a constant."""

    file: str
    line: int
    name: str
    words: list[str]
    paragraphs: str
    is_field: bool


def texts(source: str, file: str = "") -> Iterator[Text]:
    """Yield all docstrings of a module, and the strings behind its fields and constants."""

    def visit(node: ast.AST, name: str) -> Iterator[Text]:
        body = getattr(node, "body", None)
        for n, child in enumerate(body if isinstance(body, list) else ()):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(file, child.lineno, name, value.value.split(), value.value, bool(n))
            inside = isinstance(child, ast.ClassDef | ast.FunctionDef)
            yield from visit(child, f"{name}.{child.name}".lstrip(".") if inside else name)

    yield from visit(ast.parse(source), "")


def all_texts() -> list[Text]:
    files = sorted((ROOT / "rma_mm").rglob("*.py"))
    return [text for path in files for text in texts(path.read_text(), str(path.relative_to(ROOT)))]


def is_public(text: Text) -> bool:
    return text.file in PUBLIC and not any(part.startswith("_") for part in text.name.split("."))


def beginnings(found: list[Text]) -> list[str]:
    bad = [text for text in found if BEGINNINGS.intersection(text.words[:1])]
    return [f"{text.file}:{text.line}: {text.words[0]}" for text in bad]


def too_short(found: list[Text]) -> list[str]:
    return [
        f"{text.file}:{text.line}: {' '.join(text.words)}"
        for text in found
        if not (text.is_field or is_public(text)) and len(text.words) < SHORTEST
    ]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose: examples, sections' headings and names of parameters end one, too."""
    prose = re.sub(r"(?m)^\s*(>>>|\.\.\.|-{3,}).*$", ".\n", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[\w*, ]+ : )|\n\s*\.\n", prose):
        yield from re.split(r"(?<=[.!?])\s+(?=[\"“(`\w])", " ".join(paragraph.split()))


def too_long(found: list[Text]) -> list[str]:
    return [
        f"{text.file}:{text.line}: {sentence}"
        for text in found
        if is_public(text) and text.name
        for sentence in sentences(text.paragraphs)
        if len(sentence.split()) > LONGEST
    ]


def test_docstrings_name_what_they_are_about() -> None:
    assert beginnings(all_texts()) == []


def test_private_docstrings_say_more_than_a_name() -> None:
    assert too_short(all_texts()) == []


def test_sentences_are_short() -> None:
    assert too_long(all_texts()) == []


def test_faults_are_found() -> None:
    source = '"""How it is."""\nX = 1\n"""Of a plan."""\n'
    source += 'def f():\n    """Do it now."""\n    def g():\n        """Who calls."""\n'
    found = list(texts(source, "private.py"))
    assert [each.partition(": ")[2] for each in beginnings(found)] == ["How", "Of", "Who"]
    assert [each.partition(": ")[2] for each in too_short(found)] == ["How it is.", "Do it now.", "Who calls."]
    long = f'def f():\n    """Do it {"very " * 30}well. Then stop."""\n'
    assert len(too_long(list(texts(long, "rma_mm/jax.py")))) == 1 and not too_long(list(texts(long, "private.py")))


@thorough
def test_sections_are_complete() -> None:
    validator = pytest.importorskip("numpydoc.hooks.validate_docstrings").AstValidator
    from numpydoc.validate import validate

    seen, faults = set(), []
    for file in sorted(PUBLIC):
        tree = ast.parse((ROOT / file).read_text())
        owners = [(tree, "")] + [(node, f"{node.name}.") for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner, prefix in owners:
            for node in owner.body:
                name = prefix + getattr(node, "name", "")
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and name in CALLED:
                    seen.add(name)
                    doc = validate(name, validator, ast_node=node, filename=Path(file), ancestry=[tree, owner])
                    faults += [f"{file}: {name}: {code}: {why}" for code, why in doc["errors"] if code in CHECKS]
    assert not faults, "\n".join(faults)
    assert seen == CALLED
