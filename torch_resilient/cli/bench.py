"""`torch-resilient bench`: round trip and goodput of every link between the ranks of a job.

It uses the backend itself, with the connections, interfaces and settings of a training.
One pair of ranks is measured at a time, in each direction, while the others are idle.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch_resilient.cli.errors import bad_input

if TYPE_CHECKING:
    from torch import Tensor

    from torch_resilient._reports.stats import PathKind, PathStats

ABOUT = """\
examples:
  torchrun --standalone --nproc-per-node 2 --no-python torch-resilient bench
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
      --no-python torch-resilient bench --seconds 2

Rank 0 prints three tables, from the rank of the row to the rank of the column: the round trip of a
small message (median, milliseconds), goodput (MB/s of 10^6 bytes, after ramping up), and the
connections that carried it. Below them it lists the packets that the network dropped, what went
over other ranks as relays, and what these relays have passed on and held.

It takes about 1.3 s more than --seconds for each of the N * (N - 1) directions.
exit status: 0; 1 if a direction could not be measured; 2 for bad input.
"""

_MIN_BYTES = 64 << 10
_MAX_BYTES = 16 << 20
_ROUND_TRIPS_S = 0.3
_ROUND_TRIPS_MIN = 5
# Enough for one message in flight, one to be acknowledged, and one at either end.
_IN_FLIGHT = 4
# A message should take this long, or a round trip; pauses between shorter ones would distort.
_MESSAGE_S = 0.05
# Fraction of the time that is not measured, since the link is still ramping up.
_WARM_UP = 0.4
_TAG = 79


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "bench",
        help="measure all links between the ranks of a torchrun job",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="seconds of transfer in each direction of each link (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def _round_trips(peer: int, first: bool) -> list[float]:
    """Seconds of each at the first rank; empty at the other. Ends when the first has enough."""
    import torch
    import torch.distributed as dist

    ball, going = torch.zeros(1), torch.ones(1)
    if not first:
        while True:
            dist.recv(ball, peer, tag=_TAG)
            if ball.item() < 0:
                return []
            dist.send(ball, peer, tag=_TAG)
    times: list[float] = []
    began_s = time.monotonic()
    # The first round trip includes connecting.
    while len(times) <= _ROUND_TRIPS_MIN or time.monotonic() - began_s < _ROUND_TRIPS_S:
        sent_s = time.monotonic()
        dist.send(going, peer, tag=_TAG)
        dist.recv(ball, peer, tag=_TAG)
        times.append(time.monotonic() - sent_s)
    dist.send(-going, peer, tag=_TAG)
    return times[1:]


def _send(peer: int, seconds: float, round_trip_s: float) -> None:
    """Sends messages of growing size until the time is up; announces each size well ahead."""
    import torch
    import torch.distributed as dist

    # All messages share one buffer, since its contents do not matter.
    buffer = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    acknowledgement = torch.zeros(1)
    works: list[Any] = []

    def send(tensor: Tensor, tag: int) -> None:
        works[:] = [work for work in works if not work.is_completed()]
        works.append(dist.isend(tensor, peer, tag=tag))

    def tell(size: int) -> None:
        send(torch.tensor([size], dtype=torch.int64), _TAG)

    nbytes, in_flight, acked, over = _MIN_BYTES, 0, 0, False
    told = collections.deque([nbytes] * _IN_FLIGHT)
    for size in told:
        tell(size)
    began_s = acked_s = time.monotonic()
    while told:
        # The receiver acknowledges each message. Otherwise the backend would copy many messages,
        # and the last would arrive long after the time is up.
        while in_flight >= _IN_FLIGHT:
            dist.recv(acknowledgement, peer, tag=_TAG + 1)
            in_flight -= 1
            acked += 1
            if acked == _IN_FLIGHT:
                now_s = time.monotonic()
                if (now_s - acked_s) / _IN_FLIGHT < max(_MESSAGE_S, round_trip_s):
                    nbytes = min(2 * nbytes, _MAX_BYTES)
                acked, acked_s = 0, now_s
        send(buffer[: told.popleft()], _TAG + 2)
        in_flight += 1
        if not over:
            over = time.monotonic() - began_s > seconds
            tell(0 if over else nbytes)
            if not over:
                told.append(nbytes)
    for _ in range(in_flight):
        dist.recv(acknowledgement, peer, tag=_TAG + 1)
    for work in works:
        work.wait()


def goodput(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes per second of (time, bytes) of each message, without those of the warm-up.

    The message that begins the measured time is not counted. Returns 0 with fewer than two
    messages.
    """
    if len(arrivals) < 2:
        return 0.0
    began_s, end_s = arrivals[0][0], arrivals[-1][0]
    warm_s = began_s + _WARM_UP * (end_s - began_s)
    # At the latest, the last but one.
    first = next(i for i, (time_s, _) in enumerate(arrivals) if time_s >= warm_s)
    first = min(first, len(arrivals) - 2)
    took_s = end_s - arrivals[first][0]
    return sum(nbytes for _, nbytes in arrivals[first + 1 :]) / took_s if took_s > 0 else 0.0


def _receive(peer: int) -> list[tuple[float, int]]:
    """(time, bytes) of each message. Several receives are always posted ahead, as in a training."""
    import torch
    import torch.distributed as dist

    arrivals = []
    size = torch.zeros(1, dtype=torch.int64)
    buffers = itertools.cycle(torch.empty(_IN_FLIGHT, _MAX_BYTES, dtype=torch.uint8))
    posted: collections.deque[tuple[Any, int]] = collections.deque()
    works: list[Any] = []
    over = False
    while True:
        while not over and len(posted) < _IN_FLIGHT:
            dist.recv(size, peer, tag=_TAG)
            nbytes = int(size.item())
            over = nbytes == 0
            if not over:
                posted.append((dist.irecv(next(buffers)[:nbytes], peer, tag=_TAG + 2), nbytes))
        if not posted:
            break
        work, nbytes = posted.popleft()
        work.wait()
        arrivals.append((time.monotonic(), nbytes))
        works = [work for work in works if not work.is_completed()]
        works.append(dist.isend(torch.zeros(1), peer, tag=_TAG + 1))
    for work in works:
        work.wait()
    return arrivals


_Paths = dict[tuple["PathKind", int], "PathStats"]


def _paths_to(peer: int) -> _Paths:
    from torch_resilient._reports.stats import stats

    for each in stats().peers:
        if each.rank == peer:
            return {path.key: path for path in each.paths}
    return {}


def _used(before: _Paths, after: _Paths) -> dict[str, Any]:
    """The connections and packets that a transfer used, from the sender's paths before and after
    it."""
    nics: dict[tuple[str, str], dict[str, Any]] = {}
    relays: dict[int, dict[str, Any]] = {}
    retransmitted = reconnects = packets = dropped = 0
    for place, path in after.items():
        old = before.get(place)
        if path.datagrams:
            was = old.datagrams if old else None
            packets += path.datagrams.packets - (was.packets if was else 0)
            dropped += path.datagrams.dropped - (was.dropped if was else 0)
        retransmitted += path.chunks_retransmitted - (old.chunks_retransmitted if old else 0)
        reconnects += path.reconnects - (old.reconnects if old else 0)
        nbytes = path.bytes_sent - (old.bytes_sent if old else 0)
        # Heartbeats and small answers are ignored.
        if nbytes <= _MIN_BYTES // 2:
            continue
        if path.relay is not None:
            over = path.relay
            relay = relays.setdefault(over.rank, {"rank": over.rank, "host": over.host, "bytes": 0})
            relay["bytes"] += nbytes
        else:
            key = (path.nic, path.remote_nic)
            nic = nics.setdefault(
                key, {"nic": key[0], "remote_nic": key[1], "connections": 0, "bytes": 0}
            )
            nic["connections"] += 1
            nic["bytes"] += nbytes
    return {
        "connections": sum(nic["connections"] for nic in nics.values()),
        "nics": list(nics.values()),
        "relays": list(relays.values()),
        "chunks_retransmitted": retransmitted,
        "reconnects": reconnects,
        "packets": packets,  # datagrams; of connections only the kernel knows
        "packets_dropped": dropped,
    }


def _passed_on() -> dict[str, int]:
    """The bytes that this rank has passed on for others so far, and all that it has sent.

    The bytes of paths over relays are sent by the connections to the relays, so they count there.
    """
    from torch_resilient._reports.stats import stats

    found = stats()
    paths = [path for peer in found.peers for path in peer.paths if path.relay is None]
    return {
        "bytes": found.relay.bytes,
        "bytes_sent": sum(path.bytes_sent for path in paths),
        "refused": found.relay.refused,
        "held_max_bytes": found.relay.held_max_bytes,
    }


def relays_between(
    before: Sequence[dict[str, int]], after: Sequence[dict[str, int]]
) -> list[dict[str, Any]]:
    """The ranks that have passed on something in between, from _passed_on() of all ranks.

    `share` is the part of all that they have sent; `held_max_bytes` counts from the start.
    """
    rows = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        grown = {key: new[key] - old[key] for key in ("bytes", "bytes_sent", "refused")}
        if grown["bytes"] > 0 or grown["refused"] > 0:
            share = min(1.0, grown["bytes"] / grown["bytes_sent"]) if grown["bytes_sent"] else 0.0
            rows.append(
                {"rank": rank, **grown, "share": share, "held_max_bytes": new["held_max_bytes"]}
            )
    return rows


def _measure(sender: int, receiver: int, seconds: float) -> dict[str, Any] | None:
    """Measures one direction. Both ranks call it; the sender gets the result."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank == receiver:
        _round_trips(sender, first=False)
        told = goodput(_receive(sender))
        dist.send(torch.tensor([told], dtype=torch.float64), sender, tag=_TAG + 3)
        return None
    times_s = _round_trips(receiver, first=True)
    round_trip_s = statistics.median(times_s)
    before = _paths_to(receiver)
    _send(receiver, seconds, round_trip_s)
    rate = torch.zeros(1, dtype=torch.float64)
    dist.recv(rate, receiver, tag=_TAG + 3)
    return {
        "from": sender,
        "to": receiver,
        "round_trip_s": round_trip_s,
        "round_trip_min_s": min(times_s),
        "goodput_bytes_per_s": rate.item(),
        **_used(before, _paths_to(receiver)),
    }


def measure_all(seconds: float) -> list[dict[str, Any]]:
    """Measures all directions of all links of the default group; only rank 0 gets the results.

    Every rank calls it. A direction that failed has `error` instead of numbers.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    mine: list[dict[str, Any]] = []
    for sender in range(size):
        for receiver in range(size):
            if sender == receiver:
                continue
            dist.barrier()
            if rank in (sender, receiver):
                try:
                    measured = _measure(sender, receiver, seconds)
                except RuntimeError as error:
                    measured = {"from": sender, "to": receiver, "error": str(error)}
                if measured is not None and rank == sender:
                    mine.append(measured)
    rows: list[list[dict[str, Any]] | None] = [None] * size
    dist.all_gather_object(rows, mine)
    return [each for row in rows for each in row or []] if rank == 0 else []


def matrix(
    title: str, size: int, links: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]
) -> str:
    """A table of one number of each direction: from the row's rank to the column's."""
    cells = [["-"] * size for _ in range(size)]
    for link in links:
        cells[link["from"]][link["to"]] = "failed" if "error" in link else cell(link)
    width = max(len(text) for row in cells for text in [*row, str(size - 1)])
    lines = [title, "from\\to " + " ".join(str(rank).rjust(width) for rank in range(size))]
    lines += [
        f"{rank:7} " + " ".join(text.rjust(width) for text in row) for rank, row in enumerate(cells)
    ]
    return "\n".join(lines)


def _significant(value: float) -> str:
    """Three significant digits, no exponent: 0.123, 12.3, 1234."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _relay_lines(
    hosts: Sequence[str], links: Sequence[dict[str, Any]], relays: Sequence[dict[str, Any]]
) -> list[str]:
    """One line for each relay."""
    lines = []
    for row in relays:
        served = [
            f"{link['from']} to {link['to']}"
            for link in links
            if any(relay["rank"] == row["rank"] for relay in link.get("relays", ()))
        ]
        lines.append(
            f"relay {row['rank']} ({hosts[row['rank']]}): {row['bytes'] / 1e6:.1f} MB for others, "
            f"{row['share']:.0%} of all it sent, at most {row['held_max_bytes'] / 1e6:.1f} MB "
            f"waiting, {row['refused']} refused; for {', '.join(served) or 'none of the messages'}"
        )
    return lines


def text_of(
    hosts: Sequence[str],
    links: Sequence[dict[str, Any]],
    relays: Sequence[dict[str, Any]] = (),
) -> str:
    """The three tables, with remarks."""
    size = len(hosts)
    lines = [f"rank {rank}: {host}" for rank, host in enumerate(hosts)]
    tables = (
        ("round trip, ms", lambda link: _significant(link["round_trip_s"] * 1e3)),
        ("goodput, MB/s", lambda link: _significant(link["goodput_bytes_per_s"] / 1e6)),
        ("connections used", lambda link: str(link["connections"])),
    )
    for title, cell in tables:
        lines += ["", matrix(title, size, links, cell)]
    notes = []
    for link in links:
        where = f"{link['from']} to {link['to']}"
        if "error" in link:
            notes.append(f"{where}: {link['error']}")
            continue
        if len(link["nics"]) > 1:
            total = sum(nic["bytes"] for nic in link["nics"])
            shares = ", ".join(
                f"{nic['nic']}-{nic['remote_nic']} {nic['bytes'] / total:.0%} on "
                f"{nic['connections']}"
                for nic in link["nics"]
            )
            notes.append(f"{where}: {shares}")
        total = sum(each["bytes"] for each in [*link["nics"], *link["relays"]])
        notes += [
            f"{where}: {relay['bytes'] / total:.0%} over rank {relay['rank']} ({relay['host']})"
            for relay in link["relays"]
        ]
        if link["reconnects"] or link["chunks_retransmitted"]:
            notes.append(
                f"{where}: {link['reconnects']} reconnects, "
                f"{link['chunks_retransmitted']} chunks retransmitted"
            )
        if link["packets_dropped"]:
            dropped, packets = link["packets_dropped"], link["packets"]
            notes.append(f"{where}: {dropped} of {packets} datagrams dropped")
    notes += _relay_lines(hosts, links, relays)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def run(options: argparse.Namespace) -> int:
    """Measures, prints on rank 0; returns the exit status."""
    if not 0.1 <= options.seconds <= 3600:
        return bad_input(
            "bench", ValueError(f"--seconds: expected 0.1 to 3600, got {options.seconds:g}")
        )
    if "RANK" not in os.environ:
        return bad_input(
            "bench",
            ValueError(
                "it runs within a job: torchrun --standalone --nproc-per-node 2 --no-python "
                "torch-resilient bench"
            ),
        )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A rank may be idle until all others are done.
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return bad_input("bench", ValueError("one rank has no links: start at least 2"))
    limit_s = 60 + size * (size - 1) * (options.seconds + 10)
    try:
        dist.init_process_group("resilient", timeout=timedelta(seconds=limit_s))
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname())
        before: list[Any] = [None] * size
        after: list[Any] = [None] * size
        dist.all_gather_object(before, _passed_on())
        links = measure_all(options.seconds)
        dist.all_gather_object(after, _passed_on())
        relays = relays_between(before, after)
        failed = [0 if dist.get_rank() else sum("error" in link for link in links)]
        dist.broadcast_object_list(failed, src=0)
        if dist.get_rank() == 0:
            told = {"hosts": hosts, "links": links, "relays": relays}
            text = json.dumps(told) if options.json else text_of(hosts, links, relays)
            print(text, flush=True)
        dist.barrier()
    except ValueError as error:  # no MASTER_ADDR, or a setting out of range
        return bad_input("bench", error)
    except RuntimeError as error:
        sys.stderr.write(f"torch-resilient bench: {error}\n")
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 1 if failed[0] else 0
