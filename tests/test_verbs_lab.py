"""The verbs lab: real verbs in guests, what faults do to them, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from torch_resilient import cli
from torch_resilient.testing import (
    Guest,
    LabJob,
    LinkSettings,
    Network,
    ScriptError,
    VerbsLab,
    guest_kernel,
    verbs_unavailable,
)
from torch_resilient.testing.job import Row

pytestmark = [pytest.mark.lab, pytest.mark.verbs]

PROBE = ROOT / "build" / "verbs-lab" / "verbs_probe"
# Far more than anything takes: the machine may be busy.
LIMIT_S = 60
# Jobs that follow one another need different ports for their stores.
PORTS = itertools.count(29400)


def require(reason: str | None) -> None:
    """Skips the test for this reason, or fails it where the lab must run."""
    if reason is None:
        return
    if os.environ.get("RESILIENT_TEST_LAB") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[VerbsLab]:
    require(verbs_unavailable())
    with VerbsLab() as made:
        yield made


@pytest.fixture
def lab(shared_lab: VerbsLab) -> Iterator[VerbsLab]:
    """Two guests, without faults before and after the test."""
    yield shared_lab
    for guest in shared_lab.guests.values():
        guest.thaw()
    for network in shared_lab.networks.values():
        network.up()
        network.set(**vars(LinkSettings()))


@pytest.fixture
def pair(lab: VerbsLab) -> tuple[Guest, Guest, Network]:
    a, b = lab.guests.values()
    return a, b, lab.networks["eth0"]


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until `condition()`; fails if it takes too long."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def output(guest: Guest, *command: str) -> str:
    """The output of a command, which must succeed."""
    done = guest.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


# ---- guests ----


def test_guests_have_rdma_devices(lab: VerbsLab) -> None:
    assert list(lab.guests) == ["a", "b"]
    assert list(lab.networks) == ["eth0", "eth1", "control"]
    for guest in lab.guests.values():
        assert guest.rdma_devices == {"eth0": "rxe0", "eth1": "rxe1"}
        links = output(guest, "rdma", "link")
        for nic, device in guest.rdma_devices.items():
            assert re.search(rf"{device}/1 state ACTIVE .* netdev {nic}\b", links)
        assert output(guest, "cat", "/proc/sys/kernel/hostname").strip() == guest.name
        assert output(guest, "uname", "-r") != os.uname().release
        for other in lab.guests.values():
            for nic in other.nics:
                found = output(guest, "getent", "hosts", f"{other.name}-{nic.device}")
                assert found.split()[0] == nic.address


def test_guests_see_the_files_of_the_host(lab: VerbsLab, tmp_path: Path) -> None:
    a = lab.guests["a"]
    (tmp_path / "file").write_text("from the host")
    assert output(a, "cat", str(tmp_path / "file")) == "from the host"
    done = a.run(["sh", "-c", "echo changed >file && cat file"], cwd=tmp_path, capture_output=True)
    assert done.stdout == b"changed\n"
    assert (tmp_path / "file").read_text() == "from the host"
    # The guest remembers which files it has missed, until it drops its caches.
    assert a.run(["test", "-e", str(tmp_path / "late")]).returncode == 1
    (tmp_path / "late").touch()
    a.write("/proc/sys/vm/drop_caches", "3")
    assert a.run(["test", "-e", str(tmp_path / "late")]).returncode == 0
    code = "import sys; print(sys.prefix)"
    assert output(a, sys.executable, "-c", code).strip() == sys.prefix


def test_processes_in_guests_behave_like_processes(lab: VerbsLab, tmp_path: Path) -> None:
    a = lab.guests["a"]
    assert a.run(["sh", "-c", "exit 3"]).returncode == 3
    assert a.run("exit 4", shell=True).returncode == 4
    assert a.run(["sh", "-c", "kill -USR1 $$"]).returncode == -signal.SIGUSR1
    done = a.run(["no-such-program"], capture_output=True, text=True)
    assert done.returncode == 127
    assert "no-such-program" in done.stderr
    # Environment, directory, and the order of what goes to the same place.
    done = a.run(
        ["sh", "-c", "echo $X; pwd >&2; echo end"],
        env={"X": "ä b", "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.stdout == f"ä b\n{tmp_path}\nend\n"
    data = bytes(range(256)) * 16384
    done = a.run(["cat"], input=data, capture_output=True, timeout=LIMIT_S)
    assert done.stdout == data
    # A program that reads nothing gets its input anyway.
    assert a.run(["true"], input=data, timeout=LIMIT_S).returncode == 0
    process = a.popen(["sleep", "1000"])
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def running(guest: Guest, word: str) -> bool:
    """Whether a process of the guest has this argument."""
    command = f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c -x {word}"
    done = guest.run(["sh", "-c", command], capture_output=True, text=True, timeout=LIMIT_S)
    return int(done.stdout) > 0


def test_a_killed_command_leaves_no_descendant(lab: VerbsLab) -> None:
    a = lab.guests["a"]
    process = a.popen(["sh", "-c", "setsid sleep 98765 & sleep 98765"])
    eventually(lambda: running(a, "98765"))
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    eventually(lambda: not running(a, "98765"))


def test_what_a_guest_cannot_do(lab: VerbsLab) -> None:
    a = lab.guests["a"]
    with pytest.raises(TypeError, match="run"):
        a.call(int)
    with pytest.raises(RuntimeError, match="runs already"):
        a.boot()
    for make in (lambda: lab.host("c"), lambda: lab.link(*lab.hosts.values())):
        with pytest.raises(RuntimeError, match="VerbsLab"):
            make()
    with pytest.raises(OSError, match="no/such"):
        a.write("/no/such/file", "x")
    for arguments in ({"guests": 1}, {"nics": 0}, {"memory_bytes": 1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            VerbsLab(**arguments)
    assert a.sysctl("net.ipv4.ip_forward", 1) == "1"
    assert lab.guests["b"].sysctl("net.ipv4.ip_forward") == "0"


# ---- verbs ----


def perftest(lab: VerbsLab, nic: str, program: str, *options: str) -> list[str]:
    """The row of numbers that a perftest program prints."""
    a, b = lab.guests.values()
    for _ in range(10):
        port = str(next(PORTS))
        command = [program, "-d", a.rdma_devices[nic], "-p", port, *options]
        said = client_output(lab, a, b, command)
        # On a busy machine it cannot always find out the processor's frequency.
        if " inf " not in said and "Can't produce a report" not in said:
            break
    rows = [line.split() for line in said.splitlines()]
    return next(row for row in reversed(rows) if row and row[0].isdigit())


def client_output(lab: VerbsLab, a: Guest, b: Guest, command: list[str]) -> str:
    """Runs a server of perftest on a and its client on b; what the client says."""
    with a.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):  # the server may not listen yet
                done = b.run(
                    [*command, lab.control.address(a)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=LIMIT_S,
                )
                if "Couldn't connect" not in done.stdout:
                    break
        finally:
            server.kill()
    return str(done.stdout)


@pytest.mark.parametrize("nic", ["eth0", "eth1"])
def test_perftest_runs_between_guests(lab: VerbsLab, nic: str) -> None:
    before = lab.networks[nic].counters("b->a").delivered.bytes
    assert perftest(lab, nic, "ib_write_bw", "-n", "200")[:2] == ["65536", "200"]
    assert lab.networks[nic].counters("b->a").delivered.bytes - before > 200 * 65536


def test_packets_of_one_hop_arrive(lab: VerbsLab) -> None:
    # ibv_rc_pingpong uses a hop limit of 1: the guests of a network are neighbours.
    a, b = lab.guests.values()
    command = ["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "100", "-p", str(next(PORTS))]
    with a.popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            eventually(lambda: b.run([*command, lab.control.address(a)]).returncode == 0)
            assert server.wait(LIMIT_S) == 0
        finally:
            server.kill()


# ---- faults as verbs see them ----


# A queue pair gives up after (retries + 1) x 4.096 us x 2^timeout: half a second, or three. A busy
# machine must not be taken for a fault.
FAILS_SOON = ("timeout=15", "retries=3")
FAILS_SOON_AFTER_S = 4 * 4.096e-6 * 2**15
ENDURES = ("timeout=17", "retries=5")


@contextlib.contextmanager
def probe(
    lab: VerbsLab, patience: tuple[str, ...] = FAILS_SOON, device: str = "rxe0"
) -> Iterator[LabJob]:
    """A job that writes from b to a (csrc/tests/verbs/probe.cpp), after its first writes."""
    require(None if PROBE.exists() else f"there is no {PROBE}; `make verbs-lab` builds it")
    command = [str(PROBE), device, *patience]
    with LabJob(command, list(lab.hosts.values())[:2], lab.control, port=next(PORTS)) as job:
        goes_on(job)
        yield job


def goes_on(job: LabJob) -> None:
    """Waits until writes complete that were posted after now."""
    first = job.until(lambda row: "completed" in row, "progress", LIMIT_S)["completed"]
    # More than the depth of the queue.
    job.until(lambda row: row.get("completed", 0) > first + 20, "further progress", LIMIT_S)


def reconnect(job: LabJob) -> None:
    """New queue pairs; waits until they carry."""
    job.tell("reconnect")
    job.until(lambda row: row["kind"] == "connected" and row["rank"] == 1, "connected", LIMIT_S)
    goes_on(job)


def event(job: LabJob, kind: str, rank: int) -> Row:
    """Waits for the event of a port."""
    return job.until(
        lambda row: row["kind"] == "event" and row["type"] == kind and row["rank"] == rank,
        f"{kind} at rank {rank}",
        LIMIT_S,
    )


def received(job: LabJob) -> int:
    """The last number that rank 0 has, from a row that it prints from now on."""
    with job.rows.mutex:
        job.rows.queue.clear()
    for _ in range(2):
        row = job.until(lambda row: "received" in row, "row of rank 0", LIMIT_S)
    return int(row["received"])


def test_a_black_hole_ends_in_an_error_at_the_sender(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, network = pair
    lab = a._lab
    with probe(lab) as job, probe(lab, ENDURES, "rxe1") as other:
        network.down()
        failed = job.row("failed", LIMIT_S)
        assert "retry" in failed["status"]
        assert failed["rank"] == 1
        assert failed["after_s"] > FAILS_SOON_AFTER_S / 2
        goes_on(other)  # the other NIC
        network.up()
        reconnect(job)


def test_lost_acknowledgements_leave_the_receiver_ahead(
    pair: tuple[Guest, Guest, Network],
) -> None:
    a, _, network = pair
    with probe(a._lab) as job:
        network.down(direction="a->b")
        failed = job.row("failed", LIMIT_S)
        assert "retry" in failed["status"]
        assert received(job) >= failed["number"]
        network.up()
        reconnect(job)


def test_a_direction_without_data_leaves_the_receiver_behind(
    pair: tuple[Guest, Guest, Network],
) -> None:
    a, _, network = pair
    with probe(a._lab) as job:
        network.down(direction="b->a")
        failed = job.row("failed", LIMIT_S)
        assert received(job) < failed["number"]
        network.up()
        reconnect(job)


@pytest.mark.parametrize("end", ["a", "b"])
@pytest.mark.parametrize("kind", ["carrier", "admin"])
def test_a_nic_that_goes_down_says_so_at_its_end(
    pair: tuple[Guest, Guest, Network], kind: str, end: str
) -> None:
    a, _, network = pair
    rank = "ab".index(end)
    with probe(a._lab) as job:
        network.down(kind, end=end)
        seen: list[Row] = []

        def enough(row: Row) -> bool:
            seen.append(row)
            kinds = {each["kind"] for each in seen}
            return kinds >= {"event", "failed"}

        job.until(enough, "event and failure", LIMIT_S)
        (event_row,) = [row for row in seen if row["kind"] == "event"]
        assert (event_row["type"], event_row["rank"]) == ("port error", rank)
        state = output(a._lab.guests[end], "rdma", "link", "show", "rxe0/1")
        assert "state DOWN" in state
        network.up()
        event(job, "port active", rank)
        reconnect(job)


def test_a_delay_delays_completions(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, network = pair
    with probe(a._lab, ENDURES) as job:
        network.set(delay_s=0.03)
        job.until(lambda row: row.get("latency_s", 0) > 0.06, "delayed completion", LIMIT_S)
        network.set(delay_s=0)
        job.until(lambda row: 0 < row.get("latency_s", 0) < 0.06, "fast completion", LIMIT_S)


def test_drops_are_repaired_by_the_queue_pair(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, network = pair
    with probe(a._lab, ENDURES) as job:
        network.set(direction="b->a", drop=0.05)
        eventually(lambda: network.counters("b->a").dropped.packets > 3)
        network.set(drop=0)
        goes_on(job)


def test_flapping(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, _ = pair
    with probe(a._lab) as job:
        player = a._lab.play("0s eth0 flap carrier 100ms 1s b")
        event(job, "port error", 1)
        player.wait(LIMIT_S)
        eventually(lambda: "state ACTIVE" in output(a._lab.guests["b"], "rdma", "link"))
        reconnect(job)


def test_a_frozen_guest_is_silent(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, _ = pair
    with probe(a._lab) as job:
        a.freeze()
        failed = job.row("failed", LIMIT_S)
        assert failed["rank"] == 1
        a.thaw()
        reconnect(job)


def test_a_script_freezes_a_guest(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, _ = pair
    with probe(a._lab) as job:
        player = a._lab.play("0s a freeze; 1s a thaw")
        job.row("failed", LIMIT_S)
        player.wait(LIMIT_S)
        assert [text for _, text in player.done] == ["a freeze", "a thaw"]
        reconnect(job)
    for script, problem in (("0s a melt", "freeze"), ("0s a kill now", "kill"), ("0s c kill", "c")):
        with pytest.raises(ScriptError, match=problem):
            a._lab.play(script)


def test_an_address_that_moves_moves_the_gid(pair: tuple[Guest, Guest, Network]) -> None:
    a, _, network = pair
    with probe(a._lab) as job:
        before = network.address(a)
        moved = network.readdress(a)
        assert moved == network.address(a) != before
        event(job, "GID table change", 0)
        reconnect(job)


def test_a_killed_guest_takes_its_processes_along() -> None:
    require(verbs_unavailable())
    with VerbsLab(3, nics=1, memory_bytes=256 << 20) as lab:
        a, b, c = lab.guests.values()
        process = a.popen(["sleep", "1000"])
        bystander = c.popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with probe(lab) as job:
            a.kill()
            a.kill()
            assert job.row("failed", LIMIT_S)["rank"] == 1
            assert process.wait(LIMIT_S) == -signal.SIGKILL
            assert job.processes[0].wait(LIMIT_S) == -signal.SIGKILL
            with pytest.raises(RuntimeError, match="does not run"):
                a.popen(["true"])
            with pytest.raises(RuntimeError, match="does not run"):
                a.freeze()
        # Faults outlive the guest.
        network = lab.networks["eth0"]
        network.down("admin", end=a)
        a.boot()
        assert "state DOWN" in output(a, "rdma", "link")
        network.up()
        with probe(lab):
            pass
        assert bystander.communicate(b"here", timeout=LIMIT_S)[0] == b"here"
        assert b.run(["true"]).returncode == 0


# ---- torch ----

TRAINER = """
import json
import torch
import torch.distributed as dist

dist.init_process_group("resilient")
rank = dist.get_rank()
total = torch.full((1000,), rank + 1.0)
dist.all_reduce(total)
received = torch.zeros(1 << 20, dtype=torch.uint8)
if rank == 0:
    dist.recv(received, 1)
else:
    dist.send(torch.full_like(received, 7), 0)
dist.barrier()
print(json.dumps({"kind": "result", "total": total[0].item(), "last": received[-1].item()}))
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_torch_runs_with_this_backend(tmp_path: Path) -> None:
    require(verbs_unavailable())
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER)
    with VerbsLab(preload=["torch"]) as lab:
        guests = list(lab.guests.values())
        for guest in guests:
            guest.wait_for_preload()
        for command in ([str(program)], ["-c", TRAINER]):
            job = LabJob([sys.executable, *command], guests, lab.control, port=next(PORTS))
            with job:
                rows = [job.row("result", LIMIT_S) for _ in guests]
                assert {row["rank"]: row["last"] for row in rows} == {0: 7, 1: 0}
                assert [row["total"] for row in rows] == [3, 3]
                assert job.wait(LIMIT_S) == [0, 0], job.words(0) + job.words(1)


def test_preloaded_programs_behave_like_fresh_ones(tmp_path: Path) -> None:
    require(verbs_unavailable())
    (tmp_path / "beside.py").write_text("value = 5")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "module.py").write_text("print('module')")
    (tmp_path / "program.py").write_text(
        "import atexit, os, sys\n"
        "import beside, module\n"
        "atexit.register(print, 'bye')\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].beside is beside\n"
        "print(sys.argv[1:], beside.value, os.environ['X'], 'json' in sys.modules)\n"
        "sys.stdin.read()\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    environment = {"X": "y", "PYTHONPATH": str(tmp_path / "elsewhere")}
    with VerbsLab(preload=["json"], memory_bytes=256 << 20) as lab:
        a = lab.guests["a"]

        def python(*arguments: str) -> subprocess.CompletedProcess[str]:
            return a.run(
                [sys.executable, *arguments],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )

        done = python("program.py", "3")
        assert done.stdout == "module\n['3'] 5 y True\nbye\n", done.stderr
        assert done.returncode == 3
        assert python("-m", "module").stdout == "module\n"
        done = python("-c", "import sys; print(sys.argv); 1 / 0", "x")
        assert done.stdout == "['-c', 'x']\n"
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
        assert "guest_agent" not in done.stderr
        done = python("-c", "import os; os.kill(os.getpid(), 10)")
        assert done.returncode == -10
        # An option of the interpreter: a fresh one.
        assert python("-I", "-c", "import sys; print(sys.flags.isolated)").stdout == "1\n"


# ---- nothing stays, and what is missing ----

OWNER = """
import os, subprocess, sys
from torch_resilient.testing import VerbsLab
lab = VerbsLab(memory_bytes=256 << 20)
a, b = lab.guests.values()
jobs = [guest.popen(["sh", "-c", "setsid sleep 1000 & sleep 1000"]) for guest in (a, b)]
spaces = [os.fstat(fd).st_ino for g in (a, b) for fd in (g._spaces.net, g._spaces.mounts)]
print(*spaces, os.fstat(lab._carrier.pid_namespace).st_ino, flush=True)
"""


def processes_in(inodes: set[int]) -> set[int]:
    """Processes in one of these namespaces."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            spaces = {os.stat(process / "ns" / kind).st_ino for kind in ("net", "mnt", "pid")}
            if spaces & inodes:
                found.add(int(process.name))
    return found


def traces() -> dict[str, set[str]]:
    """The things that a lab could leave on the machine."""
    return {
        # User Mode Linux makes these. Other programs use the directory as well.
        "shared memory": {name for name in os.listdir("/dev/shm") if name.startswith("vm_file")},
        "interfaces": set(os.listdir("/sys/class/net")),
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
    }


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_nothing_stays_however_the_owner_ends(tmp_path: Path, end: str) -> None:
    require(verbs_unavailable())
    before = traces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER + "sys.stdin.readline()\n" + end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        inodes = {int(word) for word in owner.stdout.readline().split()}
        assert len(inodes) == 5
        # The carrier; for each guest its kernel, the processes in it and a client.
        assert len(processes_in(inodes)) > 5
        owner.stdin.write("\n")
        owner.stdin.close()
        owner.wait(LIMIT_S)
        eventually(lambda: not processes_in(inodes))
    assert list(tmp_path.iterdir()) == []
    eventually(lambda: not any(traces()[name] - before[name] for name in before))


def test_close_leaves_nothing_in_this_process() -> None:
    require(verbs_unavailable())

    def state() -> tuple[int, int, str]:
        mounts = Path("/proc/self/mounts").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mounts

    before = state()
    lab = VerbsLab(memory_bytes=256 << 20)
    a, b = lab.guests.values()
    process = a.popen(["sleep", "1000"], stdout=subprocess.PIPE)
    lab.networks["eth0"].down("admin")
    b.freeze()
    lab.close()
    lab.close()
    assert process.returncode == -signal.SIGKILL
    assert state() == before
    with pytest.raises(RuntimeError, match="closed"):
        a.popen(["true"])


def test_the_reason_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(guest_kernel.VARIABLE, raising=False)
    monkeypatch.setattr(guest_kernel, "folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="make verbs-lab"):
        guest_kernel.find()
    if os.getuid() == 0:
        assert "make verbs-lab" in str(verbs_unavailable())
        assert cli.main(["lab", "--verbs", "--", "true"]) == 2
        assert "make verbs-lab" in capfd.readouterr().err
    (tmp_path / "linux").touch()
    (tmp_path / "linux.stamp").write_text("another configuration")
    with pytest.raises(FileNotFoundError, match="older configuration"):
        guest_kernel.find()
    monkeypatch.setenv(guest_kernel.VARIABLE, str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match=guest_kernel.VARIABLE):
        guest_kernel.find()


def test_a_kernel_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guest_kernel, "folder", lambda: tmp_path)
    monkeypatch.setattr(guest_kernel, "SOURCES", tmp_path)
    assert guest_kernel.main([]) == 1
    assert guest_kernel.main(["--if-possible"]) == 0
    assert "install" in capfd.readouterr().err


def test_the_command_runs_a_job_in_guests(
    shared_lab: VerbsLab, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "ibv_devices; echo rank $RANK of $WORLD_SIZE; sleep 1"]
    options = ["--script", "0s eth1 down; 100ms a freeze; 200ms a thaw", "--delay", "1ms"]
    assert cli.main(["lab", "--verbs", *options, "--", *command]) == 0
    out, err = capfd.readouterr()
    for host, rank in (("a", 0), ("b", 1)):
        assert f"[{host}] rank {rank} of 2" in out
        for device in ("rxe0", "rxe1"):
            assert re.search(rf"\[{host}\] +{device}", out)
    assert "a thaw" in err
    assert cli.main(["lab", "--verbs", "--hosts", "9", "--", "true"]) == 2
    assert "--hosts: expected 2 to 8" in capfd.readouterr().err
