"""A seeded script of faults for a job: the same seed and settings give the same script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("cut", "stall", "drop", "delay", "rate")
# Kinds that steps may begin and end. A path that stays silent until the next step would block that
# step forever.
STEP_KINDS = ("cut", "delay", "rate")


@dataclass(frozen=True)
class PlannedFault:
    """One fault: what happens to the way from `rank` to `peer`, and when.

    Attributes:
        kind: one of KINDS.
        rank: the rank that applies it.
        path: index of the connection between the two; None: all of them.
        at_s: since the rank's engine started; None if it comes with a step.
        for_s: how long; 0 for a cut, which is done at once.
        step: number given to torch_resilient.faults.step(), or None.
        for_steps: how many of them it lasts; 0 for a cut.
        delay_s, bytes_per_s: of a delay, a rate.
    """

    kind: str
    rank: int
    peer: int
    path: int | None
    at_s: float | None
    for_s: float
    step: int | None = None
    for_steps: int = 0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def rule(self) -> str:
        """As in TORCH_RESILIENT_FAULTS."""
        words = [self.kind, f"rank={self.rank}", f"peer={self.peer}"]
        if self.path is not None:
            words.append(f"path={self.path}")
        if self.kind == "delay":
            words.append(f"ms={self.delay_s * 1e3:g}")
        if self.kind == "rate":
            words.append(f"bytes_per_s={self.bytes_per_s:.0f}")
        if self.step is not None and self.kind == "cut":
            words.append(f"at_step={self.step}")
        elif self.step is not None:
            words.append(f"from_step={self.step} until_step={self.step + self.for_steps}")
        elif self.kind == "cut":
            words.append(f"at_s={self.at_s:.10g}")
        else:
            assert self.at_s is not None
            # Ten digits keep milliseconds even for the largest --first.
            words.append(f"from_s={self.at_s:.10g} until_s={self.at_s + self.for_s:.10g}")
        return " ".join(words)

    @property
    def what(self) -> str:
        """For people: "drop 0-1 path 1, 0.8 s"."""
        where = "all paths" if self.path is None else f"path {self.path}"
        text = f"{self.kind} {self.rank}-{self.peer} {where}"
        if self.kind == "delay":
            text += f", +{self.delay_s * 1e3:.0f} ms"
        if self.kind == "rate":
            text += f", {self.bytes_per_s / 1e6:.1f} MB/s"
        if self.for_steps:
            text += f", {self.for_steps} steps"
        return text + (f", {self.for_s:.1f} s" if self.for_s else "")


@dataclass(frozen=True)
class ScriptSettings:
    """The settings of a script, without the seed."""

    ranks: int
    paths: int
    links: Sequence[tuple[int, int]]
    kinds: Sequence[str]
    all_paths: bool = False
    first_s: float = 4.0
    every_s: float = 3.0
    duration_s: float = 30.0
    steps: tuple[int, int] | None = None
    every_steps: int = 10


def ring(ranks: int) -> list[tuple[int, int]]:
    """Each rank with the next: the links that ring algorithms and pipelines use."""
    return [(0, 1)] if ranks == 2 else [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def make_script(seed: int, settings: ScriptSettings) -> list[PlannedFault]:
    """The faults in the order of their start; each ends before the next starts.

    Every kind occurs once before any kind repeats. Raises ValueError if no fault fits.
    """
    if settings.steps is None:
        room = settings.duration_s - settings.first_s
        times: list[float] = [
            round(settings.first_s + i * settings.every_s, 3)
            for i in range(int(room / settings.every_s + 1e-9))
        ]
        if not times:
            raise ValueError(
                f"--duration {settings.duration_s:g}: no fault fits in, since the first comes at "
                f"{settings.first_s:g} s (--first) and takes up to {settings.every_s:g} s (--every)"
            )
    else:
        times = list(range(settings.steps[0], settings.steps[1], settings.every_steps))
    generator = random.Random(seed)
    # Only random(): Python guarantees a stable sequence for no other method of the generator.
    draw = generator.random

    def pick(choices: Sequence[object]) -> int:
        return int(draw() * len(choices))

    script = []
    left: list[str] = []
    for time in times:
        left = left or list(settings.kinds)
        kind = left.pop(pick(left))
        rank, peer = settings.links[pick(settings.links)]
        if draw() < 0.5:
            rank, peer = peer, rank
        index = pick(range(settings.paths))
        # A slow link is slow on all its connections; silence affects one connection, or all.
        whole = settings.all_paths or kind in ("delay", "rate")
        # The rest of the interval is for the recovery, and for comparison.
        longest_s = 0.5 * settings.every_s
        for_s = round(min(longest_s, 0.3 + 1.2 * draw()), 1) if kind != "cut" else 0.0
        size = draw()
        script.append(
            PlannedFault(
                kind,
                rank,
                peer,
                None if whole else index,
                at_s=None if settings.steps else float(time),
                for_s=0.0 if settings.steps else max(for_s, 0.1 if kind != "cut" else 0.0),
                step=int(time) if settings.steps else None,
                for_steps=(settings.every_steps + 1) // 2
                if settings.steps and kind != "cut"
                else 0,
                delay_s=round(0.02 + 0.08 * size, 3) if kind == "delay" else 0.0,
                bytes_per_s=round(2e6 * 10**size, -5) if kind == "rate" else 0.0,
            )
        )
    return script


def environment(script: Sequence[PlannedFault], seed: int) -> str:
    """The value of TORCH_RESILIENT_FAULTS."""
    return "; ".join([*(fault.rule for fault in script), f"seed={seed}"])
