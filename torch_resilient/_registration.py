"""Makes the name "resilient" known to torch.distributed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch_resilient import _native, _process_end
from torch_resilient._observe import observers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

NAME = "resilient"


# The process that ends the engine when it ends. A fork has an engine of its own.
_engine_pid = 0


def _load() -> Any:
    """The compiled module, whose engine ends in order when this process does."""
    global _engine_pid
    native = _native.load()
    if _engine_pid != os.getpid():
        _engine_pid = os.getpid()
        _process_end.run_at_end(native.end_process, _process_end.ENGINE_ORDER)
    return native


def create_backend(dist_opts: Any, options: Any = None) -> Any:
    """Called by torch for each new group; loads the compiled module on first use."""
    native = _load()
    if not observers.asked_for():
        return native.create(dist_opts, options)
    observers.check()
    before_s = time.time()
    backend = native.create(dist_opts, options)
    ranks = dist_opts.global_ranks_in_group
    rank = ranks[dist_opts.group_rank] if ranks else dist_opts.group_rank
    observers.begin(rank, (before_s, time.time()))
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


def create_group(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str,
    timeout: timedelta,
    global_ranks: Sequence[int] = (),
) -> ProcessGroup:
    """Creates a group on this backend that `torch.distributed` does not list.

    Frameworks use such groups when their members change: a failed group is aborted, and another
    one is created from the ranks that are left. `store` must hold no key of another group.
    `global_ranks` are the members' ranks in the whole job, for messages; empty: 0 to `size` - 1.

    Raises what `init_process_group` raises.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _DistributedBackendOptions

    arguments = _DistributedBackendOptions()
    arguments.store = store
    arguments.group_rank = rank
    arguments.group_size = size
    arguments.group_id = name
    arguments.timeout = timeout
    arguments.global_ranks_in_group = list(global_ranks)
    backend = create_backend(arguments)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device in _Devices():
        group._register_backend(torch.device(device), kind, backend)
    return group


def end_group(group: ProcessGroup) -> None:
    """Ends a group of create_group() before another one with other members replaces it.

    A peer may still be in an operation that has ended here, and abort() would fail that operation.
    Only if an operation is pending here is the group aborted, and all its operations fail at once.
    """
    from torch_resilient._reports.stats import stats

    if stats(group).operations_pending:
        group.abort()
    else:
        group.shutdown()


def register() -> None:
    """Registers the backend; a second call does nothing.

    Raises RuntimeError if this torch has no distributed package.
    """
    # Alone first: only this waits if another thread is importing torch at this moment.
    import torch  # noqa: F401
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    # torch's own list gives the right answer even after a reload of this module, and when the
    # autoload of `import torch` above has already come back here.
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
