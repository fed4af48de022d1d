"""All measurements in their quick form: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = [["compare_gloo.py", "--quick"], ["hol_blocking.py", "--quick"], ["idle_cpu.py"]]


def main() -> int:
    failed = 0
    for name, *arguments in RUNS:
        print(f"\n== {name} {' '.join(arguments)}", flush=True)
        run = subprocess.run([sys.executable, HERE / name, *arguments], check=False)
        failed = failed or run.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
