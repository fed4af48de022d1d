"""Completion times of flows over a lossy link: SMART, the schemes it compares, and TCP."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import (
    Row,
    add_common_arguments,
    format_size,
    median,
    parse_size,
    quantile,
    write_rows,
)
from lab_job import say, start_job, two_hosts

from torch_resilient.testing import LabJob, Network, unavailable

if TYPE_CHECKING:
    from torch_resilient import GroupStats

ABOUT = """\
Two hosts in a lab of network namespaces (needs root), with one link of 1 Gbit/s and 20 ms one way
that loses packets, at random or in bursts. Rank 0 sends messages to rank 1, one after the other,
and a flow's completion time is from the send to the end of the receive. (Paper: SMART §4.1,
Figures 3 and 4, where the link has 400 Gbit/s and 0.4 ms: there, as here, a message takes less than
a round trip on the wire.) All contenders are connected all the while and take turns of some flows.

  repeat     datagrams, wan_recovery=selective_repeat: dropped packets are retransmitted
  uniform    datagrams with XOR (100, 10) for everything: LoWAR's parity
  exact      datagrams with Reed-Solomon by measured drops (the default of TORCH_RESILIENT_WAN=udp),
             every byte delivered
  smart      the same, and what SMART tolerates: PP, up to 1 % of an activation's packets are zero;
             DP, the small packets of a gradient, up to a tenth of them
  cubic, bbr connections with this congestion control, BBR where the kernel has it

PP are activations, DP gradients: float32 where 3 % of the packets hold nearly all of the energy.
100 KiB to 4 MiB are the messages of a model of 3 billion parameters: activations of 25 to 1024
tokens of 2048 values in 16 bits, and a bucket of 25 MiB cut into shards for 8 to 256 ranks.

Mean and 99th percentile are in ms; `spent` is bytes on the wire per byte of the message, headers,
parity and repeats included (0: not known). In brackets, the reduction of the 99th percentile by
`smart` against that contender. The paper: up to 89.9 % (PP) and 91.7 % (DP) against repeat, 78.8 %
and 73.0 % against uniform.

  fairness   a stream of datagrams and one TCP connection (iperf3, CUBIC and BBR) share a link of
             100 Mbit/s: the share of each, in units of half the link

Exit status 1 if `exact` or `smart` take more than 1.2 times the lossless time of `repeat` in the
99th percentile, for 1 MiB at up to 2 % dropped (`exact` at random drops only), or if either flow of
the fairness part has less than 0.5 or more than 2 times the fair share.
"""

RATE_BYTES_PER_S = 125e6
ONE_WAY_S = 0.02
PIECE_ELEMENTS = 344  # of a packet of 1376 bytes
LIMIT = 1.2
TIMEOUT = datetime.timedelta(seconds=120)


class Scheme(NamedTuple):
    """A contender: its environment, and what its messages tolerate."""

    environment: dict[str, str]
    tolerant: bool = False


SCHEMES = {
    "repeat": Scheme({"WAN": "udp", "WAN_RECOVERY": "selective_repeat"}),
    "uniform": Scheme({"WAN": "udp", "WAN_RECOVERY": "uniform_fec:100:10", "WAN_PARITY": "xor"}),
    "exact": Scheme({"WAN": "udp"}),
    "smart": Scheme({"WAN": "udp"}, tolerant=True),
    "cubic": Scheme({"WAN": "tcp", "WAN_CONGESTION_CONTROL": "cubic"}),
    "bbr": Scheme({"WAN": "tcp", "WAN_CONGESTION_CONTROL": "bbr"}),
}


# --- a rank


def flows(turn: dict[str, Any]) -> None:
    """Sends or receives `count` messages; reports when each began or ended."""
    import torch
    import torch.distributed as dist

    import torch_resilient
    from torch_resilient.smart import tolerate

    elements = turn["bytes"] // 4
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(elements, generator=generator) * 0.01
    important = torch.arange(elements) // PIECE_ELEMENTS % 37 == 5
    data[important] *= 100
    threshold = 0.1
    times = []
    answer = torch.zeros(1)
    before = wire_bytes(torch_resilient.stats())
    for _ in range(turn["count"]):
        if dist.get_rank() == 0:
            with contextlib.ExitStack() as stack:
                if turn["tolerant"]:
                    pp = turn["traffic"] == "PP"
                    stack.enter_context(tolerate(0.0 if pp else threshold, 0.01 if pp else 0.1))
                stack.enter_context(
                    torch_resilient.traffic_class(
                        "activation" if turn["traffic"] == "PP" else "gradient"
                    )
                )
                times.append(time.monotonic())
                work = dist.isend(data, 1)
            work.wait()
            dist.recv(answer, 1)
        else:
            received = torch.empty_like(data)
            dist.recv(received, 0)
            times.append(time.monotonic())
            wrong = received != data
            # Missing data is zero, and only where that was tolerated.
            if bool(wrong.any()) and not (turn["tolerant"] and bool((received[wrong] == 0).all())):
                raise AssertionError("a message was not what had been sent")
            dist.send(answer, 0)
    spent = wire_bytes(torch_resilient.stats()) - before
    say("flows", times=times, spent=spent / turn["bytes"] / turn["count"])


def wire_bytes(stats: GroupStats) -> int:
    """Sent in datagrams."""
    return sum(path.datagrams.bytes for path in stats.peers[0].paths if path.datagrams)


def stream(turn: dict[str, Any]) -> None:
    """Sends at full rate for some seconds; reports the goodput of the second half."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(1 << 18)
    stop = torch.zeros(1)
    begun = time.monotonic()
    arrived = []
    ahead: list[Any] = []
    while True:
        stop[0] = time.monotonic() - begun > turn["seconds"]
        if dist.get_rank() == 0:
            ahead += [dist.isend(stop.clone(), 1), dist.isend(data, 1)]
            while len(ahead) > 16:
                ahead.pop(0).wait()
        else:
            dist.recv(stop, 0)
            dist.recv(data, 0)
            arrived.append(time.monotonic())
        if bool(stop):
            break
    for work in ahead:
        work.wait()
    half = begun + turn["seconds"] / 2
    count = sum(1 for t in arrived if half <= t < begun + turn["seconds"])
    say("streamed", bytes_per_s=count * data.nbytes / (turn["seconds"] / 2))


def worker(settings: dict[str, Any]) -> None:
    """Takes turns until it receives the command to end."""
    import torch.distributed as dist

    dist.init_process_group("resilient", timeout=TIMEOUT)
    dist.barrier()
    say("ready")
    for line in sys.stdin:
        turn = json.loads(line)
        if turn["do"] == "end":
            break
        dist.barrier()
        {"flows": flows, "stream": stream}[turn["do"]](turn)
    dist.barrier()
    dist.destroy_process_group()


# --- the parent


@contextlib.contextmanager
def contenders(
    names: Sequence[str], hosts: Sequence[Any], control: Network
) -> Iterator[dict[str, LabJob]]:
    """A job for each, ready."""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for i, name in enumerate(names):
            environment = {
                f"TORCH_RESILIENT_{key}": value for key, value in SCHEMES[name].environment.items()
            }
            environment["TORCH_RESILIENT_INTERFACE"] = "eth0"
            jobs[name] = stack.enter_context(
                start_job(__file__, hosts, control, {}, environment=environment, port=29400 + i)
            )
        for job in jobs.values():
            for _ in range(2):
                job.row("ready")
        yield jobs


def take_turn(job: LabJob, turn: dict[str, Any]) -> tuple[list[float], float]:
    """The flows of one turn: seconds each, and bytes spent per byte."""
    job.tell(json.dumps(turn))
    rows = sorted((job.row("flows", 600) for _ in range(2)), key=lambda row: row["rank"])
    times = [end - begin for begin, end in zip(rows[0]["times"], rows[1]["times"], strict=True)]
    return times, rows[0]["spent"]


def main() -> int:
    """Runs the cells that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--sizes", default="", metavar="LIST", help="default 100K,256K,1M,4M; quick 1M"
    )
    parser.add_argument(
        "--drop", default="", metavar="LIST", help="in percent; default 0,0.1,0.5,1,2,5; quick 0,2"
    )
    parser.add_argument("--bursts", default="1,6", metavar="LIST", help="mean lengths, in packets")
    parser.add_argument("--traffic", default="PP,DP", metavar="LIST")
    parser.add_argument("--flows", type=int, default=0, help="per cell; default 100, quick 30")
    parser.add_argument("--schemes", default=",".join(SCHEMES), metavar="LIST", help="with smart")
    parser.add_argument("--only", choices=("fct", "fairness"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(json.loads(arguments.worker))
        return 0
    if reason := unavailable():
        parser.error(reason)
    quick = arguments.quick
    sizes = [
        parse_size(s)
        for s in (arguments.sizes or ("1M" if quick else "100K,256K,1M,4M")).split(",")
    ]
    drop_rates = [
        float(x) for x in (arguments.drop or ("0,2" if quick else "0,0.1,0.5,1,2,5")).split(",")
    ]
    bursts = [float(x) for x in ("1" if quick else arguments.bursts).split(",")]
    count = arguments.flows or (30 if quick else 100)
    names = arguments.schemes.split(",")
    if unknown := set(names) - set(SCHEMES):
        parser.error(f"--schemes: unknown: {', '.join(sorted(unknown))}")
    if "smart" not in names:
        parser.error("--schemes: the others are compared with smart: name it, too")
    if arguments.only != "fct" and shutil.which("iperf3") is None:
        parser.error("the fairness part needs iperf3; --only fct goes without")
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    kernel = available.read_text().split()
    names = [name for name in names if name != "bbr" or "bbr" in kernel]
    rows: list[Row] = []
    missed: list[str] = []
    if arguments.only != "fairness":
        missed += completion(
            names,
            sizes,
            drop_rates,
            bursts,
            arguments.traffic.split(","),
            count,
            arguments.seed,
            rows,
        )
    if arguments.only != "fct":
        for algorithm in ("cubic", "bbr"):
            if algorithm in kernel:
                missed += fairness(algorithm, 8 if quick else 20, arguments.seed, rows)
    write_rows(arguments.json, rows)
    print("\n" + ("\n".join(missed) if missed else "all limits kept"))
    return 1 if missed else 0


def completion(
    names: Sequence[str],
    sizes: Sequence[int],
    drop_rates: Sequence[float],
    bursts: Sequence[float],
    traffic: Sequence[str],
    count: int,
    seed: int,
    rows: list[Row],
) -> list[str]:
    """The table of completion times; which limits were missed."""
    missed: list[str] = []
    lossless: dict[tuple[str, int], float] = {}
    best: dict[tuple[str, str], float] = {}
    link = {"delay_s": ONE_WAY_S, "rate_bytes_per_s": RATE_BYTES_PER_S}
    print("flow                       " + "".join(f"{name:>27}" for name in names))
    with (
        two_hosts([link], seed=seed) as (_, hosts, (network,), control),
        contenders(names, hosts, control) as jobs,
    ):
        cells = [
            (drop, burst, kind, size)
            for drop in drop_rates
            for burst in (bursts if drop > 0 else bursts[:1])
            for kind in traffic
            for size in sizes
        ]
        for drop, burst, kind, size in cells:
            network.set(drop=drop / 100, burst_packets=burst if burst > 1 else None)
            times: dict[str, list[float]] = {name: [] for name in names}
            spent: dict[str, list[float]] = {name: [] for name in names}
            turn = {"do": "flows", "traffic": kind, "bytes": size}
            for name in names:  # finds out what the link is like now
                take_turn(jobs[name], {**turn, "count": 10, "tolerant": SCHEMES[name].tolerant})
            while len(times[names[-1]]) < count:
                for name in names:
                    some = {**turn, "count": 10, "tolerant": SCHEMES[name].tolerant}
                    taken, cost = take_turn(jobs[name], some)
                    times[name] += taken
                    spent[name].append(cost)
            row: Row = {
                "benchmark": "smart_fct",
                "traffic": kind,
                "bytes": size,
                "drop": drop / 100,
                "burst_packets": burst,
                "flows": count,
            }
            line = f"{kind} {format_size(size):>8} {drop:4g} % x {burst:<4g}   "
            p99 = {name: quantile(times[name], 0.99) for name in names}
            for name in names:
                mean = sum(times[name]) / len(times[name])
                gain = 1 - p99["smart"] / p99[name]
                row[f"{name}_mean_ms"] = mean * 1e3
                row[f"{name}_p99_ms"] = p99[name] * 1e3
                row[f"{name}_spent"] = median(spent[name])
                line += f"{mean * 1e3:7.1f}{p99[name] * 1e3:8.1f} {median(spent[name]):4.2f} "
                line += f"({100 * gain:3.0f} %)" if name != "smart" else "       "
                best[kind, name] = max(best.get((kind, name), 0.0), gain)
            rows.append(row)
            print(line, flush=True)
            if drop == 0 and "repeat" in p99:
                lossless[kind, size] = p99["repeat"]
            base = lossless.get((kind, size))
            if base is not None and size == 1 << 20 and 0 < drop <= 2:
                held = {"exact", "smart"} if burst == 1 else {"smart"}
                for name in held & p99.keys():
                    if p99[name] > LIMIT * base:
                        missed.append(
                            f"{kind} {format_size(size)} {drop:g} % x {burst:g}: {name} "
                            f"{p99[name] / base:.2f} of the lossless time"
                        )
        if any(key not in lossless for key in ((kind, 1 << 20) for kind in traffic)):
            print(
                "not judged against the lossless time: that takes repeat, 1M and a drop rate of 0"
            )
        for kind in traffic:
            gains = ", ".join(f"{name} {100 * best[kind, name]:.1f} %" for name in names)
            print(f"{kind}: largest reduction of the 99th percentile by smart against {gains}")
        for job in jobs.values():
            job.tell(json.dumps({"do": "end"}))
            job.wait()
    return missed


def fairness(algorithm: str, seconds: float, seed: int, rows: list[Row]) -> list[str]:
    """A stream of datagrams shares a link with one TCP connection with this congestion control."""
    missed = []
    rate = 12.5e6
    link = {"delay_s": 0.01, "rate_bytes_per_s": rate}
    with (
        two_hosts([link], seed=seed) as (_, hosts, (network,), control),
        contenders(["exact"], hosts, control) as jobs,
    ):
        server = hosts[1].popen(["iperf3", "-s", "-1"], stdout=-3, stderr=-3)
        try:
            listening = ["ss", "-Htln", "sport = :5201"]
            until = time.monotonic() + 10
            while not hosts[1].run(listening, capture_output=True, check=True).stdout:
                if time.monotonic() > until:
                    raise RuntimeError("iperf3 -s does not listen on port 5201")
                time.sleep(0.02)
            command = ["iperf3", "-c", network.address(hosts[1]), "-C", algorithm]
            client = hosts[0].popen([*command, "-t", f"{seconds:g}", "-J"], stdout=-1)
            jobs["exact"].tell(json.dumps({"do": "stream", "seconds": seconds}))
            output = client.communicate(timeout=seconds + 60)[0]
            intervals = json.loads(output)["intervals"]
            late = intervals[len(intervals) // 2 :]
            tcp = sum(i["sum"]["bits_per_second"] for i in late) / 8 / len(late)
            streamed = [jobs["exact"].row("streamed", 120) for _ in range(2)]
            ours = max(row["bytes_per_s"] for row in streamed)
        finally:
            server.kill()
            server.wait()
        jobs["exact"].tell(json.dumps({"do": "end"}))
        jobs["exact"].wait()
    shares = {"datagrams": ours / (rate / 2), algorithm: tcp / (rate / 2)}
    rows.append({"benchmark": "smart_fct", "part": "fairness", **shares})
    print("fairness: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    for name, share in shares.items():
        if not 0.5 <= share <= 2:
            missed.append(f"fairness: {name} has {share:.2f} of its fair share")
    return missed


if __name__ == "__main__":
    sys.exit(main())
