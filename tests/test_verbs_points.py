"""Seeded fault points over real verbs: any operation, any byte, either NIC, any kind of fault.

Each point is a job of its own between the same two guests. The seed and every point are printed;
RESILIENT_VERBS_POINTS and RESILIENT_VERBS_SEED choose others.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_resilient.testing import LabJob, VerbsLab, verbs_unavailable
from torch_resilient.testing.job import Row

pytestmark = [pytest.mark.lab, pytest.mark.verbs]

PROGRAM = Path(__file__).with_name("verbs_points_program.py")
OPERATIONS = ("send_recv", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
POINTS = int(os.environ.get("RESILIENT_VERBS_POINTS", "20"))
SEED = int(os.environ.get("RESILIENT_VERBS_SEED", "1"))
# Far more than anything takes: the machine may be busy.
LIMIT_S = 90
PORTS = itertools.count(30500)
NICS = ("eth0", "eth1")
# Of an operation whose peer dies: silence is no evidence before.
TIMEOUT_S = 3
# At least as many travel for each element of an operation: four rounds of a float.
BYTES_PER_ELEMENT = 16


@pytest.fixture(scope="module")
def lab() -> Iterator[VerbsLab]:
    """Two guests that have imported torch and this package."""
    if (reason := verbs_unavailable()) is not None:
        if os.environ.get("RESILIENT_TEST_LAB") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with VerbsLab(seed=SEED, preload=["torch", "torch_resilient"]) as made:
        for guest in made.guests.values():
            guest.wait_for_preload()
        yield made


def kinds(lab: VerbsLab, nic: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """How each kind of fault begins and ends."""
    network = lab.networks[nic]
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "switch": (network.down, network.up),
        "delay": (lambda: network.set(delay_s=0.06), lambda: network.set(delay_s=0)),
        "drops": (lambda: network.set(drop=0.05), lambda: network.set(drop=0)),
    }
    for name, guest in lab.guests.items():
        peer = "b" if name == "a" else "a"

        # Defaults bind the values of this turn of the loop.
        def off(kind: str, end: str = name) -> None:
            network.down(kind, end=end)

        def silence(direction: str = f"{name}->{peer}") -> None:
            network.down(direction=direction)

        found[f"NIC of {name}"] = (lambda off=off: off("admin"), network.up)  # type: ignore[misc]
        found[f"cable of {name}"] = (lambda off=off: off("carrier"), network.up)  # type: ignore[misc]
        found[f"only {name} to {peer}"] = (silence, network.up)

        # heal() ends it.
        def all_off(end: str = name) -> None:
            for each in NICS:
                lab.networks[each].down("admin", end=end)

        found[f"{name} frozen"] = (guest.freeze, guest.thaw)
        found[f"both NICs of {name}"] = (all_off, network.up)

    def all_silent() -> None:
        for each in NICS:
            lab.networks[each].down()

    found["both switches"] = (all_silent, network.up)
    return found


def heal(lab: VerbsLab) -> None:
    """Ends all faults."""
    for guest in lab.guests.values():
        guest.thaw()
    for network in lab.networks.values():
        network.up()
        network.set(delay_s=0, drop=0)


def carried(lab: VerbsLab) -> int:
    """The bytes that the data networks have delivered, of all programs and both directions."""
    return sum(int(lab.networks[nic].counters().delivered.bytes) for nic in NICS)


def plan(lab: VerbsLab, chance: random.Random, points: int) -> list[tuple[str, str]]:
    """(operation, kind of fault) of each point; all of both come before any comes again."""
    names = [list(OPERATIONS), list(kinds(lab, NICS[0]))]
    columns = []
    for each in names:
        column: list[str] = []
        while len(column) < points:
            column += chance.sample(each, len(each))
        columns.append(column[:points])
    return list(zip(*columns, strict=True))


def one_point(lab: VerbsLab, chance: random.Random, operation: str, kind: str) -> list[Row]:
    """A fault at one place of one operation; returns the "done" rows of both ranks."""
    numel = int(2 ** chance.uniform(11, 19))
    # Of all bytes on both networks, on a log scale: the first packets are as interesting as those
    # within a large message.
    position = int((BYTES_PER_ELEMENT * numel) ** chance.uniform(0.4, 1))
    nic = chance.choice(NICS)
    begin, end = kinds(lab, nic)[kind]
    for_s = chance.uniform(0.1, 0.9)
    seed = chance.randrange(1 << 16)
    what = f"{operation}({numel}) byte {position} {nic} {kind} for {for_s:.2f} s"
    command = [sys.executable, str(PROGRAM), operation, str(numel), str(seed)]
    guests = list(lab.guests.values())
    environment = {"TORCH_RESILIENT_INTERFACE": ",".join(NICS)}
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        try:
            ready = [job.row("ready", LIMIT_S) for _ in guests]
            assert all(row["both_up"] for row in ready), f"{what}: RDMA is not up on both networks"
            first = carried(lab)
            job.tell("go")
            done: list[Row] = []
            while carried(lab) < first + position and len(done) < len(guests):
                while not job.rows.empty():
                    done.append(job.rows.get())
            place = carried(lab) - first
            begin()
            began_s = time.monotonic()
            hit = len(done) < len(guests)
            time.sleep(for_s)  # how long the fault lasts, not a wait for something
            end()
            heal(lab)
            while len(done) < len(guests):
                done.append(job.row("done", LIMIT_S))
            took_s = time.monotonic() - began_s
            job.tell("the fault has ended")
            left = [job.row("left", LIMIT_S) for _ in guests]
            statuses = job.wait(LIMIT_S)
        finally:
            heal(lab)
        assert statuses == [0, 0], what + job.words(0) + job.words(1)
    counts = {key: sum(row[key] for row in done) for key in ("bytes", "silent", "repeated")}
    errors = sorted({error for row in done for error in row["errors"]})
    print(
        f"{what}: at byte {place}{'' if hit else ' (idle)'}, done after {took_s:.2f} s, "
        f"{counts} {errors}",
        flush=True,
    )
    # The sum of both: on a busy machine, the path of one may count as silent all the time.
    assert counts["bytes"] > 0, f"{what}: RDMA carried nothing"
    assert all(row["wrong"] == 0 for row in done + left), what
    assert all(not row["left"] for row in left), f"{what}: {left}"
    return [{**row, "hit": hit} for row in done]


def killed_point(lab: VerbsLab, chance: random.Random, operation: str) -> None:
    """One guest dies in an operation, as by a power failure: the other names its rank."""
    names = list(lab.guests)
    victim = chance.randrange(len(names))
    numel = int(2 ** chance.uniform(16, 19))
    position = int((BYTES_PER_ELEMENT * numel) ** chance.uniform(0.4, 1))
    seed = chance.randrange(1 << 16)
    what = f"{operation}({numel}) byte {position} guest {names[victim]} killed"
    command = [sys.executable, str(PROGRAM), operation, str(numel), str(seed), str(TIMEOUT_S)]
    guests = list(lab.guests.values())
    for guest in guests:
        guest.wait_for_preload()
    environment = {
        "TORCH_RESILIENT_INTERFACE": ",".join(NICS),
        "TORCH_RESILIENT_LINGER_S": "1",  # for a peer that has gone
    }
    with LabJob(command, guests, lab.control, environment=environment, port=next(PORTS)) as job:
        ready = [job.row("ready", LIMIT_S) for _ in guests]
        assert all(row["both_up"] for row in ready), f"{what}: RDMA is not up on both networks"
        first = carried(lab)
        job.tell("go")
        while carried(lab) < first + position:
            pass
        guests[victim].kill()
        job.tell("the fault has ended")  # should the operation have been faster
        failed = job.row("failed", LIMIT_S)
        left = job.row("left", LIMIT_S)
        status = job.wait(LIMIT_S)[1 - victim]
        print(f"{what}: {failed['error']}", flush=True)
        assert status == 0, what + job.words(1 - victim)
    assert failed["rank"] == 1 - victim, what
    assert f"rank {victim} (host {names[victim]}" in failed["error"], what
    assert "does not respond" in failed["error"], what
    assert failed["wrong"] == 0, what
    assert not left["left"], f"{what}: {left}"


def boot_killed(lab: VerbsLab) -> None:
    """A program waits until the guest has imported torch again."""
    for guest in lab.guests.values():
        if not guest.is_running:
            guest.boot()


def check(lab: VerbsLab, seed: int, points: int) -> None:
    print(f"seed {seed}, {points} points")
    chance = random.Random(seed)
    rows = [row for pair in plan(lab, chance, points) for row in one_point(lab, chance, *pair)]
    assert sum(row["hit"] for row in rows) >= points // 2, "most faults came too late"
    assert sum(row["silent"] + len(row["errors"]) for row in rows) >= points // 4, "no path failed"


def test_twenty_fault_points(lab: VerbsLab) -> None:
    check(lab, SEED, POINTS)


def test_a_killed_guest_is_named(lab: VerbsLab) -> None:
    chance = random.Random(SEED)
    killed_point(lab, chance, chance.choice(OPERATIONS))
    boot_killed(lab)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_two_hundred_fault_points(lab: VerbsLab, seed: int) -> None:
    check(lab, seed, 19)
    chance = random.Random(seed)
    killed_point(lab, chance, chance.choice(OPERATIONS))
    boot_killed(lab)
