"""Train a small byte-level GPT as a pipeline, over any network.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py

The same over any backend: the name given to init_process_group is all there is to change. See
--help.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from console import Progress, sparkline
from gpt import GptShape, GptStage, next_byte_loss
from op_recorder import OpRecorder, RecordedStage, Span, bubble_fraction, iteration_times
from stage_placement import ADAPTIVE, ONE_STAGE_A_RANK, SCHEDULES, stages_of_rank
from text_data import batch, load_text, standard_library
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class

from torch_resilient import faults, stats
from torch_resilient.pipelining import ScheduleAdaptiveZB

HELP = """\
The schedule is the order of the forwards (F) and backwards of a rank's microbatches. A backward
can be run whole (B) or split: I, the gradient of the inputs, which the previous stage waits for,
and W, the gradient of the weights, which no other stage waits for and which can fill a gap.

  AdaptiveZB             split backward; runs what has arrived, and plans anew when a link slows
                         down or recovers. The default over the resilient backend; over another
                         one, orders are planned instead
  GPipe                  all F, then all B; simple, holds every activation
  1F1B                   one F, one B in turn; bounded memory
  ZB1P                   1F1B with split backward: W fills the bubbles
  LoopedBFS              GPipe with two stages a rank
  Interleaved1F1B        1F1B with two stages a rank: smaller bubbles, twice the messages
  InterleavedZeroBubble  the same with split backward
  ZBVZeroBubble          two stages a rank in the shape of a V, split backward
  DualPipeV              the V shape, feeding forwards and backwards at once

A schedule changes when things are computed, never what: with the same --seed, any backend and any
network give the same losses, bit for bit. --json writes them as hexadecimal floats to compare.

examples:
  # four stages on this machine
  torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py

  # a zero-bubble schedule, its timeline, and the numbers
  torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py \\
      --schedule ZBVZeroBubble --timeline timeline.json --json run.json
  python examples/timeline_svg.py timeline.json --out timeline.svg

  # what another 60 ms between ranks 1 and 2 cost in steps 10 to 19 (resilient backend only), and
  # the picture of how the schedule adapts; with --schedule 1F1B, of how much longer it takes
  TORCH_RESILIENT_FAULTS="delay rank=1 peer=2 ms=60 from_step=10 until_step=20;
                          delay rank=2 peer=1 ms=60 from_step=10 until_step=20" \\
      torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py --timeline-dir run
  torch-resilient timeline run --picture run.svg

  # stop and resume; the checkpoint fits any number of ranks and any schedule
  torchrun ... examples/train_pipeline.py --steps 15 --checkpoint ckpt
  torchrun ... examples/train_pipeline.py --steps 30 --checkpoint ckpt --resume
"""


def parse_arguments() -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        description="Train a small byte-level GPT, split over the ranks, on real text.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = {name.lower(): name for name in SCHEDULES}
    add = parser.add_argument
    add("--backend", default="resilient", help="c10d backend (default: %(default)s)")
    add(
        "--schedule",
        type=lambda name: names.get(name.lower(), name),
        choices=list(names.values()),
        help="order of the operations, explained below (default: AdaptiveZB over the resilient "
        "backend, else 1F1B)",
    )
    add("--steps", type=int, default=30, metavar="N", help="train until step N (default: 30)")
    add("--microbatches", type=int, default=8, metavar="N", help="per step (default: 8)")
    add("--rows", type=int, default=4, metavar="N", help="sequences a microbatch (default: 4)")
    add("--context", type=int, default=64, metavar="N", help="bytes a sequence (default: 64)")
    add("--layers", type=int, default=8, metavar="N", help="in the whole model (default: 8)")
    add("--width", type=int, default=128, metavar="N", help="of the model (default: 128)")
    add("--lr", type=float, default=2e-3, help="AdamW's learning rate (default: 2e-3)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add(
        "--data",
        type=Path,
        default=standard_library(),
        metavar="FILE_OR_DIR",
        help="text to learn (default: the sources of Python's standard library)",
    )
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add(
        "--pace-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="a forward of a rank's layers takes at least MS, a whole backward twice that: gives "
        "each of many ranks on few cores the steady speed of a device of its own. The arithmetic "
        "is the same (default: 0, as fast as it goes)",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="save weights and optimizer at the end")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--json", type=Path, metavar="FILE", help="write losses, times and statistics")
    add("--timeline", type=Path, metavar="FILE", help="write what each rank did when, as JSON")
    add(
        "--timeline-dir",
        type=Path,
        metavar="DIR",
        help="AdaptiveZB writes what it measures and decides there, for `torch-resilient timeline`",
    )
    arguments = parser.parse_args()
    if arguments.schedule is None:
        arguments.schedule = ADAPTIVE if is_resilient(arguments.backend) else "1F1B"
    if arguments.timeline_dir is not None and arguments.schedule != ADAPTIVE:
        parser.error(f"--timeline-dir: {arguments.schedule} writes none; try --timeline FILE")
    if arguments.resume and arguments.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR to resume from")
    if "RANK" not in os.environ:
        parser.error("start me with torchrun, e.g. torchrun --standalone --nproc-per-node 4 ...")
    return arguments


def is_resilient(backend: str) -> bool:
    """Whether tensors of some device travel over the resilient backend."""
    return "resilient" in backend


def pick_device(kind: str) -> torch.device:
    """This rank's device; ranks share the GPUs of a host when they are more."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def build_stage(
    arguments: argparse.Namespace,
    index: int,
    stages: int,
    device: torch.device,
    recorder: OpRecorder,
) -> RecordedStage:
    """One stage with its shapes declared; the first step need not infer them."""
    shape = GptShape(layers=arguments.layers, width=arguments.width, context=arguments.context)
    module = GptStage(shape, index, stages, arguments.seed).to(device)
    rows, length, width = arguments.rows, arguments.context, arguments.width
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    hidden = torch.zeros(rows, length, width, device=device, requires_grad=True)
    logits = torch.zeros(rows, length, 256, device=device, requires_grad=True)
    stage = RecordedStage(
        module,
        index,
        stages,
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == stages - 1 else hidden,
    )
    stage.recorder = recorder
    stage.units = dist.get_world_size() / stages
    return stage


def build_schedule(
    arguments: argparse.Namespace, stages: list[RecordedStage], loss: Callable[..., Tensor]
) -> Any:
    """The schedule of that name, of this package or of torch."""
    count = arguments.microbatches
    if arguments.schedule == ADAPTIVE:
        return ScheduleAdaptiveZB(
            stages[0], count, loss_fn=loss, timeline_dir=arguments.timeline_dir
        )
    if arguments.schedule == "ZB1P":
        return get_schedule_class("InterleavedZeroBubble")(stages, count, loss_fn=loss)
    single = arguments.schedule in ONE_STAGE_A_RANK
    kind = get_schedule_class(arguments.schedule)
    return kind(stages[0] if single else stages, count, loss_fn=loss)


class Trainer:
    """This rank's stages, their optimizers, and the schedule that runs them."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments = arguments
        self.device = device
        self.recorder = OpRecorder(device, arguments.pace_ms / 1e3)
        indices, count = stages_of_rank(arguments.schedule, dist.get_rank(), dist.get_world_size())
        self.stages = [build_stage(arguments, i, count, device, self.recorder) for i in indices]
        self.optimizers = [
            torch.optim.AdamW(stage.submod.parameters(), lr=arguments.lr) for stage in self.stages
        ]
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.text = load_text(arguments.data) if self.has_first or self.has_last else None
        self.schedule = build_schedule(arguments, self.stages, self._loss)
        self.resilient = is_resilient(arguments.backend)
        self.round_trips = RoundTrips()
        self.round_trips_s: list[dict[str, float]] = []

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(logits, targets)
        self.recorder.extend()
        return loss

    def step(self, step: int) -> float | None:
        """Run one iteration; returns the mean loss on the rank of the last stage, else None."""
        inputs: list[Tensor] = []
        keywords: dict[str, Any] = {"return_outputs": False}
        losses: list[Tensor] = []
        if self.text is not None:
            rows = self.arguments.rows * self.arguments.microbatches
            tokens, targets = batch(
                self.text, self.arguments.seed, step, rows, self.arguments.context
            )
            if self.has_first:
                inputs = [tokens.to(self.device)]
            if self.has_last:
                keywords |= {"target": targets.to(self.device), "losses": losses}
        if self.resilient:
            faults.step(step)  # for rules such as "delay ms=60 from_step=10"
        self.recorder.begin_step(step)
        self.schedule.step(*inputs, **keywords)
        with self.recorder.span("O"):
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if self.resilient:
            self.round_trips_s.append(self.round_trips.look())
        if not self.has_last:
            return None
        return sum(float(loss.detach()) for loss in losses) / len(losses)

    def weights_sha256(self) -> dict[str, str]:
        """A digest of the weights of each stage here, by stage."""
        digests = {}
        for stage in self.stages:
            digest = hashlib.sha256()
            for parameter in stage.submod.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
            digests[str(stage.stage_index)] = digest.hexdigest()
        return digests


class Checkpoint:
    """Saves and loads a trainer with torch.distributed.checkpoint.

    Every entry is named by its place in the whole model, so the checkpoint of one split of the
    model loads into another.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self._folder = folder
        self._trainer = trainer

    def _state(self, step: int) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        for stage, stage_optimizer in zip(
            self._trainer.stages, self._trainer.optimizers, strict=True
        ):
            weights, moments = get_state_dict(stage.submod, stage_optimizer, options=options)
            model |= weights
            optimizer |= moments
        return {"model": model, "optimizer": optimizer, "step": step}

    def save(self, step: int) -> None:
        """Write the state after `step` steps."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(step), checkpoint_id=self._folder)

    def load(self) -> int:
        """Read the state back; returns the number of steps it has seen.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        if not (self._folder / ".metadata").exists():
            raise FileNotFoundError(
                f"--resume: no checkpoint in {self._folder}; run once without --resume"
            )
        state = self._state(0)
        load(state, checkpoint_id=self._folder)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for stage, optimizer in zip(self._trainer.stages, self._trainer.optimizers, strict=True):
            names = set(stage.submod.state_dict())
            set_state_dict(
                stage.submod,
                optimizer,
                model_state_dict={k: v for k, v in state["model"].items() if k in names},
                optim_state_dict={
                    key: value
                    for key, value in state["optimizer"].items()
                    if _parameter_of(key) in names
                },
                options=options,
            )
        return int(state["step"])


def _parameter_of(key: str) -> str:
    """`state.layers.0.mlp_in.weight.exp_avg` -> `layers.0.mlp_in.weight`."""
    return key.split(".", 1)[1].rsplit(".", 1)[0]


class Report(NamedTuple):
    """The report of one rank at the end.

    Attributes:
        losses: by step; empty but on the rank of the last stage.
        spans: those of op_recorder.
        weights_sha256: by stage.
        stats: of the resilient backend, as JSON has it, None with any other. Its `events` hold the
            adaptive schedule's changes of plan, and of the delays it has seen.
        schedule: stats() of the adaptive schedule, as JSON has it, None of any other.
        round_trips_s: by step, as measured at its end; by peer.
    """

    losses: list[float]
    spans: list[Span]
    weights_sha256: dict[str, str]
    stats: dict[str, Any] | None
    schedule: dict[str, Any] | None
    round_trips_s: list[dict[str, float]]


class RoundTrips:
    """The round trips to all peers, look by look."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], int] = {}

    def look(self) -> dict[str, float]:
        """The smoothed round trip to each peer that this rank has talked to, in seconds.

        A peer with several paths has the longest round trip of those that were measured since the
        last look. A path that is not used keeps its last round trip, however old it is.
        """
        found = {}
        for peer in stats().peers:
            fresh = []
            for path in peer.paths:
                key = peer.rank, path.name
                if path.round_trips != self._counts.get(key):
                    fresh.append(path.round_trip_s)
                self._counts[key] = path.round_trips
            every = fresh or [path.round_trip_s for path in peer.paths]
            found[str(peer.rank)] = max(every, default=0.0)
        return {peer: seconds for peer, seconds in found.items() if seconds > 0}


def gather(report: Report) -> list[Report] | None:
    """All ranks' reports, on rank 0."""
    reports: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(report, reports, dst=0)
    return reports


def summarise(arguments: argparse.Namespace, reports: list[Report]) -> dict[str, Any]:
    """The contents of --json; times in seconds."""
    times = iteration_times([report.spans for report in reports])
    losses = next(report.losses for report in reports if report.losses)
    # The first iteration also opens connections and agrees on shapes.
    steady_s = times.iteration_s[1:] or times.iteration_s
    median_s = statistics.median(steady_s)
    return {
        "format": 1,
        "torch": torch.__version__,
        "backend": arguments.backend,
        "schedule": arguments.schedule,
        "ranks": len(reports),
        "microbatches": arguments.microbatches,
        "pace_ms": arguments.pace_ms,
        "seed": arguments.seed,
        "steps": times.steps,
        "losses": losses,
        "losses_hex": [loss.hex() for loss in losses],
        "iteration_s": times.iteration_s,
        "iteration_median_s": median_s,
        "bubble_fraction": bubble_fraction(times, len(reports)),
        "tokens_per_s": arguments.rows * arguments.context * arguments.microbatches / median_s,
        "weights_sha256": {
            stage: digest for report in reports for stage, digest in report.weights_sha256.items()
        },
        "stats": [report.stats for report in reports],
        "schedule_stats": [report.schedule for report in reports],
        "round_trips_s": [report.round_trips_s for report in reports],
    }


def plan_lines(report: Report) -> list[str]:
    """The decisions of the adaptive schedule, as the first stage reports them."""
    events = report.stats["events"] if report.schedule and report.stats else []
    return [f"plan       {event['text']}" for event in events if event["kind"] == "plan"]


def timeline(arguments: argparse.Namespace, reports: list[Report]) -> dict[str, Any]:
    """The contents of --timeline: spans by rank, in seconds from the first."""
    origin_s = min(span.start_s for report in reports for span in report.spans)
    return {
        "format": 1,
        "backend": arguments.backend,
        "schedule": arguments.schedule,
        "microbatches": arguments.microbatches,
        "span": list(Span._fields),
        "ranks": [
            [
                span._replace(
                    start_s=round(span.start_s - origin_s, 6),
                    end_s=round(span.end_s - origin_s, 6),
                )
                for span in report.spans
            ]
            for report in reports
        ],
    }


def train(arguments: argparse.Namespace, prepare: Callable[[Trainer], None]) -> None:
    """Train until --steps, then report."""
    device = pick_device(arguments.device)
    trainer = Trainer(arguments, device)
    prepare(trainer)
    checkpoint = Checkpoint(arguments.checkpoint, trainer) if arguments.checkpoint else None
    first = checkpoint.load() if checkpoint is not None and arguments.resume else 0
    if first >= arguments.steps:
        raise SystemExit(f"the checkpoint is at step {first}: nothing to do until --steps")
    progress = Progress(
        arguments.steps - first, f"{arguments.schedule} over {arguments.backend}", trainer.has_last
    )
    losses: list[float] = []
    for step in range(first, arguments.steps):
        loss = trainer.step(step)
        if loss is not None:
            losses.append(loss)
            progress.update(step + 1 - first, f"loss {loss:.3f}")
    progress.close()
    if checkpoint is not None:
        checkpoint.save(arguments.steps)
    reports = gather(
        Report(
            losses,
            trainer.recorder.spans,
            trainer.weights_sha256(),
            stats().to_dict() if trainer.resilient else None,
            trainer.schedule.stats().to_dict() if arguments.schedule == ADAPTIVE else None,
            trainer.round_trips_s,
        )
    )
    if reports is None:
        return
    summary = summarise(arguments, reports)
    losses = summary["losses"]
    print(f"loss       {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}")
    print(
        f"iteration  {summary['iteration_median_s'] * 1e3:.0f} ms (median), "
        f"{summary['tokens_per_s']:,.0f} tokens/s, bubble {summary['bubble_fraction']:.0%}",
        flush=True,
    )
    for line in plan_lines(reports[0]):
        print(line, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1, default=str) + "\n")
    if arguments.timeline:
        arguments.timeline.write_text(json.dumps(timeline(arguments, reports)) + "\n")


def main(prepare: Callable[[Trainer], None] = lambda trainer: None) -> int:
    """Join the group, train, leave. `prepare` is called before the first step."""
    arguments = parse_arguments()
    # One core a rank: the ranks of one machine share its cores, and the sums of one thread are
    # the same on every machine of a kind.
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    try:
        train(arguments, prepare)
        dist.barrier()  # rank 0 holds the store: no rank leaves before all have reported
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
