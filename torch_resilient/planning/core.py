"""The planner's inner loops, which are compiled (csrc/planning).

In a tree that has not been built the package can still be imported; calling one of these raises
ImportError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch_resilient._planning import Search, evaluate, generate, memory_peaks
else:
    try:
        from torch_resilient._planning import Search, evaluate, generate, memory_peaks
    except ModuleNotFoundError:

        def _missing(*_: Any) -> NoReturn:
            from torch_resilient import _native

            raise ImportError(_native.not_built("_planning"))

        Search = evaluate = generate = memory_peaks = _missing

__all__ = ["Search", "evaluate", "generate", "memory_peaks"]
