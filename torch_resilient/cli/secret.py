"""`torch-resilient secret`: makes the file that TORCH_RESILIENT_SECRET_FILE names.

All ranks of a job prove to each other that they have the same secret, and encrypt what they send
between hosts with keys that come from it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input

ABOUT = """\
example:
  torch-resilient secret job.secret
  scp -p job.secret beta:                       to each host, by a way that you trust
  TORCH_RESILIENT_SECRET_FILE=job.secret torchrun ... train.py            on each host

The file has 32 random bytes in hexadecimal, and only its owner may read it. Whoever has it can join
the job: keep it out of images and repositories, and make one for each job.

exit status: 0; 2 if the file exists or cannot be written.
"""

SECRET_BYTES = 32


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "secret",
        help="make a secret file, with which ranks authenticate and encrypt",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="NEW_FILE")
    parser.set_defaults(run=run)


def write_secret(path: Path) -> None:
    """Writes a new secret to `path`, which must not exist, not even as a link to nowhere.

    A file that could not be written whole is removed: it would be taken for a secret.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(f"{secrets.token_hex(SECRET_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def run(options: argparse.Namespace) -> int:
    """Makes the file; returns the exit status."""
    try:
        write_secret(options.file)
    except FileExistsError:
        return bad_input("secret", ValueError(f"{options.file} exists: it is not overwritten"))
    except OSError as error:
        return bad_input("secret", error)
    print(
        f"{options.file} is written. Copy it to all hosts, and start every rank with "
        f"TORCH_RESILIENT_SECRET_FILE set to its path there."
    )
    return 0
