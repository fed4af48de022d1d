"""Finds the backend object behind a process group, and which devices it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_resilient import _native

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["all_groups", "carried_device", "carries", "find_backend"]


def all_groups() -> list[ProcessGroup]:
    """All groups that this process is a member of, the default one first."""
    import torch.distributed as dist

    # torch has no public list of them.
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", {}))


def find_backend(group: ProcessGroup | None = None) -> Any:
    """The backend object (`_C.ProcessGroupResilient`) that carries `group`.

    `group` None means the default group. Groups wrapped for
    TORCH_DISTRIBUTED_DEBUG=DETAIL are looked into.

    Raises ValueError if the group does not use this backend, or this process is no member
    of it, or no group has been initialized.
    """
    import torch
    import torch.distributed as dist

    if group is None:
        if not dist.is_initialized():
            raise ValueError("there is no default process group: call init_process_group() first")
        group = dist.group.WORLD
    wanted = _native.load().ProcessGroupResilient
    if isinstance(group, wanted):
        return group
    if group is None or not hasattr(group, "_get_backend"):  # torch hands out a number
        raise ValueError("this process is not a member of the group")
    for device in getattr(group, "_device_types", []) or [torch.device("cpu")]:
        if (backend := _backend_of(group, torch.device(device))) is not None:
            return backend
    raise ValueError(f'the group {group.group_name!r} does not use the "resilient" backend')


def carries(group: ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` travel over this backend in `group`."""
    return _backend_of(group, device) is not None


def carried_device(group: ProcessGroup | None = None) -> torch.device:
    """Returns a device that uses this backend for its tensors in `group` (None: the default group).

    Returns the CPU if the backend carries its tensors. Raises ValueError as find_backend() does.
    """
    import torch
    import torch.distributed as dist

    find_backend(group)
    group = group or dist.group.WORLD
    assert group is not None
    devices: list[torch.device] = [torch.device("cpu"), *group._device_types]
    return next(device for device in devices if carries(group, device))


def _backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend object for tensors on `device`; None if it is another backend's."""
    wanted = _native.load().ProcessGroupResilient
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # no backend for this type of device
        return None
    # Each debug wrapper holds what it wraps.
    while not isinstance(backend, wanted) and hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend if isinstance(backend, wanted) else None
