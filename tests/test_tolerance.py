"""Which activations may lose something, and what is counted of it."""

from __future__ import annotations

import math

import pytest
import torch

from torch_resilient.ddp import SmartOptions
from torch_resilient.pipelining.tolerance import ActivationTolerance


def bounds(options: SmartOptions, num_stages: int) -> list[float]:
    return [options.activation_bound_of(i, num_stages) for i in range(num_stages - 1)]


def test_activations_are_exact_by_default() -> None:
    assert bounds(SmartOptions(), 4) == [0, 0, 0]
    assert ActivationTolerance.of(None, 0, 2) == ActivationTolerance()
    assert not ActivationTolerance().applies_to(torch.ones(1 << 20))


def test_one_bound_is_for_the_boundaries_of_low_priority() -> None:
    # Paper: SMART §3.1, Equation 2: a depth ratio of exactly k is of high priority.
    options = SmartOptions(activation_bound=0.02)
    assert bounds(options, 2) == [0.02]
    assert bounds(options, 4) == [0, 0.02, 0.02]
    assert bounds(options, 8) == [0, 0, *[0.02] * 5]
    assert bounds(SmartOptions(activation_bound=0.02, depth_ratio=0), 4) == [0.02] * 3
    assert bounds(SmartOptions(activation_bound=0.02, depth_ratio=1), 4) == [0] * 3


def test_several_bounds_are_for_one_boundary_each() -> None:
    options = SmartOptions(activation_bound=(0.001, 0.01, 0.02))
    assert bounds(options, 4) == [0.001, 0.01, 0.02]
    with pytest.raises(ValueError, match="3 bounds for a pipeline of 3 stages: expected 2"):
        ActivationTolerance.of(options, 0, 3)


@pytest.mark.parametrize("bound", [-0.1, 1.5, math.nan, (0.0, 2.0)])
def test_bounds_are_fractions(bound: float | tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"activation_bound.*fractions, 0 to 1"):
        SmartOptions(activation_bound=bound)
    with pytest.raises(ValueError, match="depth_ratio"):
        SmartOptions(depth_ratio=2)


def test_what_the_bound_is_for() -> None:
    options = SmartOptions(activation_bound=0.1, exact_below_bytes=4096)
    tolerance = ActivationTolerance.of(options, 0, 2)
    assert tolerance.applies_to(torch.ones(1024))
    assert tolerance.applies_to(torch.ones(2048, dtype=torch.bfloat16))
    assert not tolerance.applies_to(torch.ones(1023))  # small
    assert not tolerance.applies_to(torch.ones(4096, dtype=torch.int64))  # positions, masks
    assert not tolerance.applies_to(torch.ones(0))
    # The last stage sends no activations.
    assert ActivationTolerance.of(options, 1, 2).bound == 0
