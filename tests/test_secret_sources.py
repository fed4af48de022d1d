"""The secret of a job as platforms provide it: the examples of docs/security.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from harness import on_gloo

from torch_resilient.cli.secret import write_secret

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo has no such options")

PROGRAM = """\
import torch, torch.distributed as dist, torch_resilient
dist.init_process_group("resilient")
dist.all_reduce(torch.ones(1000))
paths = [p for peer in torch_resilient.stats().peers for p in peer.paths if p.kind == "tcp"]
assert paths and all(p.encrypted for p in paths), paths
assert torch_resilient.stats().trust.own_secret
dist.barrier()
dist.destroy_process_group()
"""


def example(language: str) -> str:
    """The one block in this language."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = text.partition("## Where the secret lies")[2].partition("\n## ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(block)


def systemd(folder: Path) -> str:
    """A credential: in a folder of its own, for its owner to read."""
    text = example("ini")
    ((name, source),) = re.findall(r"^LoadCredential=(.*?):(.*)$", text, re.MULTILINE)
    assert Path(source).name == name
    (variable,) = re.findall(r"^Environment=TORCH_RESILIENT_SECRET_FILE=(.*)$", text, re.MULTILINE)
    credentials = folder / "credentials"
    credentials.mkdir(mode=0o700)
    write_secret(credentials / name)
    (credentials / name).chmod(0o400)
    return str(variable).replace("%d", str(credentials))


def kubernetes(folder: Path) -> str:
    """A volume: the file is a link into a folder that is a link to the present version."""
    text = example("yaml")
    (value,) = re.findall(r"name: TORCH_RESILIENT_SECRET_FILE, value: ([^}]*)}", text)
    (mount,) = re.findall(r"mountPath: ([^,]*),", text)
    (mode,) = re.findall(r"defaultMode: (\d+)}", text)
    volume = folder / "volume"
    version = volume / "..2026_11_29"
    version.mkdir(parents=True)
    name = str(Path(value).relative_to(mount))
    write_secret(version / name)
    (version / name).chmod(int(mode, 8) | 0o040)  # with fsGroup, the group reads it, too
    (volume / "..data").symlink_to(version.name)
    (volume / name).symlink_to(f"..data/{name}")
    return str(volume / name)


def slurm(folder: Path) -> str:
    """A copy on each host, by the commands of the example."""
    write_secret(folder / "job.secret")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "sbcast").write_text('#!/bin/sh\n[ "$1" = --preserve ] && exec cp -p "$2" "$3"\n')
    (programs / "srun").write_text('#!/bin/sh\nprintf %s "$TORCH_RESILIENT_SECRET_FILE"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    script = example("sh").replace("/dev/shm", str(folder))
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        env={"PATH": path, "SLURM_JOB_ID": "17"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("platform", [systemd, kubernetes, slurm])
def test_a_secret_of_the_platform_encrypts(platform: Callable[[Path], str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "TORCH_RESILIENT_SECRET_FILE": platform(tmp_path),
        "TORCH_RESILIENT_ENCRYPTION": "required",
    }
    command = [*torchrun, "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
