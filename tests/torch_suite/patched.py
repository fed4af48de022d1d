"""Imports torch's own distributed test suite and makes a plugin backend run what gloo runs.

The suite (``torch.testing._internal.distributed.distributed_test``) chooses its tests by the
name of the backend: ``BACKEND != "gloo"``, ``@require_backend_is_available({"gloo"})``, the
feature sets of ``DistTestCases``. A plugin would skip most of what it can do. Here, and only
here, those gates are widened: the name of the plugin is accepted wherever gloo's is. No test
body is changed except where it asks for the name itself.

torch 2.13 also keeps two features for gloo by name although a plugin implements them (gates
gone in 2.14): ``dist.monitored_barrier`` and the sequence number of a ProcessGroup. They are
routed to the plugin's own methods.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

SUITE = "torch.testing._internal.distributed.distributed_test"

# (pattern, replacement): every gate of the suite that names gloo; @ stands for the plugin's name.
# Each must match at least once: a changed suite fails instead of being silently skipped.
_PLUGIN_GATES = [
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "@")'),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "@")'),
    (r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"gloo", "@"})'),
    # DDP logs the type of the backend, which is "custom" for every plugin.
    (
        r'ddp_logging_data\.get\("backend_name"\), dist\.get_backend\(group_id\)',
        'ddp_logging_data.get("backend_name"), "custom"',
    ),
]

# The suite believes that only MPI has all_to_all for CPU tensors. gloo has it, too, so this is
# widened for gloo as well.
_ALL_TO_ALL_GATES = [
    (r'BACKEND != "mpi", "Only MPI supports CPU all_to_all_single"', 'False, ""'),
    (r'BACKEND != "mpi", "Only MPI supports all_to_all"', 'False, ""'),
]

# The suite's own file barrier gives up after 10 s, which a loaded 2-core machine can exceed.
# Only the time after which a hang is called a hang changes.
_BARRIER_TIMEOUT_S = 60


def load_suite(backend: str) -> ModuleType:
    """Returns the suite's module, imported for `backend` ("gloo", "resilient", ...).

    Needs the environment variables BACKEND and WORLD_SIZE, which the suite reads at import.
    Raises RuntimeError if a gate is no longer where it was.
    """
    if SUITE in sys.modules:
        return sys.modules[SUITE]
    if os.environ.get("BACKEND") != backend or "WORLD_SIZE" not in os.environ:
        raise RuntimeError("set BACKEND and WORLD_SIZE before importing torch's suite")
    gates = list(_ALL_TO_ALL_GATES)
    if backend != "gloo":
        gates += [(pattern, text.replace("@", backend)) for pattern, text in _PLUGIN_GATES]
        _widen_feature_sets(backend)
    suite = _import_with_widened_gates(gates)
    if backend != "gloo":
        for profiled in (
            suite.PROFILING_SUPPORTED_BACKENDS,
            suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
            suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            profiled.append(backend)
        _open_names_only_gates_of_torch()
    suite.Barrier.sync.__func__.__defaults__ = (None, _BARRIER_TIMEOUT_S)
    return suite


def _widen_feature_sets(backend: str) -> None:
    from torch.testing._internal.common_distributed import DistTestCases

    for sets in (DistTestCases.backend_feature, DistTestCases.skip_collective):
        for names in sets.values():
            if "gloo" in names:
                names.add(backend)
    DistTestCases.backend_feature["plugin"].add(backend)


def _import_with_widened_gates(gates: list[tuple[str, str]]) -> ModuleType:
    spec = importlib.util.find_spec(SUITE)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{SUITE} is not in this torch")
    source = Path(spec.origin).read_text(encoding="utf-8")
    for pattern, text in gates:
        source, matches = re.subn(pattern, text, source)
        if matches == 0:
            raise RuntimeError(f"{SUITE} of this torch has no gate {pattern!r} any more")
    suite = importlib.util.module_from_spec(spec)
    sys.modules[SUITE] = suite
    # Without this file's own `from __future__`, which changes what annotations are.
    exec(compile(source, spec.origin, "exec", dont_inherit=True), suite.__dict__)
    return suite


def _open_names_only_gates_of_torch() -> None:
    """monitored_barrier and sequence numbers: as torch 2.14 does it for any backend."""

    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if c10d._rank_not_in_group(group):
            return
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.get_backend(group))
        elif isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        chosen = c10d._get_default_group() if group is None else group
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = monitored_barrier
    c10d.monitored_barrier = monitored_barrier

    def get_sequence_number(group: Any) -> int:
        import torch

        return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())

    dist.ProcessGroup._get_sequence_number_for_group = get_sequence_number
