"""`torch-resilient doctor` about RDMA: each mistake is found, and nothing else is reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

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
    assert "4 MiB" in finding.seen
    assert check(rdma(memlock_bytes=4 << 20)) == []
    assert only(check(rdma(memlock_bytes=8 << 20), world_size=4)).check == "memlock"


def pair(state: str, error: str = "", mtus: tuple[int, int] = (4096, 4096)) -> list[Finding]:
    job = []
    for rank in (0, 1):
        facts = host(rank, rdma=rdma(port(mtu_bytes=mtus[rank])))
        facts.links.append(Link(1 - rank, "rdma", 0, "eth0", "eth0", state, error))
        job.append(facts)
    return list(doctor_rdma.check_pairs(job))


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
