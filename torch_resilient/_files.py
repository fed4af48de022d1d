"""Files that this process writes for its owner only."""

from __future__ import annotations

import os
from pathlib import Path


def create_private(path: Path) -> int:
    """Creates a file that only its owner may read or write, in place of what has the name.

    In a folder where others may write, that can be a link to any file, which stays as it is.

    Returns the descriptor, for writing. Raises OSError if no such file can be made.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
