"""The list of third-party software, third_party/versions.toml: its entries and version ranges.

Uses the standard library only, and no other module of this package: setup.py, the Makefile and the
tests run this file by its path, before anything is built.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONDITION = re.compile(r"(>=|<|==)(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Entry:
    """One piece of software: the fields of its table in the list."""

    name: str
    use: str
    versions: str
    licence: str
    why: str
    found: str
    tested: str = ""
    default: str = ""
    package: str = ""
    imports: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    dlopen: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The version range as pip writes it; empty if there is none."""
        return self.versions if _CONDITION.match(self.versions) else ""

    @property
    def requirement(self) -> str:
        """The argument for pip, such as `setuptools>=77.0.3`."""
        return f"{self.package}{self.range}"


def parse(text: str) -> dict[str, Entry]:
    """The entries by name. Raises TypeError for a missing or unknown field."""

    def entry(name: str, fields: dict[str, Any]) -> Entry:
        values: dict[str, Any] = {
            key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()
        }
        return Entry(name, **values)

    return {name: entry(name, fields) for name, fields in tomllib.loads(text).items()}


def table() -> dict[str, Entry]:
    """All entries. Raises FileNotFoundError if the package was installed without the list."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "versions.toml"
    source = package.parent / "third_party" / "versions.toml"
    return parse((installed if installed.exists() else source).read_text(encoding="utf-8"))


def numbers(version: str) -> tuple[int, ...]:
    """`(2, 13, 0)` of `"2.13.0+cpu"`."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def within(version: str, versions: str) -> bool:
    """Whether `version` is in the range `versions`, such as `>=2.11,<2.16`.

    True where one of them names no number. A pre-release counts as its release.
    """
    found = numbers(version)
    for operator, text in _CONDITION.findall(versions) if found else ():
        bound = numbers(text)
        width = max(len(found), len(bound))
        left, right = (each + (0,) * (width - len(each)) for each in (found, bound))
        if not {">=": left >= right, "<": left < right, "==": left == right}[operator]:
            return False
    return True


def main(arguments: list[str]) -> int:
    """`default NAME` prints a version; `packages USE ...` what pip shall install besides torch."""
    entries = table()
    if len(arguments) == 2 and arguments[0] == "default":
        print(entries[arguments[1]].default)
        return 0
    if len(arguments) > 1 and arguments[0] == "packages":
        print(
            "\n".join(
                each.requirement
                for each in entries.values()
                if each.use in arguments[1:] and each.package and each.name != "torch"
            )
        )
        return 0
    sys.stderr.write(f"{main.__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
