"""A job across sites as JSON: the input and output of `torch-resilient geo plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch_resilient.geo.cell import SHARINGS
from torch_resilient.geo.cell_input import MAX_NODES, read_caps, read_times, require_size
from torch_resilient.geo.cell_policies import POLICIES
from torch_resilient.geo.dc_selection import ORDERS, Job, Selection, select
from torch_resilient.geo.replicas import EXCHANGES
from torch_resilient.geo.sites import MAX_PRICE, Pairs, Site, read_pairs, read_sites
from torch_resilient.planning.fields import (
    MAX_MS,
    number,
    one_of,
    require_fields,
    whole,
    without,
)

REQUIRED = ("sites", "cell", "partitions", "microbatches", "tF", "tR", "tB")
OPTIONAL = (
    "tW",
    "activation_bytes",
    "parameters",
    "lan_gbps",
    "wan_ms",
    "node_gbps",
    "latency_ms",
    "egress_gb",
    "order",
    "sharing",
    "relays",
    "cap",
    "policy",
    "tolerance",
    "max_cells",
    "exchange",
)
# Fields of the output that are ignored in the input. `order` is both: the output has the names.
ADDED = ("rows", "choice", "seconds", "replicas")

MAX_BYTES = 1e15
MAX_GBPS = 1e9


def _read_order(value: object, sites: Sequence[Site]) -> str | tuple[str, ...]:
    if not isinstance(value, list):
        return one_of("order", value, ORDERS)
    names = {site.name for site in sites}
    for i, name in enumerate(value):
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"order[{i}]: no such site: {name}")
    if len(value) != len(names) or {*value} != names:
        raise ValueError(f"order: expected each of {len(names)} sites once, got {len(value)} names")
    return tuple(value)


def _optional(given: dict[str, Any], name: str, maximum: float) -> float | None:
    return None if given.get(name) is None else number(name, given[name], maximum)


def _read_wan(
    given: dict[str, Any], sites: Sequence[Site], activation_bytes: float | None
) -> tuple[Pairs, Pairs | None]:
    """Reads wan_ms or node_gbps. Returns both; the rates are None if only the times are given."""
    wan_ms, node_gbps = given.get("wan_ms"), given.get("node_gbps")
    if wan_ms is not None and node_gbps is not None:
        raise ValueError("wan_ms: give either wan_ms or node_gbps")
    if wan_ms is not None:
        return read_pairs("wan_ms", wan_ms, sites, MAX_MS), None
    if node_gbps is None:
        if len(sites) > 1:
            raise ValueError("node_gbps: missing, and so is wan_ms")
        return Pairs({}), None
    rates = read_pairs("node_gbps", node_gbps, sites, MAX_GBPS, positive=True)
    if activation_bytes is None:
        raise ValueError("activation_bytes: missing, but node_gbps is there")
    times = {pair: activation_bytes * 8 / 1e6 / gbps for pair, gbps in rates.values.items()}
    for (a, b), time_ms in times.items():
        if time_ms > MAX_MS:
            raise ValueError(f"node_gbps: a transfer from {a} to {b} would take {time_ms:g} ms")
    return Pairs(times), rates


def read_job(given: object) -> Job:
    """Reads the input of `geo plan`. Raises ValueError with a text that begins with the field."""
    require_fields(given, REQUIRED, (*OPTIONAL, *ADDED))
    assert isinstance(given, dict)
    sites = read_sites(given["sites"])
    pipelines = whole("cell", given["cell"], maximum=MAX_NODES)
    partitions = whole("partitions", given["partitions"])
    microbatches = whole("microbatches", given["microbatches"])
    require_size("partitions", pipelines, partitions, microbatches)
    activation_bytes = _optional(given, "activation_bytes", MAX_BYTES)
    parameters = _optional(given, "parameters", MAX_BYTES)
    lan_gbps = _optional(given, "lan_gbps", MAX_GBPS)
    if lan_gbps == 0:
        raise ValueError("lan_gbps: expected a number above 0, got 0")
    if parameters is not None and lan_gbps is None:
        raise ValueError("lan_gbps: missing, but parameters is there")
    wan_ms, node_gbps = _read_wan(given, sites, activation_bytes)
    if given.get("egress_gb") is not None and activation_bytes is None:
        raise ValueError("activation_bytes: missing, but egress_gb is there")
    relays = given.get("relays")
    max_cells = given.get("max_cells")
    return Job(
        sites=sites,
        pipelines=pipelines,
        partitions=partitions,
        microbatches=microbatches,
        times=read_times(given, partitions),
        activation_bytes=activation_bytes or 0.0,
        parameters=parameters,
        lan_gbps=lan_gbps,
        node_gbps=node_gbps,
        wan_ms=wan_ms,
        latency_ms=read_pairs("latency_ms", given.get("latency_ms"), sites, MAX_MS),
        egress_gb=read_pairs("egress_gb", given.get("egress_gb"), sites, MAX_PRICE),
        order=_read_order(given.get("order", "gpus"), sites),
        sharing=one_of("sharing", given.get("sharing", "temporal"), SHARINGS),
        relays=pipelines if relays is None else whole("relays", relays, maximum=MAX_NODES),
        caps=read_caps(given, partitions, microbatches),
        policy=one_of("policy", given.get("policy", "best"), POLICIES),
        tolerance=number("tolerance", given.get("tolerance", 0), 1),
        max_cells=MAX_NODES if max_cells is None else whole("max_cells", max_cells),
        exchange=one_of("exchange", given.get("exchange", "ring"), EXCHANGES),
    )


def selection_output(given: dict[str, Any], found: Selection) -> dict[str, Any]:
    """The input with the results, which can be input again: `order` is then the sites' names."""
    output = {
        **without(given, ADDED),
        "rows": [asdict(row) for row in found.rows],
        "choice": None if found.choice is None else asdict(found.choice),
        "order": list(found.order),
        "seconds": found.seconds,
    }
    if found.replicas is not None:
        output["replicas"] = [asdict(row) for row in found.replicas]
    return output


def solve_plan(given: object) -> tuple[dict[str, Any], Job, Selection]:
    """The output of `geo plan` for its input. Raises ValueError as `read_job` and `select`."""
    job = read_job(given)
    assert isinstance(given, dict)
    found = select(job)
    return selection_output(given, found), job, found
