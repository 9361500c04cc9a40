"""Directives whose content is executed while the documentation is built, one after the other, in a folder of the page.

    ```{command}
    mpiexec -n 4 rma-mm run A.npy B.npy -o C.npy
    ```

runs the lines in bash and shows what they print. `{run} FILE.py` writes its content to that file and runs it, by
`mpiexec -n 4 python -m mpi4py FILE.py` if `:command:` names nothing else. `{file} NAME` writes a file. A command that
ends with another exit code than `:exit:` (0) is a warning, which is an error in the build. `{not-run} REASON` shows a
block that cannot be executed here, with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

LIMIT = 120  # seconds of a command
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash"}
LAUNCHERS = ("PMI", "MPI_", "OMPI_", "RMA_MM_")  # begin variables that a reader's shell does not have
CACHE = "RMA_MM_CACHE"  # one that is kept: calibrations that an earlier build made serve this one
logger = logging.getLogger(__name__)


class Executed(SphinxDirective):
    """A block that is run and shown with its output."""

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "exit": directives.nonnegative_int,
        "lines": directives.positive_int,  # of the output that are shown
        "command": directives.unchanged,
        "hide-output": directives.flag,
        "needs": directives.unchanged,  # a package without which the block is shown only
        "page": directives.unchanged,  # a page that it writes, shown below its output
    }

    def folder(self) -> Path:
        """Return the folder of the page, empty before its first block."""
        folder = Path(self.env.app.doctreedir).parent / "executed" / self.env.docname
        if self.env.temp_data.setdefault("executed", "") != self.env.docname:
            self.env.temp_data["executed"] = self.env.docname
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folder

    def executed(self, command: str) -> list[nodes.Node]:
        """Run a command and return its output as nodes."""
        needs = self.options.get("needs")
        if needs and find_spec(needs) is None:
            return [_note(f"not run in this build: {needs} is not installed")]
        text, code = run(command, self.folder())
        wanted = self.options.get("exit", 0)
        if code != wanted:
            said = f"{command} ended with exit code {code}, not {wanted}:\n{text}"
            logger.warning("%s", said, location=self.get_location())
        page = self.page() if "page" in self.options and not code else []
        if "hide-output" in self.options or not text:
            return page
        lines = text.rstrip().split("\n")
        most = self.options.get("lines", len(lines))
        if len(lines) > most:
            lines = [*lines[:most], "…"]
        shown = nodes.container("", _listing("\n".join(lines), "text"), classes=["output"])
        return [shown, *([_note(f"exit code {code}")] if code else []), *page]

    def page(self) -> list[nodes.Node]:
        """Copy the page that was written into the site, and show it."""
        name, docname = self.options["page"], self.env.docname
        place = Path("_static", "executed", docname, name)
        target = Path(self.env.app.outdir) / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder() / name, target)
        path = "/".join([".."] * docname.count("/") + [place.as_posix()])
        frame = f'<iframe class="page" title="{name}" src="{path}"></iframe>'
        return [nodes.raw("", frame, format="html")]


class Command(Executed):
    """Lines for bash."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        return [_listing(text, "bash"), *self.executed(text)]


class Program(Executed):
    """A file with a program, and the command that runs it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text, name = "\n".join(self.content), self.arguments[0]
        (self.folder() / name).write_text(text + "\n")
        command = self.options.get("command", f"mpiexec -n 4 python -m mpi4py {name}")
        return [_named(name, _listing(text, "python")), _listing(command, "bash"), *self.executed(command)]


class File(Executed):
    """A file that later blocks use."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text, name = "\n".join(self.content), self.arguments[0]
        (self.folder() / name).write_text(text + "\n")
        return [_named(name, _listing(text, LANGUAGES.get(Path(name).suffix, "text")))]


class NotRun(SphinxDirective):
    """A block that is only shown, and why."""

    has_content, required_arguments, final_argument_whitespace = True, 1, True
    option_spec: ClassVar[dict[str, Any]] = {"language": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        block = _listing(text, self.options.get("language", "bash"))
        return [nodes.container("", _note(f"not run in this build: {self.arguments[0]}"), block, classes=["not-run"])]


def _listing(text: str, language: str) -> nodes.Node:
    return nodes.literal_block(text, text, language=language)


def _named(name: str, block: nodes.Node) -> nodes.Node:
    """Return a block below the name of its file."""
    caption = nodes.caption("", "", nodes.literal(name, name))
    return nodes.container("", caption, block, literal_block=True, classes=["literal-block-wrapper"])


def _note(text: str) -> nodes.Node:
    return nodes.paragraph(text, text, classes=["why"])


def run(command: str, folder: Path) -> tuple[str, int]:
    """Run a command as a reader would in a new shell, and return what it printed and its exit code."""
    binaries = Path(sys.executable).parent
    mine = {name: value for name, value in os.environ.items() if name == CACHE or not name.startswith(LAUNCHERS)}
    mine |= {"PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "100"}
    mine |= {"RMA_MM_PROGRESS": "off", "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], check=False, cwd=folder, env=mine, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        return f"{error.stdout or ''}\nnot done after {LIMIT} s", -1
    finally:
        logger.verbose("%5.1f s  %s", time.monotonic() - begun, shlex.quote(command))
    return re.sub(re.escape(str(folder)) + "/?", "", done.stdout), done.returncode


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in (("command", Command), ("run", Program), ("file", File), ("not-run", NotRun)):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
