"""`torch-resilient top`: a live table of the peers and paths of a running job.

The job must run with TORCH_RESILIENT_METRICS, which is off by default: a folder, where each process
makes a socket, or a port.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import pwd
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch_resilient._observe.snapshot import Snapshot
from torch_resilient._reports.stats import (
    DatagramStats,
    PathKind,
    PathStats,
    PeerStats,
    TrustFaults,
)
from torch_resilient.cli.chaos import table
from torch_resilient.cli.errors import bad_input

ABOUT = """\
examples:
  mkdir -p /tmp/job
  TORCH_RESILIENT_METRICS=/tmp/job torchrun --standalone --nproc-per-node 2 train.py
  torch-resilient top /tmp/job                   in another terminal
  torch-resilient top node0:9400 node0:9401      with TORCH_RESILIENT_METRICS=0.0.0.0:9400
  curl --unix-socket /tmp/job/rank00000.*.sock http://localhost/metrics

Each path has one line: its rates in the last interval, and its retransmitted chunks, reconnects and
suspicions since the start of the job. UDP paths have a second table: dropped packets, and how they
were repaired. Below are the events since the command started. Press q to quit.

exit status: 0; 1 if no process answers, or only those of another user; 2 for bad input.
"""

_TIMEOUT_S = 3.0
_EVENTS_SHOWN = 8


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "top",
        help="watch the peers and paths of a running job",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "where",
        nargs="*",
        metavar="WHERE",
        help="folders with sockets, or host:port (default: TORCH_RESILIENT_METRICS; for a port "
        "also the ports after it, up to the first closed one)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between snapshots (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table of two snapshots and exit"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one snapshot of each process as JSON and exit"
    )
    parser.set_defaults(run=run)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _denied(path: str) -> PermissionError:
    """The error of another user's folder or socket."""
    owner = "another user"
    with contextlib.suppress(OSError, KeyError):
        owner = pwd.getpwuid(os.stat(path).st_uid).pw_name
    return PermissionError(
        f"{path}: permission denied: only {owner}, who runs the job, may watch it; run this "
        "command as that user"
    )


def _sockets(folder: str) -> list[str] | None:
    """Paths of the sockets in a folder; None if there is no such folder. Raises PermissionError."""
    try:
        return sorted(each.path for each in os.scandir(folder) if each.name.endswith(".sock"))
    except PermissionError:
        raise _denied(folder) from None
    except OSError:
        return None


def find(where: Sequence[str]) -> list[str]:
    """The endpoints: paths of sockets, and host:port as given. Raises ValueError, and
    PermissionError for a folder that this user may not read."""
    found = []
    for each in where:
        sockets = _sockets(each)
        if sockets is not None:
            found += sockets
        elif "/" in each:
            raise ValueError(f"{each}: no such folder")
        elif each.rpartition(":")[2].isdecimal():
            host, _, port = each.rpartition(":")
            found.append(f"{host or '127.0.0.1'}:{port}")
        else:
            raise ValueError(f"{each}: neither a folder nor host:port")
    return found


def find_all(where: str) -> list[str]:
    """The endpoints for a value of TORCH_RESILIENT_METRICS: those of find(), and for a port also
    the ports after it up to the first closed one, since each rank of a host uses the next port.
    Raises what find() raises.
    """
    found = find([where])
    if "/" in where or Path(where).is_dir():
        return found
    host, _, port = found[0].rpartition(":")
    for following in range(int(port) + 1, 65536):
        try:
            socket.create_connection((host.strip("[]"), following), _TIMEOUT_S).close()
        except OSError:
            break
        found.append(f"{host}:{following}")
    return found


def _connection(endpoint: str) -> http.client.HTTPConnection:
    if "/" in endpoint:
        return _UnixConnection(endpoint)
    host, _, port = endpoint.rpartition(":")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S)


def is_there(endpoint: str) -> bool:
    """Whether a process listens at `endpoint`. A stopped process, or one busy with a long call,
    does not answer, but the kernel accepts connections for it."""
    connection = _connection(endpoint)
    try:
        connection.connect()
    except TimeoutError:  # the backlog is full, or the host is silent: unknown
        return True
    except OSError:
        return False
    finally:
        connection.close()
    return True


def fetch(endpoint: str) -> Snapshot | None:
    """The snapshot of the process at `endpoint`; None if it does not answer with one."""
    connection = _connection(endpoint)
    try:
        connection.request("GET", "/stats")
        answer = connection.getresponse()
        return Snapshot.from_dict(json.loads(answer.read())) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return None
    finally:
        connection.close()


def fetch_all(endpoints: Sequence[str]) -> list[Snapshot]:
    """The snapshots of all processes that answer, by rank."""
    if not endpoints:
        return []
    with ThreadPoolExecutor(min(16, len(endpoints))) as pool:
        told = [each for each in pool.map(fetch, endpoints) if each is not None]
    return sorted(told, key=_order)


def _order(told: Snapshot) -> tuple[float, int]:
    return (float("inf") if told.rank is None else told.rank, told.pid)


def earlier_looks(before: Sequence[Snapshot], now: Sequence[Snapshot]) -> list[Snapshot | None]:
    """For each process of `now`, its earlier snapshot.

    Processes in containers of one host may share a process id; then their ranks distinguish them. A
    process has no rank while it has no default group.
    """
    by_number = collections.defaultdict(list)
    for told in before:
        by_number[told.host, told.pid].append(told)
    found: list[Snapshot | None] = []
    for told in now:
        same = [
            each
            for each in by_number[told.host, told.pid]
            if each.rank == told.rank or None in (each.rank, told.rank)
        ]
        exact = [each for each in same if each.rank == told.rank] or same
        found.append(exact[0] if len(exact) == 1 else None)
    return found


def _paths(
    told: Snapshot | None,
) -> dict[tuple[int, tuple[PathKind, int]], tuple[PeerStats, PathStats]]:
    """(peer, path) by the peer's rank and the path's key."""
    peers = told.peers if told is not None else ()
    return {(peer.rank, path.key): (peer, path) for peer in peers for path in peer.paths}


def _rate(now: int, before: int | None, elapsed_s: float) -> str:
    """MB/s of a counter of bytes."""
    if before is None or elapsed_s <= 0:
        return "-"
    return f"{max(0.0, now - before) / elapsed_s / 1e6:.1f}"


def _share(count: int, packets: int) -> str:
    """Share of the packets sent between two snapshots of a UDP path, in percent."""
    return f"{100 * count / packets:.1f}" if packets > 0 else "-"


def changes(before: Snapshot, now: Snapshot) -> list[str]:
    """The events of one process between two snapshots, for people."""
    found = []
    old = _paths(before)
    # Comparing with the last time alone would fail when the clock is set back.
    known = {(event.time_s, event.text) for event in before.events}
    found += [event.text for event in now.events if (event.time_s, event.text) not in known]
    peers = {peer.rank: peer.state for peer in before.peers}
    for peer in now.peers:
        was = peers.get(peer.rank, "unconnected")
        if was != peer.state:
            why = f": {peer.last_error}" if peer.state in ("dead", "left") else ""
            found.append(f"rank {peer.rank}: {was} -> {peer.state}{why}")
    for key, (peer, path) in _paths(now).items():
        if key not in old:
            continue
        was_path = old[key][1]
        name = f"path {path.name} to rank {peer.rank}"
        reconnects = path.reconnects - was_path.reconnects
        if was_path.state != path.state:
            found.append(f"{name}: {was_path.state} -> {path.state}")
        if reconnects > 0:
            why = f": {path.last_error}" if path.last_error else ""
            times = f" {reconnects} times" if reconnects > 1 else ""
            found.append(f"{name}: reconnected{times}{why}")
        elif path.times_suspect > was_path.times_suspect:
            found.append(f"{name}: was suspect")
    return [f"rank {now.rank}: {text}" for text in found]


def frame(before: Sequence[Snapshot], now: Sequence[Snapshot]) -> str:
    """The table of all processes; rates are those between the two snapshots."""
    old = earlier_looks(before, now)
    rows: list[tuple[str, ...]] = [
        (
            "rank",
            "peer",
            "path",
            "state",
            "sent MB/s",
            "received MB/s",
            "round trip ms",
            "retransmitted",
            "reconnects",
            "times suspect",
            "nics",
        )
    ]
    for told, earlier in zip(now, old, strict=True):
        elapsed_s = told.time_s - earlier.time_s if earlier else 0.0
        old_paths = _paths(earlier)
        name = _rank_name(told)
        for peer in told.peers:
            if not peer.paths:
                rows.append((name, str(peer.rank), "-", peer.state, *["-"] * 7))
            for path in peer.paths:
                _, was = old_paths.get((peer.rank, path.key), (None, None))
                good = peer.state in ("up", "unconnected")
                over = "local"
                if path.relay is not None:
                    over = f"over rank {path.relay.rank}"
                elif path.nic and path.kind != "shm":
                    over = f"{path.nic}-{path.remote_nic}"
                if path.encrypted:
                    over += ", encrypted"
                rows.append(
                    (
                        name,
                        str(peer.rank),
                        path.name,
                        path.state if good else f"{path.state}, rank {peer.state}",
                        _rate(path.bytes_sent, was.bytes_sent if was else None, elapsed_s),
                        _rate(path.bytes_received, was.bytes_received if was else None, elapsed_s),
                        f"{path.round_trip_s * 1e3:.2f}" if path.round_trip_s else "-",
                        str(path.chunks_retransmitted),
                        str(path.reconnects),
                        str(path.times_suspect),
                        over,
                    )
                )
    pending = sum(group.operations_pending for told in now for group in told.groups)
    hosts = ", ".join(sorted({told.host for told in now})) or "no host"
    size = max((told.world_size or 0 for told in now), default=0)
    head = (
        f"{len(now)} of {size or '?'} ranks, on {hosts}; {pending} operations pending; "
        f"{time.strftime('%H:%M:%S')}"
    )
    tables = (_datagrams(old, now), _rdma(now), _relays(old, now), _trust_faults(now))
    more = [table(rows) for rows in tables if rows]
    return "\n\n".join([head, table(rows), *more])


def _rank_name(told: Snapshot) -> str:
    return "?" if told.rank is None else str(told.rank)


def _datagrams(old: Sequence[Snapshot | None], now: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    """The rows of a table of the UDP paths; empty if there are none. Shares refer to the packets
    sent since the `old` snapshot of the same process."""
    rows = []
    for told, earlier in zip(now, old, strict=True):
        old_paths = _paths(earlier)
        for (peer, key), (_, path) in _paths(told).items():
            if path.datagrams is None:
                continue
            _, was = old_paths.get((peer, key), (None, None))
            names = (_rank_name(told), str(peer), path.name)
            rows.append((*names, *_datagram_cells(path.datagrams, was.datagrams if was else None)))
    head = (
        "rank",
        "peer",
        "path",
        "up to",
        "pace MB/s",
        "drop rate %",
        "burst packets",
        "parity %",
        "retransmitted %",
        "recovered",
        "zero-filled",
        "forged",
    )
    return [head, *rows] if rows else []


def _relays(old: Sequence[Snapshot | None], now: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    """The rows of a table of the ranks that relay for others; empty if none does."""
    rows = []
    for told, earlier in zip(now, old, strict=True):
        relay, was = told.relay, earlier.relay if earlier else None
        if relay is None or not (relay.flows or relay.messages or relay.refused):
            continue
        elapsed_s = told.time_s - earlier.time_s if earlier else 0.0
        sent = sum(path.bytes_sent for peer in told.peers for path in peer.paths)
        rows.append(
            (
                _rank_name(told),
                str(relay.flows),
                _rate(relay.bytes, was.bytes if was else None, elapsed_s),
                _share(relay.bytes, sent),
                f"{relay.held_bytes / 1e6:.1f}",
                str(relay.refused),
            )
        )
    head = ("relay", "flows", "for others MB/s", "of all sent %", "waiting MB", "refused")
    return [head, *rows] if rows else []


def _trust_faults(now: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    """The rows of a table of processes with handshakes that have failed; empty if there are
    none."""
    rows = []
    for told in now:
        if told.trust is None:
            continue
        faults = told.trust.faults.to_dict()
        if any(faults.values()):
            rows.append((_rank_name(told), *map(str, faults.values())))
    head = ("failed trust", *(each.name.replace("_", " ") for each in fields(TrustFaults)))
    return [head, *rows] if rows else []


def _rdma(now: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    """The rows of a table of the RDMA paths; empty if there are none."""
    rows = []
    for told in now:
        for (peer, _), (_, path) in _paths(told).items():
            rdma = path.rdma
            if rdma is None or not rdma.device:
                continue
            rows.append(
                (
                    _rank_name(told),
                    str(peer),
                    path.name,
                    f"{rdma.device}-{rdma.remote_device}",
                    str(rdma.port),
                    str(rdma.queue_pair) if rdma.queue_pair else "-",
                    str(rdma.mtu_bytes),
                    str(rdma.completed),
                    str(rdma.failed),
                    f"{rdma.copied_bytes / 1e6:.0f}",
                    f"{rdma.placed_bytes / 1e6:.0f}",
                )
            )
    head = (
        "rank",
        "peer",
        "path",
        "devices",
        "port",
        "queue pair",
        "MTU",
        "completed",
        "failed",
        "copied MB",
        "placed MB",
    )
    return [head, *rows] if rows else []


def _datagram_cells(now: DatagramStats, before: DatagramStats | None) -> tuple[str, ...]:
    packets = now.packets - before.packets if before else 0
    return (
        _burst_text(now.carries_up_to_bytes),
        f"{now.pace_bytes_per_s / 1e6:.1f}",
        f"{100 * now.drop_rate:.2f}",
        f"{now.burst_packets:.1f}",
        _share(now.parity - (before.parity if before else 0), packets),
        _share(now.retransmitted - (before.retransmitted if before else 0), packets),
        str(now.recovered),
        str(now.zero_filled),
        str(now.forged),
    )


def _burst_text(size: int) -> str:
    if size >= 1 << 63:
        return "all"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _cut_to_terminal(text: str) -> str:
    columns, lines = shutil.get_terminal_size()
    shown = [line[:columns] for line in text.splitlines()]
    if len(shown) > lines - 1:
        hidden = len(shown) - lines + 2
        shown = [*shown[: lines - 2], f"... {hidden} more lines: a higher terminal, or --once"]
    return "\n".join(shown)


def run(options: argparse.Namespace) -> int:
    """Shows the table; returns the exit status."""
    where = options.where or [
        each for each in [os.environ.get("TORCH_RESILIENT_METRICS", "")] if each
    ]
    try:
        if not where:
            raise ValueError(
                "where? give the folder or host:port that TORCH_RESILIENT_METRICS names in the "
                "job's environment"
            )
        if not 0.05 <= options.interval <= 3600:
            raise ValueError(f"--interval: expected 0.05 to 3600, got {options.interval:g}")
        look = partial(find, where) if options.where else partial(find_all, where[0])
        endpoints = look()
        before = fetch_all(endpoints)
        if not before:
            for path in endpoints:
                if os.path.exists(path) and not os.access(path, os.W_OK, effective_ids=True):
                    raise _denied(path)
            sys.stderr.write(
                f"torch-resilient top: no process answers at {', '.join(where)}: was the job "
                "started with TORCH_RESILIENT_METRICS set to it, and has it made its group yet?\n"
            )
            return 1
        if options.json:
            print(json.dumps([told.to_dict() for told in before]))
            return 0
        _show(options, look, before)
    except ValueError as error:
        return bad_input("top", error)
    except PermissionError as error:
        bad_input("top", error)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


class _Keyboard:
    """Reads keys without Enter within a `with` block, if this process is in the foreground of a
    terminal at standard input."""

    def __init__(self) -> None:
        self._terminal: int | None = None
        self._settings: list[Any] = []

    def __enter__(self) -> _Keyboard:
        with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):
            terminal = sys.stdin.fileno()
            self._settings = termios.tcgetattr(terminal)
            # The kernel would stop a background process.
            if self._is_background(terminal):
                return self
            tty.setcbreak(terminal, termios.TCSANOW)
            self._terminal = terminal
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            with contextlib.suppress(termios.error):  # it is gone
                termios.tcsetattr(self._terminal, termios.TCSANOW, self._settings)

    @staticmethod
    def _is_background(terminal: int) -> bool:
        try:
            return os.tcgetpgrp(terminal) != os.getpgrp()
        except OSError:  # not the controlling terminal, which alone stops processes
            return False

    def wait_for_q(self, seconds: float) -> bool:
        """Waits that long, or until q is pressed; returns whether it was."""
        end_s = time.monotonic() + seconds
        while self._terminal is not None:
            left_s = end_s - time.monotonic()
            if not select.select([self._terminal], [], [], max(left_s, 0.0))[0]:
                return False
            try:
                keys = os.read(self._terminal, 64)
            except OSError:
                keys = b""
            if b"q" in keys.lower():
                return True
            if not keys:  # standard input has ended
                self._terminal = None
        time.sleep(max(end_s - time.monotonic(), 0.0))
        return False


def _show(
    options: argparse.Namespace, look: Callable[[], list[str]], before: list[Snapshot]
) -> None:
    with _Keyboard() as keyboard:
        _watch(options, look, before, keyboard)


def _watch(
    options: argparse.Namespace,
    look: Callable[[], list[str]],
    before: list[Snapshot],
    keyboard: _Keyboard,
) -> None:
    events: list[str] = []
    terminal = sys.stdout.isatty()
    while not keyboard.wait_for_q(options.interval):
        # Processes may start and end meanwhile.
        now = fetch_all(look())
        clock = time.strftime("%H:%M:%S")
        old = earlier_looks(before, now)
        for told, earlier in zip(now, old, strict=True):
            if earlier is not None:
                events += [f"{clock} {text}" for text in changes(earlier, told)]
        answer = set(map(id, old))
        events += [
            f"{clock} rank {told.rank}: no answer any more"
            for told in before
            if id(told) not in answer
        ]
        if not now and not options.once and not any(map(is_there, look())):
            print("\n".join([*events[-_EVENTS_SHOWN:], "the job has ended"]))
            return
        text = frame(before, now)
        if events:
            text += "\n\n" + "\n".join(events[-_EVENTS_SHOWN:])
        if options.once:
            print(text)
            return
        # Cursor home, the frame with the rest of each line erased, then the rest of the screen.
        erased = _cut_to_terminal(text).replace("\n", "\x1b[K\n")
        sys.stdout.write(f"\x1b[H{erased}\x1b[K\n\x1b[J" if terminal else f"{text}\n\n")
        sys.stdout.flush()
        before = now
