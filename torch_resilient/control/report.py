"""The report that each rank of a pipeline sends in every iteration, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torch_resilient.planning.costs import PipelineCosts

UNKNOWN = math.nan


@dataclass(frozen=True)
class StageReport:
    """One stage's measurements; NaN where nothing has been measured yet.

    Attributes:
        epoch, planner: of the newest plan that this rank holds: its number and the stage that made
            it.
        published: the newest epoch that this rank has published; 0 for none.
        changes: how many changes of its links' delays it has found so far.
        forward_s, input_backward_s, weight_backward_s: of a typical F, B and W.
        round_trip_next_s, round_trip_next_min_s: of the link to the next stage, typical and least
            of about the last iteration.
        round_trip_previous_s, round_trip_previous_min_s: the same of the link to the previous
            stage.
        transfer_next_s, transfer_previous_s: how much longer than that a typical message takes to
            be there whole.
        room: how many microbatches this rank can hold between F and W; infinite if not measured.
        late_s: how long it has been at making a plan; infinite if that failed.
    """

    epoch: float = 0.0
    planner: float = 0.0
    published: float = 0.0
    changes: float = 0.0
    forward_s: float = UNKNOWN
    input_backward_s: float = UNKNOWN
    weight_backward_s: float = UNKNOWN
    round_trip_next_s: float = UNKNOWN
    round_trip_next_min_s: float = UNKNOWN
    round_trip_previous_s: float = UNKNOWN
    round_trip_previous_min_s: float = UNKNOWN
    transfer_next_s: float = 0.0
    transfer_previous_s: float = 0.0
    room: float = math.inf
    late_s: float = 0.0

    def encode(self) -> list[float]:
        """As numbers, for a message."""
        return list(astuple(self))

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> StageReport:
        """The inverse of encode()."""
        return cls(*numbers)


def costs_of(reports: Sequence[StageReport]) -> PipelineCosts | None:
    """The costs that these reports, one per stage, tell of; None if an operation is not measured.

    A message takes its link's round trip and what its bytes need beyond that, less the way of its
    acknowledgement, for which half of the least round trip is taken. A link without a sample counts
    as having no delay; see `links_measured`.
    """
    times = [(r.forward_s, r.input_backward_s, r.weight_backward_s) for r in reports]
    if any(math.isnan(each) for row in times for each in row):
        return None
    forward_s, backward_s = [], []
    for stage in range(len(reports) - 1):
        ahead, behind = reports[stage], reports[stage + 1]
        least = [ahead.round_trip_next_min_s, behind.round_trip_previous_min_s]
        known = [each for each in least if each > 0]
        way_back_s = min(known) / 2 if known else 0.0
        forward_s.append(_one_way_s(ahead.round_trip_next_s, ahead.transfer_next_s, way_back_s))
        backward_s.append(
            _one_way_s(behind.round_trip_previous_s, behind.transfer_previous_s, way_back_s)
        )
    return PipelineCosts.of(
        len(reports),
        forward_s=[row[0] for row in times],
        input_backward_s=[row[1] for row in times],
        weight_backward_s=[row[2] for row in times],
        delay_forward_s=forward_s,
        delay_backward_s=backward_s,
    )


def links_measured(reports: Sequence[StageReport]) -> bool:
    """Whether the delay of any link is known: only the "resilient" backend measures them."""
    trips_s = [each for r in reports for each in (r.round_trip_next_s, r.round_trip_previous_s)]
    return not all(map(math.isnan, trips_s))


def _one_way_s(round_trip_s: float, transfer_s: float, way_back_s: float) -> float:
    return 0.0 if math.isnan(round_trip_s) else max(round_trip_s + transfer_s - way_back_s, 0.0)
