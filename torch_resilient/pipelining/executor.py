"""Runs one iteration of a stage, by a fixed order or by live dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from torch_resilient import _native
from torch_resilient.pipelining.bubbles import Bubbles
from torch_resilient.pipelining.recorder import Recorder
from torch_resilient.pipelining.torch_actions import StageActions
from torch_resilient.planning.dispatch import (
    Expectation,
    Patience,
    Progress,
    StageGates,
    choose,
    worth_holding,
)
from torch_resilient.planning.orders import Operation

# Maps an operation of an iteration with a backward, its kind and microbatch, to its context.
AroundOperation = Callable[[str, int], contextlib.AbstractContextManager[None]]


@dataclass
class Waits:
    """How the compute thread was blocked since the schedule was made.

    Attributes:
        blocked: how often it had to wait for a message.
        blocked_s: for how many seconds in all.
        while_ready: how often of these another operation could have run: never with live dispatch,
            unless it is defective; with a fixed order whenever a late message holds up what does
            not need it. Without those of `held`.
        held: how often an operation was held back because a message was due that the plan has
            before it; see dispatch.Patience.
        held_s: for how many seconds in all.
    """

    blocked: int = 0
    blocked_s: float = 0.0
    while_ready: int = 0
    held: int = 0
    held_s: float = 0.0


class Arrivals:
    """The messages of one direction, in microbatch order.

    Args:
        post: posts the receives of a microbatch and returns their works; none where nothing has to
            be received.
        count: the number of microbatches.
    """

    def __init__(self, post: Callable[[int], list[dist.Work]], count: int) -> None:
        self._post = post
        self._count = count
        self._works: list[list[dist.Work]] = []
        self._next = 0

    def post_all(self) -> None:
        """Posts all receives; a second call does nothing."""
        while len(self._works) < self._count:
            self._works.append(self._post(len(self._works)))

    @property
    def next_works(self) -> list[dist.Work]:
        """The works of the next message; empty if there are none, or no message is left."""
        return self._works[self._next] if self._next < len(self._works) else []

    @property
    def arrived(self) -> bool:
        """Whether the next message is there; asks without waiting."""
        return self._next < self._count and self.missing is None

    @property
    def missing(self) -> dist.Work | None:
        """A work of the next message that has not ended."""
        for work in self.next_works:
            if _native.load().wait_any([work], 0.0) is None:
                return work
        return None

    def take(self) -> list[dist.Work]:
        """Waits until the next message is there, and goes on to the one after it; returns its
        works."""
        works = self.next_works
        for work in works:
            work.wait()
        self._works[self._next] = []
        self._next += 1
        return works


def tells_ends(works: Sequence[dist.Work]) -> bool:
    """Whether works such as these tell that they have ended without being waited for.

    Those of gloo do not: is_completed() stays False until a call waits.
    """
    try:
        _native.load().wait_any(list(works), 0.0)
    except (ImportError, TypeError):
        return False
    return True


class StageRun:
    """One iteration of a stage: all its F and, if the iteration has a backward, its B and W.

    Args:
        actions: the operations.
        recorder: measures what is done.
        waits: counts how the thread was blocked.
        around_operation: see AroundOperation.
        patience: for live dispatch, of this stage's iterations so far.
        bubbles: runs other work while the thread is blocked; None for nothing.
    """

    def __init__(
        self,
        actions: StageActions,
        recorder: Recorder,
        waits: Waits,
        around_operation: AroundOperation = lambda *_: contextlib.nullcontext(),
        patience: Patience | None = None,
        bubbles: Bubbles | None = None,
    ) -> None:
        self._actions = actions
        self._recorder = recorder
        self._waits = waits
        self._around_operation = around_operation
        self._progress = Progress(actions.num_microbatches)
        self._patience = patience or Patience()
        self._bubbles = bubbles
        self._held_after = -1  # operations done when one was last held back
        self._inputs = Arrivals(actions.receive_input, actions.num_microbatches)
        self._gradients = Arrivals(actions.receive_gradient, actions.num_microbatches)
        # Posted ahead of time, a message needs no round trip between the ranks before its data.
        self._inputs.post_all()
        if actions.backward:
            self._gradients.post_all()
        self.live_possible = tells_ends([*self._inputs.next_works, *self._gradients.next_works])

    def run_live(self, gates: StageGates, expected: str = "") -> None:
        """Runs whatever `dispatch.choose` picks, until all is done.

        `expected`: the kinds of the stage's operations if no message is late. An operation that is
        not due by it is held back for a moment if the message of the one that is may come; see
        Patience.
        """
        expectation = Expectation(expected)
        # Without a backward there is nothing to hold back F for.
        while not self._finished:
            forward = self._inputs.arrived
            kind = (
                choose(self._progress, gates, forward, self._gradient_arrived)
                if self._actions.backward
                else ("F" if forward else None)
            )
            expects = expectation.next_kind(self._progress)
            if kind is not None:
                if kind == expects or not self._hold_back(kind, gates, expects):
                    self._do(kind)
                continue
            awaited = self._awaited(gates)
            # Looked at before what is missing: what comes in between is no reason to block.
            ready = self._something_ready(gates)
            missing = [each.missing for each in awaited]
            if None not in missing:  # else it has come since we looked
                self._waits.while_ready += ready
                self._block([work for work in missing if work is not None])

    def _awaited(self, gates: StageGates) -> list[Arrivals]:
        """The directions for which the next message would let an operation run."""
        awaited = []
        if not self._actions.backward or self._progress.forward_allowed(gates):
            awaited.append(self._inputs)
        if self._progress.backwards < self._progress.forwards:
            awaited.append(self._gradients)
        return awaited

    def _hold_back(self, kind: str, gates: StageGates, expects: str | None) -> bool:
        """Gives the message of the operation that the plan `expects` a moment to come before one of
        another `kind` runs, once for each; whether it has."""
        if expects not in ("F", "B"):
            return False
        arrived = self._inputs.arrived, self._gradient_arrived
        if not worth_holding(self._progress, gates, expects, *arrived):
            return False
        done = self._progress.forwards + self._progress.backwards + self._progress.weights
        awaited = expects, self._progress.next_of(expects)
        share_s = self._patience.share(*awaited) * self._recorder.typical_s(kind)
        if self._held_after == done or not share_s > 0:  # not known yet
            return False
        missing = (self._inputs if expects == "F" else self._gradients).missing
        if missing is None:
            return True  # it has come since we looked
        self._held_after = done
        with self._recorder.wait() as waited:
            came = _native.load().wait_any([missing], share_s) is not None
        self._patience.on_held(*awaited, came)
        self._waits.held += 1
        self._waits.held_s += waited.duration_s
        return came

    def run_fixed(self, order: Sequence[Operation]) -> None:
        """Runs the operations in this order, each when what it needs has come."""
        for kind, _ in order:
            if not self._actions.backward and kind != "F":
                continue
            if self.live_possible and kind != "W":
                missing = (self._inputs if kind == "F" else self._gradients).missing
                if missing is not None:
                    gates = StageGates(0, self._progress.num_microbatches, len(order))
                    other = choose(
                        self._progress, gates, self._inputs.arrived, self._gradient_arrived
                    )
                    self._waits.while_ready += other is not None
                    self._block([missing])
            self._do(kind)

    def _something_ready(self, gates: StageGates) -> bool:
        """Whether an operation could run under these gates; does not ask `choose`, to check it."""
        progress = self._progress
        if not self._actions.backward:
            return self._inputs.arrived
        return (
            progress.weights < progress.backwards
            or (self._inputs.arrived and progress.forward_allowed(gates))
            or self._gradient_arrived
        )

    @property
    def _finished(self) -> bool:
        if self._actions.backward:
            return self._progress.finished
        return self._progress.forwards == self._progress.num_microbatches

    @property
    def _gradient_arrived(self) -> bool:
        # On the last stage nothing is received: F makes its own B possible.
        return self._progress.backwards < self._progress.forwards and self._gradients.arrived

    def _block(self, works: list[dist.Work]) -> None:
        """Waits until one of these has ended; the backend's time-outs bound it."""
        assert works, "nothing can run and nothing is awaited: a defect of the gates"
        with self._recorder.wait() as waited:
            if self._bubbles is None:
                _native.load().wait_any(works)
            else:
                # After the same operations, a stage waits for the same messages.
                done = self._progress
                self._bubbles.wait(works, (done.forwards, done.backwards, done.weights))
        self._waits.blocked += 1
        self._waits.blocked_s += waited.duration_s

    def _do(self, kind: str) -> None:
        works = []
        if kind == "F":
            works = self._inputs.take()
        elif kind == "B":
            works = self._gradients.take()
        microbatch = self._progress.count(kind)
        if works and self.live_possible:
            came_s = max(_native.load().ended_at(work) or 0.0 for work in works)
            self._recorder.arrivals.append((kind, microbatch, came_s))
        saves = self._actions.backward
        around = self._around_operation(kind, microbatch) if saves else contextlib.nullcontext()
        with self._recorder.operation(kind, microbatch), around:
            if kind == "F":
                self._actions.forward(microbatch)
            elif kind == "B":
                self._actions.input_backward(microbatch)
            else:
                self._actions.weight_backward(microbatch)
        if kind == "F":
            self._actions.send_output(microbatch)
        elif kind == "B":
            self._actions.send_gradient(microbatch)
