"""The planner's inner loops: compiled (csrc/planning), or in Python in a tree that is not built.

Both give the same results to the last bit. The Python ones are the text to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_resilient.pipelining.evaluator import evaluate, memory_peaks
    from torch_resilient.pipelining.generator import generate
    from torch_resilient.pipelining.local_search import Search
else:
    try:
        from torch_resilient._planning import Search, evaluate, generate, memory_peaks
    except ImportError:
        from torch_resilient.pipelining.evaluator import evaluate, memory_peaks
        from torch_resilient.pipelining.generator import generate
        from torch_resilient.pipelining.local_search import Search

__all__ = ["Search", "evaluate", "generate", "memory_peaks"]
