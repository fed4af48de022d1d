"""The cost and the gain of work in bubbles: BUBBLETEA's Figure 13 in real processes."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Row, add_common_arguments, median, quantile, run_ranks, write_rows
from stragglers import PacedStage, loss_of
from torch import nn

from torch_resilient import faults
from torch_resilient.pipelining import SchedulePlanned, zb_h1
from torch_resilient.pipelining.bubbles import Bubbles, BubbleStats, BubbleWork, Chunk
from torch_resilient.pipelining.torch_actions import control_store
from torch_resilient.prefill import (
    Link,
    ModelPart,
    ModelShape,
    Prefilled,
    PrefillService,
    PrefillWork,
)
from torch_resilient.prefill.controller import Controller, Rejected, Reservation
from torch_resilient.prefill.signal import ChunkCosts, IdleSignal
from torch_resilient.prefill.worker import ChunkTimes

ABOUT = """\
Four ranks run a pipeline over the resilient backend, with a delay on the link in the middle. A
stage's operations do little and sleep for the rest of their time. Chunks of other work are layers
of a transformer, which compute for a part of their time and sleep for the rest. So each rank has
the speed of a device of its own on few cores. Three ways take turns, some iterations each:

  off    no hook: schedule.bubbles is None
  empty  the hook without work
  full   work without end: layers of a transformer for 64 tokens

Each round gives a ratio of iteration times; the table has medians, and 99th percentiles of all
iterations of a way against those of off. `filled` is the part of the idle time in which chunks ran,
`late` the part of the waits in which a chunk had not ended when the message came.

Then a process outside of the training sends requests for prefills at several rates, with lengths
like those of a code assistant, a tenth as long. `waits` are those that the controller promised.

Last, a controller places requests in the idle time of 1000 ranks, each a pipe of its own with idle
windows of its own, without any network: the time of a lookup.

On a machine with other work, the guard grows and less is filled; --realtime keeps that out. Exit
status 1 if less than 80 % of the idle time is filled, or if the
iteration time grows by more than 0.5 % in the median or 1 % at the 99th percentile; `empty` may
cost 0.1 %. A lookup may take 50 us in the median and 200 us at the 99th percentile.
"""

RANKS = 4
MICROBATCHES = 8
PACE_S = 0.02
CHUNK_PACE_S = 0.004
DELAY_S = 0.04
ROUND_STEPS = 10
WAYS = ("off", "empty", "full")
# A layer computes for a small part of CHUNK_PACE_S: the ranks share processors, as devices do not.
SHAPE = ModelShape(vocabulary=256, layers=4, width=96, heads=6, kv_heads=2, hidden=192)
CHUNK_TOKENS = 64
MAX_TOKENS = 1024
MEMORY_BYTES = 256 << 20
MIN_FILLED = 0.8
MAX_RATIO = {("empty", 0.5): 1.001, ("full", 0.5): 1.005, ("full", 0.99): 1.01}
RATES = (2, 10, 40, 160, 640)
MAX_WAIT_S = 0.2
TIMEOUT_S = 5.0
# The lookups: a model of some billion parameters on GPUs, and the paper's number of these.
LARGE_SHAPE = ModelShape(vocabulary=32000, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192)
LARGE_CHUNK_S = 0.002
LOOKUP_RANKS = 1000
LOOKUP_RATES = (100.0, 2000.0, 20000.0)
MAX_LOOKUP_S = (50e-6, 200e-6)


class PacedPart(ModelPart):
    """A model whose layers take a given time, and longer only if they compute for longer."""

    def layer(self, index: int, x: torch.Tensor, kv: torch.Tensor, start: int) -> torch.Tensor:
        end_s = time.monotonic() + CHUNK_PACE_S * len(x) / CHUNK_TOKENS
        found = super().layer(index, x, kv, start)
        time.sleep(max(end_s - time.monotonic(), 0.0))
        return found


class Endless(BubbleWork):
    """Layers of a transformer, one after the other, whose results nobody needs."""

    name = "layers"

    def __init__(self) -> None:
        self._model = PacedPart(SHAPE, range(1))
        self._kv = self._model.new_kv(CHUNK_TOKENS)
        self._x = torch.zeros(CHUNK_TOKENS, SHAPE.width)
        self._times = ChunkTimes(SHAPE)
        for _ in range(4):
            self._run()

    def next_chunk(self, end_s: float) -> Chunk:
        return Chunk(self._times.predicted_s(0, CHUNK_TOKENS), self._run)

    def _run(self) -> None:
        began_s = time.monotonic()
        with torch.no_grad():
            self._model.layer(0, self._x, self._kv[0], 0)
        self._times.observe(0, CHUNK_TOKENS, time.monotonic() - began_s)


class Training:
    """A stage, on a group of the training's ranks only: `first` and the next ones."""

    def __init__(self, index: int, group: Any = None, first: int = 0) -> None:
        torch.manual_seed(index)
        stage = PacedStage(
            nn.Linear(4, 4),
            index,
            RANKS,
            torch.device("cpu"),
            input_args=torch.zeros(1, 4, requires_grad=index > 0),
            output_args=torch.zeros(1, 4, requires_grad=True),
            group=group,
        )
        stage.pace_s = PACE_S
        self._index = index
        self.schedule = SchedulePlanned(
            stage, MICROBATCHES, loss_of, orders=zb_h1(RANKS, MICROBATCHES)
        )
        for one, other in ((1, 2), (2, 1)):
            if index == one:
                faults.delay(DELAY_S, peer=first + other).__enter__()

    def step(self) -> float:
        """Runs an iteration; returns when it began."""
        began_s = time.monotonic()
        x = torch.ones(MICROBATCHES, 4)
        if self._index == 0:
            self.schedule.step(x)
        elif self._index == RANKS - 1:
            self.schedule.step(target=x, losses=[])
        else:
            self.schedule.step()
        return began_s


def take_turns(rank: int, ranks: int, report: Report, rounds: int) -> None:
    """Runs all ways in turn; rank 0 reports their iteration times and what was filled."""
    training = Training(rank)
    empty, full = Bubbles(MEMORY_BYTES), Bubbles(MEMORY_BYTES)
    full.add(Endless())
    bubbles = {"off": None, "empty": empty, "full": full}
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        medians_s = {}
        for way in WAYS:
            training.schedule.bubbles = bubbles[way]
            starts_s = [training.step() for _ in range(ROUND_STEPS + 1)]
            # The first iterations of a way begin while the pipeline still runs the other one.
            found_s = [b - a for a, b in itertools.pairwise(starts_s[2:])]
            times_s[way] += found_s
            medians_s[way] = median(found_s)
        for way in WAYS:
            ratios[way].append(medians_s[way] / medians_s["off"])
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, full.stats())
    late_s = quantile(times_s["off"], 0.99)
    for way in WAYS:
        row: Row = {
            "benchmark": "bubbles",
            "way": way,
            "iteration_s": median(times_s[way]),
            "ratio": median(ratios[way]),
            "ratio_p99": quantile(times_s[way], 0.99) / late_s,
        }
        if way == "full":
            row |= _sums(everyone)
        report(row)


def _sums(everyone: Sequence[BubbleStats]) -> Row:
    waits = sum(each.waits for each in everyone)
    return {
        "filled": sum(each.filled_s for each in everyone) / sum(each.idle_s for each in everyone),
        "filled_by_rank": [each.filled_s / each.idle_s for each in everyone],
        "late": sum(each.late for each in everyone) / waits,
        "guard_ms": [1e3 * each.guard_s for each in everyone],
    }


def serve_load(rank: int, ranks: int, report: Report, phase_s: float) -> None:
    """Trains on all ranks but the first one, which sends requests."""
    # No group of the training contains rank 0. The default group is only for the end.
    group = dist.new_group(list(range(1, ranks)))
    store = control_store()
    everyone: list[Any] = [None] * ranks
    if rank:
        training = Training(rank - 1, group, first=1)
        bubbles = training.schedule.bubbles = Bubbles(MEMORY_BYTES)
        link = Link(store, f"stage{rank - 1}", 1, 1 << 20)
        model = PacedPart(SHAPE, range(SHAPE.layers))
        bubbles.add(
            PrefillWork(model, bubbles, link, max_tokens=MAX_TOKENS, chunk_tokens=CHUNK_TOKENS)
        )
        stop = torch.zeros(1)
        while not stop:
            training.step()
            if rank == 1 and store.check(["stop"]):
                stop += 1
            dist.broadcast(stop, 1, group=group)
        bubbles.close()
        dist.all_gather_object(everyone, bubbles.suspended)
        return
    service = PrefillService(
        store,
        SHAPE,
        torch.float32,
        [[f"stage{i}"] for i in range(RANKS)],
        max_tokens=MAX_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
    )
    while not service.stats.finished:
        service.submit([1], MAX_WAIT_S, TIMEOUT_S)
        time.sleep(0.05)
    rng = random.Random(0)
    for rate in RATES:
        report(_phase(service, rate, phase_s, rng))
    store.set("stop", "1")
    dist.all_gather_object(everyone, {})
    service.close()
    for stage, suspended in enumerate(everyone[1:]):
        for reason in suspended.values():
            print(f"stage {stage}: prefills were suspended: {reason}", flush=True)


def _phase(service: PrefillService, rate: float, phase_s: float, rng: random.Random) -> Row:
    """Sends requests at random moments."""
    futures: list[Future[Prefilled]] = []
    next_s = time.monotonic()
    end_s = next_s + phase_s
    while (next_s := next_s + rng.expovariate(rate)) < end_s:
        time.sleep(max(next_s - time.monotonic(), 0.0))
        tokens = max(1, min(int(190 * math.exp(rng.gauss(0, 0.9))), MAX_TOKENS))
        futures.append(service.submit([7] * tokens, MAX_WAIT_S, TIMEOUT_S))
    results = [each.result() for each in futures if each.exception(TIMEOUT_S + 1) is None]
    row: Row = {"benchmark": "bubbles_load", "rate": rate, "asked": len(futures)}
    row["accepted"] = len(results) / max(len(futures), 1)
    for name in ("ttft_s", "waited_s"):
        values = [getattr(each, name) for each in results] or [math.nan]
        row |= {f"{name}_p50": median(values), f"{name}_p99": quantile(values, 0.99)}
    return row


def lookups(rate: float, requests: int) -> Row:
    """The times to place or reject requests at 1000 ranks, at that many per second."""
    rng = random.Random(1)
    controller = Controller(LARGE_SHAPE, [1] * LOOKUP_RANKS)
    costs = ChunkCosts(0.0, LARGE_CHUNK_S / LARGE_SHAPE.layer_flops(0, 512))
    for pipe in range(LOOKUP_RANKS):
        windows, now_s = [], 0.0
        for _ in range(8):
            now_s += rng.uniform(0.02, 0.06)
            windows.append((now_s, rng.uniform(0.01, 0.08)))
            now_s += windows[-1][1]
        signal = IdleSignal(rng.random(), 1.0, 0.001, costs, tuple(windows))
        controller.signal(pipe, 0, signal, 0.0)
    now_s, accepted, took_s = 0.0, 0, []
    running: list[Reservation] = []
    for request in range(requests):
        now_s += rng.expovariate(rate)
        for each in [each for each in running if each.end_s < now_s]:
            running.remove(each)
            controller.done(each)
        tokens = min(8192, int(rng.lognormvariate(6.5, 1.0)) + 1)
        begin_s = time.perf_counter()
        try:
            running.append(controller.place(request, tokens, now_s, 0.05, now_s + 60.0))
            accepted += 1
        except Rejected:
            pass
        took_s.append(time.perf_counter() - begin_s)
    p50_s, p99_s = quantile(took_s, 0.5), quantile(took_s, 0.99)
    return {
        "benchmark": "bubbles",
        "lookup_ranks": LOOKUP_RANKS,
        "rate": rate,
        "accepted": accepted / requests,
        "lookup_p50_us": p50_s * 1e6,
        "lookup_p99_us": p99_s * 1e6,
        "met": p50_s <= MAX_LOOKUP_S[0] and p99_s <= MAX_LOOKUP_S[1],
    }


def show_load(row: Row) -> None:
    """Prints a line of the second table."""
    print(
        f"{row['rate']:>10g}{row['asked']:>8}{100 * row['accepted']:>9.0f} %"
        + "".join(
            f"{1e3 * row[f'{name}_p50']:>9.0f} /{1e3 * row[f'{name}_p99']:>5.0f} ms"
            for name in ("ttft_s", "waited_s")
        ),
        flush=True,
    )


def show(row: Row) -> list[str]:
    """Prints a line of the first table; returns the limits that it misses."""
    print(
        f"{row['way']:8}{1e3 * row['iteration_s']:>9.1f} ms{row['ratio']:>9.4f}"
        f"{row['ratio_p99']:>9.4f}"
        + (f"{100 * row['filled']:>9.1f} %{100 * row['late']:>8.2f} %" if "filled" in row else ""),
        flush=True,
    )
    missed = []
    for (way, part), limit in MAX_RATIO.items():
        value = row["ratio" if part == 0.5 else "ratio_p99"]
        if way == row["way"] and value > limit:
            missed.append(f"{way}: {value:.4f} > {limit}")
    if row.get("filled", 1.0) < MIN_FILLED:
        missed.append(f"filled {row['filled']:.3f} < {MIN_FILLED}")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints two tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="of all ways (default 20, quick: 3)")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 20)
    run = partial(run_ranks, backend="resilient", realtime=options.realtime)
    rows: list[Row] = []
    missed: list[str] = []
    print(f"{'way':8}{'iteration':>12}{'ratio':>9}{'p99':>9}{'filled':>11}{'late':>10}")
    for row in run(take_turns, RANKS, rounds):
        rows.append(row)
        missed += show(row)
    print(f"\n{'requests/s':>10}{'asked':>8}{'accepted':>11}{'TTFT p50 / p99':>20}{'waits':>18}")
    for row in run(serve_load, RANKS + 1, 3.0 if options.quick else 15.0):
        rows.append(row)
        show_load(row)
    print(f"\n{'requests/s':>10}{'accepted':>11}{'lookup p50':>12}{'p99':>10}")
    for rate in LOOKUP_RATES:
        row = lookups(rate, 500 if options.quick else 10000)
        rows.append(row)
        p50_us, p99_us = row["lookup_p50_us"], row["lookup_p99_us"]
        print(f"{rate:>10g}{row['accepted']:>11.0%}{p50_us:>9.0f} us{p99_us:>7.0f} us")
        if not row["met"]:
            missed.append(f"lookups at {rate:g} requests/s: {p50_us:.0f} and {p99_us:.0f} us")
    write_rows(options.json, rows)
    print("\n".join(f"MISSED {each}" for each in missed) or "all limits kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
