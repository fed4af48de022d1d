"""A snapshot of a process as text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from typing import get_args

from torch_resilient._observe.snapshot import Snapshot
from torch_resilient._reports.stats import (
    DatagramStats,
    ListenerStats,
    PathState,
    PathStats,
    PeerState,
    PeerStats,
    RdmaStats,
    RelayCounts,
    TrustStats,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PATH_STATES: tuple[PathState, ...] = get_args(PathState)
PEER_STATES: tuple[PeerState, ...] = get_args(PeerState)

# (attribute of stats(), type, help). The metric has the attribute's name, with units spelled out
# as Prometheus does; a counter's name ends in `_total`.
_OF_PATHS = (
    ("bytes_sent", "counter", "Bytes of messages sent, retransmissions included."),
    ("bytes_received", "counter", "Bytes of messages received."),
    ("chunks_sent", "counter", "Chunks of messages sent."),
    ("chunks_retransmitted", "counter", "Of these, retransmissions."),
    ("reconnects", "counter", "Times the connection was made again."),
    ("times_suspect", "counter", "Times it was silent for too long."),
    ("encrypted", "gauge", "1 if nothing of it leaves the host in plaintext."),
    ("forward_secret", "gauge", "1 if the job's secret cannot decrypt a recording of it."),
    ("round_trip_s", "gauge", "Smoothed round trip, 0 while unknown."),
    ("goodput_bytes_per_s", "gauge", "Smoothed rate of acknowledged bytes."),
    ("capacity_bytes_per_s", "gauge", "Estimate of what it could carry, 0 while unknown."),
)
_OF_DATAGRAMS = (
    ("packets", "counter", "Packets sent, of any kind."),
    ("bytes", "counter", "Bytes of these, with all headers."),
    ("parity", "counter", "Of these packets, parity."),
    ("retransmitted", "counter", "Of these packets, retransmissions."),
    ("dropped", "counter", "Of these packets, dropped on the way, as the peer reports."),
    ("drop_rate", "gauge", "Fraction of the packets dropped lately."),
    ("pace_bytes_per_s", "gauge", "The rate at which packets may leave."),
    ("carries_up_to_bytes", "gauge", "Bytes of the largest burst whose messages go as datagrams."),
    ("recovered", "counter", "Received packets restored from parity."),
    ("zero_filled", "counter", "Received packets replaced by zeros within a tolerance."),
    ("forged", "counter", "Datagrams discarded: the peer had not sealed them."),
)
_OF_RDMA = (
    ("completed", "counter", "Requests of RDMA queue pairs that were completed."),
    ("failed", "counter", "Requests that failed, and ended their path."),
    ("sends", "counter", "Sends posted."),
    ("receives", "counter", "Receives posted."),
    ("reads", "counter", "Reads of the peer's memory posted."),
    ("copied_bytes", "counter", "Bytes of frames copied into and out of the path's memory."),
    ("read_bytes", "counter", "Payload read from tensors of the peer."),
    ("placed_bytes", "counter", "Of these bytes, those read straight into tensors."),
)
_OF_RELAY = (
    ("flows", "gauge", "Paths that other ranks have over this one."),
    ("messages", "counter", "Parts of messages passed on for others."),
    ("bytes", "counter", "Bytes of these, with headers."),
    ("held_bytes", "gauge", "Bytes in memory for it, also of what others have passed on to us."),
    ("held_max_bytes", "gauge", "The most that these bytes have been so far."),
    ("refused", "counter", "Messages and flows that were refused."),
)
_OF_PEERS = (
    ("messages_sent", "counter", "Messages acknowledged completely."),
    ("messages_received", "counter", "Messages received completely."),
    ("bytes_sent", "counter", "Bytes of messages sent."),
    ("bytes_received", "counter", "Bytes of messages received, each counted once."),
)
_LISTENER_OUTCOMES = ("admitted", "refused", "timed_out", "broken_off", "dropped")


def metric_name(prefix: str, attribute: str, kind: str) -> str:
    """The metric of one attribute, without `torch_resilient_`."""
    name = f"{prefix}_{attribute}"
    if name.endswith("_s"):
        name = f"{name.removesuffix('_s')}{'_second' if name.endswith('_per_s') else '_seconds'}"
    return f"{name}_total" if kind == "counter" else name


def _label(value: object) -> str:
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{text}"'


class _Text:
    """Metrics in the order of their first sample, each with its head once."""

    def __init__(self, rank: object) -> None:
        self._rank = rank
        self._metrics: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, text: str, value: float, /, **labels: object) -> None:
        full = f"torch_resilient_{name}"
        if full not in self._metrics:
            self._metrics[full] = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        given = {"rank": self._rank, **labels}
        written = ",".join(f"{key}={_label(each)}" for key, each in given.items())
        self._metrics[full].append(f"{full}{{{written}}} {float(value)!r}")

    def add_all(
        self,
        prefix: str,
        rows: tuple[tuple[str, str, str], ...],
        values: PathStats | DatagramStats | RdmaStats | RelayCounts | PeerStats,
        /,
        **labels: object,
    ) -> None:
        for attribute, kind, text in rows:
            value = getattr(values, attribute)
            self.add(metric_name(prefix, attribute, kind), kind, text, value, **labels)

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def render(snapshot: Snapshot) -> str:
    """`snapshot` in the text format."""
    out = _Text("" if snapshot.rank is None else snapshot.rank)
    out.add(
        "info",
        "gauge",
        "Always 1; the labels tell of the process.",
        1,
        version=snapshot.version,
        host=snapshot.host,
        pid=snapshot.pid,
        world_size=snapshot.world_size,
    )
    for group in snapshot.groups:
        text = "Operations that have begun and not ended."
        pending = group.operations_pending
        out.add("operations_pending", "gauge", text, pending, group=group.group)
        text = "Collectives that were begun."
        out.add("collectives_total", "counter", text, group.collectives, group=group.group)
    for peer in snapshot.peers:
        _add_peer(out, peer)
    if snapshot.listener is not None:
        _add_listener(out, snapshot.listener)
    if snapshot.relay is not None:
        out.add_all("relay", _OF_RELAY, snapshot.relay)
    if snapshot.trust is not None:
        _add_trust(out, snapshot.trust)
    return out.text()


def _add_peer(out: _Text, peer: PeerStats) -> None:
    labels = {"peer": peer.rank, "peer_host": peer.host}
    text = "1 for the state it is in."
    for state in PEER_STATES:
        out.add("peer_state", "gauge", text, peer.state == state, **labels, state=state)
    out.add_all("peer", _OF_PEERS, peer, **labels)
    heard = peer.last_heard_seconds_ago
    if heard is not None:
        text = "Since the last sign of life."
        out.add("peer_last_heard_seconds_ago", "gauge", text, heard, **labels)
    for path in peer.paths:
        _add_path(out, peer.rank, path)


def _add_path(out: _Text, peer: int, path: PathStats) -> None:
    where = {
        "peer": peer,
        "kind": path.kind,
        "index": path.index,
        "nic": path.nic,
        "remote_nic": path.remote_nic,
    }
    text = "1 for the state it is in."
    for state in PATH_STATES:
        out.add("path_state", "gauge", text, path.state == state, **where, state=state)
    out.add_all("path", _OF_PATHS, path, **where)
    if path.datagrams is not None:
        out.add_all("datagrams", _OF_DATAGRAMS, path.datagrams, **where)
    if path.rdma is not None:
        devices = {"device": path.rdma.device, "remote_device": path.rdma.remote_device}
        out.add_all("rdma", _OF_RDMA, path.rdma, **where, **devices)


def _add_listener(out: _Text, listener: ListenerStats) -> None:
    text = "Callers at the listening port, by what became of them."
    for outcome in _LISTENER_OUTCOMES:
        out.add("callers_total", "counter", text, getattr(listener, outcome), outcome=outcome)


def _add_trust(out: _Text, trust: TrustStats) -> None:
    text = "1 if a secret was given to the job; else the store tells it to everybody."
    out.add("own_secret", "gauge", text, trust.own_secret)
    text = "Handshakes that have ended well, of both directions."
    for encrypted, count in ((1, trust.encrypted), (0, trust.plaintext)):
        out.add("handshakes_total", "counter", text, count, encrypted=encrypted)
    text = "Failed handshakes, and encrypted connections that were changed, by reason."
    for reason, count in trust.faults.to_dict().items():
        out.add("trust_faults_total", "counter", text, count, reason=reason)
