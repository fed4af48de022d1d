"""Facts about torch's private pipelining that torch_actions.py builds on.

When one of these fails with a new torch, look at the code that it names before anything else.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_schedules import MICROBATCHES, Part, batch_of, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    schedules,
)
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel


def test_the_names_are_there() -> None:
    for name in (
        "_check_inputs",
        "_initialize_stage",
        "_maybe_compute_loss",
        "_maybe_get_loss",
        "_update_losses",
        "_step_microbatches",
    ):
        assert callable(getattr(PipelineScheduleSingle, name)), name
    for name in (
        "get_fwd_recv_ops",
        "get_bwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_send_ops",
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
        "backward_maybe_with_nosync",
        "perform_reduce_grad",
        "clear_runtime_states",
    ):
        assert callable(getattr(PipelineStage, name)), name
    # All of torch's own schedules wait for their messages in it.
    assert list(inspect.signature(schedules._wait_batch_p2p).parameters) == ["work"]
    parameters = list(inspect.signature(PipelineStage.backward_maybe_with_nosync).parameters)
    assert parameters == ["self", "backward_type", "bwd_kwargs", "last_backward"]
    assert list(inspect.signature(stage_backward_weight).parameters) == [
        "weights",
        "param_groups",
        "retain_graph",
    ]


def private_state(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_of)
    x, target = batch_of(0)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
    # A failed step leaves this behind, and we clear it.
    forwards = "fwd_cache" if hasattr(stage, "fwd_cache") else "_forward_chunk_states"
    for name in (forwards, "bwd_cache", "dw_runner", "backward_state"):
        assert isinstance(getattr(stage, name), dict), name
    assert isinstance(schedule._internal_losses, list)
    # torch uses these flags to create new buffers for messages of another size.
    assert schedule._stage_forward_initialized is True
    assert schedule._stage_backward_initialized is True
    # Each output goes to one stage; its gradient arrives in the place of the output.
    assert [len(stages) for stages in stage.act_send_info.values()] == [1 - rank]
    # All microbatches have receive buffers of their own (torch 2.15 and later: once they are
    # posted), so all can be posted at once.
    receive = stage.get_fwd_recv_ops if rank else stage.get_bwd_recv_ops
    operations = [receive(microbatch) for microbatch in range(MICROBATCHES)]
    assert len({operation.tensor.data_ptr() for (operation,) in operations}) == MICROBATCHES
    (operation,) = operations[0]
    assert operation.op is dist.irecv
    assert (operation.group_peer, operation.tag) == (1 - rank, 0)


def test_state_and_buffers() -> None:
    run_ranks(private_state, backend="gloo")


def static_stage(module: nn.Module, index: int, group: Any = None) -> PipelineStage:
    """One of two stages between which 2 x 4 numbers go, with its shapes declared."""
    shape = torch.zeros(2, 4, requires_grad=True)
    inputs = shape if index else shape.detach()
    cpu = torch.device("cpu")
    return PipelineStage(module, index, 2, cpu, input_args=inputs, output_args=shape, group=group)


def first_stages_backward(rank: int) -> list[int]:
    """The number of gradients of the first stage after each of its B and W."""
    torch.manual_seed(rank)
    module = nn.Linear(4, 4)
    stage = static_stage(module, rank)
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_of)
    counts = []

    def watch(name: str) -> None:
        theirs = getattr(stage, name)

        def watched(*arguments: Any, **keywords: Any) -> None:
            theirs(*arguments, **keywords)
            counts.append(sum(p.grad is not None for p in module.parameters()))

        setattr(stage, name, watched)

    watch("backward_one_chunk")
    watch("backward_weight_one_chunk")
    x = torch.ones(4, 4)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
    return counts


def test_on_the_first_stage_w_is_the_whole_backward() -> None:
    """Plans take B there for nothing (control/plan.py: unit_costs)."""
    counts, _ = run_ranks(first_stages_backward, backend="gloo")
    assert counts[0] == 0
    assert counts[-1] == 2


def test_shared_parameters_break_torchs_weight_backward() -> None:
    """torch's W frees what another group of parameters needs (_take_over_weight_backward)."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(torch.tanh(x + self.shift))) + self.shift

    from torch.distributed.pipelining._backward import stage_backward_input

    module = Shared()
    x = torch.ones(2, 4, requires_grad=True)
    _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert any(len(group["intermediates"]) > 1 for group in groups)
    with pytest.raises(RuntimeError, match="a second time"):
        stage_backward_weight(module.parameters(), groups)


def test_torchs_groups_of_parameters_may_overlap() -> None:
    """_disjoint: torch's W would count the gradients of what is in two groups twice."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.shared = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.linear(x, self.shared, self.one)
            return nn.functional.linear(torch.tanh(x), self.shared, self.two)

    from torch.distributed.pipelining._backward import stage_backward_input

    module = Shared()
    x = torch.ones(2, 4, requires_grad=True)
    _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert sum(len(group["params"]) for group in groups) > 3
    assert all(group.keys() == {"params", "intermediates", "grads"} for group in groups)


def test_torchs_input_backward_misses_what_no_input_leads_to() -> None:
    """weights_found_from: torch gives W no group for these parameters, or refuses the input."""
    from torch.distributed.pipelining._backward import stage_backward_input

    module = nn.Linear(4, 4)
    x = torch.ones(2, 4)  # as from stages that are frozen
    groups: list[Any] = []
    with contextlib.suppress(ValueError):  # torch 2.11: "grad requires non-empty inputs"
        _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert groups == []


def test_the_graph_names_leaves() -> None:
    """weights_found_from knows parameters and inputs by these."""
    x = torch.ones(2, requires_grad=True)
    ((leaf, _),) = torch.sin(x).grad_fn.next_functions  # type: ignore[union-attr]
    assert leaf is not None
    assert leaf.name() == "torch::autograd::AccumulateGrad"
    assert leaf.variable is x  # type: ignore[attr-defined]
    assert not x._post_accumulate_grad_hooks
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert x._post_accumulate_grad_hooks


def test_views_break_torchs_input_backward() -> None:
    """_not_a_view: a stage's output that is a view cannot be detached in place."""
    from torch.distributed.pipelining._backward import stage_backward_input

    module = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    output = module(x).view(4, 2)
    # The second text is that of torch 2.11.
    with pytest.raises(RuntimeError, match=r"backward input|Can't detach views"):
        stage_backward_input([output], [torch.ones(4, 2)], [x], module.parameters())


def ddp_without_us(rank: int) -> list[list[float]]:
    """Two replicas of one stage of two: torch's zero bubble leaves their gradients apart."""
    replica, index = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(index)
    module = DistributedDataParallel(nn.Linear(4, 4), process_group=replicas[index])
    stage = static_stage(module, index, pipelines[replica])
    schedule = ScheduleInterleavedZeroBubble([stage], 4, loss_of)
    x = torch.full((8, 4), 1.0 + replica)
    schedule.step(*((x,) if index == 0 else ()), **({"target": -x} if index else {}))
    return [p.grad.flatten().tolist() for p in module.parameters()]


def test_torchs_zero_bubble_does_not_reduce_in_ddp() -> None:
    """_reduce_through_ddp: pytorch/pytorch#144530."""
    found = run_ranks(ddp_without_us, world_size=4, backend="gloo")
    assert found[1] != found[3]  # the second stage; the first one's W is a whole backward


def test_the_graph_names_compiled_functions() -> None:
    """_compiled_function_in knows them by this name."""
    x = torch.ones(2, requires_grad=True)
    y = torch.compile(torch.sin, backend="aot_eager")(x)
    assert y.grad_fn.name() == "CompiledFunctionBackward"


def test_adding_minus_zero_changes_no_bit() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -2.5, float("inf"), 1e-45])
    summed = values + torch.full((), -0.0)
    assert summed.view(torch.int32).tolist() == values.view(torch.int32).tolist()
