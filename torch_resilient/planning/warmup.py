"""How many forwards each stage runs before its first backward: Algorithms 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_resilient.planning.costs import PipelineCosts

# The least slackness that Algorithm 2 gives a link: with 2, a link without delay costs nothing.
MIN_SLACKNESS = 2
# Sums of times such as 0.01 s are not exact; 2.0000000001 is not to become 3.
_ROUNDING = 1e-9


def require_warmup(warmup: Sequence[int], num_microbatches: int | None = None) -> None:
    """Raises ValueError unless `warmup` is what a pipeline can run: Lemma 1.

    No stage may run fewer forwards before its first backward than the stage after it: that
    backward would need a forward that the earlier stage has not run.
    """
    # Paper: PIPEMORPH §4.1, Lemma 1
    if not warmup:
        raise ValueError("warmup: expected one count per stage, got none")
    for stage, count in enumerate(warmup):
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"warmup[{stage}]: expected an integer, got {count!r}")
        if count < 1 or (num_microbatches is not None and count > num_microbatches):
            most = "" if num_microbatches is None else f" to {num_microbatches}"
            raise ValueError(f"warmup[{stage}]: expected 1{most}, got {count}")
        if stage and count > warmup[stage - 1]:
            raise ValueError(
                f"warmup[{stage}]: {count} is more than {warmup[stage - 1]} of stage {stage - 1}: "
                "each would wait for the other (Lemma 1)"
            )


def initial_warmup(num_stages: int, max_activations: int) -> list[int]:
    """Algorithm 1: equal slackness on all links, as large as memory allows.

    Args:
        num_stages: S of the paper.
        max_activations: how many microbatches the first stage may hold between F and B: the
            paper's floor(M / M^F).

    If the slackness does not divide evenly, the first links get one more. With fewer
    activations than stages some links get none. The quota makes a link resilient only if the
    order keeps to it (`orders.alternating`): a generator that sees no delay and takes B before F
    runs into the same order for every quota.
    """
    # Paper: PIPEMORPH §4.2, Algorithm 1
    if num_stages < 1:
        raise ValueError(f"num_stages: expected at least 1, got {num_stages}")
    if max_activations < 1:
        raise ValueError(f"max_activations: expected at least 1, got {max_activations}")
    if num_stages == 1:
        return [max_activations]
    average, remainder = divmod(max_activations - 1, num_stages - 1)
    warmup = [max_activations]
    for link in range(num_stages - 1):
        warmup.append(warmup[-1] - average - (link < remainder))
    return warmup


def adapted_warmup(costs: PipelineCosts, num_microbatches: int) -> list[int]:
    """Algorithm 2: the least slackness that absorbs the delay of each link by Equation 1.

    The two versions of the paper differ. Taken are ADAPTRA's ceiling and t_i^B: with the floor of
    PIPEMORPH, Equation 1 does not hold for the result. Left out is the clip of the slackness to
    N - 2S: it is 0 or negative for N <= 2S and makes iterations up to twice as long; instead each
    count is kept within 1 and N. If the directions of a link differ, 2c is their sum.
    """
    # Paper: PIPEMORPH §4.2, Algorithm 2
    warmup = [1]
    for stage in reversed(range(costs.num_stages - 1)):
        needed_s = (
            costs.forward_s[stage]
            + costs.input_backward_s[stage]
            + costs.delay_forward_s[stage]
            + costs.delay_backward_s[stage]
        )
        cycle_s = costs.forward_s[stage + 1] + costs.input_backward_s[stage + 1]
        if needed_s < cycle_s * num_microbatches:
            slackness = max(math.ceil(needed_s / cycle_s - _ROUNDING), MIN_SLACKNESS)
        else:  # also when the next stage takes no time at all
            slackness = max(num_microbatches, MIN_SLACKNESS)
        warmup.append(min(warmup[-1] + slackness, num_microbatches))
    return warmup[::-1]
