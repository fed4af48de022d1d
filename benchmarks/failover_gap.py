"""How long a running stream pauses when a network interface fails, and until it is used again."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import Row, add_common_arguments, quantile, write_rows
from lab_job import SECRET, say, start_job, two_hosts

from torch_resilient.testing import unavailable

ABOUT = """\
Two hosts with two interfaces each, in a lab of network namespaces (needs root). Rank 0 sends
64 KiB every 2 ms to rank 1: two thirds of what one of the links carries, which both share (and a
burst at the beginning, as a training has). Every few seconds one interface fails for a while:

  blackhole    its link drops everything, both ways or one way, without a notification
  carrier      the end named sees that its cable has been pulled, the other one sees silence
  admin        `ip link set down` at the end named
  cut          the kernel of the end named ends its connections (`ss -K`, if the kernel can do
               that), which resets them at the other end; the link is as good as before
  flap         blackhole, 200 ms on and off, without a rest
  overload     blackhole, with links that are half as fast: the one that is left cannot carry the
               stream, and what was lost is behind a full queue. No limit

  2 of 3       three interfaces; two of them, chosen at random, fail at once for 1 s, every 3.5 s.
               The third one may be on probation, after an earlier fault
  flapped      one interface has failed ten times and is on probation. Then all others fail at once
  2 of 2       all interfaces fail at once, for 0.6 to 2 s. The pause is counted from the moment
               at which the first one works again

  pause        the longest time without a message at the receiver while the fault lasts
  back         from the end of the fault until its link carries a quarter of its share again; of a
               cut, from the cut: it takes twice as long each time that one follows another soon
  wrong        messages that were lost, doubled, out of order or changed

With --encrypted each of them comes twice, in plaintext and with a secret of the job's own.

gloo has one connection: it waits for its timeout, or the network.

Exit status 1 if a limit is missed: median pause at admin 50 ms, 99th percentile of the pause in a
black hole 120 ms, the longest while a link flaps 120 ms, used again within 2 s (median), nothing
wrong. For several interfaces at once: the longest pause at admin and carrier 110 ms, in a black
hole (or at carrier, if flapped) 180 ms, after an outage 130 ms.
"""

Secret = dict[str, str]
MESSAGE_BYTES = 65536
PERIOD_S = 0.002
# Sent at the beginning, to measure the capacity of both links.
BURST_MESSAGES = 800
STREAM_BYTES_PER_S = MESSAGE_BYTES / PERIOD_S
LINK_BYTES_PER_S = 50e6
THIN_LINK_BYTES_PER_S = 25e6
SHARE_BYTES_PER_S = STREAM_BYTES_PER_S / 8
DELAY_S = 0.0025
FAULT_S = 0.7
# After a cut, what was on the link has left it: its queue holds 20 ms.
DRAINED_S = 0.05
# Cuts in a row: a link that is cut repeatedly soon has a hold-down of a minute.
CUTS_MAX = 8
GLOO_TIMEOUT_S = 5.0
CASES = [
    ("blackhole", None),
    ("blackhole", "a->b"),
    ("blackhole", "b->a"),
    ("carrier", "a"),
    ("carrier", "b"),
    ("admin", "a"),
    ("admin", "b"),
    ("cut", "a"),
    ("cut", "b"),
    ("overload", None),
]
PAUSE_MAX_S = {"admin": (0.5, 0.050), "blackhole": (0.99, 0.120), "flap": (1.0, 0.120)}
BACK_MAX_S = 2.0


@dataclass(frozen=True)
class Several:
    """Faults of several interfaces at once; ABOUT has the meaning."""

    kind: str
    failing: int
    nics: int
    pause_max_s: float
    flaps: int = 0

    @property
    def outage(self) -> bool:
        return self.failing == self.nics

    def __str__(self) -> str:
        return f"{self.failing} of {self.nics}{' flapped' if self.flaps else ''}"


SEVERAL_MAX_S = {"blackhole": 0.180, "carrier": 0.110, "admin": 0.110}
OUTAGE_MAX_S = 0.130
# The kernel reports carriers once a second at most: after a flap, a lost one is a black hole.
FLAPPED_MAX_S = SEVERAL_MAX_S | {"carrier": 0.180}
SEVERAL = [
    *(Several(kind, 2, 3, most) for kind, most in SEVERAL_MAX_S.items()),
    *(Several(kind, 1, 2, most, flaps=10) for kind, most in FLAPPED_MAX_S.items()),
    *(Several(kind, 2, 3, most, flaps=10) for kind, most in FLAPPED_MAX_S.items()),
    *(Several(kind, 2, 2, OUTAGE_MAX_S) for kind in SEVERAL_MAX_S),
]
SEVERAL_S = 1.0
SEVERAL_EVERY_S = 3.5
OUTAGE_S = (0.6, 2.0)
FLAP_S = 0.2
# More flaps before each fault keep the flapped interface on probation.
FLAPS_MORE = 2


class CannotCutError(Exception):
    """The kernel ends no connection when it is asked to, or there is none."""


def worker(settings: dict[str, Any]) -> None:
    """Runs one rank: the sender, until it receives the command to stop, or the receiver."""
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=settings["timeout_s"])
    dist.init_process_group(settings["backend"], timeout=timeout)
    pattern = torch.randint(
        0, 256, (MESSAGE_BYTES // 8,), generator=torch.Generator().manual_seed(7)
    )

    def content(number: int) -> torch.Tensor:
        message = pattern + number
        message[0] = number
        return message

    if dist.get_rank() == 0:
        stop = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
        works: list[Any] = [dist.isend(content(number), 1) for number in range(BURST_MESSAGES)]
        number = len(works)
        for work in works:
            work.wait()
        works.clear()
        say("begun")
        start = time.monotonic() - number * PERIOD_S
        while not stop.is_set():
            works.append(dist.isend(content(number), 1))
            number += 1
            while len(works) > 64:
                works.pop(0).wait()
            time.sleep(max(0.0, start + number * PERIOD_S - time.monotonic()))
        works.append(dist.isend(content(-1), 1))
        for work in works:
            work.wait()
        say("sent", messages=number)
    else:
        buffer = torch.empty_like(pattern)
        times: list[float] = []
        wrong = 0
        while True:
            dist.recv(buffer, 0)
            if int(buffer[0]) == -1:
                break
            times.append(time.monotonic())
            wrong += not torch.equal(buffer, content(len(times) - 1))
        say("received", times=times, wrong=wrong)
    dist.barrier()
    dist.destroy_process_group()


def until_used(network: Any, limit_s: float) -> float | None:
    """Seconds until the link from a to b carries its share; None if it does not in time."""
    start = time.monotonic()
    last = network.counters("a->b").delivered.bytes
    while time.monotonic() - start < limit_s:
        began = time.monotonic()
        time.sleep(0.05)
        now = network.counters("a->b").delivered.bytes
        if (now - last) / (time.monotonic() - began) >= SHARE_BYTES_PER_S:
            return time.monotonic() - start
        last = now
    return None


def cut(network: Any, host: str) -> int:
    """Ends the connections over `network` at `host`; returns how many there were."""
    here = network.nics[0 if host == "a" else 1]
    command = ["ss", "--kill", "--tcp", "--no-header", "src", here.address]
    killed = here.host.run(command, capture_output=True, text=True, check=True)
    return len(killed.stdout.splitlines())


def pause_within(times: Sequence[float], begin: float, end: float) -> float:
    """The longest gap between two messages that lies, in part, within a fault."""
    gaps = (b - a for a, b in itertools.pairwise(times) if b > begin and a < end)
    return max(gaps, default=0.0)


def measure(kind: str, end: str | None, count: int, seed: int, secret: Secret) -> Row:
    """`count` faults of one kind during one stream."""
    chance = random.Random(f"{kind} {end} {seed}")
    rate = THIN_LINK_BYTES_PER_S if kind == "overload" else LINK_BYTES_PER_S
    fault = "blackhole" if kind == "overload" else kind
    link = {"delay_s": DELAY_S, "rate_bytes_per_s": rate}
    with two_hosts([link, link], seed=seed) as (_, hosts, links, control):
        arguments = {"backend": "resilient", "timeout_s": 60}
        environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1", **secret}
        with start_job(__file__, hosts, control, arguments, environment=environment) as job:
            job.row("begun")
            for network in links:
                until_used(network, 5)
            faults = []
            back = []
            for number in range(count):
                time.sleep(0.3 + chance.random() * 0.1)
                network = links[number % 2]
                began = time.monotonic()
                if kind == "cut":
                    if not cut(network, str(end)):
                        raise CannotCutError
                    time.sleep(DRAINED_S)
                    used = until_used(network, 10)
                    back.append(None if used is None else DRAINED_S + used)
                    time.sleep(max(0.0, began + FAULT_S - time.monotonic()))
                    faults.append((began, began + FAULT_S))
                    continue
                if end is not None and "->" in end:
                    network.down(fault, direction=end)
                else:
                    network.down(fault, end=end)
                time.sleep(FAULT_S)
                faults.append((began, time.monotonic()))
                network.up()
                back.append(until_used(network, 10))
            job.tell("stop")
            received = job.row("received")
            statuses = job.wait()
    pauses = [pause_within(received["times"], *fault) for fault in faults]
    return {
        "benchmark": "failover_gap",
        "kind": kind,
        "end": end,
        "encrypted": bool(secret),
        "pauses_s": pauses,
        "back_s": [10.0 if b is None else b for b in back],
        "wrong": received["wrong"] + sum(status != 0 for status in statuses),
        "messages": len(received["times"]),
    }


def measure_flapping(duration_s: float, seed: int, secret: Secret) -> Row:
    """One interface goes and comes every 200 ms."""
    link = {"delay_s": DELAY_S, "rate_bytes_per_s": LINK_BYTES_PER_S}
    with two_hosts([link, link], seed=seed) as (_, hosts, links, control):
        arguments = {"backend": "resilient", "timeout_s": 60}
        environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1", **secret}
        with start_job(__file__, hosts, control, arguments, environment=environment) as job:
            job.row("begun")
            until_used(links[0], 5)
            time.sleep(1)
            began = time.monotonic()
            while time.monotonic() - began < duration_s:
                links[0].down("blackhole")
                time.sleep(0.2)
                links[0].up()
                time.sleep(0.2)
            ended = time.monotonic()
            job.tell("stop")
            received = job.row("received")
            statuses = job.wait()
    times = received["times"]
    during = [t for t in times if began <= t < ended]
    return {
        "benchmark": "failover_gap",
        "kind": "flap",
        "end": None,
        "encrypted": bool(secret),
        "pauses_s": [pause_within(times, began, ended)],
        "back_s": [],
        "wrong": received["wrong"] + sum(status != 0 for status in statuses),
        "messages": len(times),
        "of_stream": len(during) * MESSAGE_BYTES / (ended - began) / STREAM_BYTES_PER_S,
    }


def measure_several(case: Several, count: int, seed: int, secret: Secret) -> Row:
    """`count` faults of several interfaces at once, during one stream."""
    chance = random.Random(f"{case} {case.kind} {seed}")
    link = {"delay_s": DELAY_S, "rate_bytes_per_s": LINK_BYTES_PER_S}
    with two_hosts([link] * case.nics, seed=seed) as (_, hosts, links, control):
        arguments = {"backend": "resilient", "timeout_s": 60}
        environment = {
            "TORCH_RESILIENT_INTERFACE": ",".join(f"eth{i}" for i in range(case.nics)),
            "TORCH_RESILIENT_HOLD_DOWN_MAX_S": "60",
            **secret,
        }
        with start_job(__file__, hosts, control, arguments, environment=environment) as job:
            job.row("begun")
            time.sleep(1)
            faults: list[tuple[float, float]] = []
            for number in range(count):
                if case.flaps:
                    for _ in range(FLAPS_MORE if faults else case.flaps):
                        links[0].down(case.kind)
                        time.sleep(FLAP_S)
                        links[0].up()
                        time.sleep(FLAP_S)
                    time.sleep(0.1 + chance.random())
                    failing = links[1:]
                else:
                    failing = chance.sample(links, case.failing)
                end = None if case.kind == "blackhole" else "ab"[number % 2]
                began = time.monotonic()
                for network in failing:
                    network.down(case.kind, end=end)
                time.sleep(chance.uniform(*OUTAGE_S) if case.outage else SEVERAL_S)
                failing[0].up()
                faults.append((began, time.monotonic()))
                for network in failing[1:]:
                    network.up()
                time.sleep(max(0.5, began + SEVERAL_EVERY_S - time.monotonic()))
            job.tell("stop")
            received = job.row("received")
            statuses = job.wait()
    times = received["times"]
    if case.outage:
        pauses = [min(t for t in times if t > end) - end for _, end in faults]
    else:
        pauses = [pause_within(times, *fault) for fault in faults]
    return {
        "benchmark": "failover_gap",
        "kind": case.kind,
        "end": str(case),
        "encrypted": bool(secret),
        "pause_max_s": case.pause_max_s,
        "pauses_s": pauses,
        "back_s": [],
        "wrong": received["wrong"] + sum(status != 0 for status in statuses),
        "messages": len(times),
    }


def measure_gloo(kind: str, end: str | None) -> str:
    """Describes in words how gloo's stream ends."""
    link = {"delay_s": DELAY_S, "rate_bytes_per_s": 2 * LINK_BYTES_PER_S}
    with two_hosts([link]) as (_, hosts, links, control):
        arguments = {"backend": "gloo", "timeout_s": GLOO_TIMEOUT_S}
        environment = {"GLOO_SOCKET_IFNAME": "eth0"}
        with start_job(__file__, hosts, control, arguments, environment=environment) as job:
            job.row("begun")
            time.sleep(1)
            began = time.monotonic()
            if end is not None and "->" in end:
                links[0].down(kind, direction=end)
            else:
                links[0].down(kind, end=end)
            try:
                statuses = job.wait(3 * GLOO_TIMEOUT_S)
            finally:
                links[0].up()
            took = time.monotonic() - began
    if None in statuses:
        return f"still waits after {took:.0f} s (its time-out is {GLOO_TIMEOUT_S:.0f} s)"
    return f"both ranks ended after {took:.1f} s"


def histogram(pauses: Sequence[float]) -> str:
    """Counts by 20 ms, as digits: "3 12 1" for 0-20, 20-40, 40-60 ms."""
    bins = [0] * (int(max(pauses) / 0.02) + 1)
    for pause in pauses:
        bins[int(pause / 0.02)] += 1
    return " ".join("." if n == 0 else str(n) for n in bins)


def main() -> int:
    """Runs all cases; returns the exit status."""
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[sys.argv.index("--worker") + 1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--faults", type=int, metavar="N", help="of each kind (default 20; quick 4; at most 8 cuts)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='the rows with it, e.g. "2 of 3" or "admin"'
    )
    parser.add_argument("--encrypted", action="store_true", help="each in plaintext and encrypted")
    options = parser.parse_args()
    if options.realtime:  # the ranks inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if reason := unavailable():
        parser.error(f"the lab is not available: {reason}")
    count = options.faults or (4 if options.quick else 20)
    missed = []
    rows = []
    print(f"seed {options.seed}; pauses in ms; histogram: faults by 20 ms\n")
    print(
        f"{'fault':<11}{'at':<{20 if options.encrypted else 15}}{'median':>7}{'p99':>6}{'max':>6}"
        f"{'back':>7}{'max':>6}{'wrong':>6}"
    )

    def show(row: Row) -> None:
        rows.append(row)
        pauses, back = row["pauses_s"], row["back_s"]
        name = f"{row['kind']:<11}{row['end'] or 'both':<15}"
        if options.encrypted:
            name += "TLS  " if row["encrypted"] else "plain"
        line = f"{name}{quantile(pauses, 0.5) * 1e3:7.0f}{quantile(pauses, 0.99) * 1e3:6.0f}"
        line += f"{max(pauses) * 1e3:6.0f}"
        if back:
            line += f"{quantile(back, 0.5):6.2f}s{max(back):5.2f}s"
        else:
            line += f"{'':13}"
        line += f"{row['wrong']:6}"
        if "of_stream" in row:
            line += f"   {row['of_stream']:.2f} of the stream arrived meanwhile"
        else:
            line += f"   {histogram(pauses)}"
        print(line, flush=True)
        if row["wrong"]:
            missed.append(f"{name}: {row['wrong']} wrong")
        part, most = PAUSE_MAX_S.get(row["kind"], (1.0, float("inf")))
        if "pause_max_s" in row:
            part, most = 1.0, row["pause_max_s"]
        if quantile(pauses, part) > most:
            missed.append(f"{name}: longer than {most * 1e3:.0f} ms")
        if back and row["kind"] != "cut" and quantile(back, 0.5) > BACK_MAX_S:
            missed.append(f"{name}: not back in {BACK_MAX_S} s")

    def chosen(kind: str, at: object) -> bool:
        return options.only in f"{kind} {at or 'both'}"

    secrets: list[Secret] = [{}, SECRET] if options.encrypted else [{}]
    for (kind, end), secret in itertools.product(CASES, secrets):
        if not chosen(kind, end):
            continue
        try:
            most = CUTS_MAX if kind == "cut" else count
            show(measure(kind, end, min(count, most), options.seed, secret))
        except CannotCutError:
            print(f"{kind:<11}{end:<15}skipped: this kernel cannot (CONFIG_INET_DIAG_DESTROY)")
    if chosen("flap", None):
        for secret in secrets:
            show(measure_flapping(6 if options.quick else 30, options.seed, secret))
    for case, secret in itertools.product(SEVERAL, secrets):
        if chosen(case.kind, case):
            show(measure_several(case, count, options.seed, secret))
    if not options.only:
        print("\ngloo")
        for kind, end in [("blackhole", None), ("admin", "a")]:
            print(f"{kind:<11}{end or 'both':<15}{measure_gloo(kind, end)}", flush=True)
    write_rows(options.json, rows)
    print("\n" + ("\n".join(missed) if missed else "all limits kept"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
