"""`rma-mm COMMAND` and `python -m rma_mm COMMAND`: run one of the commands, on all ranks of a job if it needs them."""

import sys
from collections.abc import Sequence

from rma_mm.launch import on_all_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank."""

    def command() -> int:
        from rma_mm.command.choosing import choose

        return choose(sys.argv[1:] if argv is None else argv)

    return on_all_ranks(command)


if __name__ == "__main__":
    sys.exit(main())
