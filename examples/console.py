"""Progress bar and sparkline for a terminal, and something readable where there is none."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


class Progress:
    """A bar on a terminal; elsewhere a line for every tenth of the way.

    Args:
        total: how many steps there are.
        label: short text before the bar.
        enabled: False prints nothing (the other ranks).
        stream: where to print.
    """

    def __init__(
        self, total: int, label: str, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self._total = max(total, 1)
        self._label = label
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._began_s = time.monotonic()
        self._tenth_shown = -1

    def update(self, done: int, text: str) -> None:
        """Shows that `done` steps are finished; `text` describes the progress."""
        if not self._enabled:
            return
        elapsed_s = time.monotonic() - self._began_s
        left_s = elapsed_s / max(done, 1) * (self._total - done)
        if not self._stream.isatty():
            tenth = 10 * done // self._total
            if tenth != self._tenth_shown:
                self._tenth_shown = tenth
                print(f"{self._label} {done}/{self._total}  {text}", file=self._stream, flush=True)
            return
        tail = f" {done}/{self._total}  {text}  {left_s:.0f} s left"
        columns = shutil.get_terminal_size().columns
        room = max(columns - len(self._label) - len(tail) - 2, 4)
        full = min(room, 40) * done // self._total
        bar = "━" * full + "╌" * (min(room, 40) - full)
        self._stream.write(f"\r\x1b[K{self._label} {bar}{tail}"[: columns + 4])
        self._stream.flush()

    def close(self) -> None:
        """Leave the finished bar on its own line."""
        if self._enabled and self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()
