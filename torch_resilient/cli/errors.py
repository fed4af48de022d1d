"""Output of errors and of untrusted text."""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """Replaces control characters except newlines by escapes such as \\x1b."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def bad_input(command: str, error: Exception) -> int:
    """Says so in one line on stderr; returns the exit status."""
    sys.stderr.write(f"torch-resilient {command}: {printable(' '.join(str(error).split()))}\n")
    return 2
