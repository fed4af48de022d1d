"""The kernel of the guests of a verbs lab: where it is, and how it is built.

    python guest_kernel.py                  builds it, unless it is there
    python guest_kernel.py --if-possible    success where it cannot be built

It is a User Mode Linux with Soft-RoCE, which no distribution has: the source is that of the package
linux-source of Debian, the configuration is guest_kernel.config. Building it takes about five
minutes of processor time and 2 GB of disk for that time; what is kept has 6 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("guest_kernel.config")
SOURCES = Path("/usr/src")
_ROOT = Path(__file__).resolve().parent.parent.parent
# Names another kernel than the one that this module builds.
VARIABLE = "RESILIENT_VERBS_KERNEL"
# Large, and not needed for User Mode Linux.
_LEFT_OUT = (
    "Documentation/*/*",
    "drivers/gpu/drm/amd/include/*",
    "tools/perf/*",
    "*.dts",
    "*.dtsi",
)
# Counts changes of _interrupt_spinning_programs(); it belongs to what the kernel is built from.
_EDITION = 1
# Debian packages, and a program of each.
_PROGRAMS = {
    "bc": "bc",
    "bison": "bison",
    "flex": "flex",
    "gcc": "gcc",
    "ld": "binutils",
    "make": "make",
    "tar": "tar",
    "xz": "xz-utils",
}


class CannotBuildError(RuntimeError):
    """The kernel cannot be built here; the text says what is missing or wrong."""


def folder() -> Path:
    """The folder of the kernel: in `build` of a source tree, else in the user's cache."""
    if (_ROOT / "setup.py").exists():
        return _ROOT / "build" / "verbs-lab"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "torch_resilient" / "verbs-lab"


def find() -> Path:
    """The kernel. Raises FileNotFoundError, with the remedy, if it is missing or outdated."""
    if other := os.environ.get(VARIABLE):
        if os.access(other, os.X_OK):
            return Path(other)
        raise FileNotFoundError(f"{VARIABLE}={other}: no such program")
    kernel = folder() / "linux"
    remedy = f"`make verbs-lab` or `python {__file__}` builds it"
    if not kernel.exists():
        raise FileNotFoundError(f"a verbs lab needs the kernel {kernel}; {remedy}")
    if not _stamp(kernel).startswith(_recipe()):
        raise FileNotFoundError(f"the kernel {kernel} has an older configuration; {remedy}")
    return kernel


def source() -> Path:
    """The newest archive of Debian's kernel source. Raises CannotBuildError."""

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.name)]

    found = max(SOURCES.glob("linux-source-*.tar.xz"), key=version, default=None)
    if found is None:
        raise CannotBuildError("there is no kernel source; install Debian's package linux-source")
    return found


def build(jobs: int) -> Path:
    """Builds the kernel unless it is there already; returns it. Raises CannotBuildError.

    The kernel is up to date if the contents of the configuration and of the source are the same.
    """
    missing = sorted({package for name, package in _PROGRAMS.items() if shutil.which(name) is None})
    if missing:
        raise CannotBuildError(f"to build the guests' kernel, install {' '.join(missing)}")
    archive = source()
    kernel = folder() / "linux"
    wanted = f"{_recipe()} {_digest(archive)}"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    with _lock(kernel.parent / "lock"):  # `make test` may build it twice at a time
        if kernel.exists() and _stamp(kernel) == wanted:
            return kernel
        work = kernel.parent / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        print(f"building the guests' kernel from {archive}", flush=True)
        _compile(archive, work, jobs)
        _run(["strip", "-o", str(kernel.with_name("linux.new")), str(work / "objects" / "linux")])
        kernel.with_suffix(".stamp").write_text(wanted, encoding="ascii")
        kernel.with_name("linux.new").rename(kernel)
        shutil.rmtree(work)
    return kernel


def _compile(archive: Path, work: Path, jobs: int) -> None:
    left_out = [f"--exclude=*/{pattern}" for pattern in _LEFT_OUT]
    _run(["tar", "-C", str(work), "--strip-components=1", "-xf", str(archive), *left_out])
    _interrupt_spinning_programs(work / "arch" / "um" / "kernel")
    objects = work / "objects"
    objects.mkdir()
    make = ["make", "-s", "-C", str(work), f"O={objects}", "ARCH=um", f"-j{jobs}"]
    _run([*make, "allnoconfig", f"KCONFIG_ALLCONFIG={CONFIGURATION}"])
    # An option whose conditions do not hold is left out without a word.
    wanted = {line for line in _lines(CONFIGURATION) if not line.startswith("#")}
    if ignored := sorted(wanted - set(_lines(objects / ".config"))):
        raise CannotBuildError(f"{archive.name} does not accept {', '.join(ignored)}")
    _run([*make, "linux"])


def _interrupt_spinning_programs(folder: Path) -> None:
    """Changes the source: a program that spins must not delay the threads of the kernel.

    A packet wakes kernel threads (Soft-RoCE works in some), but User Mode Linux gives them the
    processor only when the program makes a system call or at the next tick: a program that polls
    its completion queue would wait for 5 ms on average. The timer interrupts the program by a
    signal; here, all other interrupts do the same if they have woken a thread.
    """
    timer, interrupts = folder / "time.c", folder / "irq.c"
    call = re.search(r"os_alarm_process\(.*\);", timer.read_text(encoding="utf-8"))
    text = interrupts.read_text(encoding="utf-8")
    handler = "\t_sigio_handler(regs, irqs_suspended);\n"
    if call is None or text.count(handler) != 1:
        print("the source is not as expected: programs that poll will be slow", flush=True)
        return
    condition = "\tif (need_resched() && current->mm)\n"
    changed = text.replace(handler, f"{handler}{condition}\t\t{call[0]}\n")
    interrupts.write_text(changed, encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _run(command: Sequence[str]) -> None:
    # Variables of the make that has started this program are not for the kernel's.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise CannotBuildError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recipe() -> str:
    return f"{_digest(CONFIGURATION)}-{_EDITION}"


def _stamp(kernel: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return kernel.with_suffix(".stamp").read_text(encoding="ascii")
    return ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the kernel; returns the exit status."""
    parser = argparse.ArgumentParser(prog="guest_kernel", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time; default: 2")
    parser.add_argument(
        "--if-possible", action="store_true", help="report a reason not to build it as success"
    )
    options = parser.parse_args(arguments)
    try:
        print(build(options.jobs))
    except CannotBuildError as error:
        print(f"no kernel for the verbs lab: {error}", file=sys.stderr)
        return 0 if options.if_possible else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
