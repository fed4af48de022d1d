"""Streams and ping-pongs over RDMA, in turns with perftest of the same size and depth.

    python benchmarks/verbs_speed.py
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        benchmarks/verbs_speed.py --job

Needs root, perftest, and what `make verbs-lab` builds. As the program of a job of two ranks, it
needs hosts with RDMA devices, and perftest on both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import verbs_lab
from common import Row, add_common_arguments, format_size, median, quantile, show_rows
from lab_job import say, start_job

from torch_resilient.testing import LabJob, VerbsLab

ABOUT = """\
Two guests of the verbs lab. Each round runs perftest, this backend, and perftest again, so that
the load of the machine concerns all three. The figures are ratios to the mean of the two, and
the noise is the ratio of the two to one another. A ratio is of use only if the noise is small.

  stream 16 MiB    isend, two at a time, against ib_write_bw -s 1M -t 32
  stream 64 KiB    isend, 32 at a time, against ib_send_bw -s 64K -t 32
  ping-pong        8 B, against ib_send_lat -s 8: the median of half a round trip
  processor time   of the sending process for each GB. perftest polls all the time
  two NICs         a stream over both networks against one, each limited to 20 MB/s by the switch

A system call takes 12 us in a guest, and reading the clock is one. So this backend reads the time
from the processor's counter, as it does elsewhere (csrc/tests/verbs/guest_clock.cpp).

Never compare with TCP here: Soft-RoCE handles each packet in software, and TCP hands over many at a
time.

With --job it measures the hosts of the job instead, without "two NICs"; rank 1 prints the lines.

Exit status 1 if a limit is missed (medians): 16 MiB 0.85, 64 KiB 0.75, ping-pong 1.5, two NICs 1.8.
"""

GUEST_CLOCK = Path(__file__).resolve().parent.parent / "build" / "verbs-programs" / "guest_clock.so"
# (size, sends at a time, sends of a round, perftest's program and options)
Stream = tuple[int, int, int, str, tuple[str, ...]]
STREAMS: list[Stream] = [
    (16 << 20, 2, 6, "ib_write_bw", ("-s", str(1 << 20), "-t", "32", "-n", "96")),
    (64 << 10, 32, 512, "ib_send_bw", ("-s", str(64 << 10), "-t", "32", "-r", "64", "-n", "512")),
]
PING_BYTES, PINGS = 8, 1000
LIMITED_BYTES_PER_S = 20e6
# Ports of perftest in a job.
job_ports = itertools.count(18515)
# perftest's MB.
MIB = float(1 << 20)
LIMIT_S = 120.0
LIMITS = {"stream 16 MiB": 0.85, "stream 64 KiB": 0.75, "ping-pong 8 B": 1.5, "two NICs": 1.8}
AT_MOST = {"ping-pong 8 B"}
# Prints the processor time of a command as the last line.
TIMED = ("bash", "-c", 'TIMEFORMAT="%U %S"; time "$@"', "bash")


# ---- in a guest


def stream(rank: int, size: int, depth: int, count: int) -> Row:
    """Rank 1 sends to rank 0."""
    import torch
    import torch.distributed as dist

    # Written, so that no page is missing; perftest writes its buffer, too.
    tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(depth)]
    done = torch.zeros(1)
    dist.barrier()
    start, used = time.monotonic(), time.process_time()
    works: list[Any] = []
    for number in range(count):
        if len(works) == depth:
            works.pop(0).wait()
        tensor = tensors[number % depth]
        works.append(dist.isend(tensor, 0) if rank == 1 else dist.irecv(tensor, 1))
    for work in works:
        work.wait()
    if rank == 1:
        dist.recv(done, 0)
    else:
        dist.send(done, 1)
    took_s = time.monotonic() - start
    return {"bytes_per_s": count * size / took_s, "cpu_s": time.process_time() - used}


def ping_pong(rank: int, size: int, count: int) -> Row:
    """The median of half a round trip, at rank 1."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    times = []
    for _ in range(count):
        start = time.monotonic()
        if rank == 1:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
        else:
            dist.recv(tensor, 1)
            dist.send(tensor, 1)
        times.append((time.monotonic() - start) / 2)
    return {"median_s": median(times), "p99_s": quantile(times, 0.99)}


def worker() -> None:
    """A rank: does what its input says, line by line."""
    import torch
    import torch.distributed as dist

    import torch_resilient

    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    dist.barrier()
    say("ready")
    for line in sys.stdin:
        what, *numbers = json.loads(line)
        if what == "end":
            break
        if what == "up":
            deadline = time.monotonic() + LIMIT_S
            while rdma_up(torch_resilient.stats()) < numbers[0] and time.monotonic() < deadline:
                time.sleep(0.05)
            say("done", up=rdma_up(torch_resilient.stats()))
            continue
        before = rdma_bytes(torch_resilient.stats())
        row = (stream if what == "stream" else ping_pong)(rank, *numbers)
        say("done", rdma_bytes=rdma_bytes(torch_resilient.stats()) - before, **row)
    dist.barrier()
    dist.destroy_process_group()


def rdma_up(stats: Any) -> int:
    """RDMA paths that carry."""
    return sum(p.kind == "rdma" and p.state == "up" for peer in stats.peers for p in peer.paths)


def rdma_bytes(stats: Any) -> int:
    """Sent by RDMA."""
    return sum(p.bytes_sent for peer in stats.peers for p in peer.paths if p.kind == "rdma")


# ---- on the host


class Ranks:
    """The job of two ranks, rank 1 on guest b, over some of the NICs."""

    def __init__(self, lab: VerbsLab, nics: Sequence[str]) -> None:
        self.job: LabJob = start_job(
            __file__,
            list(lab.guests.values()),
            lab.control,
            {},
            environment={
                "TORCH_RESILIENT_INTERFACE": ",".join(nics),
                "LD_PRELOAD": str(GUEST_CLOCK),
            },
            port=next(verbs_lab.ports),
        )
        for _ in range(2):
            self.job.row("ready", LIMIT_S)
        if self.ask("up", len(nics))["up"] != len(nics):
            raise RuntimeError(f"RDMA is not up on {nics}")

    def ask(self, *what: object) -> Row:
        """The row of rank 1."""
        self.job.tell(json.dumps(what))
        rows = {row["rank"]: row for row in (self.job.row("done", LIMIT_S) for _ in range(2))}
        return rows[1]

    def close(self) -> None:
        """Ends the job."""
        self.job.tell('["end"]')
        self.job.wait(LIMIT_S)
        self.job.close()


def interleaved(
    name: str, rounds: int, theirs: Callable[[], list[float]], ours: Callable[[], list[float]]
) -> Row:
    """Ratios of a value, and the second value of both."""
    ratios, noise, first, second, their_first, their_second = [], [], [], [], [], []
    for _ in range(rounds):
        one, mine, other = theirs(), ours(), theirs()
        ratios.append(mine[0] / ((one[0] + other[0]) / 2))
        noise.append(one[0] / other[0])
        first.append(mine[0])
        second.append(mine[1])
        their_first += [one[0], other[0]]
        their_second += [one[1], other[1]]
    return {
        "what": name,
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "noise_range": [min(noise), max(noise)],
        "ours": median(first),
        "theirs": median(their_first),
        "ours_second": median(second),
        "theirs_second": median(their_second),
    }


def against_perftest(
    rounds: int, perftest: Callable[..., list[float]], ask: Callable[..., Row]
) -> Iterator[Row]:
    """The rows of streams and ping-pongs.

    perftest: numbers of a program with these options, and of a command put before it. ask: the
    row of a stream or of ping-pongs.
    """
    for size, depth, count, program, options in STREAMS:

        def bandwidth(program: str = program, options: tuple[str, ...] = options) -> list[float]:
            numbers = perftest(program, *options, before=TIMED)
            sent = numbers[0] * numbers[1] / 1e9
            return [numbers[3] * MIB, (numbers[-2] + numbers[-1]) / sent]

        def sends(size: int = size, depth: int = depth, count: int = count) -> list[float]:
            row = ask("stream", size, depth, count)
            return [row["bytes_per_s"], row["cpu_s"] / (size * count / 1e9)]

        sends()
        row = interleaved(f"stream {format_size(size)}", rounds, bandwidth, sends)
        row["cpu_s_per_gb"], row["perftest_cpu_s_per_gb"] = (
            row.pop("ours_second"),
            row.pop("theirs_second"),
        )
        yield row

    def latency() -> list[float]:
        numbers = perftest("ib_send_lat", "-s", str(PING_BYTES), "-n", str(PINGS))
        return [numbers[4] * 1e-6, numbers[7] * 1e-6]

    def pings() -> list[float]:
        row = ask("pingpong", PING_BYTES, PINGS)
        return [row["median_s"], row["p99_s"]]

    pings()
    row = interleaved(f"ping-pong {format_size(PING_BYTES)}", rounds, latency, pings)
    row["p99_s"], row["perftest_p99_s"] = row.pop("ours_second"), row.pop("theirs_second")
    yield row


def measure(quick: bool) -> Iterator[Row]:
    """All rows, as they come."""
    rounds = 2 if quick else 7
    with VerbsLab() as lab:
        ranks = Ranks(lab, ["eth0"])

        def perftest(program: str, *options: str, before: Sequence[str] = ()) -> list[float]:
            return verbs_lab.perftest(lab, program, *options, before=before)

        yield from against_perftest(rounds, perftest, ranks.ask)
        ranks.close()
        yield two_nics(lab, rounds)


def two_nics(lab: VerbsLab, rounds: int) -> Row:
    """A stream over two limited networks against one over one."""
    for name in ("eth0", "eth1"):
        lab.networks[name].set(rate_bytes_per_s=LIMITED_BYTES_PER_S)
    one, both = Ranks(lab, ["eth0"]), Ranks(lab, ["eth0", "eth1"])

    def stream_of(ranks: Ranks) -> list[float]:
        return [ranks.ask("stream", 4 << 20, 4, 16)["bytes_per_s"], 0.0]

    stream_of(both)
    row = interleaved("two NICs", rounds, lambda: stream_of(one), lambda: stream_of(both))
    one.close()
    both.close()
    for name in ("eth0", "eth1"):
        lab.networks[name].set(rate_bytes_per_s=None)
    del row["ours_second"], row["theirs_second"]
    return row


# ---- as the program of a job


def job_path() -> Any:
    """The RDMA path to the other rank, as soon as it carries.

    Raises RuntimeError if there are not two ranks, or RDMA does not carry in time.
    """
    import torch.distributed as dist

    import torch_resilient

    if dist.get_world_size() != 2:
        raise RuntimeError(f"--job needs two ranks, and has {dist.get_world_size()}")
    deadline = time.monotonic() + LIMIT_S
    while rdma_up(torch_resilient.stats()) == 0:
        if time.monotonic() > deadline:
            raise RuntimeError("no RDMA between the ranks: run torch-resilient doctor as the job")
        time.sleep(0.05)
    paths = torch_resilient.stats().peers[0].paths
    return next(path for path in paths if path.kind == "rdma" and path.state == "up")


def run_client(command: Sequence[str], program: str, *, timed: bool) -> list[float] | None:
    """As verbs_lab.numbers_of(); waits for the server."""
    for _ in range(verbs_lab.TRIES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if "Couldn't connect" not in done.stdout + done.stderr:
            break
        time.sleep(0.05)
    return verbs_lab.numbers_of(program, done, timed=timed)


def measure_job(quick: bool, added: Sequence[str]) -> Iterator[Row]:
    """The rows between the two ranks of a job. Those of rank 0 are without meaning.

    added: options for all programs of perftest.
    """
    import torch
    import torch.distributed as dist

    import torch_resilient

    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    dist.barrier()
    path = job_path()
    tcp = next(p for p in torch_resilient.stats().peers[0].paths if p.kind == "tcp")
    address = tcp.remote_address.rpartition(":")[0].strip("[]")

    def perftest(program: str, *options: str, before: Sequence[str] = ()) -> list[float]:
        for _ in range(verbs_lab.TRIES):
            port = ("-p", str(next(job_ports)))
            command = [program, "-d", path.rdma.device, *options, *added, *port]
            count = torch.zeros(1, dtype=torch.int64)
            if rank == 0:
                null = subprocess.DEVNULL
                with subprocess.Popen(command, stdout=null, stderr=null) as server:
                    try:
                        dist.recv(count, 1)
                    finally:
                        server.kill()
                if count:
                    return [1.0] * int(count)
            else:
                numbers = run_client([*before, *command, address], program, timed=bool(before))
                dist.send(count + len(numbers or []), 0)
                if numbers is not None:
                    return numbers
        raise RuntimeError(f"{program}: no times; the machine is too busy")

    def ask(what: str, *numbers: int) -> Row:
        return (stream if what == "stream" else ping_pong)(rank, *numbers)

    yield from against_perftest(2 if quick else 7, perftest, ask)
    dist.barrier()
    dist.destroy_process_group()


def is_met(row: Row) -> bool:
    """Whether the row keeps its limit."""
    limit = LIMITS[row["what"]]
    return row["ratio"] <= limit if row["what"] in AT_MOST else row["ratio"] >= limit


def describe_row(row: Row) -> str:
    """One line for people."""
    low, high = row["ratio_range"]
    noise = row["noise_range"]
    sign = "<=" if row["what"] in AT_MOST else ">="
    text = (
        f"{row['what']:<14} ratio {row['ratio']:.2f} ({low:.2f} to {high:.2f}; perftest to itself "
        f"{noise[0]:.2f} to {noise[1]:.2f}), limit {sign} {LIMITS[row['what']]}: "
        f"{'met' if is_met(row) else 'MISSED'}; "
    )
    if "p99_s" in row:
        return text + (
            f"{row['ours'] * 1e6:.0f} us (p99 {row['p99_s'] * 1e6:.0f}), "
            f"perftest {row['theirs'] * 1e6:.0f} (p99 {row['perftest_p99_s'] * 1e6:.0f})"
        )
    text += f"{row['ours'] / 1e6:.1f} MB/s against {row['theirs'] / 1e6:.1f}"
    if "cpu_s_per_gb" in row:
        text += (
            f"; processor {row['cpu_s_per_gb']:.1f} s a GB, perftest "
            f"{row['perftest_cpu_s_per_gb']:.1f}"
        )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each measurement; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--job", action="store_true", help="this is a rank of a job: measure its two hosts"
    )
    parser.add_argument(
        "--perftest",
        default="",
        metavar="OPTIONS",
        help='with --job, for all programs of perftest, such as "-x 3" for an index of addresses',
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker()
        return 0
    found = (
        measure_job(options.quick, shlex.split(options.perftest))
        if options.job
        else measure(options.quick)
    )
    if options.job and os.environ.get("RANK") == "0":
        for _ in found:
            pass
        return 0
    rows = ({**row, "met": is_met(row)} for row in found)
    return show_rows(options, "verbs_speed", rows, describe_row)


if __name__ == "__main__":
    sys.exit(main())
