"""The device under test: CUDA, the strict device of the tests, or host memory."""

from __future__ import annotations

import contextlib
import functools
import time
from contextlib import AbstractContextManager
from typing import Any

import torch

KINDS = ("cuda", "strict", "cpu")

# (kind, ability): why the device lacks it. The checks that need it are skipped.
_LACKS = {
    ("cpu", "streams"): "host memory has no streams",
    ("cpu", "graphs"): "host memory has no graphs",
    ("cpu", "kernels"): "the kernels need CUDA",
    ("cpu", "two devices"): "there is one host memory",
    ("strict", "kernels"): "the kernels need CUDA",
    ("strict", "functional"): "torch has no functional collectives for this device",
    ("strict", "FSDP2"): "torch.strict has no streams",
    ("strict", "pipelines"): "torch.strict tells neither free memory nor times of events",
}
# The mean time of a copy of the strict device: later than the calls that follow it.
_COPY_S = 0.0003
# Enough cycles to measure a clock by, and at most some 20 ms on any GPU.
_CALIBRATION_CYCLES = 20_000_000


def name_of(kind: str) -> str:
    """The name of the hardware. It does not make the device known to torch in this process."""
    if kind == "cuda":
        return torch.cuda.get_device_name(0)
    return {"strict": "strict device (host memory)", "cpu": "host memory"}[kind]


class Device:
    """One device in this process.

    Args:
        kind: one of KINDS.
        index: the wanted device; where there is no such one, it is the first.

    Attributes:
        torch_device: where tensors are.
        controls: of the strict device (`strict_device.load`), else None.
    """

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.controls: Any = None
        if kind == "strict":
            import strict_device

            self.controls = strict_device.load()
        self.count = {
            "cuda": torch.cuda.device_count,
            "strict": lambda: int(self.controls.device_count()),
            "cpu": lambda: 1,
        }[kind]()
        self.index = index if index < self.count else 0
        self.torch_device = torch.device(kind) if kind == "cpu" else torch.device(kind, self.index)

    def start(self) -> None:
        """Makes the device current, and its results the same in every run."""
        if self.kind == "strict":
            self.controls.set_device(self.index)
            self.controls.set_copy_time(_COPY_S)
        elif self.kind == "cuda":
            torch.cuda.set_device(self.torch_device)
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Otherwise torch fills every new tensor, which hides stale data and takes time.
            torch.utils.deterministic.fill_uninitialized_memory = False
            self.sleep(0.0)  # measures the clock now, because that waits for the device

    @property
    def accelerated(self) -> bool:
        """Whether work on the device is late."""
        return self.kind != "cpu"

    def lacks(self, ability: str) -> str:
        """Why the device cannot do it; empty if it can."""
        if ability == "two devices" and self.kind != "cpu" and self.count < 2:
            return "needs two GPUs"
        if ability == "relaxed captures" and self.kind == "strict" and torch.version.cuda:
            return "this torch has CUDA's own relaxed mode, which the strict device does not see"
        return _LACKS.get((self.kind, ability), "")

    def backend(self) -> str:
        """For init_process_group: host tensors and those of the device."""
        return "cpu:resilient" + (f",{self.kind}:resilient" if self.accelerated else "")

    def stream(self) -> AbstractContextManager[Any]:
        """A new stream, current in the context."""
        return self.on(self.new_stream())

    def new_stream(self) -> Any:
        """A stream, or None where there are none."""
        return torch.Stream(self.torch_device) if self.accelerated else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` current; None changes nothing."""
        return contextlib.nullcontext() if stream is None else stream

    def sleep(self, seconds: float) -> None:
        """Puts a kernel on the current stream that does nothing for so long."""
        if self.kind == "strict":
            self.controls.sleep(seconds)
        elif self.kind == "cuda":
            torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def hold(self, seconds: float) -> None:
        """Stops the current stream until release(), on CUDA for `seconds`."""
        if self.kind == "strict":
            self.controls.hold()
        else:
            self.sleep(seconds)

    def release(self) -> None:
        """Ends hold()."""
        if self.kind == "strict":
            self.controls.release()
        else:
            self.synchronize()

    def synchronize(self) -> None:
        """Waits for all streams of the device."""
        if self.kind == "strict":
            self.controls.synchronize(self.index)
        elif self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def begin_capture(self) -> Any:
        """Begins a capture on the current stream; its result goes to end_capture()."""
        if self.kind == "strict":
            self.controls.begin_capture()
            return None
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        return graph

    def record(self, tensor: torch.Tensor) -> None:
        """Adds a kernel to a capture; the strict device records none."""
        if self.kind == "cuda":
            tensor.fill_(1.0)

    def end_capture(self, capture: Any) -> bool:
        """Whether the capture was still valid when it ended."""
        if self.kind == "strict":
            return bool(self.controls.end_capture())
        try:
            capture.capture_end()
        except RuntimeError:
            return False
        return True

    def contexts(self) -> list[int]:
        """The devices on which this process has a context."""
        if self.kind == "strict":
            return list(self.controls.contexts())
        return [i for i in range(self.count) if torch._C._cuda_hasPrimaryContext(i)]

    @functools.cached_property
    def _cycles_per_s(self) -> float:
        """Measured: the clock of a GPU depends on its load."""
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        torch.cuda.synchronize(self.torch_device)
        before_s = time.monotonic()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        torch.cuda.synchronize(self.torch_device)
        return _CALIBRATION_CYCLES / (time.monotonic() - before_s)
