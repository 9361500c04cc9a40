"""Choose the command that the first word of a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from rma_mm.command.frame import REFUSED, Frame, say_alone, start
from rma_mm.command.options.commands import COMMANDS, help_text
from rma_mm.command.signals import Interruption
from rma_mm.errors import nearest, quoted
from rma_mm.launch import part


def choose(words: Sequence[str]) -> int:
    """Run the command that the first word names, and return its exit code.

    Options and files without a command are those of `run`, as `rma-mm A.npy B.npy` was its name before.
    """
    first = words[0] if words else "--help"
    if first in COMMANDS:
        return start(first, words[1:])
    if first in ("-h", "--help", "help"):
        return say_alone(help_text())
    if first == "--version":
        return say_alone(f"rma_mm {import_module('rma_mm').__version__}")
    if first.startswith("-") or any(mark in first for mark in "./:["):
        return start("run", words)
    rule = f"{nearest(first, COMMANDS)}use one of {', '.join(COMMANDS)}"
    Frame(Interruption()).complain(f"command: got {quoted(first)}; {rule}")
    return part(REFUSED, is_alike=True)
