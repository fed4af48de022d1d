"""An attacker who can write to torch's store, and has not the job's secret, gets nowhere."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import make_store, on_gloo, run_ranks, store_port

from torch_resilient.cli.secret import write_secret

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="gloo has no such options"),
    pytest.mark.skipif(
        not hasattr(dist.TCPStore, "list_keys"), reason="the attacker lists the keys of the store"
    ),
]

TRIES = 50
REFUSED = "is not authentic"
# The second rank comes so much later in every second try: the attacker is then first.
STAGGER_S = 0.05


def join(rank: int, number: int) -> str:
    """One start of the job: "right", or the error."""
    try:
        dist.init_process_group(
            "resilient",
            store=make_store(f"job{number}"),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        data = torch.full((1000,), float(rank + number))
        dist.all_reduce(data)
        objects = [{"from": number}] if rank == 0 else [None]
        dist.broadcast_object_list(objects)
        right = bool((data == 2 * number + 1).all()) and objects == [{"from": number}]
        return "right" if right else f"wrong: {data[0]}, {objects}"
    except (RuntimeError, ValueError) as error:
        return str(error)


def in_a_process_of_its_own(rank: int, number: int) -> str:
    """As join()."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as outcome:
                outcome.write(join(rank, number))
                if dist.is_initialized():
                    dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as outcome:
        said = outcome.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"wrong: status {status}, {said}"


def rewrite(record: bytes, port: int) -> bytes:
    """The record with this port in all of its addresses."""
    return re.sub(rb":\d{4,5}\b", b":%d" % port, record)


def attack(control: dist.Store) -> tuple[int, int, int]:
    """Rewrites the addresses of ranks until the job is over.

    Returns how many records it has changed, in how many of these it has put an address of its own,
    and how many connections it got by that.
    """
    store = dist.TCPStore("127.0.0.1", store_port(), is_master=False)
    changed: set[str] = set()
    redirected, calls, last = 0, 0, b"nonsense"
    with socket.create_server(("127.0.0.1", 0), backlog=2 * TRIES) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        while not control.check(["over/0", "over/1"]):
            for key in store.list_keys():
                if "/at/" in key and key not in changed:
                    changed.add(key)
                    record = store.get(key)
                    # An address of its own, or the record of another rank.
                    own = rewrite(record, port)
                    redirects = own != record and len(changed) % 3 != 0
                    store.set(key, own if redirects else last)
                    redirected += redirects
                    last = record
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                calls += 1
    return len(changed), redirected, calls


def play(rank: int) -> list[str] | tuple[int, int, int]:
    control = make_store("control")
    if rank == 2:
        return attack(control)
    outcomes = []
    for number in range(TRIES):
        control.set(f"ready/{number}/{rank}", "")
        control.wait([f"ready/{number}/{1 - rank}"])
        if rank == 1 and number % 2:
            time.sleep(STAGGER_S)
        outcomes.append(in_a_process_of_its_own(rank, number))
    control.set(f"over/{rank}", "")
    return outcomes


def test_no_start_of_fifty_is_redirected(tmp_path: Path) -> None:
    """Each one gives right results, or fails by the record."""
    secret = tmp_path / "job.secret"
    write_secret(secret)
    first, second, (changed, redirected, calls) = run_ranks(
        play,
        world_size=3,
        store="tcp",
        init=False,
        env={
            "TORCH_RESILIENT_SECRET_FILE": str(secret),
            "TORCH_RESILIENT_ENCRYPTION": "required",
        },
    )
    refused = 0
    for pair in zip(first, second, strict=True):
        assert not any(outcome.startswith("wrong") for outcome in pair), pair
        if pair != ("right", "right"):
            # The other rank may only see that this one has gone.
            assert any(REFUSED in outcome for outcome in pair), pair
            refused += 1
    assert calls == 0
    assert changed >= TRIES
    assert redirected >= TRIES / 2
    assert refused >= TRIES / 5  # the attacker was in time
