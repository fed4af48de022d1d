"""A slow link between two data-parallel ranks, and what may be done: PIPEMORPH's Figure 19."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Row, add_common_arguments, describe, median, run_ranks, write_rows
from stragglers import PacedStage, loss_of
from torch import nn

from torch_resilient import faults
from torch_resilient.control import Layout, LayoutCosts, propose_layout
from torch_resilient.control.links import measure_delays
from torch_resilient.control.migrate import (
    build_groups,
    capture_state,
    migrate_state,
    restore_state,
)
from torch_resilient.pipelining import PipelineCosts, ScheduleAdaptiveZB, SchedulePlanned, zb_h2

ABOUT = """\
Two replicas of four stages in eight processes, real messages over the resilient backend, a delay
injected on one link in both directions. Operations do little and sleep for the rest of 10 ms. After
each iteration the ranks of a stage sum up their gradients in --buckets buckets, one after another,
each in the two steps of a ring (reduce-scatter, all-gather), and each step waits for the slow link.
The paper says neither how many buckets nor how many microbatches it had: 24 and 10 are assumed.

  healthy      ZB-H2, no delay
  straggler    ZB-H2, the slow link is between the two ranks of the second stage
  pipeline     ZB-H2, two ranks have changed places: now the link is between the second and the
               third stage of one replica, as in FALCON
   +adaptive   there with ScheduleAdaptiveZB: the paper's
  proposed     ZB-H2, in the layout of propose_layout for the delays that the ranks have measured
   +adaptive   there with ScheduleAdaptiveZB

Ranks change places by `migrate`, in the running processes, and change back for the next row.
FALCON's ZB in the paper ran over NCCL, where a send blocks all later operations. Here no send
blocks, so less is left to the adaptation. propose_layout may also leave the slow link unused.

Numbers are ms (times healthy; of it the all-reduce, with waiting for the slowest rank), medians.
All times are multiplied by --scale. Exit status 1 if: a new layout has the slow link in an
all-reduce or is not faster than the straggler; +adaptive is slower than ZB-H2 in the same layout or
the proposed layout slower than the other one by more than the noise (5 %); replicas differ.
"""

PAPER = "paper: straggler 8.04x; pipeline 3.6x faster than that, +adaptive 1.96x faster again"

REPLICAS, STAGES, MICROBATCHES = 2, 4, 10
# Both hold the second stage at first.
SLOW_LINK = (1, STAGES + 1)
IN_PIPELINE = Layout(((0, 1, 5, 3), (4, 2, 6, 7)))
DELAYS_MS = (10.0, 20.0, 30.0)
ORDERS = ("ZB-H2", "adaptive")
METHODS = (
    "healthy",
    "straggler",
    "pipeline",
    "pipeline +adaptive",
    "proposed",
    "proposed +adaptive",
)
# Iterations that the adaptive schedule gets to settle after the delays have changed.
SETTLE = 8
NOISE = 0.05
WIDTH = 192  # 144 KiB of weights: the all-reduce takes a small part of a healthy iteration


class Trainer:
    """One rank's objects in a layout: its stage, two schedules, an optimizer, its groups."""

    def __init__(self, layout: Layout, pace_s: float, buckets: int) -> None:
        self.place = layout.place(dist.get_rank())
        groups = build_groups(layout, backend="resilient")
        assert groups is not None
        self.data = groups.data
        self.buckets = buckets
        torch.manual_seed(self.place.stage)
        self.module = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.schedules = {order: self._schedule(order, groups.pipeline, pace_s) for order in ORDERS}
        self.batch = torch.full((MICROBATCHES, WIDTH), 1.0 + self.place.replica)

    def _schedule(self, order: str, group: dist.ProcessGroup, pace_s: float) -> Any:
        values = torch.zeros(1, WIDTH, requires_grad=True)
        stage = PacedStage(
            self.module,
            self.place.stage,
            STAGES,
            torch.device("cpu"),
            input_args=values if self.place.stage else values.detach(),
            output_args=values,
            group=group,
        )
        stage.pace_s = pace_s
        if order == "adaptive":
            return ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of)
        return SchedulePlanned(stage, MICROBATCHES, loss_of, orders=zb_h2(STAGES, MICROBATCHES))

    def iteration_s(self, order: str) -> tuple[float, float]:
        """Seconds of one iteration and of its all-reduce, of the slowest rank."""
        dist.barrier()
        begin_s = time.monotonic()
        inputs = (self.batch,) if self.place.stage == 0 else ()
        keywords = {"target": self.batch} if self.place.stage == STAGES - 1 else {}
        self.schedules[order].step(*inputs, **keywords)
        computed_s = time.monotonic()
        self._sum_gradients()
        end_s = time.monotonic()
        self.optimizer.step()
        self.optimizer.zero_grad()
        took = torch.tensor([end_s - begin_s, end_s - computed_s], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took[0]), float(took[1])

    def _sum_gradients(self) -> None:
        """Bucket by bucket, each a ring of two messages in turn."""
        (weight,) = self.module.parameters()
        assert weight.grad is not None
        for bucket in weight.grad.view(-1).chunk(self.buckets):
            shards = list(bucket.chunk(REPLICAS))
            mine = torch.empty_like(shards[0])
            dist.reduce_scatter(mine, shards, group=self.data)
            dist.all_gather(shards, mine, group=self.data)

    def replicas_agree(self) -> bool:
        """Whether all ranks of the stage hold the same bits."""
        (weight,) = self.module.parameters()
        least, most = weight.detach().clone(), weight.detach().clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.data)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.data)
        return torch.equal(least, most)


def costs_of(delays_s: list[list[float]], pace_s: float, buckets: int) -> LayoutCosts:
    """Models the buckets as bandwidth: one shard of a bucket is sent after the other."""
    gradient_bytes = WIDTH * WIDTH * 4
    shard_bytes = gradient_bytes / buckets / REPLICAS
    return LayoutCosts(
        PipelineCosts.of(
            STAGES,
            forward_s=pace_s,
            input_backward_s=[0.0] + [pace_s] * (STAGES - 1),
            weight_backward_s=[2 * pace_s] + [pace_s] * (STAGES - 1),
        ),
        MICROBATCHES,
        delays_s,
        [[shard_bytes / max(delay_s, 1e-6) for delay_s in row] for row in delays_s],
        gradient_bytes=gradient_bytes,
    )


@contextlib.contextmanager
def slow_link(rank: int, delay_s: float) -> Any:
    """Delays all messages between the two ranks of SLOW_LINK."""
    with contextlib.ExitStack() as stack:
        if rank in SLOW_LINK:
            peer = SLOW_LINK[1 - SLOW_LINK.index(rank)]
            stack.enter_context(faults.delay(delay_s, peer=peer))
        yield


def times_of(
    trainer: Trainer, orders: Sequence[str], rounds: int
) -> dict[str, tuple[float, float]]:
    """Medians of an iteration and of its all-reduce, for orders that take turns."""
    for order in orders:
        for _ in range(SETTLE if order == "adaptive" else 1):
            trainer.iteration_s(order)
    found: dict[str, list[tuple[float, float]]] = {order: [] for order in orders}
    for _ in range(rounds):
        for order in orders:
            found[order].append(trainer.iteration_s(order))
    return {
        order: (median([whole_s for whole_s, _ in times]), median([part_s for _, part_s in times]))
        for order, times in found.items()
    }


def measure(
    rank: int,
    ranks: int,
    report: Report,
    delays_ms: Sequence[float],
    scale: float,
    rounds: int,
    buckets: int,
) -> None:
    """All delays; rank 0 reports a row for each. The same state moves on and back again."""
    pace_s = 0.01 * scale
    old = Layout.of(REPLICAS, STAGES)
    trainers = {old: Trainer(old, pace_s, buckets)}

    def move(source: Layout, target: Layout) -> float:
        """Moves the state; returns how long that took, without the creation of groups."""
        begin_s = time.monotonic()
        now = trainers[source]
        state = migrate_state(source, target, capture_state(now.module, now.optimizer))
        took_s = time.monotonic() - begin_s
        if target not in trainers:
            trainers[target] = Trainer(target, pace_s, buckets)
        restore_state(state, trainers[target].module, trainers[target].optimizer)
        return took_s

    for delay_ms in delays_ms:
        times = {"healthy": times_of(trainers[old], ORDERS[:1], rounds)["ZB-H2"]}
        with slow_link(rank, delay_ms * scale / 1e3):
            times["straggler"] = times_of(trainers[old], ORDERS[:1], rounds)["ZB-H2"]
            delays_s = measure_delays()
            proposal = propose_layout(old, costs_of(delays_s, pace_s, buckets))
            move(old, IN_PIPELINE)
            there = times_of(trainers[IN_PIPELINE], ORDERS, rounds)
            times |= {"pipeline": there["ZB-H2"], "pipeline +adaptive": there["adaptive"]}
            moved_s = move(IN_PIPELINE, proposal.layout)
            there = times_of(trainers[proposal.layout], ORDERS, rounds)
            times |= {"proposed": there["ZB-H2"], "proposed +adaptive": there["adaptive"]}
        agree = torch.tensor([float(trainers[proposal.layout].replicas_agree())])
        dist.all_reduce(agree, dist.ReduceOp.MIN)
        move(proposal.layout, old)
        row: Row = {
            "benchmark": "dp_straggler",
            "delay_ms": delay_ms,
            "scale": scale,
            "buckets": buckets,
            "microbatches": MICROBATCHES,
            "rounds": rounds,
            "measured_ms": 1e3 * delays_s[SLOW_LINK[0]][SLOW_LINK[1]] / scale,
            "layout": proposal.layout.ranks,
            "moved": len(proposal.moved),
            "predicted": proposal.speedup,
            "moved_s": moved_s,
            "agree": bool(agree),
        }
        for name, (whole_s, all_reduce_s) in times.items():
            row[name] = whole_s / scale
            row[f"{name}, all-reduce"] = all_reduce_s / scale
        report(row)


def show(row: Row) -> list[str]:
    """Prints a row; returns what it misses."""
    cells = [
        f"{1e3 * row[name]:5.0f} ({row[name] / row['healthy']:.2f}x;"
        f"{1e3 * row[f'{name}, all-reduce']:5.0f})"
        for name in METHODS
    ]
    print(f"{row['delay_ms']:5.0f} " + " ".join(cells))
    straggler, pipeline, proposed = row["straggler"], row["pipeline"], row["proposed"]
    adaptive = row["pipeline +adaptive"]
    print(
        f"      pipeline {straggler / pipeline:.2f}x faster than the straggler, +adaptive "
        f"{pipeline / adaptive:.2f}x faster again; proposed {straggler / proposed:.2f}x faster "
        f"(predicted {row['predicted']:.2f}x): {row['moved']} ranks to {row['layout']}, in "
        f"{1e3 * row['moved_s']:.0f} ms",
        flush=True,
    )
    name = f"{row['delay_ms']:g} ms"
    missed = []
    layout = Layout(row["layout"])
    if layout.place(SLOW_LINK[0]).stage == layout.place(SLOW_LINK[1]).stage:
        missed.append(f"{name}: the slow link is in an all-reduce in {layout.to_json()}")
    missed += [
        f"{name}: {each} is not faster than the straggler"
        for each in ("pipeline", "proposed")
        if row[each] >= straggler
    ]
    for slower, faster in (
        ("pipeline +adaptive", "pipeline"),
        ("proposed +adaptive", "proposed"),
        ("proposed", "pipeline"),
        ("proposed +adaptive", "pipeline +adaptive"),
    ):
        if row[slower] > row[faster] * (1 + NOISE):
            missed.append(f"{name}: {slower} is {row[slower] / row[faster]:.3f}x {faster}")
    if not row["agree"]:
        missed.append(f"{name}: replicas differ")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each delay; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--scale", type=float, default=2.0, help="of all times (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="per row (default: 5, quick: 2)")
    parser.add_argument("--buckets", type=int, default=24, help="of gradients (default: 24)")
    options = parser.parse_args(arguments)
    if WIDTH * WIDTH % (options.buckets * REPLICAS):
        parser.error(f"--buckets: {WIDTH * WIDTH} gradients do not make {options.buckets} alike")
    delays_ms = DELAYS_MS[-1:] if options.quick else DELAYS_MS
    rounds = min(options.rounds, 2) if options.quick else options.rounds
    print(f"{options.buckets} buckets, load {describe()['load']:.1f}; {PAPER}")
    names = [name.replace("pipeline +", "+").replace("proposed +", "+") for name in METHODS]
    print("   ms " + " ".join(f"{name:<20}" for name in names))
    rows: list[Row] = []
    missed: list[str] = []
    for row in run_ranks(
        measure,
        REPLICAS * STAGES,
        delays_ms,
        options.scale,
        rounds,
        options.buckets,
        backend="resilient",
        realtime=options.realtime,
    ):
        rows.append(row)
        missed += show(row)
    write_rows(options.json, rows)
    print("\n".join(f"MISSED {each}" for each in missed) or "all limits kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
