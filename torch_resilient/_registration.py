"""Makes the name "resilient" known to torch.distributed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from torch_resilient import _native, _observers

NAME = "resilient"


def create_backend(dist_opts: Any, options: Any = None) -> Any:
    """Called by torch for each new group; loads the compiled module on first use."""
    if not _observers.asked_for():
        return _native.load().create(dist_opts, options)
    _observers.check()
    before_s = time.time()
    backend = _native.load().create(dist_opts, options)
    ranks = dist_opts.global_ranks_in_group
    rank = ranks[dist_opts.group_rank] if ranks else dist_opts.group_rank
    _observers.begin(rank, (before_s, time.time()))
    return backend


class _Devices(Sequence[str]):
    """The types of devices that the backend can use with this torch, on this host.

    They are determined when torch forms a group. Asking the driver while torch is imported would
    ignore a program that sets CUDA_VISIBLE_DEVICES afterwards, and could break CUDA in processes
    that it forks.
    """

    def _usable(self) -> list[str]:
        import torch

        # False in a CUDA build of torch without a GPU, too.
        return ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]

    def __getitem__(self, index: Any) -> Any:
        return self._usable()[index]

    def __len__(self) -> int:
        return len(self._usable())

    def __repr__(self) -> str:
        return repr(self._usable())


def register() -> None:
    """Registers the backend; a second call does nothing.

    Raises RuntimeError if this torch has no distributed package.
    """
    # Alone first: only this waits if another thread is importing torch at this moment.
    import torch  # noqa: F401
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    # torch's own list, so that the answer is right after a reload of this module, too, and
    # when `import torch` above has already come back here through its autoload.
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])
        dist.Backend.backend_capability[NAME] = _Devices()  # type: ignore[assignment]


_warned = False


def _warn(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:  # the program made warnings errors
        sys.stderr.write(text + "\n")


def register_or_warn() -> None:
    """Like register(), but never raises: a failure becomes a warning, given once.

    torch calls this at the end of `import torch`, which would fail with it.
    """
    global _warned
    try:
        register()
    except Exception as error:
        if not _warned:
            _warned = True
            _warn(f'the torch.distributed backend "{NAME}" is not available: {error}')


def _torch_will_call() -> bool:
    """Whether `import torch`, when it ends, calls register_or_warn through the entry point."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1" and bool(
        importlib.metadata.entry_points(group="torch.backends", name=NAME)
    )


def on_import() -> None:
    """Called at the end of `import torch_resilient`: registers, or leaves it to `import torch`.

    torch is not imported here if its own import leads back to this package: with two threads,
    one importing torch and one torch_resilient, each would wait for the other's import lock.
    """
    torch = sys.modules.get("torch")
    ready = torch is not None and not getattr(torch.__spec__, "_initializing", False)
    if ready or not _torch_will_call():
        register_or_warn()
