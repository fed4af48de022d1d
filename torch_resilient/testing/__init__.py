"""Networks to test on: hosts, links and faults on one machine. Imports no torch.

`NetworkLab` makes them, and `LabJob` runs ranks on their hosts. `torch-resilient lab` does both for
a command; its --help describes the script language.
"""

from __future__ import annotations

from torch_resilient.testing.job import LabJob
from torch_resilient.testing.lab import Host, LabUnavailable, Network, NetworkLab, Nic, unavailable
from torch_resilient.testing.script import Player, ScriptError
from torch_resilient.testing.settings import Counters, LinkSettings

__all__ = [
    "Counters",
    "Host",
    "LabJob",
    "LabUnavailable",
    "LinkSettings",
    "Network",
    "NetworkLab",
    "Nic",
    "Player",
    "ScriptError",
    "unavailable",
]
