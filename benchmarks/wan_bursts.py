"""Measures single operations over an idle link between two sites in the lab, against the floor.

    python benchmarks/wan_bursts.py

Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, add_common_arguments, format_size, median, parse_size, quantile, show_rows
from lab_job import SECRET, say, start_job

from torch_resilient.testing import Host, LabJob, NetworkLab

ABOUT = """\
Two hosts with one rank each (or --ranks-per-host). All begin an operation at the same instant of
their common clock; a sample is the time until the last of them has ended. Before it, the job has
been idle for --idle-s (0: back to back). In a send, each rank of the first host sends to its
counterpart on the second. Jobs with these settings take turns on the same link:

  auto      this backend as it is (wan=auto)
  wan_tcp   with wan=tcp
  tcp       with wan=tcp and CUBIC, or Reno where CUBIC is not allowed
  bbr       with wan=tcp and wan_congestion_control=bbr
  udp       with wan=udp
  encrypted as auto, with a secret of the job's own (not by default)
  gloo      torch's own backend, with the same

floor is what the link allows: its delay once and the bytes at its rate, for an all_reduce between
two hosts (one round; more bytes do not cross in two) as for a send. The rate is that of the link
less the headers of TCP. From 100 rounds on, there is the 99th percentile, too.

By default ranks may not administer the network, like those of an ordinary user: socket buffers are
limited by net.core.{r,w}mem_max, and congestion control by what the kernel allows everybody.
--root keeps all rights.

With --network, something on the way treats datagrams badly:

  udp_blocked     no datagram arrives
  udp_one_way     none arrives at rank 1
  udp_policed     those beyond 10 Mbit/s are dropped
  udp_forgotten   those of the far end pass only within 30 s after one of our own (a firewall, NAT)
  mtu_1280        the links carry no larger packets
  reordered       one packet in ten comes up to 2 ms late
  duplicated      one packet in ten comes twice

Exit status 1 if `auto` misses a limit: for all_reduce at 20 ms and 1 Gbit/s, 35, 40, 45, 66, 190
and 620 ms from 64 KiB to 64 MiB in steps of four; for send 1.25 times the floor; 1.5 times the
floor for the 99th percentile. On the networks above, 1.05 times `wan_tcp`, and 1 ms.
"""

CONTENDERS: dict[str, dict[str, str]] = {
    "auto": {},
    "wan_tcp": {"TORCH_RESILIENT_WAN": "tcp"},
    "tcp": {
        "TORCH_RESILIENT_WAN": "tcp",
        "TORCH_RESILIENT_WAN_CONGESTION_CONTROL": "system",
    },
    "bbr": {"TORCH_RESILIENT_WAN": "tcp", "TORCH_RESILIENT_WAN_CONGESTION_CONTROL": "bbr"},
    "udp": {"TORCH_RESILIENT_WAN": "udp"},
    "encrypted": SECRET,
    "gloo": {},
}
ALL_CONTENDERS = "auto,tcp,bbr,udp,gloo"
# Settings of the link by the name of the network.
NETWORKS: dict[str, dict[str, Any]] = {
    "clean": {},
    "udp_blocked": {},
    "udp_one_way": {},
    "udp_policed": {"udp_rate_bytes_per_s": 1.25e6},
    "udp_forgotten": {},
    "mtu_1280": {"mtu": 1280},
    "reordered": {"reorder": 0.1, "reorder_delay_s": 0.002},
    "duplicated": {"duplicate": 0.1},
}
FORGOTTEN_AFTER_S = 30
OF_TCP_MAX, OF_TCP_MAX_MS = 1.05, 1.0
OPS = ("all_reduce", "send")
SIZES = "64K,256K,1M,4M,16M,64M"
ALL_REDUCE_MAX_MS = {
    64 << 10: 35.0,
    256 << 10: 40.0,
    1 << 20: 45.0,
    4 << 20: 66.0,
    16 << 20: 190.0,
    64 << 20: 620.0,
}
SEND_MAX_RATIO = 1.25
P99_MAX_RATIO = 1.5
ROUNDS_FOR_P99 = 100
# The link that the limits are for.
DELAY_MS, RATE_MBIT = 20.0, 1000.0
# IP and TCP with time stamps, and Ethernet, of a packet of 1500 bytes.
WIRE_BYTES_PER_BYTE = 1514 / 1448
# From the command to the start of an operation: the ranks read it in this time.
AHEAD_S = 0.05
FIRST_PORT = 29400
LIMIT_S = 120.0


def worker(job: dict[str, Any]) -> None:
    """One rank; each line of its input is an operation, at a time of the monotonic clock."""
    if job["realtime"]:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo" if job["name"] == "gloo" else "resilient")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    buffers: dict[int, torch.Tensor] = {}
    dist.barrier()
    say("ready", name=job["name"])
    for line in sys.stdin:
        op, size, at = json.loads(line)
        data = buffers.setdefault(size, torch.zeros(size // 4))
        while (left := at - time.monotonic()) > 0:
            time.sleep(max(0.0, left - 0.001) if left > 0.002 else 0.0)
        if op == "all_reduce":
            dist.all_reduce(data)
        elif rank < half:
            dist.send(data, rank + half)
        else:
            dist.recv(data, rank - half)
        say("end", took_s=time.monotonic() - at)


class Contender:
    """A job that carries out single operations."""

    def __init__(self, job: LabJob) -> None:
        self.job = job
        self._over = 0.0
        for _ in job.processes:
            job.row("ready", LIMIT_S)

    def burst(self, op: str, size: int, idle_s: float) -> float:
        """Seconds of one operation that begins after an idle time."""
        at = max(time.monotonic() + AHEAD_S, self._over + idle_s)
        self.job.tell(json.dumps([op, size, at]))
        took = max(self.job.row("end", LIMIT_S)["took_s"] for _ in self.job.processes)
        self._over = at + took
        return float(took)


def system_control() -> str:
    """The congestion control that hosts have by default."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii")
    return "cubic" if "cubic" in allowed.split() else "reno"


def spoil(hosts: Sequence[Host], network: str) -> None:
    """Sets up what treats datagrams badly at the hosts, if anything there does."""
    rule = ["iptables", "-A", "INPUT", "-p", "udp"]
    if network in ("udp_blocked", "udp_one_way"):
        for host in hosts[0 if network == "udp_blocked" else 1 :]:
            host.run([*rule, "-j", "DROP"], check=True)
    if network == "udp_forgotten":
        for host in hosts:
            for name in ("udp_timeout", "udp_timeout_stream"):
                setting = f"net.netfilter.nf_conntrack_{name}={FORGOTTEN_AFTER_S}"
                host.run(["sysctl", "-q", setting], check=True)
            host.run([*rule, "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP"], check=True)


def contenders(
    stack: contextlib.ExitStack,
    names: Sequence[str],
    hosts: Sequence[Host],
    link: Any,
    options: argparse.Namespace,
) -> dict[str, Contender]:
    """Starts the jobs. Their stores use the link, too."""
    # Root may do more to its sockets and its packets than a user may.
    prefix = [] if options.root else ["setpriv", "--bounding-set", "-net_admin"]
    jobs = [
        stack.enter_context(
            start_job(
                __file__,
                [host for host in hosts for _ in range(options.ranks_per_host)],
                link,
                {"name": name, "realtime": options.realtime},
                environment=CONTENDERS[name],
                port=FIRST_PORT + k,
                prefix=prefix,
            )
        )
        for k, name in enumerate(names)
    ]
    return {name: Contender(job) for name, job in zip(names, jobs, strict=True)}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all links, operations and sizes."""
    names = options.contenders.split(",")
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    for network, delay_ms, rate_mbit, loss in itertools.product(
        options.network, options.delay_ms, options.rate_mbit, options.loss
    ):
        with NetworkLab() as lab, contextlib.ExitStack() as stack:
            # The default of this machine does not matter.
            system = {"net.ipv4.tcp_congestion_control": system_control()}
            hosts = [lab.host("a", sysctl=system), lab.host("b", sysctl=system)]
            bytes_per_s = rate_mbit * 1e6 / 8
            settings = {"delay_s": delay_ms / 1e3, "rate_bytes_per_s": bytes_per_s, "drop": loss}
            link = lab.link(*hosts, **settings, **NETWORKS[network])
            spoil(hosts, network)
            running = contenders(stack, names, hosts, link, options)
            for op, size in itertools.product(options.ops.split(","), sizes):
                for idle_s in options.idle_s:
                    took: dict[str, list[float]] = {name: [] for name in names}
                    for round_number in range(options.rounds + 1):
                        for k in range(len(names)):
                            name = names[(k + round_number) % len(names)]
                            value = running[name].burst(op, size, idle_s)
                            if round_number > 0:  # the first one opens connections
                                took[name].append(value)
                    crossing = size * (options.ranks_per_host if op == "send" else 1)
                    floor_s = delay_ms / 1e3 + crossing * WIRE_BYTES_PER_BYTE / bytes_per_s
                    row = {
                        "network": network,
                        "op": op,
                        "bytes": size,
                        "ranks_per_host": options.ranks_per_host,
                        "delay_ms": delay_ms,
                        "rate_mbit": rate_mbit,
                        "loss": loss,
                        "idle_s": idle_s,
                        "root": options.root,
                        "system": system_control(),
                        "floor_ms": floor_s * 1e3,
                        "rounds": options.rounds,
                        **{f"{name}_ms": median(took[name]) * 1e3 for name in names},
                        **{f"{name}_p90_ms": quantile(took[name], 0.9) * 1e3 for name in names},
                    }
                    if options.rounds >= ROUNDS_FOR_P99:
                        row |= {
                            f"{name}_p99_ms": quantile(took[name], 0.99) * 1e3 for name in names
                        }
                    limit_ms = limit_of(row)
                    row["limit_ms"] = limit_ms
                    row["met"] = (
                        limit_ms is None
                        or "auto_ms" not in row
                        or (row["auto_ms"] <= limit_ms and p99_is_met(row))
                    )
                    yield row


def limit_of(row: Row) -> float | None:
    """Milliseconds that `auto` may take; None if there is no limit for this link."""
    if row["network"] != "clean":
        return OF_TCP_MAX * row["wan_tcp_ms"] + OF_TCP_MAX_MS if "wan_tcp_ms" in row else None
    if (row["delay_ms"], row["rate_mbit"]) != (DELAY_MS, RATE_MBIT):
        return None
    if row["op"] == "all_reduce":
        return ALL_REDUCE_MAX_MS.get(row["bytes"])
    return SEND_MAX_RATIO * float(row["floor_ms"])


def p99_is_met(row: Row) -> bool:
    """Whether the 99th percentile of `auto` is within its limit, if there is one."""
    if row["network"] != "clean" or "auto_p99_ms" not in row:
        return True
    return float(row["auto_p99_ms"]) <= P99_MAX_RATIO * float(row["floor_ms"])


def describe_row(row: Row, names: Sequence[str]) -> str:
    """One line for people."""
    times = "  ".join(f"{name} {row[f'{name}_ms']:7.1f}" for name in names)
    if "auto_p99_ms" in row:
        times += f"  auto p99 {row['auto_p99_ms']:7.1f}"
    limit = "" if row["limit_ms"] is None else f"  limit {row['limit_ms']:.0f}"
    return (
        f"{row['network']:<13} {row['delay_ms']:g} ms {row['rate_mbit']:g} Mbit/s "
        f"loss {row['loss']:g} "
        f"idle {row['idle_s']:g} s  {row['op']:<10} {format_size(row['bytes']):>8}  "
        f"floor {row['floor_ms']:6.1f}  {times} ms{limit}{'' if row['met'] else '  MISSED'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each case; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--ops", default=",".join(OPS), help="of all_reduce, send")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes (default {SIZES})")
    parser.add_argument("--contenders", default=ALL_CONTENDERS, help="see below")
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=["clean"])
    parser.add_argument("--rounds", type=int, default=7, help="samples of each (default 7)")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[DELAY_MS], help="one way")
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=[RATE_MBIT])
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0], help="share of packets")
    parser.add_argument("--idle-s", type=float, nargs="+", default=[1.0])
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default 1)")
    parser.add_argument("--root", action="store_true", help="keep the right to set up networks")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    if options.quick:
        options.rounds, options.sizes = 3, "64K,1M,16M"
    if options.ranks_per_host < 1:
        parser.error(f"--ranks-per-host: expected at least 1, got {options.ranks_per_host}")
    names = options.contenders.split(",")
    if options.network != ["clean"] and not {"auto", "wan_tcp"} <= set(names):
        parser.error("networks other than clean compare --contenders auto,wan_tcp")
    if "udp_forgotten" in options.network and min(options.idle_s) <= FORGOTTEN_AFTER_S:
        parser.error(f"udp_forgotten: --idle-s must be more than {FORGOTTEN_AFTER_S}")
    return show_rows(options, "wan_bursts", measure(options), lambda row: describe_row(row, names))


if __name__ == "__main__":
    sys.exit(main())
