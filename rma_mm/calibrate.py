"""`mpiexec -n P python -m rma_mm.calibrate`: measure this machine, store the figures, and show them."""

import sys
from collections.abc import Sequence

from rma_mm.launch import on_all_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank."""

    def command() -> int:
        from rma_mm.command.frame import start

        return start("calibrate", argv)

    return on_all_ranks(command)


if __name__ == "__main__":
    sys.exit(main())
