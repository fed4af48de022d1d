"""Which stages a rank holds under each schedule that train_pipeline.py knows."""

from __future__ import annotations

ADAPTIVE = "AdaptiveZB"
ONE_STAGE_A_RANK = (ADAPTIVE, "GPipe", "1F1B", "ZB1P")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ONE_STAGE_A_RANK + LOOPED + V_SHAPED


def stages_of_rank(schedule: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """Which stages a rank holds, and how many there are in all."""
    if schedule in ONE_STAGE_A_RANK:
        return [rank], ranks
    if schedule in LOOPED:
        return [rank, rank + ranks], 2 * ranks
    return [rank, 2 * ranks - 1 - rank], 2 * ranks
