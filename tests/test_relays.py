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
    """Two sites of two hosts each. Each host has a NIC of its own for all traffic, with a limit on
    what it sends to the other site, and one for the store that nothing happens to."""

    def __init__(self, lab: NetworkLab) -> None:
        self.lab = lab
        self.hosts: list[Host] = [lab.host(name) for name in ("a0", "a1", "b0", "b1")]
        self.net: Network = lab.network(self.hosts, delay_s=0.0001)
        self.control = lab.network(self.hosts, name="control")
        self.net.set(direction="a0,a1<->b0,b1", delay_s=DELAY_S)
        for host in self.hosts:
            far = "b0,b1" if host.name.startswith("a") else "a0,a1"
            self.net.share_rate(f"{host.name}->{far}", RATE_BYTES_PER_S)
        self.jobs: list[LabJob] = []

    def cut(self, host: str) -> None:
        """The host's way to the other site drops everything; its site is as before."""
        far = "b0,b1" if host.startswith("a") else "a0,a1"
        self.net.down(direction=f"{host}<->{far}")

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
            sites=["a", "a", "b", "b"],
            port=29400 + len(self.jobs),
        )
        self.jobs.append(made)
        waiting = set(range(4)) if ready else set()
        while waiting:
            row = made.until(lambda row: row["kind"] in ("ready", "error"), "start", PATIENCE_S)
            assert row["kind"] == "ready", row
            waiting.discard(row["rank"])
        return made

    def stream(self, count: int, **settings: Any) -> LabJob:
        """Messages of 1 MiB from a0 to b0."""
        return self.job(
            job="stream", source=0, target=2, count=count, bytes=MESSAGE_BYTES, **settings
        )


@pytest.fixture
def sites(lab: NetworkLab) -> Iterator[Sites]:
    """Sites that end their jobs afterwards."""
    made = Sites(lab)
    yield made
    for job in made.jobs:
        job.close()


def until_message(job: LabJob, number: int) -> None:
    """Returns when that message has arrived; all before it were right."""

    def arrived(row: Row) -> bool:
        assert row["kind"] != "error", row
        if row["kind"] != "message":
            return False
        assert row["right"], row
        return bool(row["number"] >= number)

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
    if relay == "failover":  # nothing before it was needed
        assert sent_over(found[0], 2, relay=1) <= 14 * MESSAGE_BYTES


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
