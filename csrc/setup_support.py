"""Decisions of setup.py, without torch or a compiler."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def _load_third_party() -> Any:
    """torch_resilient/cli/third_party.py, without the package, which is not built yet."""
    path = Path(__file__).resolve().parent.parent / "torch_resilient" / "cli" / "third_party.py"
    spec = importlib.util.spec_from_file_location("third_party", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


third_party = _load_third_party()
LISTED = third_party.table()
SETUPTOOLS = LISTED["setuptools"]

INSTALL = "pip install --no-build-isolation ."
_TOOLS = f"pip install torch '{SETUPTOOLS.requirement}' wheel ninja"
# Names of the folders that pip and build (build-env-), and uv (builds-v0) make for isolated builds.
_ISOLATED = re.compile(r"/(?:pip-)?build-env-|/builds-v\d+/")


class CudaUnavailableError(Exception):
    """Why the CUDA kernels cannot be built, in one line."""


def minor(version: str) -> tuple[int, int]:
    """`(2, 13)` of `"2.13.0+cpu"`."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def torch_requirement(version: str) -> str:
    """The versions of torch for which a binary built for `version` can be loaded."""
    return "torch=={}.{}.*".format(*minor(version))


def build_tag(version: str) -> str:
    """The wheel's build tag: `"213torch2.13"` for torch 2.13.

    A tag begins with a number, and pip prefers the wheel with the largest one.
    """
    first, second = minor(version)
    return f"{first}{second:02}torch{first}.{second}"


def without_torch(error: ImportError, setuptools_file: str) -> str:
    """The message for a build that cannot import torch.

    `setuptools_file` is the path of setuptools, which an isolated build takes from a temporary
    environment.
    """
    if _ISOLATED.search(setuptools_file):
        return (
            "torch_resilient must be compiled against the torch that you use, which this isolated "
            f"build environment hides: run `{INSTALL}` instead, after `{_TOOLS}`"
        )
    return (
        f"torch_resilient must be compiled against the installed torch, and importing torch failed "
        f"({error}): run `{_TOOLS}`, then `{INSTALL}`"
    )


def old_setuptools(version: str) -> str | None:
    """The message for a build with setuptools `version`; None if it is new enough."""
    if "unknown" in version or third_party.within(version, SETUPTOOLS.versions):
        return None  # "unknown": a copy without its metadata
    return (
        f"setuptools {version} is too old to build torch_resilient: run "
        f"`pip install --upgrade '{SETUPTOOLS.requirement}'`, then `{INSTALL}`"
    )


def untested_torch(version: str) -> str | None:
    """A warning for a build against torch `version`; None if it is in the supported range."""
    versions = LISTED["torch"].versions
    if third_party.within(version, versions):
        return None
    return f"torch_resilient supports torch {versions} and has not been tested with {version}"


def wanted(variable: str, value: str, what: str) -> bool | None:
    """Whether `value` of an environment variable requires or forbids a part; None: neither.

    Raises ValueError for anything but 1, 0 and nothing.
    """
    if value not in ("", "0", "1"):
        raise ValueError(
            f'{variable}="{value}": expected 1 ({what} are required), 0 '
            "(do not build them) or nothing (build them where possible)"
        )
    return None if value == "" else value == "1"


def cuda_wanted(value: str) -> bool | None:
    """`wanted` for the value of TORCH_RESILIENT_CUDA."""
    return wanted("TORCH_RESILIENT_CUDA", value, "the CUDA kernels")


def verbs_wanted(value: str) -> bool | None:
    """`wanted` for the value of TORCH_RESILIENT_VERBS."""
    return wanted("TORCH_RESILIENT_VERBS", value, "RDMA verbs")


def has_header(compiler: Sequence[str], header: str) -> bool:
    """Whether the C++ compiler, a command with its options, finds the header."""
    try:
        done = subprocess.run(
            [*compiler, "-E", "-x", "c++", "-"],
            input=f"#include <{header}>\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    except OSError:
        return False  # compiling the other modules will say more
    return done.returncode == 0


def check_nvcc(version_output: str, torch_cuda: str) -> None:
    """Raises CudaUnavailableError unless nvcc has the major version of torch's CUDA runtime.

    `version_output` is what `nvcc --version` prints; `torch_cuda` is `torch.version.cuda`.
    """
    found = re.search(r"release (\d+)\.(\d+)", version_output)
    if found is None:
        raise CudaUnavailableError("nvcc --version names no release")
    if found[1] != torch_cuda.split(".")[0]:
        raise CudaUnavailableError(
            f"nvcc is of CUDA {found[1]}.{found[2]}, and torch of CUDA {torch_cuda}"
        )


def architecture_flags(listing: str) -> list[str]:
    """nvcc's flags for all GPUs that it knows, whatever GPUs this machine has.

    `listing` is what `nvcc --list-gpu-arch` prints. The code of the first architecture of a major
    version runs on the others of it. GPUs that are newer than nvcc translate the PTX.
    """
    known = sorted({int(number) for number in re.findall(r"\bcompute_(\d+)\b", listing)})
    if not known:
        raise CudaUnavailableError("nvcc --list-gpu-arch names no architecture")
    first = {number // 10: number for number in reversed(known)}
    flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in sorted(first.values())]
    newest = max(first.values())
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def loaded_library(name: str, maps: Iterable[str]) -> Path:
    """The file of the loaded library `name.so.*`; `maps` are the lines of /proc/self/maps."""
    for line in maps:
        path = Path(line.split(maxsplit=5)[-1].strip())
        if path.name.startswith(f"{name}.so"):
            return path
    raise CudaUnavailableError(f"torch has not loaded {name}.so")


def first_error(output: str) -> str:
    """The first line with an error in a compiler's output, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    return (errors or lines[-1:] or ["it printed nothing"])[0]
