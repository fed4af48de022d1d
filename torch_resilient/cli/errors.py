"""How commands end when their input cannot be used."""

from __future__ import annotations

import sys


def bad_input(command: str, error: Exception) -> int:
    """Says so in one line on stderr; returns the exit status."""
    sys.stderr.write(f"torch-resilient {command}: {' '.join(str(error).split())}\n")
    return 2
