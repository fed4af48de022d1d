"""This backend against gloo, operation by operation, on the loopback of this machine."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import (
    Report,
    Row,
    add_common_arguments,
    format_size,
    median,
    parse_size,
    quantile,
    run_ranks,
    write_rows,
)

ABOUT = """\
How it measures. In each process both backends are alive at the same time, with the same buffers,
and take turns: gloo, resilient, then resilient, gloo, and so on. A disturbance of the machine thus
affects both, and each pair of neighbours gives one ratio of times.

  ratio = time of gloo / time of resilient      above 1: resilient is faster

A row shows the median time of one operation for each, the median ratio, and between which ratios
80 % of the pairs lie. One sample is a batch of back-to-back operations, long enough to be timed
well, and counts the time of the slowest rank. Before a row is timed, the results of both backends
are checked.

  CPU     what all ranks together, with all their threads, have used of the processor (user and
          system) in the same batches, median. Below 64 KiB in us for each operation; from there in
          seconds for each GB (10^9 bytes) that the ranks together have to send at least: size for
          each pair's send, (ranks - 1) x size for a collective, twice that for all_reduce. Threads
          of the other backend are idle meanwhile, and counted. JSON has both units

Other work on the cores changes ratios, not only times: it has made single rows of gloo 30 times as
slow (and as costly), and those of resilient twice. For the record: an idle machine, or --realtime.
With more ranks than cores both are wrong in their own way: without --realtime the kernel takes
turns at its leisure (gloo: 1 ms for 8 bytes), with it no rank is ever interrupted.

Exit status 1 if a limit is missed: 3 times as fast in the median row, 1.2 times in every row, 5
times in the median of those of up to 1 KiB and the barrier. --quick does not judge, nor does a run
of a few rows beyond the second limit.

Sizes. For send and recv, all_reduce and broadcast: of the tensor. For all_gather (output),
reduce_scatter (input) and all_to_all: of the whole tensor; each rank has its share, at least 4
bytes.

  (list)         at the end of a row: gloo lacks the form with one tensor, and got lists

  p2p_latency    ping-pong between neighbours (0-1, 2-3), half of the round trip
  p2p_bandwidth  time for each message of a window of isends that one small answer ends
  broadcast      each time from the next rank, because one root could run ahead

Examples:
  compare_gloo.py --quick                                  all operations, coarse, < 60 s
  compare_gloo.py --ops all_reduce --sizes 8,64K --ranks 4   only these
  compare_gloo.py --realtime --budget-s 10 --json out.jsonl  for the record
"""

# torch renames some calls; their old names work in all the versions that are supported.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

BACKENDS = ("gloo", "resilient")
SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "8,4K,64K,1M,16M"

# A batch lasts at least this long: a hundred times the cost of reading the clock and leaving
# the barrier before it. Shorter: noise; longer: fewer pairs.
BATCH_S = 0.003
# Waiting for a descriptor of each operation costs memory; a batch is never longer than this.
BATCH_MAX = 128
# One window of p2p_bandwidth sends this much, enough to keep a connection busy.
WINDOW_BYTES = 64 * 1024**2
WINDOW_MAX = 32
# Rows that would need more are left out; an operation holds up to 5 copies (input, output, and
# what the backends hold: gloo copies the input, this one up to 256 MiB of sends).
MEMORY_BYTES = 6 * 1024**3
COPIES = 5

# From here on the bytes cost more than the operation.
CPU_BY_BYTES = 64 * 1024

# The limits: ratios.
MEDIAN_MIN = 3.0
ROW_MIN = 1.2
SMALL_MIN = 5.0  # the median of rows up to SMALL_BYTES
SMALL_BYTES = 1024
# The median of fewer rows is not meaningful.
ROWS_MIN = 40

Run = Callable[[dist.ProcessGroup, int], None]


class Case(NamedTuple):
    """One row's operation, bound to its buffers."""

    forms: dict[str, Run]  # ways to call it, by name; the first that a backend has is used
    fill: Callable[[], None]  # sets the inputs
    right: Callable[[], bool]  # whether the result of one run is right
    tensors: list[torch.Tensor]
    parts: int = 1  # what one run counts for


def _repeat(once: Callable[[dist.ProcessGroup, int], object]) -> Run:
    def run(group: dist.ProcessGroup, times: int) -> None:
        for i in range(times):
            once(group, i)

    return run


def _p2p(op: str, rank: int, size: int) -> Case:
    count = max(1, size // 4)
    data, out = torch.empty(count), torch.empty(count)
    answer = torch.zeros(1)
    peer = rank ^ 1
    window = max(1, min(WINDOW_MAX, WINDOW_BYTES // (4 * count)))

    def ping_pong(group: dist.ProcessGroup, _: int) -> None:
        if rank < peer:
            dist.send(data, peer, group)
            dist.recv(out, peer, group)
        else:
            dist.recv(out, peer, group)
            dist.send(data, peer, group)

    def stream(group: dist.ProcessGroup, _: int) -> None:
        if rank < peer:
            works = [dist.isend(data, peer, group) for _ in range(window)]
            dist.recv(answer, peer, group)
            for work in works:
                assert work is not None
                work.wait()
        else:
            for _ in range(window):
                dist.recv(out, peer, group)
            dist.send(answer, peer, group)

    def fill() -> None:
        data.fill_(rank + 1.0)
        out.fill_(0.0)

    latency = op == "p2p_latency"
    return Case(
        {"send, recv": _repeat(ping_pong)} if latency else {"isend, recv": _repeat(stream)},
        fill,
        lambda: (not latency and rank < peer) or bool((out == peer + 1.0).all()),
        [data, out],
        2 if latency else window,
    )


def build(op: str, rank: int, ranks: int, size: int) -> Case:
    """The case for operation `op` with about `size` bytes (see ABOUT)."""
    if op.startswith("p2p"):
        return _p2p(op, rank, size)
    if op == "barrier":
        forms = {"barrier": _repeat(lambda group, _: dist.barrier(group=group))}
        return Case(forms, lambda: None, lambda: True, [])
    total = ranks * (ranks + 1) / 2.0
    if op in ("all_reduce", "broadcast"):
        data = torch.empty(max(1, size // 4))
        calls: dict[str, Callable[[dist.ProcessGroup, int], object]] = {
            "all_reduce": lambda group, _: dist.all_reduce(data, group=group),
            "broadcast": lambda group, i: dist.broadcast(data, i % ranks, group=group),
        }
        expected = total if op == "all_reduce" else 1.0
        return Case(
            {op: _repeat(calls[op])},
            lambda: void(data.fill_(rank + 1.0)),
            lambda: bool((data == expected).all()),
            [data],
        )
    part = max(1, size // 4 // ranks)
    whole, other, own = torch.empty(ranks * part), torch.empty(ranks * part), torch.empty(part)
    shares = list(whole.chunk(ranks))
    by_rank = torch.arange(1.0, ranks + 1).repeat_interleave(part)
    if op == "all_gather":
        return Case(
            {
                "all_gather_into_tensor": _repeat(
                    lambda group, _: dist.all_gather_into_tensor(whole, own, group)
                ),
                "all_gather (list)": _repeat(lambda group, _: dist.all_gather(shares, own, group)),
            },
            lambda: void(own.fill_(rank + 1.0)),
            lambda: torch.equal(whole, by_rank),
            [whole, own],
        )
    if op == "reduce_scatter":
        return Case(
            {
                "reduce_scatter_tensor": _repeat(
                    lambda group, _: dist.reduce_scatter_tensor(own, whole, group=group)
                ),
                "reduce_scatter (list)": _repeat(
                    lambda group, _: dist.reduce_scatter(own, shares, group=group)
                ),
            },
            lambda: void(whole.fill_(rank + 1.0)),
            lambda: bool((own == total).all()),
            [whole, own],
        )
    assert op == "all_to_all", op
    return Case(
        {op: _repeat(lambda group, _: dist.all_to_all_single(other, whole, group=group))},
        lambda: void(whole.fill_(rank + 1.0)),
        lambda: torch.equal(other, by_rank),
        [whole, other],
    )


def void(_: object) -> None:
    """Makes an expression a statement."""


# In the order of the table; barrier has no size.
OPS = (
    "p2p_latency",
    "p2p_bandwidth",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
)


def moved_bytes(op: str, ranks: int, size: int) -> int:
    """The minimum that all ranks together send in one operation."""
    if op.startswith("p2p"):
        return ranks // 2 * size
    return (ranks - 1) * size * (2 if op == "all_reduce" else 1)


class Bench:
    """The measurements of one rank. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, ranks: int, budget_s: float) -> None:
        self.rank, self.ranks, self.budget_s = rank, ranks, budget_s
        resilient = dist.new_group(backend="resilient")
        assert dist.group.WORLD is not None
        self.groups = {"gloo": dist.group.WORLD, "resilient": resilient}
        # Agreements use a separate group, which both backends share.
        self.control = dist.new_group(backend="gloo")

    def _all_ranks(self, value: bool) -> bool:
        answer = torch.tensor([int(value)])
        dist.all_reduce(answer, dist.ReduceOp.MIN, self.control)
        return bool(answer.item())

    def _form(self, case: Case, backend: str) -> tuple[str, Run]:
        """The first form that the backend has and that gives the right result."""
        errors = []
        for name, run in case.forms.items():
            case.fill()
            try:
                run(self.groups[backend], 1)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                errors.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            if not self._all_ranks(case.right()):
                raise RuntimeError(f"{backend}, {name}, {self.ranks} ranks: wrong result")
            return name, run
        raise NotImplementedError(f"{backend} cannot: {'; '.join(errors)}")

    def _sample(self, run: Run, backend: str, times: int) -> tuple[float, float]:
        """Seconds, and seconds of the processor in all threads, for each of `times` runs."""
        dist.barrier(group=self.control)
        start, used = time.perf_counter(), time.process_time()
        run(self.groups[backend], times)
        end, used = time.perf_counter(), time.process_time() - used
        return (end - start) / times, used / times

    def row(self, op: str, size: int) -> Row:
        """Measures one row; `samples_us` and so on are there on all ranks, unless `error` is."""
        case = build(op, self.rank, self.ranks, size)
        row: Row = {"benchmark": "compare_gloo", "op": op, "ranks": self.ranks, "bytes": size}
        try:
            forms = {backend: self._form(case, backend) for backend in BACKENDS}
        except NotImplementedError as error:
            return {**row, "error": str(error)}
        for tensor in case.tensors:
            tensor.zero_()  # keeps sums finite
        runs = {backend: form[1] for backend, form in forms.items()}

        pilot = [min(self._sample(runs[b], b, 1)[0] for _ in range(3)) for b in BACKENDS]
        times = max(1, min(BATCH_MAX, round(BATCH_S / min(pilot))))
        rounds = max(3, min(1000, round(self.budget_s / (times * sum(pilot)))))
        plan = torch.tensor([times, rounds])
        dist.broadcast(plan, 0, self.control)
        times, rounds = int(plan[0]), int(plan[1])

        samples: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for i in range(rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                backend = BACKENDS[which]
                seconds, used = self._sample(runs[backend], backend, times)
                samples[which].append(seconds)
                cpu[which].append(used)
        worst = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, self.control)
        gloo_us, resilient_us = (worst * (1e6 / case.parts)).tolist()
        total = torch.tensor(cpu, dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM, self.control)
        gloo_cpu_us, resilient_cpu_us = (
            median(each) for each in (total * (1e6 / case.parts)).tolist()
        )
        ratios = [g / r for g, r in zip(gloo_us, resilient_us, strict=True)]
        if moved := moved_bytes(op, self.ranks, size):
            row["gloo_cpu_s_per_gb"] = gloo_cpu_us * 1e3 / moved
            row["resilient_cpu_s_per_gb"] = resilient_cpu_us * 1e3 / moved
        return {
            **row,
            "via": {backend: form[0] for backend, form in forms.items()},
            "batch": times,
            "gloo_us": median(gloo_us),
            "resilient_us": median(resilient_us),
            "ratio": median(ratios),
            "ratio_p10": quantile(ratios, 0.1),
            "ratio_p90": quantile(ratios, 0.9),
            "moved_bytes": moved,
            "gloo_cpu_us": gloo_cpu_us,
            "resilient_cpu_us": resilient_cpu_us,
            "samples_us": {"gloo": gloo_us, "resilient": resilient_us},
        }


def measure(
    rank: int,
    ranks: int,
    report: Report,
    ops: Sequence[str],
    sizes: Sequence[int],
    budget_s: float,
) -> None:
    """Runs all rows of one number of ranks; rank 0 reports them."""
    bench = Bench(rank, ranks, budget_s)
    for op in ops:
        for size in sizes if op != "barrier" else [0]:
            if ranks * size * COPIES <= MEMORY_BYTES:
                report(bench.row(op, size))


HEAD = (
    f"{'op':<14} {'ranks':>5} {'size':>8} {'gloo us':>10} {'resil. us':>10} {'ratio':>6}  "
    f"{'p10 - p90':<13} {'CPU gloo':>8} {'resil.':>7}"
)


def show(row: Row) -> str:
    """One line of the table."""
    place = f"{row['op']:<14} {row['ranks']:>5} {format_size(row['bytes']):>8}"
    if "error" in row:
        return f"{place}  {row['error']}"
    note = "" if row["ratio"] >= 1.0 else "  <"
    if row["via"]["gloo"] != row["via"]["resilient"]:
        note += f"  {row['via']['gloo'].rpartition(' ')[2]}"
    spread = f"{row['ratio_p10']:.2f} - {row['ratio_p90']:.2f}"
    times = f"{row['gloo_us']:>10.1f} {row['resilient_us']:>10.1f} {row['ratio']:>6.2f}"
    if row["bytes"] >= CPU_BY_BYTES:
        cpu = f"{row['gloo_cpu_s_per_gb']:>8.2f} {row['resilient_cpu_s_per_gb']:>7.2f} s/GB"
    else:
        cpu = f"{row['gloo_cpu_us']:>8.0f} {row['resilient_cpu_us']:>7.0f} us  "
    return f"{place} {times}  {spread:<13} {cpu}{note}".rstrip()


def summary(rows: Sequence[Row]) -> str:
    """Worst row, median row, and how many are below 1.0."""
    timed = sorted((row for row in rows if "ratio" in row), key=lambda row: float(row["ratio"]))
    if not timed:
        return "no rows"
    below = sum(row["ratio"] < 1.0 for row in timed)
    surely = sum(row["ratio_p90"] < 1.0 for row in timed)
    return (
        f"worst  {show(timed[0])}\nmedian {show(timed[len(timed) // 2])}\n"
        f"{below} of {len(timed)} rows below 1.0, {surely} of them in nine of ten pairs"
    )


def missed(rows: Sequence[Row]) -> list[str]:
    """The limits that these rows miss, in words."""
    timed = [row for row in rows if "ratio" in row]
    texts = [
        f"{row['op']}, {row['ranks']} ranks, {format_size(row['bytes'])}: {row['ratio']:.2f}"
        for row in timed
        if row["ratio"] < ROW_MIN
    ]
    if len(timed) >= ROWS_MIN:
        small = [row["ratio"] for row in timed if row["bytes"] <= SMALL_BYTES]
        for name, ratios, least in (
            ("median row", [row["ratio"] for row in timed], MEDIAN_MIN),
            ("median of the small rows", small, SMALL_MIN),
        ):
            if ratios and median(ratios) < least:
                texts.append(f"{name}: {median(ratios):.2f}")
    return texts + [f"{row['op']}: {row['error']}" for row in rows if "error" in row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument("--sizes", help=f"bytes, with K or M (default {SIZES})")
    parser.add_argument(
        "--ranks", help="numbers of processes, all even (default 2,4)", default="2,4"
    )
    parser.add_argument("--budget-s", type=float, help="seconds for each row (default 3)")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    ops = options.ops.split(",")
    if unknown := set(ops) - set(OPS):
        parser.error(f"--ops: {', '.join(sorted(unknown))}: expected some of {', '.join(OPS)}")
    try:
        sizes = [
            parse_size(text)
            for text in (options.sizes or (QUICK_SIZES if options.quick else SIZES)).split(",")
        ]
        all_ranks = [int(text) for text in options.ranks.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if any(ranks < 2 or ranks % 2 for ranks in all_ranks):
        parser.error("--ranks: send and recv go between pairs, so the numbers must be even")
    budget_s = options.budget_s or (0.2 if options.quick else 3.0)

    rows: list[Row] = []
    print(HEAD, flush=True)
    for ranks in all_ranks:
        for row in run_ranks(measure, ranks, ops, sizes, budget_s, realtime=options.realtime):
            print(show(row), flush=True)
            rows.append(row)
    write_rows(options.json, rows)
    print(f"\n{summary(rows)}")
    if options.quick:
        return 0
    texts = missed(rows)
    print("\n" + ("\n".join(["missed:", *texts]) if texts else "all limits kept"))
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
