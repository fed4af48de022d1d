"""Orders of operations: what each stage of a pipeline runs, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch_resilient.pipelining.warmup import require_warmup

# The kinds of operations; their place here is their number in the planner's compact orders.
KINDS = "FBW"
FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD = range(3)

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


# Of one stage; a plan has one for each.
Order = list[Operation]


class OrderError(ValueError):
    """Orders that no pipeline can run. `stage` and `operation` say where it shows first."""

    def __init__(self, stage: int, operation: Operation | None, text: str) -> None:
        super().__init__(text)
        self.stage = stage
        self.operation = operation


def from_kinds(kinds: Sequence[int]) -> Order:
    """The order with these kinds in which each kind goes through the microbatches in turn."""
    counts = [0, 0, 0]
    order = []
    for kind in kinds:
        order.append(Operation(KINDS[kind], counts[kind]))
        counts[kind] += 1
    return order


def _from_text(text: str) -> Order:
    return from_kinds([KINDS.index(kind) for kind in text])


def require_microbatches(num_microbatches: int) -> None:
    """Raises ValueError unless it is a positive integer."""
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise ValueError(f"num_microbatches: expected an integer, got {num_microbatches!r}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches: expected at least 1, got {num_microbatches}")


def _stages(num_stages: int, num_microbatches: int, text: Callable[[int], str]) -> list[Order]:
    if num_stages < 1:
        raise ValueError(f"num_stages: expected at least 1, got {num_stages}")
    require_microbatches(num_microbatches)
    return [_from_text(text(stage)) for stage in range(num_stages)]


def gpipe(num_stages: int, num_microbatches: int) -> list[Order]:
    """All forwards, then all backwards, each B with its W behind it."""
    return _stages(
        num_stages, num_microbatches, lambda _: "F" * num_microbatches + "BW" * num_microbatches
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[Order]:
    """1F1B: stage i has at most S - i microbatches between F and B; each B has its W behind it.

    With costs as they are, the gradient leaves between B and W. `PipelineCosts.fused` gives the
    times of a whole backward.
    """

    def stage_text(stage: int) -> str:
        warmup = min(num_stages - stage, num_microbatches)
        steady = num_microbatches - warmup
        return "F" * warmup + "BWF" * steady + "BW" * warmup

    return _stages(num_stages, num_microbatches, stage_text)


def zb_h1(num_stages: int, num_microbatches: int) -> list[Order]:
    """ZB-H1 of Zero Bubble Pipeline Parallelism: no more memory than 1F1B, F to W at most S.

    The warm-up is that of 1F1B; stage i puts off the first i weight backwards, and the rest follow
    one per cycle.
    """

    def stage_text(stage: int) -> str:
        return _zero_bubble(num_stages - stage, stage, num_microbatches)

    return _stages(num_stages, num_microbatches, stage_text)


def zb_h2(num_stages: int, num_microbatches: int) -> list[Order]:
    """ZB-H2: as ZB-H1 with warm-ups of 2(S - i) - 1, up to 2S - 1 microbatches between F and W."""

    def stage_text(stage: int) -> str:
        return _zero_bubble(2 * (num_stages - stage) - 1, 2 * stage, num_microbatches)

    return _stages(num_stages, num_microbatches, stage_text)


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


def alternating(warmup: Sequence[int], num_microbatches: int) -> list[Order]:
    """Stage i runs warmup[i] forwards, then B and F in turn, then the other B; W comes last.

    This is the schedule of which Theorem 1 speaks: its slackness is what the warm-up says, since
    no stage runs ahead. Every stage holds all microbatches between F and W.

    Raises ValueError unless the warm-up falls along the stages, from 1 to num_microbatches.
    """
    require_microbatches(num_microbatches)
    require_warmup(warmup, num_microbatches)
    n = num_microbatches
    return [_from_text("F" * x + "BF" * (n - x) + "B" * x + "W" * n) for x in warmup]


def held_at_most(order: Sequence[Operation]) -> tuple[int, int]:
    """The most microbatches of one stage between F and B, and between F and W."""
    forward = backward = weight = most_backward = most_weight = 0
    for kind, _ in order:
        if kind == "F":
            forward += 1
            most_backward = max(most_backward, forward - backward)
            most_weight = max(most_weight, forward - weight)
        elif kind == "B":
            backward += 1
        else:
            weight += 1
    return most_backward, most_weight
