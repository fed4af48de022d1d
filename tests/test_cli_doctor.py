"""`torch-resilient doctor` finds each mistake, with its remedy, and reports nothing else."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from torch_resilient import cli
from torch_resilient.cli import (
    doctor,
    doctor_checks,
    doctor_facts,
    doctor_peers,
    doctor_relays,
    doctor_trust,
)
from torch_resilient.cli.doctor_checks import (
    Facts,
    Finding,
    Interface,
    Link,
    Relayed,
    Target,
    check_host,
    check_job,
    check_target,
)

RMEM = "4096 131072 6291456"  # as most distributions have it
WMEM = "4096 16384 4194304"


def host(rank: int | None = None, **values: Any) -> Facts:
    """A healthy host; the rank of a job of two if one is given."""
    name = f"node{rank or 0}"
    facts = Facts(
        host=name,
        host_key=name,
        rank=rank,
        world_size=2,
        versions={"python": "3.11.7", "torch": "2.13.0", "torch_resilient": "0.1.0"},
        built_for="2.13.0",
        name_addresses=[f"10.0.0.{1 + (rank or 0)}"],
        master="node0",
        master_addresses=["10.0.0.1"],
        toward_master=("eth0", f"10.0.0.{1 + (rank or 0)}"),
        interfaces=[
            Interface("lo", True, 65536),
            Interface("docker0", True, 1500),  # lowest by name, and no trouble by itself
            Interface("eth0", True, 1500, 10e9),
        ],
        environment={"MASTER_ADDR": "node0"},
        known_variables=["TORCH_RESILIENT_INTERFACE", "TORCH_RESILIENT_LISTEN_PORT"],
        sysctl={
            "net.core.rmem_max": "212992",
            "net.core.wmem_max": "212992",
            "net.ipv4.tcp_rmem": RMEM,
            "net.ipv4.tcp_wmem": WMEM,
            "net.ipv4.tcp_moderate_rcvbuf": "1",
        },
        shm_bytes=8 << 30,
        nofile=(1 << 20, 1 << 20),
    )
    if rank is not None:
        facts.environment["TORCH_RESILIENT_SECRET_FILE"] = "(set)"
        facts.known_variables.append("TORCH_RESILIENT_SECRET_FILE")
        cipher = "TLS_AES_128_GCM_SHA256"
        facts.links = [
            Link(1 - rank, "tcp", 0, "eth0", "eth0", "up", cipher=cipher, forward_secret=True)
        ]
        facts.round_trips_s = {1 - rank: 0.0002}
        facts.clock_offsets_s = {1 - rank: (0.003, 0.0001)}
    return dataclasses.replace(facts, **values)


def only(findings: list[Finding]) -> Finding:
    """The one finding, which must be complete."""
    assert len(findings) == 1, [doctor.finding_text(each) for each in findings]
    (finding,) = findings
    assert finding.seen
    assert finding.why
    assert "`" in finding.remedy, finding.remedy
    return finding


def job(**of_rank_0: Any) -> list[Finding]:
    return check_job([host(0, **of_rank_0), host(1)])


# ---- no false alarm -----------------------------------------------------------------------


def test_healthy_hosts_have_no_finding() -> None:
    assert check_host(host(), several_hosts=True) == []
    assert check_job([host(0), host(1)]) == []


def test_this_machine_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert output.endswith("\nnothing to mend\n")
    assert "torch_resilient 0.1.0" in output


def test_it_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("TORCH_RESILIENT_METRICS", "TORCH_RESILIENT_RECORD_DIR")
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / "job"))
    done = run_job(**{name: str(tmp_path / "job") for name in names})
    assert done.returncode == 0, done.stdout
    assert cli.main(["doctor", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["facts"]
    assert set(names) <= set(facts["environment"])
    assert list(tmp_path.iterdir()) == []
    # doctor still reports a value that the job could not start with.
    monkeypatch.setenv(names[0], "job")
    assert cli.main(["doctor"]) == 1
    assert 'TORCH_RESILIENT_METRICS="job": expected a folder' in capsys.readouterr().out


def test_connections_that_begin_slowly_after_each_idle_second() -> None:
    slow = {
        "net.ipv4.tcp_slow_start_after_idle": "1",
        "net.ipv4.tcp_available_congestion_control": "reno cubic bbr",
        "net.ipv4.tcp_allowed_congestion_control": "reno cubic",
    }

    def findings(
        sysctl: dict[str, str], round_trip_s: float, forced: bool = False
    ) -> list[Finding]:
        ranks = [
            host(0, sysctl=sysctl, round_trips_s={1: round_trip_s}, buffers_forced=forced),
            host(1, sysctl=sysctl),
        ]
        return [each for each in check_job(ranks) if each.check == "slow-start"]

    finding = only(findings(slow, 0.04))
    assert "the round trip is 40 ms" in finding.seen
    assert "net.ipv4.tcp_slow_start_after_idle=0" in finding.remedy
    assert findings(slow, 0.001) == []
    # Root may use what is available.
    assert findings(slow, 0.04, forced=True) == []
    for key, value in (
        ("net.ipv4.tcp_slow_start_after_idle", "0"),
        ("net.ipv4.tcp_allowed_congestion_control", "reno cubic bbr"),
    ):
        assert findings({**slow, key: value}, 0.04) == []


@pytest.mark.parametrize(
    "values",
    [
        # 127.0.1.1 is Debian's default; a job on one host does not mind.
        {"master_addresses": ["127.0.1.1"], "toward_master": ("lo", "127.0.0.1")},
        # TCP's autotuning does not ask rmem_max.
        {"sysctl": {"net.core.rmem_max": "4096"}},
        {"sysctl": {}},
        {"interfaces": [], "nofile": (1024, 1024)},
        {"shm_bytes": None},
        {"environment": {"TORCH_RESILIENT_INTERFACE": "docker0"}, "toward_master": ("docker0", "")},
        {"environment": {"NCCL_SOCKET_IFNAME": "eth0"}},
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0"}},
    ],
)
def test_what_is_merely_unusual_is_no_finding(values: dict[str, Any]) -> None:
    assert check_host(host(**values)) == []


def test_a_job_may_have_differences_that_do_no_harm() -> None:
    # TCP agrees on the smaller MTU; an interface without speed; a fast clock within its error.
    other = host(1)
    other.interfaces[2] = Interface("eth0", True, 9000, None)
    other.clock_offsets_s = {0: (3.0, 2.9)}
    assert check_job([host(0), other]) == []
    # A long way that the buffers fill: 16 connections of 3 MiB over 30 ms are 13 Gbit/s.
    assert job(round_trips_s={1: 0.03}) == []
    # An interface that the backend does not need.
    spare = [
        Link(1, "tcp", 0, "eth0", "eth0", "up"),
        Link(1, "tcp", 1, "eth0", "eth0", "unused", "was cut"),
    ]
    assert job(links=spare) == []


def test_one_clock_for_ranks_of_one_host() -> None:
    ranks = [host(0), host(1, host_key="node0")]
    ranks[0].clock_offsets_s = {1: (9.0, 0.1)}
    assert check_job(ranks) == []


# ---- one host -----------------------------------------------------------------------------


def test_a_name_that_leads_to_loopback() -> None:
    line = "127.0.1.1 node0.example.org node0"
    values = {"master_addresses": ["127.0.1.1"], "hosts_line": line, "toward_master": None}
    finding = only(job(**values))
    assert finding.check == "hosts-file"
    assert finding.where == "rank 0 (node0)"
    assert line in finding.seen
    # The remedy works: it removes the name and keeps the rest of the file.
    command = re.search(r"`(sed -i [^;]*?) /etc/hosts;", finding.remedy)
    assert command
    text = f"127.0.0.1 localhost\n{line}\n10.0.0.2 node0b\n"
    done = subprocess.run(
        ["sh", "-c", command[1].replace("sed -i", "sed")],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == (
        ["127.0.0.1", "localhost", "127.0.1.1", "node0.example.org", "10.0.0.2", "node0b"]
    )


def test_a_name_that_leads_nowhere() -> None:
    finding = only(check_host(host(master_addresses=[], toward_master=None)))
    assert finding.check == "master"
    assert "node0" in finding.seen


def test_packets_to_the_store_leave_by_docker0() -> None:
    finding = only(job(toward_master=("docker0", "172.17.0.1")))
    assert finding.check == "interface"
    assert "172.17.0.1" in finding.seen
    assert "`export TORCH_RESILIENT_INTERFACE=eth0`" in finding.remedy


def test_slow_name_servers_of_the_store_are_found() -> None:
    finding = only(check_host(host(reverse_lookups_s={"10.0.0.1": 5.01, "fd00::1": 0.2})))
    assert finding.check == "reverse-dns"
    assert "10.0.0.1" in finding.seen
    assert "5.0 s" in finding.seen
    assert check_host(host(reverse_lookups_s={"10.0.0.1": 0.02})) == []


def test_reverse_lookups_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def getnameinfo(address: tuple[str, int], flags: int) -> tuple[str, str]:
        asked.append(address[0])
        raise socket.gaierror("no name")

    monkeypatch.setattr(socket, "getnameinfo", getnameinfo)
    assert 0 <= doctor_facts.reverse_lookup_s("192.0.2.7") < 1
    assert 0 <= doctor_facts.reverse_lookup_s("2001:db8::7") < 1
    # The address as the store's socket has it; /etc/hosts does not resolve this form.
    assert asked == ["::ffff:192.0.2.7", "2001:db8::7"]


def test_the_list_of_inward_interfaces_is_that_of_the_backend() -> None:
    source = (ROOT / "csrc" / "transport" / "address.cpp").read_text(encoding="utf-8")
    body = source[source.index("bool leadsInward") :]
    names = re.findall(r'"([a-z-]+)"', body[: body.index("})")])
    assert tuple(names) == doctor_checks.INWARD
    assert doctor_checks.is_inward("docker0")
    assert not doctor_checks.is_inward("eth0")


def test_the_windows_asked_for_are_those_of_the_backend() -> None:
    count = (ROOT / "csrc" / "path" / "path_count.h").read_text(encoding="utf-8")
    (assumed,) = re.findall(r"double assumedBytesPerS = 5e9 / (\d+);", count)
    assert 5e9 / int(assumed) == doctor_checks._ASSUMED_BYTES_PER_S
    roles = (ROOT / "csrc" / "delegate" / "connect_tcp.cpp").read_text(encoding="utf-8")
    (found,) = re.findall(r"kMaxWindowBytes = (\d+)u << 20;", roles)
    assert int(found) << 20 == doctor_checks._WINDOW_MAX_BYTES


def test_the_limit_of_connections_is_that_of_the_backend() -> None:
    source = (ROOT / "csrc" / "path" / "path_count.h").read_text(encoding="utf-8")
    assert re.findall(r"int max = (\d+);", source) == [str(doctor_checks.CONNECTIONS_MAX)]


def test_another_backends_variable_is_not_read() -> None:
    interfaces = [Interface("eth0", True, 1500), Interface("eth1", True, 1500)]
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    finding = only(check_host(host(interfaces=interfaces, environment=environment)))
    assert "`export TORCH_RESILIENT_INTERFACE=eth1`" in finding.remedy


def test_a_misspelled_variable() -> None:
    environment = {"TORCH_RESILIENT_INTERFACES": "eth0", "TORCH_RESILIENT_INTERFACE": "eth0"}
    finding = only(check_host(host(environment=environment)))
    assert finding.seen.endswith(
        "TORCH_RESILIENT_INTERFACES, which nothing reads; did you mean TORCH_RESILIENT_INTERFACE?"
    )
    assert "`unset TORCH_RESILIENT_INTERFACES`" in finding.remedy


def test_the_wrong_torch() -> None:
    versions = {"torch": "2.12.0+cpu", "torch_resilient": "0.1.0"}
    finding = only(check_host(host(versions=versions, built_for="2.13.0+cpu")))
    assert finding.check == "torch"
    assert "built for torch 2.13.0+cpu, but torch 2.12.0+cpu" in finding.seen
    assert "`pip install torch==2.13.0`" in finding.remedy
    missing = only(check_host(host(torch_error="torch_resilient._C is missing")))
    assert "pip install --no-build-isolation" in missing.remedy


@pytest.mark.parametrize(("version", "supported"), [("2.14.1+cpu", True), ("2.16.0", False)])
def test_a_torch_outside_the_supported_range(version: str, supported: bool) -> None:
    versions = {"python": "3.11.7", "torch": version}
    ranges = {"python": ">=3.11,<3.15", "torch": ">=2.11,<2.16"}
    findings = check_host(host(versions=versions, built_for=version, supported=ranges))
    if supported:
        assert findings == []
    else:
        assert only(findings).seen == "torch 2.16.0 is outside the supported range >=2.11,<2.16"


def test_the_supported_ranges_are_those_of_the_list() -> None:
    supported = doctor_facts.collect().supported
    assert supported["python"].startswith(">=3.11,")
    assert supported["torch"].startswith(">=2.11,")


def test_a_backend_that_does_not_start() -> None:
    error = "listen on port 29600: Address already in use; another process has that port"
    remedy = only(check_host(host(backend_error=error))).remedy
    assert "`unset TORCH_RESILIENT_LISTEN_PORT`" in remedy
    # Only the process itself knows its rank: the remedy must use a shell in that process.
    (started,) = re.findall(r"sh -c '(.*) exec python train.py'", remedy)
    for rank in ("0", "1"):
        done = subprocess.run(
            ["sh", "-c", f"{started} exec env"],
            env={**os.environ, "LOCAL_RANK": rank},
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"TORCH_RESILIENT_LISTEN_PORT=2960{rank}\n" in done.stdout
    error = 'TORCH_RESILIENT_CHUNK_BYTES="1": expected a whole number of bytes'
    assert (
        "`unset TORCH_RESILIENT_CHUNK_BYTES`" in only(check_host(host(backend_error=error))).remedy
    )


def test_a_small_shm() -> None:
    finding = only(check_host(host(shm_bytes=64 << 20)))
    assert finding.seen == "/dev/shm holds 64 MiB"
    assert "--shm-size=8g" in finding.remedy


def test_too_few_open_files() -> None:
    finding = only(check_host(host(world_size=128, nofile=(1024, 1 << 20))))
    assert "1024 files" in finding.seen
    assert "`ulimit -n 65536`" in finding.remedy
    assert "--ulimit" in only(check_host(host(world_size=128, nofile=(1024, 4096)))).remedy
    # Each pair of NICs has its connections.
    links = [Link(1, "tcp", path, f"eth{path % 2}", f"eth{path % 2}", "up") for path in range(4)]
    job = {"world_size": 32, "nofile": (1024, 4096)}
    assert check_host(host(**job, links=links[::2])) == []
    assert "may need 1192" in only(check_host(host(**job, links=links))).seen


def test_ranks_of_one_host_need_few_files() -> None:
    environment = {"LOCAL_WORLD_SIZE": "64"}
    alone = host(world_size=64, nofile=(1024, 4096), environment=environment)
    assert check_host(alone) == []
    alone.world_size = 128
    assert "may need 1476" in only(check_host(alone)).seen


def test_buffers_that_the_kernel_will_not_give() -> None:
    findings = check_host(host(socket_buffer_bytes=16 << 20))
    assert [each.check for each in findings] == ["socket-buffers"] * 2
    assert "`sysctl -w net.core.rmem_max=16777216`" in findings[0].remedy
    assert "net.core.wmem_max" in findings[1].remedy


def test_autotuning_that_is_off() -> None:
    finding = only(check_host(host(sysctl={"net.ipv4.tcp_moderate_rcvbuf": "0"})))
    assert "`sysctl -w net.ipv4.tcp_moderate_rcvbuf=1`" in finding.remedy


# ---- a job --------------------------------------------------------------------------------


def test_versions_that_differ() -> None:
    finding = only(job(versions={"torch": "2.13.0", "torch_resilient": "0.2.0"}))
    assert "0.2.0 on ranks [0], 0.1.0 on ranks [1]" in finding.seen
    # Not by its name: no index has this package, or an index has another one of that name.
    assert "pip install --no-build-isolation" in finding.remedy
    finding = only(job(versions={"torch": "2.13.1", "torch_resilient": "0.1.0"}))
    assert "`pip install torch==VERSION`" in finding.remedy


def test_a_clock_that_is_off() -> None:
    ranks = [host(0, clock_offsets_s={1: (5.0, 0.01)}), host(1, clock_offsets_s={})]
    finding = only(check_job(ranks))
    assert finding.where == "rank 1 (node1)"
    assert finding.seen == "its clock is 5.0 s ahead of that of rank 0 (node0)"
    assert "timedatectl set-ntp true" in finding.remedy


@pytest.mark.parametrize(
    ("error", "why", "remedy"),
    [
        ("connect to 10.0.0.2:41000: no answer in 5 s", "packets are dropped", "iptables -I INPUT"),
        ("connect to 10.0.0.2:41000: Connection refused", "nobody listens", "iptables -I INPUT"),
        ("connect to 10.0.0.2:41000: No route to host", "no route", "ip route get"),
        ("connect to 10.0.0.2:41000: Network is unreachable", "no route", "ip route get"),
    ],
)
def test_a_blocked_port(error: str, why: str, remedy: str) -> None:
    links = [Link(1, "tcp", 0, "eth0", "eth0", "down", error)]
    ranks = [
        host(0, links=links),
        host(1, links=[Link(0, "tcp", 0, "eth0", "eth0", "down", error)]),
    ]
    finding = only(check_job(ranks))  # both ends tell of it, and it is one thing
    assert finding.check == "firewall"
    assert finding.where == "rank 0 (node0) eth0 - rank 1 (node1) eth0"
    assert finding.seen == error
    assert why in finding.why
    assert "every operation between them fails" in finding.why
    assert remedy in finding.remedy


def test_filtered_datagrams() -> None:
    error = "no datagram came back from 10.0.0.2:41000 (is UDP filtered between the two?)"
    links = [
        Link(1, "tcp", 0, "eth0", "eth0", "up"),
        Link(1, "udp", 0, "eth0", "eth0", "down", error),
    ]
    finding = only(job(links=links))
    assert finding.check == "udp"
    assert "connections carry everything" in finding.why
    # The user's choice, at one end.
    links[1].last_error = "the far end cannot take them; its log says why"
    assert job(links=links) == []


def test_a_blocked_port_of_one_interface_of_two() -> None:
    error = "connect to 10.9.0.2:29600: no answer in 5 s"
    links = [
        Link(1, "tcp", 0, "eth0", "eth0", "up"),
        Link(1, "tcp", 1, "eth1", "eth1", "connecting", error),
    ]
    environment = {"TORCH_RESILIENT_LISTEN_PORT": "29600"}
    finding = only(job(links=links, environment=environment))
    assert "this way is not used" in finding.why
    assert finding.remedy.startswith(
        "if it is not meant for this job: `export TORCH_RESILIENT_INTERFACE=eth0`"
    )
    # The port is open to be named: it is fixed already.
    assert "--dport 29600" in finding.remedy
    assert "export TORCH_RESILIENT_LISTEN_PORT" not in finding.remedy


def test_a_blocked_port_with_a_way_over_a_relay() -> None:
    error = "connect to 10.0.0.2:41000: no answer in 5 s"
    links = [
        Link(1, "tcp", 0, "eth0", "eth0", "down", error),
        Link(1, "relay", 0, "", "", "up", relay=3),
        Link(1, "relay", 1, "", "", "reserve", relay=2),
    ]
    finding = only(job(links=links))
    assert finding.seen == error
    assert "reach each other only over rank 2, 3" in finding.why
    assert "every operation between them fails" not in finding.why


def test_relays_are_told_and_are_no_finding() -> None:
    # A relay that did not answer once is no trouble of a firewall.
    links = [
        Link(1, "tcp", 0, "eth0", "eth0", "up"),
        Link(1, "relay", 0, "", "", "reserve", "no answer over rank 3", relay=3),
        Link(1, "relay", 1, "", "", "suspect", "no answer over rank 2", relay=2),
    ]
    relayed = Relayed(bytes=2_000_000, bytes_sent=8_000_000, held_max_bytes=300_000, refused=1)
    facts = host(0, links=links, relayed=relayed)
    assert check_job([facts, host(1)]) == []
    assert doctor_relays.about(facts) == [
        "rank 0 (node0): relays: to rank 1 over 3",
        "rank 0 (node0): passes on for others: 2.0 MB, 25% of all it sent, at most 0.3 MB "
        "waiting, 1 refused",
    ]
    assert doctor_relays.about(host(0)) == []
    assert Facts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def test_large_messages_that_do_not_pass() -> None:
    ranks = [host(0), host(1)]
    ranks[0].links = [Link(1, "tcp", 0, "eth0", "eth0", "up", large_stalled=True)]
    ranks[0].peer_errors = {1: "Timed out waiting 15000ms"}
    finding = only(check_job(ranks))
    assert finding.check == "mtu"
    assert "MTU 1500 and 1500" in finding.seen
    assert "`ip link set dev eth0 mtu 1280` on node0" in finding.remedy
    assert "net.ipv4.tcp_mtu_probing=1" in finding.remedy
    # One end has a smaller MTU, as of a tunnel: then that is what passes.
    ranks[1].interfaces[2] = Interface("eth0", True, 1280)
    remedy = only(check_job(ranks)).remedy
    assert "`ip link set dev eth0 mtu 1280` on node0" in remedy
    assert "on node1" not in remedy


def test_a_link_that_fails_for_another_reason() -> None:
    finding = only(job(peer_errors={1: "rank 1 (host node1) died: its connections closed"}))
    assert finding.check == "link"
    assert finding.seen.startswith("rank 1 (host node1) died")


def plain_job(environment: dict[str, str], **link: Any) -> list[Finding]:
    values = {"peer": 1, "kind": "tcp", "index": 0, "nic": "eth0", "remote_nic": "eth0"}
    links = [Link(**{**values, "state": "up", **link})]
    facts = host(0, links=links, environment=environment)
    return list(doctor_trust.check_encryption([facts, host(1)]))


def test_plaintext_between_hosts_is_named_with_its_remedy() -> None:
    finding = only(plain_job({}))
    assert finding.check == "encryption"
    assert finding.where == "rank 0 (node0) - rank 1"
    assert "not encrypted" in finding.seen
    assert "torch-resilient secret" in finding.remedy
    assert "TORCH_RESILIENT_SECRET_FILE" in finding.remedy
    given = {"TORCH_RESILIENT_SECRET_FILE": "(set)"}
    assert "RDMA" in only(plain_job(given, kind="rdma")).seen
    # Chosen, encrypted, within the host, or not used.
    assert plain_job({"TORCH_RESILIENT_ENCRYPTION": "off"}) == []
    assert plain_job({}, cipher="TLS_AES_128_GCM_SHA256") == []
    assert plain_job({}, local=True) == []
    assert plain_job({}, kind="shm") == []
    assert plain_job({}, state="down") == []


def test_each_link_is_shown_with_its_cipher_and_keys() -> None:
    (line,) = doctor_trust.about(host(0))
    assert line == (
        "  to rank 1 eth0-eth0 (tcp): TLS_AES_128_GCM_SHA256, keys of its own, forward secrecy; "
        "proved by a secret file"
    )
    links = [
        Link(1, "udp", 0, "eth0", "eth0", "up", cipher="AES-256-GCM"),
        *(Link(1, "tcp", index, "eth0", "eth0", "up") for index in range(3)),
        Link(2, "tcp", 0, "", "", "reserve", local=True),
        Link(2, "shm", 0, "", "", "up", local=True),
        Link(3, "tcp", 0, "eth0", "eth0", "down"),
    ]
    store = "torch's store, which tells it to everybody who can reach it"
    assert doctor_trust.about(host(0, links=links, environment={})) == [
        f"  to rank 1 eth0-eth0 (udp): AES-256-GCM, keys from {store}, no forward secrecy; "
        f"proved by {store}",
        "  to rank 1 eth0-eth0 (tcp): in plaintext",
        "  to rank 2 (tcp): in plaintext, within the host",
    ]


def test_windows_too_small_for_a_long_link() -> None:
    # 16 connections of 3 MiB over 80 ms are 5 Gbit/s, of 10.
    finding = only(job(round_trips_s={1: 0.08}))
    assert finding.check == "socket-buffers"
    assert "at most 5.03 Gbit/s over 80 ms; eth0 has 10 Gbit/s" in finding.seen
    sizes = re.search(r'tcp_rmem="4096 131072 (\d+)"', finding.remedy)
    assert sizes
    # With the values of the remedy there is no finding.
    mended = {
        "net.ipv4.tcp_rmem": f"4096 131072 {sizes[1]}",
        "net.ipv4.tcp_wmem": f"4096 16384 {sizes[1]}",
    }
    ranks = [host(0, sysctl=mended, round_trips_s={1: 0.08}), host(1, sysctl=mended)]
    assert check_job(ranks) == []
    # Fewer connections, by the user's choice.
    finding = only(job(round_trips_s={1: 0.08}, wan_connections=2))
    assert "unset TORCH_RESILIENT_WAN_CONNECTIONS" in finding.remedy


@pytest.mark.parametrize(
    ("send_max", "receive_max", "forced", "findings"),
    [
        ("16777216", "16777216", False, 0),
        ("212992", "212992", True, 0),  # CAP_NET_ADMIN
        ("16777216", "212992", False, 1),
        ("212992", "16777216", False, 1),
    ],
)
def test_windows_that_the_backend_raises(
    send_max: str, receive_max: str, forced: bool, findings: int
) -> None:
    ranks = [host(0, round_trips_s={1: 0.08}), host(1)]
    for facts in ranks:
        facts.sysctl |= {"net.core.wmem_max": send_max, "net.core.rmem_max": receive_max}
        facts.buffers_forced = forced
    assert len(check_job(ranks)) == findings
    # If the user sets the number of connections, the buffers are the system's.
    ranks[0].wan_connections = 2
    assert "at most 0.63 Gbit/s" in only(check_job(ranks)).seen


def test_datagrams_have_no_windows() -> None:
    links = [Link(1, "udp", 0, "eth0", "eth0", "up"), Link(1, "tcp", 0, "eth0", "eth0", "reserve")]
    assert job(round_trips_s={1: 0.08}, links=links) == []


def test_facts_survive_the_store() -> None:
    facts = host(0, peer_errors={1: "x"})
    assert Facts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def test_who_tries_whom() -> None:
    assert doctor_peers._pairs(["a", "a", "b", "b", "c"], [0, 1, 2, 3, 4]) == [
        (0, 1),
        (2, 3),
        (0, 2),
        (0, 4),
        (2, 4),
    ]
    # Rank 0 has no backend: its host's next one stands in.
    assert doctor_peers._pairs(["a", "a", "b"], [1, 2]) == [(1, 2)]


def run_job(**environment: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*torchrun, "-m", "torch_resilient.cli", "doctor", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_job_on_this_machine() -> None:
    done = run_job()
    told = json.loads(done.stdout)
    assert told["findings"] == []
    assert done.returncode == 0
    first, second = told["facts"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["host_key"] == second["host_key"]
    assert [link["peer"] for link in first["links"]] == [1, 1]  # memory, and a connection
    assert 0 < first["round_trips_s"]["1"] < 1
    offset_s, error_s = first["clock_offsets_s"]["1"]
    assert abs(offset_s) <= error_s + 0.001


def test_a_job_in_which_a_rank_does_not_start() -> None:
    # Both listen on one port: one of them must fail, and the other must not wait for it.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run_job(TORCH_RESILIENT_LISTEN_PORT=str(port))
    told = json.loads(done.stdout)
    assert [finding["check"] for finding in told["findings"]] == ["backend"], told["findings"]
    assert "Address already in use" in told["findings"][0]["seen"]
    assert done.returncode != 0


# ---- a host and port ----------------------------------------------------------------------


def test_a_port_that_answers_and_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # Bound, not listening: it refuses.
        assert cli.main(["doctor", "--host", "127.0.0.1", "--port", str(port), "--json"]) == 1
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert finding["check"] == "port"
        assert "refused" in finding["seen"]
        assert f"--dport {port}" in finding["remedy"]
        listener.listen()
        assert cli.main(["doctor", "--host", "127.0.0.1", "--port", str(port)]) == 0
        assert "nothing to mend" in capsys.readouterr().out


def test_targets() -> None:
    unknown = Target("node9", 29500, resolve_error="Name or service not known")
    assert only(check_target(host(), unknown)).check == "name"
    silent = Target("node1", 29500, tries=[("10.0.0.2", "no answer in 5 s")])
    assert "dropped by a firewall" in only(check_target(host(), silent)).why
    # IPv6 first, and dead: each attempt waits for it. Refused at once does no harm.
    tries = [("fd00::2", "no answer in 5 s"), ("10.0.0.2", "")]
    finding = only(check_target(host(), Target("node1", 29500, tries=tries)))
    assert finding.check == "address-family"
    assert "fd00::2 does not answer" in finding.seen
    tries[0] = ("fd00::2", "Connection refused")
    assert check_target(host(), Target("node1", 29500, tries=tries)) == []


def test_interfaces_and_addresses_of_this_machine() -> None:
    by_name = {each.name: each for each in doctor_facts.interfaces()}
    assert by_name["lo"].up
    assert by_name["lo"].mtu_bytes >= 1280
    assert doctor_facts.interface_of("127.0.0.1") == "lo"
    assert doctor_facts.interface_of("203.0.113.77") == "?"
    assert doctor_facts.toward("127.0.0.1") == ("lo", "127.0.0.1")
    assert doctor_facts.addresses_of("localhost")


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = -1, *rest: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *rest)

    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    monkeypatch.setattr(socket, "socket", Socket)
    assert doctor_facts.toward("localhost") == ("lo", "127.0.0.1")
    first, second = doctor_facts.try_target("localhost", 1).tries
    assert first == ("::1", os.strerror(errno.EAFNOSUPPORT))
    assert second[0] == "127.0.0.1"


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_RESILIENT_SECRET", "swordfish-swordfish")
    assert "swordfish" not in json.dumps(doctor_facts.collect().as_json())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "x"], "--host and --port go together"),
        (["--port", "5"], "--host and --port go together"),
        (["--host", "x", "--port", "70000"], "--port: expected 1 to 65535, got 70000"),
    ],
)
def test_bad_input_is_named_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"torch-resilient doctor: {text}")


def test_a_job_without_a_store_is_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for command in ("doctor", "bench"):
        assert cli.main([command]) == 2
        output, errors = capsys.readouterr()
        assert (output, errors.count("\n")) == ("", 1)
        assert errors.startswith(f"torch-resilient {command}: ")
        assert "MASTER_ADDR expected, but not set" in errors


def test_a_finding_is_told_with_its_command_unbroken() -> None:
    remedy = "`sysctl -w net.ipv4.tcp_rmem=1` " * 5
    text = doctor.finding_text(Finding("x", "node0", "seen " * 40, "why", remedy))
    assert text.startswith("[x] node0\n  seen   seen")
    assert max(map(len, text.splitlines())) <= 100
    assert "net.ipv4.tcp_rmem=1`" in text
