"""The guard rails of SMART's hook: what has to be exact, and when the tolerance ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from harness import error_of, run_ranks
from lossy_training import OPEN, Bucket, LossyNetwork, lossy_only, net
from torch import nn

from torch_resilient.smart import SmartOptions, SmartState, recovery, smart_hook


def not_finite(rank: int, bad: float) -> tuple[list[bool], bool, float, float]:
    """A bad step in the middle: what the results are, and what the memory does."""
    network = LossyNetwork(0.5)
    parameter = nn.Parameter(torch.zeros(1000))
    state = SmartState(options=OPEN, model=nn.ParameterList([parameter]))
    finite, norms = [], []
    for step in range(4):
        gradient = torch.arange(1000.0) % 7
        if step == 2 and rank == 0:
            gradient[999] = bad  # in the shard of rank 1
        network.thresholds.clear()
        bucket = Bucket(gradient, [parameter])
        result = smart_hook(state, bucket).wait()  # type: ignore[arg-type]
        finite.append(bool(torch.isfinite(result).all()))
        if step == 2:
            exact = network.thresholds == [-1.0]
        norms.append(state.statistics().error_norm)
    return finite, exact, norms[1], norms[2]


@lossy_only
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_nan_is_exact_and_leaves_the_memory_alone(bad: float) -> None:
    results = run_ranks(not_finite, bad, world_size=2)
    for finite, _, before, after in results:
        assert finite == [True, True, False, True], "everybody sees it, and only then"
        assert before > 0
        assert after == before
    assert [exact for _, exact, _, _ in results] == [True, False]


def not_finite_in_one_bucket(rank: int, order: list[int]) -> list[dict[str, Any]]:
    """The memory before and after a step with one bad bucket, that of the second parameter."""
    LossyNetwork(0.5)
    parameters = [nn.Parameter(torch.zeros(2000)) for _ in range(2)]
    state = SmartState(options=OPEN, model=nn.ParameterList(parameters))
    memories = []
    for step in range(4):
        futures = []
        for index in order:
            gradient = torch.arange(2000.0) % 7 + step
            if step == 2 and index == 1:
                gradient[-1] = math.inf
            futures.append(smart_hook(state, Bucket(gradient, [parameters[index]])))  # type: ignore[arg-type]
        for future in futures:
            future.wait()
        memory = state.state_dict()["error_memory"]
        memories.append({key: entry["values"].tolist() for key, entry in memory.items()})
    return memories


@lossy_only
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_what_a_bad_step_has_delivered_is_not_forgotten(order: list[int]) -> None:
    """A scaler skips the whole step, also the buckets that were finite."""
    for memories in run_ranks(not_finite_in_one_bucket, order, world_size=2):
        assert set(memories[1]) == {"0", "1"}
        assert memories[2] == memories[1]
        assert memories[3] != memories[2]


def guarded(
    rank: int, rate: float, options: SmartOptions, breaks_promise: bool
) -> tuple[list[int], str, bool]:
    """The zero-filled bytes by step, the final reason for exactness, and whether the sums agree."""
    network = LossyNetwork(rate)
    parameter = nn.Parameter(torch.zeros(4096))
    state = SmartState(options=options, model=nn.ParameterList([parameter]))
    if breaks_promise:
        promised = network.exchange

        def careless(*arguments: Any, max_drop_fraction: float, **named: Any) -> Any:
            return promised(*arguments, max_drop_fraction=1.0, **named)

        recovery.exchange = careless  # type: ignore[assignment]
    dropped = []
    wanted, delivered = torch.zeros(4096), torch.zeros(4096)
    for _ in range(8):
        gradient = torch.arange(4096.0) % 64
        wanted += gradient
        bucket = Bucket(gradient.clone(), [parameter])
        before = state.statistics().bytes_zero_filled
        delivered += smart_hook(state, bucket).wait()  # type: ignore[arg-type]
        dropped.append(state.statistics().bytes_zero_filled - before)
    return dropped, state.statistics().exact_reason, torch.equal(wanted, delivered)


@lossy_only
def test_at_most_the_bound_of_a_message_is_dropped() -> None:
    options = dataclasses.replace(OPEN, max_low_priority_drop=0.1)
    for dropped, reason, _ in run_ranks(guarded, 0.9, options, False, world_size=2):
        assert 0 < max(dropped) <= 0.1 * 2048 * 4
        assert reason == ""


@lossy_only
def test_a_network_that_loses_more_than_the_bound_is_not_trusted_again() -> None:
    options = dataclasses.replace(OPEN, max_low_priority_drop=0.1)
    for dropped, reason, whole in run_ranks(guarded, 0.9, options, True, world_size=2):
        assert dropped[0] > 0.1 * 2048 * 4
        assert not any(dropped[1:])
        assert "bound of 10.0%" in reason
        assert whole, "what was dropped in the first step came later"


@lossy_only
def test_too_much_loss_in_the_mean_ends_the_tolerance() -> None:
    options = dataclasses.replace(OPEN, max_mean_drop=0.3, drop_window_steps=3)
    for dropped, reason, whole in run_ranks(guarded, 0.6, options, False, world_size=2):
        assert all(dropped[:3])
        assert not any(dropped[3:])
        assert "in the last 3 steps, more than max_mean_drop=30.0%" in reason
        assert whole
    for dropped, reason, _ in run_ranks(guarded, 0.1, options, False, world_size=2):
        assert sum(dropped) > 0
        assert reason == ""


def exact_cases(rank: int) -> dict[str, list[bool]]:
    """The exact steps, for each way to request exactness."""
    network = LossyNetwork(0.5)
    found = {}
    for name, options in {
        "every": dataclasses.replace(OPEN, exact_every=3),
        "small": dataclasses.replace(OPEN, exact_below_bytes=2001),
        "large enough": dataclasses.replace(OPEN, exact_below_bytes=2000),
        "set": OPEN,
        "next": OPEN,
    }.items():
        parameter = nn.Parameter(torch.zeros(1000))
        state = SmartState(options=options, model=nn.ParameterList([parameter]))
        found[name] = []
        for step in range(4):
            if name == "set" and step in (1, 3):
                state.exact = step == 1
            if name == "next" and step == 1:
                state.exact_next_step()
            network.thresholds.clear()
            bucket = Bucket(torch.arange(1000.0), [parameter])
            smart_hook(state, bucket).wait()  # type: ignore[arg-type]
            found[name].append(network.thresholds == [-1.0])
    return found


@lossy_only
def test_what_was_asked_to_be_exact_is() -> None:
    assert run_ranks(exact_cases, world_size=2)[0] == {
        "every": [False, False, True, False],
        "small": [True] * 4,
        "large enough": [False] * 4,
        "set": [False, True, True, False],
        "next": [False, True, False, False],
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_fraction", 0.0),
        ("top_fraction", 1.0),
        ("max_low_priority_drop", 1.1),
        ("max_low_priority_drop", math.nan),
        ("max_mean_drop", -0.1),
        ("drop_window_steps", 0),
        ("exact_below_bytes", -1),
        ("exact_every", -1),
        ("samples", 99),
    ],
)
def test_options_are_checked_at_once(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected"):
        SmartOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "fraction", "name"),
    [
        (math.nan, 0.1, "threshold"),
        (math.inf, 0.1, "threshold"),
        (1.0, -0.1, "max_drop_fraction"),
        (1.0, math.nan, "max_drop_fraction"),
    ],
)
def test_tolerate_checks_its_numbers(threshold: float, fraction: float, name: str) -> None:
    with pytest.raises(ValueError, match=f"tolerate: {name}="):
        recovery.tolerate(threshold, fraction)


def test_tolerate_restores_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        now: tuple[float, float] | None = None

        def set_tolerance(self, threshold: float, fraction: float) -> Any:
            before, self.now = self.now, (threshold, fraction)
            return before

        def zero_filled(self, work: Any) -> list[tuple[int, int]]:
            return [(1, 3)]

    native = Native()
    monkeypatch.setattr("torch_resilient._native.load", lambda: native)
    with recovery.tolerate(0.5, 0.1):
        within = []

        def fail() -> None:
            with recovery.tolerate(0.25, 0.2):
                within.append(native.now)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert within == [(0.25, 0.2)]
        assert native.now == (0.5, 0.1)
    assert native.now is not None
    assert native.now[0] < 0, "exact again"
    assert recovery.zero_filled(object()) == [(1, 3)]  # type: ignore[arg-type]


def wrong_uses(rank: int) -> list[str]:
    messages = [error_of(lambda: SmartState(sites=["a"]))]
    unnamed = SmartState()
    messages.append(error_of(unnamed.state_dict))
    other = SmartState(model=net())
    bucket = Bucket(torch.zeros(5), [nn.Parameter(torch.zeros(5))])
    messages.append(error_of(lambda: smart_hook(other, bucket)))  # type: ignore[arg-type]
    messages.append(error_of(lambda: unnamed.scale_error_memory(math.nan)))
    return messages


def test_wrong_uses_are_errors() -> None:
    expected = ["1 sites for 2 ranks", "model=model", "`model` lacks", "factor=nan"]
    for messages in run_ranks(wrong_uses, world_size=2):
        for message, part in zip(messages, expected, strict=True):
            assert message.startswith("ValueError")
            assert part in message
