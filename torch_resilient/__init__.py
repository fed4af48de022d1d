"""A torch.distributed backend for training across slow, lossy or failing networks.

`torch.distributed.init_process_group("resilient")` is all it takes: torch imports this
package by itself. Importing it makes the backend known, but loads no compiled code.
"""

from __future__ import annotations

from typing import Any

from torch_resilient import _registration, faults
from torch_resilient._version import __version__
from torch_resilient.traffic import traffic_class

__all__ = [
    "Options",
    "__version__",
    "dump",
    "faults",
    "group_by_round_trip",
    "stats",
    "topology",
    "traffic_class",
]

# The entry point; torch calls it at the end of `import torch`.
_autoload = _registration.register_or_warn


def __getattr__(name: str) -> Any:
    """What needs torch or the compiled module, on first use.

    `Options` is the type for `pg_options`; `stats(group=None)` tells what the backend knows of
    its peers and paths; `topology(group=None)` where its ranks are, and
    `group_by_round_trip(group=None)` finds it out; `dump()` gives the recent operations of this
    process as text.
    """
    if name in ("Options", "dump"):
        from torch_resilient import _native

        return getattr(_native.load(), name)
    if name == "stats":
        from torch_resilient._stats import stats

        return stats
    if name in ("group_by_round_trip", "topology"):
        from torch_resilient import _topology

        return getattr(_topology, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_registration.on_import()
