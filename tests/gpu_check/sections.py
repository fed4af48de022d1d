"""The sections, and how each runs: in processes of its own, with a limit."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .checks import Rank, Result, Row, together

# An operation that waits for longer fails, so that the section goes on.
_GROUP_TIMEOUT_S = 20.0
# A process that has reported all of its checks needs no longer to end.
_EXIT_S = 10.0
# The stacks of a section that hangs are printed this long before its end.
_STACKS_S = 2.0


@dataclass(frozen=True)
class Section:
    """A section.

    `limit_s` is its limit with the start of its processes, on a GPU. `body` is called in each
    rank; None stands for run() of the module of that name.
    """

    name: str
    about: str
    limit_s: float
    ranks: int = 2
    device_index: int = 0
    body: Callable[[Rank], None] | None = None


SECTIONS = (
    Section("ops", "every operation, type and layout, several sizes", 80),
    Section("races", "late inputs, ways of waiting, freed memory, many streams", 80),
    Section("special", "views with a bit, sparse and shared tensors, functional calls", 50),
    Section("train", "DDP, SMART and FSDP2 against the same step over host tensors", 80),
    Section("pipeline", "ScheduleAdaptiveZB: live, fixed, with offloading", 60),
    Section("bubbles", "chunks and a prefill in the idle time of a pipeline", 60),
    Section("loss", "kernels for codes and priorities", 50, ranks=1),
    Section("errors", "streams that do not get on, time-outs, abort", 60),
    Section("graphs", "captures of graphs", 40),
    Section("devices", "two GPUs", 50, device_index=1),
    Section("bandwidth", "a table of send and all_reduce, 4 KiB to 256 MiB", 90),
    Section("prefill", "a table of prompts by the number of ranks that share a model", 60),
)


def run_section(section: Section, kind: str, limit_s: float) -> Iterator[Result | Row]:
    """Runs a section on a device of this kind; yields what it reports, in the end its own fault.

    Every check of it comes once, when all ranks have reported it.
    """
    context = multiprocessing.get_context("spawn")
    deadline_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        processes: list[Any] = []
        pipes: list[multiprocessing.connection.Connection] = []
        try:
            for number in range(section.ranks):
                receive, send = context.Pipe(duplex=False)
                arguments = (section, kind, number, f"{folder}/store", deadline_s, send)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                send.close()
                processes.append(process)
                pipes.append(receive)
            yield from _collected(section, pipes, deadline_s, limit_s)
            for number, process in enumerate(processes):
                process.join(_EXIT_S if time.monotonic() < deadline_s else 0)
                if process.exitcode not in (0, None):
                    yield Result(
                        "processes", "FAIL", f"rank {number} ended with {process.exitcode}"
                    )
                elif process.exitcode is None and time.monotonic() < deadline_s:
                    yield Result("processes", "FAIL", f"rank {number} does not end")
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collected(
    section: Section,
    pipes: list[multiprocessing.connection.Connection],
    deadline_s: float,
    limit_s: float,
) -> Iterator[Result | Row]:
    reported: dict[str, list[Result | None]] = {}
    reading = {pipe: number for number, pipe in enumerate(pipes)}
    while reading:
        left_s = deadline_s - time.monotonic()
        ready = multiprocessing.connection.wait(list(reading), max(left_s, 0))
        if not ready:
            yield from (together(results) for results in reported.values())
            yield Result("processes", "FAIL", f"not done in {limit_s:.0f} s")
            return
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            try:
                news = pipe.recv()
            except EOFError:
                del reading[pipe]
                continue
            if isinstance(news, Row):
                yield news
                continue
            results = reported.setdefault(news.name, [None] * section.ranks)
            results[reading[pipe]] = news
            if None not in results:
                yield together(reported.pop(news.name))
    yield from (together(results) for results in reported.values())


def _rank_main(
    section: Section,
    kind: str,
    number: int,
    store: str,
    deadline_s: float,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """Body of the process of a rank."""
    left_s = deadline_s - time.monotonic()  # one clock for all processes
    faulthandler.dump_traceback_later(max(left_s - _STACKS_S, left_s / 2), exit=False)
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same results in every run
    os.environ.setdefault("TORCH_RESILIENT_INTERFACE", "lo")
    import torch
    import torch.distributed as dist

    from .device import Device

    torch.set_num_threads(1)
    device = Device(kind, section.device_index)
    device.start()
    rank = Rank(number, device, pipe.send)
    body = section.body or importlib.import_module(f".{section.name}", __package__).run
    try:
        dist.init_process_group(
            device.backend(),
            init_method=f"file://{store}",
            rank=number,
            world_size=section.ranks,
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        body(rank)
        device.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        # The last line is the error, the ones before are where.
        where = traceback.format_exc().strip().splitlines()
        pipe.send(Result(f"the section on rank {number}", "FAIL", " / ".join(where[-3:])))
        _leave(1)
    pipe.close()
    faulthandler.cancel_dump_traceback_later()
    _leave(0)


def _leave(code: int) -> None:
    """Ends the process of a rank that has failed at once: its threads may wait for others."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
