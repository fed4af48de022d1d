"""Prefills as work in bubbles: one rank's part of the model, one layer of some tokens at a time.

The first tokens of a prompt go through all layers of a rank, then the next ones. Keys and values
leave while the next chunk is computed. If the model is cut over several ranks, each begins as soon
as the one before has computed the first tokens: all of them work on one prompt at a time. The
chunks of a prompt depend on its length only: results have the same bits in every run, whatever the
training does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torch_resilient.pipelining.bubbles import Bubbles, BubbleWork, Chunk
from torch_resilient.prefill.handover import Kind, Link, Message, ended
from torch_resilient.prefill.model import ModelPart, ModelShape, check_chunk_tokens
from torch_resilient.prefill.signal import ChunkCosts, IdleSignal

# Chunks of one kind follow each other, one for each layer. The last kinds count, with few samples
# each: enough for a change of the machine's speed to show soon.
_KINDS = 32
_SAMPLES = 2
_CALIBRATIONS = 3
# Requests that were cancelled; of older ones nothing is under way any more.
_CANCELLED = 1000


class ChunkTimes:
    """The time of a chunk: a base, and a time for each floating-point operation, by least squares
    over the last chunks of several kinds: the tokens of a chunk, and those before it."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        # By (start, tokens), the kind that was observed last at the end.
        self._kinds: dict[tuple[int, int], deque[float]] = {}

    def observe(self, start: int, tokens: int, took_s: float) -> None:
        times_s = self._kinds.pop((start, tokens), None) or deque(maxlen=_SAMPLES)
        times_s.append(took_s)
        self._kinds[start, tokens] = times_s
        if len(self._kinds) > _KINDS:
            del self._kinds[next(iter(self._kinds))]

    def predicted_s(self, start: int, tokens: int) -> float:
        costs = self.costs()
        return costs.base_s + costs.flop_s * self._shape.layer_flops(start, tokens)

    def costs(self) -> ChunkCosts:
        samples = [
            (self._shape.layer_flops(*kind), took_s)
            for kind, times_s in self._kinds.items()
            for took_s in times_s
        ]
        count = len(samples)
        if not count:
            return ChunkCosts(math.inf, math.inf)
        mean_flops = math.fsum(flops for flops, _ in samples) / count
        mean_s = math.fsum(took_s for _, took_s in samples) / count
        spread = math.fsum((flops - mean_flops) ** 2 for flops, _ in samples)
        common = math.fsum((flops - mean_flops) * (took_s - mean_s) for flops, took_s in samples)
        # Chunks of one size only: all of their time may be due to their operations.
        slope_s = common / spread if spread > (1e-3 * mean_flops) ** 2 * count else math.inf
        slope_s = min(max(slope_s, 0.0), mean_s / mean_flops)
        return ChunkCosts(max(mean_s - slope_s * mean_flops, 0.0), slope_s)


class _Job:
    """A request on this rank."""

    def __init__(self, request: int, model: ModelPart, tokens: int, chunk: int) -> None:
        self.request = request
        self.tokens = tokens
        self.prompt: Tensor | None = None
        self.kv = model.new_kv(tokens)
        # The input of the next layer, overwritten by its output.
        self.hidden = torch.empty(tokens, model.shape.width, dtype=model.dtype, device=model.device)
        self.received = 0  # tokens whose input of the first layer is there
        self.start = 0  # the next chunk's first token, and its layer
        self.layer = 0
        self._chunk = chunk

    @property
    def count(self) -> int:
        """The tokens of the next chunk."""
        return min(self._chunk, self.tokens - self.start)

    @property
    def runnable(self) -> bool:
        return self.layer > 0 or self.received >= self.start + self.count


class PrefillWork(BubbleWork):
    """Computes prefills with one part of the model. Thread: the one that runs the schedule.

    Args:
        model: this rank's layers. Its device is that of the training.
        bubbles: to which it is added; requests take their memory from its budget.
        decoder: the link to the process that decodes. Its end here is 1.
        before, after: links to the ranks with the layers before and after these; None at the ends.
        max_tokens: of a prompt.
        max_requests: at a time; more are refused.
        chunk_tokens: the largest number of tokens of a chunk, at most 512. It must be the same on
            all ranks of the model, and that of the service.

    Prompts, and what is computed from them, are neither logged nor part of an error's text.
    """

    name = "prefill"

    def __init__(
        self,
        model: ModelPart,
        bubbles: Bubbles,
        decoder: Link,
        *,
        before: Link | None = None,
        after: Link | None = None,
        max_tokens: int = 8192,
        max_requests: int = 16,
        chunk_tokens: int = 512,
    ) -> None:
        check_chunk_tokens(chunk_tokens)
        self.memory_bytes = model.memory_bytes
        self._model = model
        self._bubbles = bubbles
        self._decoder = decoder
        self._before = before
        self._after = after
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._chunk_tokens = min(chunk_tokens, max_tokens)
        self._times = ChunkTimes(model.shape)
        self._jobs: dict[int, _Job] = {}
        # Messages of ended jobs: their memory is in use until they have left.
        self._leaving: dict[int, tuple[int, list[dist.Work]]] = {}
        # Outputs of the rank before may come later.
        self._cancelled = deque[int](maxlen=_CANCELLED)
        self._told: object = None
        self._calibrate()

    def next_chunk(self, end_s: float) -> Chunk | None:
        self.poll()
        for job in self._jobs.values():
            if job.runnable:
                predicted_s = self._times.predicted_s(job.start, job.count)
                return Chunk(predicted_s, partial(self._run, job))
        return None

    def stop(self, reason: str) -> None:
        for request in list(self._jobs):
            self._fail(request, reason)
        self._bubbles.memory.give_back(sum(size for size, _ in self._leaving.values()))
        self._leaving.clear()
        self._decoder.send_text(Kind.END, 0, reason)
        for link in self._links():
            link.close_later()  # the training may go on

    def poll(self) -> None:
        """Takes what has come, without waiting, and sends a signal about the last iteration.

        The bubbles call this; a program may, too, while no iteration runs.
        """
        for link in self._links():
            for message in link.poll():
                self._take(message)
        if any(link.lost for link in self._links()):
            self._abandon()
        for request, (size, works) in list(self._leaving.items()):
            if self._decoder.lost or all(map(ended, works)):
                self._bubbles.memory.give_back(size)
                del self._leaving[request]
        last = self._bubbles.last_iteration
        if last is not None and last is not self._told:
            self._told = last
            signal = IdleSignal(
                time.monotonic() - last.start_s,
                last.period_s,
                self._bubbles.guard_s,
                self._times.costs(),
                last.windows,
            )
            self._decoder.send(Kind.SIGNAL, 0, signal.to_tensor())

    def _links(self) -> Iterator[Link]:
        return (each for each in (self._decoder, self._before, self._after) if each is not None)

    def _take(self, message: Message) -> None:
        kind, request, (start, tokens, _), _, _ = message.header
        payload = message.payload
        if kind is Kind.PROMPT and self._before is None:
            # A number that is no token would end the whole process on a GPU.
            vocabulary = self._model.shape.vocabulary
            if payload.dtype != torch.int64 or payload.dim() != 1:
                self._refuse(request, "a prompt is a list of tokens")
            elif bool(((payload < 0) | (payload >= vocabulary)).any()):
                self._refuse(request, f"a prompt has tokens from 0 to {vocabulary - 1}")
            elif (job := self._begin(request, len(payload))) is not None:
                job.prompt = payload
                job.received = job.tokens
        elif kind is Kind.HIDDEN and request not in self._cancelled:
            job = self._begin(request, tokens) if start == 0 else self._jobs.get(request)
            if job is not None:
                # Blocks until it is there: chunks run on another stream.
                job.hidden[start : start + len(payload)].copy_(payload)
                job.received = start + len(payload)
        elif kind is Kind.CANCEL:
            self._cancelled.append(request)
            self._end(request)

    def _begin(self, request: int, tokens: int) -> _Job | None:
        """A job for a new request; None if it is refused."""
        reason = ""
        if not 1 <= tokens <= self._max_tokens:
            reason = f"a prompt has 1 to {self._max_tokens} tokens"
        elif request in self._jobs or request in self._leaving:
            reason = "its number is in use"
        elif len(self._jobs) >= self._max_requests:
            reason = f"this rank has {len(self._jobs)} requests"
        elif not self._bubbles.memory.take(self._size(tokens)):
            reason = "its keys and values do not fit into the memory"
        if reason:
            self._refuse(request, reason)
            return None
        job = self._jobs[request] = _Job(request, self._model, tokens, self._chunk_tokens)
        return job

    def _refuse(self, request: int, reason: str) -> None:
        self._decoder.send_text(Kind.FAILED, request, reason)

    def _size(self, tokens: int) -> int:
        model = self._model
        kv_bytes = model.shape.kv_bytes(tokens, len(model.places), model.dtype)
        # Outputs, and the copies that leave for the next rank.
        copies = 1 if self._after is None else 2
        return kv_bytes + copies * tokens * model.shape.width * model.dtype.itemsize

    def _run(self, job: _Job) -> None:
        """Runs a layer for the next tokens of a job."""
        start, count = job.start, job.count
        began_s = time.monotonic()
        try:
            rows = slice(start, start + count)
            x = job.hidden[rows]
            if job.layer == 0 and job.prompt is not None:
                x = self._model.embed(job.prompt[rows])
            job.hidden[rows] = self._model.layer(job.layer, x, job.kv[job.layer], start)
        except Exception as error:
            # Its text might hold what was computed.
            reason = f"{type(error).__name__} in layer {self._model.places[job.layer]}"
            self._fail(job.request, reason)
            raise RuntimeError(reason) from None
        # The backend brings tensors of a device to the host beside the next chunk. It has read them
        # before their memory is used again.
        place = self._model.places[job.layer]
        _, works = self._leaving.setdefault(job.request, (0, []))
        works += self._decoder.send(Kind.KV, job.request, job.kv[job.layer, :, rows], place, start)
        job.layer += 1
        if job.layer == len(self._model.places):
            job.layer = 0
            job.start += count
            self._tokens_done(job, rows)
        if job.kv.device.type != "cpu":
            torch.accelerator.current_stream(job.kv.device).synchronize()
        self._times.observe(start, count, time.monotonic() - began_s)

    def _tokens_done(self, job: _Job, rows: slice) -> None:
        """All layers of this rank are computed for some tokens."""
        _, works = self._leaving[job.request]
        if self._after is not None:
            # A copy, since the job may end before it has left.
            chunk = job.hidden[rows].clone()
            works += self._after.send(Kind.HIDDEN, job.request, chunk, rows.start, job.tokens)
        if job.start == job.tokens:
            if self._after is None:
                logits = self._model.logits(job.hidden[-1])
                works += self._decoder.send(Kind.LOGITS, job.request, logits)
            self._end(job.request)

    def _fail(self, request: int, reason: str) -> None:
        if request in self._jobs:
            self._decoder.send_text(Kind.FAILED, request, reason)
            self._end(request)

    def _end(self, request: int) -> None:
        """Forgets a job; its memory is free when everything has left."""
        job = self._jobs.pop(request, None)
        if job is not None:
            _, works = self._leaving.get(request, (0, []))
            self._leaving[request] = self._size(job.tokens), works

    def _abandon(self) -> None:
        """A link is lost: no request can be finished any more."""
        lost = next(link for link in self._links() if link.lost)
        for request in list(self._jobs):
            self._fail(request, f"the link {lost.name} is lost")

    def _calibrate(self) -> None:
        """Measures chunks of several kinds, before there is a training to be delayed.

        The first one of a kind takes long on a GPU, which loads its kernels then, and finds memory
        for the stream of chunks.
        """
        model, most = self._model, self._chunk_tokens
        kv = model.new_kv(2 * most)
        x = torch.zeros(most, model.shape.width, dtype=model.dtype, device=kv.device)
        for start, tokens in ((0, max(most // 4, 1)), (0, most), (most, most)):
            for i in range(1 + _CALIBRATIONS):
                began_s = time.monotonic()
                self._bubbles.run_on_device(partial(model.layer, 0, x[:tokens], kv[0], start))
                if i:
                    self._times.observe(start, tokens, time.monotonic() - began_s)
        if model.embedding is not None:
            self._bubbles.run_on_device(partial(model.embed, torch.zeros(most, dtype=torch.int64)))
        if model.head is not None:
            self._bubbles.run_on_device(partial(model.logits, x[-1]))
