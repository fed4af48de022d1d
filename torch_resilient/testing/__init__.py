"""Networks to test on: hosts, links and faults on one machine. Imports no torch.

`NetworkLab` makes them, `VerbsLab` makes hosts with RDMA devices, and `LabJob` runs ranks on the
hosts of either. `torch-resilient lab` does both for a command; its --help describes the script
language.
"""

from __future__ import annotations

from torch_resilient.testing.guest import Guest
from torch_resilient.testing.job import LabJob
from torch_resilient.testing.lab import Host, LabUnavailable, Network, NetworkLab, Nic, unavailable
from torch_resilient.testing.script import Player, ScriptError
from torch_resilient.testing.settings import Counters, LinkSettings
from torch_resilient.testing.verbs_lab import VerbsLab, verbs_unavailable

__all__ = [
    "Counters",
    "Guest",
    "Host",
    "LabJob",
    "LabUnavailable",
    "LinkSettings",
    "Network",
    "NetworkLab",
    "Nic",
    "Player",
    "ScriptError",
    "VerbsLab",
    "unavailable",
    "verbs_unavailable",
]
