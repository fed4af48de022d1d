"""Ranks on the hosts of a NetworkLab, each the worker of a benchmark's own script."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_resilient.testing import Host, LabJob, Network, NetworkLab
from torch_resilient.testing.job import PORT

ROOT = Path(__file__).resolve().parent.parent
# For the environment: the connections of this job are encrypted.
SECRET = {"TORCH_RESILIENT_SECRET": "the secret of the job that is measured"}


def start_job(
    script: str,
    hosts: Sequence[Host],
    control: Network,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    sites: Sequence[str] | None = None,
    port: int = PORT,
    prefix: Sequence[str] = (),
) -> LabJob:
    """`prefix script --worker JSON` on each host; the store goes over `control`."""
    return LabJob(
        [*prefix, sys.executable, script, "--worker", json.dumps(dict(arguments))],
        hosts,
        control,
        environment={"PYTHONPATH": str(ROOT), **(environment or {})},
        sites=sites,
        port=port,
    )


def say(kind: str, **values: Any) -> None:
    """Sends one row from a rank to its parent."""
    print(json.dumps({"kind": kind, **values}), flush=True)


@contextlib.contextmanager
def two_hosts(
    links: Sequence[Mapping[str, Any]],
    *,
    seed: int = 1,
    sysctl: Mapping[str, object] | None = None,
) -> Iterator[tuple[NetworkLab, list[Host], list[Network], Network]]:
    """Two hosts, `links` between them (eth0, eth1, ...) and one for the store."""
    with NetworkLab(seed=seed) as lab:
        hosts = [lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)]
        data = [lab.link(*hosts, **settings) for settings in links]
        control = lab.link(*hosts, name="control")
        yield lab, hosts, data, control
