"""How much delay of a link a pipeline absorbs: Lemma 1, Theorem 1 and Equation 1.

The slackness of link i is the number of warm-up forwards of stage i less that of stage i + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import Operation
from torch_resilient.planning.warmup import require_warmup


def warmup_of(orders: Sequence[Sequence[Operation]]) -> list[int]:
    """The forwards of each stage before its first backward, x_i of the paper."""
    counts = []
    for order in orders:
        count = 0
        for kind, _ in order:
            if kind == "B":
                break
            count += kind == "F"
        counts.append(count)
    return counts


def slackness(warmup: Sequence[int]) -> list[int]:
    """The slackness of each link; at least 0, which is Lemma 1.

    Raises ValueError for counts that no pipeline can run.
    """
    # Paper: PIPEMORPH §4.1, Lemma 1
    require_warmup(warmup)
    return [here - after for here, after in itertools.pairwise(warmup)]


def tolerated_delay_s(costs: PipelineCosts, link: int, link_slackness: int) -> float:
    """The largest delay of `link`, in seconds one way, that costs no more than itself once.

    Equation 1, solved for c: half of slackness * (F + B of stage i + 1) less F + B of stage i. If
    the directions differ, it is their mean that must not be larger. With F = B = t it is
    (slackness - 1) t, the threshold of Theorem 1. Negative: the link is a bottleneck even without
    delay.

    The paper's "if and only if" holds for stages that run B and F in strict turn. With a W in each
    cycle there is more room, so this is on the safe side: up to (3 slackness - 1) t / 2 then.
    """
    # Paper: PIPEMORPH §4.1, Theorem 1 and Equation 1
    if not 0 <= link < costs.num_stages - 1:
        raise ValueError(f"link: expected 0 to {costs.num_stages - 2}, got {link}")
    here_s = costs.forward_s[link] + costs.input_backward_s[link]
    after_s = costs.forward_s[link + 1] + costs.input_backward_s[link + 1]
    return (link_slackness * after_s - here_s) / 2


def accumulated_delay_s(
    costs: PipelineCosts, link: int, link_slackness: int, num_microbatches: int
) -> float:
    """About how much longer, in seconds, an iteration takes by the delays of `link`: Theorem 1.

    Within the tolerated delay c it is c, counted in both directions. The excess counts again in
    every group of slackness + 1 microbatches, in both directions: 2N / (slackness + 1) times. The
    paper gives orders of growth only. The divisor slackness + 1 is that of ADAPTRA, which the exact
    model confirms; slackness - 1, as PIPEMORPH has it, would be infinite for 1.
    """
    # Paper: PIPEMORPH §4.1, Theorem 1
    if link_slackness < 0:
        raise ValueError(f"link_slackness: expected at least 0 (Lemma 1), got {link_slackness}")
    tolerated_s = max(tolerated_delay_s(costs, link, link_slackness), 0.0)
    delay_s = (costs.delay_forward_s[link] + costs.delay_backward_s[link]) / 2
    excess_s = max(delay_s - tolerated_s, 0.0)
    return 2 * min(delay_s, tolerated_s) + excess_s * 2 * num_microbatches / (link_slackness + 1)
