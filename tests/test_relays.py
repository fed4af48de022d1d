"""Messages over a rank of the own site whose NIC stands in: in the lab, with two sites."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from harness import wait_until

from torch_resilient.cli.secret import write_secret
from torch_resilient.testing import Host, LabJob, Network, NetworkLab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("relay_program.py")
RATE_BYTES_PER_S = 5e6
# Ethernet, IP and TCP, which the limit of the lab counts.
WIRE_BYTES_PER_BYTE = 1500 / 1448
DELAY_S = 0.005
MESSAGE_BYTES = 1 << 20
# Much longer than anything here takes, even on a busy machine.
PATIENCE_S = 60.0

Row = dict[str, Any]


class Sites:
    """Two sites of two hosts each, or more. Each host has a NIC of its own for all traffic, with a
    limit on what it sends to the other site, and one for the store that nothing happens to."""

    def __init__(self, lab: NetworkLab, near: int = 2) -> None:
        self.lab = lab
        names = {"a": [f"a{k}" for k in range(near)], "b": ["b0", "b1"]}
        self.hosts: list[Host] = [lab.host(name) for name in names["a"] + names["b"]]
        self.far = {"a": ",".join(names["b"]), "b": ",".join(names["a"])}
        self.net: Network = lab.network(self.hosts, delay_s=0.0001)
        self.control = lab.network(self.hosts, name="control")
        self.net.set(direction=f"{self.far['b']}<->{self.far['a']}", delay_s=DELAY_S)
        for host in self.hosts:
            self.net.share_rate(f"{host.name}->{self.far[host.name[0]]}", RATE_BYTES_PER_S)
        self.jobs: list[LabJob] = []

    def cut(self, host: str) -> None:
        """The host's way to the other site drops everything; its site is as before."""
        self.net.down(direction=f"{host}<->{self.far[host[0]]}")

    def job(self, ready: bool = True, **settings: Any) -> LabJob:
        """One rank on each host; TORCH_RESILIENT_* as uppercase names."""
        names = {f"TORCH_RESILIENT_{k}": v for k, v in settings.items() if k.isupper()}
        settings = {k: v for k, v in settings.items() if not k.isupper()}
        made = LabJob(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            self.hosts,
            self.control,
            environment={
                "PYTHONPATH": str(ROOT),
                "TORCH_RESILIENT_INTERFACE": "eth0",
                "TORCH_RESILIENT_WAN_CONNECTIONS": "2",
                **names,
            },
            sites=[host.name[0] for host in self.hosts],
            port=29400 + len(self.jobs),
        )
        self.jobs.append(made)
        waiting = set(range(len(self.hosts))) if ready else set()
        while waiting:
            row = made.until(lambda row: row["kind"] in ("ready", "error"), "start", PATIENCE_S)
            assert row["kind"] == "ready", row
            waiting.discard(row["rank"])
        return made

    def stream(
        self, count: int, pairs: Sequence[Sequence[int]] = ((0, 2),), **settings: Any
    ) -> LabJob:
        """Messages of 1 MiB from the first to the second rank of each pair: from a0 to b0."""
        return self.job(job="stream", pairs=pairs, count=count, bytes=MESSAGE_BYTES, **settings)


@pytest.fixture
def sites(lab: NetworkLab) -> Iterator[Sites]:
    """Sites that end their jobs afterwards."""
    made = Sites(lab)
    yield made
    for job in made.jobs:
        job.close()


@pytest.fixture
def wide_sites(lab: NetworkLab) -> Iterator[Sites]:
    """The same with three hosts in the first site: ranks 0 to 2, and 3 and 4."""
    made = Sites(lab, near=3)
    yield made
    for job in made.jobs:
        job.close()


def until_message(job: LabJob, number: int, sources: Sequence[int] = (0,)) -> None:
    """Returns when that message of each source has arrived; all before it were right."""
    waiting = set(sources)

    def arrived(row: Row) -> bool:
        assert row["kind"] != "error", row
        if row["kind"] == "message":
            assert row["right"], row
            if row["number"] >= number:
                waiting.discard(row["source"])
        return not waiting

    job.until(arrived, f"message {number}", PATIENCE_S)


def results(job: LabJob, ranks: Sequence[int] = range(4)) -> dict[int, Row]:
    """The last rows of the ranks."""
    job.tell("")
    found: dict[int, Row] = {}
    while set(found) != set(ranks):
        row = job.until(lambda row: row["kind"] in ("result", "error"), "result", PATIENCE_S)
        assert row["kind"] == "result", row
        found[row["rank"]] = row
    return found


def paths(result: Row, peer: int, kind: str) -> list[Row]:
    """The paths of this kind to a peer."""
    (found,) = [each for each in result["peers"] if each["rank"] == peer]
    return [path for path in found["paths"] if path["kind"] == kind]


def sent_over(result: Row, peer: int, relay: int) -> int:
    """Bytes of messages that a rank has sent to a peer over a relay."""
    found = paths(result, peer, "relay")
    return sum(path["bytes_sent"] for path in found if path["relay"]["rank"] == relay)


def test_the_first_pipeline_is_served_first(sites: Sites) -> None:
    # Each has the whole site in turn: one message is there when half the time is over. Otherwise
    # both would take as long. Relays and connections have to be there first.
    limit = str(int(RATE_BYTES_PER_S / WIRE_BYTES_PER_BYTE))
    job = sites.job(job="pipelines", count=200, bytes=MESSAGE_BYTES, WAN_RATE_LIMIT=limit)
    took_s: dict[int, list[float]] = {2: [], 3: []}

    def in_order(row: Row) -> bool:
        assert row["kind"] != "error", row
        if row["kind"] == "message":
            assert row["right"], row
            took_s[row["rank"]].append(row["took_s"])
        return min(map(len, took_s.values())) >= 8 and sum(took_s[2][-8:]) < 0.75 * sum(
            took_s[3][-8:]
        )

    job.until(in_order, "an order of the pipelines", PATIENCE_S)


def test_a_neighbour_that_sends_its_own_is_left_alone(sites: Sites) -> None:
    # Nothing says what the uplinks carry, so nothing could put both pipelines in order.
    job = sites.job(job="pipelines", count=40, bytes=MESSAGE_BYTES)
    arrived = {2: 0, 3: 0}

    def all_arrived(row: Row) -> bool:
        assert row["kind"] != "error", row
        if row["kind"] == "message":
            assert row["right"], row
            arrived[row["rank"]] += 1
        return min(arrived.values()) >= 40

    job.until(all_arrived, "all messages", PATIENCE_S)
    found = results(job)
    for rank, neighbour in ((0, 1), (1, 0)):
        # Until the neighbour has said so, and when it is asked again.
        assert sent_over(found[rank], 2 + rank, relay=neighbour) < 8 * MESSAGE_BYTES


def test_a_neighbour_sends_a_share(sites: Sites) -> None:
    job = sites.stream(24)
    until_message(job, 23)
    found = results(job)
    own = sum(path["bytes_sent"] for path in paths(found[0], 2, "tcp"))
    over = sent_over(found[0], 2, relay=1)
    # Half of it by what the NICs can do; the first messages go by what is known.
    assert over > 24 * MESSAGE_BYTES / 5, (own, over)
    assert own > 24 * MESSAGE_BYTES / 5, (own, over)
    assert found[1]["relay"]["messages"] > 0
    assert found[1]["relay"]["bytes"] > over
    assert found[3]["relay"]["bytes"] < MESSAGE_BYTES  # pings
    assert all(each["relay"]["held_bytes"] == 0 for each in found.values())


@pytest.mark.parametrize("relay", ["auto", "failover"])
def test_a_dead_uplink_in_mid_message(sites: Sites, relay: str) -> None:
    job = sites.stream(16, RELAY=relay)
    until_message(job, 5)
    sites.cut("a0")
    until_message(job, 15)
    found = results(job)
    assert sent_over(found[0], 2, relay=1) >= 8 * MESSAGE_BYTES
    # The peer's neighbour is reached over the dead uplink: what goes there is late.
    assert sent_over(found[0], 2, relay=3) == 0
    if relay == "failover":  # nothing before it was needed
        assert sent_over(found[0], 2, relay=1) <= 14 * MESSAGE_BYTES


def test_a_relay_cannot_read_what_it_carries(sites: Sites, tmp_path: Path) -> None:
    """Also when every connection to the peer is gone."""
    secret = tmp_path / "secret"
    write_secret(secret)
    job = sites.stream(16, SECRET_FILE=str(secret), ENCRYPTION="required")
    until_message(job, 5)
    sites.cut("a0")
    until_message(job, 15)
    found = results(job)
    assert sent_over(found[0], 2, relay=1) >= 8 * MESSAGE_BYTES
    for each in paths(found[0], 2, "relay") + paths(found[2], 0, "relay"):
        assert each["encrypted"]
        assert each["cipher"] == "AES-256-GCM"
        assert each["forward_secret"]


def test_the_uplink_of_the_receiver_is_dead(sites: Sites) -> None:
    """Its own site has a way to it, so the sender goes over there."""
    job = sites.stream(16)
    until_message(job, 3)
    sites.cut("b0")
    until_message(job, 15)
    assert sent_over(results(job)[0], 2, relay=3) >= 8 * MESSAGE_BYTES


def kill(sites: Sites) -> None:
    sites.hosts[1].call(os.kill, sites.jobs[-1].processes[1].pid, signal.SIGKILL)


def stop(sites: Sites) -> None:
    sites.hosts[1].call(os.kill, sites.jobs[-1].processes[1].pid, signal.SIGSTOP)


def unplug(sites: Sites) -> None:
    sites.net.down("carrier", end="a1")


def lose_uplink(sites: Sites) -> None:
    sites.cut("a1")


@pytest.mark.parametrize("fault", [kill, stop, unplug, lose_uplink])
def test_a_relay_that_fails_in_mid_message(sites: Sites, fault: Callable[[Sites], None]) -> None:
    job = sites.stream(24)
    until_message(job, 7)
    fault(sites)
    until_message(job, 23)


def test_a_relay_that_flaps(sites: Sites) -> None:
    job = sites.stream(40)
    until_message(job, 3)
    sites.lab.play(
        [
            step
            for k in range(8)
            for step in (
                (0.6 * k, lambda: sites.net.down("carrier", end="a1")),
                (0.6 * k + 0.3, lambda: sites.net.up(end="a1")),
            )
        ]
    )
    until_message(job, 39)


def test_a_relay_whose_program_is_busy_goes_on(sites: Sites) -> None:
    """Its interpreter is never idle, and the engine does not need it."""
    job = sites.stream(16, busy=[1, 3])
    until_message(job, 15)
    sites.cut("a0")
    found = results(job, ranks=[0, 2])
    assert sent_over(found[0], 2, relay=1) > 3 * MESSAGE_BYTES


def test_a_site_with_one_gateway_trains(sites: Sites) -> None:
    """The bits are those of a job with all ways."""
    told = []
    for gateway in (False, True):
        if gateway:
            sites.cut("a0")
        job = sites.job(job="train", count=6, ready=not gateway)
        rows = [
            job.until(lambda row: row["kind"] in ("trained", "error"), "training", PATIENCE_S)
            for _ in range(4)
        ]
        assert {row["kind"] for row in rows} == {"trained"}, rows
        told.append(({tuple(row["losses"]) for row in rows}, {row["weights"] for row in rows}))
        job.close()
    assert told[0] == told[1]
    assert len(told[0][0]) == len(told[0][1]) == 1


def test_without_any_way_the_error_names_the_ways(sites: Sites) -> None:
    job = sites.stream(1000, timeout_s=6)
    until_message(job, 3)
    sites.cut("a0")
    sites.cut("a1")
    row = job.until(lambda row: row["kind"] == "error" and row["rank"] == 0, "error", PATIENCE_S)
    assert "rank 2" in row["text"]
    ways = row["text"].partition("over relays: ")[2]
    assert "rank 1 (host a1" in ways, row["text"]
    assert "rank 3 (host b1" in ways, row["text"]


@pytest.mark.parametrize("relay", ["auto", "failover"])
def test_a_site_cut_in_two(wide_sites: Sites, relay: str) -> None:
    """Nothing joins its halves: that is an error with names. Both still reach the other site."""
    job = wide_sites.stream(400, pairs=[(0, 3), (1, 2)], timeout_s=8, RELAY=relay, pause_s=0.02)
    until_message(job, 3, sources=[0, 1])
    wide_sites.net.down(direction="a0,a1<->a2")
    # The sends have ended with copies, as long as there is memory for these.
    row = job.until(lambda row: row["kind"] == "error", "error", PATIENCE_S)
    text = row["text"]
    assert row["rank"] == 2, row
    assert "rank 1 (host a1" in text, text
    assert "path 0" in text, text  # the ways
    # Within a site, ranks relay for each other only if nothing else works.
    assert ("over relays: rank 0 (host a0" in text) == (relay == "failover"), text
    job.until(
        lambda row: row["kind"] == "message" and row["source"] == 0 and row["right"],
        "a message to the other site",
        PATIENCE_S,
    )


def test_within_a_site_a_neighbour_stands_in(wide_sites: Sites) -> None:
    job = wide_sites.stream(60, pairs=[(0, 2)], RELAY="failover", pause_s=0.02)
    until_message(job, 3)
    wide_sites.net.down(direction="a0<->a2")
    until_message(job, 59)
    assert sent_over(results(job, range(5))[0], 2, relay=1) >= 20 * MESSAGE_BYTES


def test_a_relay_leaves_the_job(sites: Sites) -> None:
    """It destroys its process group, while the others train on in a group without it.

    Traffic goes on: it asks the others for no more, and leaves once it has passed on what it holds.
    Without that, it would leave after three quarters of the linger time, when all is over.
    """
    told = []
    for leaves in (False, True):
        job = sites.job(job="train", count=16, members=[0, 2, 3], width=1024, LINGER_S="60")
        if leaves:
            job.until(
                lambda row: row["kind"] == "step" and row["number"] == 3, "step 3", PATIENCE_S
            )
            stdin = job.processes[1].stdin
            assert stdin is not None
            stdin.write("\n")
            stdin.flush()
        rows: dict[int, Row] = {}
        kinds: list[str] = []

        def trained(row: Row, rows: dict[int, Row] = rows, kinds: list[str] = kinds) -> bool:
            assert row["kind"] != "error", row
            if row["kind"] == "leaves":
                assert row["relay"]["messages"] > 0  # it was in use
            kinds.append(row["kind"])
            if row["kind"] == "trained":
                rows[row["rank"]] = row
            return set(rows) == {0, 2, 3}

        job.until(trained, "training", PATIENCE_S)
        assert ("left" in kinds) == leaves
        if leaves:
            assert "step" in kinds[kinds.index("left") :]
        told.append(
            (
                {rank: row["losses"] for rank, row in rows.items()},
                {row["weights"] for row in rows.values()},
            )
        )
        job.close()
    assert told[0] == told[1]
    assert len(told[0][1]) == 1


@pytest.mark.parametrize("where", ["everywhere", "relay"])
def test_off_means_off(sites: Sites, where: str) -> None:
    """Either nobody uses relays, or one rank refuses to be one."""
    off: Row = {"RELAY": "off"} if where == "everywhere" else {"off": [1]}
    job = sites.stream(6, LOG_LEVEL="info", **off)
    until_message(job, 5)
    found = results(job)
    if where == "everywhere":
        assert not any(paths(found[0], peer, "relay") for peer in (1, 2, 3))
    else:
        assert not [path for path in paths(found[0], 2, "relay") if path["relay"]["rank"] == 1]
        wait_until(lambda: "RELAY=off" in job.words(0), "the reason in the log")
    assert found[1]["relay"]["messages"] == 0
