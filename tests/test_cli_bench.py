"""`torch-resilient bench`: the numbers are those of the links, and the tables show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from conftest import ROOT
from harness import run_ranks
from stats_doubles import datagram_stats, path_stats

from torch_resilient import cli
from torch_resilient._reports.stats import RelayStats
from torch_resilient.cli import bench


def measured(rank: int) -> list[dict[str, Any]]:
    links = bench.measure_all(0.25)
    dist.barrier()
    return links


def test_the_numbers_are_those_of_the_links() -> None:
    # 0 to 1 carries 20 MB/s; to and from 2 everything takes longer.
    rules = "rate rank=0 peer=1 bytes_per_s=20e6; delay rank=2 ms=30"
    env = {"TORCH_RESILIENT_FAULTS": rules}
    links, *others = run_ranks(measured, world_size=3, env=env, timeout_s=90)
    assert others == [[], []]
    by_ends = {(link["from"], link["to"]): link for link in links}
    assert set(by_ends) == {(a, b) for a in range(3) for b in range(3) if a != b}
    print(bench.text_of(["a", "b", "c"], links))
    for (a, b), link in by_ends.items():
        assert link["round_trip_min_s"] <= link["round_trip_s"]
        # One way of each round trip with rank 2 is 30 ms longer.
        assert (link["round_trip_s"] >= 0.03) == (2 in (a, b)), link
        assert link["reconnects"] == 0
        (nic,) = link["nics"]
        assert nic["connections"] == link["connections"] == 1
        assert nic["bytes"] > 0
    assert by_ends[0, 1]["goodput_bytes_per_s"] == pytest.approx(20e6, rel=0.2)
    assert by_ends[1, 0]["goodput_bytes_per_s"] > 2 * by_ends[0, 1]["goodput_bytes_per_s"]


def test_goodput_is_that_of_the_end() -> None:
    # Slow at first: 1 MB a second; from 4 s on 10 MB a second.
    arrivals = [(float(i), 1_000_000) for i in range(5)]
    arrivals += [(4 + i / 10, 1_000_000) for i in range(1, 61)]
    assert bench.goodput(arrivals) == pytest.approx(10e6)
    # The first of two cannot count: its start is unknown.
    assert bench.goodput([(1.0, 5_000_000), (2.0, 1_000_000)]) == pytest.approx(1e6)
    assert bench.goodput([(1.0, 5)]) == bench.goodput([]) == 0


def link(a: int, b: int, **values: Any) -> dict[str, Any]:
    return {
        "from": a,
        "to": b,
        "round_trip_s": 0.0123456,
        "goodput_bytes_per_s": 1.5e9,
        "connections": 4,
        "nics": [{"nic": "eth0", "remote_nic": "eth0", "connections": 4, "bytes": 100}],
        "relays": [],
        "chunks_retransmitted": 0,
        "reconnects": 0,
        "packets": 0,
        "packets_dropped": 0,
        **values,
    }


def test_the_tables() -> None:
    nics = [
        {"nic": "eth0", "remote_nic": "eth0", "connections": 3, "bytes": 750},
        {"nic": "eth1", "remote_nic": "eth1", "connections": 1, "bytes": 250},
    ]
    links = [link(0, 1, nics=nics), link(1, 0, reconnects=1, chunks_retransmitted=2)]
    assert bench.text_of(["a", "b"], links) == (
        "rank 0: a\nrank 1: b\n\n"
        "round trip, ms\nfrom\\to    0    1\n      0    - 12.3\n      1 12.3    -\n\n"
        "goodput, MB/s\nfrom\\to    0    1\n      0    - 1500\n      1 1500    -\n\n"
        "connections used\nfrom\\to 0 1\n      0 - 4\n      1 4 -\n\n"
        "0 to 1: eth0-eth0 75% on 3, eth1-eth1 25% on 1\n"
        "1 to 0: 1 reconnects, 2 chunks retransmitted"
    )
    lossy = bench.text_of(["a", "b"], [link(0, 1, packets=1000, packets_dropped=11), link(1, 0)])
    assert lossy.endswith("\n\n0 to 1: 11 of 1000 datagrams dropped")
    failed = bench.text_of(["a", "b"], [{"from": 0, "to": 1, "error": "no way"}, link(1, 0)])
    assert "0      - failed" in failed
    assert failed.endswith("\n0 to 1: no way")


def test_dropped_datagrams_are_those_of_the_transfer() -> None:
    def paths(nbytes: int, packets: int, dropped: int) -> bench._Paths:
        datagrams = datagram_stats(packets=packets, dropped=dropped)
        udp = path_stats(kind="udp", bytes_sent=nbytes, datagrams=datagrams)
        return {each.key: each for each in (path_stats(bytes_sent=0), udp)}

    before = paths(1_000_000, 800, 5)
    after = paths(2_000_000, 1500, 12)
    used = bench._used(before, after)
    assert (used["packets"], used["packets_dropped"]) == (700, 7)
    # Made meanwhile.
    used = bench._used({}, after)
    assert (used["packets"], used["packets_dropped"]) == (1500, 12)


def test_relays_are_not_connections() -> None:
    over = RelayStats(rank=2, host="c", ours=True, window_bytes=1)

    def paths(direct: int, relayed: int) -> bench._Paths:
        relay = path_stats(kind="relay", nic="", remote_nic="", relay=over, bytes_sent=relayed)
        return {each.key: each for each in (path_stats(bytes_sent=direct), relay)}

    used = bench._used(paths(1_000_000, 2_000_000), paths(4_000_000, 3_000_000))
    assert used["connections"] == 1
    assert [nic["bytes"] for nic in used["nics"]] == [3_000_000]
    assert used["relays"] == [{"rank": 2, "host": "c", "bytes": 1_000_000}]
    # Pings are no use of a relay.
    assert bench._used(paths(0, 0), paths(1_000_000, 500))["relays"] == []


def test_what_relays_have_done() -> None:
    def passed_on(nbytes: int, sent: int, held: int, refused: int = 0) -> dict[str, int]:
        names = ("bytes", "bytes_sent", "held_max_bytes", "refused")
        return dict(zip(names, (nbytes, sent, held, refused), strict=True))

    idle = passed_on(500, 9_000_000, 2_000_000)
    before = [idle, passed_on(1_000_000, 5_000_000, 0), idle]
    after = [idle, passed_on(4_000_000, 9_000_000, 700_000, 2), idle]
    (relay,) = bench.relays_between(before, after)
    assert relay == {
        "rank": 1,
        "bytes": 3_000_000,
        "bytes_sent": 4_000_000,
        "refused": 2,
        "share": 0.75,
        "held_max_bytes": 700_000,
    }
    over = [{"rank": 1, "host": "b", "bytes": 300}]
    links = [link(0, 2, relays=over), link(2, 0), link(0, 1)]
    text = bench.text_of(["a", "b", "c"], links, [relay])
    assert text.endswith(
        "\n\n0 to 2: 75% over rank 1 (b)\n"
        "relay 1 (b): 3.0 MB for others, 75% of all it sent, at most 0.7 MB waiting, 2 refused; "
        "for 0 to 2"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.0123"), (9.996, "10.00"), (123.4, "123"), (12345, "12345")]
)
def test_three_digits_count(value: float, text: str) -> None:
    assert bench._significant(value) == text


def test_rank_0_of_a_job_prints_the_result() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "torch_resilient.cli", "bench", "--seconds=0.1", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["hosts"]) == 2
    assert told["relays"] == []
    assert [(each["from"], each["to"]) for each in told["links"]] == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ([], {}, "it runs within a job: torchrun"),
        (["--seconds", "0"], {}, "--seconds: expected 0.1 to 3600, got 0"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "one rank has no links: start at least 2"),
    ],
)
def test_bad_input_is_named_in_one_line(
    arguments: list[str],
    environment: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["bench", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"torch-resilient bench: {text}")
