"""Encrypted connections: what is carried, what a listener on the network sees, what is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from handshake_client import client_hello
from harness import error_of, make_store, on_gloo, run_ranks, wait_until
from test_failover import Job
from test_security import listening_ports

from torch_resilient import PathStats, faults, stats
from torch_resilient._reports.stats import TrustStats
from torch_resilient.cli.secret import write_secret
from torch_resilient.pipelining.torch_actions import GroupStore, control_store
from torch_resilient.testing import NetworkLab

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo has no such options")

# Not to be found by chance, and longer than what a test looks for.
PAYLOAD = b"0123456789abcdef these bytes are for the ranks only " * 8
# Everything goes over connections, and they are encrypted within the host, too.
REQUIRED = {"TORCH_RESILIENT_SHARED_MEMORY": "false", "TORCH_RESILIENT_ENCRYPTION": "required"}


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "job.secret"
    write_secret(path)
    return str(path)


def encrypted(secret_file: str, **more: str) -> dict[str, str]:
    """Variables of a rank whose connections are all encrypted."""
    variables = {f"TORCH_RESILIENT_{name}": value for name, value in more.items()}
    return {**REQUIRED, "TORCH_RESILIENT_SECRET_FILE": secret_file, **variables}


def tcp_paths() -> list[PathStats]:
    """The connections of this rank that stand; at least one."""

    def standing() -> list[PathStats]:
        paths = [path for peer in stats().peers for path in peer.paths]
        return [path for path in paths if path.kind == "tcp" and path.local_address]

    wait_until(lambda: bool(standing()), "there is a connection")
    return standing()


def encrypted_paths() -> list[bool]:
    """Whether each of them is encrypted. All ranks must call this: none leaves before."""
    found = [path.encrypted for path in tcp_paths()]
    dist.barrier()
    return found


# ---- what is carried ----------------------------------------------------------------------


def train(rank: int) -> tuple[list[float], list[bool]]:
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
    # Beyond one chunk, and of an odd length.
    large = torch.arange(3_000_001, dtype=torch.float32) if rank == 0 else torch.empty(3_000_001)
    dist.broadcast(large, 0)
    assert torch.equal(large, torch.arange(3_000_001, dtype=torch.float32))
    objects: list[Any] = [{"from": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(objects)
    assert objects == [{"from": 0}]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights.tolist(), encrypted_paths()


def test_a_training_has_the_same_bits_with_and_without(secret_file: str) -> None:
    off = {"TORCH_RESILIENT_SHARED_MEMORY": "false"}
    plain = run_ranks(train, env=off)
    sealed = run_ranks(train, env=encrypted(secret_file))
    assert [weights for weights, _ in plain] == [weights for weights, _ in sealed]
    assert all(flags and not any(flags) for _, flags in plain)
    assert all(flags and all(flags) for _, flags in sealed)


def reduce_through_cuts(rank: int) -> tuple[int, bool]:
    ones = torch.ones(400_000)
    with faults.inject("cut after_bytes=700000 times=6"):
        for step in range(30):
            tensor = ones * (rank + step)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, ones * (2 * step + 1))
    (peer,) = stats().peers
    reconnects = sum(path.reconnects for path in peer.paths)
    return reconnects, all(encrypted_paths())


def test_cut_connections_come_back_encrypted(secret_file: str) -> None:
    for reconnects, sealed in run_ranks(reduce_through_cuts, env=encrypted(secret_file)):
        assert reconnects >= 2
        assert sealed


def reduce_once(rank: int) -> list[bool]:
    dist.all_reduce(torch.ones(100_000))
    return encrypted_paths()


@pytest.mark.skipif(
    os.environ.get("RESILIENT_TEST_ENCRYPTION") != "required",
    reason="this is for `make encrypted-test`",
)
def test_the_encrypted_run_of_other_tests_encrypts() -> None:
    assert all(flags and all(flags) for flags in run_ranks(reduce_once))


def test_a_secret_alone_leaves_one_host_in_plaintext(secret_file: str) -> None:
    variables = {"TORCH_RESILIENT_SECRET_FILE": secret_file}
    assert run_ranks(reduce_once, env=variables) == [[False], [False]]
    variables["TORCH_RESILIENT_ENCRYPTION"] = "required"
    assert run_ranks(reduce_once, env=variables) == [[True], [True]]


# ---- what the network shows ---------------------------------------------------------------


@contextlib.contextmanager
def capture() -> Iterator[bytearray]:
    """All that passes over loopback, in both directions."""
    try:
        every = socket.htons(0x0003)  # ETH_P_ALL
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, every)
    except PermissionError:
        pytest.skip("capturing packets needs CAP_NET_RAW")
    seen = bytearray()
    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                seen.extend(wire.recv(1 << 16))

    with wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        wire.bind(("lo", 0))
        wire.settimeout(0.05)
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield seen
            time.sleep(0.2)  # what is still in the queue of the socket
        finally:
            done.set()
            thread.join()


def send_payload(rank: int) -> None:
    data = torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8)
    for _ in range(20):
        received = torch.empty_like(data)
        if rank == 0:
            dist.send(data, 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(received, 0)
        assert torch.equal(received, data)


def test_a_capture_holds_no_payload(secret_file: str) -> None:
    pieces = [PAYLOAD[at : at + 16] for at in range(0, 52, 4)]
    with capture() as plain:
        run_ranks(send_payload, env={"TORCH_RESILIENT_SHARED_MEMORY": "false"})
    # The capture works: it shows what is sent in plaintext.
    assert all(piece in plain for piece in pieces)
    with capture() as sealed:
        run_ranks(send_payload, env=encrypted(secret_file))
    assert len(sealed) > 20 * len(PAYLOAD)
    assert not any(piece in sealed for piece in pieces)
    secret = Path(secret_file).read_text().strip()
    assert secret.encode() not in sealed
    assert bytes.fromhex(secret) not in sealed


# Counts the packets at eth0 of a host, and those with the bytes of its argument (in hex), until
# its input ends.
LISTEN = """
import select, socket, sys
part = bytes.fromhex(sys.argv[1])
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
wire.bind(("eth0", 0))
print("listening", flush=True)
packets = found = 0
while True:
    ready = select.select([wire, sys.stdin], [], [])[0]
    if wire in ready:
        packet = wire.recv(1 << 16)
        packets += 1
        found += part in packet
    elif not sys.stdin.readline():
        break
print(packets, found, flush=True)
"""


@pytest.mark.lab
@pytest.mark.parametrize("wan", ["tcp", "udp"])
@pytest.mark.parametrize("with_secret", [False, True])
def test_what_leaves_a_host_is_encrypted_once_there_is_a_secret(
    lab: NetworkLab, secret_file: str, wan: str, with_secret: bool
) -> None:
    """With the default encryption=auto. Datagrams are encrypted even without a secret."""
    a, b = lab.host("a"), lab.host("b")
    lab.link(a, b, delay_s=0.002, rate_bytes_per_s=50e6)
    control = lab.link(a, b, name="control")
    environment = {"TORCH_RESILIENT_WAN": wan, "TORCH_RESILIENT_INTERFACE": "eth0"}
    if with_secret:
        environment["TORCH_RESILIENT_SECRET_FILE"] = secret_file
    content = struct.pack("<i", 77) * 4  # of the 77th message
    pipe = subprocess.PIPE
    listener = b.popen(
        [sys.executable, "-c", LISTEN, content.hex()], stdin=pipe, stdout=pipe, text=True
    )
    assert listener.stdout is not None
    assert listener.stdout.readline() == "listening\n"
    settings = {"job": "exchange", "count": 100, "pause_s": 0.005}
    job = Job([a, b], control, settings, environment)
    try:
        results = job.end()
    finally:
        job.close()
        said = listener.communicate()[0]
    packets, found = map(int, said.split())
    assert packets > 1000
    for result in results:
        assert result.get("wrong") == 0, result
        paths = [path for path in result["paths"] if path["local_address"]]
        assert {path["kind"] for path in paths} == {"tcp", wan}
        for path in paths:
            assert path["encrypted"] == (with_secret or path["kind"] == "udp"), path
        (most,) = [p for p in paths if p["bytes_sent"] == max(p["bytes_sent"] for p in paths)]
        assert most["kind"] == wan
    if with_secret:
        assert found == 0
    elif wan == "tcp":
        assert found > 0  # the listener can tell


# ---- what is refused ----------------------------------------------------------------------


def start(rank: int, variables: list[dict[str, str]]) -> tuple[str, float]:
    """The error of starting with these variables, and how long that took."""
    os.environ.update(variables[rank])
    os.environ["TORCH_RESILIENT_CONNECT_TIMEOUT_S"] = "3"
    began = time.monotonic()

    def work() -> None:
        dist.init_process_group(
            "resilient",
            store=make_store("job"),
            rank=rank,
            world_size=2,
            timeout=timedelta(minutes=30),
        )
        dist.all_reduce(torch.ones(10))

    return error_of(work), time.monotonic() - began


def errors_of(*variables: dict[str, str]) -> list[str]:
    texts = []
    for error, took in run_ranks(start, list(variables), init=False):
        print(f"{took:.1f} s: {error}")
        assert took < 10
        texts.append(error)
    return texts


def test_required_without_a_secret_of_its_own_fails_the_start() -> None:
    for error in errors_of(REQUIRED, REQUIRED):
        assert error.startswith("ValueError: ")
        assert "TORCH_RESILIENT_ENCRYPTION=required" in error
        assert "torch-resilient secret" in error


def test_ranks_that_disagree_name_the_option(secret_file: str) -> None:
    ours = encrypted(secret_file)
    for other in ("off", "auto"):
        theirs = encrypted(secret_file, ENCRYPTION=other)
        assert any(
            'encryption is "' in error and "TORCH_RESILIENT_ENCRYPTION alike" in error
            for error in errors_of(ours, theirs)
        )


def reduce_and_count(rank: int) -> TrustStats:
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    return stats().trust


def test_handshakes_are_counted(secret_file: str) -> None:
    for variables, sealed in (
        ({"TORCH_RESILIENT_SHARED_MEMORY": "false"}, False),
        (encrypted(secret_file), True),
    ):
        for trust in run_ranks(reduce_and_count, env=variables):
            assert trust.own_secret == sealed
            assert trust.encryption == ("always" if sealed else "off")
            assert (trust.encrypted > 0) == sealed
            assert (trust.plaintext > 0) == (not sealed)
            assert not any(trust.faults.to_dict().values())


def paths_of(rank: int) -> list[tuple[str, bool]]:
    dist.all_reduce(torch.ones(100_000))
    found = [(path.cipher, path.forward_secret) for path in tcp_paths()]
    dist.barrier()
    return found


def test_paths_tell_their_cipher(secret_file: str) -> None:
    for found in run_ranks(paths_of, env=encrypted(secret_file)):
        assert all(secret for _, secret in found)
        ciphers = {"TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"}
        assert {cipher for cipher, _ in found} <= ciphers
    for found in run_ranks(paths_of, env={"TORCH_RESILIENT_SHARED_MEMORY": "false"}):
        assert set(found) == {("", False)}


def plan_of_a_store_writer(rank: int, mac: bool) -> tuple[str, bytes]:
    """Rank 0 writes a plan; somebody else changes it; rank 1 reads it."""
    group = dist.group.WORLD
    assert group is not None
    store = control_store()
    shared = GroupStore(store, group)
    if rank == 0:
        shared.set("plan/1/0", '["gates", 1]')
        written = store.get("plan/1/0")
        assert (written == b'["gates", 1]') == (not mac)
    dist.barrier()
    read = shared.get("plan/1/0")
    dist.barrier()
    if rank == 0:
        store.set("plan/1/0", store.get("plan/1/0").replace(b"1]", b"2]"))
    dist.barrier()
    error = ""
    try:
        assert shared.get("plan/1/0") == b'["gates", 2]'
    except ValueError as found:
        error = str(found)
    dist.barrier()
    return error, read


def test_plans_of_schedules_carry_a_mac(secret_file: str) -> None:
    for error, read in run_ranks(plan_of_a_store_writer, True, env=encrypted(secret_file)):
        assert read == b'["gates", 1]'
        assert error.startswith("the record plan/1/0 of group ")
        assert "by its own words of rank 0" in error
        assert "is not authentic" in error
    for error, read in run_ranks(plan_of_a_store_writer, False):  # the store has the secret
        assert read == b'["gates", 1]'
        assert error == ""


def outsider(rank: int, secret: str) -> bytes | TrustStats:
    """Rank 2 is no member: it repeats what it could have recorded of a handshake with rank 0."""
    store = make_store("test")
    if rank < 2:
        store.set(f"pid/{rank}", str(os.getpid()))
        dist.init_process_group("resilient", store=make_store("job"), rank=rank, world_size=2)
        dist.all_reduce(torch.ones(10))
        store.set(f"running/{rank}", "")
        store.wait(["stop"])
        dist.all_reduce(torch.ones(10))
        found = stats().trust
        dist.destroy_process_group()
        store.set(f"done/{rank}", "")
        return found
    store.wait(["running/0", "running/1"])
    (port,) = listening_ports(int(store.get("pid/0")))
    said = client_hello(Path(secret).read_text().strip().encode())
    other = client_hello(Path(secret).read_text().strip().encode())
    changed = other[:-1] + bytes([other[-1] ^ 1])
    answers = []
    for first in (said, said, changed):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
            s.sendall(first)
            answers.append(s.recv(5)[:1])
            s.sendall(bytes(100))  # no end of a handshake
            while s.recv(4096):
                pass
    store.set("stop", "")
    store.wait(["done/0", "done/1"])
    return b"".join(answers)


def test_a_repeated_handshake_gets_nowhere(secret_file: str) -> None:
    """The key of the answer is a fresh one, which only the member could know."""
    first, second, answers = run_ranks(
        outsider, secret_file, world_size=3, init=False, env=encrypted(secret_file)
    )
    assert answers == b"\x16\x15\x15"  # a handshake; to the same again and to another, alerts
    assert (first.faults.tls, first.faults.wrong_secret) == (2, 1)
    assert not any(second.faults.to_dict().values())


def test_different_secrets_are_named(secret_file: str, tmp_path: Path) -> None:
    other = tmp_path / "other.secret"
    write_secret(other)
    for error in errors_of(encrypted(secret_file), encrypted(str(other))):
        assert "TORCH_RESILIENT_SECRET" in error
        for path in (secret_file, str(other)):
            assert Path(path).read_text().strip() not in error


def work_with(rank: int, files: list[str]) -> bool:
    os.environ["TORCH_RESILIENT_SECRET_FILE"] = files[rank]
    dist.init_process_group("resilient", store=make_store("job"), rank=rank, world_size=2)
    send_payload(rank)
    sealed = all(encrypted_paths())
    dist.destroy_process_group()
    return sealed


def test_ranks_may_be_restarted_one_by_one_with_another_secret(
    secret_file: str, tmp_path: Path
) -> None:
    new = tmp_path / "new.secret"
    write_secret(new)
    both = (f"{secret_file},{new}", f"{new}, {secret_file}")
    for files in ((secret_file, both[0]), both, (both[1], str(new))):
        assert run_ranks(work_with, list(files), init=False, env=REQUIRED) == [True, True]


def test_at_most_two_secrets_are_valid(secret_file: str) -> None:
    many = {**REQUIRED, "TORCH_RESILIENT_SECRET_FILE": ",".join([secret_file] * 3)}
    for error in errors_of(many, many):
        assert "one file, or two separated by a comma" in error


def test_rdma_cannot_be_required_with_encryption(secret_file: str) -> None:
    variables = encrypted(secret_file, RDMA="required")
    for error in errors_of(variables, variables):
        assert error.startswith("ValueError: ")
        assert "an RDMA device sends plaintext" in error


# ---- the file -----------------------------------------------------------------------------


def secret_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_resilient.cli", "secret", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_makes_a_file_that_the_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    done = secret_command(str(path))
    assert done.returncode == 0, done.stderr
    assert "TORCH_RESILIENT_SECRET_FILE" in done.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert len(bytes.fromhex(text)) == 32
    assert text.strip() not in done.stdout
    run_ranks(send_payload, env=encrypted(str(path)))

    again = secret_command(str(path))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert path.read_text() == text


def test_the_command_follows_no_link_and_names_a_missing_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert secret_command(str(link)).returncode == 2
    assert not (tmp_path / "target").exists()
    missing = secret_command(str(tmp_path / "nowhere" / "file"))
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


def test_without_libcrypto_the_log_says_that_there_are_no_datagrams(tmp_path: Path) -> None:
    """The loader finds files of these names that hold nothing."""
    for name in ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"):
        (tmp_path / name).write_bytes(b"")
    program = (
        "import torch.distributed as dist, torch_resilient\n"
        "dist.init_process_group('resilient', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "TORCH_RESILIENT_LOG_LEVEL": "info",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wan=auto uses connections only" in done.stderr
