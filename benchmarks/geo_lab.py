"""Three sites in the lab for geo_training.py, contenders that train there, and their model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Row, median, quantile
from lab_job import start_job

from torch_resilient.geo.cell import Cell
from torch_resilient.geo.cell_policies import plan_cell
from torch_resilient.geo.cell_replay import replay
from torch_resilient.geo.cell_rules import Rules, schedule
from torch_resilient.testing import Host, LabJob, NetworkLab
from torch_resilient.testing.job import PORT
from torch_resilient.testing.settings import QUEUE_BYTES_MIN

SCRIPT = str(Path(__file__).with_name("geo_job.py"))
PIPELINES = 3
# The hosts of each site; ranks are numbered in this order.
HOSTS = {"a": 3, "b": 3, "c": 6}
# The site of each stage of a pipeline across sites: its stages run on ranks p, 3 + p, 6 + p, 9 + p.
ACROSS = ("a", "b", "c", "c")
# 32 MiB and 5 Gbit/s at 1:20. A row of an activation has 4096 values of 4 bytes.
ROWS = 102
ROW_BYTES = 4 * 4096
NODE_BYTES_PER_S = 250e6 / 8
# Ethernet, IP and TCP: the limits count packets of 1500 bytes, which carry 1448.
WIRE_BYTES_PER_BYTE = 1500 / 1448
# Between hosts of a site, one way.
LAN_S = 0.0001
# For an answer to all that a turn does: the slowest contender takes a minute for it.
LIMIT_S = 300.0
ACTIVATION_MS = ROWS * ROW_BYTES * WIRE_BYTES_PER_BYTE / NODE_BYTES_PER_S * 1e3


@dataclass(frozen=True)
class Setting:
    """A problem for both the model and the lab; times in ms, before they are stretched.

    Attributes:
        latency_ms: between sites a and b, and between b and c.
        forward_ms: by stage; a backward takes twice as long.
    """

    microbatches: int
    latency_ms: tuple[float, float] = (20.0, 20.0)
    forward_ms: tuple[float, ...] = (10.0,) * 4

    def __str__(self) -> str:
        latency = " and ".join(f"{each:g}" for each in dict.fromkeys(self.latency_ms))
        forward = ", ".join(f"{each:g}" for each in self.forward_ms)
        if len(set(self.forward_ms)) == 1:
            forward = f"{self.forward_ms[0]:g}"
        return f"M = {self.microbatches}, {latency} ms between sites, forward {forward} ms"

    def cell(self, sharing: str, transfer_ms: float, split: bool) -> Cell:
        """The same as a problem for the model."""
        forward = self.forward_ms
        stages = len(forward)
        backward = tuple(2 * each for each in forward)
        weight = (0.0,) * stages
        if split:
            # The first stage needs no gradient of its input: W is its whole backward.
            backward = (0.0, *forward[1:])
            weight = (2 * forward[0], *forward[1:])
        latency = dict(zip(itertools.pairwise("abc"), self.latency_ms, strict=True))
        hops = list(itertools.pairwise(ACROSS))
        return Cell(
            pipelines=PIPELINES,
            microbatches=self.microbatches,
            sites=ACROSS,
            forward_ms=forward,
            recompute_ms=(0.0,) * stages,
            backward_ms=backward,
            weight_ms=weight,
            split=split,
            hop_ms=tuple((transfer_ms,) * 2 if a != b else (0.0, 0.0) for a, b in hops),
            latency_ms=tuple((latency.get(hop, 0.0),) * 2 for hop in hops),
            sharing=sharing,
            relays=PIPELINES,
            caps=(self.microbatches,) * stages,
        )


@dataclass(frozen=True)
class Contender:
    """A schedule on a backend, in one of the jobs.

    Attributes:
        job: "auto" or "off", the setting of `relay`.
        kind: GPipe, 1F1B, varuna, or live (ScheduleAdaptiveZB).
        transfer_ms: in the model, of an activation over one node.
        model_ms: the iteration, if another model has predicted it.
        options: more fields of the worker's contender.
    """

    job: str
    kind: str
    setting: Setting
    backend: str = "resilient"
    transfer_ms: float = ACTIVATION_MS
    model_ms: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def sharing(self) -> str:
        return "temporal" if self.job == "auto" else "spatial"

    @property
    def name(self) -> str:
        if self.backend == "resilient":
            return f"{self.kind}, relay={self.job}"
        return f"{self.kind} on {self.backend}"

    @property
    def label(self) -> str:
        """Tells it apart from all others of its job."""
        return f"{self.backend} {self.kind} {self.setting} {sorted(self.options.items())}"

    def predicted_ms(self) -> float:
        """The iteration by the model."""
        if self.model_ms is not None:
            return self.model_ms
        if self.kind == "live":
            # An operation whose input has arrived, B before F before W.
            rules = Rules("BFWR", turn=1, spatial=self.sharing == "spatial")
            cell = self.setting.cell(self.sharing, self.transfer_ms, split=True)
            return schedule(cell, rules).iteration_ms
        cell = self.setting.cell(self.sharing, self.transfer_ms, split=False)
        return replay(cell, self._orders()).iteration_ms

    def _orders(self) -> list[list[list[str]]]:
        """The orders of all pipelines and stages, with R. They are fixed before the training, for
        pipelines that use their own nodes."""
        cell = self.setting.cell("spatial", self.transfer_ms, split=False)
        return plan_cell(cell, self.kind.lower()).orders

    def to_worker(self, stretch: float) -> Row:
        """The settings of the ranks."""
        orders = None
        if self.kind == "varuna":
            # R takes no time; the worker runs the backward as a whole, and nothing as W.
            orders = [
                [
                    each
                    for name in order
                    for each in {"F": [name], "R": []}.get(name[0], [name, f"W{name[1:]}"])
                ]
                for order in self._orders()[0]
            ]
        return {
            "name": self.label,
            "backend": self.backend,
            "schedule": self.kind,
            "orders": orders,
            "microbatches": self.setting.microbatches,
            "forward_s": [each * stretch / 1e3 for each in self.setting.forward_ms],
            "rows": ROWS,
            "layout": [list(range(p, 12, PIPELINES)) for p in range(PIPELINES)],
            "gradient_floats": 0,
            **self.options,
        }


class Sites:
    """The lab, and the jobs that run in it at the same time.

    Args:
        stretch: multiplies times, and divides rates.
        spares: more hosts of site a, whose ranks have no stage.

    Attributes:
        jobs: by the setting of `relay`.
        relayed_bytes: by rank, what it had passed on for others at the end of the last turn.
    """

    def __init__(
        self,
        lab: NetworkLab,
        stretch: float,
        sysctl: Mapping[str, object] | None = None,
        spares: int = 0,
    ) -> None:
        self._lab, self._stretch = lab, stretch
        self.jobs: dict[str, LabJob] = {}
        self.relayed_bytes: list[int] = []
        self._turns: dict[Contender, list[list[Row]]] = {}
        self._busy: dict[Contender, list[float]] = {}
        self._sites = [site for site, count in HOSTS.items() for _ in range(count)]
        self._sites += ["a"] * spares
        names = [f"{site}{number}" for number, site in enumerate(self._sites)]
        self._hosts: list[Host] = [lab.host(name, sysctl=sysctl) for name in names]
        self.net = lab.network(self._hosts, delay_s=LAN_S)
        self._control = lab.network(self._hosts, name="control")
        self._inside = {site: ",".join(name for name in names if name[0] == site) for site in HOSTS}
        self._limits = {
            (site, far): [
                self.net.share_rate(f"{name}->{self._inside[far]}", NODE_BYTES_PER_S / stretch)
                for name in self._inside[site].split(",")
            ]
            for site, far in itertools.permutations(HOSTS, 2)
        }

    def set_latency(self, latency_ms: tuple[float, float]) -> None:
        """One way, between a and b and between b and c."""
        there, onward = latency_ms
        for (site, far), each in {
            ("a", "b"): there,
            ("b", "c"): onward,
            ("a", "c"): there + onward,
        }.items():
            delay_s = each * self._stretch / 1e3
            self.net.set(direction=f"{self._inside[site]}<->{self._inside[far]}", delay_s=delay_s)
            # Room for a round trip's worth, as in a router; 15 % of the packets of a pipeline were
            # dropped at 40 ms with the lab's minimum.
            rate = NODE_BYTES_PER_S / self._stretch
            queue_bytes = max(QUEUE_BYTES_MIN, 2 * delay_s * rate)
            for limit in self._limits[site, far] + self._limits[far, site]:
                limit.set(rate, queue_bytes=queue_bytes)

    def start(
        self,
        contenders: Sequence[Contender],
        realtime: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the jobs that the contenders name; returns when all ranks are ready. They know
        what a host may send to another site: relays need that to serve pipelines in order."""
        payload = NODE_BYTES_PER_S / WIRE_BYTES_PER_BYTE / self._stretch
        for job in dict.fromkeys(each.job for each in contenders):
            own = {each.label: each for each in contenders if each.job == job}
            arguments = {
                "realtime": realtime,
                "contenders": [each.to_worker(self._stretch) for each in own.values()],
            }
            self.jobs[job] = start_job(
                SCRIPT,
                self._hosts,
                self._control,
                arguments,
                environment={
                    "TORCH_RESILIENT_INTERFACE": "eth0",
                    "TORCH_RESILIENT_RELAY": job,
                    "TORCH_RESILIENT_WAN_RATE_LIMIT": str(int(payload)),
                    # Datagrams take two to five times the processor time, and here twelve hosts
                    # share the processors: with "auto", iterations take up to 9 % longer.
                    "TORCH_RESILIENT_WAN": "tcp",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    **(environment or {}),
                },
                sites=self._sites,
                port=PORT + len(self.jobs),
            )
        for started in self.jobs.values():
            for _ in self._hosts:
                started.row("ready", LIMIT_S)

    def turn(self, contender: Contender, iterations: int) -> None:
        """Lets a contender run."""
        job = self.jobs[contender.job]
        self.set_latency(contender.setting.latency_ms)
        began_s, carrier_s = time.monotonic(), self._lab.carrier_cpu_s
        command = {"do": "turn", "contender": contender.label, "iterations": iterations}
        job.tell(json.dumps(command))
        rows = [job.row("turn", LIMIT_S) for _ in self._hosts]
        rows.sort(key=lambda row: int(row["rank"]))
        self.relayed_bytes = [int(row["relayed_bytes"]) for row in rows]
        self._turns.setdefault(contender, []).append([row for row in rows if row["ends"]])
        cpu_s = sum(row["cpu_s"] for row in rows) + self._lab.carrier_cpu_s - carrier_s
        room_s = (time.monotonic() - began_s) * len(os.sched_getaffinity(0))
        self._busy.setdefault(contender, []).append(cpu_s / room_s)

    def times_ms(self, contender: Contender) -> list[list[float]]:
        """By turn, the iterations but the first, not stretched."""
        return [
            [
                (end - before) / self._stretch * 1e3
                for before, end in itertools.pairwise(
                    max(each) for each in zip(*(row["ends"] for row in rows), strict=True)
                )
            ]
            for rows in self._turns[contender]
        ]

    def busy(self, contender: Contender) -> float:
        """The part of the machine that its turns used, network included."""
        return median(self._busy[contender])

    def bits(self, contender: Contender) -> list[list[list[str]]]:
        """By rank and iteration: the loss, where there is one, and a hash of the weights."""
        turns = self._turns[contender]
        return [[each for row in rows for each in row["bits"]] for rows in zip(*turns, strict=True)]

    def close(self) -> None:
        """Ends the jobs."""
        for job in self.jobs.values():
            job.tell(json.dumps({"do": "end"}))
        for name, job in self.jobs.items():
            statuses = job.wait(60)
            # A case may kill a rank.
            if any(status not in (0, -signal.SIGKILL) for status in statuses):
                print(f"the ranks of job {name} ended with {statuses}", file=sys.stderr)
            job.close()


@contextlib.contextmanager
def sites(
    stretch: float, sysctl: Mapping[str, object] | None = None, spares: int = 0
) -> Iterator[Sites]:
    """Three sites, whose jobs end with them."""
    with NetworkLab() as lab:
        made = Sites(lab, stretch, sysctl, spares)
        try:
            yield made
        except BaseException:
            for job in made.jobs.values():
                job.close()
            raise
        made.close()


def take_turns(
    found: Sites, contenders: Sequence[Contender], turns: int, iterations: int, warm_up: int = 8
) -> None:
    """The first turn is a warm-up: connections are added, relays are found, plans are made. Gloo
    does none of that, and its iterations are long: two are a turn."""
    for number in range(turns + 1):
        shift = number % len(contenders)
        for each in [*contenders[shift:], *contenders[:shift]]:
            count = iterations + 1 if number else warm_up
            found.turn(each, 2 if each.backend == "gloo" else count)


def same_bits(one: list[list[list[str]]], other: list[list[list[str]]]) -> bool:
    """Whether all iterations that both have run had the same losses and left the same weights."""
    count = min(len(one[0]), len(other[0]))
    return count > 0 and [each[:count] for each in one] == [each[:count] for each in other]


def measured(found: Sites, contender: Contender) -> Row:
    """A contender's times beside those of the model."""
    turns_ms = found.times_ms(contender)[1:]
    return {
        "name": contender.name,
        "ms": median([x for turn in turns_ms for x in turn]),
        "model_ms": contender.predicted_ms(),
        "busy": found.busy(contender),
        "samples_ms": turns_ms,
    }


def compared(found: Sites, slow: Contender, fast: Contender) -> Row:
    """The ratio slow / fast of two contenders that took turns, and whether their bits are equal."""
    rows = [measured(found, each) for each in (slow, fast)]
    medians = [[median(turn) for turn in row["samples_ms"]] for row in rows]
    ratios = [a / b for a, b in zip(*medians, strict=True)]
    return {
        "setting": str(fast.setting),
        "contenders": rows,
        "ratio": median(ratios),
        "ratio_p10": quantile(ratios, 0.1),
        "ratio_p90": quantile(ratios, 0.9),
        "model_ratio": rows[0]["model_ms"] / rows[1]["model_ms"],
        "equal": same_bits(found.bits(slow), found.bits(fast)),
    }
