"""The command line `torch-resilient`, also `python -m torch_resilient.cli`. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_resilient._version import __version__
from torch_resilient.cli import lab, plan, timeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="torch-resilient", description="Tools for training over slow and failing networks."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plan.add_parser(commands)
    timeline.add_parser(commands)
    lab.add_parser(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
