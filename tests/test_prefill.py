"""Prefills in the bubbles of a training: model, controller, real processes with faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import make_store, run_outcomes, run_ranks, wait_until
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient import faults
from torch_resilient._reports import events
from torch_resilient.pipelining import SchedulePlanned, bubbles, one_f_one_b
from torch_resilient.pipelining.bubbles import Bubbles, DueTimes
from torch_resilient.prefill import (
    Link,
    ModelPart,
    ModelShape,
    Prefilled,
    PrefillService,
    PrefillWork,
    Rejected,
    Server,
    decode,
    plain_prefill,
)
from torch_resilient.prefill.controller import Controller
from torch_resilient.prefill.controller import _Rank as Place
from torch_resilient.prefill.controller import _Run as Run
from torch_resilient.prefill.handover import Header, Kind, Message
from torch_resilient.prefill.server import read_call
from torch_resilient.prefill.signal import ChunkCosts, IdleSignal
from torch_resilient.prefill.worker import ChunkTimes

SHAPE = ModelShape(vocabulary=97, layers=4, width=32, heads=4, kv_heads=2, hidden=48)
CHUNK = 16
TOKEN = "a token of the tests"


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(SHAPE.vocabulary), k=tokens)


def whole() -> ModelPart:
    return ModelPart(SHAPE, range(SHAPE.layers))


# The model.


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_chunks_give_what_a_plain_run_gives(tokens: int) -> None:
    given = torch.tensor(prompt(tokens))
    kv, logits = plain_prefill(whole(), given, CHUNK)
    plain_kv, plain_logits = plain_prefill(whole(), given)
    torch.testing.assert_close(kv, plain_kv)
    torch.testing.assert_close(logits, plain_logits)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_cut_changes_no_bit(count: int) -> None:
    parts = [ModelPart(SHAPE, layers) for layers in SHAPE.parts(count)]
    found = {name: value for part in parts for name, value in part.state_dict().items()}
    expected = whole().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_token_sees_no_later_one() -> None:
    first, second = prompt(20), prompt(20, seed=1)
    kv, _ = plain_prefill(whole(), torch.tensor(first))
    other, _ = plain_prefill(whole(), torch.tensor([*first[:10], *second[10:]]))
    torch.testing.assert_close(kv[:, :, :10], other[:, :, :10])
    assert not torch.equal(kv[:, :, 10:], other[:, :, 10:])


def test_decoding_continues_from_keys_and_values() -> None:
    model, given = whole(), prompt(30)
    found = decode(model, *plain_prefill(model, torch.tensor(given)), 5)
    expected: list[int] = []
    for _ in range(5):
        _, logits = plain_prefill(model, torch.tensor(given + expected))
        expected.append(int(logits.argmax()))
    assert found == expected
    assert decode(model, *plain_prefill(model, torch.tensor(given)), 0) == []


def test_the_bytes_of_keys_and_values() -> None:
    """Llama-3-8B in half precision has 128 KiB for each token."""
    llama = ModelShape(128_256, 32, 4096, 32, 8, 14_336)
    assert llama.kv_bytes(1, 32, torch.float16) == 128 << 10
    kv = whole().new_kv(10)
    assert kv.shape == (4, 2, 10, 2, 8)
    assert kv.nbytes == SHAPE.kv_bytes(10, 4, torch.float32)


def test_the_times_of_chunks_are_learnt() -> None:
    times = ChunkTimes(SHAPE)
    assert times.predicted_s(0, 16) == math.inf
    for tokens in (4, 16, 8):
        times.observe(0, tokens, 0.001 + 1e-9 * SHAPE.layer_flops(0, tokens))
    expected_s = 0.001 + 1e-9 * SHAPE.layer_flops(160, 16)
    assert times.predicted_s(160, 16) == pytest.approx(expected_s)
    times = ChunkTimes(SHAPE)
    times.observe(0, 16, 0.004)  # of one size only: as if all of it were operations
    assert times.predicted_s(0, 16) == pytest.approx(0.004)
    assert times.predicted_s(0, 8) == pytest.approx(0.002, rel=0.1)


# The controller.


def windows(*spans: tuple[float, float], period_s: float = 1.0, age_s: float = 0.0) -> IdleSignal:
    """Idle windows (start, length); a chunk of 16 tokens takes 0.1 s."""
    flop_s = 0.1 / SHAPE.layer_flops(0, CHUNK)
    return IdleSignal(age_s, period_s, 0.01, ChunkCosts(0.0, flop_s), spans)


def controller(*depths: int) -> Controller:
    return Controller(SHAPE, depths, CHUNK)


def test_a_signal_is_what_it_was() -> None:
    given = windows((0.25, 0.5), (0.9, 0.1), age_s=0.3)
    assert IdleSignal.from_tensor(given.to_tensor()) == given
    for bad in ([], [0, 0, 0, 0, 0], [math.nan] * 5, [0, 1, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match="a signal"):
            IdleSignal.from_tensor(torch.tensor(bad, dtype=torch.float64))


def test_a_prefill_begins_in_the_first_window_and_continues_in_the_next_ones() -> None:
    made = controller(1)
    made.signal(0, 0, windows((0.5, 0.25)), now_s=10.0)
    found = made.place(0, CHUNK, 10.0, max_wait_s=1.0, deadline_s=20.0)
    # Four layers, two in each iteration.
    assert (found.start_s, found.end_s) == (pytest.approx(10.5), pytest.approx(11.7))
    after = made.place(1, CHUNK, 10.0, max_wait_s=3.0, deadline_s=20.0)
    assert (after.start_s, after.end_s) == (pytest.approx(12.5), pytest.approx(13.7))
    made.done(found)
    made.done(after)
    again = made.place(2, CHUNK, 10.6, max_wait_s=1.0, deadline_s=20.0)
    assert again.start_s == pytest.approx(10.6)


def test_requests_are_rejected_at_once_with_the_reason() -> None:
    made = controller(1)
    with pytest.raises(Rejected, match="no idle time is known"):
        made.place(0, CHUNK, 10.0, 1.0, 20.0)
    made.signal(0, 0, windows((0.5, 0.25)), now_s=10.0)
    with pytest.raises(Rejected, match="would wait for 500 ms, at most 400 are allowed"):
        made.place(0, CHUNK, 10.0, 0.4, 20.0)
    with pytest.raises(Rejected, match="would end 200 ms too late"):
        made.place(0, CHUNK, 10.0, 1.0, 11.5)
    made.signal(0, 0, windows((0.5, 0.1)), now_s=10.0)  # less than a chunk and the guard
    with pytest.raises(Rejected, match="no idle time"):
        made.place(0, CHUNK, 10.0, 1.0, 20.0)
    assert made.lose(0, "the training has ended") == []
    with pytest.raises(Rejected, match="no rank runs prefills: the training has ended"):
        made.place(0, CHUNK, 10.0, 1.0, 20.0)


def test_the_time_until_a_request_is_looked_at_is_part_of_its_wait() -> None:
    made = controller(1)
    made.signal(0, 0, windows((0.5, 0.25)), now_s=10.0)
    with pytest.raises(Rejected, match="would wait for 600 ms, at most 550 are allowed"):
        made.place(0, CHUNK, 10.0, max_wait_s=0.55, deadline_s=20.0, asked_s=9.9)
    found = made.place(0, CHUNK, 10.0, max_wait_s=0.65, deadline_s=20.0, asked_s=9.9)
    assert found.start_s == pytest.approx(10.5)


def test_the_pipe_that_begins_first_is_chosen() -> None:
    made = controller(1, 1, 1)
    for pipe, start_s in enumerate((0.7, 0.2, 0.4)):
        made.signal(pipe, 0, windows((start_s, 0.25)), now_s=10.0)
    pipes = [made.place(i, CHUNK, 10.0, 3.0, 20.0).pipe for i in range(4)]
    assert pipes == [1, 2, 0, 1]


def test_a_placement_looks_at_few_of_many_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    slots = Controller._slots

    def counted(self: Controller, *arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return slots(self, *arguments)

    monkeypatch.setattr(Controller, "_slots", counted)
    for seed in range(5):
        rng = random.Random(seed)
        pipes = 500
        made = controller(*[1] * pipes)
        alone = [controller(1) for _ in range(pipes)]
        for pipe in range(pipes):
            given = windows((rng.random(), rng.uniform(0.05, 0.3)), age_s=rng.random())
            made.signal(pipe, 0, given, now_s=0.0)
            alone[pipe].signal(0, 0, given, now_s=0.0)
        now_s, looks, requests = 0.0, 0, 100
        for request in range(requests):
            now_s += rng.expovariate(20.0)
            before = looks
            found = made.place(request, rng.randint(1, 3 * CHUNK), now_s, 9.0, now_s + 60)
            added = looks - before
            # No other pipe begins earlier.
            starts = []
            for each in alone:
                with contextlib.suppress(Rejected):
                    other = each.place(request, found.tokens, now_s, 99.0, now_s + 999)
                    starts.append(other.start_s)
                    if each is not alone[found.pipe]:
                        each.done(other)
            assert found.start_s == pytest.approx(min(starts)), seed
            looks = before + added
            if request % 3 == 0:
                made.done(found)
                alone[found.pipe] = controller(1)
                alone[found.pipe].signal(0, 0, given, now_s=now_s)
                made.signal(found.pipe, 0, given, now_s=now_s)
        assert looks / requests < pipes / 10, seed
        assert len(made._queue) <= 4 * pipes + 65


def test_the_ranks_of_a_pipe_follow_each_other() -> None:
    made = controller(2)
    made.signal(0, 0, windows((0.5, 0.25)), now_s=10.0)
    with pytest.raises(Rejected, match="no idle time"):
        made.place(0, CHUNK, 10.0, 1.0, 20.0)  # of one of its ranks, nothing is known
    made.signal(0, 1, windows((0.6, 0.25)), now_s=10.0)
    found = made.place(0, CHUNK, 10.0, 1.0, 20.0)
    assert (found.start_s, found.end_s) == (pytest.approx(10.5), pytest.approx(11.7))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_ranks_of_a_pipe_compute_at_the_same_time(depth: int) -> None:
    tokens = 3 * CHUNK + 5
    made = controller(depth)
    with_costs = windows((0.0, 90.0), period_s=100.0)
    for part in range(depth):
        made.signal(0, part, with_costs, now_s=10.0)
    found = made.place(0, tokens, 10.0, 1.0, 200.0)
    # The end of each part of the prompt on each rank: not before the rank ahead has computed it.
    ends_s = [10.0] * 5
    lengths_s = [
        with_costs.costs.flop_s * SHAPE.layer_flops(start, min(CHUNK, tokens - start))
        for start in range(0, tokens, CHUNK)
    ]
    for _ in range(depth):
        free_s = 10.0
        for i, length_s in enumerate(lengths_s):
            free_s = ends_s[i] = max(free_s, ends_s[i]) + length_s * SHAPE.layers / depth
    assert (found.start_s, found.end_s) == (pytest.approx(10.0), pytest.approx(ends_s[3]))
    if depth > 1:
        assert found.end_s - 10.0 < 0.9 * sum(lengths_s) * SHAPE.layers


def _plain_slot(
    signal: IdleSignal, began_s: float, now_s: float, runs: Sequence[tuple[float, float, int]]
) -> tuple[tuple[float, float], list[float]]:
    """Each chunk, one after the other, in the first window that has room for it."""

    def first_s(from_s: float, chunk_s: float) -> float:
        for period in range(math.floor((from_s - began_s) / signal.period_s), 10**6):
            for offset_s, length_s in signal.windows:
                window_s = began_s + period * signal.period_s + offset_s
                begin_s = max(window_s, from_s)
                if begin_s + chunk_s <= window_s + length_s - signal.guard_s:
                    return begin_s
        raise AssertionError("no window")

    starts_s, ends_s = [], []
    for ready_s, chunk_s, left in runs:
        for _ in range(left):
            starts_s.append(first_s(max(now_s, ready_s), chunk_s))
            now_s = starts_s[-1] + chunk_s
        ends_s.append(now_s)
    return (starts_s[0] if starts_s else now_s, now_s), ends_s


def test_runs_of_chunks_take_the_place_that_each_chunk_would() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        spans, at_s = [], 0.0
        for _ in range(rng.randint(1, 5)):
            at_s += rng.uniform(0.0, 0.1)
            spans.append((at_s, rng.uniform(0.03, 0.2)))
            at_s += spans[-1][1]
        signal = windows(*spans, period_s=at_s + 0.1)
        rank = Place()
        rank.take(signal, 10.0)
        done = rng.randint(0, 2)  # runs of which nothing is left
        runs = [
            Run(
                rng.choice([0.0, rng.uniform(10.0, 14.0)]) if i >= done else 0.0,
                rng.uniform(0.001, max(length for _, length in spans) - 0.011),
                rng.randint(1, 9) if i >= done else 0,
            )
            for i in range(done + rng.randint(0, 4))
        ]
        now_s = rng.uniform(10.0, 12.0)
        found = rank.slot(now_s, runs)
        assert found is not None
        expected, ends_s = _plain_slot(signal, 10.0, now_s, runs)
        assert tuple(found[0]) == pytest.approx(expected), seed
        assert found[1] == pytest.approx(ends_s), seed


def test_a_late_chunk_that_fits_no_window_is_known_at_once() -> None:
    rank = Place()
    rank.take(windows((0.5, 0.25)), 10.0)
    assert rank.slot(10.0, [Run(0.0, 0.1, 3), Run(0.0, 0.25, 1)]) is None
    assert rank.slot(10.0, [Run(0.0, 0.25, 0), Run(0.0, 0.1, 3), Run(0.0, 0.2, 1)]) is not None


@pytest.mark.parametrize("chunk_tokens", [0, 513])
def test_a_chunk_has_1_to_512_tokens(chunk_tokens: int) -> None:
    link: Any = _Recorded()
    with pytest.raises(ValueError, match=f"expected 1 to 512, got {chunk_tokens}"):
        PrefillWork(whole(), Bubbles(0), link, chunk_tokens=chunk_tokens)
    with pytest.raises(ValueError, match=f"expected 1 to 512, got {chunk_tokens}"):
        PrefillService(dist.HashStore(), SHAPE, torch.float32, [], chunk_tokens=chunk_tokens)


def test_a_pipe_has_at_most_as_many_ranks_as_the_model_has_layers() -> None:
    with pytest.raises(ValueError, match="a pipe of 5 ranks for 4 layers"):
        controller(1, 5)


class _Recorded:
    """A link that gives messages and keeps what is sent."""

    lost = ""
    name = "recorded"

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.sent: list[tuple[Kind, tuple[int, ...]]] = []
        self.texts: list[str] = []
        self.works: list[Any] = []

    def poll(self) -> list[Message]:
        given, self._messages = self._messages, []
        return given

    def send(self, kind: Kind, request: int = 0, payload: Any = None, *numbers: int) -> list[Any]:
        self.sent.append((kind, numbers))
        return self.works

    def send_text(self, kind: Kind, request: int, text: str) -> None:
        self.texts.append(text)


def prompted(tokens: Tensor, request: int = 7) -> Message:
    """A message with a prompt."""
    return Message(Header(Kind.PROMPT, request, (0, 0, 0), tokens.dtype, (len(tokens),)), tokens)


def test_the_next_rank_gets_the_first_tokens_before_the_others_are_computed() -> None:
    decoder, after = _Recorded(prompted(torch.tensor(prompt(CHUNK + 1)))), _Recorded()
    links: Any = (decoder, after)
    work = PrefillWork(
        ModelPart(SHAPE, range(2)), Bubbles(8 << 20), links[0], after=links[1], chunk_tokens=CHUNK
    )
    passed_on = []
    while (chunk := work.next_chunk(math.inf)) is not None:
        with torch.no_grad():
            chunk.run()
        passed_on.append(len(after.sent))
    assert passed_on == [0, 1, 1, 2]
    assert [numbers for _, numbers in after.sent] == [(0, CHUNK + 1), (CHUNK, CHUNK + 1)]
    layers = [(0, 0), (1, 0), (0, CHUNK), (1, CHUNK)]
    assert decoder.sent == [(Kind.KV, each) for each in layers]


def test_memory_is_in_use_until_the_next_rank_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr("torch_resilient.prefill.worker.ended", lambda work: work in left)
    again = prompted(torch.tensor(prompt(3)))
    decoder, after, made = _Recorded(prompted(torch.tensor(prompt(CHUNK)))), _Recorded(), Bubbles(1)
    made.memory.total_bytes = 8 << 20
    after.works = ["outputs"]
    links: Any = (decoder, after)
    work = PrefillWork(
        ModelPart(SHAPE, range(2)), made, links[0], after=links[1], chunk_tokens=CHUNK
    )
    while (chunk := work.next_chunk(math.inf)) is not None:
        assert made.memory.used_bytes > 2 * CHUNK * SHAPE.width * 4
        chunk.run()
    assert made.memory.used_bytes > 2 * CHUNK * SHAPE.width * 4
    decoder._messages.append(again)  # its number is still in use
    assert work.next_chunk(math.inf) is None
    assert decoder.texts == ["its number is in use"]
    left.append("outputs")
    assert work.next_chunk(math.inf) is None
    assert made.memory.used_bytes == 0


@pytest.mark.parametrize(
    "tokens", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1, 97])]
)
def test_a_prompt_that_is_none_is_refused(tokens: Tensor) -> None:
    decoder = _Recorded(prompted(tokens), prompted(torch.tensor([1, -1])))
    link: Any = decoder
    work = PrefillWork(whole(), Bubbles(8 << 20), link, chunk_tokens=CHUNK)
    assert work.next_chunk(math.inf) is None
    assert len(decoder.texts) == 2
    assert all(text.startswith("a prompt ") for text in decoder.texts)


def test_a_plan_that_changes_breaks_the_promises_that_it_cannot_keep() -> None:
    made = controller(1)
    made.signal(0, 0, windows((0.5, 0.25)), now_s=10.0)
    begun = made.place(0, CHUNK, 10.0, 1.0, 20.0)
    patient = made.place(1, CHUNK, 10.0, 9.0, 20.0)
    hasty = made.place(2, CHUNK, 10.0, 5.0, 20.0)

    def signals(count: int, *spans: tuple[float, float]) -> list[Any]:
        return [made.signal(0, 0, windows(*spans), now_s=10.55) for _ in range(count)]

    # The first one has begun. From now on, the windows are half as long.
    made.chunk_done(begun, 0)
    assert signals(2, (0.5, 0.12)) == [[], []]
    assert signals(1, (0.5, 0.25)) == [[]]  # it was one odd iteration
    assert signals(3, (0.5, 0.12)) == [[], [], [hasty]]
    # They vanish: what has begun waits for its deadline.
    assert signals(3) == [[], [], [patient]]
    assert made.lose(0, "gone") == [begun]


def test_random_placements_never_overlap_and_keep_their_windows() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        made = controller(1)
        spans = [(0.1, rng.uniform(0.12, 0.3)), (0.6, rng.uniform(0.12, 0.3))]
        made.signal(0, 0, windows(*spans), now_s=0.0)
        now_s, last_end_s = 0.0, -math.inf
        for request in range(40):
            now_s += rng.expovariate(1.0)
            try:
                found = made.place(request, rng.randint(1, 40), now_s, 4.0, now_s + 60)
            except Rejected:
                continue
            assert now_s <= found.start_s <= now_s + 4.0, seed
            assert found.start_s >= last_end_s, seed
            last_end_s = found.end_s
            for moment_s in (found.start_s, found.end_s):
                phase_s = moment_s % 1.0
                assert any(a - 1e-9 <= phase_s <= a + n - 0.01 + 1e-9 for a, n in spans), seed


# Real processes: two ranks train, a third one decodes.

TRAINERS = 2
MICROBATCHES = 4
WIDTH = 8
PACE_S = 0.015
MAX_TOKENS = 200


class Paced(nn.Module):
    """A stage that takes its time, so that the other one waits."""

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PACE_S)
        return torch.tanh(self.linear(x))


class Eager(DueTimes):
    """Lets chunks run in every wait: on a busy machine, none might be safe enough."""

    def predicted_s(self, place: Hashable) -> float:
        return 10.0

    def observe(self, place: Hashable, waited_s: float) -> None:
        pass


class Trainer:
    """One of two ranks of a pipeline. Another process may end the training through the store."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        dist.init_process_group(
            "resilient", store=make_store("train"), rank=rank, world_size=TRAINERS
        )
        self.store = make_store("prefill")
        self.module = Paced(rank)
        stage = PipelineStage(self.module, rank, TRAINERS, torch.device("cpu"))
        orders = one_f_one_b(TRAINERS, MICROBATCHES)
        self.schedule = SchedulePlanned(stage, MICROBATCHES, nn.functional.mse_loss, orders=orders)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.losses: list[str] = []
        self.bubbles = self.schedule.bubbles = Bubbles(8 << 20)
        self.bubbles._due = Eager()
        # Only in this process: a chunk may be held up for 0.2 s, as on a busy machine.
        bubbles._MIN_JUDGED_S = 0.02
        self.step_count = 0

    def work(self, name: str, **more: Any) -> PrefillWork:
        """A worker with a link of that name."""
        made = PrefillWork(
            more.pop("model", None) or whole(),
            self.bubbles,
            Link(self.store, name, 1, 1 << 20),
            max_tokens=MAX_TOKENS,
            chunk_tokens=CHUNK,
            **more,
        )
        self.bubbles.add(made)
        return made

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.step_count)
        x, target = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target, losses=losses)
            self.losses.append(float(sum(losses)).hex())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_count += 1

    def run(self, steps: int | None = None, until: str = "stop") -> None:
        """`steps` steps, or until the store has that key."""
        while steps is None or steps > 0:
            self.step()
            if steps is not None:
                steps -= 1
                continue
            stop = torch.zeros(1)
            if self.rank == 0 and self.store.check([until]):
                stop += 1
            dist.broadcast(stop, 0)
            if stop:
                return

    def weights(self) -> list[list[float]]:
        return [each.flatten().tolist() for each in self.module.parameters()]


def service_of(*pipes: Sequence[str]) -> PrefillService:
    return PrefillService(
        make_store("prefill"),
        SHAPE,
        torch.float32,
        pipes,
        max_tokens=MAX_TOKENS,
        chunk_tokens=CHUNK,
    )


def accepted(service: PrefillService, tokens: list[int], **more: Any) -> Future[Prefilled]:
    """A request that is accepted: until the workers have told about their idle time, none is."""
    found: list[Future[Prefilled]] = []

    def ask() -> bool:
        before = service.stats.accepted
        future = service.submit(tokens, **{"max_wait_s": 20.0, **more})
        wait_until(lambda: future.done() or service.stats.accepted > before, "an answer")
        found.append(future)
        return service.stats.accepted > before

    wait_until(ask, "a request is accepted")
    return found[-1]


def stop_training() -> None:
    make_store("prefill").set("stop", "1")


def reason_of(future: Future[Prefilled]) -> str:
    """Why a request ended without a result."""
    error = future.exception(timeout=20)
    assert isinstance(error, Rejected), error
    return str(error)


def farewell(rank: int) -> Any:
    """Rank 0 says why it leaves; rank 1 is busy with something else, and reads later."""
    link = Link(make_store("prefill"), "p0", rank, 1 << 20)
    if rank == 0:
        link.send_text(Kind.END, 0, "over")
        link.close_later()  # and the process ends
        return None
    time.sleep(0.5)
    link.send(Kind.SIGNAL)  # it would fail if rank 0 had left
    time.sleep(0.1)
    texts: list[str] = []

    def poll() -> bool:
        texts.extend(message.text for message in link.poll())
        return bool(link.lost)

    wait_until(poll, "the link is lost")
    return texts, link.lost


def test_the_reason_of_an_end_is_read_before_the_link_is_lost() -> None:
    assert run_ranks(farewell, init=False)[1] == (["over"], "over")


STEPS = 6
LENGTHS = (1, 50, 200)


def train_beside(rank: int, prefills: bool, depth: int) -> Any:
    """Trains, with prefills or without."""
    if rank == TRAINERS:
        return serve_beside(depth) if prefills else None
    trainer = Trainer(rank)
    if prefills:
        if depth == 1:
            trainer.work(f"p{rank}")
        else:
            between = Link(trainer.store, "between", rank, 1 << 20)
            trainer.work(
                f"p{rank}",
                model=ModelPart(SHAPE, SHAPE.parts(2)[rank]),
                **{"after" if rank == 0 else "before": between},
            )
    trainer.run(STEPS)
    result = trainer.losses[:], trainer.weights()
    if prefills:
        trainer.run()
        trainer.bubbles.close()
    dist.destroy_process_group()
    return result, trainer.bubbles.stats().chunks, dict(trainer.bubbles.suspended)


def serve_beside(depth: int) -> Any:
    service = service_of(["p0"], ["p1"]) if depth == 1 else service_of(["p0", "p1"])
    futures = [accepted(service, prompt(length, length)) for length in LENGTHS]
    found = [future.result(timeout=30) for future in futures]
    results = [(each.kv.numpy(), each.logits.numpy()) for each in found]
    tokens = [decode(whole(), each.kv, each.logits, 3) for each in found]
    stop_training()
    service.close()
    return results, tokens, service.stats


@pytest.mark.parametrize("depth", [1, 2])
def test_training_and_prefills_have_the_bits_that_they_have_alone(depth: int) -> None:
    *plain, _ = run_ranks(train_beside, False, depth, world_size=TRAINERS + 1, init=False)
    *trainers, served = run_ranks(train_beside, True, depth, world_size=TRAINERS + 1, init=False)
    assert [each[0] for each in plain] == [each[0] for each in trainers]
    assert sum(chunks for _, chunks, _ in trainers) > 0
    assert [suspended for *_, suspended in trainers] == [{}, {}]
    results, tokens, stats = served
    assert stats.finished == stats.accepted == len(LENGTHS)
    for i, (kv, logits) in enumerate(results):
        given = torch.tensor(prompt(LENGTHS[i], LENGTHS[i]))
        expected_kv, expected_logits = plain_prefill(whole(), given, CHUNK)
        assert torch.equal(torch.from_numpy(kv), expected_kv)
        assert torch.equal(torch.from_numpy(logits), expected_logits)
        assert tokens[i] == decode(whole(), *plain_prefill(whole(), given), 3)


# Failures: training never fails nor waits, and requests end with a reason.


def with_fault(rank: int, front: str, fault: str) -> Any:
    """Rank 0 prefills, with a fault; rank 2 runs the function `front`."""
    if rank == TRAINERS:
        return globals()[front]()
    trainer = Trainer(rank)
    links = []
    if rank == 0:
        work = trainer.work("p0")
        links = [work._decoder]
        if fault == "second link":
            trainer.work("q0")
        elif fault:
            work._model.layer = globals()[fault]  # type: ignore[method-assign]
    if front == "die_in_mid_handover":
        lost = torch.zeros(1)
        while not lost:
            trainer.step()
            lost = torch.tensor([float(any(link.lost for link in links))])
            dist.all_reduce(lost)
        trainer.run(3)
    else:
        trainer.run()
    jobs = len(work._jobs) if rank == 0 else 0
    used = trainer.bubbles.memory.used_bytes
    trainer.bubbles.close()
    dist.destroy_process_group()
    told = [each.text for each in events.recent() if each.kind == "bubble_work_suspended"]
    return trainer.step_count, jobs, used, told


def run_fault(front: str, fault: str = "") -> tuple[Any, Any]:
    """Returns the results of rank 0 and of the front."""
    first, _, last = run_ranks(with_fault, front, fault, world_size=TRAINERS + 1, init=False)
    return first, last


def die_in_mid_handover() -> None:
    service = service_of(["p0"])
    take = service._take

    def dying(pipe: int, part: int, message: Any) -> None:
        if message.header.kind is Kind.KV:
            os.kill(os.getpid(), signal.SIGKILL)
        take(pipe, part, message)

    service._take = dying  # type: ignore[method-assign]
    accepted(service, prompt(200)).result()


def test_a_decoder_that_dies_in_mid_handover_ends_only_its_requests() -> None:
    outcomes = run_outcomes(
        with_fault, "die_in_mid_handover", "", world_size=TRAINERS + 1, init=False
    )
    assert [each.ok for each in outcomes] == [True, True, False]
    steps, jobs, used, told = outcomes[0].value
    assert steps > 3
    assert jobs == 0
    assert used == whole().memory_bytes  # nothing of the request is left
    assert told == []


def go_away() -> Any:
    service = service_of(["p0"])
    future = accepted(service, prompt(200))
    service.cancel(future)
    reason = reason_of(future)
    accepted(service, prompt(5)).result(timeout=30)
    stop_training()
    service.close()
    return reason


def test_a_client_that_goes_away_stops_its_prefill() -> None:
    (_, jobs, used, _), reason = run_fault("go_away")
    assert reason == "the client has gone"
    assert jobs == 0
    assert used == whole().memory_bytes


def restart() -> Any:
    first = service_of(["p0"])
    future = accepted(first, prompt(200))
    first.close("killed")
    reasons = reason_of(future), reason_of(first.submit(prompt(3)))
    second = service_of(["q0"])
    found = accepted(second, prompt(20)).result(timeout=30)
    stop_training()
    second.close()
    return reasons, decode(whole(), found.kv, found.logits, 3)


def test_another_controller_takes_over() -> None:
    _, (reasons, tokens) = run_fault("restart", "second link")
    assert reasons == ("killed", "killed")
    assert tokens == decode(whole(), *plain_prefill(whole(), torch.tensor(prompt(20))), 3)


def failing(*arguments: Any) -> Tensor:
    raise ValueError(f"secret: {arguments}")


def slow(index: int, x: Tensor, kv: Tensor, start: int) -> Tensor:
    time.sleep(0.3)
    return x


def fail_at_the_worker() -> Any:
    service = service_of(["p0"])
    reason = reason_of(accepted(service, prompt(50)))

    def told() -> str:
        return reason_of(service.submit(prompt(3)))

    wait_until(lambda: "suspended" in told(), "the service knows of it")
    after = told()
    stop_training()
    service.close()
    return reason, after


def test_a_prefill_that_raises_suspends_the_work_and_tells_no_prompt() -> None:
    (steps, jobs, used, told), (reason, after) = run_fault("fail_at_the_worker", "failing")
    assert reason == "ValueError in layer 0"
    assert after == "no rank runs prefills: suspended: RuntimeError: ValueError in layer 0"
    assert told == [f"work in bubbles: prefill is {after.partition(': ')[2]}"]
    assert steps > 0
    assert jobs == 0
    assert used == 0


def test_a_chunk_that_takes_ten_times_its_prediction_suspends_the_work() -> None:
    (steps, jobs, _, told), (reason, after) = run_fault("fail_at_the_worker", "slow")
    assert reason.startswith("suspended: a chunk took 3")
    assert reason in after
    (event,) = told
    assert event.startswith("work in bubbles: prefill is suspended: a chunk took 3")
    assert steps > 0
    assert jobs == 0


def training_ends() -> Any:
    service = service_of(["p0"])
    futures = [accepted(service, prompt(200, seed)) for seed in range(8)]
    stop_training()
    reasons = {reason_of(each) for each in futures if each.exception(timeout=20) is not None}
    # The requests may have ended before the service knows that all have.
    wait_until(
        lambda: "no rank runs prefills" in reason_of(service.submit(prompt(3))), "the service knows"
    )
    later = reason_of(service.submit(prompt(3)))
    service.close()
    return reasons, later


def test_a_training_that_ends_ends_open_requests() -> None:
    (_, _, _, told), (reasons, later) = run_fault("training_ends")
    assert reasons <= {"the training has ended"}
    assert later == "no rank runs prefills: the training has ended"
    assert told == []


def pretended_worker(rank: int) -> Any:
    """Rank 0 pretends to be a worker whose bubbles vanish after it has been given a request."""
    if rank == 1:
        service = service_of(["p0"])
        reason = reason_of(accepted(service, prompt(20)))
        refused = reason_of(service.submit(prompt(3)))
        service.close()
        return reason, refused
    link = Link(make_store("prefill"), "p0", 1, 1 << 20)
    kinds: list[Kind] = []

    def poll() -> bool:
        kinds.extend(message.header.kind for message in link.poll())
        spans = [] if Kind.PROMPT in kinds else [(5.0, 0.25)]
        link.send(Kind.SIGNAL, 0, windows(*spans, period_s=10.0).to_tensor())
        time.sleep(0.01)
        return Kind.CANCEL in kinds

    wait_until(poll, "the request is cancelled")
    wait_until(lambda: poll() and bool(link.lost), "the service ends")
    return kinds[:2]


def test_a_plan_that_changes_under_a_reservation_ends_the_request() -> None:
    kinds, (reason, refused) = run_ranks(pretended_worker, init=False)
    assert reason == "the idle time for it has vanished"
    assert refused == "no idle time is known in which it fits"
    assert kinds == [Kind.PROMPT, Kind.CANCEL]


DELAY_S = 0.08
LONG_CHUNK_S = 0.03  # fits into the bubbles of a link with that delay, not into those without


class LongChunks(ModelPart):
    def layer(self, index: int, x: Tensor, kv: Tensor, start: int) -> Tensor:
        time.sleep(LONG_CHUNK_S)
        return super().layer(index, x, kv, start)


def train_while_the_link_heals(rank: int) -> Any:
    if rank == TRAINERS:
        return serve_while_the_link_heals()
    trainer = Trainer(rank)
    trainer.bubbles._due = DueTimes()
    if rank == 0:
        trainer.work("p0", model=LongChunks(SHAPE, range(SHAPE.layers)))
    with faults.delay(DELAY_S, peer=1 - rank):
        trainer.run(until="healed")
    steps, chunks = trainer.step_count, trainer.bubbles.stats().chunks
    trainer.run()
    trainer.bubbles.close()
    dist.destroy_process_group()
    return trainer.step_count - steps, chunks, dict(trainer.bubbles.suspended)


def serve_while_the_link_heals() -> Any:
    service = service_of(["p0"])
    accepted(service, prompt(5)).result(timeout=30)
    # Each is some seconds of chunks: the last one cannot have begun.
    futures = [accepted(service, prompt(200, seed), timeout_s=8.0) for seed in range(3)]
    make_store("prefill").set("healed", "1")
    reasons = [reason_of(each) for each in futures]
    refused = reason_of(service.submit(prompt(3)))
    stop_training()
    service.close()
    return reasons, refused


def test_a_link_that_heals_takes_the_bubbles_with_it() -> None:
    (steps, chunks, suspended), _, (reasons, refused) = run_ranks(
        train_while_the_link_heals, world_size=TRAINERS + 1, init=False
    )
    assert chunks > 0
    assert steps > 10
    assert suspended == {}
    assert reasons[1:] == ["the idle time for it has vanished"] * 2
    assert refused == "no idle time is known in which it fits"


def strange_worker(rank: int, kind: Kind, sent: Sequence[tuple[Tensor, int, int]]) -> Any:
    """Rank 0 sends what a worker does not: payload, layer, first token."""
    if rank == 1:
        service = service_of(["p0"])
        reason = reason_of(accepted(service, prompt(20)))
        service.close()
        return reason
    link = Link(make_store("prefill"), "p0", 1, 1 << 20)
    link.send(Kind.SIGNAL, 0, windows((5.0, 0.25), period_s=10.0).to_tensor())
    seen: list[int] = []

    def prompted() -> bool:
        seen.extend(message.header.request for message in link.poll())
        return bool(seen)

    wait_until(prompted, "a prompt comes")
    for payload, layer, start in sent:
        link.send(kind, seen[0], payload, layer, start)
    wait_until(lambda: link.poll() is None or bool(link.lost), "the service ends the link")
    return None


_CHUNK_KV = torch.zeros(2, CHUNK, 2, 8)


@pytest.mark.parametrize(
    ("kind", "sent", "text"),
    [
        (Kind.KV, [(torch.zeros(2, 21, 2, 8), 0, 0)], "a payload of (2, 21, 2, 8)"),
        (Kind.KV, [(_CHUNK_KV, SHAPE.layers, 0)], "layer 4 from token 0 of request"),
        (Kind.KV, [(_CHUNK_KV, 0, 1)], "layer 0 from token 1 of request"),
        (Kind.KV, [(_CHUNK_KV, -1, 0)], "layer -1 from token 0 of request"),
        (Kind.KV, [(_CHUNK_KV, 0, 0)] * 2, "layer 0 from token 0 of request"),
        (Kind.LOGITS, [(torch.zeros(SHAPE.vocabulary), 0, 0)] * 2, "the logits of request"),
        (Kind.FAILED, [(torch.zeros(2), 0, 0)], "TypeError in what p0 has sent"),
    ],
)
def test_a_message_that_no_worker_sends_ends_the_pipe(
    kind: Kind, sent: list[tuple[Tensor, int, int]], text: str
) -> None:
    _, reason = run_ranks(strange_worker, kind, sent, init=False)
    assert text in reason


# The server.


class Service:
    """Stands for a PrefillService."""

    shape = SHAPE
    max_tokens = MAX_TOKENS

    def __init__(self) -> None:
        self.cancelled: list[Any] = []
        self.pending: list[Future[Prefilled]] = []
        self.answer: Callable[[Future[Prefilled], list[int]], None] = self.prefill

    def prefill(self, future: Future[Prefilled], tokens: list[int]) -> None:
        future.set_result(Prefilled(*plain_prefill(whole(), torch.tensor(tokens)), 0.02, 0.01))

    def submit(self, tokens: list[int], max_wait_s: float, timeout_s: float) -> Future[Prefilled]:
        if not tokens or not all(type(each) is int and 0 <= each < 97 for each in tokens):
            raise ValueError("tokens: expected integers from 0 to 96")
        future: Future[Prefilled] = Future()
        self.pending.append(future)
        self.answer(future, tokens)
        return future

    def cancel(self, future: Future[Prefilled]) -> None:
        self.cancelled.append(future)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def server(service: Service) -> Any:
    made = Server(service, whole(), TOKEN)  # type: ignore[arg-type]
    yield made
    made.close()


def post(
    server: Server, body: bytes, token: str = TOKEN, path: str = "/v1/generate"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_server_answers_with_tokens(server: Server) -> None:
    given = prompt(10)
    body = json.dumps({"tokens": given, "max_new_tokens": 4}).encode()
    expected = decode(whole(), *plain_prefill(whole(), torch.tensor(given)), 4)
    answer = {"tokens": expected, "ttft_ms": 20.0, "waited_ms": 10.0}
    assert post(server, body) == (200, answer)


def test_a_rejection_is_told_with_its_reason(server: Server, service: Service) -> None:
    service.answer = lambda future, _: future.set_exception(Rejected("no idle time"))
    assert post(server, b'{"tokens": [1]}') == (503, {"rejected": "no idle time"})


def test_only_callers_with_the_token_are_served(server: Server, service: Service) -> None:
    for token in ("", "wrong", TOKEN + "x", "\xff"):
        assert post(server, b'{"tokens": [1]}', token)[0] == 401
    assert service.pending == []
    with pytest.raises(ValueError, match="at least 16"):
        Server(service, whole(), "short")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "at most"),
        (b"[]", "expected an object"),
        (b"{}", "expected an object"),
        (b'{"tokens": 1}', "tokens: expected a list"),
        (b'{"tokens": [1.5]}', "tokens: expected integers"),
        (b'{"tokens": [true]}', "tokens: expected integers"),
        (b'{"tokens": [97]}', "tokens: expected integers"),
        (b'{"tokens": [1], "max_new_tokens": 0}', "max_new_tokens"),
        (b'{"tokens": [1], "max_wait_ms": NaN}', "max_wait_ms"),
        (b'{"tokens": [1], "timeout_ms": 1e99}', "timeout_ms"),
        (b'{"tokens": [1], "prompt": "secret"}', "expected only the fields"),
    ],
)
def test_input_is_bounded_and_checked(server: Server, body: bytes, text: str) -> None:
    status, answer = post(server, body)
    assert status in (400, 413)
    assert text in answer["error"]
    assert "secret" not in answer["error"]


def test_other_paths_and_requests_without_a_length(server: Server) -> None:
    assert post(server, b"{}", path="/stats")[0] == 404
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(
            f"POST /v1/generate HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        assert b" 411 " in client.recv(100)


def test_random_bodies_are_refused_or_read() -> None:
    rng = random.Random(5)
    body = json.dumps(
        {"tokens": [1, 22, 3], "max_new_tokens": 4, "max_wait_ms": 5, "timeout_ms": 60.5}
    ).encode()
    read = 0
    for _ in range(20_000):
        changed = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(changed))
            choice = rng.randrange(3)
            if choice == 0:
                changed[place] = rng.randrange(256)
            elif choice == 1:
                del changed[place]
            else:
                changed[place:place] = rng.choice([b"[", b"]", b"{", b'"', b",", b"1e9", b"null"])
        with contextlib.suppress(ValueError):
            read_call(bytes(changed))
            read += 1
    assert 0 < read < 20_000


def test_a_client_that_closes_its_connection_is_noticed(server: Server, service: Service) -> None:
    service.answer = lambda future, tokens: None  # never
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        body = b'{"tokens": [1]}'
        head = f"POST /v1/generate HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(service.pending) == 1, "the request is there")
    wait_until(lambda: service.cancelled == service.pending, "its prefill is cancelled")


def test_no_thread_is_left(service: Service) -> None:
    before = set(threading.enumerate())
    made = Server(service, whole(), TOKEN)  # type: ignore[arg-type]
    assert post(made, b'{"tokens": [1]}')[0] == 200
    made.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")
