"""Chooses the sites of a training, and the number of cells: ATLAS, Algorithm 1.

A job is `cells` cells of C pipelines each. Its pipelines cross sites: each site has some of the
partitions of all pipelines.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_resilient.geo.cell import Cell, lower_bound_ms
from torch_resilient.geo.cell_input import Times
from torch_resilient.geo.cell_policies import cell_time_ms
from torch_resilient.geo.replicas import ReplicaJob, ReplicaRow, replica_rows, ring_ms
from torch_resilient.geo.sites import GB, HOUR_MS, Pairs, Site

ORDERS = ("given", "gpus", "search")

# The maximum number of rows. With more, steps between rows are below the precision of any times.
MAX_ROWS = 10_000
# Operations of all rows. 10^8 take about half a minute.
_MAX_OPERATIONS = 100_000_000
# 6! = 720 orders. A search compares all of them with all numbers of cells.
MAX_SEARCHED_SITES = 6

# Throughputs that differ by less are equal. Sums in another order differ by rounding.
_EQUAL = 1e-12


@dataclass(frozen=True)
class Job:
    """The input of a plan; times in milliseconds.

    Attributes:
        sites: as given.
        pipelines: of each cell, C. At C, the ratio of the time of a transfer over one node to that
            of a forward, transfers take no longer than the forwards.
        partitions: stages of a pipeline, one GPU each.
        times: of the partitions.
        activation_bytes: of a transfer between partitions.
        parameters: of one partition.
        lan_gbps, node_gbps: the bandwidth of a node within a site, and by pair of sites; None if
            not known.
        wan_ms: by pair, the time of a transfer over one node.
        latency_ms: by pair, one way.
        egress_gb: by pair, the price of 10^9 bytes.
        order: a name of ORDERS, or the sites in their order.
        tolerance: a row with fewer cells is chosen if its throughput is at most this part lower.
        max_cells: rows are planned up to this many cells.
    """

    sites: tuple[Site, ...]
    pipelines: int
    partitions: int
    microbatches: int
    times: Times
    activation_bytes: float
    parameters: float | None
    lan_gbps: float | None
    node_gbps: Pairs | None
    wan_ms: Pairs
    latency_ms: Pairs
    egress_gb: Pairs
    order: str | tuple[str, ...]
    sharing: str
    relays: int
    caps: tuple[int, ...]
    policy: str
    tolerance: float
    max_cells: int
    exchange: str


@dataclass(frozen=True)
class Row:
    """A number of cells. Times and prices are those of one iteration; None if it cannot be done.

    Attributes:
        partitions: of each pipeline in each site; those of sites without any are left out.
        throughput: pipelines per millisecond.
        gpus: GPUs that are used.
        stranded: GPUs that are not reserved and not used.
        wan_hops: of a pipeline.
    """

    cells: int
    feasible: bool
    partitions: dict[str, int]
    pipeline_ms: float | None = None
    allreduce_ms: float | None = None
    total_ms: float | None = None
    throughput: float = 0.0
    gpus: int = 0
    stranded: int = 0
    cost: float | None = None
    egress_bytes: float | None = None
    wan_hops: int | None = None


@dataclass(frozen=True)
class Selection:
    """The result: all rows in one order of the sites, and the row to choose.

    Attributes:
        replicas: the alternative without pipelines across sites; None if not enough is known.
    """

    rows: list[Row]
    choice: Row | None
    order: tuple[str, ...]
    seconds: float
    replicas: list[ReplicaRow] | None


def assign(sites: Iterable[Site], gpus_per_partition: int, partitions: int) -> dict[str, int]:
    """Fills the sites one after the other, as far as their GPUs last. Adds up to fewer than
    `partitions` if they do not."""
    # Paper: ATLAS §4.5, Algorithm 1, lines 2 to 10; line 7 as part_left -= part_assigned
    assigned, left = {}, partitions
    for site in sites:
        count = min(left, site.usable // gpus_per_partition)
        if count > 0:
            assigned[site.name] = count
            left -= count
        if left == 0:
            break
    return assigned


# Iteration times of cells, by all that they depend on.
Known = dict[tuple[Any, ...], float]


class _Planner:
    """Rows of one job; cells that are alike are planned once, also those of other jobs."""

    def __init__(self, job: Job, known: Known) -> None:
        self._job = job
        self._known = known
        self._alike = (
            *(job.pipelines, job.microbatches, job.times, job.sharing),
            *(job.relays, job.caps, job.policy),
        )
        self._usable = sum(site.usable for site in job.sites)
        self._gpu_hour = {site.name: site.gpu_hour for site in job.sites}

    def cell(self, partitions: dict[str, int]) -> Cell:
        """A cell over these sites, in their order."""
        job = self._job
        sites = tuple(name for name, count in partitions.items() for _ in range(count))
        hops, latencies = [], []
        for a, b in itertools.pairwise(sites):
            crosses = a != b
            hops.append((job.wan_ms(a, b), job.wan_ms(b, a)) if crosses else (0.0, 0.0))
            latencies.append(
                (job.latency_ms(a, b), job.latency_ms(b, a)) if crosses else (0.0,) * 2
            )
        return Cell(
            pipelines=job.pipelines,
            microbatches=job.microbatches,
            sites=sites,
            **job.times._asdict(),
            hop_ms=tuple(hops),
            latency_ms=tuple(latencies),
            sharing=job.sharing,
            relays=job.relays,
            caps=job.caps,
        )

    def _key(self, partitions: dict[str, int]) -> tuple[Any, ...]:
        """Equal for cells with equal times. The hops are part of it, not only the partitions."""
        job = self._job
        hops = [
            (job.wan_ms(a, b), job.wan_ms(b, a), job.latency_ms(a, b), job.latency_ms(b, a))
            for a, b in itertools.pairwise(partitions)
        ]
        return (self._alike, *partitions.values(), *hops)

    def pipeline_ms(self, partitions: dict[str, int]) -> float:
        key = self._key(partitions)
        if key not in self._known:
            self._known[key] = cell_time_ms(self.cell(partitions), self._job.policy)
        return self._known[key]

    def allreduce_ms(self, cells: int) -> float:
        job = self._job
        if job.parameters is None or job.lan_gbps is None:
            return 0.0
        return ring_ms(job.parameters, cells * job.pipelines, job.lan_gbps)

    def assign(self, order: Sequence[Site], cells: int) -> dict[str, int] | None:
        """None if the GPUs do not last."""
        job = self._job
        partitions = assign(order, cells * job.pipelines, job.partitions)
        return partitions if sum(partitions.values()) == job.partitions else None

    def row(self, order: Sequence[Site], cells: int) -> Row:
        # Paper: ATLAS §4.5, Algorithm 1, lines 11 to 17
        job = self._job
        partitions = assign(order, cells * job.pipelines, job.partitions)
        if sum(partitions.values()) < job.partitions:
            return Row(cells, False, partitions, stranded=self._usable)
        pipelines = cells * job.pipelines
        pipeline_ms = self.pipeline_ms(partitions)
        allreduce_ms = self.allreduce_ms(cells)
        total_ms = pipeline_ms + allreduce_ms
        hop_bytes = job.microbatches * pipelines * job.activation_bytes
        cost = 0.0
        for name, count in partitions.items():
            cost += count * pipelines * self._gpu_hour[name] * total_ms / HOUR_MS
        for a, b in itertools.pairwise(partitions):
            cost += (job.egress_gb(a, b) + job.egress_gb(b, a)) * hop_bytes / GB
        gpus = pipelines * job.partitions
        hops = len(partitions) - 1
        return Row(
            cells=cells,
            feasible=True,
            partitions=partitions,
            pipeline_ms=pipeline_ms,
            allreduce_ms=allreduce_ms,
            total_ms=total_ms,
            throughput=pipelines / total_ms if total_ms > 0 else 0.0,
            gpus=gpus,
            stranded=self._usable - gpus,
            cost=cost,
            egress_bytes=2 * hop_bytes * hops,
            wan_hops=hops,
        )

    def max_throughput(self, partitions: dict[str, int], cells: int) -> float:
        """No schedule has a higher one."""
        total_ms = lower_bound_ms(self.cell(partitions)) + self.allreduce_ms(cells)
        return cells * self._job.pipelines / total_ms if total_ms > 0 else math.inf

    def search(self, max_cells: int) -> tuple[Site, ...]:
        """The order of the sites with the highest throughput, then with the lowest cost.

        Bounds come first: a row is planned only while its bound is not below the best throughput.
        """
        bounds: dict[tuple[Any, ...], float] = {}
        tried: list[tuple[float, int, tuple[Site, ...], int]] = []
        for number_, order in enumerate(itertools.permutations(self._job.sites)):
            for cells in range(1, max_cells + 1):
                partitions = self.assign(order, cells)
                if partitions is None:
                    break
                key = (cells, *self._key(partitions))
                if key not in bounds:
                    bounds[key] = self.max_throughput(partitions, cells)
                tried.append((-bounds[key], number_, order, cells))
        tried.sort(key=lambda each: each[:2])
        best: tuple[float, float, int] | None = None
        chosen = self._job.sites
        for bound, number_, order, cells in tried:
            if best is not None and -bound < -best[0] * (1 - _EQUAL):
                break
            row = self.row(order, cells)
            assert row.cost is not None
            found = (-row.throughput, row.cost, number_)
            if best is not None and math.isclose(row.throughput, -best[0], rel_tol=_EQUAL):
                found = (best[0], row.cost, number_)
            if best is None or found < best:
                best, chosen = found, order
        return chosen


def _max_rows(job: Job) -> int:
    """The number of rows, at least 1. Raises ValueError if they are too many."""
    usable = sum(site.usable for site in job.sites)
    # Paper: ATLAS §4.5, D_max. It is an upper bound: each site also loses its remainder.
    rows = max(1, min(job.max_cells, usable // (job.pipelines * job.partitions)))
    if rows > MAX_ROWS:
        raise ValueError(
            f"sites: their GPUs are enough for {rows} cells, more than the {MAX_ROWS} that are "
            "planned: set max_cells, or a larger cell"
        )
    operations = rows * job.pipelines * job.partitions * job.microbatches * 3
    if operations > _MAX_OPERATIONS:
        raise ValueError(
            f"max_cells: {rows} rows of {job.pipelines} pipelines, {job.partitions} partitions and "
            f"{job.microbatches} microbatches are too many to plan: set a smaller max_cells"
        )
    return rows


def _ordered(job: Job, planner: _Planner, rows: int) -> tuple[Site, ...]:
    if job.order == "search":
        if len(job.sites) > MAX_SEARCHED_SITES:
            raise ValueError(
                f"order: search compares the orders of at most {MAX_SEARCHED_SITES} sites, "
                f"got {len(job.sites)}"
            )
        return planner.search(rows)
    if job.order == "gpus":
        return tuple(sorted(job.sites, key=lambda site: -site.usable))
    if job.order == "given":
        return job.sites
    by_name = {site.name: site for site in job.sites}
    return tuple(by_name[name] for name in job.order)


def choose(rows: Sequence[Row], tolerance: float) -> Row | None:
    """The row of the fewest cells within `tolerance` of the highest throughput."""
    feasible = [row for row in rows if row.feasible]
    if not feasible:
        return None
    enough = max(row.throughput for row in feasible) * (1 - tolerance) * (1 - _EQUAL)
    return next(row for row in feasible if row.throughput >= enough)


def select(job: Job, known: Known | None = None) -> Selection:
    """Plans every number of cells, and chooses one. Raises ValueError if there are too many.

    The paper ignores the times of operations, as equal in all rows. Here they are part of each
    row's schedule: with few microbatches or unequal partitions they are not equal.

    Args:
        known: times of cells that earlier calls have planned. This call adds its own.
    """
    began_s = time.monotonic()
    rows_count = _max_rows(job)
    known = {} if known is None else known
    planner = _Planner(job, known)
    order = _ordered(job, planner, rows_count)
    rows = [planner.row(order, cells) for cells in range(1, rows_count + 1)]
    replicas = None
    if job.node_gbps is not None and job.parameters is not None and job.lan_gbps is not None:
        alone = _Planner(replace(job, pipelines=1, relays=1), known)
        replicas = replica_rows(
            ReplicaJob(
                sites=order,
                partitions=job.partitions,
                parameters=job.parameters,
                pipeline_ms=lambda: alone.pipeline_ms({order[0].name: job.partitions}),
                lan_gbps=job.lan_gbps,
                node_gbps=job.node_gbps,
                latency_ms=job.latency_ms,
                egress_gb=job.egress_gb,
                exchange=job.exchange,
            )
        )
    return Selection(
        rows=rows,
        choice=choose(rows, job.tolerance),
        order=tuple(site.name for site in order),
        seconds=time.monotonic() - began_s,
        replicas=replicas,
    )


def cell_of(job: Job, row: Row) -> Cell:
    """The cell of a row that is feasible: what `geo cell` plans."""
    return _Planner(job, {}).cell(row.partitions)
