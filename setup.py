"""Builds torch_resilient._C against the torch that is installed; the other modules need none."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import setup_support  # noqa: E402

if (problem := setup_support.old_setuptools(setuptools.__version__)) is not None:
    sys.exit(problem)
try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(setup_support.without_torch(error, str(setuptools.__file__)))
try:
    CUDA_WANTED = setup_support.cuda_wanted(os.environ.get("TORCH_RESILIENT_CUDA", ""))
    VERBS_WANTED = setup_support.verbs_wanted(os.environ.get("TORCH_RESILIENT_VERBS", ""))
except ValueError as error:
    sys.exit(str(error))

# Compiling one file needs up to 1 GB of memory; two at a time fit everywhere.
os.environ.setdefault("MAX_JOBS", "2")
# Finds a ninja installed in this Python's environment even if the environment is not active.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

BUILD_INFO = '''"""Written by setup.py: what was built."""

# The torch that _C was compiled against.
TORCH_VERSION = {version!r}
# Why there are no CUDA kernels; empty if there are.
WITHOUT_CUDA = {without_cuda!r}
'''
CUDA_MODULE = "torch_resilient._cuda"
# Not a Python module: csrc/transport/verbs_system.cpp opens it.
VERBS_LIBRARY = "torch_resilient._verbs"
# Not a Python module either: `torch-resilient shift` preloads it into other programs.
SHIFT_LIBRARY = "torch_resilient._shift"
# The libraries linked to libibverbs, and the names of what they provide.
VERBS_PARTS = {VERBS_LIBRARY: "RDMA verbs", SHIFT_LIBRARY: "library for `torch-resilient shift`"}


def sources(*patterns: str) -> list[str]:
    """Paths of the matching files relative to here, as setuptools wants them, sorted."""
    found = {path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extensions() -> list[Extension]:
    """The modules. BuildForTorch compiles the kernels of _cuda, or drops it, and _verbs as well."""
    plain_flags = ["-std=c++20", "-O2", "-Wall", "-g0", "-fvisibility=hidden"]
    flags = [*plain_flags, f'-DTORCH_RESILIENT_BUILT_FOR="{torch.__version__}"']
    headers = sources("**/*.h", "**/*.def")
    apart = ("csrc/tests/", "csrc/cuda/", "csrc/planning/", "csrc/lab/", "csrc/verbs/")
    apart += ("csrc/shift/",)
    apart += ("csrc/loss/bindings.cpp",)
    core = [path for path in sources("**/*.cpp") if not path.startswith(apart)]
    if not any(path.startswith("csrc/backend/") for path in core):
        sys.exit(f"{ROOT}/csrc/backend holds no source file: this copy of the source is incomplete")
    include = [str(ROOT / "csrc")]
    below = ("random", "signature", "status", "syscall")
    loss = sources("loss/*.cpp", *(f"base/{name}.cpp" for name in below))
    loss.remove("csrc/loss/bindings.cpp")
    return [
        CppExtension(
            "torch_resilient._C",
            core,
            include_dirs=include,
            depends=headers,
            extra_compile_args={"cxx": flags},
        ),
        # Uses only torch's pybind11, which is header-only. Without contraction of sums and
        # products, the results are bit-identical to those of the Python twins.
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
        # The kernels do not include torch, and this module uses only pybind11.
        Extension(
            CUDA_MODULE,
            [*sources("cuda/*.cpp"), *loss],
            include_dirs=[*include, str(Path(torch.__file__).parent / "include")],
            depends=headers,
            language="c++",
            extra_compile_args={"cxx": plain_flags},
        ),
        Extension(
            VERBS_LIBRARY,
            sources(
                "verbs/*.cpp", *(f"base/{name}.cpp" for name in ("random", "status", "syscall"))
            ),
            include_dirs=include,
            depends=headers,
            language="c++",
            libraries=["ibverbs"],
            extra_compile_args={"cxx": plain_flags},
        ),
        Extension(
            SHIFT_LIBRARY,
            sources(
                "shift/*.cpp", *(f"base/{name}.cpp" for name in ("random", "status", "syscall"))
            ),
            include_dirs=include,
            depends=[*headers, "csrc/shift/exports.map"],
            language="c++",
            libraries=["ibverbs"],
            extra_compile_args={"cxx": plain_flags},
            extra_link_args=[f"-Wl,--version-script={ROOT}/csrc/shift/exports.map"],
        ),
    ]


def cuda_runtime() -> Path:
    """The CUDA runtime that torch uses.

    Raises setup_support.CudaUnavailableError if the kernels are not wanted or torch has none.
    """
    if CUDA_WANTED is False:
        raise setup_support.CudaUnavailableError("TORCH_RESILIENT_CUDA=0")
    if torch.version.cuda is None:
        raise setup_support.CudaUnavailableError(f"torch {torch.__version__} is built without CUDA")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return setup_support.loaded_library("libcudart", maps)


def compile_kernels(folder: Path) -> list[str]:
    """Compiles csrc/cuda for torch's version of CUDA, with or without a GPU; returns the objects.

    torch's BuildExtension would need a GPU, or TORCH_CUDA_ARCH_LIST, to choose architectures.
    Raises setup_support.CudaUnavailableError.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None and cpp_extension.CUDA_HOME:
        nvcc = shutil.which(f"{cpp_extension.CUDA_HOME}/bin/nvcc")
    if nvcc is None:
        raise setup_support.CudaUnavailableError("nvcc is not in PATH")

    def run(*arguments: str) -> str:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = setup_support.first_error(done.stderr + done.stdout)
            raise setup_support.CudaUnavailableError(f"nvcc failed: {reason}")
        return done.stdout

    setup_support.check_nvcc(run("--version"), torch.version.cuda)
    if chosen := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        try:
            architectures = cpp_extension._get_cuda_arch_flags()
        except (ValueError, IndexError) as error:
            raise setup_support.CudaUnavailableError(
                f'TORCH_CUDA_ARCH_LIST="{chosen}": {error}'
            ) from error
    else:
        architectures = setup_support.architecture_flags(run("--list-gpu-arch"))
    objects = []
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources("cuda/*.cu"):
        target = folder / Path(source).with_suffix(".o").name
        # Device code calls constexpr functions.
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]
        flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
        run(*flags, *architectures, "-c", str(ROOT / source), "-o", str(target))
        objects.append(str(target))
    return objects


class BuildForTorch(BuildExtension):
    """Compiles into build/, which makes a second build quick, and records torch's version."""

    # Why there are no CUDA kernels; empty if there are.
    without_cuda = ""

    def finalize_options(self) -> None:
        super().finalize_options()
        # setuptools would use a new folder for each editable install.
        tag = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        self.build_temp = str(ROOT / "build" / tag)
        # build/lib may contain modules for another torch from an earlier installation. Without
        # ninja, which checks for itself, setuptools would reuse any file that is newer than the
        # sources.
        self.force = True

    def run(self) -> None:
        if (warning := setup_support.untested_torch(str(torch.__version__))) is not None:
            print(warning, file=sys.stderr)
        super().run()
        package = Path(self.get_ext_fullpath("torch_resilient._C")).parent
        built = {each.name for each in self.extensions}
        for dropped in {
            CUDA_MODULE,
            VERBS_LIBRARY,
            SHIFT_LIBRARY,
        } - built:  # an earlier build may have left it
            (package / Path(self.get_ext_filename(dropped)).name).unlink(missing_ok=True)
        text = BUILD_INFO.format(version=str(torch.__version__), without_cuda=self.without_cuda)
        (package / "_build_info.py").write_text(text, encoding="utf-8")

    def build_extensions(self) -> None:
        self.prepare_cuda()
        self.prepare_verbs()
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        # A source that two modules share is compiled for each with its own flags. Separate folders
        # keep one object from replacing the other, which would force a full rebuild next time.
        common = self.build_temp
        self.build_temp = str(Path(common) / ext.name)
        try:
            super().build_extension(ext)
        except (CompileError, LinkError, RuntimeError):  # torch raises RuntimeError for ninja
            reason = "the C++ compiler failed; its output is above"
            if ext.name == CUDA_MODULE:
                self.drop_cuda(reason)
            elif ext.name in VERBS_PARTS:
                self.drop_verbs(reason, ext.name)
            else:
                raise
        finally:
            self.build_temp = common

    def prepare_cuda(self) -> None:
        """Compiles the CUDA kernels, or drops their module."""
        (ext,) = (each for each in self.extensions if each.name == CUDA_MODULE)
        try:
            # At run time torch has already loaded this library, from any location.
            ext.extra_link_args = [str(cuda_runtime())]
            ext.extra_objects = compile_kernels(Path(self.build_temp) / CUDA_MODULE)
        except setup_support.CudaUnavailableError as error:
            self.drop_cuda(str(error))

    def drop_cuda(self, reason: str) -> None:
        """Skips the CUDA kernels and prints the reason in one line; exits if they are required."""
        self.without_cuda = reason
        self.leave_out(CUDA_MODULE)
        text = f"torch_resilient has no CUDA kernels: {reason}"
        if CUDA_WANTED:
            sys.exit(f"{text}; TORCH_RESILIENT_CUDA=1 requires them")
        if torch.version.cuda is not None:
            print(text, file=sys.stderr)

    def prepare_verbs(self) -> None:
        """Drops the RDMA verbs if they are not wanted or the header of libibverbs is missing."""
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        options = shlex.split(f"{os.environ.get('CPPFLAGS', '')} {os.environ.get('CXXFLAGS', '')}")
        if VERBS_WANTED is False:
            self.drop_verbs("TORCH_RESILIENT_VERBS=0")
        elif not setup_support.has_header([*compiler, *options], "infiniband/verbs.h"):
            self.drop_verbs("there is no infiniband/verbs.h (Debian: libibverbs-dev)")

    def drop_verbs(self, reason: str, failed: str | None = None) -> None:
        """Leaves the RDMA verbs out and prints the reason in one line; exits if required.

        failed: the only library to leave out; the other one works without it.
        """
        for name in VERBS_PARTS if failed is None else [failed]:
            self.leave_out(name)
        missing = VERBS_PARTS[VERBS_LIBRARY if failed is None else failed]
        text = f"torch_resilient has no {missing}: {reason}"
        if VERBS_WANTED:
            sys.exit(f"{text}; TORCH_RESILIENT_VERBS=1 requires them")
        print(text, file=sys.stderr)

    def leave_out(self, name: str) -> None:
        self.extensions = [each for each in self.extensions if each.name != name]


class BuildWithTables(build_py):
    """Adds the table of options and the list of third-party software, which the package reads."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "torch_resilient"
            for source in (
                ROOT / "csrc" / "base" / "options.def",
                ROOT / "third_party" / "versions.toml",
            ):
                self.copy_file(str(source), str(package / source.name))


setup(
    ext_modules=extensions(),
    # The binary fits one minor version of torch.
    install_requires=[
        setup_support.torch_requirement(torch.__version__),
        setup_support.LISTED["numpy"].requirement,
    ],
    options={"bdist_wheel": {"build_number": setup_support.build_tag(torch.__version__)}},
    cmdclass={"build_ext": BuildForTorch, "build_py": BuildWithTables},
)
