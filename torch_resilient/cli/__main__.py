"""`python -m torch_resilient.cli`."""

from __future__ import annotations

import sys

from torch_resilient.cli import main

sys.exit(main())
