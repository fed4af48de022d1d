"""Runs functions before this process ends, however it ends."""

from __future__ import annotations

import atexit
from collections.abc import Callable

# Functions with a larger number run first in processes of multiprocessing. Elsewhere the last
# one that was registered runs first.
OBSERVERS_ORDER = 100
ENGINE_ORDER = 0


def run_at_end(function: Callable[[], object], order: int) -> None:
    """Calls `function` once, before this process ends; forks of it do not call it.

    The interpreter's own hooks are not enough. A process that multiprocessing has forked ends with
    os._exit(), and only the finalizers of multiprocessing run before that.
    """
    import multiprocessing.util

    finalizer = multiprocessing.util.Finalize(None, function, exitpriority=order)
    atexit.register(finalizer)
