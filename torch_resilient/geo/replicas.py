"""Replicas in each site, with a hierarchical all-reduce between sites: no pipeline crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_resilient.geo.sites import GB, HOUR_MS, Pairs, Site

# A gradient in half precision.
BYTES_PER_PARAMETER = 2
# How the sums of the sites are exchanged, between a node of each: in a ring, each node sends to the
# next site; directly, to all other sites at once, at the rate of each pair.
EXCHANGES = ("ring", "direct")


def ring_ms(parameters: float, members: int, gbps: float) -> float:
    """The all-reduce of one partition among GPUs that a network of `gbps` connects."""
    # Paper: ATLAS §3.1, 4 P (N - 1) / (N BW)
    if members <= 1:
        return 0.0
    bytes_per_ms = gbps * 1e9 / 8 / 1e3
    return 2 * BYTES_PER_PARAMETER * parameters * (members - 1) / (members * bytes_per_ms)


@dataclass(frozen=True)
class ReplicaRow:
    """Data parallelism over some sites.

    Attributes:
        sites: the number of replicas in each.
        throughput: replicas, which are pipelines, per millisecond.
        egress_bytes, cost: of one iteration.
    """

    sites: dict[str, int]
    pipeline_ms: float
    allreduce_ms: float
    total_ms: float
    throughput: float
    egress_bytes: float
    cost: float


@dataclass(frozen=True)
class ReplicaJob:
    """The input of `replica_rows`.

    Attributes:
        sites: in the order in which they are used.
        partitions: stages of a replica, one GPU each.
        parameters: of one partition.
        pipeline_ms: the iteration time of one pipeline within a site.
        lan_gbps: of a node within a site.
        node_gbps, latency_ms, egress_gb: by pair of sites.
        exchange: one of EXCHANGES.
    """

    sites: Sequence[Site]
    partitions: int
    parameters: float
    pipeline_ms: Callable[[], float]
    lan_gbps: float
    node_gbps: Pairs
    latency_ms: Pairs
    egress_gb: Pairs
    exchange: str


def _row(job: ReplicaJob, sites: Sequence[Site], pipeline_ms: float) -> ReplicaRow:
    replicas = {site.name: site.usable // job.partitions for site in sites}
    count = len(sites)
    allreduce_ms = ring_ms(job.parameters, max(replicas.values()), job.lan_gbps)
    shard_bytes = BYTES_PER_PARAMETER * job.parameters
    # Each site sends 2 (k - 1) / k of its sum: to the next site, or an equal part to each.
    receivers = count - 1 if job.exchange == "direct" else 1
    bytes_sent = 2 * (count - 1) / count * shard_bytes
    price = 0.0
    if count > 1:
        pairs = [(a.name, b.name) for a in sites for b in sites if a is not b]
        slowest_bytes_per_ms = min(job.node_gbps(*pair) for pair in pairs) * 1e9 / 8 / 1e3
        # Each of the n replicas of a site carries 1/n over its own node.
        between_bytes = bytes_sent / receivers / min(replicas.values())
        allreduce_ms += between_bytes / slowest_bytes_per_ms
        allreduce_ms += 2 * max(job.latency_ms(*pair) for pair in pairs)
        to_each_gb = bytes_sent / receivers * job.partitions / GB
        for i, site in enumerate(sites):
            for step in range(1, receivers + 1):
                price += job.egress_gb(site.name, sites[(i + step) % count].name) * to_each_gb
    total_ms = pipeline_ms + allreduce_ms
    for site in sites:
        gpus = replicas[site.name] * job.partitions
        price += gpus * site.gpu_hour * total_ms / HOUR_MS
    every = sum(replicas.values())
    return ReplicaRow(
        replicas,
        pipeline_ms,
        allreduce_ms,
        total_ms,
        every / total_ms if total_ms > 0 else 0.0,
        bytes_sent * job.partitions * count if count > 1 else 0.0,
        price,
    )


def replica_rows(job: ReplicaJob) -> list[ReplicaRow]:
    """A row for the first site that holds a replica, for the first two, and so on.

    The paper compares pipelines across sites with a flat ring only. Here, replicas reduce within
    each site, then between sites, each over its own node: 2 (k - 1) / k of the bytes of a partition
    divided by the replicas of the smallest site, in a ring of sites or directly. The reduction is
    not overlapped with computation, as in the rows of pipelines.
    """
    holding = [site for site in job.sites if site.usable >= job.partitions]
    if not holding:
        return []
    pipeline_ms = job.pipeline_ms()
    return [_row(job, holding[: k + 1], pipeline_ms) for k in range(len(holding))]
