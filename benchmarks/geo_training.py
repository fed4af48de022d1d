"""Pipelines across three sites with real messages: the figures of ATLAS, beside a model of each.

    python benchmarks/geo_training.py --only relays --quick

Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import Row, add_common_arguments, median, quantile, write_rows
from lab_job import start_job

from torch_resilient.geo.cell import Cell
from torch_resilient.geo.cell_policies import plan_cell
from torch_resilient.geo.cell_replay import replay
from torch_resilient.geo.cell_rules import Rules, schedule
from torch_resilient.testing import LabJob, LabUnavailable, NetworkLab
from torch_resilient.testing.job import PORT

ABOUT = """\
The set-up of ATLAS, section 6.1: 12 ranks on 12 hosts of a lab, three pipelines of four stages.
Stage 1 is in site a, stage 2 in site b, stages 3 and 4 in site c. All at 1:20: activations of
1.6 MiB, and 250 Mbit/s from each host to each other site, so that an activation takes 54 ms, as
32 MiB do at 5 Gbit/s. Operations do little and sleep for the rest of their time; a backward takes
twice as long as a forward. Activations, gradients and weights are real. After each iteration the
replicas of a stage average their gradients.

  --stretch multiplies all times, and divides the rates: no ratio of the model changes, and the
  machine's own delays count for less.

The contenders of a case run in the same lab and take turns of some iterations each. The first
iteration of a turn is not counted, as its connections come out of a rest. An iteration lasts from
the end of the one before, on the slowest rank, until its own. Their losses and weights must be
equal to the last bit.

  relays   relay=auto against relay=off: torch's own Schedule1F1B unchanged, and ScheduleAdaptiveZB.
           ratio = time with off / time with auto. Beside it is the ratio of the model: transfers
           that use all nodes of the site, one after the other, against own nodes only.

Exit status 1 if a limit is missed, or if losses or weights differ. Limits: relays 1.2 (1F1B) and
1.05 (ScheduleAdaptiveZB).
"""

STAGES, PIPELINES = 4, 3
# The site of each stage.
SITES = ("a", "b", "c", "c")
# 32 MiB and 5 Gbit/s at 1:20; a row of the batch has 4096 values of 4 bytes.
ROWS = 102
ROW_BYTES = 4 * 4096
NODE_BYTES_PER_S = 250e6 / 8
# IP and TCP take 52 of the 1500 bytes of a packet, which the limits count.
WIRE_BYTES_PER_BYTE = 1500 / 1448
# Between hosts of a site, one way.
LAN_S = 0.0001
# For an answer to everything that a turn does; the slowest contender takes a minute for it.
LIMIT_S = 300.0
RELAYS_MIN = {"1F1B": 1.2, "live": 1.05}


@dataclass(frozen=True)
class Setting:
    """What the model and the lab have in common; times in ms, before they are stretched."""

    microbatches: int
    latency_ms: float
    forward_ms: float

    def cell(self, sharing: str, *, split: bool = False, transfer_ms: float | None = None) -> Cell:
        """The same as a problem for the model; by default, hosts use all of their limit."""
        each_ms = transfer_ms or activation_ms()
        forward = self.forward_ms
        # The first stage needs no gradient of its input: W is its whole backward.
        backward = (0.0, *(forward,) * (STAGES - 1)) if split else (2 * forward,) * STAGES
        weight = (2 * forward, *(forward,) * (STAGES - 1)) if split else (0.0,) * STAGES
        crosses = [a != b for a, b in itertools.pairwise(SITES)]
        return Cell(
            pipelines=PIPELINES,
            microbatches=self.microbatches,
            sites=SITES,
            forward_ms=(forward,) * STAGES,
            recompute_ms=(0.0,) * STAGES,
            backward_ms=backward,
            weight_ms=weight,
            split=split,
            hop_ms=tuple((each_ms, each_ms) if wan else (0.0, 0.0) for wan in crosses),
            latency_ms=tuple((self.latency_ms,) * 2 if wan else (0.0, 0.0) for wan in crosses),
            sharing=sharing,
            relays=PIPELINES,
            caps=(self.microbatches,) * STAGES,
        )


def activation_ms() -> float:
    """The time of an activation on a host's way to another site."""
    return ROWS * ROW_BYTES * WIRE_BYTES_PER_BYTE / NODE_BYTES_PER_S * 1e3


def predicted_ms(setting: Setting, kind: str, sharing: str) -> float:
    """The model's iteration of a schedule of torch, or of ScheduleAdaptiveZB ("live")."""
    if kind == "live":
        # Whatever has arrived, B before F before W.
        rules = Rules("BFWR", turn=1, spatial=sharing == "spatial")
        return schedule(setting.cell(sharing, split=True), rules).iteration_ms
    # The order of torch's schedules does not depend on the network.
    orders = plan_cell(setting.cell("spatial"), kind.lower()).orders
    return replay(setting.cell(sharing), orders).iteration_ms


class Sites:
    """The lab, and the jobs that run in it at the same time."""

    def __init__(self, lab: NetworkLab, setting: Setting, stretch: float) -> None:
        self._setting, self._stretch = setting, stretch
        self._jobs: dict[str, LabJob] = {}
        self._turns: dict[tuple[str, str], list[list[Row]]] = {}
        # Ranks are numbered stage by stage.
        self._sites = [site for site in SITES for _ in range(PIPELINES)]
        names = [f"{site}{n}" for n, site in enumerate(self._sites)]
        self._hosts = [lab.host(name) for name in names]
        self.net = lab.network(self._hosts, delay_s=LAN_S)
        self._control = lab.network(self._hosts, name="control")
        inside = {
            site: ",".join(name for name in names if name[0] == site) for site in sorted(set(SITES))
        }
        for site, far in itertools.permutations(inside, 2):
            delay_s = setting.latency_ms * stretch / 1e3
            self.net.set(direction=f"{inside[site]}->{inside[far]}", delay_s=delay_s)
            for name in inside[site].split(","):
                rate = NODE_BYTES_PER_S / stretch
                self.net.share_rate(f"{name}->{inside[far]}", rate)

    def start(
        self,
        job: str,
        contenders: Sequence[Row],
        environment: dict[str, str],
        realtime: bool,
    ) -> None:
        """One rank on each host, with these contenders; returns before they are ready."""
        common = {
            "rows": ROWS,
            "microbatches": self._setting.microbatches,
            "forward_s": self._setting.forward_ms * self._stretch / 1e3,
        }
        arguments = {
            "stages": STAGES,
            "pipelines": PIPELINES,
            "realtime": realtime,
            "contenders": [{**common, **each} for each in contenders],
        }
        environment = {
            "TORCH_RESILIENT_INTERFACE": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        self._jobs[job] = start_job(
            __file__,
            self._hosts,
            self._control,
            arguments,
            environment=environment,
            sites=self._sites,
            port=PORT + len(self._jobs),
        )

    def ready(self) -> None:
        """Returns when all ranks of all jobs are."""
        for job in self._jobs.values():
            for _ in self._hosts:
                job.row("ready", LIMIT_S)

    def turn(self, job: str, contender: str, iterations: int) -> None:
        """Lets a contender run."""
        command = {"do": "turn", "contender": contender, "iterations": iterations}
        self._jobs[job].tell(json.dumps(command))
        rows = [self._jobs[job].row("turn", LIMIT_S) for _ in self._hosts]
        rows.sort(key=lambda row: int(row["rank"]))
        self._turns.setdefault((job, contender), []).append(rows)

    def times_ms(self, job: str, contender: str) -> list[list[float]]:
        """By turn, the iterations but the first, not stretched."""
        return [
            [
                (end - before) / self._stretch * 1e3
                for before, end in itertools.pairwise(
                    max(each) for each in zip(*(row["ends"] for row in rows), strict=True)
                )
            ]
            for rows in self._turns[job, contender]
        ]

    def bits(self, job: str, contender: str) -> list[Any]:
        """All losses, and the weights after each turn, by rank."""
        return [
            [(row["losses"], row["bits"]) for row in rows] for rows in self._turns[job, contender]
        ]

    def close(self) -> None:
        """Ends the jobs."""
        for job in self._jobs.values():
            job.tell(json.dumps({"do": "end"}))
        for job in self._jobs.values():
            statuses = job.wait(30)
            if any(statuses):
                print(f"the ranks ended with {statuses}", file=sys.stderr)
            job.close()


@contextlib.contextmanager
def sites(setting: Setting, stretch: float) -> Iterator[Sites]:
    """A lab of three sites; its jobs end with it."""
    with NetworkLab() as lab:
        made = Sites(lab, setting, stretch)
        try:
            yield made
        except BaseException:
            for job in made._jobs.values():
                job.close()
            raise
        made.close()


def compare(
    found: Sites, pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]], turns: int, count: int
) -> Iterator[Row]:
    """Lets two (job, contender) of each pair take turns; the ratio is first / second."""
    for number in range(turns + 1):
        for pair in pairs:
            # The first turn is a warm-up: connections open, relays are found, plans are made.
            for each in pair if number % 2 else reversed(pair):
                found.turn(*each, count + 1)
    for pair in pairs:
        times = [found.times_ms(*each)[1:] for each in pair]
        medians = [[median(turn) for turn in each] for each in times]
        ratios = [a / b for a, b in zip(*medians, strict=True)]
        bits = [found.bits(*each) for each in pair]
        yield {
            "ms": [median([x for turn in each for x in turn]) for each in times],
            "ratio": median(ratios),
            "ratio_p10": quantile(ratios, 0.1),
            "ratio_p90": quantile(ratios, 0.9),
            "equal": bits[0] == bits[1],
            "samples_ms": times,
        }


def relays(options: argparse.Namespace) -> Iterator[Row]:
    """relay=auto against relay=off."""
    settings = [Setting(4, 20.0, 10.0)]
    if not options.quick:
        settings += [Setting(16, 20.0, 10.0), Setting(4, 40.0, 10.0), Setting(4, 20.0, 18.0)]
    kinds = ("1F1B", "live")
    for setting in settings:
        contenders = [{"name": kind, "schedule": kind, "backend": "resilient"} for kind in kinds]
        with sites(setting, options.stretch) as found:
            for relay in ("off", "auto"):
                environment = {"TORCH_RESILIENT_RELAY": relay}
                found.start(relay, contenders, environment, options.realtime)
            found.ready()
            pairs = [(("off", kind), ("auto", kind)) for kind in kinds]
            rows = compare(found, pairs, options.turns, options.iterations)
            for kind, row in zip(kinds, rows, strict=True):
                model_ms = [predicted_ms(setting, kind, way) for way in ("spatial", "temporal")]
                yield {
                    "case": f"relays, {kind}",
                    **setting.__dict__,
                    **row,
                    "names": ["off", "auto"],
                    "model_ms": model_ms,
                    "model_ratio": model_ms[0] / model_ms[1],
                    "least": RELAYS_MIN[kind],
                }


CASES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {"relays": relays}


def describe_row(row: Row) -> str:
    """Some lines for people."""
    limit = f", limit >= {row['least']:g}" if row["least"] else ""
    lines = [
        f"{row['case']}: M = {row['microbatches']}, {row['latency_ms']:g} ms between sites, "
        f"forward {row['forward_ms']:g} ms"
    ]
    for name, found, model in zip(row["names"], row["ms"], row["model_ms"], strict=True):
        error = f"{100 * (found / model - 1):+.0f} %"
        lines.append(f"  {name:<12} {found:8.0f} ms   model {model:7.0f} ms   {error}")
    lines.append(
        f"  ratio {row['ratio']:.2f} (turns {row['ratio_p10']:.2f} - {row['ratio_p90']:.2f})   "
        f"model {row['model_ratio']:.2f}{limit}: {'met' if row['met'] else 'MISSED'}; "
        f"losses and weights {'equal' if row['equal'] else 'DIFFER'}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each row as soon as it is there; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--only", choices=CASES, help="only this case")
    parser.add_argument("--stretch", type=float, default=2.0, help="of all times (default: 2)")
    parser.add_argument("--turns", type=int, help="of each contender (default: 9, quick: 3)")
    parser.add_argument("--iterations", type=int, default=3, help="of a turn (default: 3)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        from geo_job import worker

        worker(json.loads(options.worker))
        return 0
    options.turns = options.turns or (3 if options.quick else 9)
    rows: list[Row] = []
    try:
        for name, case in CASES.items():
            if options.only in (None, name):
                for row in case(options):
                    met = row["equal"] and (not row["least"] or row["ratio"] >= row["least"])
                    rows.append({"benchmark": "geo_training", **row, "met": met})
                    print(describe_row(rows[-1]), flush=True)
    except LabUnavailable as error:
        parser.error(str(error))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    write_rows(options.json, rows)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
