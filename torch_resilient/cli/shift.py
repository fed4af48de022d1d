"""`torch-resilient shift`: keeps an unmodified RDMA program running when a NIC fails.

Loads a library in front of libibverbs into the program. Each device has a backup on the same host;
when the path between two devices fails, the requests in flight are sent again between the backups,
and the program sees no error. Both ends must run under this command, with the same store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input
from torch_resilient.cli.shift_store import ShiftStore

ABOUT = """\
example, on two hosts with the devices mlx5_0 and mlx5_1:
  alpha: torch-resilient shift --serve --backup mlx5_0=mlx5_1 -- ib_write_bw -d mlx5_0
  beta:  torch-resilient shift --store alpha:29700 --backup mlx5_0=mlx5_1 \\
           -- ib_write_bw -d mlx5_0 alpha

The store tells each end the other's backups. It authenticates nobody: use the management network
of the job. --serve starts one for as long as the program runs; --serve without a program serves
until it is interrupted. Without --backup, the next device of the host is the backup.

Protected are reliable connections (RC) that are made with ibv_create_qp. The program gets an error
as without this command if an atomic operation is in flight, if the store cannot be reached, or if
the error is its own (a bad key, a bad length).

The command sets LD_PRELOAD, NCCL_IBVERBS_LIB (for programs that open libibverbs themselves),
TORCH_RESILIENT_SHIFT_STORE and TORCH_RESILIENT_SHIFT_BACKUP.

exit status: that of the program; 2 for bad input.
"""

PORT = 29700
_PAIR = re.compile(r"[\w.-]+=[\w.-]+")


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "shift",
        help="keep an unmodified RDMA program running when a NIC fails",
        description=__doc__,
        epilog=ABOUT,
        usage="torch-resilient shift [OPTIONS] -- PROGRAM ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    store = parser.add_mutually_exclusive_group()
    store.add_argument("--store", metavar="HOST:PORT", help="use the store that runs there")
    store.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=PORT,
        metavar="PORT",
        help=f"start a store on this port (default: {PORT}) and use it",
    )
    parser.add_argument(
        "--backup",
        action="append",
        default=[],
        metavar="DEVICE=BACKUP",
        help="the backup of a device; may be repeated",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=0.5,
        metavar="S",
        help="give a path up if nothing completes for so long (default: 0.5)",
    )
    parser.add_argument(
        "--spoil",
        metavar="FILE",
        help="when this file appears, let the next request of each queue pair fail, to try it out",
    )
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def shared_object() -> Path | None:
    """The preloaded library, or None if it was not built."""
    return next(iter(sorted(Path(__file__).parent.parent.glob("_shift*.so"))), None)


def _problem(options: argparse.Namespace) -> str | None:
    if options.store is None and options.serve is None:
        return "give --store HOST:PORT, or --serve on one host"
    if options.store is not None:
        host, _, port = options.store.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            return f"--store: expected HOST:PORT, got {options.store!r}"
    if options.serve is not None and not 0 < options.serve < 65536:
        return f"--serve: expected a port from 1 to 65535, got {options.serve}"
    for pair in options.backup:
        device, _, backup = pair.partition("=")
        if not _PAIR.fullmatch(pair) or device == backup:
            return f"--backup: expected DEVICE=BACKUP with two devices, got {pair!r}"
    if not 0.05 <= options.silence <= 3600:
        return f"--silence: expected 0.05 to 3600 s, got {options.silence}"
    if not options.program and options.serve is None:
        return "give the program after --"
    if options.program and shared_object() is None:
        return (
            "this installation has no library for it; it is built where infiniband/verbs.h "
            "is (Debian: libibverbs-dev)"
        )
    return None


def run(options: argparse.Namespace) -> int:
    """Runs the program; see ABOUT for the exit status."""
    if (problem := _problem(options)) is not None:
        return bad_input("shift", ValueError(problem))
    with contextlib.ExitStack() as stack:
        store = options.store
        if options.serve is not None:
            try:
                stack.enter_context(ShiftStore(port=options.serve))
            except OSError as error:
                return bad_input(
                    "shift", ValueError(f"--serve: port {options.serve}: {error.strerror}")
                )
            store = f"127.0.0.1:{options.serve}"
        if not options.program:
            return _serve_until_interrupted(options.serve)
        return _run_program(options.program, environment(store, options))


def _serve_until_interrupted(port: int) -> int:
    print(f"the store serves on port {port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()
    return 0


def environment(store: str, options: argparse.Namespace) -> dict[str, str]:
    """The environment of a program."""
    before = os.environ.get("LD_PRELOAD", "")
    spoil = {} if options.spoil is None else {"TORCH_RESILIENT_SHIFT_SPOIL_FILE": options.spoil}
    return {
        **os.environ,
        "LD_PRELOAD": f"{shared_object()}:{before}" if before else str(shared_object()),
        # The library finds what it does not replace in libibverbs, so it can stand for it.
        "NCCL_IBVERBS_LIB": str(shared_object()),
        "TORCH_RESILIENT_SHIFT_STORE": store,
        "TORCH_RESILIENT_SHIFT_BACKUP": ",".join(options.backup),
        "TORCH_RESILIENT_SHIFT_SILENCE_MS": str(round(options.silence * 1000)),
        **spoil,
    }


def _run_program(program: Sequence[str], environment: dict[str, str]) -> int:
    try:
        with subprocess.Popen(program, env=environment) as process:
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:  # the program got it too
                    continue
    except OSError as error:
        return bad_input("shift", ValueError(f"cannot run {program[0]}: {error.strerror}"))
    return 128 - status if status < 0 else status
