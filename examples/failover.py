"""The network fails on purpose, the training does not: 25 to 40 seconds on two cores, no root.

    python examples/failover.py
    python examples/failover.py --verbs   # over RDMA, in two guests: root, and `make verbs-lab`

Trains a small model on two ranks (train_ddp.py) twice: once in peace, and once under
`torch-resilient chaos`, which breaks, silences, delays and throttles the connections between them.
Prints what each fault did, then compares the losses, which must be equal to the last bit. Exit code
0: they are, and the faults really happened; 1: not so, and the text says what.

With --verbs, two guests of the verbs lab train over RDMA, with DDP and as a pipeline, under a fault
every second at either end. Losses and weights must be equal. It takes two to three minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import failover_verbs

from torch_resilient.testing import LabUnavailable

LOSS = re.compile(r"^step (\d+) loss [\d.]+ (\S+)$", re.MULTILINE)
# A machine too slow for this limit should lower --steps.
RUN_TIMEOUT_S = 180.0
FAULTS = 5
STEPS = 500


class FailoverError(Exception):
    """A claim does not hold; the message names it and the reason."""


def training(steps: int) -> list[str]:
    """The command of a training on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*torchrun, str(Path(__file__).with_name("train_ddp.py")), f"--steps={steps}"]


def run(command: Sequence[str]) -> str:
    """Returns its output. Raises FailoverError, with the end of it, if it fails or hangs."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # Ctrl-C comes to us only, and we stop it in order
        )
        try:
            process.wait(timeout=RUN_TIMEOUT_S)
            how = f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            how = f"was not done after {RUN_TIMEOUT_S:.0f} s"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
        output.seek(0)
        text = output.read()
    if how != "failed with exit code 0":
        tail = "\n".join(text.splitlines()[-40:])
        raise FailoverError(f"{' '.join(command)}\n{how}:\n{tail}")
    return text


def losses_of(output: str, steps: int) -> list[str]:
    """The loss of every step, exactly. Raises FailoverError if one is missing."""
    found = LOSS.findall(output)
    if [int(step) for step, _ in found] != list(range(steps)):
        raise FailoverError(f"expected the losses of {steps} steps, got {len(found)}:\n{output}")
    return [loss for _, loss in found]


def compare(ours: Sequence[str], reference: Sequence[str]) -> None:
    """Raises FailoverError unless they are equal to the last bit."""
    for step, (one, other) in enumerate(zip(ours, reference, strict=True)):
        if one != other:
            raise FailoverError(
                f"the loss of step {step} is {one} under faults, and {other} without: a message "
                "was changed, lost or mixed up"
            )


def chaos_options(seed: int, training_s: float) -> list[str]:
    """Faults spread over the time that the training takes, from when it is under way."""
    first_s = 2.0 + 0.1 * training_s
    every_s = (0.95 * training_s - first_s) / FAULTS
    return [
        f"--seed={seed}",
        f"--first={first_s:.2f}",
        f"--every={every_s:.2f}",
        f"--duration={first_s + FAULTS * every_s + 0.1:.2f}",
    ]


def over_rdma(seed: int, steps: int) -> int:
    """The same in the verbs lab; returns the exit code."""
    try:
        failover_verbs.run(seed, steps)
    except (failover_verbs.VerbsFailoverError, LabUnavailable) as error:
        sys.stderr.write(f"failover.py: {error}\n")
        return 1
    return 0


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=7, help="of the faults (default: 7)")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of each training (default: 500; with --verbs {failover_verbs.STEPS})",
    )
    parser.add_argument("--verbs", action="store_true", help="over RDMA in the verbs lab")
    arguments = parser.parse_args()
    steps: int | None = arguments.steps
    if arguments.verbs:
        return over_rdma(arguments.seed, failover_verbs.STEPS if steps is None else steps)
    steps = STEPS if steps is None else steps
    try:
        print(f"training for {steps} steps without faults ...", flush=True)
        began_s = time.monotonic()
        reference = losses_of(run(training(steps)), steps)
        took_s = time.monotonic() - began_s
        # Starting Python and torch, and ending them, is no training.
        start_s = time.monotonic()
        run(training(1))
        training_s = max(5.0, took_s - (time.monotonic() - start_s))
        print(f"took {training_s:.1f} s; again, with {FAULTS} faults ...\n", flush=True)
        chaos = [sys.executable, "-m", "torch_resilient.cli", "chaos"]
        output = run([*chaos, *chaos_options(arguments.seed, training_s), "--", *training(steps)])
        compare(losses_of(output, steps), reference)
    except FailoverError as error:
        sys.stderr.write(f"failover.py: {error}\n")
        return 1
    # The report begins with the head of its table.
    print(output[output.index("\nat ") + 1 :])
    print(f"all {steps} losses are bitwise equal to those of the run without faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
