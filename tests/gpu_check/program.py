"""The command: `make gpu-test`, or `python tests/gpu_check --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .checks import Result, Row
from .device import KINDS, name_of
from .sections import SECTIONS, Section, run_section

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "measurements-gpu.md"
# `make gpu-test` takes at most 8 minutes.
LIMIT_S = 470.0
# Too short for the start of a section.
_LEAST_S = 5.0

ABOUT = """\
Checks the backend on a GPU. Two ranks on this machine share the device; a check compares results
bit by bit with those of host tensors over the same backend. Delayed kernels before and after the
operations make a missing wait visible. Every section runs in processes of its own; one that is not
done in its limit has failed.

Output: one line for each check.

  PASS SECTION: CHECK
  FAIL SECTION: CHECK: the reason, by rank
  SKIP SECTION: CHECK: what the device cannot do

Exit status: 0, or 1 if a check has failed.
"""

HEAD = """\
<!-- Written by `make gpu-test`: do not edit. -->
# Measurements on a GPU

`make gpu-test` writes this file on a machine with a GPU.
"""

# By section, for those that measure: what their tables show.
LEGENDS = {
    "bandwidth": """\
Times are medians, with two ranks on one device. `copy out` and `copy in` are copies between the
device and pinned host memory, without a network. `send` is half of a message there and back. Host
tensors are in pinned memory. The last two columns compare an operation on device tensors with the
same on host tensors and both copies: 1 means that nothing overlaps and nothing else takes time.
""",
    "prefill": """\
The time to the first token for a model of the shape of Llama-3-8B, in half precision, by the number
of ranks that share its layers (BUBBLETEA §6.6). Chunks of 512 tokens and messages of their outputs
are measured. Times with several ranks are computed from these, as if no rank had to wait for a
bubble.
""",
}


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    sections = "\n".join(
        f"  {each.name:<10} {each.limit_s:>3.0f} s  {each.about}" for each in SECTIONS
    )
    made = argparse.ArgumentParser(
        prog="gpu_check",
        description=ABOUT,
        epilog=f"sections and their limits:\n{sections}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--device",
        choices=KINDS,
        default="cuda",
        help="cuda (default), strict: the device of the tests, made of host memory; cpu: host "
        "tensors, which check this program",
    )
    made.add_argument(
        "--only",
        metavar="SECTION",
        action="append",
        choices=[each.name for each in SECTIONS],
        help="run this section alone; several times for several",
    )
    made.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="write the tables there (default: docs/measurements-gpu.md if all of them were "
        "measured on cuda, else nowhere)",
    )
    return made


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Runs the sections; returns the exit status."""
    chosen = parser().parse_args(arguments)
    # In the ranks: torch warns of calls that are tested here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(f"FAIL start: torch {torch.__version__} finds no CUDA device", flush=True)
        return 1
    if chosen.device == "strict":
        sys.path.insert(0, str(ROOT / "tests"))
        import strict_device

        strict_device.build()
    about = circumstances(chosen.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    begin_s = time.monotonic()
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    times = []
    rows: dict[str, list[Row]] = {}
    for section in sections:
        if chosen.only and section.name not in chosen.only:
            continue
        section_begin_s = time.monotonic()
        left_s = LIMIT_S - (section_begin_s - begin_s)
        if left_s < _LEAST_S:
            news: Any = [Result("processes", "FAIL", f"not begun within {LIMIT_S:.0f} s")]
        else:
            news = run_section(section, chosen.device, min(section.limit_s, left_s))
        for each in news:
            if isinstance(each, Row):
                rows.setdefault(section.name, []).append(each)
                continue
            counts[each.verdict] += 1
            if each.verdict == "FAIL":
                rows.pop(section.name, None)  # a table has all of its rows
            print(each.line(section.name), flush=True)
        times.append(f"{section.name} {time.monotonic() - section_begin_s:.0f} s")
    print(f"{', '.join(f'{n} {verdict}' for verdict, n in counts.items())} ({', '.join(times)})")
    if rows:
        write_tables(chosen, about, rows)
    return 1 if counts["FAIL"] else 0


def circumstances(kind: str) -> dict[str, str]:
    """Describes the machine, the torch and the commit that the results depend on."""
    about = _benchmark_module("common").describe()
    changed = " with local changes" if about["changed"] else ""
    driver = {"CUDA": torch.version.cuda or ""} if kind == "cuda" else {}
    return {
        "device": name_of(kind),
        "torch": torch.__version__,
        **driver,
        "processor": f"{about['machine']['cores']} cores of {about['machine']['processor']}",
        "commit": f"{about['commit'][:12]}{changed}",
        "date": about["time"][:10],
    }


def document(about: Mapping[str, str], rows: Mapping[str, Sequence[Row]]) -> str:
    """docs/measurements-gpu.md, from the rows of each section."""
    lines = [HEAD, *(f"- {key}: {value}" for key, value in about.items())]
    for section, legend in LEGENDS.items():
        if section in rows:
            lines += ["", legend]
            lines += _benchmark_module("measurements").table([row.cells for row in rows[section]])
    return "\n".join(lines) + "\n"


def write_tables(
    chosen: argparse.Namespace, about: Mapping[str, str], rows: Mapping[str, Sequence[Row]]
) -> None:
    """Writes the tables. Prints them where not all are there, or not those of a GPU."""
    path: Path | None = chosen.table
    if path is None and chosen.device == "cuda" and rows.keys() == LEGENDS.keys():
        path = TABLE
    text = document(about, rows)
    if path is None:
        print(text)
    else:
        path.write_text(text, encoding="utf-8")
        print(f"the tables are in {path}")


def _benchmark_module(name: str) -> Any:
    """A module of the benchmarks, which are no package."""
    import importlib

    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
