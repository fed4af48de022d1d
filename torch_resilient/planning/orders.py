"""Orders of operations: what each stage of a pipeline runs, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch_resilient.planning.warmup import require_warmup

# The kinds of operations; their place here is their number in the planner's compact orders.
KINDS = "FBW"
FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD = range(3)

# A compact order: the kinds of one stage's operations. It is the whole order, since each kind goes
# through the microbatches in turn.
Kinds = bytes

_NUMBERS = str.maketrans(KINDS, "\x00\x01\x02")

_OPERATION = re.compile(r"([FBW])(\d+)")


class Operation(NamedTuple):
    """One operation of one microbatch on some stage; printed as in "F0".

    Attributes:
        kind: "F" forward, "B" backward of the inputs, "W" backward of the weights. These are the
            papers' letters: torch writes I for B, and B for B and W in one.
        microbatch: counted from 0.
    """

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """The inverse of str(). Raises ValueError for anything else."""
        match = _OPERATION.fullmatch(text)
        if match is None:
            raise ValueError(f"operation {text!r}: expected F, B or W and a number, as in F0")
        return cls(match[1], int(match[2]))


# The order of one stage; a plan has one for each stage.
Order = list[Operation]


class OrderError(ValueError):
    """Orders that no pipeline can run. `stage` and `operation` say where it shows first."""

    def __init__(self, stage: int, operation: Operation | None, text: str) -> None:
        super().__init__(text)
        self.stage = stage
        self.operation = operation


def from_kinds(kinds: Kinds) -> Order:
    """The order of these kinds."""
    return orders_from_kinds([kinds])[0]


def orders_from_kinds(kinds: Sequence[Kinds]) -> list[Order]:
    """The orders of all stages. They share their operations: large plans are made quickly."""
    count = max((order.count(number) for order in kinds for number in range(3)), default=0)
    operations = [[Operation(kind, microbatch) for microbatch in range(count)] for kind in KINDS]
    orders = []
    for order in kinds:
        turns = [iter(each) for each in operations]
        orders.append([next(turns[kind]) for kind in order])
    return orders


def to_kinds(text: str) -> Kinds:
    """The compact order of a text such as "FFBW"."""
    return text.translate(_NUMBERS).encode("latin-1")


def require_microbatches(num_microbatches: int) -> None:
    """Raises ValueError unless it is a positive integer."""
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise ValueError(f"num_microbatches: expected an integer, got {num_microbatches!r}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches: expected at least 1, got {num_microbatches}")


def gpipe(num_stages: int, num_microbatches: int) -> list[Order]:
    """All forwards, then all backwards, each B with its W behind it."""
    return orders_from_kinds(classic_kinds("gpipe", num_stages, num_microbatches))


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[Order]:
    """1F1B: stage i has at most S - i microbatches between F and B; each B has its W behind it.

    With costs as they are, the gradient leaves between B and W. `PipelineCosts.fused` gives the
    times of a whole backward.
    """
    return orders_from_kinds(classic_kinds("1f1b", num_stages, num_microbatches))


def zb_h1(num_stages: int, num_microbatches: int) -> list[Order]:
    """ZB-H1 of Zero Bubble Pipeline Parallelism: no more memory than 1F1B, F to W at most S.

    The warm-up is that of 1F1B; stage i puts off the first i weight backwards, and the rest follow
    one per cycle.
    """
    return orders_from_kinds(classic_kinds("zb_h1", num_stages, num_microbatches))


def zb_h2(num_stages: int, num_microbatches: int) -> list[Order]:
    """ZB-H2: as ZB-H1 with warm-ups of 2(S - i) - 1, up to 2S - 1 microbatches between F and W."""
    return orders_from_kinds(classic_kinds("zb_h2", num_stages, num_microbatches))


def classic_kinds(name: str, num_stages: int, num_microbatches: int) -> list[Kinds]:
    """The same as compact orders: "gpipe", "1f1b", "zb_h1" or "zb_h2"."""
    if num_stages < 1:
        raise ValueError(f"num_stages: expected at least 1, got {num_stages}")
    require_microbatches(num_microbatches)
    return [
        to_kinds(_CLASSIC[name](num_stages - stage, stage, num_microbatches))
        for stage in range(num_stages)
    ]


def _one_f_one_b(to_end: int, num_microbatches: int) -> str:
    warmup = min(to_end, num_microbatches)
    return "F" * warmup + "BWF" * (num_microbatches - warmup) + "BW" * warmup


def _zero_bubble(warmup: int, put_off: int, num_microbatches: int) -> str:
    """`warmup` F, then cycles of B, F and, after the first `put_off` of them, W; the rest last."""
    warmup = min(warmup, num_microbatches)
    steady = num_microbatches - warmup
    without = min(put_off, steady)
    text = "F" * warmup + "BF" * without + "BWF" * (steady - without)
    # While the last gradients come in, one W fills the time between two of them.
    left = num_microbatches - (steady - without)
    together = min(warmup, left)
    return text + "BW" * together + "B" * (warmup - together) + "W" * (left - together)


# The text of a stage's order, from the number of stages from it to the end of the pipeline, itself
# included, the number of those before it, and the number of microbatches.
_CLASSIC: dict[str, Callable[[int, int, int], str]] = {
    "gpipe": lambda _, __, n: "F" * n + "BW" * n,
    "1f1b": lambda to_end, _, n: _one_f_one_b(to_end, n),
    "zb_h1": lambda to_end, before, n: _zero_bubble(to_end, before, n),
    "zb_h2": lambda to_end, before, n: _zero_bubble(2 * to_end - 1, 2 * before, n),
}


def alternating(warmup: Sequence[int], num_microbatches: int) -> list[Order]:
    """Stage i runs warmup[i] forwards, then B and F in turn, then the other B; W comes last.

    This is the schedule of Theorem 1: its slackness is what the warm-up says, since
    no stage runs ahead. Every stage holds all microbatches between F and W.

    Raises ValueError unless the warm-up falls along the stages, from 1 to num_microbatches.
    """
    require_microbatches(num_microbatches)
    require_warmup(warmup, num_microbatches)
    n = num_microbatches
    kinds = [to_kinds("F" * x + "BF" * (n - x) + "B" * x + "W" * n) for x in warmup]
    return orders_from_kinds(kinds)


def held_at_most(order: Sequence[Operation]) -> tuple[int, int]:
    """The most microbatches of one stage between F and B, and between F and W."""
    forward = backward = weight = max_backward = max_weight = 0
    for kind, _ in order:
        if kind == "F":
            forward += 1
            max_backward = max(max_backward, forward - backward)
            max_weight = max(max_weight, forward - weight)
        elif kind == "B":
            backward += 1
        else:
            weight += 1
    return max_backward, max_weight
