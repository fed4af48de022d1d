"""The cost of slow links for a pipeline, by schedule: PIPEMORPH's Figures 14 to 18 and 22."""

from __future__ import annotations

import argparse
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Row, add_common_arguments, median, run_ranks, write_rows
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from torch_resilient import faults
from torch_resilient.pipelining import (
    PipelineCosts,
    ScheduleAdaptiveZB,
    SchedulePlanned,
    plan_schedule,
    zb_h1,
    zb_h2,
)

ABOUT = """\
Real processes, real messages over the resilient backend, injected delays. A stage's operations do
little and sleep for the rest of their time: eight stages thus fit on two cores. All schedules
run in the same processes and take turns, iteration by iteration; a row's numbers are medians. Over
traces each schedule runs in its turn, over the same uninterrupted trace, and numbers are means.

  1F1B          torch's Schedule1F1B
  ZB torch      torch's ScheduleInterleavedZeroBubble with one stage a rank
  ZB-H1, ZB-H2  the classic orders, by SchedulePlanned: the paper's PIPEMORPH-CPU, that is an
                unchanged schedule with communication that blocks nothing
  fixed         ScheduleAdaptiveZB(dispatch="fixed"): the paper's way, re-planned between iterations
  live          ScheduleAdaptiveZB: the same with live dispatch

Each is given in ms and, in brackets, as a multiple of its own healthy iteration. `best` is what the
planner's exact model finds for the row's delays in one second. The paper's 1F1B and ZB ran over
NCCL, where a send blocks all later operations; here no send blocks, so both suffer less than there.

All times of the paper are multiplied by --scale, which changes no ratio: the longer the operations,
the less do this machine's own delays count. Exit status 1 if `live` is slower than another schedule
by more than the noise (3 %), or misses a limit: with 60 ms on the last of eight stages 1.13 times
its healthy iteration, and 1.03 times `best`. Figure 19 is in dp_straggler.py. The rows `thin` are
not in the paper: a link on which the bytes of a message take that long, and nothing else.
"""

# The paper's numbers, where it gives any; slowdowns are against the same system healthy.
PAPER = {
    "fig14 30 ms": "ZB 703 ms, PIPEMORPH-CPU 579 ms, PIPEMORPH 398 ms (healthy 368)",
    "fig15 60 ms": "1F1B 2.70x, ZB 4.24x, PIPEMORPH-CPU 2.15x, PIPEMORPH 1.13x",
    "fig16": "30 -> 60 ms: 1F1B 1.49x, ZB 1.69x, PIPEMORPH-CPU 1.30x, PIPEMORPH 1.07x (mean)",
    "fig17": "PIPEMORPH takes 51.6 % less time than 1F1B, 57.5 % than ZB, 23.1 % than CPU (mean)",
    "fig18": "PIPEMORPH up to 2.8 times as fast as 1F1B and ZB",
    "fig22": "PIPEMORPH 1.11 times as fast as 1F1B, 1.36 times as ZB",
}

METHODS = ("1F1B", "ZB torch", "ZB-H1", "ZB-H2", "fixed", "live")
ADAPTIVE = ("fixed", "live")
# Iterations that an adaptive schedule gets to settle after the delays have changed.
SETTLE = 8
# Iterations in a row over a trace, for each of the rounds.
STREAM = 4
NOISE = 0.03


@dataclass(frozen=True)
class Model:
    """The computation of a stage before it sleeps, and the shape of a microbatch between stages."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


class Scaled(nn.Module):
    """Little to compute for many bytes between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)


MODELS = {
    "linear": Model(lambda: nn.Linear(4, 4), (1, 4)),
    "transformer": Model(_transformer, (2, 32, 64)),  # rows, tokens, width
    "large": Model(Scaled, (1, 1 << 18)),  # a message of 1 MiB
}


@dataclass(frozen=True)
class Scenario:
    """Delays of a pipeline's links, in the paper's ms.

    Attributes:
        name: for the table.
        base_ms: the delay of every link and direction.
        extra_ms: by link, on top of that.
        transfer_ms: by link, the time of a message's bytes on it; requires the model "large".
        trace: draws the delay of a link at each change, instead; with `interval_ms`, the minimum
            and the maximum time between two changes.
    """

    name: str
    stages: int
    microbatches: int
    base_ms: float = 5.0
    extra_ms: dict[int, float] = field(default_factory=dict)
    transfer_ms: dict[int, float] = field(default_factory=dict)
    trace: Callable[[random.Random], float] | None = None
    interval_ms: tuple[float, float] = (0.0, 0.0)

    def delay_ms(self, link: int) -> float:
        """The time from the send of a message until all of it has arrived."""
        extra_ms = self.extra_ms.get(link, 0.0) + self.transfer_ms.get(link, 0.0)
        return self.base_ms + extra_ms


def _normal(rng: random.Random) -> float:
    return max(rng.gauss(30, 10), 0.0)


def _bursty(rng: random.Random) -> float:
    """Median 13, mean 22, 99th percentile 79 ms, as in Figure 22: lognormal, cut off at 80."""
    while True:
        value = math.exp(rng.gauss(math.log(14.2), 1.15))
        if value <= 80:
            return value


def scenarios(quick: bool) -> list[Scenario]:
    """All rows: the paper's figures as far as they say how they were made, else as fitted."""
    found = [
        Scenario("fig14 healthy", 4, 10, 10),
        Scenario("fig14 30 ms", 4, 10, 10, {2: 30}),
    ]
    delays = (0, 60) if quick else (0, 10, 20, 30, 40, 50, 60)
    found += [Scenario(f"fig15 {ms} ms", 8, 16, 5, {6: ms}) for ms in delays]
    if quick:
        return found
    for stages, microbatches, base in ((4, 10, 10), (8, 16, 5)):
        for where, link in (("first", 0), ("last", stages - 2)):
            found += [
                Scenario(
                    f"fig16 {stages} stages {where} {ms} ms", stages, microbatches, base, {link: ms}
                )
                for ms in (30, 60)
                if (stages, where) != (8, "last")  # in fig15
            ]
    for links in ((0, 1), (0, 2), (0, 6), (0, 3, 6)):
        name = "fig17 30 ms on " + ", ".join(f"{link}-{link + 1}" for link in links)
        found.append(Scenario(name, 8, 16, 5, dict.fromkeys(links, 30.0)))
    for name, interval in (("A", (50, 100)), ("B", (100, 200)), ("C", (200, 400))):
        found.append(Scenario(f"fig18 trace {name}", 4, 10, 0, trace=_normal, interval_ms=interval))
    found.append(Scenario("fig22 bursty", 8, 16, 0, trace=_bursty, interval_ms=(200, 1000)))
    found += [
        Scenario(f"thin {where} {ms} ms", 4, 10, 1, transfer_ms={link: ms})
        for where, link in (("first", 0), ("last", 2))
        for ms in (10, 20)
    ]
    return found


class PacedStage(PipelineStage):
    """A stage with operations that last a given time, whatever they do."""

    pace_s: float

    def _paced(self, units: float, function: Callable[..., Any], *arguments: Any) -> Any:
        end_s = time.monotonic() + units * self.pace_s
        result = function(*arguments)
        while (rest_s := end_s - time.monotonic()) > 0:
            time.sleep(rest_s)
        return result

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        return self._paced(
            1, lambda: super(PacedStage, self).forward_one_chunk(*arguments, **keywords)
        )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        # The gradient of the first stage's inputs is not needed: W is its whole backward.
        units = 2 if full_backward else 0 if self.is_first else 1
        run = super().backward_one_chunk
        return self._paced(units, run, bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        run = super().backward_weight_one_chunk
        return self._paced(2 if self.is_first else 1, run, bwd_chunk_id, last_backward)


def paced_stage(
    module: nn.Module, stage: int, stages: int, shape: Sequence[int], group: Any, pace_s: float
) -> PacedStage:
    """A stage between others that send and take tensors of that shape."""
    values = torch.zeros(shape, requires_grad=True)
    made = PacedStage(
        module,
        stage,
        stages,
        torch.device("cpu"),
        input_args=values if stage else values.detach(),
        output_args=values,
        group=group,
    )
    made.pace_s = pace_s
    return made


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Bench:
    """One rank's schedules for a number of stages."""

    def __init__(
        self, rank: int, stages: int, microbatches: int, pace_s: float, model: Model
    ) -> None:
        self.rank, self.stages, self.microbatches = rank, stages, microbatches
        self.pace_s = pace_s
        self.model = model
        # The injected delays are not in it: all ranks begin at the same time.
        self.clock = dist.new_group(backend="gloo")
        # Ranks beyond the stages only take part in what is done by all.
        self.group = dist.new_group(list(range(stages)), backend="resilient")
        self.member = rank < stages
        self.schedules: dict[str, Any] = {}
        if self.member:
            for method in METHODS:
                self.schedules[method] = self._schedule(method)
        rows, *rest = model.shape
        self.batch = torch.ones(rows * microbatches, *rest)

    def _schedule(self, method: str) -> Any:
        torch.manual_seed(self.rank)
        stage = paced_stage(
            self.model.make(), self.rank, self.stages, self.model.shape, self.group, self.pace_s
        )
        n = self.microbatches
        if method == "1F1B":
            return Schedule1F1B(stage, n, loss_of)
        if method == "ZB torch":
            return ScheduleInterleavedZeroBubble([stage], n, loss_of)
        if method in ADAPTIVE:
            return ScheduleAdaptiveZB(stage, n, loss_of, dispatch=method)
        orders = (zb_h1 if method == "ZB-H1" else zb_h2)(self.stages, n)
        return SchedulePlanned(stage, n, loss_of, orders=orders)

    def iteration_s(self, method: str) -> float:
        """Seconds of one iteration, from when all have begun until all have ended."""
        took_s = 0.0
        dist.barrier(self.clock)
        if self.member:
            begin_s = time.monotonic()
            inputs = (self.batch,) if self.rank == 0 else ()
            keywords = {"target": self.batch} if self.rank == self.stages - 1 else {}
            self.schedules[method].step(*inputs, **keywords)
            took_s = time.monotonic() - begin_s
        longest = torch.tensor([took_s], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, self.clock)
        return float(longest)

    def costs(self, scenario: Scenario, scale: float) -> PipelineCosts | None:
        """The costs that the planner would have to know; None if the delays change."""
        if scenario.trace is not None:
            return None
        delays = [scenario.delay_ms(link) * scale / 1e3 for link in range(self.stages - 1)]
        whole = self.pace_s
        return PipelineCosts.of(
            self.stages,
            forward_s=whole,
            input_backward_s=[0.0] + [whole] * (self.stages - 1),
            weight_backward_s=[2 * whole] + [whole] * (self.stages - 1),
            delay_forward_s=delays,
        )


class Delays:
    """The delays of one rank's own sends, as a scenario wants them. Also a context manager."""

    def __init__(self, scenario: Scenario, rank: int, scale: float, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._neighbours = [
            (min(rank, peer), peer)
            for peer in (rank - 1, rank + 1)
            if 0 <= peer < scenario.stages and rank < scenario.stages
        ]
        self._scenario = scenario
        self._rank = rank
        self._scale_s = scale / 1e3
        self._faults: dict[int, faults.Fault] = {}
        self._limits: list[faults.Fault] = []
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Delays:
        for link, peer in self._neighbours:
            self._set(peer, self._scenario.base_ms + self._scenario.extra_ms.get(link, 0.0))
            if link in self._scenario.transfer_ms:
                rate = self._message_bytes / (self._scenario.transfer_ms[link] * self._scale_s)
                self._limits.append(faults.limit(rate, peer=peer))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for fault in [*self._faults.values(), *self._limits]:
            fault.clear()

    def start(self, seed: int) -> None:
        """Begins a trace, if there is one: the same for the same seed."""
        self.stop()
        if self._scenario.trace is None:
            return
        self._end.clear()
        for link, peer in self._neighbours:
            rng = random.Random(f"{seed} {link} {peer > self._rank}")
            thread = threading.Thread(target=self._follow, args=(peer, rng))
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends the trace."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _follow(self, peer: int, rng: random.Random) -> None:
        assert self._scenario.trace is not None
        until_s = time.monotonic()
        while True:
            self._set(peer, self._scenario.base_ms + self._scenario.trace(rng))
            until_s += rng.uniform(*self._scenario.interval_ms) * self._scale_s
            if self._end.wait(max(until_s - time.monotonic(), 0.0)):
                return

    def _set(self, peer: int, delay_ms: float) -> None:
        old = self._faults.pop(peer, None)
        self._faults[peer] = faults.delay(delay_ms * self._scale_s, peer=peer)
        if old is not None:
            old.clear()


def measure(
    rank: int,
    ranks: int,
    report: Report,
    rows: Sequence[Scenario],
    scale: float,
    rounds: int,
    model: str,
) -> None:
    """All scenarios; rank 0 reports a row for each."""
    benches: dict[tuple[int, int, str], Bench] = {}
    for number, scenario in enumerate(rows):
        name = "large" if scenario.transfer_ms else model
        shape = (scenario.stages, scenario.microbatches, name)
        if shape not in benches:
            benches[shape] = Bench(rank, *shape[:2], 0.01 * scale, MODELS[name])
            for method in METHODS:
                benches[shape].iteration_s(method)  # opens connections
        bench = benches[shape]
        message_bytes = 4 * math.prod(MODELS[name].shape)
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        with Delays(scenario, rank, scale, message_bytes) as delays:
            if scenario.trace is not None:
                for method in METHODS:
                    delays.start(number)  # the same for every method, and not interrupted
                    for _ in range(SETTLE if method in ADAPTIVE else 0):
                        bench.iteration_s(method)
                    for _ in range(STREAM * rounds):
                        times[method].append(bench.iteration_s(method))
            else:
                for method in ADAPTIVE:
                    for _ in range(SETTLE):
                        bench.iteration_s(method)
                for _ in range(rounds):
                    for method in METHODS:
                        times[method].append(bench.iteration_s(method))
        if rank == 0:
            row: Row = {"benchmark": "stragglers", "scenario": scenario.name, "scale": scale}
            row["model"] = name
            for method in METHODS:
                typical = median if scenario.trace is None else fmean
                row[method] = typical(times[method]) / scale
                row[f"{method} all"] = [each / scale for each in times[method]]
            costs = bench.costs(scenario, scale)
            if costs is not None:
                plan = plan_schedule(costs, scenario.microbatches, budget_ms=1000)
                row["best"] = plan.iteration_s / scale
                row["bound"] = plan.lower_bound_s / scale
            row["plans"] = {m: bench.schedules[m].stats().to_dict()["plan"] for m in ADAPTIVE}
            report(row)


def show(row: Row, healthy: dict[int, Row], stages: int) -> list[str]:
    """Prints a row; returns the limits that it misses."""
    base = healthy.get(stages)
    cells = []
    for method in METHODS:
        slowdown = f"({row[method] / base[method]:.2f}x)" if base else ""
        cells.append(f"{1e3 * row[method]:7.0f} {slowdown:7}")
    best = f"{1e3 * row['best']:7.0f}" if "best" in row else " " * 7
    print(f"{row['scenario']:<28}" + " ".join(cells) + best, flush=True)
    missed = []
    for method in METHODS[:-1]:
        if row["live"] > row[method] * (1 + NOISE):
            missed.append(f"{row['scenario']}: live is {row['live'] / row[method]:.3f}x {method}")
    if row["scenario"] == "fig15 60 ms" and base:
        slowdown = row["live"] / base["live"]
        if round(slowdown, 2) > 1.13:  # the paper's figure has two decimals
            missed.append(f"{row['scenario']}: slowdown {slowdown:.3f}x > 1.13x")
        if row["live"] > 1.03 * row["best"]:
            missed.append(f"{row['scenario']}: {row['live'] / row['best']:.3f}x best > 1.03x")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--scale", type=float, default=2.0, help="of all times (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="per row (default: 5)")
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="linear",
        help="of a stage: one small linear layer, or a transformer layer (default: linear)",
    )
    parser.add_argument("--only", default="", help="run scenarios with this name prefix")
    options = parser.parse_args()
    rows = [each for each in scenarios(options.quick) if each.name.startswith(options.only)]
    if not rows:
        parser.error(f"--only: no scenario begins with {options.only!r}")
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    print(f"{'ms (slowdown)':<28}" + " ".join(f"{m:>7}{'':8}" for m in METHODS) + "   best")
    healthy: dict[int, Row] = {}
    missed: list[str] = []
    found: list[Row] = []
    stages = {each.name: each.stages for each in rows}
    most = max(stages.values())
    results = run_ranks(
        measure,
        most,
        rows,
        options.scale,
        rounds,
        options.model,
        backend="resilient",
        realtime=options.realtime,
    )
    for row in results:
        count = stages[row["scenario"]]
        if row["scenario"] in ("fig14 healthy", "fig15 0 ms"):
            healthy[count] = row
        missed += show(row, healthy, count)
        found.append(row)
        for figure, text in PAPER.items():
            if row["scenario"].startswith(figure):
                print(f"{'':28}paper: {text}")
    write_rows(options.json, found)
    print("\n".join(f"MISSED {each}" for each in missed) or "all limits kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
