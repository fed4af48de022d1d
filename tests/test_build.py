"""What is built and packed: setup.py, pyproject.toml and MANIFEST.in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
PACKED = ("csrc", "docs", "tests", "benchmarks", "examples", "torch_resilient")
# Written by builds and tests, not by people.
MADE = {".pyc", ".so", ".o", ".d"}


def run(folder: Path, *arguments: str) -> None:
    """Runs Python in the source; fails the test if that fails."""
    done = subprocess.run(
        [sys.executable, *arguments, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_ninja_no_old_binary_is_taken_for_a_new_one(tmp_path: Path) -> None:
    run(tmp_path, "-c", BUILD_AGAIN)


def test_the_source_distribution_is_whole(tmp_path: Path) -> None:
    run(tmp_path, "setup.py", "-q", "egg_info", "--egg-base")
    packed = set((tmp_path / "torch_resilient.egg-info" / "SOURCES.txt").read_text().split("\n"))
    files = [*ROOT.glob("*.md"), *(path for name in PACKED for path in (ROOT / name).rglob("*"))]
    here = {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and path.suffix not in MADE and "__pycache__" not in path.parts
    }
    here |= {"LICENSE", "Makefile", "pyproject.toml", "setup.py", ".clang-format", ".ci/run"}
    assert here - packed == set()
