"""A device made of host memory, for tests of device tensors without a device.

`csrc/tests/device/pretended_device.cpp` has its copies, which end late and in another order than
they were asked for. It is no part of the package: the fixture `pretended_device` compiles it, and
`pretend` loads it into a process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch

_CSRC = Path(__file__).resolve().parent.parent / "csrc"
_SOURCE = _CSRC / "tests" / "device" / "pretended_device.cpp"
# All headers of ours that it includes: the module is compiled again when one changes.
_DEPENDS = [_SOURCE, _CSRC / "backend" / "device_staging.h", _CSRC / "base" / "time.h"]
_BUILT_FOR = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
_TARGET = _CSRC.parent / "build" / f"pretended_device.{_BUILT_FOR}.so"


def build() -> None:
    """Compiles the module if it is missing or older than its sources."""
    if _TARGET.exists() and _TARGET.stat().st_mtime > max(p.stat().st_mtime for p in _DEPENDS):
        return
    from torch.utils import cpp_extension

    _TARGET.parent.mkdir(parents=True, exist_ok=True)
    made = _TARGET.with_suffix(f".{os.getpid()}")  # two sessions may build at the same time
    include = [str(_CSRC), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-std=c++20",
        "-O1",
        "-Wall",
        "-fvisibility=hidden",
    ]
    command += ["-fPIC", "-shared", *(f"-I{folder}" for folder in include), str(_SOURCE)]
    command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    made.rename(_TARGET)


@functools.cache
def _load() -> Any:
    """The module, in use by the backend of this process."""
    from torch_resilient import _native

    spec = importlib.util.spec_from_file_location("pretended_device", _TARGET)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _native.load()._set_staging_factory(module.factory())
    return module


def pretend(copy_s: float) -> None:
    """Treats host tensors of this process as device tensors from now on, or with 0 no longer.

    A copy takes between 0 and twice `copy_s` seconds.
    """
    _load().set_copy_time(copy_s)
