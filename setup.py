"""Builds torch_resilient._C against the torch that is installed; the other modules need none."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        f"torch_resilient is built against an installed torch, and importing it failed ({error}): "
        "install torch first, then run pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent
# One file needs up to 1 GB while it is compiled; two at a time fit everywhere.
os.environ.setdefault("MAX_JOBS", "2")
# A ninja that was installed beside this Python is found even if its environment is not active.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

BUILD_INFO = '''"""Written by setup.py: what _C was compiled against."""

TORCH_VERSION = {version!r}
'''


def sources(*patterns: str) -> list[str]:
    """Paths of the matching files relative to here, as setuptools wants them, sorted."""
    found = {path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extensions() -> list[Extension]:
    """The modules; _cuda if there are kernels, torch has CUDA and its compiler is here."""
    plain_flags = ["-std=c++20", "-O2", "-Wall", "-g0", "-fvisibility=hidden"]
    flags = [*plain_flags, f'-DTORCH_RESILIENT_BUILT_FOR="{torch.__version__}"']
    headers = sources("**/*.h", "**/*.def")
    apart = ("csrc/tests/", "csrc/cuda/", "csrc/planning/", "csrc/lab/", "csrc/loss/bindings.cpp")
    core = [path for path in sources("**/*.cpp") if not path.startswith(apart)]
    if not any(path.startswith("csrc/backend/") for path in core):
        sys.exit(f"{ROOT}/csrc/backend holds no source file: this copy of the source is incomplete")
    include = [str(ROOT / "csrc")]
    below = ("random", "signature", "status", "syscall")
    loss = sources("loss/*.cpp", *(f"base/{name}.cpp" for name in below))
    loss.remove("csrc/loss/bindings.cpp")
    result: list[Extension] = [
        CppExtension(
            "torch_resilient._C",
            core,
            include_dirs=include,
            depends=headers,
            extra_compile_args={"cxx": flags},
        ),
        # Only pybind11 of torch, which is headers. Without contraction of sums and products the
        # results are those of the Python twins, to the last bit.
        Extension(
            "torch_resilient._planning",
            sources("planning/*.cpp"),
            include_dirs=[*include, str(Path(torch.__file__).parent / "include")],
            depends=headers,
            language="c++",
            extra_compile_args={"cxx": [*plain_flags, "-ffp-contract=off"]},
        ),
        # A process of its own loads this by its path, without the package.
        Extension(
            "torch_resilient._lab",
            sources("lab/*.cpp", "base/random.cpp", "base/status.cpp", "base/syscall.cpp"),
            include_dirs=[*include, str(Path(torch.__file__).parent / "include")],
            depends=headers,
            language="c++",
            extra_compile_args={"cxx": plain_flags},
        ),
        # The backend has the same functions in _C, without Python around them.
        Extension(
            "torch_resilient._loss",
            [*loss, "csrc/loss/bindings.cpp"],
            include_dirs=[*include, str(Path(torch.__file__).parent / "include")],
            depends=headers,
            language="c++",
            extra_compile_args={"cxx": plain_flags},
        ),
    ]
    kernels = sources("cuda/*.cu")
    if kernels and torch.version.cuda and shutil.which("nvcc"):
        result.append(
            CUDAExtension(
                "torch_resilient._cuda",
                [*kernels, *sources("cuda/*.cpp"), *loss],
                include_dirs=include,
                depends=headers,
                # What is constexpr is for the device, too.
                extra_compile_args={
                    "cxx": plain_flags,
                    "nvcc": ["-std=c++20", "-O3", "--expt-relaxed-constexpr"],
                },
            )
        )
    return result


class BuildWithInfo(BuildExtension):
    """Compiles into build/, so that a second build is quick, and records torch's version."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # setuptools would use a new folder for each editable install.
        tag = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        self.build_temp = str(ROOT / "build" / tag)
        # What an earlier installation left in build/lib may be for another torch: without ninja,
        # which looks for itself, setuptools would take whatever is newer than the sources.
        self.force = True

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("torch_resilient._C")).parent
        text = BUILD_INFO.format(version=str(torch.__version__))
        (package / "_build_info.py").write_text(text, encoding="utf-8")

    def build_extension(self, ext: Extension) -> None:
        # A source of two modules is compiled for each, with its flags: in folders of their own,
        # neither replaces the other's object and so makes the next build begin anew.
        common = self.build_temp
        self.build_temp = str(Path(common) / ext.name)
        super().build_extension(ext)
        self.build_temp = common


class BuildWithOptions(build_py):
    """Adds the table of options, from which torch_resilient.options makes its text."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "torch_resilient" / "options.def"
            self.copy_file(str(ROOT / "csrc" / "base" / "options.def"), str(target))


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildWithInfo, "build_py": BuildWithOptions},
)
