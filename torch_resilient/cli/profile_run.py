"""One run of `torch-resilient profile-drop`: a training script, its boundaries and its losses.

    python -m torch_resilient.cli.profile_run SETTINGS SCRIPT [ARGUMENT...]

SETTINGS is a JSON object, the fields of `Settings`. Writes its observations to rank<N>.json in the
folder `out`. An exception of the script propagates, and then no file is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from torch_resilient.smart.activation_drop import (
    Boundary,
    Packets,
    evenly_spaced,
    make_boundaries,
    may_miss,
    plain_name,
)

# Number of module names to list if none is usable.
_MODULES_TOLD = 12


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        out: folder for the observations.
        names: boundaries in order; None: find them.
        stages: the number of stages of the model if boundaries must be found.
        bounds: by boundary, the fraction of each message that is dropped; others are exact.
        fractions: for each of them the result contains the packets of a message.
        direction: as for make_boundaries().
        packets, exact_below_bytes: as for Boundary.
        seed: of everything: the script's random numbers and the dropped packets.
        steps: the script ends after this number; None: it ends by itself.
        module: SCRIPT is the name of a module, as for `python -m`.
    """

    out: str
    names: Sequence[str] | None
    stages: int
    bounds: Mapping[str, float]
    fractions: Sequence[float]
    direction: Literal["forward", "backward", "both"]
    packets: Packets
    exact_below_bytes: int
    seed: int
    steps: int | None
    module: bool


class _Finished(SystemExit):
    """Ends the script after its last step and bypasses its error handling."""


class Watcher:
    """Finds the boundaries in the model that the script trains, and records its losses.

    A loss is a scalar from which the script goes backward. A step ends with the first step of an
    optimizer after that; further optimizers belong to it, and so do several backward passes before.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pending: list[Tensor] = []  # losses of this step
        self._went_backward = False
        self.steps = 0
        self.losses: list[float | None] = []  # by step; None: no loss on this rank
        self.boundaries: dict[str, Boundary] = {}
        self.how = ""  # how boundaries were found; "": they were given
        self._stages = False  # whether the script makes stages itself
        self._seen: set[nn.Module] = set()
        self._names: list[str] = []  # of modules, as examples
        self._unscaled: tuple[Tensor, Tensor] | None = None

    def start(self) -> None:
        """Patches torch. Nothing is restored, since the process serves only this run."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_module_forward_pre_hook(self._on_module)
        register_optimizer_step_post_hook(self._on_optimizer_step)
        # Tensor.backward() and torch.distributed.pipelining call these two.
        torch.autograd.backward = self._watched(torch.autograd.backward)
        torch.autograd.grad = self._watched(torch.autograd.grad, only_of_stages=True)
        scale = torch.amp.GradScaler.scale

        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, Tensor):
                self._unscaled = (result, outputs)
            return result

        torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign, assignment]
        if torch.distributed.is_available():
            self._watch_stages()

    def _watched(
        self, function: Callable[..., Any], only_of_stages: bool = False
    ) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            if self._stages or not only_of_stages:
                self._went_backward = True
                given = arguments or (keywords.get("tensors") or keywords.get("outputs") or (),)
                for each in [given[0]] if isinstance(given[0], Tensor) else list(given[0]):
                    if isinstance(each, Tensor) and each.numel() == 1:
                        self._pending.append(self._loss_of(each))
            return function(*arguments, **keywords)

        return watched

    def _loss_of(self, tensor: Tensor) -> Tensor:
        """A copy of the loss, from before GradScaler scaled it: scales change."""
        if self._unscaled is not None and self._unscaled[0] is tensor:
            tensor = self._unscaled[1]
        return tensor.detach().clone()

    def _on_optimizer_step(self, *_: Any) -> None:
        if not self._went_backward:
            return
        values = [float(each) for each in self._pending]
        self.losses.append(sum(values) / len(values) if values else None)
        self._pending, self._went_backward = [], False
        self.steps += 1
        if self.steps == self._settings.steps:
            raise _Finished(0)

    # ---- boundaries -----------------------------------------------------------------------------

    def _watch_stages(self) -> None:
        from torch.distributed.pipelining import PipelineStage

        make = PipelineStage.__init__

        def made(stage: Any, *arguments: Any, **keywords: Any) -> None:
            make(stage, *arguments, **keywords)
            if not self._stages:
                self._stages = True
                self.how = f"the script's {stage.num_stages} pipeline stages"
            # The output of the last stage goes to the loss and crosses no boundary.
            if not stage.is_last:
                asked = self._settings.names
                name = f"stage{stage.stage_index}"
                if asked is None or name in asked:
                    every = [f"stage{i}" for i in range(stage.num_stages - 1)]
                    self._watch(asked or every, {name: stage.submod})

        PipelineStage.__init__ = made  # type: ignore[method-assign, assignment]

    def _on_module(self, module: nn.Module, _: Any) -> None:
        """Runs before every forward; examines modules that are not part of an earlier one."""
        if module in self._seen or not module.training:
            return
        self._seen.update(module.modules())
        named = {plain_name(name): each for name, each in module.named_modules()}
        self._names += [name for name in named if name]
        names = self._settings.names
        if names is not None:
            self._watch(names, {name: named[name] for name in names if name in named})
        elif not self.boundaries and not self._stages:
            parent, chosen = evenly_spaced(module, self._settings.stages)
            if chosen:
                count = sum(1 for _ in named[parent].named_children())
                self.how = (
                    f"of the {count} children of {parent or type(module).__name__}, evenly spaced"
                )
                self._watch(chosen, {name: named[name] for name in chosen})

    def _watch(self, every: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
        """Adds boundaries after these modules; `every` has the names of all, for the seeds."""
        settings = self._settings
        # Each replica of a data-parallel training drops different packets.
        rank = int(os.environ.get("RANK", "0"))
        made = make_boundaries(
            every,
            settings.bounds,
            direction=settings.direction,
            seed=settings.seed * 1013 + rank,
            packets=settings.packets,
            exact_below_bytes=settings.exact_below_bytes,
        )
        for boundary in made:
            if boundary.name in modules and boundary.name not in self.boundaries:
                self.boundaries[boundary.name] = boundary
                boundary.watch(modules[boundary.name])

    def _may_miss(self, message_bytes: int) -> list[int]:
        """The number of dropped packets of a message of this size, by fraction."""
        settings = self._settings
        if message_bytes < settings.exact_below_bytes:
            return [0] * len(settings.fractions)
        return [may_miss(message_bytes, fraction) for fraction in settings.fractions]

    def result(self) -> dict[str, Any]:
        """The observations, for JSON."""
        return {
            "losses": self.losses,
            "how": self.how,
            "modules": self._names[:_MODULES_TOLD],
            "boundaries": {
                name: {
                    "forward": dataclasses.asdict(each.forward.traffic),
                    "backward": dataclasses.asdict(each.backward.traffic),
                    "may_miss": self._may_miss(
                        max(w.traffic.largest_bytes for w in (each.forward, each.backward))
                    ),
                }
                for name, each in self.boundaries.items()
            },
        }


def main() -> None:
    """Runs the script as Python would."""
    settings = Settings(**json.loads(sys.argv[1]))
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    watcher = Watcher(settings)
    watcher.start()
    try:
        if settings.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    rank = os.environ.get("RANK", "0")
    Path(settings.out, f"rank{rank}.json").write_text(json.dumps(watcher.result()))


if __name__ == "__main__":
    main()
