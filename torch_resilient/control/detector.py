"""Finds lasting changes of the delay of links in a stream of samples.

`DelayDetector` takes delay samples of any number of links, one by one, and says when a link has
become slower or faster for good, since when, and by how much. Time is an argument, so a recorded
stream gives the same findings again.

Two ways to find the change point were compared by `benchmarks/detectors.py`, behind the rules below
which are the same for both: a two-sided CUSUM on robustly standardised samples, which is here, and
robust Bayesian online change-point detection (Adams and MacKay 2007, with outliers as a part of the
likelihood), which is in the benchmark. On 435,000 samples of healthy links and 800 changes by
30 ms, half of them by N(30, 10) ms (--runs 20 --seed 1), neither had a false finding or a miss, and
both found every change within two iterations of 8 to 32 samples. The error of the size had a median
of 0.7 %, of noisy changes 3.1 %, and was above 20 % for 1 % of the noisy ones. A sample took 1.8 µs
against 48 µs, so CUSUM was kept.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

# A longer delay is a mistake of units, and a link that takes this long fails by other limits.
MAX_DELAY_S = 3600.0

# Samples of a link kept: what its level is known from. 128 put the median of samples with 30 %
# jitter within 3 %; fewer let the level wander, more follow a drift later.
_WINDOW = 128
# The level is computed anew after this many samples; sooner costs time, later follows drift late.
_REFRESH = 32
# A change is looked at from this many samples on, so a burst of fewer is never reported.
_MIN_SAMPLES = 8
# It is reported once the standard error of the new level is below this part of its size and this
# part of the smallest change that counts (else the first correction would look like a change), ...
_WANTED_ERROR = 0.04
_WANTED_LEVEL_ERROR = 0.25
# ... or after this many samples, if they are from two steps: a plan changes between steps, so what
# is known in the first of two is not needed yet. With 8 in each step it is within two, ...
_ENOUGH_SAMPLES = 15
# ... or after this many: more make it hardly more exact.
_PLENTY_SAMPLES = 32
# The size must be this many standard errors: lower ones take a long swell of noise for a change.
_WANTED_SIGNIFICANCE = 4.0
# The last ones must still be on the new side, else the change may already be over.
_LAST_SAMPLES = 4
# The part of the samples at each end that the mean of a window leaves out. Cuts off single
# outliers, and is nearly as exact as the plain mean where there are none.
_TRIMMED = 0.1
# From the median absolute deviation to the standard deviation of normal noise.
_MAD_TO_SIGMA = 1.4826
# The spread of n samples is taken to be 1 + this / n times as large: by chance it may be too small.
_CHANCE = 6
# How long, in steps, "faster" is held back after the first relapse; it doubles up to the most.
_FIRST_HOLD_STEPS = 4
_LONGEST_HOLD_STEPS = 128


@dataclass(frozen=True)
class DelayChange:
    """A link has become slower or faster for good. `str` gives a line for the log.

    Attributes:
        source, destination: the ranks that the link leads from and to.
        kind: "slower" or "faster".
        before_s: the delay until then, in seconds, without outliers.
        after_s: the delay since then, in seconds, without outliers.
        since_s, since_step: time and step of the first sample of the new level, as given with it.
            After a slow drift, the first sample of the window that shows it.
        found_s, found_step: time and step of the sample that gave the proof.
        samples: how many samples `after_s` is from.
        confidence: that the levels differ at all, 0 to 1, from the spread of both windows.
    """

    source: int
    destination: int
    kind: Literal["slower", "faster"]
    before_s: float
    after_s: float
    since_s: float
    since_step: int
    found_s: float
    found_step: int
    samples: int
    confidence: float

    @property
    def magnitude_s(self) -> float:
        """The size of the change in seconds, never negative."""
        return abs(self.after_s - self.before_s)

    def __str__(self) -> str:
        return (
            f"link {self.source} -> {self.destination} is {self.kind} by "
            f"{self.magnitude_s * 1e3:.3g} ms since step {self.since_step}: "
            f"{self.before_s * 1e3:.3g} ms before, {self.after_s * 1e3:.3g} ms now "
            f"(found at step {self.found_step} from {self.samples} samples, confidence "
            f"{self.confidence:.3f})"
        )


class ChangePoints(Protocol):
    """Finds change points in the samples of one link. Values have no unit; see `DelayDetector`."""

    def restart(self, values: Sequence[float]) -> None:
        """Forgets all samples: the level is that of `values`, oldest first, at least one."""

    def add(self, value: float) -> int:
        """Takes a sample; returns how many samples, this one included, a change is old.

        0: there is none, as far as is known.
        """


class Cusum:
    """Page's two-sided CUSUM on samples standardised by median and median absolute deviation.

    Each sample adds its distance from the median, in standard deviations, less `allowance` to the
    sum of its side, which is at least 0. A change is seen while a sum is above `threshold`; it has
    begun where the sum was last 0. Distances count up to `clip`, so an outlier, however large,
    adds clip - allowance, and it takes threshold / (clip - allowance) samples beyond, nearly in a
    row, to see a change. The window stands still while there is one.

    Costs about 1 µs per sample, and 20 µs for each 16th.
    """

    def __init__(self, allowance: float = 1.5, threshold: float = 12.0, clip: float = 4.0) -> None:
        self._allowance = allowance
        self._threshold = threshold
        self._clip = clip
        # A higher sum would only take longer to come down again.
        self._max = 2 * threshold
        self._window: deque[float] = deque(maxlen=_WINDOW)

    def restart(self, values: Sequence[float]) -> None:
        self._window.clear()
        self._window.extend(values)
        self._up = self._down = 0.0
        self._up_age = self._down_age = 0
        self._measure()

    def _measure(self) -> None:
        values = sorted(self._window)
        count = len(values)
        self._median = median = values[count // 2]
        deviations = sorted([abs(value - median) for value in values])
        sigma = _MAD_TO_SIGMA * deviations[count // 2]
        sigma *= 1 + _CHANCE / count
        # Without noise, the smallest change that counts is still several of these.
        self._scale = 1 / max(sigma, 0.03)
        self._until_measure = _REFRESH

    def add(self, value: float) -> int:
        distance = (value - self._median) * self._scale
        if distance > self._clip:
            distance = self._clip
        elif distance < -self._clip:
            distance = -self._clip
        up = self._up + distance - self._allowance
        if up > 0:
            self._up_age += 1
            self._up = up if up < self._max else self._max
        else:
            self._up = 0.0
            self._up_age = 0
        down = self._down - distance - self._allowance
        if down > 0:
            self._down_age += 1
            self._down = down if down < self._max else self._max
        else:
            self._down = 0.0
            self._down_age = 0
        if self._up > self._threshold:
            return self._up_age
        if self._down > self._threshold:
            return self._down_age
        self._window.append(value)
        self._until_measure -= 1
        if not self._until_measure:
            self._measure()
        return 0


class _Sample(NamedTuple):
    delay_s: float
    time_s: float
    step: int


class _Level(NamedTuple):
    """Mean of a window without its ends; its standard error; seconds, and of how many samples."""

    mean_s: float
    error_s: float
    samples: int


def _level(delays_s: Iterable[float], correlation: float = 0.0) -> _Level:
    """`correlation`: of a sample with the next, by which they tell less than that many would."""
    values = sorted(delays_s)
    count = len(values)
    cut = int(_TRIMMED * count)
    kept = values[cut : count - cut]
    mean = sum(kept) / len(kept)
    # The error of a trimmed mean follows from the deviation of the samples with the ends drawn in.
    low, high = kept[0], kept[-1]
    squares = sum((value - mean) ** 2 for value in kept)
    squares += cut * ((low - mean) ** 2 + (high - mean) ** 2)
    error = math.sqrt(squares / max(count - 1, 1)) / ((1 - 2 * cut / count) * math.sqrt(count))
    error *= math.sqrt((1 + correlation) / (1 - correlation))
    return _Level(mean, error, count)


def _correlation(delays_s: Sequence[float]) -> float:
    """How much a sample tells of the next, 0 to 0.95: lag-1 autocorrelation without outliers."""
    middle = sorted(delays_s)[len(delays_s) // 2]
    distances = sorted([abs(delay_s - middle) for delay_s in delays_s])
    most = 3 * _MAD_TO_SIGMA * distances[len(distances) // 2]
    bounded = [min(max(delay_s - middle, -most), most) for delay_s in delays_s]
    squares = sum(value * value for value in bounded)
    if not squares:
        return 0.0
    products = sum(one * other for one, other in itertools.pairwise(bounded))
    return min(max(products / squares, 0.0), 0.95)


def _since(delays_s: Sequence[float], before_s: float) -> int:
    """How many of the last samples are of the new level: an outlier may have gone before them.

    The split for which the sum of the samples' distances from their levels is least. An outlier
    counts for no more than the distance of the levels.
    """
    latest = sorted(delays_s[len(delays_s) // 2 :])
    after_s = latest[len(latest) // 2]
    best_s = nearer_s = 0.0
    count = 0
    for number, delay_s in enumerate(reversed(delays_s), 1):
        nearer_s += abs(delay_s - before_s) - abs(delay_s - after_s)
        if nearer_s > best_s:
            best_s = nearer_s
            count = number
    return count


def _significant(before: _Level, after: _Level) -> bool:
    """Whether the levels differ by more than noise explains.

    Samples have been chosen as the new ones because they are alike, so their own spread says too
    little: jitter is as large a part of the delay as before, for up to twice the delay.
    """
    error_s = after.error_s
    if before.mean_s:
        expected_s = before.error_s * math.sqrt(before.samples / after.samples)
        error_s = max(error_s, expected_s * min(max(after.mean_s / before.mean_s, 1), 2))
    needed_s = _WANTED_SIGNIFICANCE * math.hypot(before.error_s, error_s)
    return abs(after.mean_s - before.mean_s) >= needed_s


def _change(
    key: tuple[int, int], before: _Level, after: _Level, first: _Sample, last: _Sample, count: int
) -> DelayChange:
    error_s = math.hypot(before.error_s, after.error_s)
    change_s = abs(after.mean_s - before.mean_s)
    return DelayChange(
        source=key[0],
        destination=key[1],
        kind="slower" if after.mean_s > before.mean_s else "faster",
        before_s=before.mean_s,
        after_s=after.mean_s,
        since_s=first.time_s,
        since_step=first.step,
        found_s=last.time_s,
        found_step=last.step,
        samples=count,
        confidence=math.erf(change_s / (error_s * math.sqrt(2))) if error_s else 1.0,
    )


class _Link:
    """One direction of one link."""

    __slots__ = (
        "began",
        "correlation",
        "faster_step",
        "finder",
        "hold_steps",
        "known",
        "level",
        "samples",
        "settling",
        "until_check",
    )

    def __init__(self, finder: ChangePoints) -> None:
        self.finder = finder
        self.samples: deque[_Sample] = deque(maxlen=_WINDOW)
        self.known = False  # has had enough samples for a first level
        self.level = _Level(0.0, 0.0, 0)  # what was last reported
        self.settling = True  # the window has not been full since then: it gets more exact
        self.correlation = 0.0  # of a sample with the next, before the last change
        self.until_check = _REFRESH
        self.began: _Sample | None = None  # first sample of the change that is being looked at
        self.faster_step: int | None = None  # when it was last reported as faster
        self.hold_steps = 0  # how long the next "faster" must last


class DelayDetector:
    """Reports lasting changes of a link's delay; ignores single late messages and noise.

    The first `warmup_samples` of a link give its level. From then on a change is reported once

    - the change points (CUSUM, or what `change_points` makes) see one,
    - its size is at least `min_change_s` and at least `min_change_ratio` of the smaller of both
      levels; smaller ones only move the level from which the change points are seen,
    - it is more than noise explains; consecutive samples share a part of the noise,
    - the new level is known well enough, or from 15 samples of two steps, or from 32; and the last
      samples are still on the new side.

    So 8 samples are needed, and 15 to 32 are usually enough. Noise that lasts longer than that,
    such as jitter of 25 % with a correlation of 0.9, still gives findings now and then. A drift is
    followed silently, and is reported when the level has moved by as much as a change must have
    since it was last reported.

    Hysteresis: what is compared is always the level last reported, so delays that go up and down
    around a limit make one finding. A link that goes back and forth as a whole stays "slower": if
    it gets slower again within `relapse_steps` of having been reported faster, the next "faster"
    must last for 4 steps, and for twice as many after each further relapse (128 at most).

    Memory: 128 samples for each link, twice. Not thread-safe.
    """

    # Paper: PIPEMORPH §6, the detector between profiler and orchestrator
    def __init__(
        self,
        *,
        min_change_s: float = 0.002,
        min_change_ratio: float = 0.3,
        warmup_samples: int = 16,
        relapse_steps: int = 50,
        change_points: Callable[[], ChangePoints] = Cusum,
    ) -> None:
        """Defaults: 2 ms are a fifth of an operation of 10 ms, and less than a plan gains by.

        Below a ratio of about 0.25, links with 30 % jitter begin to give false findings.

        Raises ValueError, which names the argument.
        """
        if not 0 < min_change_s < MAX_DELAY_S:
            raise ValueError(
                f"min_change_s: expected more than 0, less than {MAX_DELAY_S:g}, got {min_change_s}"
            )
        if not 0 <= min_change_ratio < math.inf:
            raise ValueError(
                f"min_change_ratio: expected a finite number, not negative, got {min_change_ratio}"
            )
        if not _MIN_SAMPLES <= warmup_samples <= _WINDOW:
            raise ValueError(
                f"warmup_samples: expected {_MIN_SAMPLES} to {_WINDOW}, got {warmup_samples}"
            )
        if relapse_steps < 0:
            raise ValueError(f"relapse_steps: expected at least 0, got {relapse_steps}")
        self._min_change_s = min_change_s
        self._min_change_ratio = min_change_ratio
        self._warmup_samples = warmup_samples
        self._relapse_steps = relapse_steps
        self._change_points = change_points
        self._links: dict[tuple[int, int], _Link] = {}

    def on_sample(
        self, source: int, destination: int, delay_s: float, *, time_s: float, step: int
    ) -> DelayChange | None:
        """Takes one sample of the link from `source` to `destination`; returns what it has proven.

        Args:
            delay_s: 0 to MAX_DELAY_S.
            time_s: on any clock that does not go back, such as time.monotonic.
            step: of the training loop; it may stay the same, and must not go back.

        Raises ValueError for anything else; the sample then changes nothing.
        """
        # Also false for NaN.
        if not 0 <= delay_s <= MAX_DELAY_S:
            raise ValueError(
                f"delay of link {source} -> {destination}: expected 0 to {MAX_DELAY_S:g} s, "
                f"got {delay_s!r}"
            )
        if not -math.inf < time_s < math.inf:
            raise ValueError(
                f"time of link {source} -> {destination}: expected a finite number, got {time_s!r}"
            )
        link = self._links.get((source, destination))
        if link is None:
            link = _Link(self._change_points())
            self._links[source, destination] = link
        samples = link.samples
        if samples:
            _, last_s, last_step = samples[-1]
            if time_s < last_s or step < last_step:
                raise ValueError(
                    f"link {source} -> {destination}: time or step goes back, from {last_s} s, "
                    f"step {last_step} to {time_s} s, step {step}"
                )
        samples.append(_Sample(delay_s, time_s, step))
        if not link.known:
            if len(samples) >= self._warmup_samples:
                link.known = True
                link.level = _level(sample.delay_s for sample in samples)
                self._restart(link, len(samples))
            return None
        age = link.finder.add(self._value(delay_s))
        if age:
            return self._judge((source, destination), link, age)
        link.began = None
        link.until_check -= 1
        if not link.until_check:
            link.until_check = _REFRESH
            return self._check_drift((source, destination), link)
        return None

    def levels_s(self) -> dict[tuple[int, int], float]:
        """The delay of each link (source, destination) that is known, as last reported."""
        return {key: link.level.mean_s for key, link in self._links.items() if link.known}

    def _value(self, delay_s: float) -> float:
        """Jitter is relative to the delay; changes below the smallest that counts do not matter."""
        return math.log(delay_s + self._min_change_s)

    def _restart(self, link: _Link, age: int) -> None:
        """The last `age` samples have a level of their own; the others are forgotten."""
        samples = link.samples
        while len(samples) > age:
            samples.popleft()
        link.finder.restart([self._value(sample.delay_s) for sample in samples])
        link.began = None
        link.until_check = _REFRESH

    def _judge(self, key: tuple[int, int], link: _Link, age: int) -> DelayChange | None:
        """The report of a change that is `age` samples old, if it is time to report it."""
        # While "faster" is held back there is no hurry.
        if age < _MIN_SAMPLES or (age > _PLENTY_SAMPLES and age % 4):
            return None
        samples = link.samples
        delays_s = [sample.delay_s for sample in samples]
        complete = age <= len(samples)
        age = _since(delays_s[-age:], link.level.mean_s)
        if age < _MIN_SAMPLES:
            return None
        if complete or link.began is None:
            link.began = samples[-age]
        last = samples[-1]
        enough = age >= _PLENTY_SAMPLES or (age >= _ENOUGH_SAMPLES and last.step > link.began.step)
        if len(delays_s) - age >= _PLENTY_SAMPLES:
            link.correlation = _correlation(delays_s[:-age])
        after = _level(delays_s[-age:], link.correlation)
        change_s = after.mean_s - link.level.mean_s
        needed_s = self._needed_s(after.mean_s, link.level.mean_s)
        wanted_s = min(_WANTED_ERROR * abs(change_s), _WANTED_LEVEL_ERROR * needed_s)
        if not enough and after.error_s * (1 + _CHANCE / age) > wanted_s:
            return None
        latest = sorted(delays_s[-_LAST_SAMPLES:])
        latest_s = (latest[1] + latest[2]) / 2
        if abs(latest_s - after.mean_s) > abs(latest_s - link.level.mean_s):
            return None
        if abs(change_s) < needed_s:
            if enough:
                link.settling = False
                self._restart(link, age)
            return None
        if len(delays_s) - age >= _ENOUGH_SAMPLES:
            before = _level(delays_s[:-age], link.correlation)
        else:
            before = link.level
        if not _significant(before, after):
            if not complete:  # no more will be known: go on from here, as from a small change
                link.settling = False
                self._restart(link, age)
            return None
        if change_s > 0:
            relapse = (
                link.faster_step is not None and last.step - link.faster_step <= self._relapse_steps
            )
            longer = min(max(_FIRST_HOLD_STEPS, 2 * link.hold_steps), _LONGEST_HOLD_STEPS)
            link.hold_steps = longer if relapse else 0
        else:
            if last.step - link.began.step < link.hold_steps:
                return None
            link.faster_step = last.step
        change = _change(key, before, after, link.began, last, age)
        link.level = after
        link.settling = True
        self._restart(link, age)
        return change

    def _needed_s(self, one_s: float, other_s: float) -> float:
        """The smallest difference of two levels that counts, seconds."""
        return max(self._min_change_s, self._min_change_ratio * min(one_s, other_s))

    def _check_drift(self, key: tuple[int, int], link: _Link) -> DelayChange | None:
        """Without a change point: the level of the window may have moved away little by little."""
        before = link.level
        delays_s = [sample.delay_s for sample in link.samples]
        if link.settling:
            now = _level(delays_s)
            if abs(now.mean_s - before.mean_s) < self._needed_s(now.mean_s, before.mean_s):
                link.level = now
                link.settling = len(delays_s) < _WINDOW
                return None
            link.settling = False
        # All parts of the window must have moved away: one that goes back and forth has no level
        # of its own.
        for start in range(0, len(delays_s), _REFRESH):
            part = sorted(delays_s[start : start + _REFRESH])
            middle_s = part[len(part) // 2]
            if abs(middle_s - before.mean_s) < self._needed_s(middle_s, before.mean_s):
                return None
        link.correlation = _correlation(delays_s)
        now = _level(delays_s, link.correlation)
        if abs(now.mean_s - before.mean_s) < self._needed_s(now.mean_s, before.mean_s):
            return None
        if not _significant(before, now):
            return None
        link.level = now
        if now.mean_s < before.mean_s:
            link.faster_step = link.samples[-1].step
        return _change(key, before, now, link.samples[0], link.samples[-1], len(delays_s))
