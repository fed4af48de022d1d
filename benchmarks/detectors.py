"""Compares ways to find changes of link delay: CUSUM against Bayesian change-point detection.

    python benchmarks/detectors.py --runs 40 --seed 1

Both stand behind the same rules, those of `torch_resilient.control.DelayDetector`, and see the
same random streams: a healthy link of 1 to 10 ms with lognormal jitter of 10 to 30 %, outliers of 5
to 10 times, and slow drift; then the same with 30 ms more, either the same for all samples or drawn
from N(30, 10) ms; then healthy again. 8 to 32 samples in an iteration. Prints false findings,
changes missed or found later than within two iterations, samples until found, the error of the
size, and microseconds per sample, measured alternately on the same streams.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_resilient.control.detector import ChangePoints, Cusum, DelayChange, DelayDetector

HEALTHY_ITERATIONS = 1000
# The length of each part: before, during and after a change.
PART_ITERATIONS = 30
STEP_S = 0.030


class BayesianChangePoints:
    """Online change-point detection of Adams and MacKay (2007) with a robust likelihood.

    Each run that may be the present one has a Normal-Gamma belief on its mean and precision; a
    sample is an outlier with a small probability, then spread evenly over a wide range, and counts
    for the run by the chance that it is none. A change is seen while the run that was there at the
    last restart has less than 1 - `certainty`; its age is that of the most likely run.

    Runs below a probability of 1e-5 are dropped, at most `max_runs` are kept: O(max_runs) per
    sample. A run's belief is worth at most `max_samples`, which lets it follow drift.
    """

    def __init__(
        self,
        hazard: float = 1 / 1000,
        outliers: float = 0.01,
        certainty: float = 0.999,
        max_runs: int = 24,
        max_samples: float = 128,
    ) -> None:
        self._log_hazard = math.log(hazard)
        self._log_stay = math.log1p(-hazard)
        self._outliers = outliers
        # Values are logarithms of delays: e^8 is from 1 ms to 3 s.
        self._outlier_density = outliers / 8
        self._certainty = certainty
        self._max_runs = max_runs
        self._max_samples = max_samples

    def restart(self, values: Sequence[float]) -> None:
        """See ChangePoints."""
        count = len(values)
        centre = statistics.median(values)
        deviations = sorted(abs(value - centre) for value in values)
        sigma = max(1.4826 * deviations[count // 2] * (1 + 6 / count), 0.03)
        self._centre = centre
        # New runs: any mean (kappa 0.01 gives a spread of 10 sigma), about the same spread.
        self._prior = (0.01, centre, 1.0, sigma * sigma)
        weight = min(count, self._max_samples)
        self._now = 0
        # (start, log probability, kappa, mean, alpha, beta); the first is that of the restart.
        self._runs: list[tuple[int, float, float, float, float, float]] = [
            (0, 0.0, weight, centre, 1 + weight / 2, (1 + weight / 2) * sigma * sigma)
        ]

    def add(self, value: float) -> int:
        """See ChangePoints."""
        lgamma, log, exp = math.lgamma, math.log, math.exp
        self._now += 1
        runs = [(start, logp + self._log_stay, *belief) for start, logp, *belief in self._runs]
        runs.append((self._now, self._log_hazard, *self._prior))
        found = []
        for start, logp, kappa, mean, alpha, beta in runs:
            # Student's t with 2 alpha degrees of freedom.
            spread = beta * (kappa + 1) / (alpha * kappa)
            degrees = 2 * alpha
            distance = value - mean
            density = (1 - self._outliers) * exp(
                lgamma(alpha + 0.5)
                - lgamma(alpha)
                - 0.5 * log(degrees * math.pi * spread)
                - (alpha + 0.5) * math.log1p(distance * distance / (degrees * spread))
            )
            whole = density + self._outlier_density
            weight = density / whole
            keep = min(1.0, self._max_samples / (kappa + 1))
            new_kappa = (kappa + weight) * keep
            found.append(
                (
                    start,
                    logp + log(whole),
                    new_kappa,
                    mean + weight * distance / (kappa + weight),
                    (alpha + weight / 2) * keep,
                    (beta + kappa * weight * distance * distance / (2 * (kappa + weight))) * keep,
                )
            )
        most = max(run[1] for run in found)
        total = most + log(sum(exp(run[1] - most) for run in found))
        first = found[0]
        first = (first[0], max(first[1] - total, -40.0), *first[2:])
        rest = [(run[0], run[1] - total, *run[2:]) for run in found[1:] if run[1] - total > -11.5]
        if len(rest) > self._max_runs:
            rest.sort(key=lambda run: -run[1])
            del rest[self._max_runs :]
            rest.sort()
        self._runs = [first, *rest]
        if exp(first[1]) > 1 - self._certainty:
            return 0
        start = max(rest, key=lambda run: run[1])[0]
        return self._now - start + 1


DETECTORS: dict[str, Callable[[], ChangePoints]] = {
    "CUSUM": Cusum,
    "Bayesian": BayesianChangePoints,
}


@dataclass(frozen=True)
class Stream:
    """The samples of a link: (step, delay) of each."""

    samples: list[tuple[int, float]]
    base_s: float
    starts: list[int]  # index of the first sample of each part


def draw(dice: random.Random, parts: Sequence[str], iterations: int) -> Stream:
    """Parts: "healthy", "step" (30 ms more), "noisy step" (N(30, 10) ms more, at least 0)."""
    base_s = dice.uniform(0.001, 0.010)
    jitter = dice.uniform(0.1, 0.3)
    outliers = dice.uniform(0, 0.01)
    drift = dice.uniform(-0.05, 0.05)
    per_iteration = dice.randint(8, 32)
    samples: list[tuple[int, float]] = []
    starts = []
    for part in parts:
        # A change does not wait for the end of an iteration.
        skip = dice.randrange(per_iteration) if samples else 0
        starts.append(len(samples))
        for number in range(skip, skip + iterations * per_iteration):
            step = len(samples) // per_iteration
            delay_s = base_s * math.exp(jitter * dice.gauss(0, 1))
            delay_s *= 1 + drift * number / (iterations * per_iteration)
            if dice.random() < outliers:
                delay_s *= dice.uniform(5, 10)
            if part == "step":
                delay_s += STEP_S
            elif part == "noisy step":
                delay_s += max(0.0, dice.gauss(STEP_S, STEP_S / 3))
            samples.append((step, delay_s))
    return Stream(samples, base_s, starts)


def run(
    stream: Stream, make: Callable[[], ChangePoints]
) -> tuple[list[tuple[int, DelayChange]], float]:
    """Returns the changes found, with the index of the sample that showed each; us per sample."""
    detector = DelayDetector(change_points=make)
    found = []
    start_s = time.perf_counter()
    for index, (step, delay_s) in enumerate(stream.samples):
        change = detector.on_sample(0, 1, delay_s, time_s=float(index), step=step)
        if change is not None:
            found.append((index, change))
    return found, (time.perf_counter() - start_s) * 1e6 / len(stream.samples)


@dataclass
class Score:
    """The results of one detector over all streams."""

    healthy_samples: int = 0
    false: int = 0
    changes: int = 0
    missed: int = 0
    late: int = 0
    samples: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    took_us: list[float] = field(default_factory=list)


def judge(stream: Stream, found: list[tuple[int, DelayChange]], score: Score) -> None:
    """Counts what was found of a stream "healthy, step, healthy"."""
    per_iteration = sum(step == 0 for step, _ in stream.samples)
    ends = [*stream.starts[1:], len(stream.samples)]
    for part, (start, end) in enumerate(zip(stream.starts, ends, strict=True)):
        inside = [(index, change) for index, change in found if start <= index < end]
        if part == 0:
            score.false += len(inside)
            continue
        kind = "slower" if part == 1 else "faster"
        score.changes += 1
        hits = [(index, change) for index, change in inside if change.kind == kind]
        score.false += len(inside) - min(len(hits), 1)
        if not hits:
            score.missed += 1
            continue
        index, change = hits[0]
        took = index - start + 1
        score.samples.append(took)
        score.late += took > 2 * per_iteration
        score.errors.append(abs(change.magnitude_s - STEP_S) / STEP_S)


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="streams of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.runs} streams of each kind\n")

    scores = {name: Score() for name in DETECTORS}
    dice = random.Random(f"{options.seed} healthy")
    for _ in range(options.runs):
        stream = draw(dice, ["healthy"], HEALTHY_ITERATIONS)
        for name, make in DETECTORS.items():
            found, took_us = run(stream, make)
            score = scores[name]
            score.healthy_samples += len(stream.samples)
            score.false += len(found)
            score.took_us.append(took_us)
    print(f"healthy, {HEALTHY_ITERATIONS} iterations each")
    print(f"{'':12}{'samples':>10}{'false':>8}{'us/sample':>11}")
    for name, score in scores.items():
        took_us = statistics.median(score.took_us)
        print(f"{name:12}{score.healthy_samples:10}{score.false:8}{took_us:11.2f}", flush=True)

    for kind in ("step", "noisy step"):
        scores = {name: Score() for name in DETECTORS}
        dice = random.Random(f"{options.seed} {kind}")
        for _ in range(10 * options.runs):
            stream = draw(dice, ["healthy", kind, "healthy"], PART_ITERATIONS)
            for name, make in DETECTORS.items():
                judge(stream, run(stream, make)[0], scores[name])
        print(f"\n{kind} of 30 ms and back, {10 * options.runs} streams")
        print(
            f"{'':12}{'changes':>8}{'missed':>8}{'late':>6}{'false':>7}{'samples':>9}{'worst':>7}"
            f"{'error %':>9}{'p95 %':>7}{'> 20 %':>8}"
        )
        for name, score in scores.items():
            errors = sorted(score.errors)
            print(
                f"{name:12}{score.changes:8}{score.missed:8}{score.late:6}{score.false:7}"
                f"{statistics.median(score.samples):9.0f}{max(score.samples):7}"
                f"{100 * statistics.median(errors):9.1f}"
                f"{100 * errors[int(0.95 * len(errors))]:7.1f}"
                f"{100 * sum(error > 0.2 for error in errors) / len(errors):8.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
