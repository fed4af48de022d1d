"""The command line `torch-resilient`, also `python -m torch_resilient.cli`. Imports no torch."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from torch_resilient._version import __version__
from torch_resilient.cli import (
    bench,
    chaos,
    doctor,
    geo,
    lab,
    plan,
    profile_drop,
    secret,
    shift,
    timeline,
    top,
)

EXAMPLES = """\
examples:
  torch-resilient doctor                                          before a job: find problems
  torchrun --nproc-per-node 2 --no-python torch-resilient bench   measure its links
  torch-resilient top /tmp/job                                    watch it (TORCH_RESILIENT_METRICS)
  torch-resilient chaos -- torchrun --nproc-per-node 2 train.py   drill it with network faults
  torch-resilient lab --delay 20ms -- torchrun train.py           the same on hosts far apart (root)
  torch-resilient secret job.secret                               make the secret of a job
  torch-resilient shift --serve -- ib_write_bw                    an RDMA program survives a NIC
  torch-resilient geo plan --json job.json                        is a second site worth its price?
  torch-resilient profile-drop --steps 200 train.py               the cost of dropped activations

`torch-resilient COMMAND --help` shows details and an example.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 for bad input; see each
    command for others."""
    parser = argparse.ArgumentParser(
        prog="torch-resilient",
        description="Tools for training over slow and failing networks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    bench.add_parser(commands)
    chaos.add_parser(commands)
    doctor.add_parser(commands)
    geo.add_parser(commands)
    lab.add_parser(commands)
    plan.add_parser(commands)
    profile_drop.add_parser(commands)
    secret.add_parser(commands)
    shift.add_parser(commands)
    timeline.add_parser(commands)
    top.add_parser(commands)
    options = parser.parse_args(arguments)
    if sys.stdout is None:  # closed; the next opened file would become standard output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise  # another pipe or connection
        return 1
    return status


def _nobody_reads() -> bool:
    """Whether the reader of standard output has gone, such as `| head`. If so, redirects it to
    /dev/null: the interpreter would otherwise report an error when it flushes at exit."""
    output = sys.__stdout__
    if output is None:
        return False
    poll = select.poll()
    poll.register(output, 0)
    gone = any(events & select.POLLERR for _, events in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return gone
