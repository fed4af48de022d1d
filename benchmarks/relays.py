"""Measures relays between two sites in the lab: the rate, and the pause at a dead uplink.

    python benchmarks/relays.py

Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Row, add_common_arguments, median, show_rows
from lab_job import say, start_job

from torch_resilient.testing import NetworkLab

ABOUT = """\
Sites a and b with 2, 3 or 4 hosts each. What a host sends to the other site is limited to 10 MB/s,
with 20 ms on the way; within a site there is no limit. The first rank of site a sends 16 MiB at a
time to the first rank of site b, with relay=auto and with relay=off, in turns.

  hosts     the median rate with relays over that without, and its noise: off against off
  shared    the same with 2 hosts whose site has 10 MB/s for both
  small     2 hosts, 8 B there and back: the median time with relays over that without
  local     the same between two ranks of one site
  order     3 hosts in each site; each rank of site a sends 1.6 MiB to its counterpart at the same
            time: the median time of the first and of the last of them, with relays over without
  pause     2 hosts, 64 KiB every 20 ms; the uplink of the sender goes down: the longest time
            between two messages

Exit status 1 if a limit is missed: 1.8, 2.6 and 3.3 times for 2, 3 and 4 hosts; 0.98 with a shared
uplink; 1.1 for small messages; for the order 0.75 of the time (first) and 1.1 (last); a pause of
0.25 s.
"""

RATE_BYTES_PER_S = 10e6
# Ethernet, IP and TCP, which the limits of the lab count.
WIRE_BYTES_PER_BYTE = 1500 / 1448
DELAY_S = 0.02
LARGE_BYTES, ORDER_BYTES, SMALL_BYTES, PAUSE_BYTES = 16 << 20, 102 * 16384, 8, 64 << 10
PAUSE_EVERY_S = 0.02
HOSTS_MIN = {2: 1.8, 3: 2.6, 4: 3.3}
SHARED_MIN, SMALL_MAX, PAUSE_MAX_S = 0.98, 1.1, 0.25
FIRST_MAX, LAST_MAX = 0.75, 1.1
LIMIT_S = 120.0


def worker(job: dict[str, Any]) -> None:
    """One rank; ranks that neither send nor receive wait for the end."""
    dist.init_process_group("resilient")
    dist.barrier()
    for source, target in job["pairs"]:
        if dist.get_rank() in (source, target):
            exchange(job, first=dist.get_rank() == source, peer=source + target - dist.get_rank())
    sys.stdin.readline()  # relays stay until all is over
    dist.destroy_process_group()


def exchange(job: dict[str, Any], first: bool, peer: int) -> None:
    """Messages one way, or there and back; the receiver, or the first one, tells the times."""
    message = torch.zeros(job["bytes"], dtype=torch.uint8)
    for _ in range(job["count"]):
        if job["together"]:
            dist.barrier()
        begin = time.monotonic()
        if first:
            dist.send(message, peer)
            if job["back"]:
                dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            if job["back"]:
                dist.send(message, peer)
        if first == job["back"]:
            rank, now = dist.get_rank(), time.monotonic()
            say("message", rank=rank, time_s=now, took_s=now - begin)
        time.sleep(job["every_s"])


def run(
    relay: str,
    hosts: int,
    job: dict[str, Any],
    *,
    shared: bool = False,
    cut_after: int = 0,
    declared_rate: bool = False,
) -> list[Row]:
    """The rows of one job in a lab of its own."""
    with NetworkLab() as lab:
        sites = [[lab.host(f"{site}{k}") for k in range(hosts)] for site in "ab"]
        everybody = sites[0] + sites[1]
        net = lab.network(everybody, delay_s=0.0001)
        control = lab.network(everybody, name="control")
        names = [",".join(host.name for host in site) for site in sites]
        net.set(direction=f"{names[0]}<->{names[1]}", delay_s=DELAY_S)
        for site, far in zip(sites, reversed(names), strict=True):
            limited = [",".join(host.name for host in site)] if shared else [h.name for h in site]
            for name in limited:
                net.share_rate(f"{name}->{far}", RATE_BYTES_PER_S)
        environment = {
            "TORCH_RESILIENT_RELAY": relay,
            "TORCH_RESILIENT_INTERFACE": "eth0",
        }
        if declared_rate:
            payload = int(RATE_BYTES_PER_S / WIRE_BYTES_PER_BYTE)
            environment["TORCH_RESILIENT_WAN_RATE_LIMIT"] = str(payload)
        declared = ["a"] * hosts + ["b"] * hosts
        with start_job(
            __file__, everybody, control, job, environment=environment, sites=declared
        ) as ranks:
            rows: list[Row] = []

            def last(row: Row) -> bool:
                if row["kind"] == "message":
                    rows.append(row)
                    if len(rows) == cut_after:
                        net.down(direction=f"a0<->{names[1]}")
                return len(rows) == job["count"] * len(job["pairs"])

            ranks.until(last, "messages", LIMIT_S)
            ranks.tell("")
            return rows


def job_of(pairs: Sequence[Sequence[int]], size: int, count: int, **more: Any) -> dict[str, Any]:
    """`count` messages of `size` bytes from the first to the second rank of each pair.

    Args:
        back: each is returned.
        together: all pairs begin each message at the same time.
        every_s: the pause between two.
    """
    job = {"pairs": pairs, "bytes": size, "count": count}
    return {**job, "back": False, "together": False, "every_s": 0.0, **more}


def rate(relay: str, hosts: int, count: int, shared: bool = False) -> float:
    """Bytes per second of 16 MiB messages, the first one left out."""
    job = job_of([(0, hosts)], LARGE_BYTES, count)
    times = [row["time_s"] for row in run(relay, hosts, job, shared=shared)]
    return LARGE_BYTES * (len(times) - 1) / (times[-1] - times[0])


def ping(relay: str, pair: Sequence[int], count: int) -> float:
    """Median seconds of 8 B there and back."""
    job = job_of([pair], SMALL_BYTES, count, back=True)
    return median([row["took_s"] for row in run(relay, 2, job)[count // 5 :]])


def order(relay: str, count: int) -> tuple[float, float]:
    """Median seconds of the first and the last of three messages that begin at the same time."""
    job = job_of([(k, 3 + k) for k in range(3)], ORDER_BYTES, count, together=True)
    took_s: dict[int, list[float]] = {}
    for row in run(relay, 3, job, declared_rate=True):
        took_s.setdefault(row["rank"], []).append(row["took_s"])
    # Connections and relays open in the first third.
    by_rank = [median(found[count // 3 :]) for found in took_s.values()]
    return min(by_rank), max(by_rank)


def pause(relay: str) -> float:
    """The longest time between two messages while the uplink of the sender goes down."""
    job = job_of([(0, 2)], PAUSE_BYTES, 90, every_s=PAUSE_EVERY_S)
    times = [row["time_s"] for row in run(relay, 2, job, cut_after=45)][30:]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def measure(quick: bool) -> Iterator[Row]:
    """The rows of all cases."""
    rounds, count = (1, 5) if quick else (5, 8)

    def measured(one: Any) -> dict[str, list[Any]]:
        values: dict[str, list[Any]] = {"auto": [], "off": [], "off again": []}
        for _ in range(rounds):
            for name, found in values.items():
                found.append(one(name.split()[0]))
        return values

    def compared(
        case: str, values: dict[str, list[float]], least: float | None, most: float | None
    ) -> Row:
        auto, off, again = (median(found) for found in values.values())
        ratio = auto / off
        met = (least is None or ratio >= least) and (most is None or ratio <= most)
        return {
            "case": case,
            "rounds": rounds,
            "auto": auto,
            "off": off,
            "ratio": ratio,
            "noise": again / off,
            "least": least,
            "most": most,
            "met": met,
        }

    for hosts, least in HOSTS_MIN.items():
        values = measured(lambda r, n=hosts: rate(r, n, count))
        yield compared(f"{hosts} hosts", values, least, None)
    values = measured(lambda r: rate(r, 2, count, shared=True))
    yield compared("shared uplink", values, SHARED_MIN, None)
    for name, pair, times in (("other", (0, 2), 100), ("same", (0, 1), 500)):
        values = measured(lambda r, p=pair, n=times: ping(r, p, n))
        yield compared(f"small, {name} site", values, None, SMALL_MAX)
    both = measured(lambda r: order(r, 8 * count))
    for place, (name, most) in enumerate((("first", FIRST_MAX), ("last", LAST_MAX))):
        values = {way: [each[place] for each in found] for way, found in both.items()}
        yield compared(f"order, {name} of 3", values, None, most)
    for relay in ("auto", "failover"):
        found = [pause(relay) for _ in range(rounds)]
        most = PAUSE_MAX_S if relay == "auto" else None
        yield {
            "case": f"pause, {relay}",
            "rounds": rounds,
            "pause_s": median(found),
            "longest_s": max(found),
            "most": most,
            "met": most is None or median(found) <= most,
        }


def describe_row(row: Row) -> str:
    """One line for people."""
    result = "" if row.get("least") is row.get("most") is None else ": met"
    if not row["met"]:
        result = ": MISSED"
    if "pause_s" in row:
        limit = f", limit {row['most']:.2f}" if row["most"] else ""
        longest = row["longest_s"]
        return f"{row['case']:<18} {row['pause_s']:.2f} s (longest {longest:.2f}{limit}){result}"
    limit = f">= {row['least']}" if row["least"] else f"<= {row['most']}"
    return (
        f"{row['case']:<18} ratio {row['ratio']:.2f} (noise {row['noise']:.2f}, limit {limit})"
        f"{result}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each case; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    return show_rows(options, "relays", measure(options.quick), describe_row)


if __name__ == "__main__":
    sys.exit(main())
