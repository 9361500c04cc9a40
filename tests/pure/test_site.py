"""The documentation: every block is executed or says why not, and the built site asks nobody else for anything."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.processes import ROOT

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
FENCE = re.compile(r"^[ ]*(`{3,}|~{3,})(.*)$", re.MULTILINE)
EXECUTED = {"{code-cell}", "{command}", "{run}"}
SHOWN = {"{not-run}", "{file}", "{toctree}", "{eval-rst}", "{literalinclude}"}
"""Blocks with a reason why they are not executed, files of executed blocks, and what is no program."""
ASKS = re.compile(
    r"""<(?:script|img|iframe|audio|video|source|embed)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b(?![^>]*rel=["']?(?:canonical|search))[^>]*\bhref=["']?(?:https?:)?//|@import\s+["']?(?:https?:)?//|"""
    r"""url\(["']?(?:https?:)?//|\bfetch\(["']https?://""",
)
"""What a browser would load from another host."""
LINK = re.compile(r"\]\(((?!https?:|#)[^)\s]+)\)")


def blocks(text: str) -> list[tuple[str, str]]:
    """The word behind each opening fence, and the rest of its line."""
    found, is_open = [], ""
    for fence, rest in FENCE.findall(text):
        if is_open:
            is_open = "" if fence.startswith(is_open) and not rest.strip() else is_open
        else:
            is_open = fence
            word, _, more = rest.strip().partition(" ")
            found.append((word, more))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_block_is_executed_or_says_why_not(page: Path) -> None:
    for word, more in blocks(page.read_text()):
        assert word in EXECUTED | SHOWN, f"{word} {more}: must be one of {sorted(EXECUTED | SHOWN)}"
        assert word not in ("{not-run}", "{run}", "{file}") or more, f"{word} needs words behind it"


def test_links_within_the_documentation_lead_somewhere() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in (ROOT / "README.md", *PAGES)
        for target in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL))
        if not (page.parent / target.partition("#")[0]).exists()
    ]
    assert lost == []


def test_blocks_are_found() -> None:
    text = "```{command}\nls\n```\n\n- x\n\n  ```python\n  1\n  ```\n````{not-run} why\n```\n````\n"
    assert blocks(text) == [("{command}", ""), ("python", ""), ("{not-run}", "why")]


SITE = os.environ.get("SITE")


@pytest.mark.skipif(not SITE, reason="SITE names no folder of a built site")
def test_no_page_asks_another_host() -> None:
    pages = sorted(Path(SITE or "").rglob("*.html"))
    assert len(pages) > 50
    asking = [f"{page}: {found[0]}" for page in pages for found in ASKS.finditer(page.read_text()) if found]
    assert asking == []
    styles = [path for path in Path(SITE or "").rglob("*.css") if ASKS.search(path.read_text())]
    assert styles == []


def test_requests_are_found() -> None:
    for text in ('<script src="https://x.org/a.js">', "<img alt=x src='//x.org/a.png'>", "@import 'https://x.org'",
                 '<link rel="stylesheet" href="https://x.org/a.css">', "url(https://x.org/a.woff)"):
        assert ASKS.search(text), text
    assert not ASKS.search('<a href="https://x.org">x</a><script src="_static/a.js"></script><img src="a.png">')
