"""`torch-resilient doctor` about RDMA: each mistake is found, and nothing else is reported."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from test_cli_doctor import host, only

from torch_resilient import _native
from torch_resilient.cli import doctor_rdma
from torch_resilient.cli.doctor_checks import Facts, Finding, Link, Rdma, RdmaGpu, RdmaPort


def port(**values: Any) -> RdmaPort:
    """A port that works."""
    works = RdmaPort(
        "mlx5_0",
        1,
        state="ACTIVE",
        link_layer="Ethernet",
        firmware="28.39",
        nic="eth0",
        gids=["0: IB/RoCE v1 fe80::1", "3: RoCE v2 10.0.0.1"],
        mtu_bytes=4096,
        is_seen=True,
    )
    return dataclasses.replace(works, **values)


def rdma(*ports: RdmaPort, **values: Any) -> Rdma:
    """A host on which everything works."""
    return dataclasses.replace(Rdma(ports=list(ports or [port()]), nodes=["uverbs0"]), **values)


def check(has: Rdma | None, **values: Any) -> list[Finding]:
    return list(doctor_rdma.check_rdma(host(rdma=has, **values)))


def test_no_finding_where_all_is_well_or_nothing_is_wanted() -> None:
    assert check(None) == []
    assert check(rdma()) == []
    assert check(rdma(port(link_layer="InfiniBand", state="DOWN"))) == []
    assert check(rdma(port(nic="eth7", state="DOWN"))) == []  # the interface is down, too
    assert check(rdma(nodes=[]), environment={"TORCH_RESILIENT_RDMA": "off"}) == []
    assert check(rdma(memlock_bytes=64 << 10, may_lock=True)) == []


def test_what_keeps_a_process_from_its_devices() -> None:
    finding = only(check(rdma(has_module=False, nodes=[])))
    assert "modprobe ib_uverbs" in finding.remedy
    finding = only(check(rdma(nodes=[])))
    assert "--device=/dev/infiniband" in finding.remedy
    finding = only(check(rdma(denied=["uverbs0"])))
    assert "may not open /dev/infiniband/uverbs0" in finding.seen
    finding = only(check(rdma(verbs_error="libibverbs.so.1: cannot open")))
    assert finding.seen == "this host has mlx5_0, but: libibverbs.so.1: cannot open"
    assert "apt install libibverbs1" in finding.remedy


def test_a_container_without_the_right_to_open_devices_needs_no_library() -> None:
    # The rights of the files allow it, the device rules of the container do not.
    finding = only(check(rdma(refused=["uverbs0"])))
    assert "refuses to open /dev/infiniband/uverbs0 (EPERM)" in finding.seen
    assert "--device=/dev/infiniband" in finding.remedy
    assert "libibverbs" not in finding.remedy
    error = (
        "mlx5_0: open it: Operation not permitted; the process needs read and write access to "
        "/dev/infiniband"
    )
    finding = only(check(rdma(verbs_error=error)))
    assert "--device=/dev/infiniband" in finding.remedy
    assert "libibverbs" not in finding.remedy
    finding = only(check(rdma(verbs_error="mlx5_0: read port 1: Input/output error")))
    assert "libibverbs" not in finding.remedy


def test_why_a_device_file_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sys/class/infiniband/rxe0/ports", "dev/infiniband"):
        (tmp_path / name).mkdir(parents=True)
    errors = {"uverbs0": 0, "uverbs1": errno.EACCES, "uverbs2": errno.EPERM, "uverbs3": errno.EIO}
    for name in errors:
        (tmp_path / "dev/infiniband" / name).touch()
    really_open = os.open

    def opened(path: Path, flags: int) -> int:
        if error := errors[path.name]:
            raise OSError(error, os.strerror(error))
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", opened)
    found = doctor_rdma.collect(tmp_path)
    assert found is not None
    assert found.nodes == sorted(errors)
    assert (found.denied, found.refused) == (["uverbs1"], ["uverbs2"])


def test_texts_that_choose_a_remedy_are_those_of_the_backend() -> None:
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    texts = "".join(
        re.sub(r'"\s*"', "", path.read_text(encoding="utf-8"))
        for folder in ("verbs", "transport", "delegate")
        for path in (csrc / folder).glob("*.cpp")
    )
    for part, _ in doctor_rdma._REMEDIES:
        assert part in texts, part
    for part in ("the far end: ", "uses no RDMA", "has the address of this route", "the port of "):
        assert part in texts, part


def test_ports_and_addresses() -> None:
    finding = only(check(rdma(port(state="DOWN"))))
    assert finding.check == "rdma-port"
    assert "port 1 of mlx5_0 is DOWN" in finding.seen
    finding = only(check(rdma(port(gids=["0: IB/RoCE v1 fe80::1"]))))
    assert finding.check == "rdma-gid"


def test_locked_memory_for_all_other_ranks() -> None:
    finding = only(check(rdma(memlock_bytes=64 << 10)))
    assert finding.check == "memlock"
    assert "0.1 MiB" in finding.seen
    assert "5 MiB" in finding.seen
    assert check(rdma(memlock_bytes=5 << 20)) == []
    assert only(check(rdma(memlock_bytes=8 << 20), world_size=4)).check == "memlock"


def pair(state: str, error: str = "", mtus: tuple[int, int] = (4096, 4096)) -> list[Finding]:
    job = []
    for rank in (0, 1):
        facts = host(rank, rdma=rdma(port(mtu_bytes=mtus[rank])))
        facts.links.append(Link(1 - rank, "rdma", 0, "eth0", "eth0", state, error))
        job.append(facts)
    return list(doctor_rdma.check_pairs(job))


def far_end(error: str, **others: Any) -> Finding:
    """Rank 0 has a device that works, and rank 1 has answered so."""
    job = [host(0, rdma=rdma()), host(1, **others)]
    job[0].links.append(Link(1, "rdma", 0, "eth0", "eth1", "down", f"the far end: {error}"))
    finding = only(list(doctor_rdma.check_pairs(job)))
    assert finding.check == "rdma-pair"
    assert error in finding.seen
    assert "4791" not in finding.remedy  # it is no firewall
    return finding


def test_a_far_end_without_rdma_is_not_a_firewall() -> None:
    finding = far_end("this process uses no RDMA")
    assert f"{host(1).where} has no RDMA device" in finding.remedy
    off = {"TORCH_RESILIENT_RDMA": "off"}
    finding = far_end("this process uses no RDMA", rdma=rdma(), environment=off)
    assert finding.remedy == f"`unset TORCH_RESILIENT_RDMA` on {host(1).where}"
    finding = far_end("this process uses no RDMA", rdma=rdma(nodes=[]))
    assert f"doctor` says of RDMA on {host(1).where}" in finding.remedy
    finding = far_end("no RDMA device has the address of this route", rdma=rdma())
    assert "has no RDMA device on eth1: `export TORCH_RESILIENT_INTERFACE=eth0`" in finding.remedy
    finding = far_end("the port of mlx5_0 is down", rdma=rdma())
    assert "rdma link show" in finding.remedy
    text = "mlx5_0: register 5242880 bytes: Cannot allocate memory; this process may lock 64 KiB of"
    finding = far_end(f"{text} memory (RLIMIT_MEMLOCK)", rdma=rdma())
    assert finding.remedy.startswith(f"on {host(1).where}: `ulimit -l unlimited`")


def test_pairs_of_a_job() -> None:
    assert pair("up") == []
    assert pair("down") == []  # an end has no device
    finding = only(pair("down", "mlx5_0: connect: Connection timed out"))
    assert finding.check == "rdma-pair"
    assert "4791" in finding.remedy
    finding = only(pair("up", mtus=(1024, 4096)))
    assert finding.check == "rdma-mtu"
    assert "1024 and 4096" in finding.seen


def test_how_devices_register_the_memory_of_gpus() -> None:
    ways = {0: ("dmabuf", ""), 1: ("staging", "its tensors are in expandable segments")}
    has = rdma(port(), port(device="mlx5_1", is_seen=False))
    doctor_rdma.look_at_gpus(has, {0: 512, 1: 1024}, lambda _, gpu, address: ways[gpu])
    assert [(pair.device, pair.gpu, pair.way) for pair in has.gpus] == [
        ("mlx5_0", 0, "dmabuf"),
        ("mlx5_0", 1, "staging"),
    ]
    first, second = doctor_rdma.about(host(rdma=has))[2:]
    assert first.endswith(
        "RDMA mlx5_0 and GPU 0: its memory can be registered by dmabuf, which is not used yet; "
        "tensors are copied through pinned host memory"
    )
    assert second.endswith(
        "RDMA mlx5_0 and GPU 1: its memory cannot be registered (its tensors are in expandable "
        "segments); tensors are copied through pinned host memory"
    )


def test_the_extension_names_a_device_that_is_missing() -> None:
    way, why = _native.load().rdma_gpu_way("no_such_device", 0, 0)
    assert way == "staging"
    assert "no_such_device" in why or "without them" in why  # without the library of verbs


def test_facts_travel_as_json() -> None:
    pair = RdmaGpu("mlx5_0", 0, "peermem", "no dmabuf")
    facts = host(0, rdma=rdma(memlock_bytes=1, gpus=[pair]))
    assert Facts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def test_facts_come_from_the_files_of_the_kernel(tmp_path: Path) -> None:
    assert doctor_rdma.collect(tmp_path) is None
    folder = tmp_path / "sys/class/infiniband/rxe0"
    files = {
        "fw_ver": "1.2",
        "ports/1/state": "4: ACTIVE",
        "ports/1/link_layer": "Ethernet",
        "ports/1/gids/0": "fe80:0000:0000:0000:0000:00ff:fe00:0001",
        "ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0007",
        "ports/1/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
        "ports/1/gid_attrs/types/0": "RoCE v2",
        "ports/1/gid_attrs/types/1": "RoCE v2",
        "ports/1/gid_attrs/ndevs/0": "eth1",
        "ports/1/gid_attrs/ndevs/1": "eth1",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    found = doctor_rdma.collect(tmp_path)
    assert found is not None
    assert not found.has_module
    assert found.nodes == []
    (only_port,) = found.ports
    assert only_port.gids == ["0: RoCE v2 fe80::ff:fe00:1", "1: RoCE v2 10.0.0.7"]
    assert (only_port.state, only_port.nic, only_port.firmware) == ("ACTIVE", "eth1", "1.2")
    told = {"device": "rxe0", "port": 1, "gid_index": 1, "gid": b"", "nic": "eth1"}
    doctor_rdma.look(found, [{**told, "mtu_bytes": 1024, "active": True}], "")  # type: ignore[typeddict-item]
    assert (only_port.mtu_bytes, only_port.is_seen) == (1024, True)
    (line,) = doctor_rdma.about(host(rdma=found))
    assert "RDMA rxe0 port 1 on eth1: ACTIVE, Ethernet, MTU 1024, firmware 1.2" in line
