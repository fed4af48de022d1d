"""The schedule classes: whatever runs when, the numbers stay, and nothing waits without need."""

from __future__ import annotations

import gc
import inspect
import math
import random
import time
import weakref
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint

from torch_resilient.pipelining import (
    OrderError,
    PipelineCosts,
    ScheduleAdaptiveZB,
    ScheduleLive,
    SchedulePlanned,
    StageGates,
    executor,
    gpipe,
    one_f_one_b,
    plan_schedule,
    torch_actions,
    zb_h1,
    zb_h2,
)
from torch_resilient.pipelining.executor import StageRun
from torch_resilient.pipelining.schedule import checked_orders
from torch_resilient.planning.dispatch import choose
from torch_resilient.planning.orders import Order

WIDTH = 12
ROWS = 3
MICROBATCHES = 6
STEPS = 3


class Part(nn.Module):
    """One stage: has a bias that is added twice, and a second input for the first stage."""

    def __init__(self, index: int, as_view: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.as_view = as_view
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = torch.tanh(self.first(x + self.shift)) * scale
        y = torch.tanh(self.second(y) + self.shift) + x
        return y.view(y.shape[0], WIDTH) if self.as_view else y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = ROWS * MICROBATCHES
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def costs_of(stages: int) -> PipelineCosts:
    return PipelineCosts.of(stages, forward_s=1, input_backward_s=1, weight_backward_s=1)


def orders_of(name: str, stages: int) -> list[Order]:
    if name == "adapted":
        slow = costs_of(stages).with_delay(stages - 2, 3.0)
        return plan_schedule(slow, MICROBATCHES, policy="portfolio").orders
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}
    return makers[name](stages, MICROBATCHES)


def make(name: str, stage: PipelineStage, rank: int) -> Any:
    """A schedule by its name; "random gates" are others on each rank."""
    stages = stage.num_stages
    if name == "torch 1F1B":
        return Schedule1F1B(stage, MICROBATCHES, loss_of)
    if name.startswith("live"):
        rng = random.Random(f"{name} {rank}")
        gates = StageGates(*(rng.randint(1, MICROBATCHES) for _ in range(3)))
        if name == "live":
            gates = StageGates(2 * (stages - rank) - 1, MICROBATCHES, MICROBATCHES)
        return ScheduleLive(stage, MICROBATCHES, loss_of, gates=gates)
    if name == "expecting":
        gates = StageGates(0, MICROBATCHES, MICROBATCHES)
        return OneByOne(stage, MICROBATCHES, loss_of, gates=gates)
    return SchedulePlanned(stage, MICROBATCHES, loss_of, orders=orders_of(name, stages))


def numbers(tensors: Any) -> list[list[str]]:
    return [[float(x).hex() for x in t.detach().flatten()] for t in tensors]


def train(rank: int, name: str, as_view: bool = False) -> dict[str, Any]:
    """Some steps of training by the schedule of that name."""
    module = Part(rank, as_view)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = make(name, stage, rank)
    result = train_with(schedule, module, stage)
    if not name.startswith("torch"):
        result["waits"] = vars(schedule.waits)
        result["ran"] = [(s.kind, s.microbatch) for s in schedule.last_spans if s.kind != "wait"]
    return result


def train_with(schedule: Any, module: nn.Module, stage: PipelineStage) -> dict[str, Any]:
    """Returns losses, outputs and the last weights and gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    result: dict[str, Any] = {"losses": [], "outputs": []}
    for step in range(STEPS):
        x, target = batch_of(step)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        inputs = (x,) if stage.is_first else ()
        extra = {"target": target, "losses": losses} if stage.is_last else {}
        output = schedule.step(*inputs, scale=1.5, **extra)
        optimizer.step()
        if stage.is_last:
            result["losses"].append(numbers(losses))
            result["outputs"].append(numbers([output]))
    result["weights"] = numbers(module.parameters())
    result["gradients"] = numbers(p.grad for p in module.parameters())
    return result


def same_numbers(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for what in ("losses", "outputs", "gradients", "weights"):
            assert ours[what] == theirs[what], f"rank {rank}: {what}"


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    """torch's own 1F1B over gloo, of three stages."""
    result: list[dict[str, Any]] = run_ranks(train, "torch 1F1B", world_size=3, backend="gloo")
    assert result[-1]["losses"]
    return result


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "adapted", "live"])
def test_same_bits_as_torch(name: str, reference: list[dict[str, Any]]) -> None:
    got = run_ranks(train, name, world_size=3)
    same_numbers(got, reference)
    if name != "live":
        orders = orders_of(name, 3)
        assert [rank["ran"] for rank in got] == [[tuple(o) for o in order] for order in orders]
    else:
        assert all(rank["waits"]["while_ready"] == 0 for rank in got)


@pytest.mark.parametrize("seed", range(3))
def test_other_gates_on_each_rank_and_late_messages(
    seed: int, reference: list[dict[str, Any]]
) -> None:
    rng = random.Random(seed)
    rules = [
        f"delay rank={a} peer={b} ms={rng.randint(0, 12)} jitter_ms={rng.randint(0, 5)}"
        for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
    ]
    env = {"TORCH_RESILIENT_FAULTS": "; ".join(rules)}
    got = run_ranks(train, f"live random gates {seed}", world_size=3, env=env)
    same_numbers(got, reference)
    assert all(rank["waits"]["while_ready"] == 0 for rank in got)
    assert any(rank["waits"]["blocked"] for rank in got), rules


def test_a_fixed_order_waits_although_it_could_work(reference: list[dict[str, Any]]) -> None:
    env = {"TORCH_RESILIENT_FAULTS": "delay rank=2 peer=1 ms=30; delay rank=1 peer=2 ms=30"}
    got = run_ranks(train, "1f1b", world_size=3, env=env)
    same_numbers(got, reference)
    assert got[0]["waits"]["while_ready"] > 0, got[0]["waits"]


def idle_while_it_could_work(rank: int) -> int:
    """Uses a choice that postpones every W until all B are done."""

    def lazy(progress: Any, *arguments: Any) -> str | None:
        kind = choose(progress, *arguments)
        return None if kind == "W" and progress.backwards < MICROBATCHES else kind

    executor.choose = lazy
    module = Part(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    gates = StageGates(1, 1, MICROBATCHES)
    schedule = ScheduleLive(stage, MICROBATCHES, loss_of, gates=gates)
    train_with(schedule, module, stage)
    return schedule.waits.while_ready


def test_live_dispatch_that_waits_although_it_could_work_is_counted() -> None:
    env = {"TORCH_RESILIENT_FAULTS": "delay rank=1 peer=0 ms=10"}
    assert run_ranks(idle_while_it_could_work, env=env)[0] > 0


def test_fixed_orders_over_gloo(reference: list[dict[str, Any]]) -> None:
    same_numbers(run_ranks(train, "adapted", world_size=3, backend="gloo"), reference)


def test_a_stage_whose_output_is_a_view() -> None:
    want = run_ranks(train, "torch 1F1B", True)
    same_numbers(run_ranks(train, "zb_h1", True), want)


def train_as_before_torch_2_13(rank: int) -> dict[str, Any]:
    """torch's methods know no loss_kwargs, and its split backward is wrong."""

    def wrong(*_: Any, **__: Any) -> None:
        raise AssertionError("the backward was split")

    torch_actions._TORCH = (2, 12)
    torch_actions.stage_backward_weight = wrong
    module = Part(rank)
    stage = PipelineStage(module, rank, 3, torch.device("cpu"))
    schedule = make("zb_h1", stage, rank)
    initialize, compute = schedule._initialize_stage, schedule._maybe_compute_loss
    schedule._initialize_stage = lambda args, kwargs, target=None: initialize(args, kwargs, target)
    schedule._maybe_compute_loss = lambda stage, output, targets, mb_index: compute(
        stage, output, targets, mb_index
    )
    return train_with(schedule, module, stage)


@pytest.mark.skipif(torch_actions._TORCH < (2, 13), reason="every other test is this one")
def test_same_bits_as_torch_before_2_13(reference: list[dict[str, Any]]) -> None:
    same_numbers(run_ranks(train_as_before_torch_2_13, world_size=3), reference)


def scaled_loss(output: Tensor, target: Tensor, *, factor: float) -> Tensor:
    return loss_of(output, target) * factor


def step_with_loss_kwargs(rank: int, name: str) -> dict[str, Any]:
    """One step with a loss that has a keyword argument."""
    module = Part(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = make(name, stage, rank)
    schedule._loss_fn = scaled_loss
    x, target = batch_of(0)
    losses: list[Tensor] = []
    extra = {"target": target, "losses": losses} if stage.is_last else {}
    inputs = (x,) if stage.is_first else ()
    schedule.step(*inputs, **extra, loss_kwargs={"factor": 3.0})
    return {"losses": numbers(losses), "gradients": numbers(p.grad for p in module.parameters())}


@pytest.mark.skipif(
    "loss_kwargs" not in inspect.signature(Schedule1F1B.step).parameters,
    reason=f"torch {torch.__version__} has no loss_kwargs",
)
@pytest.mark.parametrize("name", ["zb_h1", "live"])
def test_the_loss_gets_its_keyword_arguments(name: str) -> None:
    got = run_ranks(step_with_loss_kwargs, name)
    assert got[-1]["losses"]
    assert got == run_ranks(step_with_loss_kwargs, "torch 1F1B")


def refused_over_gloo(rank: int) -> str:
    with pytest.raises(RuntimeError, match='needs the "resilient" backend'):
        train(rank, "live")
    dist.barrier()  # who leaves first would break the connections that the other still uses
    return "refused"


def test_live_dispatch_is_refused_over_gloo() -> None:
    assert run_ranks(refused_over_gloo, backend="gloo") == ["refused"] * 2


def several_steps(rank: int, name: str) -> dict[str, Any]:
    """Evaluates before and between training steps."""
    stages = dist.get_world_size()
    module = Part(rank)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = make(name, stage, rank)
    x, target = batch_of(0)
    inputs = (x,) if stage.is_first else ()
    found: dict[str, Any] = {"evaluated": []}
    for _ in range(3):
        with torch.no_grad():
            losses: list[Tensor] = []
            extra = {"target": target, "losses": losses} if stage.is_last else {}
            output = schedule.eval(*inputs, **extra)
        if stage.is_last:
            found["evaluated"].append(numbers([output, *losses]))
        # torch's own schedules divide existing gradients a second time, also in eval().
        module.zero_grad()
        schedule.step(*inputs, **({"target": target} if stage.is_last else {}))
    found["gradients"] = numbers(p.grad for p in module.parameters())
    return found


@pytest.mark.parametrize("name", ["zb_h1", "live", "expecting"])
def test_evaluation_between_training_steps(name: str) -> None:
    if torch_actions._TORCH < (2, 12):
        pytest.skip(f"torch {torch.__version__} cannot in its own 1F1B")
    want = run_ranks(several_steps, "torch 1F1B")
    got = run_ranks(several_steps, name)
    assert got == want
    # Weights did not change: each evaluation gives the same.
    evaluated = got[-1]["evaluated"]
    assert evaluated[0] == evaluated[1] == evaluated[2]


def bad_batches(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = make("live", stage, rank)
    if rank == 0:
        with pytest.raises(ValueError, match=r"input of microbatch 2 has shapes .* divisible by 6"):
            schedule.step(torch.randn(ROWS * MICROBATCHES - 4, WIDTH))
    else:
        with pytest.raises(ValueError, match="the last stage needs target"):
            schedule.step()


def test_uneven_batches_and_a_missing_target_are_refused() -> None:
    run_ranks(bad_batches)


class Expecting(ScheduleLive):
    """Expects all F, then all B, then all W."""

    expected = "F" * MICROBATCHES + "B" * MICROBATCHES + "W" * MICROBATCHES

    def _dispatch(self, run: StageRun) -> None:
        run.run_live(self.gates, self.expected)


class OneByOne(Expecting):
    """Expects one microbatch after the other; an evaluation, which runs only F, holds none of them
    back."""

    expected = "FBW" * MICROBATCHES

    def _dispatch(self, run: StageRun) -> None:
        held = self.waits.held
        super()._dispatch(run)
        assert torch.is_grad_enabled() or self.waits.held == held


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.01)
    return loss_of(output, target)


def held_back(rank: int, kind: type[ScheduleLive]) -> dict[str, Any]:
    """Gradients come one by one, each a while after the last: the last stage runs F B F B."""
    module = Part(rank)
    stage = PipelineStage(module, rank, 3, torch.device("cpu"))
    gates = StageGates(MICROBATCHES if rank < 2 else 1, MICROBATCHES, MICROBATCHES)
    schedule = kind(stage, MICROBATCHES, slow_loss, gates=gates)
    return {**train_with(schedule, module, stage), "waits": asdict(schedule.waits)}


def test_what_is_not_due_waits_for_a_moment(reference: list[dict[str, Any]]) -> None:
    got = run_ranks(held_back, Expecting, world_size=3)
    same_numbers(got, reference)
    for rank in got[:2]:
        waits = rank["waits"]
        assert waits["while_ready"] == 0
        # At most once for each operation.
        assert 0 < waits["held"] <= 3 * MICROBATCHES * STEPS, waits
    plain = run_ranks(held_back, ScheduleLive, world_size=3)
    assert [rank["waits"]["held"] for rank in plain] == [0, 0, 0]


needs_evaluation_in_torch = pytest.mark.skipif(
    torch_actions._TORCH < (2, 12),
    reason=f"the 1F1B of torch {torch.__version__} cannot evaluate another batch, or before a step",
)


def other_batches(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = make("live", stage, rank)

    def inputs(rows: int) -> tuple[Tensor, ...]:
        return (torch.ones(rows * MICROBATCHES, WIDTH),) if rank == 0 else ()

    def target(rows: int) -> dict[str, Tensor]:
        return {"target": torch.ones(rows * MICROBATCHES, WIDTH)} if rank else {}

    schedule.step(*inputs(ROWS), **target(ROWS))
    # Another size, for which torch creates new buffers, and back.
    schedule.eval(*inputs(2 * ROWS), **target(2 * ROWS))
    schedule.step(*inputs(ROWS), **target(ROWS))
    if rank == 0:
        text = r"have shapes \[\(2, 12\)\], those of the steps before \[\(3, 12\)\].* pad it"
        with pytest.raises(ValueError, match=text):
            schedule.step(*inputs(ROWS - 1))


@needs_evaluation_in_torch
def test_a_batch_of_another_size_is_refused() -> None:
    run_ranks(other_batches)


def measured_in_training_only(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = make("live", stage, rank)
    x, target = batch_of(0)
    arguments = (x,) if rank == 0 else ()
    keywords = {"target": target} if rank else {}
    with torch.no_grad():
        schedule.eval(*arguments, **keywords)
    assert math.isnan(schedule.recorder.typical_s("F"))
    assert schedule.last_spans
    schedule.step(*arguments, **keywords)
    assert schedule.recorder.typical_s("F") > 0


@needs_evaluation_in_torch
def test_evaluation_does_not_count_for_plans() -> None:
    run_ranks(measured_in_training_only)


def wrapped_in_parts(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    cpu = torch.device("cpu")
    with_ddp, with_fsdp = Part(rank), Part(rank)
    with_ddp.first = DistributedDataParallel(with_ddp.first)
    with pytest.raises(ValueError, match=r"DDP wraps its module 'first' .*: wrap the stage's"):
        make("live", PipelineStage(with_ddp, rank, 2, cpu), rank)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(with_fsdp.second, mesh=mesh)
    with pytest.raises(ValueError, match=r"FSDP2 wraps its module 'second' .*: fully_shard the"):
        make("zb_h1", PipelineStage(with_fsdp, rank, 2, cpu), rank)
    make("live", PipelineStage(fully_shard(with_fsdp, mesh=mesh), rank, 2, cpu), rank)


def test_a_stage_wrapped_in_parts_is_refused() -> None:
    run_ranks(wrapped_in_parts)


def on_too_few_ranks(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 4, torch.device("cpu"))
    for name in ("live", "1f1b"):
        with pytest.raises(ValueError, match=r"4 stages on 2 ranks: Schedule.* runs one stage"):
            make(name, stage, rank)


def test_more_stages_than_ranks_are_refused() -> None:
    run_ranks(on_too_few_ranks)


def dropped(rank: int) -> bool:
    """Whether a stage without references is gone at once."""
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = make("live", stage, rank)
    x, target = batch_of(0)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
    gc.collect()
    gc.disable()
    watched = weakref.ref(stage.submod)
    del stage, schedule
    return watched() is None


def test_a_stage_that_is_dropped_frees_its_module() -> None:
    assert run_ranks(dropped) == [True, True]


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ([["F0", "B0", "W0"]], "expected 2, one per stage, got 1"),
        ([["F0", "B0", "W0"], ["F0", "W0", "B0"]], "stage 1: W0 comes before B0"),
        ([["F0", "B0", "W0"], ["F1", "B0", "W0"]], "stage 1: F1 where F0 is due"),
        ([["F0", "B0", "W0"], ["F0", "B0"]], "W0 is missing"),
        ([["F0", "B0", "W0"], []], "stage 1 has 0 forwards, and the schedule 1 microbatches"),
        ([["F0", "B0", "X0"], ["F0", "B0", "W0"]], "operation 'X0'"),
    ],
)
def test_impossible_orders_are_refused(orders: list[list[str]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checked_orders(orders, 2, 1)


def test_deadlocks_are_refused() -> None:
    first = ["F0", "B0", "W0", "F1", "B1", "W1"]
    second = ["F0", "F1", "B0", "B1", "W0", "W1"]
    with pytest.raises(OrderError, match="deadlock: stage 0 waits to run B0"):
        checked_orders([first, second], 2, 2)


def data_parallel(rank: int, name: str, wrapper: str) -> dict[str, Any]:
    """Two replicas of two stages: ranks 0 and 1 hold the first replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_coordinate()
    module: Any = Part(index)
    names = [each for each, _ in module.named_parameters()]
    if wrapper == "ddp":
        module = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
    elif wrapper == "fsdp":
        module = fully_shard(module, mesh=mesh["replica"])
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = make(name, stage, index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        x, target = batch_of(10 * replica + step)
        optimizer.zero_grad()
        schedule.step(*((x,) if index == 0 else ()), **({"target": target} if index else {}))
        if wrapper == "none":
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("replica"))
                parameter.grad /= 2
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return dict(zip(names, numbers(whole), strict=True))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["zb_h1", "live"])
def test_gradients_are_reduced_within_a_stage(name: str, wrapper: str) -> None:
    want = run_ranks(data_parallel, "zb_h2", "none", world_size=4)
    got = run_ranks(data_parallel, name, wrapper, world_size=4)
    for rank in range(4):
        assert got[rank].keys() == want[rank].keys()
        for parameter, values in got[rank].items():
            ours = [
                float.fromhex(x) for row in values for x in ([row] if isinstance(row, str) else row)
            ]
            theirs = [
                float.fromhex(x)
                for row in want[rank][parameter]
                for x in ([row] if isinstance(row, str) else row)
            ]
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7), f"rank {rank} {parameter}"
    # Both replicas hold the same bits.
    assert got[0] == got[2]
    assert got[1] == got[3]


def compiled(rank: int, name: str, in_place: bool) -> dict[str, Any]:
    module: Any = Part(rank)
    plain = list(module.parameters())
    if in_place:
        module.compile(backend="aot_eager")
    else:
        module = torch.compile(module, backend="aot_eager")
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = make(name, stage, rank)
    x, target = batch_of(0)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
    return {"gradients": numbers(p.grad for p in plain)}


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_stages(in_place: bool) -> None:
    want = run_ranks(compiled, "torch 1F1B", in_place)
    assert run_ranks(compiled, "live", in_place) == want


def traced(rank: int, name: str) -> dict[str, Any]:
    """Stages that torch's tracer has cut."""
    pipe = pipeline(
        nn.Sequential(*(Part(i) for i in range(3))),
        mb_args=(torch.zeros(ROWS, WIDTH),),
        split_spec=dict.fromkeys(("1", "2"), SplitPoint.BEGINNING),
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    if name == "adaptive":
        schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of)
    else:
        schedule = make(name, stage, rank)
    x, target = batch_of(0)
    result: dict[str, Any] = {}
    for _ in range(STEPS):
        stage.submod.zero_grad()
        inputs = (x,) if stage.is_first else ()
        output = schedule.step(*inputs, **({"target": target} if stage.is_last else {}))
        result["outputs"] = numbers([output]) if stage.is_last else []
    result["gradients"] = numbers(p.grad for p in stage.submod.parameters())
    return result


def test_traced_stages() -> None:
    want = run_ranks(traced, "torch 1F1B", world_size=3)
    for name in ("zb_h1", "live", "adaptive"):
        assert run_ranks(traced, name, world_size=3) == want


class CalledCompiled(Part):
    """Calls a compiled function, which is no module."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.compile(super().forward, backend="aot_eager")(x, scale)


def bent_loss_of(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(torch.tanh(output).exp(), target)


def with_compiled_functions(rank: int, name: str, where: str) -> dict[str, Any]:
    module = CalledCompiled(rank) if where == "stage" else Part(rank)
    stage = PipelineStage(module, rank, 3, torch.device("cpu"))
    schedule = make(name, stage, rank)
    if where == "loss":
        schedule._loss_fn = torch.compile(bent_loss_of, backend="aot_eager")
    return train_with(schedule, module, stage)


@pytest.mark.parametrize("where", ["stage", "loss"])
def test_compiled_functions(where: str) -> None:
    want = run_ranks(with_compiled_functions, "torch 1F1B", where, world_size=3)
    got = run_ranks(with_compiled_functions, "live", where, world_size=3)
    same_numbers(got, want)


def many_small_operations(rank: int) -> int:
    """Messages arrive at all moments, also between two looks at what has arrived."""
    stages, count = dist.get_world_size(), 100
    module = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = ScheduleLive(stage, count, loss_of, gates=StageGates(2, 4, 8))
    x = torch.ones(count, WIDTH)
    for _ in range(8):
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == stages - 1 else {}))
    return schedule.waits.while_ready


def test_messages_that_arrive_at_any_moment() -> None:
    assert run_ranks(many_small_operations, world_size=3) == [0, 0, 0]


def test_same_bits_as_one_process_without_a_pipeline(reference: list[dict[str, Any]]) -> None:
    parts = [Part(rank) for rank in range(3)]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.05) for part in parts]
    found = []
    for step in range(STEPS):
        x, target = batch_of(step)
        losses = []
        for part in parts:
            part.zero_grad()
        for i in range(MICROBATCHES):
            rows = slice(i * ROWS, (i + 1) * ROWS)
            hidden = x[rows]
            for part in parts:
                hidden = part(hidden, 1.5)
            loss = loss_of(hidden, target[rows])
            loss.backward()
            losses.append(loss)
        for part, optimizer in zip(parts, optimizers, strict=True):
            for parameter in part.parameters():
                parameter.grad.div_(MICROBATCHES)
            optimizer.step()
        found.append(numbers(losses))
    assert found == reference[-1]["losses"]
    for part, rank in zip(parts, reference, strict=True):
        assert numbers(part.parameters()) == rank["weights"]


def switching(rank: int, seed: int) -> dict[str, Any]:
    """Other gates or, at the same step on all ranks, another order for every step."""
    stages = dist.get_world_size()
    module = Part(rank)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    mine = random.Random(f"{seed} {rank}")  # other ranks draw other gates
    common = random.Random(seed)
    live = seed % 2 == 1
    schedule = make("live" if live else "gpipe", stage, rank)

    class Switching:
        def step(self, *inputs: Any, **keywords: Any) -> Any:
            if live:
                schedule.gates = StageGates(*(mine.randint(1, MICROBATCHES) for _ in range(3)))
            else:
                name = common.choice(["gpipe", "1f1b", "zb_h1", "zb_h2", "adapted"])
                schedule.set_orders(orders_of(name, stages))
            return schedule.step(*inputs, **keywords)

    return train_with(Switching(), module, stage)


@pytest.mark.parametrize("seed", range(4))
def test_switching_plans_changes_no_bit(seed: int, reference: list[dict[str, Any]]) -> None:
    same_numbers(run_ranks(switching, seed, world_size=3), reference)


class Checkpointed(Part):
    """Recomputes its forward in the backward; has dropout, so random states matter."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return super(Checkpointed, self).forward(nn.functional.dropout(y, 0.3), scale)

        return checkpoint(inner, x, use_reentrant=False)


def checkpointed(rank: int, name: str) -> dict[str, Any]:
    module = Checkpointed(rank)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = make(name, stage, rank)
    torch.manual_seed(rank)
    return train_with(schedule, module, stage)


def test_activation_checkpointing() -> None:
    want = run_ranks(checkpointed, "torch 1F1B")
    same_numbers(run_ranks(checkpointed, "zb_h2"), want)
    same_numbers(run_ranks(checkpointed, "live"), want)


class Awkward(Part):
    """A part with gradients that need more than torch's split backward looks at. It looks only at
    gradients that the parameters get on the way of the gradient to the received inputs."""

    def __init__(self, index: int, how: str) -> None:
        super().__init__(index)
        self.how = how
        if how == "frozen before" and index == 0:
            self.requires_grad_(False)
        self.outside = [nn.Parameter(torch.full((WIDTH,), 0.5))] if how == "outside" else []
        self.called = 0
        if how == "hook":
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self.count)
        if how == "same depths":
            # Others enter where the shared one does, and come before it.
            self.one = nn.Parameter(torch.ones(WIDTH))
            self.two = nn.Parameter(torch.ones(WIDTH))
            self.shared = nn.Parameter(torch.eye(WIDTH) + 0.1)

    def count(self, _: Tensor) -> None:
        self.called += 1

    def forward(self, x: Tensor, scale: float = 1.0, prompt: Tensor | None = None) -> Tensor:
        if self.how == "detached":
            x = x.detach()
        if self.outside:
            x = x * self.outside[0]
        if prompt is not None:
            x = x + prompt
        if self.how == "same depths":
            x = nn.functional.linear(x, self.shared, self.one)
            x = nn.functional.linear(torch.tanh(x), self.shared, self.two)
        return super().forward(x, scale)


def awkward(rank: int, name: str, how: str) -> dict[str, Any]:
    module = Awkward(rank, how)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = make(name, stage, rank)
    prompt = nn.Parameter(torch.full((ROWS * MICROBATCHES, WIDTH), 0.1))
    temperature = nn.Parameter(torch.ones(()))
    if how == "loss":
        schedule._loss_fn = lambda output, target: loss_of(output * temperature, target)
    if how == "view":
        schedule._loss_fn = lambda output, target: loss_of(output, target).reshape(1)[0]
    x, target = batch_of(0)
    losses: list[Tensor] = []
    extra: dict[str, Any] = {"target": target, "losses": losses} if stage.is_last else {}
    if how == "keyword":
        extra["prompt"] = prompt
    for _ in range(2):
        module.zero_grad()
        schedule.step(*((x,) if stage.is_first else ()), **extra)
    return {
        "losses": numbers(losses),
        "gradients": {
            each: None if p.grad is None else numbers([p.grad])
            for each, p in (
                *module.named_parameters(),
                ("temperature", temperature),
                ("prompt", prompt),
                *((f"outside{i}", p) for i, p in enumerate(module.outside)),
            )
        },
        "called": module.called,
    }


@pytest.mark.parametrize(
    "how",
    ["frozen before", "detached", "outside", "keyword", "loss", "view", "hook", "same depths"],
)
def test_gradients_of_all_that_torch_gives_one(how: str) -> None:
    """This includes tensors that no received input leads to, and tensors that are no parameters."""
    if how in ("frozen before", "detached") and torch_actions._TORCH < (2, 13):
        pytest.skip(f"torch {torch.__version__} runs no such stage in its own 1F1B")
    want = run_ranks(awkward, "torch 1F1B", how, world_size=3)
    assert want[-1]["gradients"]["second.weight"] is not None
    assert run_ranks(awkward, "live", how, world_size=3) == want
    assert run_ranks(awkward, "zb_h1", how, world_size=3) == want


def received_gradients(rank: int) -> int:
    """The number of gradients of received inputs that are kept after a step."""
    stage = PipelineStage(Part(rank), rank, 3, torch.device("cpu"))
    schedule = make("live", stage, rank)
    x, target = batch_of(0)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank == 2 else {}))
    # The first stage receives nothing; before torch 2.12, placeholders without a buffer say so.
    received = [
        getattr(info, "buffer", None) for infos in stage.args_recv_info.values() for info in infos
    ]
    return sum(each is not None and each.grad is not None for each in received)


def test_gradients_of_received_inputs_are_not_kept() -> None:
    assert run_ranks(received_gradients, world_size=3) == [0, 0, 0]


class Failing(Part):
    """Fails once, with the third microbatch of a step."""

    armed = False
    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        if self.armed and self.calls == 3:
            raise ValueError("an error of the module")
        return super().forward(x, scale)


def goes_on_after_a_failure(rank: int) -> list[str]:
    """Rank 0 catches its module's exception and continues with the next batch."""
    module = Failing(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = make("live", stage, rank)
    found = []
    for step in range(3):
        x, target = batch_of(step)
        module.armed, module.calls = rank == 0 and step == 1, 0
        try:
            schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
        except (RuntimeError, ValueError) as error:
            found.append(" ".join(str(error).split()))
        else:
            found.append("")
    return found


def test_after_a_failed_step_nothing_runs_with_the_messages_of_another() -> None:
    first, second = run_ranks(goes_on_after_a_failure)
    again = "a step of stage 0 failed before (ValueError: an error of the module)"
    assert first[0] == second[0] == ""
    assert "failed to run forward" in first[1]
    assert again in first[2]
    # The other rank learns of it when that process ends, and never completes a step.
    assert "rank 0" in second[1]
    assert "a step of stage 1 failed before" in second[2]
