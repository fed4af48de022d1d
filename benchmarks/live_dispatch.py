"""Deciding within the iteration against hindsight, in the exact model: PIPEMORPH's Figure 18."""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from common import Row, add_common_arguments, describe, write_rows

from torch_resilient.pipelining import (
    Gates,
    PipelineCosts,
    adapted_warmup,
    gates_for,
    plan_schedule,
)
from torch_resilient.planning.dispatch import (
    Expectation,
    Patience,
    Progress,
    choose,
    predicted_orders,
    worth_holding,
)
from torch_resilient.planning.generator import Limits
from torch_resilient.planning.orders import FORWARD, INPUT_BACKWARD, KINDS, Kinds
from torch_resilient.planning.planner import limits_of

ABOUT = """\
The delay of each link is drawn from N(30, 10) ms, at least 0, and drawn anew at intervals from
U(50, 100) ms (trace A), U(100, 200) ms (B) or U(200, 400) ms (C); F, B and W take 10 to 30 ms
each. A link has one delay at a time, for both directions, as the paper's text has it; with --apart
each direction has its own. Changes come at whole ms. A message takes the delay of the moment it is
sent and never overtakes the one before it. No processes run: the model is exact, and a seed gives
the same numbers anywhere.

  gates_for     live dispatch, dispatch.choose, under the gates of dispatch.gates_for for 30 ms,
                and with what is expected at 30 ms
  open          the same without gates but those of memory
  at F-B        the same with the warm-up itself as the gate between F and B
  at F-W        and also between F and W
  re-planned    the plan ("portfolio") for the delays at the beginning of the iteration: the paper's
  fixed         the plan for 30 ms

Numbers are % above hindsight: the best order found for the very trace. It is looked for among the
orders of all policies, those of live dispatch with other gates that waits for messages which it
knows to be near, and by a local search from the best of these. Less than the optimum it cannot be,
so the true distances are a little larger: three times as many moves add 0.1 to 0.2 % in the mean.
`last quarter` is by how much the last quarter of the moves still made hindsight shorter.

--quick takes two small shapes and few moves; --realtime changes nothing, since nothing is timed.
Exit status 1 if gates_for is above 2 % without a limit of memory or above 7 % with one, in the mean
of any row.
"""

MEAN_MS, DEVIATION_MS = 30.0, 10.0
# Least and most time between two changes.
TRACES_MS = {"A": (50.0, 100.0), "B": (100.0, 200.0), "C": (200.0, 400.0)}
# Stages, microbatches, milliseconds of each F, B and W.
SHAPES = ((4, 12, 10), (4, 12, 30), (8, 16, 15), (8, 32, 15))
# The most microbatches between F and W, in stages.
MEMORY = {"none": None, "2S": 2.0, "1.5S": 1.5}
POLICIES = ("gates_for", "open", "at F-B", "at F-W", "re-planned", "fixed")
# The most that gates_for may be above hindsight, in % of the mean.
MAX_FREE, MAX_LIMITED = 2.0, 7.0
# The iteration begins when the traces have forgotten that they all began at once.
START_MS = 2000
# Longer than any iteration here could be, with one microbatch after the other.
TRACE_MS = START_MS + 60_000
# The initial orders of the local search: factors of the warm-up and of the room, shares of W.
WARMUP_FACTORS = (0.0, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
ROOM_FACTORS = (1.0, 1.5, 3.0)
WEIGHT_SHARES = (0.0, 0.5, 1.0)
# The number of positions by which a move shifts an operation.
DISTANCES = (1, 1, 2, 3, 5, 8, 13)
# The local search's other aim, small against the iteration time: all stages ending early.
ENDS_SHARE = 1e-3


def trace_ms(name: str, rng: random.Random) -> list[float]:
    """The delay of a link in each millisecond."""
    delays: list[float] = []
    while len(delays) < TRACE_MS:
        delay = max(rng.gauss(MEAN_MS, DEVIATION_MS), 0.0)
        delays += [delay] * round(rng.uniform(*TRACES_MS[name]))
    return delays


@dataclass(frozen=True)
class Problem:
    """One iteration over one trace.

    Attributes:
        stages, count: of stages and of microbatches.
        operation_ms: of each F, B and W.
        forward_ms, backward_ms: by link, the delay of what is sent in each millisecond.
        limits: of memory.
    """

    stages: int
    count: int
    operation_ms: int
    forward_ms: Sequence[Sequence[float]]
    backward_ms: Sequence[Sequence[float]]
    limits: Limits

    def costs(self, at_ms: int | None = None) -> PipelineCosts:
        """The costs with the delays of one moment, or with the mean if `at_ms` is None."""

        def delays(links: Sequence[Sequence[float]]) -> list[float]:
            return [(MEAN_MS if at_ms is None else link[at_ms]) / 1e3 for link in links]

        return PipelineCosts.of(
            self.stages,
            forward_s=self.operation_ms / 1e3,
            input_backward_s=self.operation_ms / 1e3,
            weight_backward_s=self.operation_ms / 1e3,
            delay_forward_s=delays(self.forward_ms),
            delay_backward_s=delays(self.backward_ms),
        )

    def arrival_ms(self, kind: int, stage: int, end_ms: float, before_ms: float) -> float:
        """When the message that F or B on `stage` sends arrives, not earlier than `before_ms`."""
        link = self.forward_ms[stage] if kind == FORWARD else self.backward_ms[stage - 1]
        return max(end_ms + link[int(end_ms)], before_ms)


def live(
    problem: Problem,
    gates: Gates,
    weight_share: float = 0.0,
    expected: Sequence[str] | None = None,
    patience: Sequence[Patience] | None = None,
) -> list[Kinds]:
    """Simulates stages that choose as live dispatch does; returns one order per stage.

    `expected` holds the orders of a plan: an operation that is not due by them is held back for a
    moment, with the `patience` of the iterations so far. `weight_share` uses knowledge that no real
    stage has: W waits unless this share of it fits before the next message that is on its way.
    """
    stages, count = problem.stages, problem.count
    progress = [Progress(count) for _ in range(stages)]
    stage_gates = [gates.of_stage(stage) for stage in range(stages)]
    arrived: list[list[list[float]]] = [[[], []] for _ in range(stages)]  # inputs and gradients
    arrived[0][0] = [START_MS] * count
    free_ms = [float(START_MS)] * stages
    orders = [bytearray() for _ in range(stages)]
    expectations = [Expectation(order) for order in expected or [""] * stages]
    patience = patience or [Patience() for _ in range(stages)]
    held_after, held_until_ms = [-1] * stages, [0.0] * stages
    awaited: list[tuple[str, int] | None] = [None] * stages  # what something is held back for
    events: list[tuple[float, int]] = [(START_MS, 0)]
    while events:
        now_ms, stage = heappop(events)
        mine, (inputs, gradients) = progress[stage], arrived[stage]
        if free_ms[stage] > now_ms or mine.finished:
            continue  # it looks again when its operation ends
        never = float("inf")
        input_ms = inputs[mine.forwards] if mine.forwards < len(inputs) else never
        gradient_ms = gradients[mine.backwards] if mine.backwards < len(gradients) else never
        chosen = choose(mine, stage_gates[stage], input_ms <= now_ms, gradient_ms <= now_ms)
        if chosen is None:
            continue
        if chosen == "W" and weight_share:
            if not mine.forward_allowed(stage_gates[stage]):
                input_ms = never
            if min(input_ms, gradient_ms) - now_ms < weight_share * problem.operation_ms:
                continue  # it looks again when that arrives
        expects = expectations[stage].next_kind(mine)
        here = input_ms <= now_ms, gradient_ms <= now_ms
        if chosen != expects and worth_holding(mine, stage_gates[stage], expects, *here):
            done = mine.forwards + mine.backwards + mine.weights
            if held_after[stage] != done:
                held_after[stage] = done
                message = awaited[stage] = expects, mine.next_of(expects)
                share = patience[stage].share(*message)
                held_until_ms[stage] = now_ms + share * problem.operation_ms
                heappush(events, (held_until_ms[stage], stage))
            if now_ms < held_until_ms[stage]:
                continue  # it looks again then, or when something arrives
        if (message := awaited[stage]) is not None:
            patience[stage].on_held(*message, came=chosen == message[0])
            awaited[stage] = None
        mine.count(chosen)
        kind = KINDS.index(chosen)
        orders[stage].append(kind)
        end_ms = now_ms + problem.operation_ms
        free_ms[stage] = end_ms
        heappush(events, (end_ms, stage))
        if kind == FORWARD and stage == stages - 1:
            gradients.append(end_ms)
        elif kind == FORWARD or (kind == INPUT_BACKWARD and stage):
            other = stage + 1 if kind == FORWARD else stage - 1
            row = arrived[other][kind]
            row.append(problem.arrival_ms(kind, stage, end_ms, row[-1] if row else 0.0))
            heappush(events, (max(row[-1], free_ms[other]), other))
    assert all(each.finished for each in progress)
    return [bytes(order) for order in orders]


class Times:
    """When each operation of given orders runs, and the same for orders that differ a little."""

    def __init__(self, problem: Problem, orders: Sequence[Kinds]) -> None:
        self.problem = problem
        self.orders = list(orders)
        stages = problem.stages
        self.starts_ms: list[list[float]] = [[] for _ in range(stages)]
        # Arrivals of inputs and of gradients, by stage.
        self.arrivals_ms: list[list[list[float]]] = [[[], []] for _ in range(stages)]
        self.arrivals_ms[0][0] = [START_MS] * problem.count
        complete = self._run(float("inf"))
        assert complete, "the orders wait for each other"

    @property
    def iteration_ms(self) -> float:
        return max(self._ends_ms()) - START_MS

    @property
    def objective_ms(self) -> float:
        """The objective of the local search."""
        ends_ms = self._ends_ms()
        return max(ends_ms) - START_MS + ENDS_SHARE * sum(ends_ms) / len(ends_ms)

    def key(self) -> tuple[float, float]:
        """Less is better."""
        return self.iteration_ms, self.objective_ms

    def _ends_ms(self) -> list[float]:
        return [starts[-1] + self.problem.operation_ms for starts in self.starts_ms]

    def changed(self, stage: int, position: int, order: Kinds) -> Times | None:
        """With another order of `stage` from `position` on; None if it is longer, or deadlocks.

        Operations that start before the first changed one keep their times.
        """
        since_ms = self.starts_ms[stage][position]
        other = Times.__new__(Times)
        other.problem = self.problem
        other.orders = [*self.orders]
        other.orders[stage] = order
        other.starts_ms = [
            starts[: bisect_left(starts, since_ms)] if each != stage else starts[:position]
            for each, starts in enumerate(self.starts_ms)
        ]
        stages = self.problem.stages
        other.arrivals_ms = [[[], []] for _ in range(stages)]
        other.arrivals_ms[0][0] = self.arrivals_ms[0][0]
        for each, starts in enumerate(other.starts_ms):
            kept = self.orders[each]
            forwards = kept.count(FORWARD, 0, len(starts))
            backwards = kept.count(INPUT_BACKWARD, 0, len(starts))
            if each < stages - 1:
                other.arrivals_ms[each + 1][0] = self.arrivals_ms[each + 1][0][:forwards]
            else:
                other.arrivals_ms[each][1] = self.arrivals_ms[each][1][:forwards]
            if each:
                other.arrivals_ms[each - 1][1] = self.arrivals_ms[each - 1][1][:backwards]
        return other if other._run(self.iteration_ms + START_MS) else None

    def _run(self, latest_ms: float) -> bool:
        """Goes on from what is known; False once an end after `latest_ms` is certain."""
        problem = self.problem
        stages, operation_ms = problem.stages, problem.operation_ms
        length = 3 * problem.count
        forward_ms, backward_ms = problem.forward_ms, problem.backward_ms
        left = sum(length - len(starts) for starts in self.starts_ms)
        waiting = list(range(stages))  # stages that may be able to continue
        while waiting:
            stage = waiting.pop()
            order, starts = self.orders[stage], self.starts_ms[stage]
            inputs, gradients = self.arrivals_ms[stage]
            position = len(starts)
            forwards = order.count(FORWARD, 0, position)
            backwards = order.count(INPUT_BACKWARD, 0, position)
            free_ms = starts[-1] + operation_ms if starts else START_MS
            below = self.arrivals_ms[stage + 1][0] if stage < stages - 1 else None
            above = self.arrivals_ms[stage - 1][1] if stage else None
            sent_below = sent_above = False
            for kind in order[position:]:
                if kind == FORWARD:
                    if forwards == len(inputs):
                        break
                    start_ms = max(free_ms, inputs[forwards])
                    forwards += 1
                    free_ms = start_ms + operation_ms
                    if below is None:
                        gradients.append(free_ms)
                    else:
                        arrival_ms = free_ms + forward_ms[stage][int(free_ms)]
                        below.append(max(arrival_ms, below[-1]) if below else arrival_ms)
                        sent_below = True
                elif kind == INPUT_BACKWARD:
                    if backwards == len(gradients):
                        break
                    start_ms = max(free_ms, gradients[backwards])
                    backwards += 1
                    free_ms = start_ms + operation_ms
                    if above is not None:
                        arrival_ms = free_ms + backward_ms[stage - 1][int(free_ms)]
                        above.append(max(arrival_ms, above[-1]) if above else arrival_ms)
                        sent_above = True
                else:
                    start_ms = free_ms
                    free_ms += operation_ms
                starts.append(start_ms)
                left -= 1
            if free_ms + (length - len(starts)) * operation_ms > latest_ms + 1e-9:
                return False
            if sent_below:
                waiting.append(stage + 1)
            if sent_above:
                waiting.append(stage - 1)
        return left == 0


def search(times: Times, moves: int, rng: random.Random) -> Times:
    """The best found by moving single operations within their stages, within the limits."""
    problem = times.problem
    length = 3 * problem.count
    objective_ms = times.objective_ms
    for _ in range(moves):
        stage, here = rng.randrange(problem.stages), rng.randrange(length)
        there = here + rng.choice(DISTANCES) * rng.choice((-1, 1))
        if not 0 <= there < length:
            continue
        order = bytearray(times.orders[stage])
        order.insert(there, order.pop(here))
        first = next((i for i in range(length) if order[i] != times.orders[stage][i]), None)
        if first is None or not problem.limits.allow_stage(stage, order):
            continue
        other = times.changed(stage, first, bytes(order))
        if other is not None and other.objective_ms <= objective_ms:
            times, objective_ms = other, other.objective_ms
    return times


def scaled(warmup: Sequence[int], factor: float, count: int) -> list[int]:
    return [min(count, round(factor * each)) for each in warmup]


def within(limits: Limits, warmup: Sequence[int], held: Sequence[int] | None = None) -> Gates:
    """Gates with this warm-up that keep to the limits, and hold no more than `held` if given."""
    activations = [
        min(each) for each in zip(limits.activations, held or limits.activations, strict=True)
    ]
    return Gates(tuple(warmup), tuple(activations), limits.pending)


@cache
def planned(costs: PipelineCosts, count: int, limits: Limits) -> list[Kinds]:
    plan = plan_schedule(costs, count, limits.activations, limits.pending, policy="portfolio")
    return [bytes(KINDS.index(each.kind) for each in order) for order in plan.orders]


def policies(problem: Problem) -> dict[str, list[Kinds]]:
    """The orders that each of them comes to."""
    limits, count = problem.limits, problem.count
    mean = problem.costs()
    gates = gates_for(mean, count, limits)
    warmup = adapted_warmup(mean, count)
    pending = tuple(min(each) for each in zip(warmup, limits.pending, strict=True))
    expected = predicted_orders(mean, count, gates)
    patience = [Patience() for _ in range(problem.stages)]
    for _ in range(2):  # it is what the iterations before have left
        live(problem, gates, expected=expected, patience=patience)
    return {
        "gates_for": live(problem, gates, expected=expected, patience=patience),
        "open": live(problem, within(limits, warmup)),
        "at F-B": live(problem, within(limits, warmup, warmup)),
        "at F-W": live(problem, within(Limits(limits.activations, pending), warmup, warmup)),
        "re-planned": planned(problem.costs(START_MS), count, limits),
        "fixed": planned(mean, count, limits),
    }


def hindsight_ms(
    problem: Problem, known: Sequence[Sequence[Kinds]], moves: int, rng: random.Random
) -> tuple[float, float]:
    """The shortest iteration found, and how long it was after three quarters of the moves."""
    starts = list(known)
    warmup = adapted_warmup(problem.costs(), problem.count)
    for warmup_factor in WARMUP_FACTORS:
        quotas = scaled(warmup, warmup_factor, problem.count)
        for room_factor in ROOM_FACTORS:
            held = scaled(warmup, max(warmup_factor, 1.0) * room_factor, problem.count)
            gates = within(problem.limits, quotas, held)
            starts += [live(problem, gates, share) for share in WEIGHT_SHARES]
    distinct = {tuple(orders): Times(problem, orders) for orders in starts}
    first = sorted(distinct.values(), key=Times.key)[:3]
    # A quarter of the moves determines the best start, which gets the rest.
    tried = [search(times, moves // 12, rng) for times in first]
    best = min(tried, key=Times.key)
    best = search(best, moves // 2, rng)
    before_ms = best.iteration_ms
    best = search(best, moves // 4, rng)
    return best.iteration_ms, before_ms


def problems(
    trace: str, memory: str, shapes: Sequence[tuple[int, int, int]], seeds: int, apart: bool
) -> Iterator[tuple[int, Problem]]:
    """(seed, problem); the traces do not depend on the limit of memory."""
    share = MEMORY[memory]
    for stages, count, operation_ms in shapes:
        limit = None if share is None else min(count, round(share * stages))
        limits = limits_of(stages, count, None, limit)
        for seed in range(seeds):
            links = range(stages - 1)
            forward_ms = [trace_ms(trace, random.Random(f"{seed} {link}")) for link in links]
            backward_ms = (
                [trace_ms(trace, random.Random(f"{seed} {link} back")) for link in links]
                if apart
                else forward_ms
            )
            yield seed, Problem(stages, count, operation_ms, forward_ms, backward_ms, limits)


def measure(
    trace: str, memory: str, shapes: Sequence[tuple[int, int, int]], options: argparse.Namespace
) -> list[Row]:
    """A row for each shape and seed."""
    rows = []
    for seed, problem in problems(trace, memory, shapes, options.seeds, options.apart):
        orders = policies(problem)
        rng = random.Random(seed)
        best_ms, before_ms = hindsight_ms(problem, list(orders.values()), options.moves, rng)
        row: Row = {
            "benchmark": "live_dispatch",
            "trace": trace,
            "memory": memory,
            "shape": [problem.stages, problem.count, problem.operation_ms],
            "seed": seed,
            "apart": options.apart,
            "moves": options.moves,
            "hindsight_ms": best_ms,
            "last_quarter": before_ms / best_ms - 1,
        }
        for policy, its_orders in orders.items():
            row[policy] = Times(problem, its_orders).iteration_ms
        rows.append(row)
    return rows


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def show(trace: str, memory: str, rows: Sequence[Row]) -> float:
    """Prints a line; returns by how much, in %, gates_for is above hindsight in the mean."""
    cells = []
    gaps = {}
    for policy in POLICIES:
        gaps[policy] = [100 * (row[policy] / row["hindsight_ms"] - 1) for row in rows]
        cells.append(f"{mean(gaps[policy]):6.1f} /{max(gaps[policy]):5.1f}")
    last = 100 * mean([row["last_quarter"] for row in rows])
    print(f"{trace:6}{memory:8}" + " ".join(cells) + f"{last:10.2f}", flush=True)
    return mean(gaps["gates_for"])


def show_gates(rows: Sequence[Row]) -> None:
    """Prints the cost of gates where memory is not limited: means per shape and trace."""
    groups: dict[tuple[str, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        if row["memory"] == "none":
            groups.setdefault((row["trace"], tuple(row["shape"])), []).append(row)
    print("\n% above live dispatch without gates and without a limit; means per trace and shape:")
    for policy in ("gates_for", "at F-B", "at F-W"):
        found = [
            mean([100 * (row[policy] / row["open"] - 1) for row in group])
            for group in groups.values()
        ]
        print(f"{policy:12}{min(found):6.1f} to {max(found):.1f}, mean {mean(found):.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--seeds", type=int, help="of traces (default 6, quick: 3)")
    parser.add_argument(
        "--moves", type=int, help="of the local search (default 10000, quick: 1500)"
    )
    parser.add_argument("--apart", action="store_true", help="each direction has its own delay")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or (3 if options.quick else 6)
    options.moves = options.moves or (1500 if options.quick else 10_000)
    shapes = SHAPES[:2] if options.quick else SHAPES
    begin_s = time.monotonic()
    print(
        f"seeds 0 to {options.seeds - 1} of each of {len(shapes)} shapes, {options.moves} moves "
        f"for hindsight; load {describe()['load']:.1f}"
    )
    print("% above hindsight, mean / worst")
    print(
        f"{'trace':6}{'memory':8}" + " ".join(f"{each:>13}" for each in POLICIES) + "  last quarter"
    )
    rows: list[Row] = []
    missed: list[str] = []
    for trace in TRACES_MS:
        for memory, limit in MEMORY.items():
            found = measure(trace, memory, shapes, options)
            rows += found
            above = show(trace, memory, found)
            most = MAX_FREE if limit is None else MAX_LIMITED
            if above > most:
                missed.append(f"trace {trace}, memory {memory}: gates_for {above:.1f} % > {most} %")
    show_gates(rows)
    write_rows(options.json, rows)
    print(f"\n{time.monotonic() - begin_s:.0f} s")
    print("\n".join(f"MISSED {each}" for each in missed) or "all limits kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
