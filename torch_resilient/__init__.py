"""A torch.distributed backend for training across slow, lossy or failing networks.

`torch.distributed.init_process_group("resilient")` is all it takes: torch imports this
package by itself. Importing it makes the backend known, but loads no compiled code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_resilient import _registration, faults
from torch_resilient._version import __version__
from torch_resilient.traffic import traffic_class

if TYPE_CHECKING:
    from torch_resilient._C import Options, dump
    from torch_resilient._reports.events import Event
    from torch_resilient._reports.stats import (
        DatagramStats,
        GroupStats,
        ListenerStats,
        PathStats,
        PeerStats,
        RdmaStats,
        stats,
    )
    from torch_resilient._reports.topology import Topology, group_by_round_trip, topology

__all__ = [
    "DatagramStats",
    "Event",
    "GroupStats",
    "ListenerStats",
    "Options",
    "PathStats",
    "PeerStats",
    "RdmaStats",
    "Topology",
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

# The module that defines each name loaded on first use: importing this package must load neither
# torch nor the compiled module. `Options` and `dump` come from the compiled module.
_LAZY = {
    "DatagramStats": "_reports.stats",
    "Event": "_reports.events",
    "GroupStats": "_reports.stats",
    "ListenerStats": "_reports.stats",
    "Options": "",
    "PathStats": "_reports.stats",
    "PeerStats": "_reports.stats",
    "RdmaStats": "_reports.stats",
    "Topology": "_reports.topology",
    "dump": "",
    "group_by_round_trip": "_reports.topology",
    "stats": "_reports.stats",
    "topology": "_reports.topology",
}

if not TYPE_CHECKING:  # a module's __getattr__ would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        """Loads a public name on first use."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _LAZY[name]:
            from torch_resilient import _native

            return getattr(_native.load(), name)
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_registration.on_import()
