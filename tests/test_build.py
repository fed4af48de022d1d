"""The build and its packages: setup.py, csrc/setup_support.py, pyproject.toml and MANIFEST.in."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

# Finds a binary that is newer than all sources, as an installation for another torch leaves it.
BUILD_AGAIN = """
import pathlib, sys
import setuptools
import torch.utils.cpp_extension
from distutils.ccompiler import new_compiler
from distutils.core import run_setup

torch.utils.cpp_extension.is_ninja_available = lambda: False
build = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
build.build_lib = sys.argv[1]
build.ensure_finalized()
extension = build.extensions[0]
left = pathlib.Path(build.get_ext_fullpath(extension.name))
left.parent.mkdir(parents=True)
left.touch()
build.compiler = new_compiler()
build.compiler.compile = lambda *sources, **options: sys.exit(0)
build.build_extension(extension)
sys.exit("nothing was compiled")
"""
# Prints what a wheel would say about torch.
METADATA = """
import json
import setuptools
from distutils.core import run_setup

dist = run_setup("setup.py", stop_after="config")
wheel = dist.get_command_obj("bdist_wheel")
wheel.ensure_finalized()
print(json.dumps([dist.metadata.license_expression, dist.install_requires, wheel.wheel_dist_name]))
"""

# Lets a torch with CUDA 13 compile the kernels into the folder sys.argv[1], and prints what came of
# it. torch's CUDA runtime is some library there.
COMPILE_KERNELS = """
import ctypes, json, pathlib, shutil, sys
import setuptools
import torch
from distutils.core import run_setup
from torch_resilient import _lab

torch.version.cuda = "13.2"
runtime = pathlib.Path(sys.argv[1]) / "libcudart.so.13"
shutil.copy(_lab.__file__, runtime)
ctypes.CDLL(str(runtime))
build = run_setup("setup.py", stop_after="config").get_command_obj("build_ext")
build.build_temp = sys.argv[1]
build.ensure_finalized()
build.build_temp = sys.argv[1]
build.prepare_cuda()
(kernels,) = [each for each in build.extensions if each.name.endswith("_cuda")] or [None]
print(json.dumps({
    "without_cuda": build.without_cuda,
    "modules": [each.name for each in build.extensions],
    "links": kernels and [*kernels.extra_objects, *kernels.extra_link_args],
}))
"""
# The C++ compiler fails on the module sys.argv[1]. Prints which modules were built.
COMPILER_FAILS = """
import json, sys
import setuptools
import torch
import torch.utils.cpp_extension
from distutils.core import run_setup
from setuptools.command.build_ext import build_ext

def compiled(self, ext):
    if ext.name == sys.argv[1]:
        raise RuntimeError("Error compiling objects for extension")

torch.version.cuda = "13.2"
torch.utils.cpp_extension.BuildExtension.build_extension = compiled
build = run_setup("setup.py", stop_after="config").get_command_obj("build_ext")
build.ensure_finalized()
build.prepare_cuda = lambda: None
for extension in build.extensions:
    build.build_extension(extension)
print(json.dumps([build.without_cuda, [each.name for each in build.extensions]]))
"""
# Decides on the RDMA verbs with the C++ compiler $CXX. Prints which modules would be built.
PREPARE_VERBS = """
import json
import setuptools
from distutils.core import run_setup

build = run_setup("setup.py", stop_after="config").get_command_obj("build_ext")
build.ensure_finalized()
build.prepare_verbs()
print(json.dumps([each.name for each in build.extensions]))
"""
NVCC = """#!/bin/sh
echo "$*" >>"$0.log"
case "$1" in
  --version) echo "Cuda compilation tools, release $NVCC_RELEASE, V$NVCC_RELEASE.88" ;;
  --list-gpu-arch) printf 'compute_%s\\n' 75 80 86 90 100 103 ;;
  *) printf 'noise\\nk.cu(7): error: identifier expected\\nnoise\\n'; exit $NVCC_STATUS ;;
esac
"""

PACKED = ("csrc", "third_party", "docs", "tests", "benchmarks", "examples", "torch_resilient")
# Written by builds and tests, not by people.
MADE = {".pyc", ".so", ".o", ".d"}


def load(name: str) -> Any:
    """A module of the source that is not installed."""
    spec = importlib.util.spec_from_file_location(Path(name).name, ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = load("csrc/setup_support")


def attempt(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the source."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def run(folder: Path, *arguments: str) -> str:
    """Runs Python in the source and returns what it prints; fails the test if that fails."""
    done = attempt(*arguments, str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("version", "requirement", "tag"),
    [
        ("2.9.1", "torch==2.9.*", "209torch2.9"),
        ("2.13.0+cpu", "torch==2.13.*", "213torch2.13"),
        ("2.15.0a0+git1234", "torch==2.15.*", "215torch2.15"),
        ("3.0.0", "torch==3.0.*", "300torch3.0"),
    ],
)
def test_a_wheel_is_for_one_minor_version_of_torch(
    version: str, requirement: str, tag: str
) -> None:
    assert support.torch_requirement(version) == requirement
    assert support.build_tag(version) == tag


def test_metadata_names_the_torch_that_the_build_used(tmp_path: Path) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    license_, requires, name = json.loads(run(tmp_path, "-c", METADATA))
    assert license_ == "BSD-3-Clause"
    assert requires == [f"torch=={minor}.*", "numpy"]
    assert name == f"torch_resilient-0.1.0-{minor.replace('.', '')}torch{minor}"
    installed = importlib.metadata.requires("torch_resilient")
    assert installed is not None
    assert f"torch=={minor}.*" in installed


@pytest.mark.parametrize(
    "folder", ["pip-build-env-x1y2/overlay/lib/site-packages", "plain/lib/site-packages"]
)
def test_a_build_that_hides_torch_is_told_apart_from_one_without_torch(
    tmp_path: Path, folder: str
) -> None:
    packages = tmp_path / folder
    packages.mkdir(parents=True)
    for pattern in ("setuptools*", "_distutils_hack"):
        for found in Path(sysconfig.get_path("purelib")).glob(pattern):
            (packages / found.name).symlink_to(found)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import runpy; runpy.run_path('setup.py')"
    )
    done = attempt("-I", "-S", "-c", program, str(packages))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "`pip install --no-build-isolation .`" in done.stderr
    assert ("isolated build environment" in done.stderr) == ("pip-build-env" in folder)
    assert ("No module named 'torch'" in done.stderr) == ("plain" in folder)


@pytest.mark.parametrize("version", ["65.5.0", "77.0", "77.0.2"])
def test_setuptools_that_cannot_read_the_metadata_are_refused(version: str) -> None:
    assert "pip install --upgrade 'setuptools>=77.0.3'" in support.old_setuptools(version)


@pytest.mark.parametrize(("version", "warned"), [("2.10.2", True), ("2.13.0+cpu", False)])
def test_a_build_warns_about_a_torch_that_is_not_supported(version: str, warned: bool) -> None:
    warning = support.untested_torch(version)
    assert (warning is not None) == warned
    assert warning is None or warning.endswith(f"has not been tested with {version}")


def test_newer_setuptools_are_accepted() -> None:
    for version in ("77.0.3", "81.0", "84.2.1.post0", "0.dev0+unknown"):
        assert support.old_setuptools(version) is None


def test_cuda_can_be_required_or_turned_off() -> None:
    assert [support.cuda_wanted(value) for value in ("", "0", "1")] == [None, False, True]
    done = attempt("setup.py", "--version", TORCH_RESILIENT_CUDA="yes")
    assert done.returncode == 1
    assert done.stderr.startswith('TORCH_RESILIENT_CUDA="yes": expected 1 (')


def prepare_verbs(folder: Path, found: bool, wanted: str) -> subprocess.CompletedProcess[str]:
    """Decides on the RDMA verbs with a compiler that finds the header, or does not."""
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\ngrep -q infiniband/verbs.h && exit {int(not found)}\n")
    compiler.chmod(0o755)
    return attempt("-c", PREPARE_VERBS, CXX=str(compiler), TORCH_RESILIENT_VERBS=wanted)


@pytest.mark.parametrize("wanted", ["", "1"])
def test_verbs_are_built_where_their_header_is(tmp_path: Path, wanted: str) -> None:
    done = prepare_verbs(tmp_path, True, wanted)
    assert done.returncode == 0, done.stderr
    assert "torch_resilient._verbs" in json.loads(done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("found", "wanted", "reason"),
    [
        (False, "", "there is no infiniband/verbs.h (Debian: libibverbs-dev)"),
        (True, "0", "TORCH_RESILIENT_VERBS=0"),
    ],
)
def test_verbs_that_are_left_out_do_not_stop_an_installation(
    tmp_path: Path, found: bool, wanted: str, reason: str
) -> None:
    done = prepare_verbs(tmp_path, found, wanted)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    assert "torch_resilient._verbs" not in modules
    assert "torch_resilient._C" in modules
    assert done.stderr == f"torch_resilient has no RDMA verbs: {reason}\n"


def test_verbs_can_be_required(tmp_path: Path) -> None:
    assert [support.verbs_wanted(value) for value in ("", "0", "1")] == [None, False, True]
    done = attempt("setup.py", "--version", TORCH_RESILIENT_VERBS="yes")
    assert done.returncode == 1
    assert done.stderr.startswith('TORCH_RESILIENT_VERBS="yes": expected 1 (RDMA verbs are ')
    done = prepare_verbs(tmp_path, False, "1")
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("torch_resilient has no RDMA verbs: there is no infiniband/verbs.h")
    assert said.endswith("; TORCH_RESILIENT_VERBS=1 requires them")


def test_a_header_is_looked_for_by_the_compiler() -> None:
    assert support.has_header(["c++"], "vector")
    assert not support.has_header(["c++"], "no/such/header.h")
    assert not support.has_header(["/no/such/compiler"], "vector")


@pytest.mark.parametrize(
    ("failing", "other", "missing"),
    [
        ("_verbs", "_shift", "RDMA verbs"),
        ("_shift", "_verbs", "library for `torch-resilient shift`"),
    ],
)
def test_a_failing_compiler_costs_an_installation_one_library(
    failing: str, other: str, missing: str
) -> None:
    done = attempt("-c", COMPILER_FAILS, f"torch_resilient.{failing}")
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)[1]
    assert f"torch_resilient.{failing}" not in modules
    assert f"torch_resilient.{other}" in modules
    assert "torch_resilient._C" in modules
    reason = "the C++ compiler failed; its output is above"
    assert done.stderr == f"torch_resilient has no {missing}: {reason}\n"
    required = attempt(
        "-c", COMPILER_FAILS, f"torch_resilient.{failing}", TORCH_RESILIENT_VERBS="1"
    )
    assert required.returncode == 1


def test_the_verbs_library_serves_only_its_own_build() -> None:
    found = list((ROOT / "torch_resilient").glob("_verbs.*.so"))
    if not found:
        pytest.skip("the package was built without RDMA verbs")
    opened = ctypes.CDLL(str(found[0])).resilient_verbs_open
    opened.restype = ctypes.c_void_p
    header = (ROOT / "csrc" / "transport" / "verbs_api.h").read_text(encoding="utf-8")
    version = re.search(r"kVerbsApiVersion = (\d+);", header)
    assert version is not None
    assert opened(int(version[1])) is not None
    assert opened(int(version[1]) + 1) is None


def test_architectures_are_the_first_of_each_generation_and_ptx_of_the_newest() -> None:
    assert support.architecture_flags("compute_75\ncompute_80\ncompute_86\ncompute_120\n") == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    with pytest.raises(support.CudaUnavailableError, match="names no architecture"):
        support.architecture_flags("")


def test_nvcc_must_have_the_major_version_of_torchs_cuda() -> None:
    support.check_nvcc("Cuda compilation tools, release 13.0, V13.0.88", "13.2")
    with pytest.raises(support.CudaUnavailableError, match=r"nvcc is of CUDA 12\.9, .* CUDA 13\.2"):
        support.check_nvcc("Cuda compilation tools, release 12.9, V12.9.1", "13.2")
    with pytest.raises(support.CudaUnavailableError, match="names no release"):
        support.check_nvcc("nvcc", "13.2")


def test_the_loaded_library_is_found_by_its_name() -> None:
    line = "7f0000-7f1000 r-xp 00000000 08:01 42    /a folder/{}\n"
    maps = ["7f2000-7f3000 rw-p 00000000 00:00 0\n", line.format("libcudart_static.so.1")]
    with pytest.raises(support.CudaUnavailableError, match=r"has not loaded libcudart\.so"):
        support.loaded_library("libcudart", maps)
    found = support.loaded_library("libcudart", [*maps, line.format("libcudart.so.13")])
    assert found == Path("/a folder/libcudart.so.13")


def compile_kernels(
    folder: Path, status: int, release: str = "13.0", **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Compiles them with a fake nvcc; returns what came of it and how nvcc was called."""
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    environment |= {"NVCC_STATUS": str(status), "NVCC_RELEASE": release}
    done = attempt("-c", COMPILE_KERNELS, str(folder), **environment)
    log = Path(f"{nvcc}.log")
    return done, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("chosen", "architectures"),
    [
        ("", ["75,code=sm_75", "80,code=sm_80", "90,code=sm_90", "100,code=sm_100"]),
        ("8.0;9.0", ["80,code=sm_80", "90,code=sm_90"]),
    ],
)
def test_kernels_are_compiled_without_a_gpu(
    tmp_path: Path, chosen: str, architectures: list[str]
) -> None:
    done, calls = compile_kernels(tmp_path, 0, TORCH_CUDA_ARCH_LIST=chosen, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["without_cuda"] == ""
    kernels = str(tmp_path / "torch_resilient._cuda" / "loss_kernels.o")
    assert report["links"] == [kernels, str(tmp_path / "libcudart.so.13")]
    flags = [flag for flag in calls[-1].split() if ",code=sm_" in flag]
    assert flags == [f"-gencode=arch=compute_{each}" for each in architectures]


@pytest.mark.parametrize(
    ("status", "release", "architectures", "reason"),
    [
        (2, "13.0", "", "nvcc failed: k.cu(7): error: identifier expected"),
        (0, "12.9", "", "nvcc is of CUDA 12.9, and torch of CUDA 13.2"),
        (0, "13.0", "1.0", 'TORCH_CUDA_ARCH_LIST="1.0": Unknown CUDA arch (1.0)'),
    ],
)
@pytest.mark.parametrize("required", [False, True])
def test_kernels_that_cannot_be_compiled_do_not_stop_an_installation(
    tmp_path: Path, status: int, release: str, architectures: str, reason: str, required: bool
) -> None:
    environment = {"TORCH_CUDA_ARCH_LIST": architectures}
    environment["TORCH_RESILIENT_CUDA"] = "1" if required else ""
    done, _ = compile_kernels(tmp_path, status, release, **environment)
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"torch_resilient has no CUDA kernels: {reason}")
    if required:
        assert done.returncode == 1
        assert said.endswith("; TORCH_RESILIENT_CUDA=1 requires them")
    else:
        assert done.returncode == 0
        report = json.loads(done.stdout)
        assert report["without_cuda"].startswith(reason)
        assert "torch_resilient._cuda" not in report["modules"]
        assert "torch_resilient._C" in report["modules"]


def test_kernels_can_be_turned_off(tmp_path: Path) -> None:
    done, calls = compile_kernels(tmp_path, 0, TORCH_RESILIENT_CUDA="0")
    assert json.loads(done.stdout)["without_cuda"] == "TORCH_RESILIENT_CUDA=0"
    assert calls == []


def test_a_failing_compiler_costs_an_installation_the_kernels_alone() -> None:
    done = attempt("-c", COMPILER_FAILS, "torch_resilient._cuda")
    assert done.returncode == 0, done.stderr
    reason, modules = json.loads(done.stdout)
    assert reason == "the C++ compiler failed; its output is above"
    assert done.stderr == f"torch_resilient has no CUDA kernels: {reason}\n"
    assert "torch_resilient._cuda" not in modules
    required = attempt("-c", COMPILER_FAILS, "torch_resilient._cuda", TORCH_RESILIENT_CUDA="1")
    assert required.returncode == 1
    assert required.stderr.endswith("; TORCH_RESILIENT_CUDA=1 requires them\n")
    assert attempt("-c", COMPILER_FAILS, "torch_resilient._C").returncode != 0


def test_without_ninja_no_old_binary_is_taken_for_a_new_one(tmp_path: Path) -> None:
    run(tmp_path, "-c", BUILD_AGAIN)


def test_the_module_holds_no_test_doubles() -> None:
    from torch_resilient import _C

    done = subprocess.run(
        ["nm", "--demangle", _C.__file__], capture_output=True, text=True, timeout=60, check=True
    )
    names = done.stdout
    assert "resilient::DeviceStaging" in names
    for double in ("Simulat", "resilient::strict", "resilient::planted"):
        assert double not in names


def test_the_source_distribution_is_whole(tmp_path: Path) -> None:
    run(tmp_path, "setup.py", "-q", "egg_info", "--egg-base")
    packed = set((tmp_path / "torch_resilient.egg-info" / "SOURCES.txt").read_text().split("\n"))
    files = [*ROOT.glob("*.md"), *(path for name in PACKED for path in (ROOT / name).rglob("*"))]
    here = {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and path.suffix not in MADE and "__pycache__" not in path.parts
    }
    here |= {"LICENSE", "Makefile", "pyproject.toml", "setup.py"}
    here |= {".clang-format", ".clang-tidy", ".ci/run"}
    assert here - packed == set()
