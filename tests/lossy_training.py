"""A network that drops what may be dropped, and trainings over it.

The network is a stand-in: every message travels exactly, then its receiver zero-fills what a seed
picks among the packets below the threshold, and the sender computes the same ranges from the same
seed. So it keeps the promises of tolerant delivery, with any loss a test wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_gloo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.smart import SmartOptions, SmartState, SmartStatistics, recovery, smart_hook
from torch_resilient.smart.gradient_drop import Range

lossy_only = pytest.mark.skipif(on_gloo(), reason="gloo loses nothing")

PACKET_BYTES = 256
# All messages of the small models here may lose something, and no guard stops it.
OPEN = SmartOptions(
    top_fraction=0.1, max_low_priority_drop=1.0, max_mean_drop=1.0, exact_below_bytes=0
)


def drops_of(
    message: Tensor, threshold: float, max_drop_fraction: float, rate: float, seed: int
) -> list[Range]:
    """Ranges of a message to drop: packets below the threshold, each with probability `rate`."""
    if threshold < 0:
        return []
    generator = torch.Generator().manual_seed(seed)
    length = PACKET_BYTES // message.element_size()
    budget = int(max_drop_fraction * message.numel())
    ranges = []
    for start in range(0, message.numel(), length):
        stop = min(start + length, message.numel())
        unlucky = float(torch.rand((), generator=generator)) < rate
        small = float(message[start:stop].abs().double().mean()) < threshold
        if unlucky and small and stop - start <= budget:
            budget -= stop - start
            ranges.append((start, stop))
    return ranges


class LossyNetwork:
    """Stands in for recovery.exchange on all ranks; `rate` may be changed between steps."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.rate, self.seed = rate, seed
        self.exact_exchange = recovery.exchange
        self.thresholds: list[float] = []
        self.messages_hit = 0
        recovery.exchange = self.exchange  # type: ignore[assignment]

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        group: dist.ProcessGroup,
        *,
        tag: int,
        threshold: float = -1.0,
        max_drop_fraction: float = 0.0,
    ) -> Any:
        """Stands in for recovery.exchange, with drops."""
        self.thresholds.append(threshold)
        limits = torch.tensor([threshold, max_drop_fraction], dtype=torch.float64)
        theirs = {peer: torch.empty_like(limits) for peer in incoming}
        first = self.exact_exchange(dict.fromkeys(outgoing, limits), theirs, group, tag=tag)
        made = self.exact_exchange(outgoing, incoming, group, tag=tag)
        rate, rank = self.rate, group.rank()

        def seed_of(sender: int, receiver: int) -> int:
            return hash((self.seed, tag, sender, receiver))

        def lose(_: Any) -> None:
            for peer, message in incoming.items():
                theirs_threshold, fraction = theirs[peer].tolist()
                for start, stop in drops_of(
                    message, theirs_threshold, fraction, rate, seed_of(peer, rank)
                ):
                    message[start:stop] = 0

        def dropped() -> dict[int, list[Range]]:
            found = {
                peer: drops_of(message, threshold, max_drop_fraction, rate, seed_of(rank, peer))
                for peer, message in outgoing.items()
            }
            self.messages_hit += sum(1 for ranges in found.values() if ranges)
            return found

        if incoming:
            received = torch.futures.collect_all([*first.received, *made.received]).then(lose)
            made.received = [received]
        made.sent = [*first.sent, *made.sent]
        made.dropped = dropped
        return made


@dataclasses.dataclass
class Bucket:
    """The part of DDP's bucket that smart_hook uses."""

    flat: Tensor
    params: Sequence[Tensor]

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> Sequence[Tensor]:
        return self.params


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 120), nn.Tanh(), nn.Linear(120, 60), nn.Linear(60, 4))


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def as_numbers(tensor: Tensor) -> list[str]:
    """Bit for bit, and small enough to be sent to the test."""
    return [float(x).hex() for x in tensor.cpu().double().reshape(-1)]


def train(
    model: DistributedDataParallel, rank: int, steps: Sequence[int], optimizer: Any
) -> list[list[str]]:
    """The parameters after each step."""
    after = []
    device = next(model.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(8, 24, generator=generator).to(device)
        targets = torch.randn(8, 4, generator=generator).to(device)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        after.append(as_numbers(flat_parameters(model)))
    return after


def smart_training(
    rank: int,
    rate: float | None,
    options: SmartOptions = OPEN,
    sites: Sequence[str] | None = None,
    steps: int = 5,
    device: str = "cpu",
    **ddp_options: Any,
) -> tuple[list[list[str]], SmartStatistics]:
    """Trains with the hook; `rate` None: on the backend as it is."""
    if rate is not None:
        LossyNetwork(rate)
    model = DistributedDataParallel(net().to(device), **{"bucket_cap_mb": 0.02, **ddp_options})
    state = SmartState(options=options, model=model, sites=sites)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return train(model, rank, range(steps), optimizer), state.statistics()


def default_training(rank: int, steps: int = 5) -> list[list[str]]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    return train(model, rank, range(steps), torch.optim.Adam(model.parameters(), 0.01))


def close(ours: list[str], theirs: list[str]) -> bool:
    a = torch.tensor([float.fromhex(x) for x in ours])
    b = torch.tensor([float.fromhex(x) for x in theirs])
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
