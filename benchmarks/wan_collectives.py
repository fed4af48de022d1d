"""Collectives between two sites: hierarchical against flat against gloo, over an emulated WAN."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

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

from torch_resilient import _native, faults, stats
from torch_resilient._groups import find_backend

ABOUT = """\
Two sites, each with half of the ranks. In each process all contenders are alive at the same time
and take turns, with the same buffers:

  gloo   torch's own backend
  flat   this backend with collective_algorithm=flat: as if all ranks were on one host
  hier   this backend as it is, with TORCH_RESILIENT_SITE set on each rank

One sample is --repeat operations back to back, and counts the slowest rank. A row shows the median
time of one operation of each, and how many times as long gloo and flat take as hier: medians over
the rounds, with the range of 80 % of them.

The network is one of
  lab     network namespaces joined by an emulated link with delay and rate (needs the right to
          make them): what all contenders send goes over it, and is counted. `cut` is what hier
          sends over the link in the busier direction, without IP and TCP headers, in multiples
          of the least that this operation can do with.
  faults  loopback; this backend delays what it sends to the other site. Nothing else is emulated,
          and gloo, which cannot be delayed so, is left out.

Exit status 1 if a limit is missed, in the lab: of 1 MiB and more, all_reduce, reduce_scatter and
all_gather send at most 1.02 times the least over the link (wire_cut: as the link counted it); and
all_reduce of 64 MiB at 40 ms is 3 times as fast as gloo. --quick judges the first only.

Examples:
  wan_collectives.py --quick
  wan_collectives.py --network lab --rtt-ms 40 --rate-mbit 1000 --ops all_reduce --sizes 64M
"""

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
SIZES = "8,64K,1M,16M,64M"
QUICK_SIZES = "8,1M,16M"

# The limits. Below, headers and control messages count for more than 2 %.
CUT_FROM_BYTES = 1 << 20
CUT_OPS = ("all_reduce", "reduce_scatter", "all_gather")
CUT_MAX = 1.02
RATIO_OF = ("all_reduce", 64 << 20, 40.0)  # operation, bytes, round trip in ms
RATIO_MIN = 3.0
SITES = 2
TIMEOUT = timedelta(seconds=120)
# IP and TCP with time stamps, of each packet.
HEADER_BYTES = 20 + 32
# The operations that are counted: the first ones find their connections idle.
COUNTED = 3

Call = Callable[[dist.ProcessGroup], object]


def min_bytes(op: str, size: int) -> float:
    """The minimum that crosses between two equal sites, in the busier direction."""
    return size / 2 if op in ("reduce_scatter", "all_gather") else size


class Case(NamedTuple):
    """One row's operation, bound to its buffers."""

    call: Call
    input: torch.Tensor
    right: Callable[[], bool]  # whether the result is right if the input was full of ones


def build(op: str, rank: int, ranks: int, size: int) -> Case:
    """The case for operation `op` with `size` bytes."""
    data = torch.zeros(max(1, size // 4))
    part = torch.zeros(max(1, size // 4 // ranks))
    whole = torch.zeros(part.numel() * ranks)
    return {
        "all_reduce": Case(
            lambda group: dist.all_reduce(data, group=group),
            data,
            lambda: bool((data == ranks).all()),
        ),
        "broadcast": Case(
            lambda group: dist.broadcast(data, 0, group=group),
            data,
            lambda: bool((data == 1).all()),
        ),
        "reduce": Case(
            lambda group: dist.reduce(data, 0, group=group),
            data,
            lambda: rank != 0 or bool((data == ranks).all()),
        ),
        "all_gather": Case(
            lambda group: dist.all_gather_into_tensor(whole, part, group=group),
            part,
            lambda: bool((whole == 1).all()),
        ),
        "reduce_scatter": Case(
            lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
            whole,
            lambda: bool((part == ranks).all()),
        ),
        "barrier": Case(lambda group: dist.barrier(group=group), data, lambda: True),
    }[op]


class Bench:
    """One rank; all call the same methods in the same order. The default group is gloo's."""

    def __init__(self, rank: int, ranks: int, options: argparse.Namespace) -> None:
        self.rank, self.ranks, self.options = rank, ranks, options
        assert dist.group.WORLD is not None
        self.control = dist.new_group(backend="gloo")
        sites = [f"site{r * SITES // ranks}" for r in range(ranks)]
        self.groups: dict[str, dist.ProcessGroup] = {}
        if options.network == "lab":
            self.groups["gloo"] = dist.group.WORLD
        for name, algorithm in (("flat", "flat"), ("hier", "auto")):
            group = dist.new_group(backend="resilient")
            _native.load().set_topology(find_backend(group), sites, algorithm)
            self.groups[name] = group
        if options.network == "faults":
            for peer in range(ranks):
                if sites[peer] != sites[rank]:
                    faults.delay(options.rtt_ms / 2e3, peer=peer)

    def _worst(self, value: float) -> float:
        answer = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(answer, dist.ReduceOp.MAX, self.control)
        return float(answer)

    def _sample(self, call: Call, name: str) -> float:
        dist.barrier(group=self.control)
        start = time.perf_counter()
        for _ in range(self.options.repeat):
            call(self.groups[name])
        return self._worst((time.perf_counter() - start) / self.options.repeat)

    def row(self, op: str, size: int, count: Callable[[str], None]) -> Row:
        case = build(op, self.rank, self.ranks, size)
        call = case.call
        names = [n for n in self.groups if not (n == "gloo" and op == "reduce_scatter")]
        pilot = 0.0
        for name in names:
            case.input.fill_(1.0)
            call(self.groups[name])
            if self._worst(not case.right()):
                raise RuntimeError(f"{name}: {op} of {size} bytes gives a wrong result")
            case.input.zero_()  # keeps sums as they are
            pilot += self._sample(call, name) * self.options.repeat
        rounds = max(3, min(100, round(self.options.budget_s / pilot)))
        samples: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds):
            for k in range(len(names)):
                name = names[(i + k) % len(names)]
                samples[name].append(self._sample(call, name))
        row: Row = {
            "benchmark": "wan_collectives",
            "network": self.options.network,
            "rtt_ms": self.options.rtt_ms,
            "rate_mbit": self.options.rate_mbit if self.options.network == "lab" else None,
            "op": op,
            "ranks": self.ranks,
            "bytes": size,
            "samples_s": samples,
        }
        for name in names:
            row[f"{name}_ms"] = 1e3 * median(samples[name])
            if name != "hier":
                ratios = [a / b for a, b in zip(samples[name], samples["hier"], strict=True)]
                row[f"{name}_ratio"] = median(ratios)
                row[f"{name}_p10_p90"] = [quantile(ratios, 0.1), quantile(ratios, 0.9)]
        if op != "barrier":
            dist.barrier(group=self.control)
            before = self._crossed()
            count("before")
            dist.barrier(group=self.control)
            for _ in range(COUNTED):
                call(self.groups["hier"])
            dist.barrier(group=self.control)
            count("after")
            # The engine's own count, of all ranks of the busier site.
            sent = torch.tensor([0.0, 0.0], dtype=torch.float64)
            sent[self.rank * SITES // self.ranks] = self._crossed() - before
            dist.all_reduce(sent, group=self.control)
            row["cut"] = float(sent.max()) / COUNTED / min_bytes(op, size)
        return row

    def _crossed(self) -> int:
        """Bytes that this rank's connections have carried to the other site."""
        home = self.rank * SITES // self.ranks
        return sum(
            path.bytes_sent
            for peer in stats(self.groups["hier"]).peers
            if peer.rank * SITES // self.ranks != home
            for path in peer.paths
        )


def measure(
    rank: int,
    ranks: int,
    report: Report,
    options: argparse.Namespace,
    count: Callable[[str], None] = lambda _: None,
) -> None:
    """Runs all rows; rank 0 reports them."""
    bench = Bench(rank, ranks, options)
    for op in options.ops:
        for size in options.sizes if op != "barrier" else [0]:
            report(bench.row(op, size, count))


# ---- the lab ------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """A rank in the lab: rows and questions for counters go to standard output, as JSON."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(thing: object) -> None:
        print(json.dumps(thing), flush=True)

    def count(when: str) -> None:
        if rank == 0:
            say({"count": when})
            sys.stdin.readline()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        measure(rank, ranks, say if rank == 0 else lambda row: None, options, count)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_in_lab(options: argparse.Namespace, arguments: Sequence[str]) -> Iterator[Row]:
    """Yields the rows, with what the link itself has counted."""
    from torch_resilient.testing import NetworkLab  # type: ignore[import-not-found, unused-ignore]

    with NetworkLab(seed=1) as lab, contextlib.ExitStack() as stack:
        hosts = [lab.host("a"), lab.host("b")]
        wan = lab.link(
            *hosts, delay_s=options.rtt_ms / 2e3, rate_bytes_per_s=options.rate_mbit * 1e6 / 8
        )
        control = lab.link(*hosts, name="control")
        ranks = options.ranks
        processes: list[Any] = []
        for rank in range(ranks):
            host = hosts[rank * SITES // ranks]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": control.address(hosts[0]),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": wan.device(host),
                "TORCH_RESILIENT_INTERFACE": wan.device(host),
                "TORCH_RESILIENT_SITE": f"site{rank * SITES // ranks}",
            }
            pipes: dict[str, Any] = (
                {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                if rank == 0
                else {"stdin": subprocess.DEVNULL}
            )
            command = [sys.executable, __file__, "--worker", *arguments]
            processes.append(stack.enter_context(host.popen(command, env=environment, **pipes)))
            stack.callback(processes[-1].kill)
        counted: dict[str, dict[str, Any]] = {}
        for line in processes[0].stdout:
            said = json.loads(line)
            if "count" in said:
                counted[said["count"]] = {d: wan.counters(d) for d in ("a->b", "b->a")}
                processes[0].stdin.write("\n")
                processes[0].stdin.flush()
                continue
            if counted:
                said["wire_cut"] = max(
                    (after.delivered.bytes - before.delivered.bytes)
                    - HEADER_BYTES * (after.delivered.packets - before.delivered.packets)
                    for before, after in zip(
                        counted["before"].values(), counted["after"].values(), strict=True
                    )
                ) / (COUNTED * min_bytes(said["op"], said["bytes"]))
                counted.clear()
            yield said
        for rank, process in enumerate(processes):
            if process.wait(30) != 0:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}; see above")


HEAD = f"{'op':<14} {'size':>8} {'gloo ms':>9} {'flat ms':>9} {'hier ms':>9}  ratios, cut"


def show(row: Row) -> str:
    """One line of the table."""
    times = " ".join(
        f"{row[f'{name}_ms']:>9.1f}" if f"{name}_ms" in row else f"{'-':>9}"
        for name in ("gloo", "flat", "hier")
    )
    notes = [
        f"{name} x{row[f'{name}_ratio']:.2f} ({low:.2f} - {high:.2f})"
        for name in ("gloo", "flat")
        if f"{name}_ratio" in row
        for low, high in [row[f"{name}_p10_p90"]]
    ]
    notes += [f"{key} {row[key]:.3f}" for key in ("cut", "wire_cut") if key in row]
    return f"{row['op']:<14} {format_size(row['bytes']):>8} {times}  {', '.join(notes)}"


def missed(row: Row, options: argparse.Namespace) -> str | None:
    """The limit that this row of the lab misses, in words."""
    name = f"{row['op']}, {format_size(row['bytes'])}"
    if row["op"] in CUT_OPS and row["bytes"] >= CUT_FROM_BYTES and row["wire_cut"] > CUT_MAX:
        return f"{name}: {row['wire_cut']:.3f} of the least"
    judged = (row["op"], row["bytes"], options.rtt_ms) == RATIO_OF and not options.quick
    if judged and row["gloo_ratio"] < RATIO_MIN:
        return f"{name}: gloo takes {row['gloo_ratio']:.2f} times as long"
    return None


def choose_network(asked: str) -> str:
    """lab if it can be had, unless something else was asked for."""
    if asked != "auto":
        return asked
    try:
        from torch_resilient.testing import unavailable
    except ImportError:
        return "faults"
    return "faults" if unavailable() else "lab"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=("auto", "lab", "faults"), default="auto")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument("--sizes", help=f"bytes, with K or M (default {SIZES})")
    parser.add_argument("--ranks", type=int, default=4, help="processes, even (default 4)")
    parser.add_argument("--rtt-ms", type=float, default=40.0, help="round trip (default 40)")
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="lab only (default 1000)")
    parser.add_argument("--repeat", type=int, default=3, help="operations per sample (default 3)")
    parser.add_argument("--budget-s", type=float, help="seconds for each row (default 15)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_common_arguments(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    options.ops = options.ops.split(",")
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"--ops: {', '.join(sorted(unknown))}: expected some of {', '.join(OPS)}")
    if options.ranks < 4 or options.ranks % SITES:
        parser.error("--ranks: two sites of two ranks or more")
    try:
        text = options.sizes or (QUICK_SIZES if options.quick else SIZES)
        options.sizes = [parse_size(size) for size in text.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    options.budget_s = options.budget_s or (2.0 if options.quick else 15.0)
    options.network = choose_network(options.network)
    if options.worker:
        work(options)
        return 0

    rate = f", {options.rate_mbit:g} Mbit/s" if options.network == "lab" else ""
    print(
        f"{options.network}: {options.ranks} ranks, round trip {options.rtt_ms:g} ms{rate}\n{HEAD}"
    )
    found = (
        run_in_lab(options, [*given, "--network", "lab"])
        if options.network == "lab"
        else run_ranks(measure, options.ranks, options, realtime=options.realtime)
    )
    texts = []
    rows: list[Row] = []
    for row in found:
        print(show(row), flush=True)
        rows.append(row)
        if options.network == "lab" and (text := missed(row, options)):
            texts.append(text)
    write_rows(options.json, rows)
    if options.network == "lab":
        print("\n" + ("\n".join(["missed:", *texts]) if texts else "all limits kept"))
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
