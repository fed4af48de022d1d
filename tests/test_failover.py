"""Jobs over two interfaces in the lab: whatever fails, nothing is lost and the numbers stay."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from harness import wait_until

from torch_resilient.cli.secret import write_secret
from torch_resilient.testing import Host, LabJob, Network, NetworkLab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("failover_program.py")
LINK = {"delay_s": 0.001, "rate_bytes_per_s": 12.5e6}
# Much longer than anything here takes, even on a busy machine.
PATIENCE_S = 60.0
# An attempt to connect takes 5 s at most.
CROSSING_S = 10.0
# Far longer than a failover takes, and half of a stall timeout that is set to twice this.
FAILOVER_S = 5.0
# Rounds of a job that must not be over before the test, which may be late, is done with it.
ENDLESS = 100_000

Row = dict[str, Any]


class Job(LabJob):
    """Two ranks on two hosts; rows of either as they come."""

    def __init__(
        self,
        hosts: Sequence[Host],
        control: Network,
        settings: Row,
        environment: dict[str, str],
        sites: Sequence[str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.results: dict[int, Row] = {}
        super().__init__(
            [*prefix, sys.executable, str(PROGRAM), json.dumps(settings)],
            hosts,
            control,
            environment={
                "PYTHONPATH": str(ROOT),
                "TORCH_RESILIENT_INTERFACE": "eth0,eth1",
                **environment,
            },
            sites=sites,
        )

    def until(
        self, condition: Callable[[Row], bool], what: str, timeout_s: float = PATIENCE_S
    ) -> Row:
        def keep(row: Row) -> bool:
            if row["kind"] in ("result", "error"):
                self.results[row["rank"]] = row
            return condition(row)

        return super().until(keep, what, timeout_s)

    def step(self, number: int) -> None:
        self.until(lambda row: row.get("step", -1) >= number, f"step {number}")

    def end(self) -> list[Row]:
        """The results of the two ranks."""
        while len(self.results) < len(self.processes):
            self.until(lambda row: row["kind"] in ("result", "error"), "result")
        return [self.results[rank] for rank in range(len(self.processes))]


class Bed:
    """Two hosts with two links, and a way for the store that nothing happens to."""

    def __init__(self, lab: NetworkLab) -> None:
        self.hosts = [lab.host("a"), lab.host("b")]
        self.links = [lab.link(*self.hosts, **LINK), lab.link(*self.hosts, **LINK)]
        self.control = lab.link(*self.hosts, name="control")
        self.jobs: list[Job] = []

    def job(self, job: str, count: int, pause_s: float, **environment: str) -> Job:
        settings = {"job": job, "count": count, "pause_s": pause_s}
        if "timeout_s" in environment:
            settings["timeout_s"] = float(environment.pop("timeout_s"))
        made = Job(self.hosts, self.control, settings, environment)
        self.jobs.append(made)
        return made


@pytest.fixture
def bed(lab: NetworkLab) -> Iterator[Bed]:
    """A bed that ends its jobs afterwards."""
    made = Bed(lab)
    yield made
    for job in made.jobs:
        job.close()


def received(row: Row) -> bool:
    """A message has arrived; the sender may be far ahead."""
    return row["kind"] == "message" and row["rank"] == 1


def states_on(row: Row, nic: str) -> set[str]:
    """Those of its connections; datagrams beside them come and go with these."""
    paths = [path for path in row.get("paths", []) if path["kind"] == "tcp"]
    return {path["state"] for path in paths if path["nic"] == nic}


def sent_on(result: Row, nic: str) -> int:
    return sum(path["bytes_sent"] for path in result["paths"] if path["nic"] == nic)


@pytest.mark.parametrize(
    ("encryption", "wan"), [("off", "tcp"), ("required", "tcp"), ("off", "auto")]
)
def test_training_goes_on_bit_for_bit_through_every_kind_of_failure(
    bed: Bed, tmp_path: Path, encryption: str, wan: str
) -> None:
    seed = 1
    print(f"seed {seed}")
    chance = random.Random(seed)
    steps = 60
    quiet = bed.job("train", steps, 0.0)
    expected = quiet.end()
    quiet.close()
    variables = {"TORCH_RESILIENT_ENCRYPTION": encryption, "TORCH_RESILIENT_WAN": wan}
    if encryption == "required":
        secret = tmp_path / "secret"
        write_secret(secret)
        variables["TORCH_RESILIENT_SECRET_FILE"] = str(secret)
    job = bed.job("train", steps, 0.01, **variables)
    faults = [
        ("blackhole", None),
        ("admin", "a"),
        ("blackhole", "a->b"),
        ("carrier", "b"),
        ("admin", "b"),
    ]
    for number, (kind, end) in enumerate(faults):
        job.step(5 + 10 * number)
        link = bed.links[chance.randrange(2)]
        if end is not None and "->" in end:
            link.down(kind, direction=end)
        else:
            link.down(kind, end=end)
        job.step(11 + 10 * number)  # the job does not wait for it to heal
        link.up()
    for result, before in zip(job.end(), expected, strict=True):
        assert result["kind"] == "result", result
        assert result["losses"] == before["losses"]
        assert result["weights"] == before["weights"]
        paths = result["paths"]
        standing = {p["encrypted"] for p in paths if p["kind"] == "tcp" and p["local_address"]}
        assert standing == {encryption == "required"}
        carried = sum(p["bytes_sent"] for p in paths if p["kind"] == "udp")
        assert (carried > 0) == (wan == "auto")


@pytest.mark.parametrize(("kind", "end"), [("admin", "a"), ("admin", "b"), ("blackhole", None)])
def test_interface_on_probation_takes_over_when_all_others_fail(
    bed: Bed, lab: NetworkLab, kind: str, end: str | None
) -> None:
    others = [bed.links[1], lab.link(*bed.hosts, name="third", **LINK)]
    job = bed.job(
        "exchange",
        ENDLESS,
        0.005,
        TORCH_RESILIENT_INTERFACE="eth0,eth1,third",
        TORCH_RESILIENT_WAN_CONNECTIONS="1",
        TORCH_RESILIENT_STALL_TIMEOUT_S=str(2 * FAILOVER_S),
        # A busy machine must not look like a silent network.
        TORCH_RESILIENT_SUSPECT_AFTER_S="0.15",
    )

    def has(row: Row, rank: int, *states: str) -> bool:
        seen = states_on(row, "eth0")
        return row["rank"] == rank and bool(seen) and seen <= {*states}

    for rank in (0, 1):
        job.until(lambda row, rank=rank: has(row, rank, "up"), "eth0 carries")
    for _ in range(7):  # each time on probation for twice as long, at last for 10 s or more
        bed.links[0].down("admin")
        for rank in (0, 1):
            job.until(lambda row, rank=rank: has(row, rank, "down", "connecting"), "eth0 is lost")
        bed.links[0].up()
        for rank in (0, 1):
            job.until(lambda row, rank=rank: has(row, rank, "proving", "up"), "eth0 is back")
    for rank in (0, 1):
        job.until(lambda row, rank=rank: has(row, rank, "proving"), "eth0 is on probation")
    times_s: list[float] = []

    def rounds_since(moment_s: float, count: int) -> Callable[[Row], bool]:
        def enough(row: Row) -> bool:
            assert row.get("wrong") == 0, row
            if row["rank"] == 0:
                times_s.append(row["time_s"])
            return sum(time_s > moment_s for time_s in times_s) >= count

        return enough

    job.until(rounds_since(0.0, 1), "a round before the fault")
    for link in others:
        link.down(kind, end=end)
    job.until(rounds_since(time.monotonic(), 20), "20 rounds after the fault")
    assert max(after - before for before, after in itertools.pairwise(times_s)) < FAILOVER_S


def test_job_waits_while_no_path_is_left_and_goes_on(bed: Bed) -> None:
    job = bed.job("stream", ENDLESS, 0.01)
    job.until(lambda row: row.get("number", -1) >= 10, "message 10")
    for link in bed.links:
        link.down("blackhole")
    last = -1
    with contextlib.suppress(RuntimeError):
        while True:  # rows that had arrived still come; then silence
            last = job.until(received, "message", timeout_s=1.5)["number"]
    assert all(process.poll() is None for process in job.processes)
    bed.links[1].up()
    row = job.until(lambda row: received(row) and row["number"] > last + 30, "30 more messages")
    assert row["wrong"] == 0


def test_job_that_has_no_path_for_too_long_names_the_culprit(bed: Bed) -> None:
    job = bed.job("exchange", ENDLESS, 0.01, timeout_s="4")
    job.until(lambda row: row.get("number", -1) >= 10, "round 10")
    for link in bed.links:
        link.down("blackhole")
    for rank, result in enumerate(job.end()):
        assert result["kind"] == "error", result
        assert f"rank {1 - rank}" in result["text"]
        # A connection that stands and is silent is not up.
        assert re.search(r"0 of \d paths up", result["text"]), result["text"]
        silent = r"path \d \(eth\d\): silent for [\d.]+ (?:ms|s)"
        assert re.search(silent, result["text"]), result["text"]
        assert result["peer"]["state"] == "suspect"
        assert "stalled" in {path["state"] for path in result["peer"]["paths"]}


@pytest.mark.skipif(shutil.which("iptables") is None, reason="there is no iptables to refuse with")
def test_firewall_that_refuses_on_one_way_is_no_death_while_the_other_is_silent(bed: Bed) -> None:
    job = bed.job(
        "exchange",
        ENDLESS,
        0.01,
        TORCH_RESILIENT_WAN="tcp",  # it refuses connections only
        TORCH_RESILIENT_WAN_CONNECTIONS="1",
    )

    def lost(row: Row) -> bool:
        states = states_on(row, "eth0")
        return bool(states) and states <= {"down", "connecting"}

    job.until(lambda row: row.get("number", -1) >= 10, "round 10")
    bed.links[0].down("blackhole")
    for rank in (0, 1):
        job.until(lambda row, rank=rank: lost(row) and row["rank"] == rank, "eth0 is lost")
    rule = "INPUT -i eth1 -p tcp --tcp-flags RST NONE -j REJECT --reject-with tcp-reset"
    for host in bed.hosts:
        if host.run(["iptables", "-A", *rule.split()]).returncode != 0:
            pytest.skip("iptables has no rights or no modules here")
    # Ten times as long as it takes to declare a peer dead, and longer than one attempt on the
    # silent route.
    last = -1
    with contextlib.suppress(RuntimeError):
        while True:
            last = job.until(lambda row: "number" in row, "round", timeout_s=6)["number"]
    assert not job.results
    bed.links[0].up()
    row = job.until(lambda row: row["kind"] == "error" or row["number"] > last + 5, "more rounds")
    assert row["kind"] == "round", row


def test_standby_interface_carries_nothing_until_it_is_needed(bed: Bed) -> None:
    job = bed.job("stream", ENDLESS, 0.01, TORCH_RESILIENT_NIC_POLICY="standby")

    def carried() -> int:
        return bed.links[1].counters("a->b").delivered.bytes

    job.until(lambda row: received(row) and row["number"] >= 30, "message 30")
    before = carried()
    assert before < 30 * 131072 / 10  # its connections alone
    bed.links[0].down("blackhole")
    row = job.until(
        lambda row: received(row) and carried() - before > 20 * 131072, "20 messages over eth1"
    )
    bed.links[0].up()
    row = job.until(lambda new: received(new) and new["number"] > row["number"] + 30, "30 more")
    assert row["wrong"] == 0


def test_traffic_class_keeps_to_its_interface(bed: Bed) -> None:
    job = bed.job("stream", 30, 0.0, TORCH_RESILIENT_NIC_CLASSES="activation=eth1")
    result = job.end()[0]
    assert result.get("wrong") == 0, result
    assert sent_on(result, "eth1") >= 29 * 131072
    assert sent_on(result, "eth0") < 131072


def test_no_connection_is_to_blame_if_all_fall_silent(bed: Bed) -> None:
    environment = {
        "TORCH_RESILIENT_INTERFACE": "eth0",
        "TORCH_RESILIENT_WAN_CONNECTIONS": "4",
        "TORCH_RESILIENT_LOG_LEVEL": "debug",
        # A busy machine must not look like a silent network.
        "TORCH_RESILIENT_SUSPECT_AFTER_S": "0.15",
        "TORCH_RESILIENT_STALL_TIMEOUT_S": "5",
    }
    job = bed.job("exchange", ENDLESS, 0.001, **environment)
    job.until(lambda row: row.get("number", -1) >= 20, "round 20")
    before = [job.words(rank).count("is suspect") for rank in (0, 1)]
    bed.links[0].down("blackhole")
    last = 0
    with contextlib.suppress(RuntimeError):
        while True:  # longer than a suspicion takes
            last = job.until(lambda row: "number" in row, "round", timeout_s=0.5)["number"]
    assert [job.words(rank).count("is suspect") for rank in (0, 1)] == before
    bed.links[0].up()
    row = job.until(lambda row: row.get("number", -1) > last + 20, "20 more rounds")
    assert row["wrong"] == 0


def test_what_comes_in_does_not_save_a_way_that_is_dead_outwards(bed: Bed) -> None:
    rounds: list[set[str]] = []
    ours = f"{bed.links[0].address(bed.hosts[0])}:"

    def looked(row: Row) -> bool:
        if row["kind"] != "round" or row["rank"] != 0:
            return False
        assert row["wrong"] == 0
        # An off-route connection in its place may be up: all routes seemed silent.
        paths = [p for p in row["paths"] if p["local_address"].startswith(ours)]
        rounds.append(states_on({"paths": paths}, "eth0"))
        return True

    for _ in range(3):
        job = bed.job("exchange", ENDLESS, 0.005, TORCH_RESILIENT_WAN_CONNECTIONS="4")
        job.until(lambda row: row.get("number", -1) >= 20, "round 20")
        bed.links[0].down("blackhole", direction="a->b")
        # Its four connections die together: none gets anything while another is in doubt,
        # although the peer is heard on all of them.
        job.until(lambda row: looked(row) and "up" not in rounds[-1], "eth0 is given up")
        for _ in range(20):
            job.until(looked, "one more round")
        job.close()
        bed.links[0].up()
    # A false alarm is no fault.
    assert sum("up" in states and len(states) > 1 for states in rounds) <= 1


@pytest.mark.parametrize("interfaces", ["eth0", "eth0,eth1"])
def test_interface_that_gets_another_address_carries_again(bed: Bed, interfaces: str) -> None:
    job = bed.job("exchange", ENDLESS, 0.005, TORCH_RESILIENT_INTERFACE=interfaces)
    for rank, host in enumerate(("a", "b", "a")):  # each end, then the first one again
        address = bed.links[0].readdress(host)

        def carries(row: Row, rank: int = rank % 2, address: str = address) -> bool:
            return row["rank"] == rank and any(
                path["state"] == "up" and path["local_address"].startswith(f"{address}:")
                for path in row.get("paths", [])
            )

        assert job.until(carries, f"path from {address}")["wrong"] == 0
    for rank in (0, 1):  # and no rank has stopped
        row = job.until(lambda row, rank=rank: row["rank"] == rank, "one more round")
        assert row["wrong"] == 0


def test_addresses_of_both_ends_change_at_the_same_moment(bed: Bed) -> None:
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_LOG_LEVEL": "info"}
    job = bed.job("exchange", ENDLESS, 0.005, **environment)
    job.until(lambda row: row.get("number", -1) >= 20, "round 20")
    bed.links[0].down()  # so that neither can tell the other
    addresses = [bed.links[0].readdress(host) for host in ("a", "b")]
    said = "our addresses have changed"
    for rank in (0, 1):
        wait_until(lambda rank=rank: said in job.words(rank), f"rank {rank} says so")
    bed.links[0].up()

    def carries(row: Row) -> bool:
        return any(
            path["state"] == "up" and path["local_address"].startswith(f"{addresses[row['rank']]}:")
            for path in row.get("paths", [])
        )

    for rank in (0, 1):
        row = job.until(lambda row, rank=rank: row["rank"] == rank and carries(row), "new path")
        assert row["wrong"] == 0


def test_address_that_changes_while_there_is_no_descriptor_to_look_with(bed: Bed) -> None:
    job = bed.job("exchange", ENDLESS, 0.005, TORCH_RESILIENT_INTERFACE="eth0,eth1")
    job.until(lambda row: row.get("number", -1) >= 20, "round 20")
    pid = job.processes[0].pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    address = bed.links[0].readdress("a")
    wait_until(lambda: "is looked at again" in job.words(0), "rank 0 says so")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    def carries(row: Row) -> bool:
        return row["rank"] == 0 and any(
            path["state"] == "up" and path["local_address"].startswith(f"{address}:")
            for path in row.get("paths", [])
        )

    assert job.until(carries, f"path from {address}")["wrong"] == 0


def test_address_that_changes_before_anybody_has_asked_for_it(bed: Bed) -> None:
    settings = {"job": "exchange", "count": 3, "pause_s": 0.0, "late": True, "timeout_s": 20}
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_LOG_LEVEL": "info"}
    job = Job(bed.hosts, bed.control, settings, environment)
    bed.jobs.append(job)
    for _ in (0, 1):
        job.row("joined")
    said = "our addresses have changed"
    for rank, host in enumerate(("a", "b")):
        bed.links[0].readdress(host)
        wait_until(lambda rank=rank: said in job.words(rank), f"rank {rank} says so")
    job.tell("go on")
    for result in job.end():
        assert result.get("wrong") == 0, result


def test_lost_connection_comes_back_over_a_long_way(bed: Bed) -> None:
    for link in bed.links:
        link.set(delay_s=0.15)
    job = bed.job("exchange", ENDLESS, 0.005, TORCH_RESILIENT_WAN_CONNECTIONS="1")

    def is_up(row: Row) -> bool:
        return "up" in states_on(row, "eth0")

    def told(row: Row) -> bool:
        return row["kind"] == "round" and row["rank"] == 0

    job.until(lambda row: told(row) and is_up(row), "eth0 carries")
    bed.links[0].down("admin", end="a")
    job.until(lambda row: told(row) and not is_up(row), "eth0 is lost")
    bed.links[0].up()
    assert job.until(lambda row: told(row) and is_up(row), "eth0 carries again")["wrong"] == 0


def test_healed_interface_has_its_share_of_what_the_other_could_do_alone(bed: Bed) -> None:
    for link in bed.links:
        link.set(delay_s=0.0025, rate_bytes_per_s=50e6)
    job = bed.job("burst", ENDLESS, 0.005, TORCH_RESILIENT_WAN_CONNECTIONS="1")

    def told(row: Row, *states: str) -> bool:
        return (row["kind"], row["rank"]) == ("round", 0) and row["paths"][0]["state"] in states

    job.until(lambda row: told(row, "up"), "the burst")
    bed.links[0].down("blackhole")
    job.until(lambda row: told(row, "down", "connecting"), "eth0 is given up")
    bed.links[0].up()
    back = job.until(lambda row: told(row, "up"), "eth0 is back")
    later = job.until(
        lambda row: told(row, "up") and row["number"] >= back["number"] + 100, "100 rounds"
    )
    by_nic = [sent_on(later, nic) - sent_on(back, nic) for nic in ("eth0", "eth1")]
    assert by_nic[0] > 0.1 * sum(by_nic)


def test_both_interfaces_carry_and_no_path_is_lost_when_all_is_well(bed: Bed) -> None:
    job = bed.job("stream", 60, 0.0)
    sender = job.end()[0]
    for nic in ("eth0", "eth1"):
        assert sent_on(sender, nic) > 0
    assert sum(path["reconnects"] for path in sender["paths"]) == 0


@pytest.mark.parametrize("kind", ["blackhole", "admin"])
def test_crossed_interfaces_find_each_other(lab: NetworkLab, kind: str) -> None:
    # One subnet, two interfaces each. The first of one host and the second of
    # the other go down: no pair that belongs together is left.
    a, b = lab.host("a"), lab.host("b")
    fabric = lab.network([a, a, b, b], name="lan", **LINK)
    control = lab.link(a, b, name="control")
    with Job(
        [a, b],
        control,
        {"job": "stream", "count": 60, "pause_s": 0.01},
        {"TORCH_RESILIENT_INTERFACE": "lan,lanb"},
    ) as job:
        times_s: list[float] = []

        def noted(row: Row) -> bool:
            if received(row):
                times_s.append(row["time_s"])
            return row.get("number", -1) >= 10

        job.until(noted, "message 10")
        if kind == "blackhole":
            fabric.down("blackhole", direction="a/lan<->b,b/lanb")
            fabric.down("blackhole", direction="b/lanb<->a,a/lan")
        else:
            fabric.down("admin", end="a/lan")
            fabric.down("admin", end="b/lanb")
        job.until(lambda row: noted(row) and len(times_s) == 60, "all messages")
        for result in job.end():
            assert result.get("wrong") == 0, result
    pause_s = max(after - before for before, after in itertools.pairwise(times_s))
    print(f"{kind}: pause of {pause_s:.2f} s")
    # One attempt into a black hole, and no more: far from TCP's own patience of half a minute.
    assert pause_s < CROSSING_S
