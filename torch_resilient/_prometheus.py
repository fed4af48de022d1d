"""A snapshot of a process as text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# As in csrc/delegate/group.h.
PATH_STATES = (
    "up",
    "reserve",
    "suspect",
    "stalled",
    "proving",
    "connecting",
    "down",
    "unused",
)
PEER_STATES = ("unconnected", "up", "suspect", "dead", "left")

# (name, type, help, key of the path); units are Prometheus's: seconds, bytes.
_OF_PATHS = (
    ("sent_bytes_total", "counter", "Bytes of messages sent, repeats included.", "bytes_sent"),
    ("received_bytes_total", "counter", "Bytes of messages received.", "bytes_received"),
    ("chunks_sent_total", "counter", "Chunks of messages sent.", "chunks_sent"),
    ("chunks_retransmitted_total", "counter", "Of these, repeats.", "chunks_retransmitted"),
    ("reconnects_total", "counter", "Times the connection was made again.", "reconnects"),
    ("suspected_total", "counter", "Times it was silent for too long.", "times_suspect"),
    ("round_trip_seconds", "gauge", "Smoothed round trip, 0 while unknown.", "round_trip_s"),
    (
        "goodput_bytes_per_second",
        "gauge",
        "Smoothed rate of acknowledged bytes.",
        "goodput_bytes_per_s",
    ),
    (
        "capacity_bytes_per_second",
        "gauge",
        "What it would carry, 0 while unknown.",
        "capacity_bytes_per_s",
    ),
)
_OF_DATAGRAMS = (
    ("sent_packets_total", "counter", "Packets sent, of any kind.", "packets"),
    ("sent_bytes_total", "counter", "Bytes of these, with all headers.", "bytes"),
    ("sent_parity_total", "counter", "Of these packets, parity.", "parity"),
    ("retransmitted_total", "counter", "Of these packets, repeats.", "retransmitted"),
    ("lost_total", "counter", "Of these packets, lost, as the peer says.", "lost"),
    ("loss_ratio", "gauge", "Part of the packets that was lost lately.", "loss_rate"),
    ("pace_bytes_per_second", "gauge", "How fast packets may leave.", "pace_bytes_per_s"),
    ("recovered_total", "counter", "Packets that parity has brought back here.", "recovered"),
    ("zero_filled_total", "counter", "Packets that were tolerated as zeros here.", "zero_filled"),
    ("forged_total", "counter", "Datagrams dropped: the peer had not sealed them.", "forged"),
)
_OF_PEERS = (
    ("messages_sent_total", "counter", "Messages acknowledged whole.", "messages_sent"),
    ("messages_received_total", "counter", "Messages received whole.", "messages_received"),
    ("sent_bytes_total", "counter", "Bytes of messages sent.", "bytes_sent"),
    ("received_bytes_total", "counter", "Bytes of messages received, once.", "bytes_received"),
)
_LISTENER_OUTCOMES = ("admitted", "refused", "timed_out", "broken_off", "dropped")


def _label(value: object) -> str:
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{text}"'


class _Text:
    """Metrics in the order of their first sample, each with its head once."""

    def __init__(self, rank: object) -> None:
        self._rank = rank
        self._metrics: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, text: str, value: float, **labels: object) -> None:
        full = f"torch_resilient_{name}"
        if full not in self._metrics:
            self._metrics[full] = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        given = {"rank": self._rank, **labels}
        written = ",".join(f"{key}={_label(each)}" for key, each in given.items())
        self._metrics[full].append(f"{full}{{{written}}} {float(value)!r}")

    def add_all(
        self,
        prefix: str,
        rows: Iterable[tuple[str, str, str, str]],
        values: Mapping[str, Any],
        **labels: object,
    ) -> None:
        for name, kind, text, key in rows:
            self.add(f"{prefix}_{name}", kind, text, values[key], **labels)

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def render(snapshot: Mapping[str, Any]) -> str:
    """The text for `snapshot`, which is that of torch_resilient._snapshot.snapshot()."""
    rank = "" if snapshot["rank"] is None else snapshot["rank"]
    out = _Text(rank)
    about = {key: snapshot[key] for key in ("version", "host", "pid", "world_size")}
    out.add("info", "gauge", "Always 1; the labels tell of the process.", 1, **about)
    for group in snapshot["groups"]:
        name = group["group"]
        out.add(
            "operations_pending",
            "gauge",
            "Operations that have begun and not ended.",
            group["operations_pending"],
            group=name,
        )
        out.add(
            "collectives_total",
            "counter",
            "Collectives that were begun.",
            group["collectives"],
            group=name,
        )
    for peer in snapshot["peers"]:
        labels = {"peer": peer["rank"], "peer_host": peer["host"]}
        for state in PEER_STATES:
            now = peer["state"] == state
            out.add("peer_state", "gauge", "1 for the state it is in.", now, **labels, state=state)
        out.add_all("peer", _OF_PEERS, peer, **labels)
        heard = peer["last_heard_seconds_ago"]
        if heard is not None:
            text = "Since the last sign of life."
            out.add("peer_silent_seconds", "gauge", text, heard, **labels)
        for path in peer["paths"]:
            where = {
                "peer": peer["rank"],
                "path": path["slot"],
                "nic": path["nic"],
                "peer_nic": path["remote_nic"],
            }
            for state in PATH_STATES:
                now = path["state"] == state
                text = "1 for the state it is in."
                out.add("path_state", "gauge", text, now, **where, state=state)
            out.add_all("path", _OF_PATHS, path, **where)
            if path.get("datagrams"):
                out.add_all("datagrams", _OF_DATAGRAMS, path["datagrams"], **where)
    if listener := snapshot["listener"]:
        for outcome in _LISTENER_OUTCOMES:
            text = "Callers at the listening port, by what became of them."
            out.add("callers_total", "counter", text, listener[outcome], outcome=outcome)
    return out.text()
