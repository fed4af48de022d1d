"""The tolerance of activations, and the counters of zero-filled data."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks
from torch.distributed.pipelining import PipelineStage

from torch_resilient.pipelining import ScheduleAdaptiveZB
from torch_resilient.pipelining.tolerance import ActivationTolerance
from torch_resilient.smart import SmartOptions, recovery


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


def test_a_network_that_loses_more_than_the_bound_is_not_trusted_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tolerance, activation = ActivationTolerance(bound=0.1), torch.ones(100)
    for dropped, bound in (((0, 10), 0.1), ((0, 11), 0.0)):
        monkeypatch.setattr(recovery, "zero_filled", lambda work, dropped=dropped: [dropped])
        assert tolerance.arrived(None, activation) == [dropped]  # type: ignore[arg-type]
        assert tolerance.bound == bound
    assert not tolerance.applies_to(activation)
    assert tolerance.bytes_zero_filled == 84
    (record,) = caplog.records
    assert "44 of 400 bytes" in record.getMessage()


ROWS, WIDTH, MICROBATCHES = 8, 16, 3
LOST = [(0, 2 * WIDTH), (5 * WIDTH, 6 * WIDTH)]  # rows 0, 1 and 5 of each microbatch


def module_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def gradient_of_first(rank: int, options: SmartOptions) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of the first stage's weights; its backend reports that LOST was dropped."""
    if rank == 0:

        def dropped(work: dist.Work) -> list[recovery.Range]:
            assert work.is_completed()
            return LOST

        recovery.zero_filled = dropped
    module = module_of(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    loss = torch.nn.functional.mse_loss
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss, scale_grads=False, smart=options)
    data = torch.arange(MICROBATCHES * ROWS * WIDTH).view(-1, WIDTH) / 100
    if rank == 0:
        schedule.step(data)
    else:
        schedule.step(target=data)
    assert (schedule.tolerance.messages > 0) == (rank == 0 and options.activation_bound != 0)
    weight = module[0].weight  # type: ignore[index]
    return weight.grad, schedule.stats().tolerance


@pytest.mark.skipif(on_gloo(), reason="gloo loses nothing")
@pytest.mark.parametrize("bound", [0.5, 0.0])
def test_the_gradient_of_what_was_lost_is_ignored(bound: float) -> None:
    options = SmartOptions(activation_bound=bound, exact_below_bytes=0)
    gradient, tolerance = run_ranks(gradient_of_first, options)[0]
    assert tolerance.bytes_sent == (MICROBATCHES * ROWS * WIDTH * 4 if bound else 0)
    assert tolerance.bytes_zero_filled == (MICROBATCHES * 3 * WIDTH * 4 if bound else 0)
    first, second = module_of(0), module_of(1)
    data = torch.arange(MICROBATCHES * ROWS * WIDTH).view(-1, WIDTH) / 100
    for part in data.chunk(MICROBATCHES):
        activation = first(part)
        if bound:
            keep = torch.ones(ROWS, 1, dtype=torch.bool)
            keep[[0, 1, 5]] = False
            activation = torch.where(keep, activation, activation.detach())
        torch.nn.functional.mse_loss(second(activation), part).backward()
    torch.testing.assert_close(gradient, first[0].weight.grad)  # type: ignore[index]
