"""List scheduling of a cell: simulates it, and lets each GPU choose an operation at each moment.

This is the text to read. csrc/planning/cell.cpp computes the same to the last bit, many times as
fast, and is used where the package has been built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

# The kinds of operations; their place here is their number in compact orders. W exists only with a
# split backward.
KINDS = "FRBW"
FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)

_NEVER = float("inf")
# Times that differ by less than this part of the longest operation or transfer count as equal.
# Sums of the same times in another order differ by rounding. A larger value would change decisions.
_EQUAL = 1e-9


class Problem(Protocol):
    """The part of `cell.Cell` that the rules read; times in milliseconds.

    Attributes:
        forward_ms, recompute_ms, backward_ms, weight_ms: by stage.
        hop_ms: by hop and direction (activation, gradient): the time over one node if the hop
            crosses sites, and from the end of an operation to the arrival of its result if not.
        latency_ms: the same for the part of a transfer that does not hold the link.
        crosses: by hop, whether it leads to another site.
        relays: nodes of a transfer, if pipelines share the links in turns.
        caps: by stage, the maximum number of microbatches between F and B; F and W with `split`.
        split: whether W is an operation of its own.
    """

    @property
    def pipelines(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def forward_ms(self) -> Sequence[float]: ...
    @property
    def recompute_ms(self) -> Sequence[float]: ...
    @property
    def backward_ms(self) -> Sequence[float]: ...
    @property
    def weight_ms(self) -> Sequence[float]: ...
    @property
    def hop_ms(self) -> Sequence[tuple[float, float]]: ...
    @property
    def latency_ms(self) -> Sequence[tuple[float, float]]: ...
    @property
    def crosses(self) -> Sequence[bool]: ...
    @property
    def relays(self) -> int: ...
    @property
    def caps(self) -> Sequence[int]: ...
    @property
    def split(self) -> bool: ...


@dataclass(frozen=True)
class Rules:
    """How GPUs and links choose their next operation or transfer.

    Attributes:
        priority: the kinds of operations, the preferred one first.
        turn: on a shared link, pipelines take turns of this many microbatches: 1 serves the
            earlier microbatch first, the number of all serves one pipeline after the other. 0
            serves transfers as they come.
        reserve: a GPU starts the first operation of a site only if its transfer out of the site
            can follow the operations there at once (ATLAS, rule 3).
        spatial: each pipeline uses its own node only.
        early: recompute as soon as the arrival of the gradient is known, and not just in time.
        warmup: by stage, the maximum number of microbatches between F and B; empty for no limit.
        alternate: after `warmup` forwards, B and F in turn, as in 1F1B.
    """

    priority: str = "BFRW"
    turn: int = 1
    reserve: bool = False
    spatial: bool = False
    early: bool = False
    warmup: tuple[int, ...] = ()
    alternate: bool = False


class Sent(NamedTuple):
    """A transfer over a hop between sites; `direction` is 0 for an activation, 1 for a gradient."""

    pipe: int
    hop: int
    direction: int
    microbatch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Scheduled:
    """The result. GPUs are numbered pipeline by pipeline, each from the first stage to the last.

    Attributes:
        kinds: of each GPU, the numbers of the kinds of its operations.
        starts_ms: of each GPU, the start of each operation.
        sent: the transfers, as they start.
        iteration_ms: the last end.
    """

    kinds: list[bytes]
    starts_ms: list[list[float]]
    sent: list[Sent]
    iteration_ms: float


@dataclass(slots=True)
class _Gpu:
    pipe: int
    stage: int
    free_ms: float = 0.0
    done: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # by kind
    inputs: list[float] = field(default_factory=list)  # arrivals of F's inputs, as far as known
    gradients: list[float] = field(default_factory=list)  # the same for B
    expected: list[float] = field(default_factory=list)  # when gradients will come, for R
    kinds: bytearray = field(default_factory=bytearray)
    starts_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Link:
    """One direction of a hop between sites, or of one pipeline's part of it."""

    hop: int
    direction: int
    transfer_ms: float
    latency_ms: float
    free_ms: list[float]  # of each transfer that may run at a time
    reserved_ms: float = 0.0  # until when rule 3 has given it away
    # (turn, second key, third key, pipe, microbatch, when ready)
    queue: list[tuple[int, int, int, int, int, float]] = field(default_factory=list)


class _Simulation:
    """Time jumps from event to event. At each, finished transfers free their links, links start
    waiting transfers, and GPUs choose. All events of one moment are handled together.
    """

    def __init__(self, cell: Problem, rules: Rules) -> None:
        self._cell, self._rules = cell, rules
        self._stages = len(cell.forward_ms)
        self._priority = [KINDS.index(kind) for kind in rules.priority]
        self._duration_ms = (cell.forward_ms, cell.recompute_ms, cell.backward_ms, cell.weight_ms)
        self._gpus = [_Gpu(p, s) for p in range(cell.pipelines) for s in range(self._stages)]
        at_a_time = max(cell.relays, cell.pipelines) // cell.relays
        self._links: list[_Link] = []
        for hop in range(self._stages - 1):
            for direction in range(2):
                alone_ms = cell.hop_ms[hop][direction]
                latency_ms = cell.latency_ms[hop][direction]
                if rules.spatial:
                    self._links += [
                        _Link(hop, direction, alone_ms, latency_ms, [0.0])
                        for _ in range(cell.pipelines)
                    ]
                else:
                    shared_ms = alone_ms / cell.relays
                    free_ms = [0.0] * at_a_time
                    self._links.append(_Link(hop, direction, shared_ms, latency_ms, free_ms))
        longest_ms = max(max(times) for times in self._duration_ms)
        for hop, crosses in enumerate(cell.crosses):
            if crosses:
                longest_ms = max(longest_ms, *cell.hop_ms[hop])
        self._equal_ms = _EQUAL * longest_ms
        self._chain_ms = self._chains()
        # (time, link or GPU): GPUs have the numbers from 0, links the negative ones.
        self._events: list[tuple[float, int]] = []
        # (time, pipe, hop, direction, microbatch): results that will be ready to be sent.
        self._ready: list[tuple[float, int, int, int, int]] = []
        self._moment = 0
        self._sent: list[Sent] = []

    def _chains(self) -> list[tuple[float, float]]:
        """By stage and direction: from the start of its operation to the transfer out of the site
        that follows; negative if rule 3 does not apply there."""
        cell, last = self._cell, self._stages - 1
        chains = [[-1.0, -1.0] for _ in range(self._stages)]
        for stage in range(self._stages):
            if stage == 0 or cell.crosses[stage - 1]:
                time_ms, k = cell.forward_ms[stage], stage
                while k < last and not cell.crosses[k]:
                    time_ms += cell.hop_ms[k][0] + cell.forward_ms[k + 1]
                    k += 1
                if k < last:
                    chains[stage][0] = time_ms
            if stage == last or cell.crosses[stage]:
                time_ms, k = cell.backward_ms[stage], stage
                while k > 0 and not cell.crosses[k - 1]:
                    time_ms += cell.hop_ms[k - 1][1] + cell.backward_ms[k - 1]
                    k -= 1
                if k > 0:
                    chains[stage][1] = time_ms
        return [(forward_ms, backward_ms) for forward_ms, backward_ms in chains]

    def _link(self, pipe: int, hop: int, direction: int) -> int:
        """The number of the link that this pipeline uses."""
        place = 2 * hop + direction
        return place * self._cell.pipelines + pipe if self._rules.spatial else place

    def _exit(self, gpu: _Gpu, direction: int) -> int:
        """The link out of the GPU's site that its operation's results will take."""
        crosses, hop = self._cell.crosses, gpu.stage if direction == 0 else gpu.stage - 1
        while not crosses[hop]:
            hop += 1 if direction == 0 else -1
        return self._link(gpu.pipe, hop, direction)

    def _may_start(self, gpu: _Gpu, kind: int, soon_ms: float) -> bool:
        """Whether rule 3 lets this operation start now; if not, the GPU looks again then."""
        direction = 1 if kind == BACKWARD else 0
        chain_ms = self._chain_ms[gpu.stage][direction]
        if not self._rules.reserve or kind in (RECOMPUTE, WEIGHT) or chain_ms < 0:
            return True
        start_ms = self._links[self._exit(gpu, direction)].reserved_ms - chain_ms
        if start_ms <= soon_ms:
            return True
        heappush(self._events, (start_ms, gpu.pipe * self._stages + gpu.stage))
        return False

    def _available_ms(self, gpu: _Gpu, kind: int) -> float:
        """Since when, or from when on, the next operation of this kind could run."""
        cell, rules = self._cell, self._rules
        forwards, recomputes, backwards, weights = gpu.done
        held = forwards - backwards
        last = gpu.stage == self._stages - 1
        if kind == FORWARD:
            kept = forwards - weights if cell.split else held
            if forwards == len(gpu.inputs) or kept >= cell.caps[gpu.stage]:
                return _NEVER
            if rules.warmup and held >= rules.warmup[gpu.stage]:
                return _NEVER
            return gpu.inputs[forwards]
        if kind == WEIGHT:
            return gpu.free_ms if cell.split and weights < backwards else _NEVER
        # With `alternate`, B and its R follow only after all forwards of the warm-up.
        if rules.alternate and held < rules.warmup[gpu.stage] and forwards < cell.microbatches:
            return _NEVER
        if kind == RECOMPUTE:
            if last or recomputes > backwards or recomputes == len(gpu.expected):
                return _NEVER
            if rules.early:
                return gpu.free_ms
            return gpu.expected[recomputes] - cell.recompute_ms[gpu.stage]
        if last:
            return gpu.free_ms if backwards < forwards else _NEVER
        if backwards == recomputes or backwards == len(gpu.gradients):
            return _NEVER
        return gpu.gradients[backwards]

    def _choose(self, gpu: _Gpu, soon_ms: float, asks: bool) -> int:
        """The kind of operation that the GPU starts now, or -1; `asks` for the leave of rule 3."""
        if gpu.free_ms <= soon_ms:
            for kind in self._priority:
                if self._available_ms(gpu, kind) <= soon_ms and (
                    not asks or self._may_start(gpu, kind, soon_ms)
                ):
                    return kind
        return -1

    def _start(self, gpu: _Gpu, kind: int, now_ms: float) -> None:
        """Runs the operation, and notes its consequences."""
        cell = self._cell
        stage, microbatch = gpu.stage, gpu.done[kind]
        number = gpu.pipe * self._stages + stage
        start_ms = max(now_ms, gpu.free_ms, self._available_ms(gpu, kind))
        end_ms = start_ms + self._duration_ms[kind][stage]
        direction = 1 if kind == BACKWARD else 0
        if self._rules.reserve and kind in (FORWARD, BACKWARD):
            chain_ms = self._chain_ms[stage][direction]
            if chain_ms >= 0:
                link = self._links[self._exit(gpu, direction)]
                leaves_ms = max(link.reserved_ms, start_ms + chain_ms)
                link.reserved_ms = leaves_ms + link.transfer_ms / len(link.free_ms)
        gpu.kinds.append(kind)
        gpu.starts_ms.append(start_ms)
        gpu.done[kind] += 1
        gpu.free_ms = end_ms
        heappush(self._events, (end_ms, number))
        if kind == FORWARD and stage + 1 < self._stages:
            if cell.crosses[stage]:
                heappush(self._ready, (end_ms, gpu.pipe, stage, 0, microbatch))
            else:
                self._arrive(number + 1, 0, end_ms + cell.hop_ms[stage][0])
        elif kind == BACKWARD and stage > 0:
            before = self._gpus[number - 1]
            if cell.crosses[stage - 1]:
                heappush(self._ready, (end_ms, gpu.pipe, stage - 1, 1, microbatch))
                link = self._links[self._link(gpu.pipe, stage - 1, 1)]
                leaves_ms = max(end_ms, min(link.free_ms))
                self._expect(before, microbatch, leaves_ms + link.transfer_ms + link.latency_ms)
            else:
                arrival_ms = end_ms + cell.hop_ms[stage - 1][1]
                self._expect(before, microbatch, arrival_ms)
                self._arrive(number - 1, 1, arrival_ms)

    def _expect(self, gpu: _Gpu, microbatch: int, arrival_ms: float) -> None:
        """Notes when a gradient will come; R ends then, if it can."""
        if microbatch < len(gpu.expected):
            gpu.expected[microbatch] = arrival_ms
        else:
            gpu.expected.append(arrival_ms)
        start_ms = arrival_ms - self._cell.recompute_ms[gpu.stage]
        # It looks at the present moment at the earliest; a time in the past is one.
        heappush(self._events, (start_ms, gpu.pipe * self._stages + gpu.stage))

    def _arrive(self, number: int, direction: int, arrival_ms: float) -> None:
        gpu = self._gpus[number]
        (gpu.gradients if direction else gpu.inputs).append(arrival_ms)
        heappush(self._events, (arrival_ms, number))

    def _send(self, link: _Link, soon_ms: float) -> None:
        """Starts the waiting transfers that the link has room for."""
        while link.queue:
            free_ms = min(link.free_ms)
            if free_ms > soon_ms:
                return
            *_, pipe, microbatch, ready_ms = heappop(link.queue)
            start_ms = max(free_ms, ready_ms)
            end_ms = start_ms + link.transfer_ms
            link.free_ms[link.free_ms.index(free_ms)] = end_ms
            self._sent.append(Sent(pipe, link.hop, link.direction, microbatch, start_ms, end_ms))
            heappush(self._events, (end_ms, ~self._link(pipe, link.hop, link.direction)))
            arrival_ms = end_ms + link.latency_ms
            number = pipe * self._stages + link.hop
            if link.direction == 0:
                self._arrive(number + 1, 0, arrival_ms)
            else:
                self._expect(self._gpus[number], microbatch, arrival_ms)
                self._arrive(number, 1, arrival_ms)

    def _queue(self, soon_ms: float, links: set[int]) -> None:
        """Hands the results that are ready by now to their links."""
        turn = self._rules.turn
        while self._ready and self._ready[0][0] <= soon_ms:
            ready_ms, pipe, hop, direction, microbatch = heappop(self._ready)
            number = self._link(pipe, hop, direction)
            if turn:
                key = (microbatch // turn, pipe, microbatch)
            else:
                key = (self._moment, microbatch, pipe)
            heappush(self._links[number].queue, (*key, pipe, microbatch, ready_ms))
            links.add(number)

    def _order(self, numbers: set[int], soon_ms: float) -> list[int]:
        """The sequence in which GPUs choose, which matters where they reserve links."""
        if not self._rules.reserve:
            return sorted(numbers)
        turn = self._rules.turn or 1
        keys = []
        for number in numbers:
            gpu = self._gpus[number]
            kind = self._choose(gpu, soon_ms, asks=False)
            if kind >= 0:
                microbatch = gpu.done[kind]
                keys.append((microbatch // turn, gpu.pipe, microbatch, -gpu.stage))
        return [pipe * self._stages - stage for _, pipe, _, stage in sorted(keys)]

    def run(self) -> Scheduled:
        for gpu in self._gpus[:: self._stages]:
            gpu.inputs = [0.0] * self._cell.microbatches
        self._events = [(0.0, number) for number in range(0, len(self._gpus), self._stages)]
        now_ms = 0.0
        while self._events:
            # Events in the past are handled now.
            now_ms = max(now_ms, self._events[0][0])
            soon_ms = now_ms + self._equal_ms
            self._moment += 1
            gpus: set[int] = set()
            links: set[int] = set()
            while self._events and self._events[0][0] <= soon_ms:
                number = heappop(self._events)[1]
                if number >= 0:
                    gpus.add(number)
                else:
                    links.add(~number)
            self._queue(soon_ms, links)
            for number in sorted(links):
                self._send(self._links[number], soon_ms)
            for number in self._order(gpus, soon_ms):
                gpu = self._gpus[number]
                kind = self._choose(gpu, soon_ms, asks=True)
                if kind >= 0:
                    self._start(gpu, kind, now_ms)
        return Scheduled(
            [bytes(gpu.kinds) for gpu in self._gpus],
            [gpu.starts_ms for gpu in self._gpus],
            self._sent,
            max(gpu.free_ms for gpu in self._gpus),
        )


def schedule(cell: Problem, rules: Rules) -> Scheduled:
    """The schedule of the cell by these rules.

    Every order that comes out is complete: within a pipeline, each kind goes through the
    microbatches in turn, and so do the transfers of a hop.
    """
    # Paper: ATLAS §4.4
    return _Simulation(cell, rules).run()
