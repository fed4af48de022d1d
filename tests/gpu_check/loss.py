"""The CUDA kernels for codes and priorities: the bits of the processor's on the same bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_resilient import _loss
from torch_resilient.smart import _cuda_loss

from .checks import Rank
from .operations import FLOATS, KERNEL_S, same, type_name, values

_ELEMENTS = 1_000_003
# (elements of a packet, of the first packet; 0: as the others)
_PACKETS = ((344, 0), (344, 5), (1, 0), (200_000, 0))


def run(rank: Rank) -> None:
    """Runs the section, on one rank."""
    missing = rank.device.lacks("kernels")
    if not missing and not _cuda_loss.available():
        missing = "the package was built without them; TORCH_RESILIENT_CUDA=1 shows why"
    for dtype in FLOATS:
        host = values((_ELEMENTS,), dtype, 5)
        raw = host.view(torch.uint8).numpy()
        name: Any = type_name(dtype)
        with rank.check(f"mean_magnitudes, {name}") as check:
            check.skip_if(missing)
            for each, first in _PACKETS:
                means = _late_means(rank, host, each, first)
                expected = torch.from_numpy(_loss.mean_magnitudes(name, raw, each, first))
                check.require(
                    same(means, expected), f"packets of {each}, first {first}: bits differ"
                )
        with rank.check(f"sampled_threshold, {name}") as check:
            check.skip_if(missing)
            got = _cuda_loss.sampled_threshold(host.to(rank.device.torch_device), 0.1, 3)
            threshold = _loss.sampled_threshold(name, raw, 0.1, 3)
            check.require(got == threshold, f"{got} instead of {threshold}")
        with rank.check(f"all_finite, {name}") as check:
            check.skip_if(missing)
            data = host.to(rank.device.torch_device)
            check.require(_cuda_loss.all_finite(data), "finite data are not")
            data[_ELEMENTS - 1] = float("nan")
            check.require(not _cuda_loss.all_finite(data), "a NaN is finite")
    _xor(rank, missing)


def _late_means(rank: Rank, host: Tensor, each: int, first: int) -> Tensor:
    """The kernel on a new stream, behind the one that writes its input."""
    device = rank.device
    with device.stream():
        late = torch.zeros_like(host, device=device.torch_device)
        there = host.to(device.torch_device)
        device.sleep(KERNEL_S)
        late.copy_(there)
        means = _cuda_loss.mean_magnitudes(late, each, first)
    device.synchronize()
    return means


def _xor(rank: Rank, missing: str) -> None:
    sent = values((3, 100, 1376), torch.uint8, 6)
    parity = torch.empty(3, 10, 1376, dtype=torch.uint8)
    _loss.encode("xor", sent.numpy(), parity.numpy())
    with rank.check("encode_xor") as check:
        check.skip_if(missing)
        encoded = torch.empty_like(parity, device=rank.device.torch_device)
        _cuda_loss.encode_xor(sent.to(rank.device.torch_device), encoded)
        check.require(same(encoded, parity), "the parity differs")
    with rank.check("recover_xor") as check:
        check.skip_if(missing)
        have = torch.rand(3, 100, generator=torch.Generator().manual_seed(1)) > 0.05
        here = torch.ones(3, 10, dtype=torch.bool)
        arrived = sent * have[..., None]
        there = [t.to(rank.device.torch_device) for t in (arrived, have, parity, here)]
        filled = _cuda_loss.recover_xor(*there)
        expected = _loss.recover("xor", arrived.numpy(), have.numpy(), parity.numpy(), here.numpy())
        check.require(filled == expected, f"{filled} symbols instead of {expected}")
        check.require(same(there[0], arrived), "recovered bytes differ")
