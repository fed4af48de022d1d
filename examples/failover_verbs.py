"""The same as failover.py over RDMA: two guests with two RDMA devices each, and a fault a second.

failover.py --verbs calls run(). It needs what the verbs lab needs: root, and `make verbs-lab`.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_resilient.testing import LabJob, VerbsLab

PROGRAM = Path(__file__).with_name("train_guest.py")
WAYS = {"ddp": "data parallel (DDP)", "pipeline": "a pipeline of two stages (1F1B)"}
# Every kind of fault, as scripts of the lab have it (torch_resilient/testing/script.py): how it
# begins, how it ends, and the words for it. {nic} is a network, {host} a guest, {peer} the other.
KINDS = {
    "NIC off": (
        "{nic} down admin {host}",
        "{nic} up {host}",
        "NIC {nic} of guest {host} switched off",
    ),
    "cable out": (
        "{nic} down carrier {host}",
        "{nic} up {host}",
        "the cable of {nic} at guest {host} out",
    ),
    "switch": ("{nic} down", "{nic} up", "the switch of {nic} drops everything"),
    "one way": (
        "{nic} {host}->{peer} down",
        "{nic} {host}->{peer} up",
        "on {nic}, nothing from {host} arrives at {peer}",
    ),
    "delay": ("{nic} set delay=30ms", "{nic} set delay=0ms", "{nic} is 30 ms slower each way"),
    "drops": ("{nic} set drop=3%", "{nic} set drop=0", "{nic} drops 3 % of the packets"),
    "flapping": (
        "{nic} flap blackhole 100ms {end}s",
        "{nic} up",
        "{nic} drops everything, 100 ms on and off",
    ),
    "frozen": ("{host} freeze", "{host} thaw", "guest {host} frozen"),
}
EVERY_S = 1.0
FAULT_S = 0.7
STEPS = 150
# The faulty run lasts longer than one fault of each kind on each end.
STEP_S = 0.14
# Far more than a run takes; a busy machine may be slow.
LIMIT_S = 150.0
ports = itertools.count(29400)

Result = dict[str, Any]


class VerbsFailoverError(Exception):
    """A claim does not hold; the message names it and the reason."""


def faults(seed: int, count: int) -> Iterator[tuple[str, str, str]]:
    """(kind, script, words) of the faults, one each EVERY_S.

    All kinds come before any comes again, and then each at the other end.
    """
    chance = random.Random(seed)
    kinds: list[str] = []
    first = {kind: chance.randrange(2) for kind in KINDS}
    for number in range(count):
        if not kinds:
            kinds = chance.sample(list(KINDS), len(KINDS))
        kind = kinds.pop()
        host, peer = ("ab", "ba")[(first[kind] + number // len(KINDS)) % 2]
        begin_s = EVERY_S * number
        end_s = begin_s + FAULT_S
        places = {
            "nic": chance.choice(["eth0", "eth1"]),
            "host": host,
            "peer": peer,
            "end": f"{end_s:.2f}",
        }
        begin, end, words = (text.format_map(places) for text in KINDS[kind])
        yield kind, f"{begin_s:.2f}s {begin}; {end_s:.2f}s {end}", words


def heal(lab: VerbsLab) -> None:
    """Ends all faults."""
    for guest in lab.guests.values():
        guest.thaw()
    for network in lab.networks.values():
        network.up()
        network.set(delay_s=0, drop=0)


def train(lab: VerbsLab, way: str, steps: int, seed: int | None) -> list[Result]:
    """One training; with a seed, under faults. Returns the results of both ranks.

    Raises VerbsFailoverError if it fails or hangs.
    """
    step_s = 0.0 if seed is None else STEP_S
    command = [sys.executable, str(PROGRAM), way, str(steps), str(step_s)]
    guests = list(lab.guests.values())
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1"}
    with LabJob(command, guests, lab.control, environment=environment, port=next(ports)) as job:
        player = None
        try:
            job.until(lambda row: row.get("step") == 1, "second step", LIMIT_S)
            began_s = time.monotonic()
            if seed is not None:
                planned = list(faults(seed, int(LIMIT_S / EVERY_S)))
                player = lab.play("; ".join(script for _, script, _ in planned))
            results = [job.row("result", LIMIT_S) for _ in guests]
            took_s = time.monotonic() - began_s
            if player is not None:
                player.cancel()
                player.check()
            heal(lab)
            statuses = job.wait(LIMIT_S)
        except RuntimeError as error:
            raise VerbsFailoverError(f"{way} did not finish: {error}") from None
        finally:
            if player is not None:
                player.cancel()
            heal(lab)
        if statuses != [0, 0]:
            words = job.words(0) + job.words(1)
            raise VerbsFailoverError(f"{way} ended with exit codes {statuses}:\n{words}")
    if seed is not None:
        happened = planned[: int(took_s / EVERY_S) + 1]
        tell_faults(happened, took_s)
    return sorted(results, key=lambda result: int(result["rank"]))


def tell_faults(happened: list[tuple[str, str, str]], took_s: float) -> None:
    """Prints the faults. Raises VerbsFailoverError if some are missing."""
    for number, (_, _, words) in enumerate(happened):
        print(f"    at {EVERY_S * number:4.1f} s for {FAULT_S} s: {words}")
    if len(happened) < 2 * len(KINDS):
        raise VerbsFailoverError(
            f"the training took {took_s:.0f} s, too short for every fault at both ends: use more "
            "--steps"
        )


def tell_paths(results: list[Result]) -> None:
    """Prints what each path carried, and how often it failed."""
    for result in results:
        carried: Counter[str] = Counter()
        for path in result["paths"]:
            carried[path["kind"]] += path["bytes_sent"]
        total = max(1, sum(carried.values()))
        kinds = ", ".join(
            f"{count / 1e6:.1f} MB ({count / total:.0%}) by {kind}"
            for kind, count in carried.most_common()
        )
        print(f"  guest {'ab'[result['rank']]} sent {kinds}")
        for path in result["paths"]:
            error = f"; last error: {path['last_error']}" if path["last_error"] else ""
            print(
                f"    {path['kind']} on {path['nic']}: {path['bytes_sent'] / 1e6:.1f} MB, "
                f"{path['times_suspect']} times too silent and replaced by another path, "
                f"{path['chunks_retransmitted']} chunks sent again{error}"
            )


def rdma(results: list[Result], counter: str) -> int:
    """A counter of all RDMA paths, summed."""
    paths = [path for result in results for path in result["paths"] if path["kind"] == "rdma"]
    return sum(int(path[counter]) for path in paths)


def check(way: str, healthy: list[Result], faulty: list[Result]) -> None:
    """Raises VerbsFailoverError unless the bits are equal and RDMA was used and has failed."""
    for one, other in zip(healthy, faulty, strict=True):
        pairs = zip(one["losses"], other["losses"], strict=True)
        for step, (wanted, found) in enumerate(pairs):
            if wanted != found:
                raise VerbsFailoverError(
                    f"{way}: the loss of step {step} is {found} under faults, and {wanted} "
                    "without: a message was changed, lost or mixed up"
                )
        if one["weights"] != other["weights"]:
            raise VerbsFailoverError(
                f"{way}: the weights of guest {'ab'[one['rank']]} differ: a gradient was changed"
            )
    for name, results in (("without faults", healthy), ("under faults", faulty)):
        if rdma(results, "bytes_sent") == 0:
            raise VerbsFailoverError(f"{way}: RDMA carried nothing {name}: this proves nothing")
    if rdma(faulty, "times_suspect") == 0:
        raise VerbsFailoverError(f"{way}: no RDMA path has failed: this proves nothing")


def run(seed: int, steps: int) -> None:
    """Both trainings, each without and under faults. Raises VerbsFailoverError, LabUnavailable."""
    began_s = time.monotonic()
    print("two guests start and import torch ...", flush=True)
    with VerbsLab(seed=seed, preload=["torch"]) as lab:
        for guest in lab.guests.values():
            guest.wait_for_preload()
        for way, words in WAYS.items():
            print(f"\n{words}, {steps} steps over RDMA without faults ...", flush=True)
            healthy = train(lab, way, steps, None)
            tell_paths(healthy)
            print(f"  again, with a fault every second (seed {seed}) ...", flush=True)
            faulty = train(lab, way, steps, seed)
            tell_paths(faulty)
            check(way, healthy, faulty)
            print(f"  all {steps} losses and all weights are equal to the last bit", flush=True)
            seed += 1
    print(f"\ntook {time.monotonic() - began_s:.0f} s")
