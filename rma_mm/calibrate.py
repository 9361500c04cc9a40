"""`mpiexec -n P python -m rma_mm.calibrate`: measure what products are priced by here, keep it, and show it."""

import sys
from collections.abc import Sequence

from rma_mm.launch import on_all_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank. Collective over COMM_WORLD."""

    def command() -> int:
        from rma_mm.command.frame import on_ranks

        return on_ranks("calibrate", argv)

    return on_all_ranks(command)


if __name__ == "__main__":
    sys.exit(main())
