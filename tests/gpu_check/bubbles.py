"""Work in the bubbles of a pipeline: chunks and a prefill on the device, beside a training."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient.pipelining import ScheduleAdaptiveZB
from torch_resilient.pipelining.bubbles import Bubbles, BubbleWork, Chunk
from torch_resilient.prefill import (
    Link,
    ModelPart,
    ModelShape,
    PrefillService,
    PrefillWork,
    Rejected,
    plain_prefill,
)

from .checks import Check, Rank
from .operations import same, values

_MICROBATCHES = 4
_STEPS = 8
_WIDTH = 64
_ROWS = 8
# By stage: the first one waits for many chunks.
_FORWARD_S = (0.005, 0.04)
_CHUNK_S = 0.002
_TOKENS = 300
_CHUNK_TOKENS = 128
_SERVE_S = 15.0


class _Part(nn.Module):
    """One stage, whose forward keeps the device busy."""

    def __init__(self, rank: Rank, index: int) -> None:
        super().__init__()
        self._device = rank.device
        self._forward_s = _FORWARD_S[index]
        torch.manual_seed(60 + index)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self._device.accelerated:
            self._device.sleep(self._forward_s)
        else:
            time.sleep(self._forward_s)
        return torch.tanh(nn.functional.dropout(self.linear(x), 0.1))


class _Products(BubbleWork):
    """Each chunk multiplies the result of the one before, behind a kernel that takes its time."""

    name = "products"

    def __init__(self, rank: Rank) -> None:
        self._device = rank.device
        self.matrix = values((_WIDTH, _WIDTH), torch.float32, 7).to(rank.device.torch_device)
        self.matrix /= self.matrix.norm()
        self.result = torch.eye(_WIDTH, device=rank.device.torch_device)
        self.chunks = 0

    def next_chunk(self, end_s: float) -> Chunk:
        return Chunk(_CHUNK_S, self._run)

    def _run(self) -> None:
        self._device.sleep(_CHUNK_S / 2)
        self.result = self.result @ self.matrix + self.matrix
        self.chunks += 1

    def expected(self) -> Tensor:
        """The result of as many products, one after the other."""
        result = torch.eye(_WIDTH, device=self.matrix.device)
        for _ in range(self.chunks):
            result = result @ self.matrix + self.matrix
        return result


class _Training:
    """A pipeline of two stages."""

    def __init__(self, rank: Rank) -> None:
        device = rank.device.torch_device
        self._rank = rank
        self.part = _Part(rank, rank.number).to(device)
        stage = PipelineStage(self.part, rank.number, 2, device)
        self.schedule = ScheduleAdaptiveZB(stage, _MICROBATCHES, nn.functional.mse_loss)
        shape = (_MICROBATCHES * _ROWS, _WIDTH)
        self._x, self._target = (values(shape, torch.float32, i).to(device) for i in (1, 2))
        torch.manual_seed(rank.number)  # of the dropout

    def step(self) -> list[Tensor]:
        """A step; returns the losses on the last stage, else the gradients alone."""
        self.part.zero_grad()
        losses: list[Tensor] = []
        if self._rank.number == 0:
            self.schedule.step(self._x)
        else:
            self.schedule.step(target=self._target, losses=losses)
        self._rank.device.synchronize()
        gradients = [each.grad.clone() for each in self.part.parameters() if each.grad is not None]
        return gradients + [each.detach() for each in losses]


def run(rank: Rank) -> None:
    """Runs the section."""
    missing = rank.device.lacks("pipelines")
    plain: list[list[Tensor]] = []
    with rank.check("a training without work in its bubbles") as check:
        check.skip_if(missing)
        training = _Training(rank)
        plain = [training.step() for _ in range(_STEPS)]
    with rank.check("chunks change no bit of the training, nor it theirs") as check:
        check.skip_if(missing)
        training = _Training(rank)
        bubbles = training.schedule.bubbles = Bubbles(1 << 30, rank.device.torch_device)
        work = _Products(rank)
        bubbles.add(work)
        for step in range(_STEPS):
            found = training.step()
            good = all(same(*pair) for pair in zip(found, plain[step], strict=True))
            check.require(good, f"step {step}: losses or gradients differ")
        stats = bubbles.stats()
        check.require(not bubbles.suspended, f"suspended: {bubbles.suspended}")
        check.require(stats.chunks == work.chunks, f"{stats.chunks} of {work.chunks} are counted")
        check.require(same(work.result, work.expected()), "the chunks' result is wrong")
        filled = _sum_of(rank, stats.chunks)
        check.require(filled > 0, "there was no chunk")
        check.remark = (
            f"rank {rank.number}: {stats.chunks} chunks in {stats.filled_s:.2f} of "
            f"{stats.idle_s:.2f} s; {stats.late} of {stats.waits} messages waited for one, "
            f"{stats.late_s * 1e3:.1f} ms in all"
        )
        bubbles.close()
    with rank.check("keys and values of a prefill in bubbles") as check:
        check.skip_if(missing)
        _prefill(rank, check)


def _sum_of(rank: Rank, number: int) -> int:
    total = torch.tensor(number, device=rank.device.torch_device)
    dist.all_reduce(total)
    return int(total)


def _prefill(rank: Rank, check: Check) -> None:
    """Rank 0 computes a prompt in its bubbles; rank 1 asks for it, and compares the bits."""
    dtype = torch.bfloat16 if rank.device.kind == "cuda" else torch.float32
    shape = ModelShape(vocabulary=1000, layers=4, width=256, heads=8, kv_heads=2, hidden=512)
    store = dist.distributed_c10d._get_default_store()
    model = ModelPart(shape, range(shape.layers)).to(rank.device.torch_device, dtype)
    prompt = torch.randint(0, 1000, (_TOKENS,), generator=torch.Generator().manual_seed(8))
    training = _Training(rank)
    bubbles = training.schedule.bubbles = Bubbles(1 << 30, rank.device.torch_device)
    service, future = None, None
    if rank.number == 0:
        link = Link(store, "prefill", 1, 16 << 20)
        bubbles.add(PrefillWork(model, bubbles, link, chunk_tokens=_CHUNK_TOKENS))
    else:
        service = PrefillService(store, shape, dtype, [["prefill"]], chunk_tokens=_CHUNK_TOKENS)
    deadline_s = time.monotonic() + _SERVE_S
    done = over = False
    while not _sum_of(rank, int(over)):
        if service is not None:
            # Requests are rejected until the idle time is known.
            if future is None or (future.done() and isinstance(future.exception(), Rejected)):
                future = service.submit(prompt.tolist(), max_wait_s=_SERVE_S, timeout_s=_SERVE_S)
            done = future.done() and future.exception() is None
            over = done or time.monotonic() > deadline_s
        training.step()
    if service is not None and future is not None:
        check.require(done, f"the prefill did not end: {service.stats}")
        if done:
            found = future.result()
            kv, logits = plain_prefill(model, prompt, _CHUNK_TOKENS)
            check.require(same(found.kv, kv.cpu()), "keys and values differ")
            check.require(same(found.logits, logits.cpu()), "logits differ")
        service.close()
    check.require(not bubbles.suspended, f"suspended: {bubbles.suspended}")
    bubbles.close()
