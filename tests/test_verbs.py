"""RDMA beside the connections: real verbs between guests of the verbs lab, and what faults do.

Soft-RoCE is slow; nothing here measures it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from verbs_late_program import ELEMENTS, MESSAGES

from torch_resilient.testing import Guest, LabJob, VerbsLab, verbs_unavailable
from torch_resilient.testing.job import Row

pytestmark = [pytest.mark.lab, pytest.mark.verbs]

PROGRAM = Path(__file__).with_name("verbs_program.py")
LATE_PROGRAM = Path(__file__).with_name("verbs_late_program.py")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CANCEL_PROGRAM = Path(__file__).with_name("verbs_cancel_program.py")
# Far more than anything takes: the machine may be busy.
LIMIT_S = 90
PORTS = itertools.count(29500)
# A busy machine does not look like a silent device.
PATIENT = {"TORCH_RESILIENT_SUSPECT_AFTER_S": "30", "TORCH_RESILIENT_STALL_TIMEOUT_S": "60"}


@pytest.fixture(scope="module")
def lab() -> Iterator[VerbsLab]:
    """Two guests that have imported torch."""
    if (reason := verbs_unavailable()) is not None:
        if os.environ.get("RESILIENT_TEST_LAB") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with VerbsLab(preload=["torch"]) as made:
        for guest in made.guests.values():
            guest.wait_for_preload()
        yield made


@contextmanager
def job_on(lab: VerbsLab, options: Mapping[str, str] = {}, *, paths: int = 2) -> Iterator[LabJob]:
    """Two ranks that exchange messages over the data networks, with RDMA on so many of them."""
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1", **options}
    guests = list(lab.guests.values())
    command = [sys.executable, str(PROGRAM)]
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as made:
        made.until(on_both(paths), f"{paths} networks have RDMA", LIMIT_S)
        yield made
    for network in lab.networks.values():
        network.up()


@pytest.fixture
def job(lab: VerbsLab) -> Iterator[LabJob]:
    """A job with the usual options."""
    with job_on(lab) as made:
        yield made


def on_both(count: int) -> Callable[[Row], bool]:
    """True once the last rounds of both ranks had so many RDMA paths up."""
    last: dict[int, int] = {}

    def met(row: Row) -> bool:
        if row.get("kind") == "round":
            last[row["rank"]] = row["up"]
        return len(last) == 2 and set(last.values()) == {count}

    return met


def rounds_pass(job: LabJob, count: int = 5) -> Row:
    """The job goes on; returns the last row."""
    for _ in range(2 * count):
        row = job.row("round", LIMIT_S)
    return row


def end_well(job: LabJob) -> None:
    """Every round of both ranks had the right bytes."""
    job.tell("end")
    rows = [job.row("result", LIMIT_S) for _ in range(2)]
    assert job.wait(LIMIT_S) == [0, 0], job.words(0) + job.words(1)
    assert all(row["wrong"] == 0 for row in rows), rows


def test_rdma_carries_without_being_told(lab: VerbsLab) -> None:
    with job_on(lab, PATIENT) as job:
        before = job.until(lambda row: row.get("rank") == 0, "rank 0 counts", LIMIT_S)
        for _ in range(5):
            after = job.until(lambda row: row.get("rank") == 0, "rank 0 counts", LIMIT_S)
        # Every round sends 4.8 MB each way, and only RDMA paths carry.
        assert after["bytes"] - before["bytes"] >= 4 * 4_800_000
        end_well(job)


def test_large_tensors_are_read_from_one_to_the_other(lab: VerbsLab) -> None:
    with job_on(lab, PATIENT) as job:
        job.until(lambda row: row.get("placed", 0) >= 20_000_000, "20 MB are placed", LIMIT_S)
        end_well(job)


def test_rules_of_injected_faults_act_on_rdma(lab: VerbsLab) -> None:
    rules = "cut rank=0 after_bytes=40000000 times=1"

    def is_cut(row: Row) -> bool:
        errors = row.get("errors", {}).values()
        return any("fault injection" in (error or "") for error in errors)

    with job_on(lab, {**PATIENT, "TORCH_RESILIENT_FAULTS": rules}) as job:
        job.until(is_cut, "a path is cut", LIMIT_S)

        def is_back(row: Row) -> bool:
            return is_cut(row) and row["reconnects"] > 0 and row["up"] == 2

        job.until(is_back, "RDMA carries on both networks again", LIMIT_S)
        end_well(job)


@pytest.mark.parametrize("kind", ["blackhole", "admin"])
def test_one_network_of_two_fails_and_comes_back(lab: VerbsLab, job: LabJob, kind: str) -> None:
    network = lab.networks["eth0"]
    network.down(kind)
    job.until(on_both(1), "one network is left", LIMIT_S)
    rounds_pass(job)
    network.up()
    job.until(on_both(2), "both carry again", LIMIT_S)
    rounds_pass(job)
    end_well(job)


@pytest.mark.parametrize("end", ["a", "b"])
def test_both_ends_hear_of_a_port_that_goes_down(lab: VerbsLab, job: LabJob, end: str) -> None:
    errors: dict[int, str] = {}

    def both_know(row: Row) -> bool:
        if row.get("kind") == "round":
            errors[row["rank"]] = row["errors"]["eth0"]
        return len(errors) == 2 and all("went down" in text for text in errors.values())

    network = lab.networks["eth0"]
    network.down("admin", end=end)
    job.until(both_know, "both ends know the reason", LIMIT_S)
    # The far end has it from the peer, and has not waited for silence.
    assert sum("says: " in text for text in errors.values()) == 1, errors
    rounds_pass(job)
    network.up(end=end)
    job.until(on_both(2), "both carry again", LIMIT_S)
    end_well(job)


def test_a_device_that_is_removed_and_added_carries_again(lab: VerbsLab, job: LabJob) -> None:
    """Soft-RoCE waits with the removal until no program has the device open."""
    guest = lab.guests["b"]
    removal = guest.popen(["rdma", "link", "delete", "rxe0"])
    job.until(on_both(1), "one network is left", LIMIT_S)
    assert removal.wait(LIMIT_S) == 0
    rounds_pass(job)
    guest.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"], check=True)
    job.until(on_both(2), "both carry again", LIMIT_S)
    rounds_pass(job)
    end_well(job)


def test_devices_that_come_after_the_start_carry(lab: VerbsLab) -> None:
    guests = list(lab.guests.values())
    devices = {"rxe0": "eth0", "rxe1": "eth1"}

    def add(guest: Guest, device: str, *, check: bool = True) -> None:
        link = ["link", "add", device, "type", "rxe", "netdev", devices[device]]
        guest.run(["rdma", *link], check=check, capture_output=True)

    for guest in guests:
        for device in devices:
            guest.run(["rdma", "link", "delete", device], check=True)
    try:
        with job_on(lab, paths=0) as job:
            for count, device in enumerate(devices, start=1):
                for guest in guests:
                    rounds_pass(job)
                    add(guest, device)
                job.until(on_both(count), f"{device} carries", LIMIT_S)
            rounds_pass(job)
            end_well(job)
    finally:  # other tests use the same guests
        for guest in guests:
            for device in devices:
                add(guest, device, check=False)


def test_connections_carry_where_memory_cannot_be_locked(lab: VerbsLab) -> None:
    command = ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock"]
    guests = list(lab.guests.values())
    command += ["--inh-caps=-ipc_lock", sys.executable, str(PROGRAM)]
    with LabJob(command, guests, lab.control, port=next(PORTS)) as job:

        def tells_why(row: Row) -> bool:  # only the end that offers does
            return any("RLIMIT_MEMLOCK" in text for text in row.get("errors", {}).values())

        job.until(tells_why, "the reason is known", LIMIT_S)
        assert rounds_pass(job)["bytes"] == 0
        end_well(job)


def test_required_rdma_that_is_missing_fails_the_start(lab: VerbsLab) -> None:
    cases = {
        "TORCH_RESILIENT_RDMA_DEVICES": ("mlx5_7", "there is no RDMA device mlx5_7"),
        "TORCH_RESILIENT_RDMA_GID_INDEX": ("200", "no RDMA device has a RoCE v2 address"),
        "TORCH_RESILIENT_INTERFACE": ("lo", "no RDMA device has an address of lo"),
    }
    guest = lab.guests["a"]
    program = (
        "import datetime, os, torch.distributed as dist\n"
        "dist.init_process_group('resilient', store=dist.HashStore(), rank=0, world_size=1)"
    )
    for name, (value, reason) in cases.items():
        environment = {**os.environ, "TORCH_RESILIENT_RDMA": "required", name: value}
        done = guest.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode != 0
        assert reason in done.stderr
    limited = ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock"]
    done = guest.run(
        [*limited, "--inh-caps=-ipc_lock", sys.executable, "-c", program],
        env={
            **os.environ,
            "TORCH_RESILIENT_RDMA": "required",
            "TORCH_RESILIENT_INTERFACE": "eth0",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode != 0
    assert "TORCH_RESILIENT_RDMA=required: rxe0: register 5242880 bytes" in done.stderr
    assert "may lock 64 KiB of memory (RLIMIT_MEMLOCK): raise it with `ulimit -l`" in done.stderr


def test_required_rdma_that_the_other_end_lacks_fails_both_ranks(lab: VerbsLab) -> None:
    command = [sys.executable, str(PROGRAM), "--off-at=1"]
    guests = list(lab.guests.values())
    environment = {
        "TORCH_RESILIENT_RDMA": "required",
        "TORCH_RESILIENT_INTERFACE": "eth0,eth1",
    }
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        assert 0 not in job.wait(LIMIT_S)
        for rank in range(2):
            text = "has TORCH_RESILIENT_RDMA=required, but rank 1 on other hosts cannot use RDMA"
            assert text in job.words(rank)


def test_connections_carry_where_one_end_uses_no_rdma(lab: VerbsLab) -> None:
    command = [sys.executable, str(PROGRAM), "--off-at=1"]
    guests = list(lab.guests.values())
    with LabJob(command, guests, lab.control, port=next(PORTS)) as job:
        assert rounds_pass(job)["bytes"] == 0
        end_well(job)


def late_packets(
    lab: VerbsLab, direction: str, late_s: float, by_nic: bool, attempts: int = 3
) -> None:
    """Packets that are late by `late_s`, during a fault of their path. No byte may change.

    by_nic: the NIC of the sender is off for a moment. Otherwise what follows the late packets is
    lost until the path fails, as its retries are used up. If all messages had arrived before the
    loss began, as the machine paused, no path fails, and it is tried again.
    """
    missed = False
    networks = [lab.networks[name] for name in ("eth0", "eth1")]
    guests = list(lab.guests.values())
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1"}
    command = [sys.executable, str(LATE_PROGRAM)]

    def carried() -> list[int]:
        return [int(network.counters().delivered.bytes) for network in networks]

    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        try:
            assert [job.row("ready", LIMIT_S)["up"] for _ in range(2)] == [2, 2]
            before = carried()
            job.tell("go")
            deadline = time.monotonic() + LIMIT_S
            grown = [0, 0]
            while max(grown) < 1_000_000:
                assert time.monotonic() < deadline
                grown = [now - then for now, then in zip(carried(), before, strict=True)]
            # The network that RDMA uses at this moment.
            network = networks[grown.index(max(grown))]
            network.set(direction=direction, delay_s=late_s)
            set_at = time.monotonic()
            time.sleep(0.01)
            if by_nic:
                network.down("admin", end="b")
                time.sleep(0.05)
                network.up(end="b")
            else:
                network.set(direction=direction, drop=1)
            passed = sum(carried()) - sum(before)
            done = [job.row("done", LIMIT_S) for _ in range(2)]
            if not by_nic:
                missed = passed >= MESSAGES * ELEMENTS * 8 and attempts > 1
                if not missed:
                    job.row("reset", LIMIT_S)
                network.set(direction=direction, drop=0)
            network.set(direction=direction, delay_s=0)
            # The time of the last late packet, and some more.
            time.sleep(max(0.0, set_at + 0.1 + late_s + 0.5 - time.monotonic()))
            job.tell("nothing is under way")
            results = [job.row("result", LIMIT_S) for _ in range(2)]
            assert job.wait(LIMIT_S) == [0, 0], job.words(0) + job.words(1)
        finally:
            for each in networks:
                each.up()
                each.set(delay_s=0, drop=0)
    assert [row["wrong"] for row in done] == [0, 0]
    assert [row["changed"] for row in results] == [0, 0]
    if missed:
        late_packets(lab, direction, late_s, by_nic, attempts - 1)


@pytest.mark.parametrize("direction", ["b->a", "a->b"], ids=["data", "acknowledgements"])
def test_late_packets_of_a_former_queue_pair_change_no_byte(lab: VerbsLab, direction: str) -> None:
    """The memory of a message belongs to the program again while its packets are under way.

    The retries take 1.1 s, and a path that has failed is offered again after a second. So the late
    packets find a new one.
    """
    late_packets(lab, direction, 4.0, by_nic=False)


@pytest.mark.parametrize("direction", ["b->a", "a->b"], ids=["data", "acknowledgements"])
def test_late_packets_change_no_byte_while_the_nic_is_off_and_on(
    lab: VerbsLab, direction: str
) -> None:
    """Whether that resets the path is chance: its device must have a packet to send meanwhile."""
    late_packets(lab, direction, 0.6, by_nic=True)


def test_memory_of_a_receive_that_has_timed_out_is_not_read_into(lab: VerbsLab) -> None:
    """The device has requests for the rest of the message when the operation ends."""
    networks = [lab.networks[name] for name in ("eth0", "eth1")]
    environment = {
        **PATIENT,
        "TORCH_RESILIENT_INTERFACE": "eth0,eth1",
        "TORCH_RESILIENT_RDMA_TIMEOUT": "18",
    }
    command = [sys.executable, str(CANCEL_PROGRAM)]
    guests = list(lab.guests.values())
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        try:
            assert all(job.row("ready", LIMIT_S)["both_up"] for _ in guests)
            for network in networks:
                network.set(rate_bytes_per_s=10e6)
            job.tell("go")
            failed = {row["rank"]: row for row in (job.row("failed", LIMIT_S) for _ in guests)}
            assert "Timed out" in failed[0]["error"], failed
            assert 0 < failed[0]["placed"] < failed[0]["bytes"], failed
            time.sleep(1.5)  # what was under way would have arrived
            job.tell("nothing is under way")
            results = [job.row("result", LIMIT_S) for _ in guests]
            assert [row["changed"] for row in results] == [0, 0], results
            for network in networks:
                network.set(rate_bytes_per_s=None)
            job.tell("the networks are fast")
            after = [job.row("after", LIMIT_S) for _ in guests]
            assert all(row["right"] and row["both_up"] for row in after), after
            assert job.wait(LIMIT_S) == [0, 0], job.words(0) + job.words(1)
        finally:
            for network in networks:
                network.set(rate_bytes_per_s=None)


def test_the_smaller_mtu_counts(lab: VerbsLab, job: LabJob) -> None:
    mtus: dict[int, int] = {}

    def both_have(row: Row) -> bool:
        if row.get("kind") == "round":
            mtus[row["rank"]] = row["mtus"]["eth0"]
        return mtus == {0: 1024, 1: 1024}

    guest, network = lab.guests["b"], lab.networks["eth0"]
    # It cannot be raised again in a guest, so this test is the last one.
    guest.run(["ip", "link", "set", "eth0", "mtu", "1500"], check=True)
    network.down("admin", end="b")
    job.until(on_both(1), "one network is left", LIMIT_S)
    network.up(end="b")
    job.until(on_both(2), "both carry again", LIMIT_S)
    job.until(both_have, "both ends have the smaller MTU", LIMIT_S)
    end_well(job)


def test_benchmark_of_speed_measures_the_hosts_of_its_job(lab: VerbsLab) -> None:
    rows_file = "/tmp/verbs_speed_job.jsonl"  # in the guest's overlay
    command = [sys.executable, str(BENCHMARKS / "verbs_speed.py"), "--job", "--quick"]
    command += ["--json", rows_file]
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "TORCH_RESILIENT_INTERFACE": "eth0"}
    guests = list(lab.guests.values())
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        statuses = job.wait(LIMIT_S)
        assert statuses[0] == 0, job.words(0) + job.words(1)
        assert statuses[1] in (0, 1), job.words(1)  # 1: a limit is missed
    told = guests[1].run(["cat", rows_file], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["what"] for row in rows] == ["stream 16 MiB", "stream 64 KiB", "ping-pong 8 B"]
    assert all(row["theirs"] > 0 < row["ours"] for row in rows)


def test_benchmark_of_failures_tells_the_pauses_of_its_job(lab: VerbsLab) -> None:
    command = [sys.executable, str(BENCHMARKS / "verbs_failover.py"), "--job", "idle"]
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "TORCH_RESILIENT_INTERFACE": "eth0,eth1"}
    guests = list(lab.guests.values())
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        job.until(lambda row: row.get("up") == 2, "two RDMA paths", LIMIT_S)
        lab.networks["eth0"].down("admin", end="a")  # silence shows only where something is sent
        assert job.until(lambda row: row.get("up") == 1, "one is lost", LIMIT_S)["wrong"] == 0
        lab.networks["eth0"].up()
