"""The test class of torch's suite for this run's backend.

Twin of test/distributed/test_distributed_spawn.py in torch's repository, which the wheel does
not hold. BACKEND and WORLD_SIZE come from the environment, as there. START_METHOD chooses how
the ranks of a test start: "fork" (from this process, which has imported torch but never run
it, so a rank is fresh in 20 ms) or "spawn" (as upstream; about 3 s per test).
"""

from __future__ import annotations

import os

import torch

try:
    from .patched import load_suite
except ImportError:  # run as a plain file
    from patched import load_suite  # type: ignore[import-not-found,no-redef]

_suite = load_suite(os.environ["BACKEND"])


class TestDistBackendWithSpawn(  # type: ignore[misc]
    _suite.TestDistBackend, _suite.DistributedTest._DistTestBase
):
    """One process per rank and test, a new process group in each."""

    def setUp(self) -> None:
        super().setUp()
        method = os.environ.get("START_METHOD", "fork")
        self._start_processes(torch.multiprocessing.get_context(method).Process)

    def _check_return_codes(self, fn, elapsed_time) -> None:  # type: ignore[no-untyped-def]
        # Upstream looks at rank 0 only: a crash of another rank would pass.
        super()._check_return_codes(fn, elapsed_time)
        if fn in self.skip_return_code_checks:
            return
        codes = [p.exitcode for p in self.processes]
        if any(code is None or code < 0 for code in codes):
            raise RuntimeError(f"a rank was killed by a signal: exit codes {codes}")

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
