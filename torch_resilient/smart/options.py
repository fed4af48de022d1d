"""Options: what may be dropped, and when to stop dropping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SmartOptions"]


@dataclass(frozen=True)
class SmartOptions:
    """Options of dropping. Raises ValueError, naming the field, for a value out of its limits.

    `top_fraction` (0 to 1, without the ends): a packet with a mean magnitude that reaches that of
    the largest `top_fraction` of the bucket's elements arrives for certain. The paper's K. Larger
    values protect more.

    `max_low_priority_drop` (0 to 1): the part of each message's bytes that may be dropped; what is
    dropped beyond that is sent again. 0: exact.

    `max_mean_drop` (0 to 1): if more than this part of the bytes was dropped in the mean of the
    last `drop_window_steps` steps, the link is worse than error feedback is known to be good for
    (the paper: up to 5 %), and the state becomes exact for the rest of the run.

    `exact_below_bytes` (0 or more): smaller messages are exact. A message is one rank's share of
    a bucket. A few packets more do not pay; biases and the like stay out of it where they have
    buckets of their own.

    `exact_every` (0 or more): in every `exact_every`-th step, all messages are exact, which empties
    the error memory; 0: never.

    `samples` (100 or more): elements drawn from each bucket to estimate the threshold.

    `activation_bound` (0 to 1), for pipeline schedules: the part of the bytes of an activation that
    may be missing where it arrives; the next stage then computes with zeros there, and nothing
    makes up for it. One number holds for the boundaries of low priority, and those of high priority
    are exact; several hold for one boundary each, the first stage's first, as `torch-resilient
    profile-drop` suggests them. 0: exact. The gradients of activations are always exact.

    `depth_ratio` (0 to 1): boundaries in this first part of the model are of high priority, the
    paper's k. The default is where its Figure 1 finds the earlier boundary, layer 6 of 24.
    """

    top_fraction: float = 0.01
    max_low_priority_drop: float = 0.1
    max_mean_drop: float = 0.08
    drop_window_steps: int = 50
    exact_below_bytes: int = 65536
    exact_every: int = 0
    samples: int = 4096
    activation_bound: float | Sequence[float] = 0.0
    depth_ratio: float = 0.25

    def __post_init__(self) -> None:
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"SmartOptions: {name}={getattr(self, name)}: expected {expected}")

        check("top_fraction", 0 < self.top_fraction < 1, "a fraction above 0 and below 1")
        for name in ("max_low_priority_drop", "max_mean_drop", "depth_ratio"):
            check(name, 0 <= getattr(self, name) <= 1, "a fraction, 0 to 1")
        check("drop_window_steps", self.drop_window_steps >= 1, "a number of steps, 1 or more")
        check("exact_below_bytes", self.exact_below_bytes >= 0, "bytes, 0 or more")
        check("exact_every", self.exact_every >= 0, "a number of steps, or 0 for never")
        check("samples", self.samples >= 100, "100 or more")
        bounds = self.activation_bound
        check(
            "activation_bound",
            all(0 <= each <= 1 for each in (bounds if isinstance(bounds, Sequence) else [bounds])),
            "fractions, 0 to 1",
        )

    def activation_bound_of(self, boundary: int, num_stages: int) -> float:
        """Returns the droppable part of the activations from stage `boundary` to the next.

        Raises ValueError if there are bounds for another number of boundaries than the
        `num_stages` - 1 of this pipeline.

        Paper: SMART §3.1, Equation 2, with layers counted in stages.
        """
        bounds = self.activation_bound
        if isinstance(bounds, Sequence):
            if len(bounds) != num_stages - 1:
                raise ValueError(
                    f"SmartOptions: activation_bound={bounds}: {len(bounds)} bounds for a pipeline "
                    f"of {num_stages} stages: expected {num_stages - 1}, one for each boundary, or "
                    "one number"
                )
            return bounds[boundary]
        high_priority = (boundary + 1) / num_stages <= self.depth_ratio
        return 0.0 if high_priority else bounds
