"""PyTorch's own distributed tests: what gloo passes, the backend under test passes.

The suite ships in the wheel; torch_suite/ runs it. On a machine with GPUs more of it runs; on CPU
about 45 % of the tests apply, for gloo as for any other CPU backend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import backend_name

from torch_resilient.cli.secret import write_secret

SUITE = Path(__file__).resolve().parent / "torch_suite"
BASELINE = SUITE / "gloo_baseline.json"

# Below this number the suite has skipped its tests, whatever it reports.
EXPECTED_PASSES = 120

RUN_TIMEOUT_S = 900  # about 65 s on two idle cores


def run_suite(backend: str, out: Path, *options: str) -> dict[str, Any]:
    environment = dict(os.environ)
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    done = subprocess.run(
        [
            sys.executable,
            str(SUITE / "run.py"),
            "--backend",
            backend,
            "--out",
            str(out),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert out.exists(), f"the runner failed:\n{done.stdout}{done.stderr}"
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def gloo_statuses(tmp_path: Path) -> dict[str, str]:
    """The results of the recorded run of gloo, or of a new run if torch is another version."""
    baseline = json.loads(BASELINE.read_text())
    if baseline["torch"] == torch.__version__.split("+")[0]:
        statuses: dict[str, str] = baseline["tests"]
        return statuses
    report = run_suite("gloo", tmp_path / "gloo.json")
    return {name: outcome["status"] for name, outcome in report["tests"].items()}


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_passes_what_gloo_passes(tmp_path: Path) -> None:
    report = run_suite(backend_name(), tmp_path / "ours.json")
    ours, gloo = report["tests"], gloo_statuses(tmp_path)
    assert set(ours) >= set(gloo), "tests are missing from this run"
    passed_by_gloo = [name for name, status in gloo.items() if status == "passed"]
    worse = {
        name: ours[name]["reason"] for name in passed_by_gloo if ours[name]["status"] != "passed"
    }
    assert not worse, "passed by gloo only:\n" + "\n".join(
        f"--- {name}: {reason}" for name, reason in worse.items()
    )
    if backend_name() != "gloo":  # gloo itself fails all_to_all of unequal sizes
        failed = {n: o["reason"] for n, o in ours.items() if o["status"] == "failed"}
        assert not failed, "\n".join(f"--- {n}: {reason}" for n, reason in failed.items())
    assert report["counts"]["passed"] >= EXPECTED_PASSES


# One of each kind of operation, of subgroups, and of DDP: the rest differs above the connections.
ENCRYPTED = (
    "all_gather_full_group",
    "all_gather_object_subgroup",
    "all_reduce_coalesced_group_sum",
    "all_reduce_sum_async",
    "all_to_all_single_unequal_split",
    "barrier_timeout_group",
    "batch_isend_irecv_gloo_tags",
    "broadcast_group",
    "DistributedDataParallelCPU",
    "gather_full_group",
    "monitored_barrier_gloo_rank_0_timeout",
    "reduce_full_group_product",
    "scatter_group",
    "send_recv_any_source",
    "sparse_all_reduce_sum",
)


@pytest.mark.skipif(backend_name() == "gloo", reason="gloo has no such option")
def test_passes_the_same_with_every_connection_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    write_secret(secret)
    monkeypatch.setenv("TORCH_RESILIENT_SECRET_FILE", str(secret))
    monkeypatch.setenv("TORCH_RESILIENT_ENCRYPTION", "required")
    monkeypatch.setenv("TORCH_RESILIENT_SHARED_MEMORY", "false")
    names = f"^test_({'|'.join(ENCRYPTED)})$"
    report = run_suite(backend_name(), tmp_path / "ours.json", "--only", names)
    failed = {n: o["reason"] for n, o in report["tests"].items() if o["status"] != "passed"}
    assert not failed, "\n".join(f"--- {n}: {reason}" for n, reason in failed.items())
    assert report["counts"]["passed"] == len(ENCRYPTED)


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_ranks_started_as_upstream_does(tmp_path: Path) -> None:
    """A fresh interpreter for each rank, which also ends as usual: exit handlers run."""
    chosen = ["all_reduce_sum", "barrier", "send_recv", "all_gather_object_default_pg"]
    names = "^test_(" + "|".join([*chosen, "ddp_logging_data_cpu"]) + ")$"
    report = run_suite(
        backend_name(), tmp_path / "spawn.json", "--start-method", "spawn", "--only", names
    )
    failed = {n: o["reason"] for n, o in report["tests"].items() if o["status"] == "failed"}
    assert not failed, failed
    assert report["counts"]["passed"] >= 5
