"""Is the lab right? Its rates, delays and drops as iperf3 and ping see them.

    python benchmarks/lab_calibration.py

Needs root, iperf3 and ping.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import Row, add_common_arguments, quantile, write_rows

from torch_resilient.testing import Host, LabUnavailable, Network, NetworkLab

# The defaults of Linux, which ATLAS used for its single connections.
STOCK_WINDOWS = {
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.ipv4.tcp_rmem": "4096 131072 6291456",
}
# Paper: ATLAS §3, Table 1: one-way delay in ms -> Mbit/s of one connection.
ATLAS_TABLE_1 = {10: 1220, 20: 600, 30: 396, 40: 293}
# Payload of a TCP packet of 1500 bytes with time stamps.
TCP_SHARE = 1448 / 1500


# Put before a command if --realtime is given.
real_time: list[str] = []


def iperf(source: Host, target: Host, address: str, seconds: float, *more: str) -> dict[str, Any]:
    """The report of iperf3 at the end of a run from `source` to `target`."""
    server = target.popen(
        [*real_time, "iperf3", "--server", "--one-off", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = [*real_time, "iperf3", "--client", address, "--time", str(seconds), "--json", *more]
    for _ in range(50):
        done = source.run(client, capture_output=True, text=True, timeout=seconds + 60)
        answer: dict[str, Any] = json.loads(done.stdout)
        # The server may not listen yet.
        if "error" not in answer:
            server.wait(30)
            end: dict[str, Any] = answer["end"]
            return end
        time.sleep(0.1)
    raise RuntimeError(f"iperf3 to {address}: {answer['error']}")


def goodput(lab: NetworkLab, link: Network, seconds: float, *more: str) -> tuple[float, float]:
    """(bit/s that the receiver got over TCP, cores that the carrier used)."""
    a, b = link.hosts
    used, start = lab.carrier_cpu_s, time.monotonic()
    end = iperf(a, b, link.address(b), seconds, "--omit", "1", *more)
    cores = (lab.carrier_cpu_s - used) / (time.monotonic() - start)
    return end["sum_received"]["bits_per_second"], cores


def pings_ms(source: Host, address: str, count: int) -> list[float]:
    """Round-trip times as ping prints them."""
    command = [*real_time, "ping", "-n", "-c", str(count), "-i", "0.01", address]
    done = source.run(command, capture_output=True, text=True, check=True, timeout=count)
    return [float(text) for text in re.findall(r"time=([\d.]+) ms", done.stdout)]


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other programs that each use a whole core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: 1"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(quick: bool) -> Iterator[Row]:
    """All rows, as they come."""
    seconds = 2.0 if quick else 8.0
    with NetworkLab() as lab:
        a, b = (lab.host(name, sysctl=STOCK_WINDOWS) for name in "ab")
        link = lab.link(a, b)
        yield {"table": "lab", "realtime": lab.is_real_time}

        for streams in (1, 4):
            rate, cores = goodput(lab, link, seconds, "--parallel", str(streams))
            yield {"table": "unshaped", "streams": streams, "bit_per_s": rate, "cores": cores}

        link.set(delay_s=0.002)
        for asked in (10e6, 100e6, 1e9):
            link.set(rate_bytes_per_s=asked / 8)
            rate, cores = goodput(lab, link, seconds)
            yield {
                "table": "rate",
                "asked_bit_per_s": asked,
                "bit_per_s": rate,
                "of_possible": rate / (asked * TCP_SHARE),
                "cores": cores,
            }
        link.set(rate_bytes_per_s=None)

        for others in (0, 2):
            with busy(others):
                for delay_ms in (0, 5, 20, 40):
                    link.set(delay_s=delay_ms / 1000)
                    times = pings_ms(a, link.address(b), 100 if quick else 1000)
                    yield {
                        "table": "delay",
                        "busy_cores": others,
                        "asked_ms": 2 * delay_ms,
                        "p50_ms": quantile(times, 0.5),
                        "p99_ms": quantile(times, 0.99),
                        "max_ms": max(times),
                    }

        link.set(delay_s=0.001)
        for drop, burst in ((0.001, None), (0.01, None), (0.01, 10.0), (0.1, None)):
            link.set(drop=drop, burst_packets=burst)
            before = link.counters("a->b").dropped.packets
            end = iperf(
                a, b, link.address(b), seconds, "--udp", "--bitrate", "40M", "--length", "1000"
            )["sum"]
            yield {
                "table": "drop",
                "asked": drop,
                "burst_packets": burst or 1,
                "packets": end["packets"],
                "seen": end["lost_packets"] / end["packets"],
                "counted": link.counters("a->b").dropped.packets - before,
            }
        link.set(drop=0, burst_packets=None)

        for streams in (1, 16):
            for delay_ms, paper in ATLAS_TABLE_1.items():
                link.set(delay_s=delay_ms / 1000, rate_bytes_per_s=5e9 / 8)
                rate, cores = goodput(lab, link, 2 * seconds, "--parallel", str(streams))
                yield {
                    "table": "atlas",
                    "streams": streams,
                    "delay_ms": delay_ms,
                    "bit_per_s": rate,
                    "paper_bit_per_s": paper * 1e6 if streams == 1 else None,
                    "cores": cores,
                }


def describe_row(row: Row) -> str:
    """One line for people."""
    cores = f"carrier {row['cores']:.2f} cores" if "cores" in row else ""
    match row["table"]:
        case "lab":
            return f"carrier at real-time priority: {row['realtime']}"
        case "unshaped":
            gbit = row["bit_per_s"] / 1e9
            return f"unshaped, {row['streams']:2} streams: {gbit:.1f} Gbit/s, {cores}"
        case "rate":
            return (
                f"rate {row['asked_bit_per_s'] / 1e6:5.0f} Mbit/s: {row['bit_per_s'] / 1e6:.1f} "
                f"Mbit/s of payload, {row['of_possible']:.2%} of what is possible, {cores}"
            )
        case "delay":
            p50, p99, most = (
                row[name] - row["asked_ms"] for name in ("p50_ms", "p99_ms", "max_ms")
            )
            return (
                f"RTT {row['asked_ms']:2} ms, {row['busy_cores']} cores busy: p50 {p50:+.2f} ms, "
                f"p99 {p99:+.2f}, max {most:+.2f}"
            )
        case "drop":
            return (
                f"drop {row['asked']:.1%} in runs of {row['burst_packets']:g}: "
                f"{row['seen']:.3%} of {row['packets']} packets, "
                f"{row['counted'] / row['packets']:.3%} as the lab counts"
            )
        case _:
            paper = row["paper_bit_per_s"]
            said = f" (ATLAS: {paper / 1e6:.0f})" if paper else ""
            return (
                f"{row['delay_ms']} ms one way, {row['streams']:2} streams: "
                f"{row['bit_per_s'] / 1e6:.0f} Mbit/s{said}, {cores}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each measurement; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    for program in ("iperf3", "ping"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed")
    if options.realtime:
        real_time.extend(["chrt", "--rr", "1"])
    rows: list[Row] = []
    try:
        for row in measure(options.quick):
            rows.append({"benchmark": "lab_calibration", **row})
            print(describe_row(row), flush=True)
    except LabUnavailable as error:
        parser.error(str(error))
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
