"""third_party/versions.toml lists all software of others that the code uses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ROOT

from torch_resilient.cli import third_party
from torch_resilient.cli.third_party import Entry, within

LISTED = third_party.table()
USES = {"run", "build", "optional", "framework", "test", "lint", "lab", "benchmark"}
# The installed package may import packages of these uses.
OF_THE_PACKAGE = {"run", "optional", "framework"}

FOREIGN_INCLUDE = re.compile(r"^\s*#\s*include\s*<((?:\w+/)|Python\.h)", re.MULTILINE)
LIBRARY = re.compile(r'"([^"\s]*\blib\w+\.so[^"\s]*)"')
OPENED_BY_PYTHON = re.compile(r'\b(?:CDLL|find_library)\(\s*"([^"]+)"')
PROGRAM = re.compile(r'\bwhich\("([^"]+)"')
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


def listed(field: str, uses: Iterable[str] = USES) -> set[str]:
    """All names in `field` of the entries with one of these uses."""
    return {
        name for entry in LISTED.values() if entry.use in uses for name in getattr(entry, field)
    }


def foreign_imports(text: str) -> set[str]:
    """The top-level modules that Python code imports, without the standard library."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - (set(sys.stdlib_module_names) - {"distutils"}) - {"torch_resilient"}


def opened_libraries(name: str, text: str) -> set[str]:
    """The libraries that a source file opens at run time."""
    if name.endswith(".py"):
        return set(OPENED_BY_PYTHON.findall(text))
    if "dlopen(" not in text:
        return set()
    # A name that is put together at run time cannot be checked.
    return set(LIBRARY.findall(text)) or {f"an unknown library in {name}"}


def linked_libraries(dynamic_section: str) -> set[str]:
    """The libraries in what `readelf --dynamic` prints that no entry has."""
    known = tuple(listed("links", {"run", "build", "optional"}))
    return {name for name in NEEDED.findall(dynamic_section) if not name.startswith(known)}


def files(*patterns: str) -> list[Path]:
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert found, patterns
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_entries_are_complete() -> None:
    for entry in LISTED.values():
        assert entry.use in USES, entry.name
        for field in ("versions", "licence", "why", "found"):
            assert getattr(entry, field), f"{entry.name}: no {field}"
        if entry.range and entry.tested:
            for version in entry.tested.split(", "):
                assert within(version, entry.range), f"{entry.name}: {version} was tested"
        assert within(entry.default, entry.versions), entry.name


def test_the_package_imports_only_what_is_listed() -> None:
    allowed = listed("imports", OF_THE_PACKAGE)
    assert allowed >= {"torch", "numpy", "matplotlib", "torchft"}
    for path in files("torch_resilient/**/*.py"):
        unknown = foreign_imports(path.read_text(encoding="utf-8")) - allowed
        assert not unknown, f"{relative(path)}: imports {unknown}; see third_party/versions.toml"


def test_other_python_code_imports_only_what_is_listed() -> None:
    paths = files("*.py", "csrc/*.py", "tests/**/*.py", "benchmarks/*.py", "examples/*.py")
    own = {name for path in paths for name in (path.stem, path.parent.name)}
    for path in paths:
        unknown = foreign_imports(path.read_text(encoding="utf-8")) - own - listed("imports")
        assert not unknown, f"{relative(path)}: imports {unknown}; see third_party/versions.toml"


def test_headers_are_listed() -> None:
    allowed = listed("headers")
    for path in files("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu"):
        found = FOREIGN_INCLUDE.findall(path.read_text(encoding="utf-8"))
        unknown = {name.rstrip("/") for name in found} - allowed
        assert not unknown, f"{relative(path)}: includes {unknown}; see third_party/versions.toml"


def test_libraries_opened_at_run_time_are_listed() -> None:
    opened = set()
    python = (f"{folder}/**/*.py" for folder in ("torch_resilient", "tests", "benchmarks"))
    for path in files("csrc/**/*.h", "csrc/**/*.cpp", "*.py", *python):
        names = opened_libraries(path.name, path.read_text(encoding="utf-8"))
        unknown = names - listed("dlopen")
        assert not unknown, f"{relative(path)}: opens {unknown}; see third_party/versions.toml"
        opened |= names
    assert opened == listed("dlopen")


def test_linked_libraries_are_listed() -> None:
    for path in files("torch_resilient/*.so"):
        command = ["readelf", "--dynamic", "--wide", str(path)]
        section = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert NEEDED.search(section), path.name
        unknown = linked_libraries(section)
        assert not unknown, f"{path.name}: links {unknown}; see third_party/versions.toml"


def test_programs_and_debian_packages_are_listed() -> None:
    for path in files("*.py", "torch_resilient/**/*.py", "tests/*.py", "benchmarks/*.py"):
        unknown = set(PROGRAM.findall(path.read_text(encoding="utf-8"))) - listed("programs")
        assert not unknown, f"{relative(path)}: looks for {unknown}"
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    groups = re.findall(r"missing\+=\(([^)]+)\)", script)
    assert groups
    assert {name for group in groups for name in group.split()} <= listed("debian")


def test_the_checks_find_what_is_not_listed() -> None:
    assert foreign_imports("import os, yaml\nfrom scipy.stats import norm") == {"yaml", "scipy"}
    assert foreign_imports("def f():\n    from torch import nn") == {"torch"}
    assert FOREIGN_INCLUDE.findall("#include <infiniband/verbs.h>\n") == ["infiniband/"]
    assert FOREIGN_INCLUDE.findall('#include <vector>\n#include "base/log.h"\n') == []
    code = 'for (const char* name : {"libibverbs.so.1"}) ::dlopen(name, RTLD_NOW);'
    assert opened_libraries("verbs.cpp", code) == {"libibverbs.so.1"}
    assert opened_libraries("verbs.cpp", "::dlopen(name, 0);") == {
        "an unknown library in verbs.cpp"
    }
    assert opened_libraries("x.py", "ctypes.CDLL('libfoo.so.2')".replace("'", '"')) == {
        "libfoo.so.2"
    }
    line = " 0x0000000000000001 (NEEDED)  Shared library: [{}]\n"
    needed = line.format("libc.so.6") + line.format("libssl.so.3") + line.format("libcuda.so.1")
    assert linked_libraries(needed) == {"libssl.so.3", "libcuda.so.1"}


@pytest.mark.parametrize("field", ["colour", None])
def test_a_field_that_is_unknown_or_missing_is_an_error(field: str | None) -> None:
    text = 'use = "run"\nversions = "any"\nlicence = "MIT"\nwhy = "x"\n'
    if field is not None:
        text += f'found = "x"\n{field} = "x"\n'
    with pytest.raises(TypeError, match=field or "found"):
        third_party.parse(f"[thing]\n{text}")


@pytest.mark.parametrize(
    ("version", "versions", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.16", True),
        ("2.11", ">=2.11.0", True),
        ("2.16.0a0+git1", ">=2.11,<2.16", False),
        ("2.9.1", ">=2.11", False),
        ("77.0", ">=77.0.3", False),
        ("1.2.0", "==1.2", True),
        ("1.2.1", "==1.2", False),
        ("3.0", "any", True),
        ("unknown", ">=1", True),
    ],
)
def test_ranges(version: str, versions: str, fits: bool) -> None:
    assert within(version, versions) == fits


def first_and_last(entry: Entry) -> tuple[str, str]:
    """`("3.11", "3.14")` of the range `>=3.11,<3.15`."""
    match = re.fullmatch(r">=([\d.]+),<(\d+)\.(\d+)", entry.versions)
    assert match is not None
    return match[1], f"{match[2]}.{int(match[3]) - 1}"


def test_other_files_agree_with_the_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = {LISTED[name].requirement for name in ("setuptools", "wheel", "ninja")}
    assert set(project["build-system"]["requires"]) == build
    first, last = first_and_last(LISTED["python"])
    assert project["project"]["requires-python"] == f">={first}"
    assert project["project"]["optional-dependencies"] == {
        "png": [LISTED["matplotlib"].requirement]
    }
    python = f"Python {first} to {last}"
    torch = "torch {} to {}".format(*first_and_last(LISTED["torch"]))
    compiler = f"g++ {LISTED['gcc'].versions.removeprefix('>=')} or newer"
    readme, contributing, make = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "CONTRIBUTING.md", "Makefile")
    )
    for text in (readme, contributing):
        assert python in text
        assert compiler in text
    assert torch in readme
    assert f"'{LISTED['setuptools'].requirement}'" in readme
    assert f"({first.replace('.', ', ')})" in make
    works_with = (ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    for entry in LISTED.values():
        if entry.use == "framework":
            assert entry.tested in works_with, entry.name


def test_the_makefile_installs_the_packages_of_the_list(capfd: pytest.CaptureFixture[str]) -> None:
    assert third_party.main(["default", "torch"]) == 0
    assert third_party.main(["packages", "lint", "run"]) == 0
    default, *packages = capfd.readouterr().out.split()
    assert default == LISTED["torch"].default
    assert LISTED["ruff"].requirement in packages
    assert "numpy" in packages
    assert not any(package.startswith("torch") for package in packages)
    assert third_party.main([]) == 2
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    for use in re.findall(r"\$\(THIRD_PARTY\) packages ([^>\n]+)", make):
        assert set(use.split()) <= USES
