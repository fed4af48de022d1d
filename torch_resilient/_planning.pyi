"""The compiled inner loops of the planner (csrc/planning/bindings.cpp).

Twins of what has the same name in torch_resilient.planning.generator, evaluator and local_search,
and of torch_resilient.geo.cell_rules.
ValueError for sizes that do not fit together. The GIL is released meanwhile.
"""

from collections.abc import Sequence

from torch_resilient.geo.cell_rules import Problem
from torch_resilient.geo.cell_rules import Rules as CellRules
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules

def generate(
    costs: PipelineCosts, num_microbatches: int, rules: Rules, limits: Limits
) -> tuple[list[bytes], float]: ...
def evaluate(
    kinds: Sequence[bytes], costs: PipelineCosts
) -> list[tuple[float, float, float, float]]: ...
def memory_peaks(kinds: Sequence[bytes], costs: PipelineCosts) -> list[tuple[int, int, float]]: ...
def schedule_cell(
    cell: Problem, rules: CellRules
) -> tuple[
    list[bytes], list[list[float]], list[tuple[int, int, int, int, float, float]], float
]: ...
def time_cell(cell: Problem, rules: CellRules) -> float: ...

class Search:
    """For one thread at a time."""

    def __init__(
        self,
        kinds: Sequence[bytes],
        costs: PipelineCosts,
        limits: Limits,
        lower_bound_s: float,
        seed: int,
    ) -> None: ...
    def run(self, tries: int) -> bool: ...
    @property
    def found(self) -> list[tuple[float, list[bytes]]]: ...
