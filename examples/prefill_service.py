"""Inference prefills in the idle time of a training, over two sites.

    python examples/prefill_service.py

Four ranks train a small GPT; the link between the second and the third one is slow, as between two
sites. The training runs twice: alone, and with prefills of another model in its bubbles. This
program sends the requests, at a growing rate, and decodes. Checks that losses and weights are
bitwise the same in both runs, and that every prefill has the bits of a plain run. Prints
utilisation, acceptance and times to the first token, and draws the timeline. Exit code 0: all of
that holds; 1: something does not, and the text says what.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import train_pipeline
from run_demo import DemoError, Summary, run_torchrun

from torch_resilient.pipelining import picture
from torch_resilient.pipelining.bubbles import Bubbles
from torch_resilient.pipelining.measured import MeasuredStep
from torch_resilient.pipelining.run_timeline import picture_of
from torch_resilient.pipelining.timeline_files import read_run
from torch_resilient.prefill import (
    Link,
    ModelPart,
    ModelShape,
    Prefilled,
    PrefillService,
    PrefillWork,
    Rejected,
    Server,
    plain_prefill,
)

RANKS = 4
# The model that is served; every rank holds all of it.
SHAPE = ModelShape(vocabulary=256, layers=4, width=128, heads=4, kv_heads=2, hidden=256)
CHUNK_TOKENS = 64
MAX_TOKENS = 1024
MEMORY_BYTES = 64 << 20
# Of the lengths of prompts, in tokens: a tenth of those of a code assistant.
MEDIAN_TOKENS, SIGMA = 190, 0.9
MAX_WAIT_S = 0.2
TIMEOUT_S = 5.0
# How often the bits of prefills are compared with a plain run, which takes time.
CHECKED = 40
# The store of the requests; without it a rank trains alone.
STORE = "PREFILL_STORE"
RUN_TIMEOUT_S = 180.0
# Steps in the picture.
DRAWN = 3


def train_rank() -> int:
    """A rank of the training, with prefills in its bubbles if there is a store for them."""
    bubbles = Bubbles(MEMORY_BYTES)

    def prepare(trainer: train_pipeline.Trainer) -> None:
        host, _, port = os.environ.get(STORE, "").rpartition(":")
        if port:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
            link = Link(store, f"rank{dist.get_rank()}", end=1, max_bytes=1 << 20)
            model = ModelPart(SHAPE, range(SHAPE.layers))
            bubbles.add(
                PrefillWork(model, bubbles, link, max_tokens=MAX_TOKENS, chunk_tokens=CHUNK_TOKENS)
            )
            trainer.schedule.bubbles = bubbles

    status = train_pipeline.main(prepare)
    bubbles.close()
    print(f"rank {os.environ['RANK']}: {bubbles.stats()} {bubbles.suspended or ''}", flush=True)
    return status


@dataclass
class Phase:
    """A rate of requests, and what became of them.

    Attributes:
        start_s, end_s: by time.monotonic().
    """

    rate: float
    start_s: float = 0.0
    end_s: float = 0.0
    prompts: list[torch.Tensor] = field(default_factory=list)
    futures: list[Future[Prefilled]] = field(default_factory=list)

    @property
    def finished(self) -> list[tuple[torch.Tensor, Prefilled]]:
        """The prompts that were prefilled, with the results."""
        return [
            (prompt, future.result())
            for prompt, future in zip(self.prompts, self.futures, strict=True)
            if future.done() and future.exception() is None
        ]

    def reasons(self) -> list[str]:
        """Why the others were not."""
        return [str(error) for each in self.futures if (error := each.exception()) is not None]


class Load(threading.Thread):
    """Sends requests at random moments, phase after phase, once the ranks accept some."""

    def __init__(self, service: PrefillService, phases: Sequence[Phase], phase_s: float) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._phases = phases
        self._phase_s = phase_s
        self._rng = random.Random(0)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self._service.stats.finished:
            if self.ended.wait(0.05):
                return
            self._service.submit([1, 2, 3], MAX_WAIT_S, TIMEOUT_S)
        for phase in self._phases:
            phase.start_s = next_s = time.monotonic()
            phase.end_s = phase.start_s + self._phase_s
            while True:
                next_s += self._rng.expovariate(phase.rate)
                if self.ended.wait(max(min(next_s, phase.end_s) - time.monotonic(), 0.0)):
                    return
                if next_s >= phase.end_s:
                    break
                tokens = self._prompt()
                phase.prompts.append(torch.tensor(tokens))
                phase.futures.append(self._service.submit(tokens, MAX_WAIT_S, TIMEOUT_S))

    def _prompt(self) -> list[int]:
        drawn = self._rng.lognormvariate(0, SIGMA) * MEDIAN_TOKENS
        return self._rng.choices(range(SHAPE.vocabulary), k=max(1, min(int(drawn), MAX_TOKENS)))


def run_training(name: str, options: argparse.Namespace, store: str) -> Summary:
    """One run of all ranks."""
    json_file = options.out / f"{name}.json"
    environment = {
        STORE: store,
        "TORCH_RESILIENT_FAULTS": "; ".join(
            f"delay rank={rank} peer={3 - rank} ms={options.delay_ms:g}" for rank in (1, 2)
        ),
    }
    run_torchrun(
        [
            f"--nproc-per-node={RANKS}",
            __file__,
            f"--steps={options.steps}",
            f"--pace-ms={options.pace_ms:g}",
            "--rows=2",
            "--context=32",
            f"--json={json_file}",
            f"--timeline-dir={options.out / name}",
        ],
        environment,
        options.out / f"{name}.log",
        RUN_TIMEOUT_S,
    )
    summary: Summary = json.loads(json_file.read_text())
    return summary


def ask_over_http(server: Server, token: str) -> str:
    """One request as any client would send it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = json.dumps({"tokens": list(b"def main("), "max_new_tokens": 8, "max_wait_ms": 5000})
    connection.request("POST", "/v1/generate", body, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


def run_with_prefills(
    options: argparse.Namespace, phases: Sequence[Phase], phase_s: float
) -> tuple[Summary, str]:
    """The training with requests; also the answer to one that came over HTTP."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    service = PrefillService(
        store,
        SHAPE,
        torch.float32,
        [[f"rank{rank}"] for rank in range(RANKS)],
        max_tokens=MAX_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
    )
    token = secrets.token_urlsafe(24)
    server = Server(service, ModelPart(SHAPE, range(SHAPE.layers)), token)
    answers: list[str] = []

    def ask() -> None:
        while not service.stats.finished:
            if load.ended.wait(0.05):
                return
        answers.append(ask_over_http(server, token))

    load = Load(service, phases, phase_s)
    client = threading.Thread(target=ask, daemon=True)
    load.start()
    client.start()
    try:
        summary = run_training("prefills", options, f"127.0.0.1:{store.port}")
    finally:
        load.ended.set()
        load.join()
        client.join()
        server.close()
        service.close()
    return summary, answers[0] if answers else "none"


def check_training(alone: Summary, busy: Summary) -> None:
    """Raises DemoError unless losses and weights are bitwise the same."""
    for name in ("losses_hex", "weights_sha256"):
        if alone[name] != busy[name]:
            raise DemoError(f"{name} of the training with prefills differ from those without")


def check_prefills(phases: Sequence[Phase]) -> int:
    """Raises DemoError unless prefills are bitwise those of a plain run; returns how many."""
    found = [each for phase in phases for each in phase.finished]
    if not found:
        reasons = sorted({reason for phase in phases for reason in phase.reasons()})
        raise DemoError(f"no prefill finished: {reasons}")
    model = ModelPart(SHAPE, range(SHAPE.layers))
    checked = found[:: max(len(found) // CHECKED, 1)]
    for prompt, result in checked:
        kv, logits = plain_prefill(model, prompt, CHUNK_TOKENS)
        if not torch.equal(result.kv, kv) or not torch.equal(result.logits, logits):
            raise DemoError(f"a prefill of {len(prompt)} tokens differs from a plain run")
        torch.testing.assert_close(logits, plain_prefill(model, prompt)[1])
    return len(checked)


def utilisation(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """The parts of all ranks' time in which they train, and prefill."""
    whole_s = sum(step.iteration_s for step in steps) or 1.0
    filled = sum(step.filled * step.iteration_s for step in steps) / whole_s
    idle = sum(step.bubble * step.iteration_s for step in steps) / whole_s
    return 1 - idle - filled, filled


def table(phases: Sequence[Phase], steps: Sequence[MeasuredStep]) -> str:
    """A line for each rate of requests."""
    head = ("requests/s", "asked", "accepted", "training", "prefill", "of idle", "TTFT p50 / p99")
    lines = [head]
    for phase in phases:
        inside = [each for each in steps if phase.start_s <= each.start_s < phase.end_s]
        training, filled = utilisation(inside)
        times_s = sorted(result.ttft_s for _, result in phase.finished)
        asked = len(phase.futures)
        late_s = times_s[(len(times_s) - 1) * 99 // 100] if times_s else 0.0
        middle_s = statistics.median(times_s) if times_s else 0.0
        lines.append(
            (
                f"{phase.rate:g}",
                str(asked),
                f"{100 * len(times_s) / max(asked, 1):.0f} %",
                f"{100 * training:.0f} %",
                f"{100 * filled:.0f} %",
                f"{100 * filled / max(1 - training, 1e-9):.0f} %",
                f"{1e3 * middle_s:.0f} / {1e3 * late_s:.0f} ms",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def draw(folder: Path, phase: Phase, out: Path) -> list[MeasuredStep]:
    """Draws some steps in the middle of a phase; returns all steps."""
    run = read_run(folder)
    inside = [each for each in run.steps if phase.start_s <= each.start_s < phase.end_s]
    shown = inside or list(run.steps)
    first = max((len(shown) - DRAWN) // 2, 0)
    drawn = picture_of(
        run.only(shown[first : first + DRAWN]),
        f"Prefills (red) in the bubbles of a training, {phase.rate:g} requests/s",
    )
    out.write_text(picture.svg(drawn))
    return list(run.steps)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    add("--pace-ms", type=float, default=20.0, help="see train_pipeline.py (default: 20)")
    add("--delay-ms", type=float, default=60.0, help="of the slow link (default: 60)")
    add("--rates", type=float, nargs="+", default=[5, 20, 80], help="requests/s (default: 5 20 80)")
    add("--out", type=Path, default=Path("demo_output"), help="(default: ./demo_output)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, prove, draw."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    # As the ranks of the training: the bits of sums depend on it.
    torch.set_num_threads(1)
    began_s = time.monotonic()
    phases = [Phase(rate) for rate in options.rates]
    try:
        print(f"{RANKS} ranks train alone, {options.steps} steps", flush=True)
        alone = run_training("alone", options, "")
        # Some steps pass before requests are accepted.
        phase_s = 0.85 * sum(alone["iteration_s"][1:]) / len(phases)
        print("the same with prefills in the bubbles", flush=True)
        busy, answer = run_with_prefills(options, phases, phase_s)
        check_training(alone, busy)
        checked = check_prefills(phases)
    except (DemoError, Rejected) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    svg = options.out / "demo_bubbles.svg"
    steps = draw(options.out / "prefills", phases[-1], svg)
    print(f"\n{table(phases, steps)}\n")
    medians_ms = [1e3 * each["iteration_median_s"] for each in (alone, busy)]
    print(f"iteration: {medians_ms[0]:.1f} ms alone, {medians_ms[1]:.1f} ms with prefills (median)")
    print(f"over HTTP: {answer}")
    print(
        f"PROVED: all losses and weights of {options.steps} steps are bitwise the same; {checked} "
        "prefills have keys, values and logits bitwise as in a plain run."
    )
    print(f"picture: {svg}")
    print(f"took {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(train_rank() if "RANK" in os.environ else main())
