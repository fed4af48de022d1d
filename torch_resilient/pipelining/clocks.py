"""Follows the clocks of a pipeline's ranks while it trains, without making anybody wait."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torch_resilient import _native
from torch_resilient._groups import carries
from torch_resilient.pipelining.timeline_files import clock_offset_s
from torch_resilient.pipelining.torch_actions import AnyStage, control_device, group_of
from torch_resilient.traffic import traffic_class

# Clocks drift apart by 10 µs in a second or so: in a hundred iterations of a second, by 1 ms.
EVERY = 100
# The number of consecutive iterations with one question each. The question with the shortest way
# counts.
QUESTIONS = 8
# Answers have come by then.
_EVALUATED = EVERY // 2
# No other code uses this tag on a pipeline's group: torch's stages send with tag 0.
_TAG = 78

_CPU = torch.device("cpu")


@dataclass
class _Pending:
    """A receive, and what was sent for it.

    Attributes:
        work, buffer: of the receive: a question at the first stage, an answer elsewhere. Both
            begin with when the question was sent, by its sender's clock; the answer goes on with
            when it came, by the first stage's clock, and how long it lay there; in seconds.
        peer: global rank of the other end.
    """

    work: dist.Work
    buffer: Tensor
    peer: int

    @property
    def ended(self) -> bool:
        return _native.load().wait_any([self.work], 0.0) is not None


class ClockUpdates:
    """Compares a rank's clock with that of stage 0 every now and then, by NTP's four time stamps.

    Questions and answers are sent and looked for at the ends of iterations. How long one lies there
    does not matter: the backend knows when a message came. No rank ever waits; an answer that comes
    late or not at all is no sample.

    All ranks of the pipeline make one and call `after` with the same steps. Other backends than
    "resilient" do not know when messages came: over them nothing is compared.
    """

    def __init__(self, stage: AnyStage) -> None:
        self._group = group_of(stage)
        self._possible = control_device(self._group, stage.device) == _CPU and carries(
            self._group, _CPU
        )
        self._is_first = stage.is_first
        # Those that the first stage answers; elsewhere the first stage.
        stages = range(1, stage.num_stages) if stage.is_first else range(1)
        ranks = stage.stage_index_to_group_rank
        self._peers = [dist.get_global_rank(self._group, ranks[each]) for each in stages]
        self._pending: list[_Pending] = []
        self._sends: list[dist.Work] = []
        self._samples: list[tuple[float, float, float]] = []

    def after(self, step: int) -> float | None:
        """Does this rank's part when iteration `step` has ended.

        Returns what to add to this rank's clock to get that of stage 0, when that has just been
        measured; else None.
        """
        if not self._possible:
            return None
        self._sends = [work for work in self._sends if not work.is_completed()]
        ended = [each for each in self._pending if each.ended]
        self._pending = [each for each in self._pending if each not in ended]
        for each in ended:
            if each.work.is_success():
                (self._answer if self._is_first else self._learn)(each)
        if step >= EVERY and step % EVERY < QUESTIONS:
            for peer in self._peers:
                self._ask(peer)
        if step % EVERY != _EVALUATED or not self._samples:
            return None
        offset_s, _ = clock_offset_s(self._samples)
        self._samples.clear()
        return offset_s

    def _ask(self, peer: int) -> None:
        """Sends a question; at the first stage, makes ready for that of `peer`."""
        question = torch.tensor([time.monotonic(), 0, 0], dtype=torch.float64)
        buffer = torch.zeros_like(question)
        work = dist.irecv(buffer, peer, group=self._group, tag=_TAG)
        assert work is not None
        self._pending.append(_Pending(work, buffer, peer))
        if not self._is_first:
            self._send(question, peer)

    def _answer(self, question: _Pending) -> None:
        came_s = _native.load().ended_at(question.work)
        answer = [question.buffer[0], came_s, time.monotonic() - came_s]
        self._send(torch.tensor(answer, dtype=torch.float64), question.peer)

    def _learn(self, answer: _Pending) -> None:
        came_s = _native.load().ended_at(answer.work)
        asked_s, remote_s, lay_s = answer.buffer.tolist()
        # As if it had been answered at once.
        self._samples.append((asked_s, remote_s, max(came_s - lay_s, asked_s)))

    def _send(self, message: Tensor, peer: int) -> None:
        with traffic_class("activation"):  # a few bytes that lose their worth in a queue
            work = dist.isend(message, peer, group=self._group, tag=_TAG)
        assert work is not None
        self._sends.append(work)
