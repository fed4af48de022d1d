"""The table of options, as text: `python -m torch_resilient.options --markdown`.

The table itself is options.def, from which the C++ code is compiled as well.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import dataclass
from pathlib import Path

PREFIX = "TORCH_RESILIENT_"

_HEAD = """\
<!-- Written by `python -m torch_resilient.options --markdown` from options.def: change that. -->
# Options

Each option is a field of `torch_resilient.Options`, which is passed to a group as `pg_options`, and
an environment variable, which sets the default for all groups of the process:

```python
options = torch_resilient.Options()
options.wan_connections = 8
dist.init_process_group("resilient", pg_options=options)
```

```sh
TORCH_RESILIENT_WAN_CONNECTIONS=8 torchrun train.py
```

A process has one engine for all its groups, started with the first one. The options of that group
apply until the last group is destroyed. An empty variable counts as not set, except that an empty
TORCH_RESILIENT_SITE turns sites off. Sizes may be written with K, M or G (KiB, MiB, GiB). An
invalid value, or one out of range, fails `init_process_group` with a message that states the
expected values. An unknown variable that begins with `TORCH_RESILIENT_` gives a warning.
"""


@dataclass(frozen=True)
class Option:
    """One row of options.def."""

    kind: str  # Bytes, Count, AutoCount, Seconds, Flag, Text, Secret or Choice
    field: str
    variable: str
    default: int | float | bool | str
    min: float  # bounds of a number, both included
    max: float
    unit: str
    doc: str

    @property
    def default_text(self) -> str:
        """The default, as it would be written into the environment; empty for no text."""
        if self.kind == "AutoCount" and self.default == 0:
            return "auto"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def _literal(node: ast.expr) -> int | float | str | bool:
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    value = ast.literal_eval(node)
    if not isinstance(value, int | float | str):
        raise ValueError(f"{ast.unparse(node)} is no literal")
    return value


def parse(text: str) -> list[Option]:
    """The rows of options.def, in order. Raises ValueError if a row is malformed."""
    lines = ["" if line.lstrip().startswith("//") else line for line in text.splitlines()]
    options = []
    # Without its comments the file is a list of calls, and Python joins adjacent strings as
    # C++ does.
    for statement in ast.parse("\n".join(lines)).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or len(call.args) != 8:
            raise ValueError(f"options.def:{statement.lineno}: expected X with 8 arguments")
        kind, field, suffix, *rest = call.args
        default, lower, upper, unit, doc = map(_literal, rest)
        options.append(
            Option(
                ast.unparse(kind),
                ast.unparse(field),
                PREFIX + ast.unparse(suffix),
                default,
                float(lower),
                float(upper),
                str(unit),
                str(doc),
            )
        )
    return options


def table() -> list[Option]:
    """All options. Raises FileNotFoundError if the package was installed without the table."""
    package = Path(__file__).resolve().parent
    beside = package / "options.def"
    path = beside if beside.exists() else package.parent / "csrc" / "base" / "options.def"
    return parse(path.read_text(encoding="utf-8"))


def _range(option: Option) -> str:
    if option.min == option.max:
        return ""
    return f"{option.min:.15g} to {option.max:.15g}"


_TAIL = """
## Variables without an option

`TORCH_RESILIENT_TIMELINE`: default empty; a folder

Folder into which the schedules of `torch_resilient.pipelining` write the timeline of each rank,
unless they have a `timeline_dir`. `torch-resilient timeline FOLDER` draws it. All ranks of a
pipeline need it.

`TORCH_RESILIENT_METRICS`: default empty, which means off; a folder, a port or host:port

Address at which each process serves its state over HTTP: `/metrics` for Prometheus, `/stats` as
JSON. In a folder (any text with a `/`), each process creates a Unix socket `rank<NNNNN>.<pid>.sock`
for its owner only; `torch-resilient top FOLDER` shows them all. With a port, the first rank of each
host uses that number, the second the next and so on (`LOCAL_RANK`), on loopback unless a host is
given. There is neither encryption nor a password: everyone who can reach it sees host names,
addresses and rates.

`TORCH_RESILIENT_RECORD_DIR`: default empty, which means off; a folder

Folder into which each process writes snapshots of its paths and operations, 100 per second, in
`rank<NNNNN>.<pid>.jsonl`. `torch-resilient chaos` sets it and reads it. It costs up to a
twentieth of a core and some MB a minute.

`TORCH_RESILIENT_CUDA`: default empty; 1 or 0

Read when the package is built. With 1 the build fails if it cannot compile the CUDA kernels; 0
skips them.

`TORCH_RESILIENT_VERBS`: default empty; 1 or 0

Read when the package is built. With 1 the build fails if it cannot compile the RDMA verbs, which
need the header of libibverbs; 0 skips them.
"""


def markdown() -> str:
    """The reference of all options."""
    lines = [_HEAD]
    for option in table():
        default = f"`{option.default_text}`" if option.default_text else "empty"
        facts = [f"default {default}", option.unit, _range(option)]
        lines += [
            f"## `{option.field}`",
            "",
            f"`{option.variable}`: {'; '.join(fact for fact in facts if fact)}",
            "",
            option.doc,
            "",
        ]
    return "\n".join(lines).rstrip() + "\n" + _TAIL


def main(arguments: list[str] | None = None) -> int:
    """Prints the options; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_resilient.options")
    parser.add_argument("--markdown", action="store_true", help="with what each is for")
    if parser.parse_args(arguments).markdown:
        sys.stdout.write(markdown())
    else:
        for option in table():
            print(f"{option.variable}={option.default_text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
