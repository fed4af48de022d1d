"""Training between two sites over a long link: iteration times on this backend and on gloo."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import Row, add_common_arguments, median, quantile, write_rows
from lab_job import say, start_job, two_hosts

from torch_resilient.testing import unavailable

ABOUT = """\
Two hosts, one at each site, in a lab of network namespaces (needs root). They train a small GPT
(examples/gpt.py) on real text, iteration by iteration, with real computation on the processor:

  1F1B      a pipeline of two stages with torch's Schedule1F1B, on both backends: what the
            transport alone does
  live      the same pipeline with this package's ScheduleAdaptiveZB on resilient, against
            Schedule1F1B on gloo: transport and schedule together
  DDP       two replicas with DistributedDataParallel, on both backends

In both processes all contenders are alive at the same time, each with its own copy of the model,
and take turns: some iterations of one, then the same iterations of the next. The first iteration
of a turn is not counted, as its connections come out of a rest. An iteration lasts from when the
slower rank has ended the one before, optimizer and all, until it has ended this one. All copies see
the same data; their losses must be equal to the last bit.

  ratio = iteration time on gloo / iteration time on resilient, of iterations in the same round

A row shows the median times, the median ratio, and between which ratios 80 % of the iterations lie.

The setting is that of ATLAS (sections 3, 4.1, 6.2): a link that could carry 5 Gbit/s; one
connection gets 1220 to 293 Mbit/s of it at 10 to 40 ms one way (Table 1), because the system limits
what a connection has in flight; activations of 32 MiB (GPT-A: 4K x 4K, 16 bits), 4 microbatches,
and a computation that takes a third to a quarter of the time that its activations take at 5 Gbit/s.
There, iterations are up to 17 times as fast as those of systems with one connection. Two cores
that compute, send and emulate a link do not come near 5 Gbit/s. So there are two networks:

  usual   the system's usual buffers (tcp_wmem up to 4 MiB), as in wan_connections.py, which give
          one connection the rate in Table 1, and a link of --rate-mbit (default 2000, as much as
          the machine carries). The link is only a few times as fast as one connection, and the
          processor needs longer for an activation (8 MiB) than the link: the ratios are bounded by
          that, not by the backend
  scaled  the paper's testbed at 1:20: a link of 250 Mbit/s, buffers of a twentieth, which give one
          connection a twentieth of Table 1 (iperf3: 13.7 and 31.8 Mbit/s at 40 and 20 ms one
          way; a twentieth of the paper's is 14.7 and 30), activations of 1.6 MiB. The proportions
          of window, link, delay and activation are the paper's; the computation takes a third to a
          half of the time of its activations on the link

Gradients of DDP have 25 MB (usual) and 6 MB (scaled): all-reduce time grows with their size on both
backends alike.

Exit status 1 if losses differ.

Examples:
  wan_training.py --quick                             40 ms; only DDP on the usual network; < 90 s
  wan_training.py --network usual --rtt-ms 40,10 --json out.jsonl
  wan_training.py --network scaled --rtt-ms 80        the paper's 40 ms one way
"""

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# The model of each case; gloo's contender has the same model.
CASES = {"1F1B": "pipeline", "live": "pipeline", "DDP": "DDP"}
MICROBATCHES = 4
# A context of 64 bytes and a width of 64 make most bytes of activation for the least computation:
# 16 KiB a row.
PIPELINE = {"layers": 2, "width": 64, "heads": 4, "context": 64}
ROW_BYTES = 4 * PIPELINE["width"] * PIPELINE["context"]
TIMEOUT = datetime.timedelta(seconds=120)


class Network(NamedTuple):
    """The link and the model of a row."""

    wmem_bytes: int  # of one connection, at most
    rmem_bytes: int
    rate_mbit: float
    rows: int  # of a microbatch
    ddp: dict[str, int]  # shape of the model that DDP trains
    ddp_rows: int
    rtt_ms: tuple[float, ...]  # by default
    quick_rtt_ms: tuple[float, ...]
    quick_cases: tuple[str, ...]

    def sysctl(self) -> dict[str, str]:
        """The kernel settings of both hosts."""
        return {
            "net.ipv4.tcp_wmem": f"4096 16384 {self.wmem_bytes}",
            "net.ipv4.tcp_rmem": f"4096 {min(131072, self.rmem_bytes)} {self.rmem_bytes}",
        }


NETWORKS = {
    "usual": Network(
        wmem_bytes=4194304,
        rmem_bytes=6291456,
        rate_mbit=2000.0,
        rows=512,
        ddp={"layers": 8, "width": 256, "heads": 4, "context": 64},
        ddp_rows=1,
        rtt_ms=(40.0, 10.0),
        quick_rtt_ms=(40.0,),
        # The pipeline takes long here, and is bound by the processor.
        quick_cases=("DDP",),
    ),
    "scaled": Network(
        wmem_bytes=4194304 // 20,
        rmem_bytes=6291456 // 20,
        rate_mbit=250.0,
        rows=102,
        ddp={"layers": 8, "width": 128, "heads": 4, "context": 64},
        ddp_rows=4,
        rtt_ms=(80.0, 40.0, 10.0),
        quick_rtt_ms=(40.0,),
        quick_cases=tuple(CASES),
    ),
}


class Contender(NamedTuple):
    """One copy of the model on one backend; `step(n)` gives the loss where there is one."""

    name: str
    step: Callable[[int], float | None]


def pipeline(name: str, group: Any, schedule: Any, settings: dict[str, Any]) -> Contender:
    """A pipeline of as many stages as there are ranks."""
    import torch
    import torch.distributed as dist
    from gpt import GptShape, GptStage, next_byte_loss
    from text_data import batch, load_text, standard_library
    from torch.distributed.pipelining import PipelineStage

    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), settings["rows"]
    shape = GptShape(**PIPELINE)
    tokens = torch.zeros(rows, shape.context, dtype=torch.int64)
    hidden = torch.zeros(rows, shape.context, shape.width, requires_grad=True)
    logits = torch.zeros(rows, shape.context, 256, requires_grad=True)
    module = GptStage(shape, rank, ranks, seed=0)
    stage = PipelineStage(
        module,
        rank,
        ranks,
        torch.device("cpu"),
        input_args=tokens if rank == 0 else hidden,
        output_args=logits if rank == ranks - 1 else hidden,
        group=group,
    )
    runner = schedule(stage, MICROBATCHES, loss_fn=next_byte_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    text = load_text(standard_library())

    def step(number: int) -> float | None:
        inputs, targets = batch(text, 0, number, rows * MICROBATCHES, shape.context)
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(inputs, return_outputs=False)
        else:
            runner.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else None

    return Contender(name, step)


def replica(name: str, group: Any, settings: dict[str, Any]) -> Contender:
    """A replica of the whole model on each rank."""
    import torch
    import torch.distributed as dist
    from gpt import GptShape, GptStage, next_byte_loss
    from text_data import batch, load_text, standard_library
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = GptShape(**settings["ddp"])
    model = DistributedDataParallel(GptStage(shape, stage=0, stages=1, seed=0), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = load_text(standard_library())

    def step(number: int) -> float | None:
        inputs, targets = batch(text, 0, number, settings["ddp_rows"] * ranks, shape.context)
        loss = next_byte_loss(model(inputs[rank::ranks]), targets[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Contender(name, step)


def worker(settings: dict[str, Any]) -> None:
    """One rank: all cases, one after the other; a row of times and losses for each round."""
    if settings["realtime"]:  # before any thread exists: they inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    from torch_resilient.pipelining import ScheduleAdaptiveZB

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    gloo = dist.group.WORLD
    resilient = dist.new_group(backend="resilient", timeout=TIMEOUT)
    control = dist.new_group(backend="gloo")
    make: dict[str, dict[str, Callable[[], Contender]]] = {
        "pipeline": {
            "gloo": lambda: pipeline("gloo", gloo, Schedule1F1B, settings),
            "1F1B": lambda: pipeline("1F1B", resilient, Schedule1F1B, settings),
            "live": lambda: pipeline("live", resilient, ScheduleAdaptiveZB, settings),
        },
        "DDP": {
            "gloo": lambda: replica("gloo", gloo, settings),
            "DDP": lambda: replica("DDP", resilient, settings),
        },
    }
    for kind, names in settings["contenders"].items():
        contenders = [make[kind][name]() for name in names]
        first = 0
        for round_number, turn in enumerate(settings["turns"]):
            order = contenders[round_number % len(contenders) :]
            order += contenders[: round_number % len(contenders)]
            for contender in order:
                dist.barrier(group=control)
                ends: list[float] = []
                losses: list[str | None] = []
                for number in range(first, first + turn):
                    loss = contender.step(number)
                    ends.append(time.monotonic())  # the hosts share one clock
                    losses.append(None if loss is None else loss.hex())
                say(
                    "turn",
                    model=kind,
                    contender=contender.name,
                    round=round_number,
                    ends=ends,
                    losses=losses,
                )
            first += turn
    dist.barrier(group=control)
    dist.destroy_process_group()


class Turns:
    """The reports of the ranks, by case, contender and round."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._said: dict[tuple[str, str, int], dict[int, Row]] = {}

    def add(self, row: Row) -> None:
        """One rank's turn."""
        self._said.setdefault((row["model"], row["contender"], row["round"]), {})[row["rank"]] = row

    def times_s(self, model: str, contender: str, round_number: int) -> list[float]:
        """Iteration times of a turn: between the ends of the slower rank."""
        rows = self._said[model, contender, round_number].values()
        ends = [max(each) for each in zip(*(row["ends"] for row in rows), strict=True)]
        return [end - before for before, end in itertools.pairwise(ends)]

    def losses(self, model: str, contender: str, rounds: int) -> list[list[str | None]]:
        """The losses of all rounds, by rank."""
        return [
            [x for n in range(rounds) for x in self._said[model, contender, n][rank]["losses"]]
            for rank in range(self.ranks)
        ]


def row_of(turns: Turns, case: str, rounds: int) -> Row:
    """One row of the table."""
    model = CASES[case]
    times: dict[str, list[float]] = {}
    for name, contender in (("gloo", "gloo"), ("resilient", case)):
        times[name] = [x for n in range(1, rounds) for x in turns.times_s(model, contender, n)]
    ratios = [a / b for a, b in zip(times["gloo"], times["resilient"], strict=True)]
    losses = turns.losses(model, case, rounds)
    if None in losses[-1]:
        raise RuntimeError(f"{case}: the last rank has no loss of some iteration: {losses[-1]}")
    return {
        "benchmark": "wan_training",
        "case": case,
        "gloo_s": median(times["gloo"]),
        "resilient_s": median(times["resilient"]),
        "ratio": median(ratios),
        "ratio_p10": quantile(ratios, 0.1),
        "ratio_p90": quantile(ratios, 0.9),
        "equal": turns.losses(model, "gloo", rounds) == losses,
        "samples_s": times,
    }


def measure(
    name: str,
    network: Network,
    rtt_ms: float,
    options: argparse.Namespace,
    show: Callable[[Row], None],
) -> None:
    """All cases over one link; `show` gets each row as soon as it is there."""
    link = {"delay_s": rtt_ms / 2e3, "rate_bytes_per_s": network.rate_mbit * 1e6 / 8}
    cases = options.cases or (network.quick_cases if options.quick else tuple(CASES))
    contenders: dict[str, list[str]] = {}
    for case in cases:
        contenders.setdefault(CASES[case], ["gloo"]).append(case)
    arguments: Mapping[str, Any] = {
        "contenders": contenders,
        "realtime": options.realtime,
        "rows": network.rows,
        "ddp": network.ddp,
        "ddp_rows": network.ddp_rows,
        # The first is warm-up: connections are still being opened, plans made.
        "turns": [1 if options.quick else options.turn, *[options.turn] * options.rounds],
    }
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    with (
        two_hosts([link], sysctl=network.sysctl()) as (_, hosts, _, control),
        start_job(__file__, hosts, control, arguments, environment=environment) as job,
    ):
        turns = Turns(len(hosts))
        for names in contenders.values():
            for _ in range(len(names) * (options.rounds + 1) * len(hosts)):
                turns.add(job.row("turn", timeout_s=120))
            for case in names[1:]:
                show(
                    {
                        **row_of(turns, case, options.rounds + 1),
                        "network": name,
                        "rtt_ms": rtt_ms,
                        "rate_mbit": network.rate_mbit,
                        "activation_bytes": network.rows * ROW_BYTES,
                    }
                )
        if any(statuses := job.wait(30)) or None in statuses:
            raise RuntimeError(f"the ranks ended with {statuses}")


HEAD = (
    f"{'network':<8}{'link Mbit/s':>11}{'rtt ms':>8}  {'case':<6}{'gloo s':>9}{'resilient s':>12}"
    f"{'ratio':>7}  {'p10 - p90':<14}losses"
)


def line(row: Row) -> str:
    """One line of the table."""
    spread = f"{row['ratio_p10']:.2f} - {row['ratio_p90']:.2f}"
    if len(row["samples_s"]["gloo"]) == 1:
        spread = "one pair"
    return (
        f"{row['network']:<8}{row['rate_mbit']:>11.0f}{row['rtt_ms']:>8g}  {row['case']:<6}"
        f"{row['gloo_s']:>9.3f}{row['resilient_s']:>12.3f}{row['ratio']:>7.2f}  {spread:<14}"
        f"{'equal' if row['equal'] else 'DIFFERENT'}"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=tuple(NETWORKS), help="only this one")
    parser.add_argument(
        "--rtt-ms", help="round trips, e.g. 40,10 (default: 40,10 usual; 80,40,10 scaled)"
    )
    parser.add_argument("--rate-mbit", type=float, help="of the link (default 2000 and 250)")
    parser.add_argument("--cases", help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--rounds", type=int, help="counted turns of each (default 5, quick 1)")
    parser.add_argument("--turn", type=int, help="iterations of a turn (default 3, quick 2)")
    add_common_arguments(parser)
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(f"the lab is not available: {reason}")
    options.cases = options.cases and list(dict.fromkeys(options.cases.split(",")))
    if unknown := set(options.cases or ()) - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))}: expected some of {', '.join(CASES)}")
    try:
        options.rtt_ms = options.rtt_ms and [float(text) for text in options.rtt_ms.split(",")]
    except ValueError:
        parser.error(f"--rtt-ms: {options.rtt_ms!r}: expected milliseconds, such as 40,10")
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.turn = (2 if options.quick else 3) if options.turn is None else options.turn
    if options.turn < 2:
        parser.error("--turn: the first iteration is not counted, so at least 2")
    return options


def main() -> int:
    """Prints the table; returns the exit status."""
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[sys.argv.index("--worker") + 1]))
        return 0
    options = parse_arguments()
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)

    print(HEAD, flush=True)
    for name, network in NETWORKS.items():
        if options.network in (None, name):
            if options.rate_mbit:
                network = network._replace(rate_mbit=options.rate_mbit)
            default = network.quick_rtt_ms if options.quick else network.rtt_ms
            for rtt_ms in options.rtt_ms or default:
                measure(name, network, rtt_ms, options, show)
    write_rows(options.json, rows)
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
