"""`python tests/gpu_check`: see `program`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The ranks get this path, too, and find the sections there, and the strict device.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from gpu_check.program import main

    sys.exit(main())
