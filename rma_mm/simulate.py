"""`python -m rma_mm.simulate`: what a product would take on a described machine, without running it. Needs no MPI."""

import sys
from collections.abc import Sequence

from rma_mm.command.frame import alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return alone("simulate", argv)


if __name__ == "__main__":
    sys.exit(main())
