"""The costs of an iteration of a pipeline: seconds per operation, delay per link, memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

# When the input backward ends, torch 2.13 frees nothing of what the forward saved, and also keeps
# gradients for the weight backward: a microbatch then weighs 1.6 to 1.7 times as much as before.
# With too low a value, plans need more memory than `peak_units` says.
WEIGHT_BACKWARD_UNITS = 1.6

PerStage = float | Sequence[float]


def per_place(field: str, value: object, count: int, place: str) -> tuple[float, ...]:
    """`value`, a number or one for each of `count` places ("stage", "link"), as a tuple.

    Raises ValueError, naming the field, unless there are `count` finite numbers, none negative.
    """
    if isinstance(value, bool | str) or not isinstance(value, int | float | Sequence):
        raise ValueError(f"{field}: expected a number or one per {place}, got {value!r}")
    values: list[tuple[str, object]]
    if isinstance(value, Sequence):
        if len(value) != count:
            raise ValueError(
                f"{field}: expected a number or {count} of them, one per {place}, got {len(value)}"
            )
        values = [(f"{field}[{i}]", number) for i, number in enumerate(value)]
    else:
        values = [(field, value)]
    numbers = []
    for where, number in values:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{where}: expected a number, got {number!r}")
        # As an integer it may be too large for isfinite, and for a message.
        if not 0 <= number <= sys.float_info.max:
            raise ValueError(f"{where}: expected a finite number, not negative, got {number!r:.20}")
        numbers.append(float(number))
    return tuple(numbers if isinstance(value, Sequence) else numbers * count)


@dataclass(frozen=True)
class PipelineCosts:
    """One stage per rank; times in seconds. `PipelineCosts.of` takes numbers that hold everywhere.

    Attributes:
        forward_s: F, of each stage.
        input_backward_s: B, the gradient of the stage's inputs (torch writes I), of each stage.
        weight_backward_s: W, the gradient of its weights, of each stage.
        delay_forward_s: from the end of F on stage i to its arrival at stage i + 1, of each link.
        delay_backward_s: from the end of B on stage i + 1 to its arrival at stage i, of each link.
        activation_units: memory of a microbatch from the start of its F to the end of its B, of
            each stage. The unit is the caller's.
        weight_backward_units: memory of a microbatch from the end of its B to the end of its W.

    A delay does not depend on load: several messages may be on their way at once.
    """

    forward_s: tuple[float, ...]
    input_backward_s: tuple[float, ...]
    weight_backward_s: tuple[float, ...]
    delay_forward_s: tuple[float, ...]
    delay_backward_s: tuple[float, ...]
    activation_units: tuple[float, ...]
    weight_backward_units: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if stages < 1:
            raise ValueError("forward_s: expected at least one stage, got none")
        for field, count, place in (
            ("forward_s", stages, "stage"),
            ("input_backward_s", stages, "stage"),
            ("weight_backward_s", stages, "stage"),
            ("delay_forward_s", stages - 1, "link"),
            ("delay_backward_s", stages - 1, "link"),
            ("activation_units", stages, "stage"),
            ("weight_backward_units", stages, "stage"),
        ):
            object.__setattr__(self, field, per_place(field, getattr(self, field), count, place))

    @classmethod
    def of(
        cls,
        stages: int,
        *,
        forward_s: PerStage,
        input_backward_s: PerStage,
        weight_backward_s: PerStage,
        delay_forward_s: PerStage = 0.0,
        delay_backward_s: PerStage | None = None,
        activation_units: PerStage = 1.0,
        weight_backward_units: PerStage | None = None,
    ) -> PipelineCosts:
        """Each argument is a number or one per stage (of the delays: per link).

        `delay_backward_s` is that of the forward direction if not given, `weight_backward_units`
        1.6 times `activation_units`, as with torch's split backward.

        Raises ValueError, which names the field.
        """
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise ValueError(f"stages: expected an integer, at least 1, got {stages!r}")
        units = per_place("activation_units", activation_units, stages, "stage")
        if weight_backward_units is None:
            weight_backward_units = [WEIGHT_BACKWARD_UNITS * each for each in units]
        if delay_backward_s is None:
            delay_backward_s = delay_forward_s
        links = stages - 1
        return cls(
            per_place("forward_s", forward_s, stages, "stage"),
            per_place("input_backward_s", input_backward_s, stages, "stage"),
            per_place("weight_backward_s", weight_backward_s, stages, "stage"),
            per_place("delay_forward_s", delay_forward_s, links, "link"),
            per_place("delay_backward_s", delay_backward_s, links, "link"),
            units,
            per_place("weight_backward_units", weight_backward_units, stages, "stage"),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def with_delay(
        self, link: int, forward_s: float, backward_s: float | None = None
    ) -> PipelineCosts:
        """The same with other delays of one link; both directions alike if one is given.

        Raises ValueError if there is no such link.
        """
        if not 0 <= link < self.num_stages - 1:
            raise ValueError(f"link: expected 0 to {self.num_stages - 2}, got {link}")
        forward, backward = list(self.delay_forward_s), list(self.delay_backward_s)
        forward[link] = forward_s
        backward[link] = forward_s if backward_s is None else backward_s
        return replace(self, delay_forward_s=tuple(forward), delay_backward_s=tuple(backward))

    def fused(self) -> PipelineCosts:
        """The same with B and W as one operation, which sends its gradient when both are done.

        So work schedules without a split backward, such as torch's 1F1B. The whole stands in
        `input_backward_s`; `weight_backward_s` is 0.
        """
        whole = [b + w for b, w in zip(self.input_backward_s, self.weight_backward_s, strict=True)]
        return replace(
            self,
            input_backward_s=tuple(whole),
            weight_backward_s=(0.0,) * self.num_stages,
        )
