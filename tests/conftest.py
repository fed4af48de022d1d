"""Fixtures for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strict_device import build as build_strict_device

from torch_resilient.cli.secret import write_secret
from torch_resilient.testing import NetworkLab, unavailable

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def encrypted_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With RESILIENT_TEST_ENCRYPTION=required: everything goes over encrypted connections."""
    if os.environ.get("RESILIENT_TEST_ENCRYPTION") != "required":
        return {}
    path = tmp_path_factory.mktemp("encryption") / "job.secret"
    write_secret(path)
    return {
        "TORCH_RESILIENT_ENCRYPTION": "required",
        "TORCH_RESILIENT_SECRET_FILE": str(path),
        "TORCH_RESILIENT_SHARED_MEMORY": "false",
    }


@pytest.fixture(autouse=True)
def plain_environment(
    monkeypatch: pytest.MonkeyPatch, encrypted_environment: dict[str, str]
) -> None:
    """Tests run with the defaults, or encrypted, whatever else the caller's shell has set."""
    for name in list(os.environ):
        if name.startswith("TORCH_RESILIENT_") or name == "TORCH_DEVICE_BACKEND_AUTOLOAD":
            monkeypatch.delenv(name)
    for name, value in encrypted_environment.items():
        monkeypatch.setenv(name, value)


def _children() -> dict[int, str]:
    """Running child processes of this one, with their command lines."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold blanks.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        if int(parent) == os.getpid() and state != "Z":
            children[int(stat.parent.name)] = command
    return children


@pytest.fixture(autouse=True, scope="session")
def no_process_left() -> Iterator[None]:
    """Fails the run if a test leaves a process behind."""
    before = set(_children())
    yield
    limit = time.monotonic() + 10
    while True:
        left = {
            pid: command
            for pid, command in _children().items()
            # The helpers of multiprocessing live until this process ends.
            if pid not in before
            and "multiprocessing.forkserver" not in command
            and "multiprocessing.resource_tracker" not in command
        }
        if not left or time.monotonic() > limit:
            break
        time.sleep(0.05)
    assert not left, f"tests left processes running: {left}"


@pytest.fixture(scope="session")
def strict_device() -> None:
    """Compiles what `strict_device.load` loads in a rank."""
    build_strict_device()


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a program in a separate Python process and returns its output.

    It starts in an empty directory: there Python finds the installed package, not the source.
    Every warning is an error there. Fails the test if the program does or takes a minute.
    """

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{program}\nfailed:\n{done.stdout}{done.stderr}"
        assert not done.stderr, f"{program}\nsaid:\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    """An empty lab; the test is skipped where none can be made.

    With RESILIENT_TEST_LAB=required, as in CI, it fails instead.
    """
    if (reason := unavailable()) is not None:
        if os.environ.get("RESILIENT_TEST_LAB") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with NetworkLab() as made:
        yield made
