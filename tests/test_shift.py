"""Unmodified verbs programs under `torch-resilient shift`, without faults and through them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT

from torch_resilient import cli
from torch_resilient.cli import shift
from torch_resilient.cli.shift_store import ShiftStore
from torch_resilient.testing import Guest, LinkSettings, VerbsLab, verbs_unavailable

CHECK = ROOT / "build" / "verbs-programs" / "shift_check"
# The same program, which opens libibverbs itself.
DLOPEN_CHECK = CHECK.with_name("shift_check_dlopen")
# Far more than anything takes: the machine may be busy.
LIMIT_S = 60
PORTS = itertools.count(30400)
STORE_PORT = 29700
SERVE = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from torch_resilient import cli; "
    f"sys.exit(cli.main(['shift', '--serve', '{STORE_PORT}']))"
)


def require(reason: str | None) -> None:
    """Skips the test for this reason, or fails it where the lab must run."""
    if reason is None:
        return
    if os.environ.get("RESILIENT_TEST_LAB") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def unavailable() -> str | None:
    if shift.shared_object() is None:
        return "the library is not built: there is no infiniband/verbs.h"
    for program in (CHECK, DLOPEN_CHECK):
        if not program.exists():
            return f"{program} is missing: run make -C csrc verbs-probe"
    return verbs_unavailable()


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[VerbsLab]:
    require(unavailable())
    with VerbsLab(memory_bytes=256 << 20) as made:
        a = made.guests["a"]
        with a.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as store:
            try:
                assert store.stdout is not None
                assert str(STORE_PORT) in store.stdout.readline()
                yield made
            finally:
                store.kill()


@pytest.fixture
def lab(shared_lab: VerbsLab) -> Iterator[VerbsLab]:
    """Two guests and a store at the first, without faults before and after the test."""
    yield shared_lab
    for network in shared_lab.networks.values():
        network.up()
        network.set(**vars(LinkSettings()))
    for guest in shared_lab.guests.values():
        eventually(lambda guest=guest: ready(guest))  # type: ignore[misc]


def ready(guest: Guest) -> bool:
    """Whether both devices work and reach the other guest."""
    links = str(guest.run(["rdma", "link"], capture_output=True, text=True).stdout)
    other = "b" if guest.name == "a" else "a"
    # A refusal comes from the other guest.
    answers = [
        guest.run(
            ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{other}-{nic}/9"],
            capture_output=True,
            text=True,
        ).stderr
        for nic in guest.rdma_devices
    ]
    return links.count("state ACTIVE") == 2 and all("refused" in each for each in answers)


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def environment(
    lab: VerbsLab, store: str | None = None, options: Sequence[str] = ()
) -> dict[str, str]:
    """The environment that the command sets."""
    store = store or f"{lab.control.address(lab.guests['a'])}:{STORE_PORT}"
    parsed = cli_options(["--store", store, "--backup", "rxe0=rxe1", *options])
    return shift.environment(store, parsed)


def cli_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    shift.add_parser(parser.add_subparsers())
    return parser.parse_args(["shift", *words])


class Programs:
    """The same program on both guests: a receiver on a, a sender on b."""

    def __init__(
        self,
        lab: VerbsLab,
        command: Sequence[str],
        store: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        a, b = lab.guests.values()
        self.lab = lab
        self._stack = contextlib.ExitStack()
        env = environment(lab, store, options)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
        self.receiver = self._stack.enter_context(a.popen(command, **pipes))
        self.sender = self._start_sender(b, [*command, lab.control.address(a)], pipes)
        self.words: list[str] = []

    def _start_sender(self, guest: Guest, command: list[str], pipes: dict) -> subprocess.Popen:  # type: ignore[type-arg]
        return self._stack.enter_context(guest.popen(command, **pipes))

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.sender, self.receiver):
            process.kill()
        self._stack.close()

    def until(self, pattern: str) -> None:
        """Reads what the sender says until a line matches; it is killed if that takes too long."""
        killer = threading.Timer(LIMIT_S, self.sender.kill)
        killer.start()
        try:
            for line in self.sender.stdout:
                self.words.append(line.rstrip())
                if re.search(pattern, line):
                    return
        finally:
            killer.cancel()
        raise AssertionError(f"no {pattern}: {self.words}")

    def ends(self) -> tuple[str, str]:
        """The words of the sender and of the receiver; both must succeed."""
        said = self.sender.communicate(timeout=LIMIT_S)[0]
        other = self.receiver.communicate(timeout=LIMIT_S)[0]
        sender = "\n".join([*self.words, said])
        for process, words in ((self.sender, sender), (self.receiver, other)):
            assert process.returncode == 0, words
            assert "ompletion with error" not in words
        return sender, other


def check(
    lab: VerbsLab,
    mode: str,
    count: int,
    qps: int = 1,
    threads: int = 1,
    directions: int = 1,
    events: bool = False,
    store: str | None = None,
    program: Path = CHECK,
    options: Sequence[str] = (),
) -> Programs:
    numbers = [1, next(PORTS), count, qps, threads, directions, int(events)]
    return Programs(lab, [str(program), mode, "rxe0", *map(str, numbers)], store, options)


FAULTS: dict[str, Callable[[VerbsLab], None]] = {
    "nic of the receiver": lambda lab: lab.networks["eth0"].down("admin", end="a"),
    "nic of the sender": lambda lab: lab.networks["eth0"].down("admin", end="b"),
    "switch": lambda lab: lab.networks["eth0"].down(),
    "acknowledgements": lambda lab: lab.networks["eth0"].down(direction="a->b"),
    "data": lambda lab: lab.networks["eth0"].down(direction="b->a"),
}


# `make verbs-slow-test` runs the cases that are marked slow here.
@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize(
    ("mode", "events"),
    [
        ("send", False),
        ("simple", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("send", True), ("simple", False), ("flag", False), ("flag", True)]
        ),
    ],
)
def test_programs_run_without_a_fault(lab: VerbsLab, mode: str, events: bool) -> None:
    with check(lab, mode, 300, qps=2, events=events) as programs:
        for said in programs.ends():
            assert "done 300" in said
            assert "torch-resilient" not in said


@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("send", "nic of the sender"),
        ("simple", "switch"),
        *(
            pytest.param(mode, fault, marks=pytest.mark.slow)
            for mode in ("send", "simple", "flag")
            for fault in FAULTS
            if (mode, fault) not in (("send", "nic of the sender"), ("simple", "switch"))
        ),
    ],
)
def test_nothing_is_lost_when_the_default_path_fails(lab: VerbsLab, mode: str, fault: str) -> None:
    with check(lab, mode, 1500, qps=2, events=mode == "send") as programs:
        programs.until("progress 200")
        FAULTS[fault](lab)
        for said in programs.ends():
            assert "done 1500" in said
            assert "now uses rxe1" in said


@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("simple", "switch"),
        *(
            pytest.param(mode, fault, marks=pytest.mark.slow)
            for mode in ("send", "simple")
            for fault in FAULTS
            if (mode, fault) != ("simple", "switch")
        ),
    ],
)
def test_many_threads_lose_nothing_when_the_default_path_fails(
    lab: VerbsLab, mode: str, fault: str
) -> None:
    """Eight queue pairs in four threads, in both directions, each fourth request signaled."""
    with check(lab, mode, 200, qps=8, threads=4, directions=2, events=mode == "send") as programs:
        programs.until("progress 100")
        FAULTS[fault](lab)
        for said in programs.ends():
            assert "done 200" in said
            assert len(re.findall("now uses rxe1", said)) >= 8


@pytest.mark.lab
@pytest.mark.verbs
def test_programs_that_open_libibverbs_themselves_are_protected(lab: VerbsLab) -> None:
    with check(lab, "simple", 1000, program=DLOPEN_CHECK) as programs:
        programs.until("progress 200")
        FAULTS["switch"](lab)
        for said in programs.ends():
            assert "done 1000" in said
            assert "now uses rxe1" in said


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
def test_many_threads_go_through_faults_and_returns(lab: VerbsLab) -> None:
    # Threads that spin leave a busy machine too little to keep connections alive, so these sleep.
    with check(lab, "simple", 1 << 20, qps=8, threads=4, directions=2, events=True) as programs:
        programs.until("progress 100")
        for fault in FAULTS.values():
            fault(lab)
            for _ in range(8):
                programs.until("now uses rxe1")
            programs.until("progress")
            lab.networks["eth0"].up()
            for _ in range(8):
                programs.until("now uses rxe0")
            programs.until("progress")
        assert "broken" not in "".join(programs.words)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize("fault", ["switch", "nic of the receiver", "nic of the sender"])
def test_traffic_returns_to_the_default_path(lab: VerbsLab, fault: str) -> None:
    with check(lab, "simple", 1 << 20) as programs:
        programs.until("progress 200")
        FAULTS[fault](lab)
        programs.until("now uses rxe1")
        programs.until("progress")
        lab.networks["eth0"].up()
        programs.until("now uses rxe0")
        programs.until("progress")
        programs.until("progress")
        assert "broken" not in "".join(programs.words)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize("guest", ["a", "b"])
def test_a_spoiled_request_moves_traffic_and_it_returns(lab: VerbsLab, guest: str) -> None:
    """Paper: SHIFT §5.1, a bad request is injected at one end."""
    # A program of an earlier test that is being killed must not take the file.
    file = f"/run/spoil-{guest}"
    options = ["--spoil", file]
    with check(lab, "simple", 1 << 20, qps=2, directions=2, options=options) as programs:
        programs.until("progress 200")
        lab.guests[guest].run(["touch", file], check=True)
        for device in ("rxe1", "rxe0"):
            for _ in range(2):
                programs.until(f"now uses {device}")
            programs.until("progress")
        programs.until("progress")
        assert "broken" not in "".join(programs.words)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
def test_atomic_operations_in_flight_fail(lab: VerbsLab) -> None:
    with check(lab, "atomic", 0) as programs:
        programs.until("progress 100")
        # One is always in flight then.
        FAULTS["switch"](lab)
        said, _ = programs.ends()
        assert "an atomic operation is in flight" in said
        assert "failed 12" in said


@pytest.mark.lab
@pytest.mark.verbs
def test_errors_of_the_program_are_its_own(lab: VerbsLab) -> None:
    with check(lab, "badkey", 100) as programs:
        said, _ = programs.ends()
        assert "failed 10 remote access error" in said
        assert "now uses" not in said


@pytest.mark.lab
@pytest.mark.verbs
def test_without_a_store_the_program_gets_the_error(lab: VerbsLab) -> None:
    with check(lab, "send", 1 << 20, store="127.0.0.1:9") as programs:
        programs.until("nothing is protected")
        programs.until("progress 100")
        FAULTS["nic of the sender"](lab)
        programs.until("failed")


PERFTEST = [
    ("ib_send_bw", []),
    ("ib_write_bw", []),
    ("ib_read_bw", []),
    ("ib_send_bw", ["-e"]),
    ("ib_send_lat", []),
    ("ib_write_lat", []),
    ("ib_read_lat", []),
    ("ibv_rc_pingpong", ["-g", "1"]),
    ("ibv_rc_pingpong", ["-g", "1", "-e"]),
]


def perftest(lab: VerbsLab, program: str, options: list[str], count: int) -> Programs:
    words = [program, "-d", "rxe0", "-p", str(next(PORTS)), "-n", str(count), *options]
    if program.startswith("ib_"):
        # perftest measures the frequency of the processor after its transfers. On a busy machine
        # that fails; without -F it then exits with "Can't produce a report" and status 1.
        words.append("-F")
    made = Programs.__new__(Programs)
    made.lab, made.words, made._stack = lab, [], contextlib.ExitStack()
    a, b = lab.guests.values()
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": environment(lab),
    }
    made.receiver = made._stack.enter_context(a.popen(words, **pipes))
    hexadecimal = f":{int(words[4]):04X}"
    eventually(
        lambda: (
            a.run(
                ["grep", "-q", f"{hexadecimal} .* 0A ", "/proc/net/tcp", "/proc/net/tcp6"]
            ).returncode
            == 0
        )
    )
    made.sender = made._start_sender(b, [*words, lab.control.address(a)], pipes)
    return made


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize(("program", "options"), PERFTEST)
def test_perftest_runs_without_a_fault(lab: VerbsLab, program: str, options: list[str]) -> None:
    with perftest(lab, program, options, 200) as programs:
        for said in programs.ends():
            assert "now uses" not in said


# The programs that measure latency spin. Where other programs want the processors too, each message
# waits for a turn of the other guest, so 20000 of them took a minute and more.
@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.verbs
@pytest.mark.parametrize("fault", ["switch", "nic of the receiver", "nic of the sender"])
@pytest.mark.parametrize(
    ("program", "options", "count"),
    [
        ("ib_send_bw", [], 3000),
        ("ib_write_bw", [], 3000),
        ("ib_read_bw", [], 3000),
        ("ib_send_bw", ["-e"], 3000),
        ("ib_write_lat", [], 2000),
        ("ibv_rc_pingpong", ["-g", "1"], 2000),
    ],
)
def test_perftest_runs_through_a_fault(
    lab: VerbsLab, program: str, options: list[str], count: int, fault: str
) -> None:
    before = lab.networks["eth0"].counters("b->a").delivered.packets
    with perftest(lab, program, options, count) as programs:
        eventually(lambda: lab.networks["eth0"].counters("b->a").delivered.packets > before + 500)
        FAULTS[fault](lab)
        said, other = programs.ends()
        assert "now uses rxe1" in said
        assert "now uses rxe1" in other


# ---- the command and the store ----


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--store HOST:PORT"),
        (["--store", "nowhere", "--", "true"], "expected HOST:PORT"),
        (["--store", "a:0", "--", "true"], "expected HOST:PORT"),
        (["--serve", "70000", "--", "true"], "1 to 65535"),
        (["--store", "a:1", "--backup", "rxe0", "--", "true"], "DEVICE=BACKUP"),
        (["--store", "a:1", "--backup", "rxe0=rxe0", "--", "true"], "two devices"),
        (["--store", "a:1", "--silence", "0", "--", "true"], "--silence"),
        (["--store", "a:1"], "after --"),
    ],
)
def test_bad_input_of_the_command(
    words: list[str], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["shift", *words]) == 2
    assert problem in capfd.readouterr().err


def test_the_command_returns_the_status_of_the_program() -> None:
    if shift.shared_object() is None:
        pytest.skip("the library is not built: there is no infiniband/verbs.h")
    for command, status in (("exit 3", 3), ("kill -9 $$", 137)):
        assert cli.main(["shift", "--store", "a:1", "--", "sh", "-c", command]) == status
    assert cli.main(["shift", "--store", "a:1", "--", "no-such-program"]) == 2


def lines(store: ShiftStore, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", store.port), timeout=LIMIT_S)
    connection.sendall(text.encode())
    return connection


def test_the_store_answers_when_a_key_exists_and_forgets_with_its_owner() -> None:
    with ShiftStore("127.0.0.1") as store, lines(store, "get k\n") as reader:
        with lines(store, "put k v\n"):
            assert reader.recv(100) == b"val k v\n"
        with lines(store, "get k\n") as late:
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.recv(100)
        # A line that is no request ends the connection, and nothing else.
        for bad in ("hello\n", "put a\n", "put a b c\n", "x" * 5000, "\xff\n"):
            with lines(store, bad) as client:
                assert client.recv(100) == b""
        reader.sendall(b"put n 1\nget n\n")
        assert reader.recv(100) == b"val n 1\n"
