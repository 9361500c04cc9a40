"""`python -m bench.hosts --hosts 2 --ranks 1 --rate 5gbit -- COMMAND…`: run a job on several hosts on this machine.

Hosts are network namespaces at one switch; ranks of different hosts meet over TCP. Needs root. Leaves with the job's
exit code, and leaves nothing behind. `python -m bench.hosts --bars` runs the measurements of `bench.hosts.bars`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from bench.hosts import Cluster, ClusterError

REFUSED = 2


class Interrupted(BaseException):
    """A signal came that asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(arguments: Sequence[str]) -> int:
    """Run the job, or the measurements; the exit code, 2 with one message where there can be no cluster."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if arguments[:1] == ["--bars"]:
            from bench.hosts import bars

            return bars.main(arguments[1:])
        return run_job(parsed(arguments))
    except ClusterError as error:
        sys.stderr.write(f"bench.hosts: {error}\n")
        return REFUSED
    except Interrupted as error:
        return 128 + error.number


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a job."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.hosts", description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=positive, default=2, help="how many (2)")
    parser.add_argument("--ranks", type=positive, default=1, help="on each host (1)")
    parser.add_argument("--rate", default="5gbit", help="of each link, each way, as tc writes it (5gbit)")
    parser.add_argument("--shm", default="4g", help="size of each host's /dev/shm (4g)")
    parser.add_argument("--threads", type=positive, help="of each rank (this machine's cores / all ranks)")
    parser.add_argument("command", nargs="+", help="what each rank runs, after --")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, it takes a whole number of at least 1")
    return int(text)


def run_job(options: argparse.Namespace) -> int:
    """The job's exit code."""
    with Cluster(options.hosts, options.rate, options.shm) as cluster:
        job = cluster.start(options.ranks, options.command, threads=options.threads)
        try:
            return job.wait()
        except Interrupted as error:
            cluster.interrupt(job, error.number)
            raise


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
