"""The house rule of csrc/ and torch_resilient/: a file knows only the layers below its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from conftest import ROOT

# The folders that each folder of csrc may include, besides itself, in the order of the design: a
# layer sees only layers that stand before it. A transport drives a channel, so it stands after the
# channel; the channel does no I/O and sees no transport. operation is the interface between the
# engine and the algorithms that it runs: delegate and collectives see it, and not each other.
FOLDERS: dict[str, set[str]] = {
    "base": set(),
    "wire": {"base"},
    "loss": {"base", "wire"},
    "path": {"base", "wire", "loss"},
    "datagram": {"base", "wire", "loss", "path"},
    "failover": {"base", "wire", "path"},
    "operation": {"base"},
    "channel": {"base", "wire", "path"},
    "transport": {"base", "wire", "loss", "path", "datagram", "failover", "channel"},
    "delegate": {"base", "wire", "loss", "path", "datagram", "failover", "operation", "channel"}
    | {"transport"},
    "collectives": {"base", "operation"},
    "backend": {"base", "wire", "loss", "path", "failover", "operation", "channel", "transport"}
    | {"delegate", "collectives"},
    "cuda": {"base", "loss"},
    "planning": {"base"},
    "lab": {"base"},
    "verbs": {"base"},
    "shift": {"base"},
}
# Headers of other folders that a folder may include, too: the interface that verbs implements.
SINGLE_HEADERS = {"verbs": {"transport/verbs_api.h"}}
# These have no I/O, no threads and no clock: they run under simulation.
PURE = {"base", "wire", "loss", "path", "datagram", "failover", "operation", "channel"}
PURE |= {"collectives", "planning", "lab"}
# base holds the checked system calls and the system's random numbers and, for the time of day
# in a message, the log; lab what carries real packets.
IMPURE_FILES = {
    "base/block_memory.cpp",
    "base/syscall.h",
    "base/syscall.cpp",
    "base/random.cpp",
    "base/log.cpp",
}
IMPURE_FILES |= {"base/file.cpp", "lab/carrier.cpp"}
IMPURE_HEADER = re.compile(
    r"(sys|netinet|arpa|net|linux|infiniband)/.*"
    r"|unistd\.h|poll\.h|fcntl\.h|netdb\.h|ifaddrs\.h|pthread\.h|signal\.h"
    r"|thread|future|condition_variable|semaphore"
)
CLOCK = re.compile(r"\b(steady_clock|system_clock|high_resolution_clock)::now\b|\bclock_gettime\b")
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/.*|Python\.h")
# Separate Python modules, without torch.
PLAIN_BINDINGS = {f"{folder}/bindings.cpp" for folder in ("loss", "planning", "lab", "cuda")}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def cpp_faults(name: str, text: str) -> list[str]:
    """The faults of the C++ file `name` (relative to csrc) that holds `text`."""
    folder = name.split("/")[0]
    # The core's tests build without torch; tests/backend tests the backend, and
    # tests/device makes a module for the tests of the package.
    is_test = folder == "tests"
    sees_torch = folder == "backend" or name.startswith(("tests/backend/", "tests/device/"))
    if not is_test and folder not in FOLDERS:
        return [f"{name}: folder {folder} has no place in the layers"]
    text = COMMENT.sub("", text)
    pure = folder in PURE and name not in IMPURE_FILES
    faults = []
    for match in INCLUDE.finditer(text):
        header = match[2]
        target = header.split("/")[0]
        if TORCH_HEADER.fullmatch(header):
            if name in PLAIN_BINDINGS and target == "pybind11":
                continue
            if not sees_torch:
                faults.append(f"{name}: includes {header}; only backend may see torch")
        elif match[1] == "<":
            if pure and IMPURE_HEADER.fullmatch(header):
                faults.append(f"{name}: includes <{header}>; {folder} does no I/O")
        elif target not in FOLDERS and not (is_test and target == "tests"):
            faults.append(f'{name}: includes "{header}", which is not relative to csrc')
        elif is_test:
            if target == "backend" and not sees_torch:
                faults.append(f"{name}: includes {header}; the core's tests build without torch")
        elif header in SINGLE_HEADERS.get(folder, set()):
            continue
        elif target not in FOLDERS[folder] | {folder}:
            faults.append(f"{name}: includes {header}; {target} is not below {folder}")
    if pure and (clock := CLOCK.search(text)):
        faults.append(f"{name}: reads {clock[0]}; in {folder} time is an argument")
    return faults


# Sub-packages of torch_resilient and what each may import; modules at the top see no sub-package.
PACKAGES: dict[str, set[str]] = {
    "": set(),
    "_reports": {""},  # tells: typed values of what the compiled module knows
    "_observe": {"", "_reports"},  # watches: metrics and records
    "smart": {"", "_reports"},  # sends what may be dropped
    "planning": {""},  # pure: what to run when
    "control": {"", "_reports", "planning"},  # decides: what has changed, and which plan follows
    "geo": {"", "_reports", "planning", "control"},  # pure: which sites to train in, and how
    "pipelining": {"", "_reports", "smart", "planning", "control"},  # runs stages of torch's
    # serves: prefills in the bubbles of a pipeline
    "prefill": {"", "_reports", "pipelining"},
    "testing": {""},
    "cli": {"", "_reports", "_observe", "smart", "planning", "control", "geo", "pipelining"}
    | {"testing"},
}
# Modules at the top that may start the observers and hand out reports.
ENTRY_POINTS = {"__init__.py", "_registration.py", "faults.py"}
# Packages that must be importable where torch is not.
WITHOUT_TORCH = {"planning", "geo", "testing"}
# These import torch in a function that makes objects of torch's, and nowhere else.
TORCH_IN_FUNCTIONS = {"geo/placement.py"}
# The one importer of torch's private names for pipelining.
TORCH_PRIVATE = "pipelining/torch_actions.py"


def _imports(text: str) -> Iterable[tuple[str, str]]:
    """(module, name) of each import, wherever it stands; name is empty for `import module`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name) for alias in node.names)


def python_faults(name: str, text: str) -> list[str]:
    """The faults of the Python file `name` (relative to torch_resilient)."""
    package = name.split("/")[0] if "/" in name else ""
    if package not in PACKAGES:
        return [f"{name}: package {package} has no place in the layers"]
    faults = []
    for module, imported in _imports(text):
        if module.startswith("."):
            faults.append(f"{name}: relative import; write torch_resilient.…")
            continue
        parts = [*module.split("."), imported]
        if parts[0] == "torch_resilient":
            target = parts[1] if parts[1] in PACKAGES else ""
            if name in ENTRY_POINTS and target in {"_observe", "_reports"}:
                continue
            if target != package and target not in PACKAGES[package]:
                faults.append(f"{name}: imports {target}, which is not below {package or 'it'}")
        elif parts[0] == "torch" and package in WITHOUT_TORCH and name not in TORCH_IN_FUNCTIONS:
            faults.append(f"{name}: imports torch, which {package} does without")
        elif parts[0] == "torch" and package == "pipelining" and name != TORCH_PRIVATE:
            private = [part for part in parts if part.startswith("_") and part != "__future__"]
            if private:
                faults.append(f"{name}: imports torch's private {private[0]}; see {TORCH_PRIVATE}")
    return faults


def _files(folder: Path, *endings: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix in endings)
    assert found, f"nothing in {folder}"
    return found


def test_cpp_layers() -> None:
    csrc = ROOT / "csrc"
    faults = []
    for path in _files(csrc, ".h", ".cpp", ".cu", ".cuh"):
        faults += cpp_faults(path.relative_to(csrc).as_posix(), path.read_text(encoding="utf-8"))
    assert not faults, "\n" + "\n".join(faults)


def test_no_file_is_read_by_a_stream() -> None:
    """With a C++ library that is linked statically beside torch's, `>>` of a number never ends."""
    streams = re.compile(r"#\s*include\s*<fstream>|\bifstream\b")
    for kind in ("*.h", "*.cpp"):
        for path in (ROOT / "csrc").rglob(kind):
            if "tests" not in path.parts:
                code = COMMENT.sub("", path.read_text(encoding="utf-8"))
                assert not streams.search(code), path


def test_python_layers() -> None:
    package = ROOT / "torch_resilient"
    faults = []
    for path in _files(package, ".py"):
        name = path.relative_to(package).as_posix()
        faults += python_faults(name, path.read_text(encoding="utf-8"))
    assert not faults, "\n" + "\n".join(faults)


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Circles of imports among Python files, given by name (relative to torch_resilient) and text.

    Imports in functions and those for type checkers only count, too.
    """
    modules = {
        "torch_resilient."
        + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name
        for name in files
    }
    graph: dict[str, set[str]] = {}
    for module, name in modules.items():
        found = set()
        for imported, attribute in _imports(files[name]):
            target = f"{imported}.{attribute}" if f"{imported}.{attribute}" in modules else imported
            if target in modules and target != module:
                found.add(target)
        graph[module] = found
    found_circles: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found_circles.append([*path[path.index(module) :], module])
            return
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found_circles


def test_no_python_module_imports_itself_by_way_of_others() -> None:
    package = ROOT / "torch_resilient"
    files = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in _files(package, ".py")
    }
    assert circles(files) == []


def test_the_check_for_circles_finds_them() -> None:
    files = {
        "testing/__init__.py": "from torch_resilient.testing.lab import Lab",
        "testing/lab.py": "from torch_resilient.testing.script import parse",
        "testing/script.py": "if TYPE_CHECKING:\n    from torch_resilient.testing import lab",
    }
    (found,) = circles(files)
    assert found == [f"torch_resilient.testing.{name}" for name in ("lab", "script", "lab")]
    files["testing/script.py"] = "from torch_resilient import options"
    assert circles(files) == []


@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("base/x.h", '#include "wire/frame.h"', "wire is not below base"),
        ("channel/x.h", '#include "transport/tcp.h"', "transport is not below channel"),
        ("channel/x.h", '#include "failover/x.h"', "failover is not below channel"),
        ("failover/x.h", '#include "loss/parity_code.h"', "loss is not below failover"),
        ("operation/x.h", '#include "channel/channel.h"', "channel is not below operation"),
        ("operation/x.h", "#include <thread>", "does no I/O"),
        ("collectives/x.cpp", '#include "delegate/group.h"', "delegate is not below collectives"),
        ("collectives/x.cpp", '#include "channel/channel.h"', "channel is not below collectives"),
        ("delegate/x.cpp", '#include "collectives/collectives.h"', "not below delegate"),
        ("path/x.cpp", "#include <thread>", "does no I/O"),
        ("wire/x.cpp", "#  include <sys/socket.h>", "does no I/O"),
        ("channel/x.cpp", "auto t = std::chrono::steady_clock::now();", "time is an argument"),
        ("delegate/x.h", "#include <c10/util/Exception.h>", "only backend"),
        ("tests/x_test.cpp", "#include <torch/torch.h>", "only backend"),
        ("tests/x_test.cpp", '#include "backend/work.h"', "without torch"),
        ("path/x.h", '#include "frame.h"', "not relative to csrc"),
        ("planning/x.h", '#include "wire/frame.h"', "wire is not below planning"),
        ("planning/x.cpp", "#include <pybind11/pybind11.h>", "only backend"),
        ("planning/bindings.cpp", "#include <torch/extension.h>", "only backend"),
        ("loss/x.cpp", '#include "path/faults.h"', "path is not below loss"),
        ("loss/x.cpp", "#include <thread>", "does no I/O"),
        ("lab/emulator.cpp", "#include <sys/socket.h>", "does no I/O"),
        ("delegate/x.cpp", '#include "lab/packet.h"', "not below delegate"),
        ("delegate/x.cpp", '#include "planning/generator.h"', "not below delegate"),
        ("cuda/x.cu", "#include <c10/cuda/CUDAStream.h>", "only backend"),
        ("loss/x.cpp", '#include "cuda/loss_kernels.h"', "cuda is not below loss"),
        ("verbs/x.cpp", '#include "transport/verbs_system.h"', "transport is not below verbs"),
        ("verbs/x.cpp", '#include "wire/frame.h"', "wire is not below verbs"),
        ("transport/x.cpp", '#include "verbs/handles.h"', "verbs is not below transport"),
        ("stuff/x.h", "", "no place in the layers"),
    ],
)
def test_the_cpp_check_finds(name: str, line: str, fault: str) -> None:
    (found,) = cpp_faults(name, f"#pragma once\n{line}\n")
    assert fault in found


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("transport/x.h", '#include "channel/channel.h"'),
        ("transport/x.h", "#include <sys/socket.h>"),
        ("delegate/x.h", '#include "operation/task.h"'),
        ("backend/x.h", "#include <torch/csrc/distributed/c10d/Backend.hpp>"),
        ("base/syscall.cpp", "#include <unistd.h>"),
        ("planning/x.cpp", '#include "base/random.h"'),
        ("planning/bindings.cpp", "#include <pybind11/stl.h>"),
        ("lab/carrier.cpp", "#include <sys/socket.h>"),
        ("verbs/x.h", '#include "transport/verbs_api.h"'),
        ("verbs/x.cpp", "#include <infiniband/verbs.h>"),
        ("path/x.h", "// steady_clock::now() is the caller's business"),
        ("path/x.h", '// #include "backend/work.h"'),
        ("tests/x_test.cpp", '#include "delegate/group.h"'),
        ("tests/x_test.cpp", '#include "cuda/thread_bodies.h"'),
        ("tests/backend/x_test.cpp", '#include "backend/work.h"'),
        ("tests/device/x.cpp", "#include <ATen/ATen.h>"),
    ],
)
def test_the_cpp_check_allows(name: str, line: str) -> None:
    assert cpp_faults(name, f"#pragma once\n{line}\n") == []


@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("options.py", "from torch_resilient.control import detector", "imports control"),
        ("options.py", "def f():\n    import torch_resilient.cli", "imports cli"),
        ("control/x.py", "from torch_resilient import pipelining", "imports pipelining"),
        ("planning/x.py", "import torch_resilient.control.plan", "imports control"),
        ("planning/x.py", "import torch", "imports torch"),
        ("geo/x.py", "import torch", "imports torch"),
        ("geo/x.py", "from torch_resilient.pipelining import picture", "imports pipelining"),
        ("planning/x.py", "from torch_resilient.geo import cell", "imports geo"),
        ("control/x.py", "from . import sites", "relative import"),
        ("testing/x.py", "from torch_resilient import cli", "imports cli"),
        ("pipelining/x.py", "from torch_resilient import prefill", "imports prefill"),
        (
            "pipelining/x.py",
            "from torch.distributed.pipelining.schedules import _Action",
            "_Action",
        ),
        ("pipelining/x.py", "import torch.distributed.pipelining._utils", "_utils"),
        ("stuff/x.py", "", "no place in the layers"),
    ],
)
def test_the_python_check_finds(name: str, line: str, fault: str) -> None:
    (found,) = python_faults(name, line)
    assert fault in found


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pipelining/torch_actions.py", "from torch.distributed.pipelining.schedules import _A"),
        ("pipelining/x.py", "from __future__ import annotations\nimport torch"),
        ("cli/x.py", "from torch_resilient import control\nimport torch_resilient.options"),
        ("control/x.py", "from torch_resilient.planning.replay import simulate"),
        ("geo/placement.py", "def f():\n    from torch.distributed.device_mesh import DeviceMesh"),
        ("pipelining/x.py", "from torch_resilient.control.plan import Decider"),
    ],
)
def test_the_python_check_allows(name: str, line: str) -> None:
    assert python_faults(name, line) == []
