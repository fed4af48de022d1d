"""Change points of link delay: nothing on healthy links, all that lasts on others.

Streams are those of benchmarks/detectors.py, so its table and these tests speak of the same.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_resilient.control import DelayChange, DelayDetector
from torch_resilient.control.detector import MAX_DELAY_S, ChangePoints, Cusum

sys.path.insert(0, str(ROOT / "benchmarks"))
from detectors import (
    HEALTHY_ITERATIONS,
    STEP_S,
    BayesianChangePoints,
    Score,
    draw,
    judge,
    run,
)

PER_STEP = 16


def feed(
    detector: DelayDetector,
    delays_s: Iterable[float],
    first: int = 0,
    link: tuple[int, int] = (0, 1),
) -> list[DelayChange]:
    """The changes found in samples, `PER_STEP` to a step; `first` is the number of the first."""
    found = []
    for number, delay_s in enumerate(delays_s, first):
        change = detector.on_sample(
            *link, delay_s, time_s=number / PER_STEP, step=number // PER_STEP
        )
        if change is not None:
            found.append(change)
    return found


def noise(dice: random.Random, level_s: float, steps: float, jitter: float = 0.2) -> list[float]:
    return [level_s * math.exp(jitter * dice.gauss(0, 1)) for _ in range(round(steps * PER_STEP))]


# Healthy links.


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_found_on_a_healthy_link(seed: int) -> None:
    """1000 iterations: jitter, outliers of 5 to 10 times, drift of a few percent."""
    stream = draw(random.Random(f"healthy {seed}"), ["healthy"], HEALTHY_ITERATIONS)
    found, _ = run(stream, Cusum)
    assert found == [], f"seed {seed}"


@pytest.mark.parametrize("level_s", [0.0, 1e-5, 0.005, 2.0])
def test_nothing_is_found_without_noise(level_s: float) -> None:
    detector = DelayDetector()
    assert feed(detector, [level_s] * 5000) == []
    assert detector.levels_s() == {(0, 1): pytest.approx(level_s)}


def test_a_burst_is_not_a_change() -> None:
    """Seven late messages in a row, more than once in an iteration."""
    dice = random.Random(1)
    samples = noise(dice, 0.005, 200)
    for start in range(100, len(samples) - 50, 45):
        samples[start : start + 7] = [0.050] * 7
    assert feed(DelayDetector(), samples) == []


def test_what_is_over_before_its_size_is_known_is_not_reported() -> None:
    """Ten late messages with delays so different that ten do not tell the level."""
    dice = random.Random(12)
    samples = noise(dice, 0.005, 200)
    for start in range(100, len(samples) - 50, 90):
        samples[start : start + 10] = [dice.uniform(0.015, 0.075) for _ in range(10)]
    assert feed(DelayDetector(), samples) == []


def test_correlated_noise_gives_few_findings() -> None:
    """Swells of noise that last an iteration are changes for a while; most must not be reported.

    The jitter is 20 %; neighbouring samples share 0.8 of it. A detector that ignores this
    has one finding in 140 iterations; the limit is one in 400.
    """
    found = 0
    for seed in range(16):
        dice = random.Random(seed)
        swell, samples = 0.0, []
        for _ in range(1000 * PER_STEP):
            swell = 0.8 * swell + 0.6 * dice.gauss(0, 1)
            samples.append(0.008 * math.exp(0.2 * swell))
        found += len(feed(DelayDetector(), samples))
    assert found <= 40


def test_cusum_follows_a_drift() -> None:
    """The level drifts slowly by ten times the spread; no sample is a change."""
    dice = random.Random(13)
    finder = Cusum()
    finder.restart([dice.gauss(0, 1) for _ in range(64)])
    assert not any(finder.add(dice.gauss(number / 500, 1)) for number in range(5000))


def test_changes_too_small_to_count() -> None:
    """15 % are too little by the ratio, 1 ms too little in itself; the same in several parts."""
    for before_s, after_s in ((0.040, 0.046), (0.001, 0.0019)):
        dice = random.Random(2)
        samples = noise(dice, before_s, 40, 0.05) + noise(dice, after_s, 40, 0.05)
        assert feed(DelayDetector(), samples) == []
        (found,) = feed(DelayDetector(min_change_s=1e-4, min_change_ratio=0.1), samples)
        assert found.kind == "slower"
        assert found.magnitude_s == pytest.approx(after_s - before_s, rel=0.2)


# Changes.


@pytest.mark.parametrize("kind", ["step", "noisy step"])
def test_a_step_and_its_healing_are_found_within_two_iterations(kind: str) -> None:
    """All changes in 60 streams, 8 to 32 samples an iteration, are found with the right size.

    The size of a noisy step is known from 15 samples or more with a standard deviation of a third:
    2.3 standard errors are 20 %, so a few may be further off.
    """
    score = Score()
    for seed in range(60):
        stream = draw(random.Random(f"{kind} {seed}"), ["healthy", kind, "healthy"], 30)
        found, _ = run(stream, Cusum)
        judge(stream, found, score)
        assert (score.missed, score.late, score.false) == (0, 0, 0), f"seed {seed}: {found}"
        for index, change in found:
            start = max(start for start in stream.starts if start <= index)
            assert abs(change.since_s - start) <= 3, f"seed {seed}: {change}"
            assert change.since_step <= change.found_step == stream.samples[index][0]
            assert change.confidence > 0.99
    assert score.changes == 120
    far = sum(error > 0.2 for error in score.errors)
    assert far <= (0 if kind == "step" else 5), sorted(score.errors)[-10:]


@given(
    base_ms=st.floats(0.05, 20),
    other_ms=st.floats(0.05, 200),
    jitter=st.floats(0.01, 0.3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_any_large_step_is_found_once(
    base_ms: float, other_ms: float, jitter: float, seed: int
) -> None:
    small, large = sorted([base_ms, other_ms])
    if large < 2.5 * small or large - small < 4:
        return
    dice = random.Random(seed)
    samples = noise(dice, base_ms / 1e3, 20, jitter) + noise(dice, other_ms / 1e3, 20, jitter)
    (found,) = feed(DelayDetector(), samples)
    assert found.kind == ("slower" if other_ms > base_ms else "faster")
    assert found.found_step <= 22
    # Lognormal noise with the given median has a mean up to 5 % above it.
    assert found.after_s == pytest.approx(other_ms / 1e3, rel=0.35)
    assert found.before_s == pytest.approx(base_ms / 1e3, rel=0.2)
    assert found.magnitude_s == pytest.approx(abs(found.after_s - found.before_s))


def test_the_level_can_be_changed_many_times() -> None:
    dice = random.Random(3)
    levels_s = [0.005, 0.035, 0.080, 0.020, 0.002, 0.010]
    samples = [sample for level_s in levels_s for sample in noise(dice, level_s, 30)]
    detector = DelayDetector()
    found = feed(detector, samples)
    assert [change.kind for change in found] == ["slower", "slower", "faster", "faster", "slower"]
    for number, change in enumerate(found):
        assert change.since_step == 30 * (number + 1)
        assert change.before_s == pytest.approx(levels_s[number], rel=0.15)
        assert change.after_s == pytest.approx(levels_s[number + 1], rel=0.15)
    assert detector.levels_s()[0, 1] == pytest.approx(0.010, rel=0.1)


def test_drift_is_reported_when_it_has_become_a_change() -> None:
    """From 10 to 20 ms over 1000 steps, only the total drift counts as a change."""
    dice = random.Random(4)
    samples = [
        sample * (1 + step / 1000) for step in range(1000) for sample in noise(dice, 0.010, 1, 0.1)
    ]
    found = feed(DelayDetector(), samples)
    assert [change.kind for change in found] == ["slower"] * 2
    assert found[0].after_s == pytest.approx(0.013, rel=0.05)
    for change in found:
        assert change.after_s >= 1.3 * change.before_s
    # Each change starts from the level where the last one ended.
    assert found[1].before_s == found[0].after_s


def test_links_and_directions_are_apart() -> None:
    dice = random.Random(5)
    detector = DelayDetector()
    slow, healthy = (3, 7), [(7, 3), (3, 8), (0, 1)]
    streams = {slow: noise(dice, 0.004, 20) + noise(dice, 0.030, 20)}
    streams.update({link: noise(dice, 0.004, 40) for link in healthy})
    found = []
    for number in range(40 * PER_STEP):
        for link, samples in streams.items():
            found += feed(detector, [samples[number]], number, link)
    (change,) = found
    assert (change.source, change.destination) == slow
    assert set(detector.levels_s()) == set(streams)


# Hysteresis.


def test_delays_around_a_limit_make_one_finding() -> None:
    """The new level goes up and down around the smallest change that counts."""
    dice = random.Random(6)
    samples = noise(dice, 0.005, 30, 0.1)
    for _ in range(30):
        samples += noise(dice, 0.0068, 4, 0.1) + noise(dice, 0.0074, 4, 0.1)
    found = feed(DelayDetector(), samples)
    assert len(found) <= 1, found


def test_a_link_that_goes_back_and_forth_stays_slow() -> None:
    """Three steps healthy, three steps slow, a hundred times; then it heals."""
    dice = random.Random(7)
    samples = noise(dice, 0.005, 30)
    for _ in range(100):
        samples += noise(dice, 0.035, 3) + noise(dice, 0.005, 3)
    flapping = len(samples)
    samples += noise(dice, 0.005, 140)
    found = feed(DelayDetector(), samples)
    during = [change for change in found if change.found_step < flapping // PER_STEP]
    assert 1 <= len(during) <= 6, [str(change) for change in during]
    assert during[-1].kind == "slower"
    assert found[-1].kind == "faster"
    assert found[-1].after_s == pytest.approx(0.005, rel=0.2)


def test_a_relapse_after_long_health_is_no_flapping() -> None:
    dice = random.Random(8)
    samples = []
    for _ in range(4):
        samples += noise(dice, 0.005, 80) + noise(dice, 0.035, 20)
    samples += noise(dice, 0.005, 20)
    found = feed(DelayDetector(), samples)
    assert [change.kind for change in found] == ["slower", "faster"] * 4
    assert all(change.found_step - change.since_step <= 2 for change in found)


# Arguments.


@pytest.mark.parametrize(
    "delay_s", [math.nan, -1e-9, -math.inf, math.inf, MAX_DELAY_S * 1.001, 10**400]
)
def test_samples_that_are_no_delay(delay_s: float) -> None:
    dice = random.Random(9)
    detector = DelayDetector()
    before = noise(dice, 0.005, 10)
    feed(detector, before)
    with pytest.raises(ValueError, match=r"delay of link 0 -> 1: expected 0 to 3600 s"):
        detector.on_sample(0, 1, delay_s, time_s=1e3, step=1000)
    # The state is unchanged: the stream continues, also at times before that of the sample.
    assert feed(detector, noise(dice, 0.005, 10), len(before)) == []
    detector.on_sample(2, 3, MAX_DELAY_S, time_s=0.0, step=0)


def test_time_that_is_none_or_goes_back() -> None:
    detector = DelayDetector()
    detector.on_sample(0, 1, 0.005, time_s=5.0, step=3)
    for time_s, step in ((4.9, 3), (5.0, 2)):
        with pytest.raises(ValueError, match=r"link 0 -> 1: time or step goes back"):
            detector.on_sample(0, 1, 0.005, time_s=time_s, step=step)
    for time_s in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"time of link 0 -> 1"):
            detector.on_sample(0, 1, 0.005, time_s=time_s, step=3)
    detector.on_sample(1, 0, 0.005, time_s=1.0, step=0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("min_change_s", 0.0),
        ("min_change_s", math.nan),
        ("min_change_ratio", -0.1),
        ("min_change_ratio", math.inf),
        ("warmup_samples", 1),
        ("warmup_samples", 1000),
        ("relapse_steps", -1),
    ],
)
def test_arguments_out_of_range(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        DelayDetector(**{argument: value})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, MAX_DELAY_S), max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_delays_give_findings_that_hold_together(delays_s: list[float]) -> None:
    for change in feed(DelayDetector(), delays_s):
        assert (change.kind == "slower") == (change.after_s > change.before_s)
        assert change.magnitude_s > 0
        assert 0 <= change.confidence <= 1
        assert 0 <= change.since_step <= change.found_step
        assert change.since_s <= change.found_s


def test_memory_is_bounded() -> None:
    """The memory after 20,000 samples is not larger than after 1,000."""
    dice = random.Random(10)
    detector = DelayDetector()

    def kept() -> int:
        (link,) = detector._links.values()
        assert isinstance(link.finder, Cusum)
        return len(link.samples) + len(link.finder._window)

    feed(detector, noise(dice, 0.005, 1000 / PER_STEP))
    before = kept()
    feed(detector, noise(dice, 0.005, 20000 / PER_STEP), 1000)
    assert kept() <= before <= 256


def test_a_line_for_the_log() -> None:
    dice = random.Random(11)
    (change,) = feed(DelayDetector(), noise(dice, 0.005, 20, 0) + noise(dice, 0.035, 5, 0))
    assert str(change) == (
        "link 0 -> 1 is slower by 30 ms since step 20: 5 ms before, 35 ms now "
        "(found at step 20 from 8 samples, confidence 1.000)"
    )


# The rules around the change points hold for any of them.


@pytest.mark.parametrize("change_points", [Cusum, BayesianChangePoints])
def test_both_ways_find_the_same(change_points: Callable[[], ChangePoints]) -> None:
    score = Score()
    for seed in range(4):
        stream = draw(random.Random(f"both {seed}"), ["healthy", "step", "healthy"], 15)
        judge(stream, run(stream, change_points)[0], score)
    assert (score.changes, score.missed, score.late, score.false) == (8, 0, 0, 0)
    assert max(score.errors) < 0.2


@pytest.mark.parametrize("change_points", [Cusum, BayesianChangePoints])
def test_the_age_of_a_change_is_exact_without_noise(
    change_points: Callable[[], ChangePoints],
) -> None:
    finder = change_points()
    finder.restart([1.0, 1.1, 0.9, 1.0] * 10)
    ages = [finder.add(value) for value in [1.0, 1.1, 0.9] * 10 + [3.0, 2.9, 3.1] * 10]
    assert ages[:30] == [0] * 30
    seen = next(number for number, age in enumerate(ages) if age)
    assert seen <= 36
    assert all(age == number - 29 for number, age in enumerate(ages) if number >= seen)


def test_the_stream_of_a_seed_is_always_the_same() -> None:
    one, other = (draw(random.Random("x"), ["healthy", "noisy step"], 5) for _ in range(2))
    assert one == other
    steps = [step for step, _ in one.samples]
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps))
    start = one.starts[1]
    after = [delay_s for _, delay_s in one.samples[start:]]
    assert sum(after) / len(after) - one.base_s == pytest.approx(STEP_S, rel=0.3)
