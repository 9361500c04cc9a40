"""The frame around a command: options that all ranks agree on, what is said once for all, exit codes, and the end.

A command NAME is two modules. `options/NAME.py` imports little and has `parse(argv)`, which gives the options or raises
OptionError, and `text(options)`, which is what they ask to be printed instead of a run, as --help does, or empty.
`NAME.py` has `run(options, frame)`, which gives the exit code, or raises RmaError, on all ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any, TextIO

from rma_mm.classes import dataclass
from rma_mm.command.options.commands import COMMANDS
from rma_mm.command.signals import Interruption, cleaning
from rma_mm.errors import RmaError, ScheduleError, VerificationError, in_lines
from rma_mm.launch import launcher_rank, part

IN_ASCII = str.maketrans({
    "·": "*", "×": "x", "−": "-", "–": "-", "←": "<-", "→": "->", "⇐": "<=", "⇒": "=>", "≤": "<=", "≥": ">=", "µ": "u",
    "…": "...", "─": "-", "│": "|", **dict.fromkeys("┌┬┐├┼┤└┴┘", "+"),
})
"""Characters of reports as they are written for terminals that have ASCII alone."""
DONE, FAILED, REFUSED, WRONG = 0, 1, 2, 4
"""Exit codes: done; failed at run time; bad arguments or input; the result failed verification."""


@dataclass
class Frame:
    """The surroundings of a command: its ranks, its output, and how it ends."""

    interruption: Interruption
    comm: Any = None  # all ranks of the job; None for a command without MPI
    has_begun: bool = False  # true if what fails from now on is no longer the arguments' or the input's fault

    unsaid: str = ""  # why standard output could not be written

    @property
    def is_first(self) -> bool:
        return (launcher_rank() if self.comm is None else self.comm.rank) == 0

    def run(self, name: str, argv: Sequence[str] | None) -> int:
        """Run the command of that name; the exit code. Collective; raises what is nobody's input's fault."""
        words = sys.argv[1:] if argv is None else argv
        try:
            with self._agreed(words):
                options = import_module(f"rma_mm.command.options.{name}").parse(words)
            code: int = import_module(f"rma_mm.command.{name}").run(options, self)
            return code
        except ScheduleError:
            raise
        except RmaError as error:
            self.interruption.go_first()
            self.complain(str(error) + (cleaning(str(error)) if self.is_first else ""))
            if isinstance(error, VerificationError):
                return WRONG
            return FAILED if self.has_begun else REFUSED

    def _agreed(self, words: Sequence[str]) -> AbstractContextManager[Any]:
        """Run a block so that all ranks learn of its errors."""
        if self.comm is None:
            return nullcontext()
        from rma_mm.runtime.ranks.agreement import agreed

        return agreed(self.comm, "command line", arguments=" ".join(words))

    def say(self, *texts: str) -> None:
        """Write texts to rank 0's standard output, each on lines of its own."""
        if self.is_first and not self.unsaid:
            try:
                _put(sys.stdout, "".join(text.removesuffix("\n") + "\n" for text in texts))
            except OSError as error:  # a full disk, say: what is under way goes on, and the exit code tells
                self.unsaid = str(error.strerror)
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes once more as it ends
                self.complain(f"standard output: {self.unsaid}")

    def complain(self, message: str) -> None:
        """Print an error on rank 0's standard error, in at most six lines."""
        if self.is_first:
            with suppress(OSError):
                _put(sys.stderr, in_lines(f"rma_mm: {message}"))

    def abort(self) -> None:
        """End the job from this rank, after its traceback."""
        if not self.is_first:
            time.sleep(0.3)  # where all ranks fail alike, rank 0 is the one to be heard
        with suppress(OSError):
            _put(sys.stderr, traceback.format_exc())
            _put(sys.stdout, "")
        self.interruption.clean()
        time.sleep(0.1)  # mpiexec loses what it has not read when the job ends
        self.comm.Abort(1)
        os._exit(1)


def _put(stream: TextIO | None, text: str) -> None:
    """Write at once; that the stream was closed before we came, or its reader has gone away, is no error.

    Characters that the stream's encoding does not have are written in ASCII.
    """
    if stream is not None:
        encoding = stream.encoding or "ascii"
        try:
            text.encode(encoding, stream.errors or "strict")
        except UnicodeEncodeError:
            text = text.translate(IN_ASCII).encode(encoding, "replace").decode(encoding)
        with suppress(BrokenPipeError):
            stream.write(text)
            stream.flush()


def start(name: str, argv: Sequence[str] | None) -> int:
    """Run a command, on all ranks if it is one of those that need MPI; the exit code, the same on every rank."""
    code = _shown(name, sys.argv[1:] if argv is None else argv)
    if code is not None:
        return code
    return on_ranks(name, argv) if COMMANDS[name].needs_ranks else alone(name, argv)


def _shown(name: str, words: Sequence[str]) -> int | None:
    """Print what the options ask to be printed instead of a run, on one rank; the exit code, or None if they do not.

    MPI is not started. Wrong options are left to all ranks together.
    """
    module = import_module(f"rma_mm.command.options.{name}")
    try:
        text = module.text(module.parse(words))
    except RmaError:
        return None
    return say_alone(text) if text else None


def say_alone(text: str) -> int:
    """Print a text on one rank, without MPI; the exit code."""
    frame = Frame(Interruption())
    frame.say(text)
    return FAILED if frame.unsaid else DONE


def on_ranks(name: str, argv: Sequence[str] | None) -> int:
    """Run a command on all ranks; the exit code, the same on every rank. Collective over COMM_WORLD.

    MPI comes first: what the command imports starts threads, of which there may be too few.
    """
    from rma_mm.command.launcher import LauncherError, connect

    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard error to speak on
        faulthandler.enable()  # a bus error, as from a full /dev/shm, is named, and where it was
    with Interruption() as interruption, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow in a user's matrices is theirs to know
        frame = Frame(interruption)
        try:
            frame.comm = connect()
        except LauncherError as error:
            frame.complain(str(error))
            said = f"rma_mm: rank {launcher_rank()}: {error}" if launcher_rank() else ""
            return part(REFUSED, said, error.is_alike)
        try:
            interruption.enlist(frame.comm)
            return frame.run(name, argv) or (FAILED if frame.unsaid else DONE)
        except BaseException:  # SystemExit too: the other ranks wait in a collective, nothing but the end can follow
            frame.abort()
            raise


def alone(name: str, argv: Sequence[str] | None) -> int:
    """Run a command that needs no MPI; the exit code."""
    frame = Frame(Interruption())
    return frame.run(name, argv) or (FAILED if frame.unsaid else DONE)
