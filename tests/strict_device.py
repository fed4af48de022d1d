"""An accelerator on the CPU, for tests of device tensors without a GPU.

`csrc/tests/device` has the device (see strict_device.h): PrivateUse1 of torch under the name
"strict", with two devices, whose streams are threads. It follows CUDA's rules and punishes each
breach: work on streams is late, the host cannot touch device memory, freed memory is poisoned. It
is no part of the package: the fixture `strict_device` compiles it, and `load` registers it in a
process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from harness import init_group

_CSRC = Path(__file__).resolve().parent.parent / "csrc"
_FOLDER = _CSRC / "tests" / "device"
_SOURCES = sorted(_FOLDER.glob("strict_*.cpp"))
_BUILT_FOR = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
_TARGET = _CSRC.parent / "build" / f"strict_device.{_BUILT_FOR}.so"

# The device of tensors in tests: torch.ones(3, device=DEVICE).
DEVICE = "strict:0"
# For init_process_group(backend=BACKEND).
BACKEND = "cpu:resilient,strict:resilient"


def build() -> None:
    """Compiles the device if it is missing or older than its sources."""
    newest = max(p.stat().st_mtime for p in _FOLDER.glob("strict_*"))
    if _TARGET.exists() and _TARGET.stat().st_mtime > newest:
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
        "-g1",
        "-Wall",
        "-fvisibility=hidden",
        "-fPIC",
        "-shared",
        "-pthread",
        *(f"-I{folder}" for folder in include),
        *map(str, _SOURCES),
        f"-L{libraries}",
        "-ltorch_cpu",
        "-ltorch",
        "-lc10",
        "-o",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    made.rename(_TARGET)


def _device_module(native: Any) -> types.ModuleType:
    """The module that torch looks for as torch.strict."""
    module = types.ModuleType("torch.strict")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    for name in ("device_count", "current_device", "set_device", "synchronize"):
        setattr(module, name, getattr(native, name))
    return module


@functools.cache
def load() -> Any:
    """Registers the device in this process; returns its controls.

    `sleep(s)` and `hold()` put a delay, or a wait for `release()`, on the current stream.
    `set_copy_time(s)` makes each copy take between 0 and twice that, `set_copy_rate(r)` also the
    time of its bytes, `limit_copies(n)` stops all after the next n (negative: never). `contexts()`
    lists the devices on which a context was made. PYBIND11_MODULE in the source has all.
    """
    # Other libraries find its symbols, as they find those of CUDA's runtime.
    ctypes.CDLL(str(_TARGET), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("strict_device", _TARGET)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend("strict")
    torch._register_device_module("strict", _device_module(native))
    return native


def start(device: int = 0, copy_s: float = 0.0) -> Any:
    """In a rank: the default group for host tensors and those of the device, which becomes current.

    Returns the controls, as load() does. Copies take between 0 and twice `copy_s`.
    """
    controls = load()
    controls.set_device(device)
    controls.set_copy_time(copy_s)
    init_group(backend=BACKEND)
    return controls
