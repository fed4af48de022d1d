"""The state of a running job over HTTP, and `torch-resilient top`, which shows it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import select
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from harness import init_group, run_outcomes, run_ranks, wait_until
from stats_doubles import (
    datagram_stats,
    path_stats,
    peer_stats,
    process_snapshot,
    rdma_stats,
    trust_stats,
)

from torch_resilient import (
    Event,
    PathStats,
    cli,
    faults,
    stats,
)
from torch_resilient._observe import endpoint, observers, prometheus, recorder
from torch_resilient._observe.snapshot import Snapshot
from torch_resilient._reports.stats import PeerState, RelayCounts, RelayStats
from torch_resilient.cli import top

LABEL = r'\w+="(?:[^"\\\n]|\\[\\"n])*",?'
SAMPLE = re.compile(rf"(?P<name>[a-zA-Z_:][\w:]*)\{{(?P<labels>(?:{LABEL})*)\}} (?P<value>\S+)")


def samples(text: str) -> dict[str, dict[str, float]]:
    """Parses Prometheus text: value by labels by name. Fails where the format is broken."""
    found: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, f"{name} has two heads"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match["name"] in kinds, f"{match['name']} has no head"
            assert (kinds[match["name"]] == "counter") == match["name"].endswith("_total")
            of_name = found.setdefault(match["name"], {})
            assert match["labels"] not in of_name, f"twice: {line}"
            of_name[match["labels"]] = float(match["value"])
    assert text.endswith("\n")
    return found


def told(time_s: float = 100.0, state: PeerState = "up", **path: Any) -> Snapshot:
    """A process's snapshot: rank 0 of 2, one path to rank 1."""
    return process_snapshot(
        peer_stats(path_stats(**path), host='b"\\\n', state=state), time_s=time_s
    )


def test_the_text_for_prometheus_is_well_formed() -> None:
    found = samples(prometheus.render(told(state="suspect", reconnects=3)))
    assert found["torch_resilient_collectives_total"] == {'rank="0",group="0"': 7}
    labels = 'rank="0",peer="1",kind="tcp",index="0",nic="eth0",remote_nic="eth0"'
    assert found["torch_resilient_path_reconnects_total"] == {labels: 3}
    assert found["torch_resilient_path_round_trip_seconds"] == {labels: 0.002}
    states = found["torch_resilient_peer_state"]
    assert sum(states.values()) == 1
    # Host names come from other machines.
    assert states[r'rank="0",peer="1",peer_host="b\"\\\n",state="suspect"'] == 1


def test_the_document_lists_every_metric() -> None:
    path = path_stats(kind="udp", datagrams=datagram_stats())
    rdma = path_stats(kind="rdma", rdma=rdma_stats())
    rendered = set(samples(prometheus.render(process_snapshot(peer_stats(path, rdma)))))
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("| metric |")[2].partition("\n\n")[0]
    listed = set()
    for row in table.splitlines():
        names = re.findall(r"`(torch_resilient_\w+|\.\.\._\w+)`", row)
        for name in names:
            if not name.startswith("..."):
                prefix = re.match(r"torch_resilient_(?:peer|path|datagrams|rdma|relay)|", name)[0]
            listed.add(name.replace("...", prefix))
    assert listed == rendered


def test_faults_of_trust_are_shown_by_reason() -> None:
    quiet, loud = trust_stats(), trust_stats(wrong_secret=3, plaintext=2)
    found = samples(prometheus.render(process_snapshot(trust=loud)))
    counts = found["torch_resilient_trust_faults_total"]
    assert counts['rank="0",reason="wrong_secret"'] == 3
    assert counts['rank="0",reason="plaintext"'] == 2
    assert sum(counts.values()) == 5
    assert found["torch_resilient_own_secret"] == {'rank="0"': 0}
    shown = top.frame([], [process_snapshot(trust=loud)])
    head, row = (line.split() for line in shown.splitlines()[-2:])
    assert head[:4] == ["failed", "trust", "wrong", "secret"]
    assert row == ["0", "3", "2", "0", "0", "0", "0", "0", "0"]
    assert "trust" not in top.frame([], [process_snapshot(trust=quiet)])


def test_datagrams_have_numbers_of_their_own() -> None:
    counts = {name: place for place, (name, *_) in enumerate(prometheus._OF_DATAGRAMS)}
    path = {"kind": "udp", "datagrams": datagram_stats(**counts)}
    found = samples(prometheus.render(told(**path)))
    labels = 'rank="0",peer="1",kind="udp",index="0",nic="eth0",remote_nic="eth0"'
    for attribute, kind, _ in prometheus._OF_DATAGRAMS:
        name = prometheus.metric_name("torch_resilient_datagrams", attribute, kind)
        assert found[name] == {labels: counts[attribute]}
    assert "torch_resilient_datagrams_pace_bytes_per_second" in found
    assert "torch_resilient_datagrams_packets_total" in found
    assert not any("datagrams" in name for name in samples(prometheus.render(told())))


def serve(rank: int) -> list[Any]:
    """Both ranks look at both, over the sockets; rank 0 at an unknown page as well."""
    folder = os.environ["TORCH_RESILIENT_METRICS"]
    everyone, unused = dist.new_group([0, 1]), dist.new_group([0, 1])
    assert unused.size() == 2
    for group in (None, everyone):
        dist.all_reduce(torch.ones(1 << 16), group=group)
    dist.barrier()
    endpoints = top.find([folder])
    looks = top.fetch_all(endpoints)
    mine = next(path for path in endpoints if f".{os.getpid()}." in path)
    connection = top._UnixConnection(mine)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    kind = answer.headers["Content-Type"]
    connection.close()
    connection = top._UnixConnection(mine)
    connection.request("GET", "/else")
    status = connection.getresponse().status
    connection.close()
    mode = stat.S_IMODE(os.stat(mine).st_mode), stat.S_IMODE(os.stat(folder).st_mode)
    dist.barrier()
    return [looks, text, kind, status, mode, Path(mine).name]


def test_every_process_serves_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "job"
    results = run_ranks(serve, env={"TORCH_RESILIENT_METRICS": str(folder)})
    for rank, (looks, text, kind, status, mode, name) in enumerate(results):
        assert [look.rank for look in looks] == [0, 1]
        assert [look.world_size for look in looks] == [2, 2]
        assert name.startswith(f"rank0000{rank}.")
        # Groups of the same ranks share their peers; no value is reported twice, nor lost by a
        # group that has not used them.
        assert [len(look.groups) for look in looks] == [3, 3]
        (peer,) = looks[rank].peers
        assert (peer.rank, peer.state) == (1 - rank, "up")
        assert sum(path.bytes_sent for path in peer.paths) > 1 << 16
        found = samples(text)
        sent = found["torch_resilient_path_bytes_sent_total"]
        assert sum(sent.values()) > 1 << 16
        assert kind == prometheus.CONTENT_TYPE
        assert status == 404
        # Other users have no access.
        assert mode == (0o600, 0o700)
    assert not list(folder.iterdir()), "sockets outlive their processes"


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for first in range(20000, 30000, 17):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def look_at_both(rank: int, first: int) -> list[list[Any]]:
    os.environ["LOCAL_RANK"] = str(rank)
    init_group()
    dist.barrier()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert cli.main(["top", "--json"]) == 0
    looks = (
        top.fetch_all(top.find([str(first), f"127.0.0.1:{first + 1}"])),
        [Snapshot.from_dict(each) for each in json.loads(told.getvalue())],
        top.fetch_all(top.find([str(first)])),
    )
    dist.barrier()
    dist.destroy_process_group()
    return [[each.rank for each in look] for look in looks]


def test_ranks_of_a_host_take_ports_side_by_side() -> None:
    first = free_ports(3)
    env = {"TORCH_RESILIENT_METRICS": str(first)}
    assert run_ranks(look_at_both, first, init=False, env=env) == [[[0, 1], [0, 1], [0]]] * 2


def nothing(rank: int) -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("value", ["job", "1.2.3.4", "host:port", "70000", "::1:9400"])
def test_a_value_that_cannot_be_read_fails_the_start(value: str) -> None:
    for outcome in run_outcomes(nothing, env={"TORCH_RESILIENT_METRICS": value}):
        assert outcome.exception
        assert outcome.exception.startswith(f'ValueError: TORCH_RESILIENT_METRICS="{value}"')
        assert "expected a folder" in outcome.exception


def test_a_name_that_is_too_long_fails_the_start(tmp_path: Path) -> None:
    value = str(tmp_path / ("x" * 100))
    for outcome in run_outcomes(nothing, env={"TORCH_RESILIENT_METRICS": value}):
        assert "choose a shorter folder" in (outcome.exception or "")


def warned(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_group()
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return [str(each.message) for each in caught if "TORCH_RESILIENT" in str(each.message)]


def test_a_port_beyond_the_last_is_named() -> None:
    with pytest.raises(ValueError, match="METRICS=65530: local rank 6 would have port 65536"):
        endpoint.Endpoint("65530", rank=0, local_rank=6)


def test_a_folder_that_cannot_be_made_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "job")
    env = {"TORCH_RESILIENT_METRICS": folder, "TORCH_RESILIENT_RECORD_DIR": folder}
    for texts in run_ranks(warned, init=False, env=env):
        assert len(texts) == 2
        assert all("the job goes on without it" in text for text in texts)


def test_nothing_runs_unless_asked_for() -> None:
    assert observers._METRICS == endpoint.VARIABLE
    assert observers._RECORD == recorder.VARIABLE
    for names in run_ranks(nothing):
        assert not [name for name in names if "resilient" in name]
    env = {"TORCH_RESILIENT_METRICS": "127.0.0.1:0"}
    for names in run_ranks(nothing, env=env):
        assert "torch_resilient metrics" in names


def create_and_destroy(rank: int) -> int:
    """Groups come and go while another thread looks; returns how often it looked."""
    from torch_resilient._observe.snapshot import snapshot

    looks, over = 0, threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        nonlocal looks
        try:
            while not over.is_set():
                snapshot()
                looks += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for i in range(8):
        init_group(f"round{i}")
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1000), group=group)
        dist.destroy_process_group()
    over.set()
    thread.join()
    if errors:
        raise errors[0]
    return looks


def test_looking_while_groups_come_and_go() -> None:
    assert all(looks > 0 for looks in run_ranks(create_and_destroy, init=False))


def clients(rank: int) -> tuple[int, int]:
    """The number of slow clients that are accepted, and whether others are served after them."""
    dist.barrier()
    (where,) = top.find([f"{os.environ['TORCH_RESILIENT_METRICS']}"])
    slow = []
    for _ in range(endpoint._CLIENTS_MAX + 4):
        client = socket.socket(socket.AF_UNIX)
        client.connect(where)
        slow.append(client)
    closed = 0

    def count() -> bool:
        nonlocal closed
        for client in list(slow):
            client.setblocking(False)
            try:
                if client.recv(1) == b"":
                    closed += 1
                    slow.remove(client)
            except BlockingIOError:
                pass
        return closed >= 4

    wait_until(count, "those above the limit are sent away")
    still = len(slow)
    for client in slow:
        client.close()
    wait_until(lambda: bool(top.fetch_all([where])), "others are served")
    return closed, still


def test_clients_are_limited(tmp_path: Path) -> None:
    env = {"TORCH_RESILIENT_METRICS": str(tmp_path)}
    assert run_ranks(clients, world_size=1, env=env) == [(4, endpoint._CLIENTS_MAX)]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"METRICS=.*mode 0777.*chmod 700"):
        endpoint.Endpoint(f"{tmp_path}/", rank=0)
    tmp_path.chmod(0o1777)  # as /tmp: names stay with their owners
    endpoint.Endpoint(f"{tmp_path}/", rank=0).close()


def test_a_client_gets_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_CLIENT_MAX_S", 0.3)
    served = endpoint.Endpoint(f"{tmp_path}/", rank=0)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(served.address))
            client.settimeout(0.02)

            def sent_away() -> bool:
                try:
                    client.send(b"G")  # it is never silent for long
                    return client.recv(1) == b""
                except TimeoutError:
                    return False
                except BrokenPipeError:
                    return True

            wait_until(sent_away, "a client that takes for ever is sent away")
    finally:
        served.close()


def test_no_processor_is_taken_while_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, pauses = 0, 0

    def no_descriptor(_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def sleep(_: float) -> None:
        nonlocal pauses
        pauses += 1

    monkeypatch.setattr(socketserver.TCPServer, "get_request", no_descriptor)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(endpoint, "time", clock)
    served = endpoint.Endpoint(f"{tmp_path}/", rank=0)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(served.address))
            wait_until(lambda: tries > 2, "it is tried again")
    finally:
        served.close()
    assert pauses == tries


def test_changes_are_told_once() -> None:
    before = told()
    assert top.changes(before, told(time_s=101)) == []
    now = told(time_s=101, reconnects=2, last_error="cut by fault injection")
    (text,) = top.changes(before, now)
    assert text == "rank 0: path tcp 0 to rank 1: reconnected 2 times: cut by fault injection"
    dead = peer_stats(path_stats(), state="dead", last_error="its connections closed")
    now = process_snapshot(dead, time_s=101, events=(Event(100.5, "plan", "plan 2"),))
    assert top.changes(before, now) == [
        "rank 0: plan 2",
        "rank 0: rank 1: up -> dead: its connections closed",
    ]
    assert top.changes(now, now) == []
    # The clock has been set back.
    later = replace(now, events=(*now.events, Event(40.0, "plan", "plan 3")))
    assert top.changes(now, later) == ["rank 0: plan 3"]


def test_the_table_has_rates_of_the_interval() -> None:
    before, now = told(), told(time_s=102, bytes_sent=4_001_000, state="up")
    lines = top.frame([before], [now]).splitlines()
    assert lines[0].startswith("1 of 2 ranks, on a; 1 operations pending; ")
    cells = re.split(r"\s{2,}", lines[3])
    assert cells[:7] == ["0", "1", "tcp 0", "up", "2.0", "0.0", "2.00"]
    # A process that was not there before has no rates yet.
    assert re.split(r"\s{2,}", top.frame([], [now]).splitlines()[3])[4:6] == ["-", "-"]


def test_processes_in_containers_may_share_a_number() -> None:
    def look(time_s: float, *sent: int) -> list[Snapshot]:
        return [replace(told(time_s, bytes_sent=n), rank=rank) for rank, n in enumerate(sent)]

    before, now = look(100, 0, 50_000_000), look(101, 1_000_000, 52_000_000)
    for looks in (now, now[::-1]):
        rows = [re.split(r"\s{2,}", line) for line in top.frame(before, looks).splitlines()[3:5]]
        assert sorted((row[0], row[4]) for row in rows) == [("0", "1.0"), ("1", "2.0")]
    # Without a default group it is still the same process.
    none = replace(now[1], rank=None)
    assert top.earlier_looks(before[1:], [none]) == before[1:]
    assert top.earlier_looks(before[:1], now) == [before[0], None]


def test_a_process_that_does_not_answer_has_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([[told()], [], [], [told(time_s=103)]])
    with socket.socket(socket.AF_UNIX) as job:
        job.bind(str(tmp_path / "rank00000.1.sock"))
        job.listen()

        def fetch_all(endpoints: Sequence[str]) -> list[Snapshot]:
            if (told := next(looks, None)) is not None:
                return told
            job.close()
            return []

        monkeypatch.setattr(top, "fetch_all", fetch_all)
        assert cli.main(["top", str(tmp_path), "--interval", "0.05"]) == 0
    assert next(looks, None) is None, "it did not watch on"
    output = capsys.readouterr().out
    assert "rank 0: no answer any more" in output
    assert output.endswith("\nthe job has ended\n")


def test_datagrams_have_a_table_of_their_own() -> None:
    def look(time_s: float, **counts: float) -> Snapshot:
        return told(time_s=time_s, kind="udp", datagrams=datagram_stats(**counts))

    before = look(100, packets=1000, parity=100, retransmitted=10)
    now = look(
        102,
        packets=3000,
        parity=200,
        retransmitted=30,
        drop_rate=0.0125,
        burst_packets=2.5,
        pace_bytes_per_s=120e6,
        recovered=7,
        zero_filled=5,
    )
    lines = top.frame([before], [now]).splitlines()
    assert lines[3].endswith("eth0-eth0")
    assert lines[4] == ""
    assert re.split(r"\s{2,}", lines[6]) == (
        ["0", "1", "udp 0", "all", "120.0", "1.25", "2.5", "5.0", "1.0", "7", "5", "0"]
    )
    # Shares are of an interval.
    assert re.split(r"\s{2,}", top.frame([], [now]).splitlines()[6])[7:9] == ["-", "-"]


def test_rdma_paths_have_a_table_of_their_own() -> None:
    counts = {"completed": 5, "failed": 2, "copied_bytes": 3_000_000}
    counts["placed_bytes"] = 4_000_000
    now = told(kind="rdma", rdma=rdma_stats(**counts))
    lines = top.frame([], [now]).splitlines()
    assert re.split(r"\s{2,}", lines[6]) == (
        ["0", "1", "rdma 0", "mlx5_0-mlx5_1", "1", "17", "4096", "5", "2", "3", "4"]
    )
    # There has been no queue pair yet.
    assert "mlx5_0" not in top.frame([], [told(kind="rdma", rdma=rdma_stats(device=""))])


def test_rdma_has_numbers_of_its_own() -> None:
    counts = {name: place for place, (name, *_) in enumerate(prometheus._OF_RDMA)}
    found = samples(prometheus.render(told(kind="rdma", rdma=rdma_stats(**counts))))
    labels = (
        'rank="0",peer="1",kind="rdma",index="0",nic="eth0",remote_nic="eth0",'
        'device="mlx5_0",remote_device="mlx5_1"'
    )
    for attribute, kind, _ in prometheus._OF_RDMA:
        name = prometheus.metric_name("torch_resilient_rdma", attribute, kind)
        assert found[name] == {labels: counts[attribute]}
    assert not any("rdma" in name for name in samples(prometheus.render(told())))


def test_relays_have_a_table_of_their_own() -> None:
    relay = RelayCounts(
        flows=3,
        messages=9,
        bytes=2_000_000,
        held_bytes=500_000,
        held_max_bytes=600_000,
        refused=4,
    )
    over = RelayStats(rank=2, host="c", ours=True, window_bytes=1)
    path = path_stats(kind="relay", relay=over, bytes_sent=8_000_000)
    before = process_snapshot(peer_stats(path))
    now = process_snapshot(peer_stats(path), relay=relay, time_s=before.time_s + 2)
    lines = top.frame([before], [now]).splitlines()
    assert lines[3].endswith("over rank 2")
    assert re.split(r"\s{2,}", lines[6]) == ["0", "3", "1.0", "25.0", "0.5", "4"]
    # A rank that relays for nobody is not listed.
    assert "for others" not in top.frame([], [before])


def watched(rank: int) -> str:
    """Rank 0 shows the table of both; a connection is cut between its two looks."""

    def paths() -> dict[str, PathStats]:
        return {path.name: path for path in stats().peers[0].paths}

    dist.all_reduce(torch.ones(1000))
    wait_until(lambda: "shm" in paths(), "memory is shared")
    dist.barrier()
    output = io.StringIO()
    if rank == 0:
        folder = os.environ["TORCH_RESILIENT_METRICS"]
        fetch, looks = top.fetch_all, []

        def look(endpoints: Sequence[str]) -> list[Snapshot]:
            looks.append(fetch(endpoints))
            if len(looks) == 1:
                faults.cut(peer=1, path=0)
                wait_until(lambda: paths()["tcp 0"].reconnects > 0, "the path is made again")
            return looks[-1]

        top.fetch_all = look
        with contextlib.redirect_stdout(output):
            assert cli.main(["top", folder, "--once", "--interval", "0.1"]) == 0
    dist.barrier()
    return output.getvalue()


def test_top_shows_the_ranks_and_what_happens(tmp_path: Path) -> None:
    text = run_ranks(watched, env={"TORCH_RESILIENT_METRICS": str(tmp_path)})[0]
    assert text.startswith("2 of 2 ranks, on ")
    rows = [re.split(r"\s{2,}", line)[:3] for line in text.splitlines()[3:7]]
    assert rows == [[a, b, path] for a, b in ("01", "10") for path in ("shm", "tcp 0")]
    assert re.search(r"rank 0: path tcp 0 to rank 1: reconnected: cut by fault injection", text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "where? give the folder"),
        (["./nowhere"], "./nowhere: no such folder"),
        (["host"], "host: neither a folder nor host:port"),
        (["127.0.0.1:1", "--interval", "0"], "--interval: expected 0.05 to 3600"),
    ],
)
def test_bad_input_is_named_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"torch-resilient top: {text}")


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A killed process leaves its socket behind.
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "rank00000.1.sock"))
    assert cli.main(["top", str(tmp_path), "--once"]) == 1
    assert "no process answers" in capsys.readouterr().err


# Permissions are checked for the effective user; what is imported later could not be read.
AS_NOBODY = """
import os, sys
from torch_resilient import cli
os.setegid(65534)
os.seteuid(65534)
sys.exit(cli.main(["top", "--once", "--interval", "0.05", *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["folder", "list", "parent", "socket"])
def test_a_job_of_another_user_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    monkeypatch.setattr(endpoint, "snapshot", lambda: told())
    # Outside pytest's own folder, which is closed to others.
    with tempfile.TemporaryDirectory(dir="/tmp") as top_folder:
        folder = Path(top_folder) / "parent" / "job"
        served = endpoint.Endpoint(f"{folder}/", rank=0)
        try:
            for each in (folder, *folder.parents):
                if top_folder in str(each):
                    each.chmod(0o755)
            modes = {"folder": (folder, 0o700), "list": (folder, 0o711)}
            modes |= {"parent": (folder.parent, 0o700)}
            if closed in modes:
                path, mode = modes[closed]
                path.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, str(folder)],
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            served.close()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"torch-resilient top: {folder}")
    who = "another user" if closed == "parent" else "root"
    assert f"permission denied: only {who}, who runs the job, may watch it" in line


def test_q_ends_it_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "snapshot", lambda: told(time_s=time.time()))
    served = endpoint.Endpoint(f"{tmp_path}/", rank=0)
    ours, its = os.openpty()
    try:
        before = termios.tcgetattr(its)
        command = [sys.executable, "-m", "torch_resilient.cli", "top", str(tmp_path)]
        with subprocess.Popen(
            [*command, "--interval", "0.05"], stdin=its, stdout=its, start_new_session=True
        ) as process:
            try:
                shown = b""
                while b"1 of 2 ranks" not in shown:
                    assert select.select([ours], [], [], 30)[0], shown
                    shown += os.read(ours, 4096)
                os.write(ours, b"xq")
                while process.poll() is None:
                    if select.select([ours], [], [], 0.05)[0]:  # else it could not write
                        os.read(ours, 4096)
            finally:
                process.kill()
        assert process.returncode == 0
        assert termios.tcgetattr(its) == before
    finally:
        served.close()
        os.close(ours)
        os.close(its)


def test_a_port_without_a_host_is_on_this_one() -> None:
    assert top.find([":9400"]) == top.find(["9400"]) == ["127.0.0.1:9400"]
    assert endpoint.parse_tcp(":9400") == ("127.0.0.1", 9400)
    assert top.find(["[::1]:9400", "node0:9400"]) == ["[::1]:9400", "node0:9400"]


def test_json_is_what_the_processes_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "snapshot", lambda: told())
    served = endpoint.Endpoint(f"{tmp_path}/", rank=0)
    try:
        assert cli.main(["top", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == [told().to_dict()]
    finally:
        served.close()
    assert not list(tmp_path.iterdir())
