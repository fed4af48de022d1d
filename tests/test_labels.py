"""The rank by which messages name a process, although each group numbers its processes."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import error_of, make_store, on_gloo, run_outcomes, scratch, wait_until, world_size
from torch.distributed import distributed_c10d as c10d


def join(name: str, rank: int) -> Any:
    """A group with the numbers of the default group, as a job creates it after a change."""
    from torch_resilient._registration import create_backend

    options = c10d._DistributedBackendOptions()
    options.store = make_store(name)
    options.group_rank, options.group_size = rank, world_size()
    options.timeout = timedelta(seconds=20)
    options.group_id = name
    options.global_ranks_in_group = list(range(world_size()))
    return create_backend(options, None)


def ranks_change(rank: int) -> dict[str, Any]:
    """Process 1 is rank 1 of the first group, rank 2 of the second one, and dies."""
    from torch_resilient import stats

    log = Path(scratch(), f"log {rank}")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    groups = {}
    # One after the other: messages name a process by the group that was found last.
    for name, number in (("first", rank), ("second", (rank + 1) % 3)):
        groups[name] = join(name, number)
        groups[name].allreduce([torch.ones(3)]).wait()
    store = make_store("test")
    store.set(f"ready {rank}", str(os.getpid()))
    for other in range(3):
        store.wait([f"ready {other}"])
    pid = int(store.get("ready 1"))
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    victims = {"first": 1, "second": 2}
    # Receives that are pending when it dies, and collectives that begin later.
    works = {n: group.recv([torch.ones(3)], victims[n], 0) for n, group in groups.items()}
    texts = {n: [error_of(work.wait)] for n, work in works.items()}
    for name, group in groups.items():
        texts[name].append(error_of(group.allreduce([torch.ones(3)]).wait))
        peers = {p.rank: p.last_error for p in stats(group).peers}
        texts[name].append(peers[victims[name]])
    wait_until(lambda: f"pid {pid}" in log.read_text(), "the log names it")
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 2"])
    for group in groups.values():
        group.shutdown()
    return {**texts, "log": [log.read_text()], "pid": pid}


@pytest.mark.skipif(on_gloo(), reason="gloo does not name processes")
def test_a_process_has_the_rank_of_the_group_that_a_message_is_about() -> None:
    outcomes = run_outcomes(ranks_change, world_size=3, init=False)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.returned, outcome.describe()
        found = outcome.value
        # A line of the log is about no group: the newest one counts, in its prefix, too.
        for where, rank in (("first", 1), ("second", 2), ("log", 2)):
            for text in found[where]:
                ranks = re.findall(rf"rank (\d+) \(host [^)]*pid {found['pid']},", text)
                assert set(ranks) == {str(rank)}, f"{where} of process {outcome.rank}: {text}"
        prefixes = set(re.findall(r"^\[resilient rank (\d+) ", found["log"][0], re.MULTILINE))
        assert prefixes == {str((outcome.rank + 1) % 3)}, found["log"]
