"""Networks to test on: hosts, links and faults on one machine. Imports no torch.

`NetworkLab` makes them; `torch-resilient lab` runs a job in one. See docs/testing.md.
"""

from __future__ import annotations

from torch_resilient.testing.lab import Host, LabUnavailable, Network, NetworkLab, Nic, unavailable
from torch_resilient.testing.script import Player, ScriptError
from torch_resilient.testing.settings import Counters, LinkSettings

__all__ = [
    "Counters",
    "Host",
    "LabUnavailable",
    "LinkSettings",
    "Network",
    "NetworkLab",
    "Nic",
    "Player",
    "ScriptError",
    "unavailable",
]
