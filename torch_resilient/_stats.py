"""What the backend knows about a group: peers, paths, bytes, delays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_resilient import _events, _native

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["carried_device", "carries", "find_backend", "stats"]


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
    """A device whose tensors travel over this backend in `group` (None: the default group).

    The CPU if it is one. Raises ValueError as find_backend() does.
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


def stats(group: ProcessGroup | None = None) -> dict[str, Any]:
    """A snapshot of what the backend knows about `group` (None: the default group).

    The result is made of plain dicts, lists, numbers and strings, fit for JSON:

    `group` (its name), `rank`, `size`, `collectives` (how many were started),
    `operations_pending`, and `peers`, one dict for each other rank: `rank` (in this group),
    `host`, `state` ("unconnected", "up", "suspect", "dead" or "left"), `messages_sent`,
    `messages_received`, `bytes_sent`, `bytes_received`, `deliveries` (how many point-to-point
    messages, the large ones at least, were measured from the call until the peer acknowledged the
    last byte), `deliveries_s` (the last 32 of these times, oldest first), `last_heard_seconds_ago`
    (None: never), `last_error`, and `paths`, one dict for each: `slot` (-1: memory shared with a
    rank on the same host; -2 and below: datagrams), `state` ("up";
    "reserve": it works and is not needed; "suspect": silent; "stalled":
    the same, and there is no other to take over; "proving": back again;
    "connecting", "down" or "unused"), `nic`, `remote_nic` (empty where the system chooses),
    `local_address`, `remote_address`, `bytes_sent`, `bytes_received`, `chunks_sent`,
    `chunks_retransmitted`, `times_suspect`, `capacity_bytes_per_s` (what it would carry; 0 while
    unknown), `round_trip_s` (smoothed, 0 while unknown),
    `round_trip_least_s` (the least of the last one to two seconds), `round_trips` (how many were
    measured), `round_trips_s` (the last 32 of them, oldest first), `goodput_bytes_per_s`
    (smoothed, acknowledged bytes only), `reconnects`, `last_error`, and `datagrams`: None, or
    of a path of datagrams `packet_bytes` (of payload in a full packet), `packets` sent of any
    kind, `bytes` of these with all headers, of these packets `parity`, `retransmitted` and
    `lost` (as the peer says), `loss_rate` and `burst_packets` (the mean length of a burst of
    losses) lately, `pace_bytes_per_s`, and of packets received `recovered` (by parity),
    `zero_filled` (tolerated losses), `duplicates` and `forged` (not sealed by the peer: dropped).

    `listener` counts the callers at this process's port: `accepted`, and of these `admitted`
    (proved that they belong to the job), `refused` (wrong proof, version or bytes, or not
    expected), `timed_out`, `broken_off` (by the caller), `dropped` (too many at a time) and
    `pending` (now). Anything but `admitted` points at strangers or at ranks with other
    settings; the log has more.

    `events` lists what was decided or noticed in this process, oldest first: `time_s` (since the
    epoch), `kind`, `text`, and numbers that depend on the kind.

    Counters belong to the process's one engine: groups with the same ranks share them.

    Raises ValueError as find_backend() does; RuntimeError in a child of fork().
    """
    snapshot: dict[str, Any] = _native.load().stats(find_backend(group))
    snapshot["events"] = _events.recent()
    return snapshot
