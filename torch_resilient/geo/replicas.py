"""Replicas in each site, with a hierarchical all-reduce between sites: no pipeline crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_resilient.geo.sites import GB, HOUR_MS, Pairs, Site

# A gradient in half precision.
BYTES_PER_PARAMETER = 2


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
    """

    sites: Sequence[Site]
    partitions: int
    parameters: float
    pipeline_ms: Callable[[], float]
    lan_gbps: float
    node_gbps: Pairs
    latency_ms: Pairs
    egress_gb: Pairs


def _row(job: ReplicaJob, sites: Sequence[Site], pipeline_ms: float) -> ReplicaRow:
    replicas = {site.name: site.usable // job.partitions for site in sites}
    count = len(sites)
    allreduce_ms = ring_ms(job.parameters, max(replicas.values()), job.lan_gbps)
    shard_bytes = BYTES_PER_PARAMETER * job.parameters
    # Each site sends its sum in a ring of sites: 2 (k - 1) / k of it to the next one.
    to_next_bytes = 2 * (count - 1) / count * shard_bytes * job.partitions
    price = 0.0
    if count > 1:
        pairs = [(a.name, b.name) for a in sites for b in sites if a is not b]
        slowest_bytes_per_ms = min(job.node_gbps(*pair) for pair in pairs) * 1e9 / 8 / 1e3
        # Each of the n replicas of a site carries 1/n over its own node.
        between_bytes = 2 * (count - 1) / count * shard_bytes / min(replicas.values())
        allreduce_ms += between_bytes / slowest_bytes_per_ms
        allreduce_ms += 2 * max(job.latency_ms(*pair) for pair in pairs)
        for a, b in zip(sites, [*sites[1:], sites[0]], strict=True):
            price += job.egress_gb(a.name, b.name) * to_next_bytes / GB
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
        to_next_bytes * count if count > 1 else 0.0,
        price,
    )


def replica_rows(job: ReplicaJob) -> list[ReplicaRow]:
    """A row for the first site that holds a replica, for the first two, and so on.

    The paper compares pipelines across sites with a flat ring only. Here, replicas reduce within
    each site, then between sites, each over its own node: 2 (k - 1) / k of the bytes of a partition
    divided by the replicas of the smallest site. The reduction is not overlapped with computation,
    as in the rows of pipelines.
    """
    holding = [site for site in job.sites if site.usable >= job.partitions]
    if not holding:
        return []
    pipeline_ms = job.pipeline_ms()
    return [_row(job, holding[: k + 1], pipeline_ms) for k in range(len(holding))]
