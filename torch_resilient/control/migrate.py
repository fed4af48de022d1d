"""Carries a new layout out: what a rank holds moves to the rank that takes over its place.

    old_groups = build_groups(layout)                 # and stage, schedule, optimizer, as ever
    ...                                               # between two steps:
    state = capture_state(module, optimizer)
    state = migrate_state(layout, proposal.layout, state)
    groups = build_groups(proposal.layout)            # then the module and optimizer of the new
    restore_state(state, module, optimizer)           # place, and its schedule

Training goes on with the same bits as if nothing had been moved, if the order of the ranks in a
reduction does not matter, as with two replicas. This is the one module of `control` that needs
torch.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torch_resilient.control import plain_state
from torch_resilient.control.layout import Layout

State = dict[str, Any]

# The header, which comes first: a checksum of both layouts, and the number of bytes of the
# description that follows. Two int64.
_HEADER_NUMBERS = 2
# More is no description but a fault; without a bound, a wrong number would allocate all memory.
_DESCRIPTION_BYTES_MAX = 1 << 31


@dataclass(frozen=True)
class LayoutGroups:
    """The process groups of one rank in a layout.

    Attributes:
        data: the ranks that hold the same stage; its rank r is that of replica r.
        pipeline: the ranks of the same replica; its rank s is that of stage s, as PipelineStage
            expects.
    """

    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup


def build_groups(
    layout: Layout, *, backend: str | None = None, timeout: timedelta | None = None
) -> LayoutGroups | None:
    """Makes all process groups of `layout`; returns those of this rank, None if it has no place.

    All ranks of the default group must call it, with the same layout: groups are made in the same
    order everywhere, those of the stages first. `backend` and `timeout` are those of
    `torch.distributed.new_group`. Groups of an older layout stay until they are destroyed.

    Raises ValueError if ranks do not stand in ascending order and torch is too old to keep
    another one.
    """
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    if keeps_order:
        options["sort_ranks"] = False

    def build(ranks: Sequence[int]) -> dist.ProcessGroup:
        if not keeps_order and list(ranks) != sorted(ranks):
            raise ValueError(
                f"group of ranks {list(ranks)}: torch {torch.__version__} would sort them, and "
                "then stages have other ranks than PipelineStage expects; torch 2.13 does not"
            )
        group: dist.ProcessGroup = dist.new_group(list(ranks), **options)
        return group

    data = [build(layout.data_group(stage)) for stage in range(layout.num_stages)]
    pipelines = [build(row) for row in layout.ranks]
    rank = dist.get_rank()
    if rank not in layout.world:
        return None
    place = layout.place(rank)
    return LayoutGroups(data[place.stage], pipelines[place.replica])


def capture_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    python_random: bool = False,
    numpy_random: bool = False,
) -> State:
    """The state that a rank hands on for another to continue in its place, without copying it.

    Parameters and buffers, those that a state_dict leaves out, too; the optimizer's state; the
    state of the CPU's random generator, of that of `device` if it is not the CPU, and of Python's
    and numpy's global ones if asked for. Gradients are not part of it: call it between
    `optimizer.step()` and the next backward. More may be added to the dict, such as the
    state_dict of a learning rate scheduler.
    """
    # A module's extra state (get_extra_state) need not be a tensor.
    tensors = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
    rng: State = {"cpu": torch.get_rng_state()}
    where = torch.device(device) if device is not None else torch.device("cpu")
    if where.type != "cpu":
        rng["device"] = torch.get_device_module(where).get_rng_state(where)
    if python_random:
        rng["python"] = random.getstate()
    if numpy_random:
        rng["numpy"] = np.random.get_state()
    return {
        "module": tensors,
        "buffers": {
            name: buffer.detach() for name, buffer in module.named_buffers() if name not in tensors
        },
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "rng": rng,
    }


def restore_state(
    state: State,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Puts what `capture_state` gave on the rank that had this place before into new objects.

    `module` is one of the stage that this rank holds now, `optimizer` one of its parameters; both
    may be new. The random generators are set last, so it does not matter what building them has
    drawn. `optimizer.load_state_dict` converts floating-point state to the type of its parameter:
    an optimizer that keeps another one must be restored by its own means.

    Raises what load_state_dict raises if the module is another one; ValueError if there is no
    optimizer state for `optimizer` or there is a buffer that the module does not have.
    """
    module.load_state_dict(state["module"])
    buffers = dict(module.named_buffers())
    for name, value in state["buffers"].items():
        if name not in buffers:
            raise ValueError(f"the module has no buffer {name!r}; is it that of another stage?")
        buffers[name].copy_(value)
    if optimizer is not None:
        if state["optimizer"] is None:
            raise ValueError("the state was captured without an optimizer")
        optimizer.load_state_dict(state["optimizer"])
    rng = state["rng"]
    if "python" in rng:
        random.setstate(rng["python"])
    if "numpy" in rng:
        np.random.set_state(rng["numpy"])
    if "device" in rng and device is not None:
        where = torch.device(device)
        torch.get_device_module(where).set_rng_state(rng["device"].cpu(), where)
    torch.set_rng_state(rng["cpu"].cpu())


def migrate_state(
    old: Layout,
    new: Layout,
    state: State,
    group: dist.ProcessGroup | None = None,
    *,
    through: torch.device | str | None = None,
) -> State:
    """Hands `state` to the rank that takes this rank's place, and returns that of its own new one.

    Args:
        old, new: the same ranks, in the numbers of the default group; both the same on all ranks.
        state: what `capture_state` gives, or any other plain containers with tensors and numbers
            (`torch_resilient.control.plain_state`). Nothing is pickled: a peer cannot make this
            rank run code.
        group: all ranks that move must be members; None is the default group.
        through: the device from which all is sent, for a group that has a backend only for one:
            "cuda" with NCCL. With "cpu", received tensors also stay in host memory, and the device
            need not hold two states; `restore_state` copies them. By default tensors go
            from the device that they are on to the same type of device, and the rest by the CPU.

    A rank that stays gets `state` itself and sends nothing. Every rank that moves sends its state
    once and receives one, in three rounds: sizes, descriptions, tensors. In each all is posted
    before anything is waited for, so ranks in a circle do not wait for each other. Until it
    returns, what `state` holds must not be changed; it never changes it itself, so after an error
    the caller still has it.

    Raises ValueError if the layouts do not fit each other, this rank has no place in them, the
    rank on the other side has been given other layouts, or it sends something that is no state;
    TypeError, before anything is sent, for tensors that are more than their bytes (sparse,
    quantized, without data, or of a subclass such as DTensor) and for objects of other classes;
    what the group raises.
    """
    # Paper: PIPEMORPH §7.3, the places change in the running job
    old.moved(new)  # they fit
    rank = dist.get_rank()
    place, new_place = old.place(rank), new.place(rank)
    if place == new_place:
        return state
    destination, source = new.rank_at(place), old.rank_at(new_place)
    via = None if through is None else torch.device(through)
    control = via or torch.device("cpu")

    text, outgoing = plain_state.take_apart(state)
    # A copy, since torch wants memory that can be written to.
    description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    layouts = zlib.crc32(f"{old.to_json()} {new.to_json()}".encode())

    header = torch.tensor([layouts, description.numel()], dtype=torch.int64, device=control)
    incoming_header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=control)
    _exchange([header], destination, [incoming_header], source, group)
    other_layouts, size = incoming_header.tolist()
    if other_layouts != layouts:
        raise ValueError(
            f"rank {source} has been given other layouts than rank {rank}, whose are "
            f"{old.to_json()} and {new.to_json()}"
        )
    if not 0 < size <= _DESCRIPTION_BYTES_MAX:
        raise ValueError(f"rank {source} announces a description of {size} bytes")
    incoming = torch.empty(size, dtype=torch.uint8, device=control)
    _exchange([description.to(control)], destination, [incoming], source, group)
    try:
        parts = plain_state.Parts(incoming.cpu().numpy().tobytes())
    except ValueError as error:
        raise ValueError(f"rank {source}: {error}") from None
    received = [
        torch.empty(each.shape, dtype=each.dtype, device=via or each.device_type)
        for each in parts.tensors
    ]
    _exchange([_plain(each, via) for each in outgoing], destination, received, source, group)
    if via is not None and via.type != "cpu":
        received = [
            tensor.to(each.device_type)
            for tensor, each in zip(received, parts.tensors, strict=True)
        ]
    try:
        found: State = parts.put_together(received)
    except ValueError as error:
        raise ValueError(f"rank {source}: {error}") from None
    return found


def _plain(tensor: torch.Tensor, via: torch.device | None) -> torch.Tensor:
    """The same numbers, contiguous, on the device they are sent from."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain if via is None else plain.to(via)


def _exchange(
    outgoing: Sequence[torch.Tensor],
    destination: int,
    incoming: Sequence[torch.Tensor],
    source: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Sends some contiguous tensors and receives others, as bytes, which any backend carries.

    All is posted before the first wait; in one batch for each type of device, since NCCL runs the
    operations with one peer in order: alone, the sends of two ranks that exchange would wait for
    each other's receives.
    """
    batches: dict[str, list[dist.P2POp]] = {}
    for operation, peer, tensors in (
        (dist.isend, destination, outgoing),
        (dist.irecv, source, incoming),
    ):
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.reshape(-1).view(torch.uint8)
                batch = batches.setdefault(tensor.device.type, [])
                batch.append(dist.P2POp(operation, flat, peer, group))
    works = [work for batch in batches.values() for work in dist.batch_isend_irecv(batch)]
    for work in works:
        work.wait()
