"""docs/measurements.md, made from what the benchmarks have recorded in benchmarks/results.

`run.py --record` writes the rows of a benchmark into results/NAME.jsonl and calls this. A benchmark
without recorded rows keeps the section results/earlier/NAME.md. Its figures are older than this
file. The section has "field: value" lines, an empty line, then Markdown.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parent / "docs" / "measurements.md"

# Fields that common.describe() and record() add to each row; printed once above the table.
ABOUT = (
    "commit",
    "changed",
    "torch",
    "torch_resilient",
    "machine",
    "environment",
    "command",
    "time",
    "load",
    "limits_missed",
)
# The command of a row names its output file, which is not relevant.
JSON_ARGUMENT = re.compile(r" --json[ =]\S+")
MISSED = "**This run missed a limit of the benchmark.**"
LIST_MAX = 5  # a longer list of numbers is shown as its median and range

HEAD = """\
<!-- Written by benchmarks/measurements.py from benchmarks/results: change that. -->
# Measurements

Each section is one benchmark: what was measured, with which commit and command, on which machine,
and when. `make bench ARGS="--record NAME.py"` measures one benchmark in full and replaces the table
of that command; `make bench ARGS=--record` does so for all. Tables of commands with other arguments
stay. Measure a benchmark again when the code that it measures changes.

Sections marked "recorded with" were measured before this file existed. They name the commit that
added the figures to the documents, and what is known about the machine.
"""


def earlier_sections() -> dict[str, tuple[dict[str, str], str]]:
    """The fields and the text of each file in results/earlier, by name."""
    found = {}
    for path in sorted((RESULTS / "earlier").glob("*.md")):
        head, _, text = path.read_text(encoding="utf-8").partition("\n\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        found[path.stem] = (fields, text.strip())
    return found


def recorded_rows() -> dict[str, list[Row]]:
    """The rows of each file in results, by name."""
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(RESULTS.glob("*.jsonl"))
    }


def title_of(name: str) -> str:
    """The first line of the benchmark's own description."""
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or name).splitlines()[0]


def flat(row: Row, prefix: str = "") -> dict[str, str]:
    """The cells of a row: `{"a": {"b": 1.23456}}` gives `{"a.b": "1.235"}`."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            cells |= flat(value, f"{prefix}{key}.")
        else:
            cells[prefix + key] = cell(value)
    return cells


def cell(value: Any) -> str:
    """One value as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        numbers = sorted(each for each in value if isinstance(each, int | float))
        if len(value) > LIST_MAX and len(numbers) == len(value):
            return f"{cell(statistics.median(numbers))} ({cell(numbers[0])} to {cell(numbers[-1])})"
        return ", ".join(map(cell, value))
    return "" if value is None else str(value).replace("|", "\\|")


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown; rows with other columns begin another table."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        cells = flat({key: each for key, each in row.items() if key not in (*ABOUT, "benchmark")})
        if list(cells) != columns:
            columns = list(cells)
            lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines.append(f"| {' | '.join(cells.values())} |")
    return lines[1:]


def circumstances(row: Row) -> str:
    """Describes the circumstances of a run in one line."""
    machine = row["machine"]
    changed = " with local changes" if row["changed"] else ""
    environment = "".join(f" {key}={value}" for key, value in row["environment"].items())
    command = JSON_ARGUMENT.sub("", row["command"])
    return (
        f"Commit `{row['commit'][:12]}`{changed}, {row['time'][:10]}; "
        f"`{(environment + ' ' + command).strip()}`; "
        f"{machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, "
        f"torch {row['torch']}; load {row['load']:.1f} at the end."
    )


def recorded_section(name: str, rows: Sequence[Row]) -> list[str]:
    """The section of a benchmark with recorded rows, one table for each command."""
    lines = [f"## {name}", "", title_of(name), ""]
    commands = list(dict.fromkeys(row["command"] for row in rows))
    for command in commands:
        group = [row for row in rows if row["command"] == command]
        lines += [circumstances(group[-1]), ""]
        if any(row.get("limits_missed", False) for row in group):
            lines += [MISSED, ""]
        lines += [*table(group), ""]
    return lines


def earlier_section(name: str, fields: dict[str, str], text: str) -> list[str]:
    """The section of a benchmark that was measured before there was a record."""
    command = f"`{fields['command']}`; " if fields.get("command") else ""
    about = f"Recorded with commit {fields['commit']}, {fields['date']}; {command}"
    about += f"{fields['machine']}."
    return [f"## {name}", "", fields["title"], "", about, "", text, ""]


def markdown(recorded: dict[str, list[Row]], earlier: dict[str, tuple[dict[str, str], str]]) -> str:
    """The document. A recorded section replaces the earlier one of the same name."""
    lines = [HEAD]
    for name in sorted({*recorded, *earlier}):
        if name in recorded:
            lines += recorded_section(name, recorded[name])
        else:
            lines += earlier_section(name, *earlier[name])
    return "\n".join(lines).rstrip() + "\n"


def case(row: Row) -> str:
    """The command of a row without what does not change the case that it measures."""
    return JSON_ARGUMENT.sub("", row["command"]).replace(" --realtime", "")


def record(name: str, rows: Path, *, limits_missed: bool = False) -> None:
    """Adds the file `rows` to the record of the benchmark `name`, and writes the document.

    Earlier rows of the same command are replaced.
    """
    new = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    if limits_missed:
        new = [{**row, "limits_missed": True} for row in new]
    cases = {case(row) for row in new}
    kept = [row for row in recorded_rows().get(name, []) if case(row) not in cases]
    # The command without arguments comes first.
    lines = [json.dumps(row) for row in sorted([*kept, *new], key=lambda row: len(case(row)))]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (RESULTS / "earlier" / f"{name}.md").unlink(missing_ok=True)
    write()


def write() -> None:
    """Writes the document."""
    DOCUMENT.write_text(markdown(recorded_rows(), earlier_sections()), encoding="utf-8")


def main() -> int:
    """Writes docs/measurements.md; returns the exit status."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
