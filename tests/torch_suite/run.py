"""Runs torch's own distributed test suite against one backend and records every outcome.

    python tests/torch_suite/run.py --backend resilient --out resilient.json
    python tests/torch_suite/run.py --backend gloo --only 'test_all_reduce_.*' -v

Each test runs in fresh processes, one per rank, as upstream; `--jobs` tests run at a time. The
JSON holds {"backend", "world_size", "torch", "seconds", "counts", "tests": {name: {"status",
"reason", "seconds"}}}. Exit status 1 if a test failed. `--short` leaves out reasons and times: the
form of gloo_baseline.json, made with

    cd tests/torch_suite && python run.py --backend gloo --short --out gloo_baseline.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

# A test that takes longer has hung: the slowest one takes about 5 s on 2 cores.
TEST_TIMEOUT_S = 100

# Some tests of subgroups want this many ranks, all others run with `--world-size`.
LARGE_WORLD_SIZE = 8


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="resilient")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--only", default="", help="run tests that match this regular expression")
    parser.add_argument("--names", type=Path, help="run the tests named in this file")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--start-method", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--short", action="store_true", help="write names and outcomes only")
    parser.add_argument("-v", "--verbose", action="store_true", help="print reasons of failures")
    return parser.parse_args(argv)


def prepare_environment(arguments: argparse.Namespace, folder: str) -> None:
    os.environ.update(
        BACKEND=arguments.backend,
        WORLD_SIZE=str(arguments.world_size),
        START_METHOD=arguments.start_method,
        TMPDIR=folder,
        OMP_NUM_THREADS="1",  # no thread pool in the process that forks; 3 ranks share the cores
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_TIMEOUT_S),
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tempfile.tempdir = None  # read TMPDIR again


def run_one(case: unittest.TestCase) -> dict[str, Any]:
    start = time.monotonic()
    result = unittest.TestResult()
    case.run(result)
    seconds = round(time.monotonic() - start, 1)
    if result.skipped:
        return {"status": "skipped", "reason": result.skipped[0][1], "seconds": seconds}
    bad = result.errors + result.failures + result.unexpectedSuccesses
    if bad:
        reason = bad[0][1] if isinstance(bad[0], tuple) else "unexpected success"
        return {"status": "failed", "reason": reason, "seconds": seconds}
    return {"status": "passed", "reason": "", "seconds": seconds}


def work(names: list[str], taken: Any, results: Any, log: str) -> None:
    """One of the `--jobs` processes: takes the next test until none is left."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    case_class = importlib.import_module("suite").TestDistBackendWithSpawn
    case_class.setUpClass()
    from torch.testing._internal.common_distributed import TEST_SKIPS

    too_small = TEST_SKIPS["small_worldsize"].message
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(names):
            break
        try:
            outcome = run_one(case_class(names[index]))
            if outcome["reason"] == too_small:
                before = os.environ["WORLD_SIZE"]
                os.environ["WORLD_SIZE"] = str(LARGE_WORLD_SIZE)
                try:
                    outcome = run_one(case_class(names[index]))
                finally:
                    os.environ["WORLD_SIZE"] = before
        except BaseException:
            outcome = {"status": "failed", "reason": traceback.format_exc(), "seconds": 0.0}
        results.put((names[index], outcome))
    results.put(None)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="torch_suite_")
    try:
        prepare_environment(arguments, folder)
        import torch

        case_class = importlib.import_module("suite").TestDistBackendWithSpawn
        names = unittest.TestLoader().getTestCaseNames(case_class)
        if arguments.names:
            wanted = set(arguments.names.read_text().split())
            missing = wanted - set(names)
            if missing:
                raise SystemExit(f"no such tests in this torch: {sorted(missing)}")
            names = [name for name in names if name in wanted]
        names = [name for name in names if re.search(arguments.only, name)]
        if not names:
            raise SystemExit("no test selected")
        start = time.monotonic()
        context = multiprocessing.get_context("fork")
        taken = context.Value("i", 0)
        results = context.SimpleQueue()
        log = os.path.join(folder, "log")
        workers = [
            context.Process(target=work, args=(names, taken, results, log))
            for _ in range(arguments.jobs)
        ]
        for worker in workers:
            worker.start()
        outcomes: dict[str, dict[str, Any]] = {}
        running = len(workers)
        while running:
            item = results.get()
            if item is None:
                running -= 1
                continue
            name, outcome = item
            outcomes[name] = outcome
            if outcome["status"] == "failed" or arguments.verbose:
                print(f"{outcome['status']:8} {outcome['seconds']:6.1f} s  {name}", flush=True)
                if outcome["status"] == "failed" and arguments.verbose:
                    print(outcome["reason"], flush=True)
        for worker in workers:
            worker.join()
        return {
            "backend": arguments.backend,
            "world_size": arguments.world_size,
            "torch": torch.__version__.split("+")[0],
            "seconds": round(time.monotonic() - start),
            "counts": dict(Counter(o["status"] for o in outcomes.values())),
            "tests": dict(sorted(outcomes.items())),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    report = run(arguments)
    if arguments.out:
        written = dict(report)
        if arguments.short:
            written["tests"] = {name: o["status"] for name, o in report["tests"].items()}
            del written["seconds"]
        arguments.out.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{report['backend']}: {report['counts']} in {report['seconds']} s")
    return 1 if report["counts"].get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
