"""State that changes places in a running job: the same bits as if nothing had been moved."""

from __future__ import annotations

import itertools
import pickle
import random
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RanksFailed, error_of, run_ranks
from torch import nn

from torch_resilient.control import Layout, plain_state
from torch_resilient.control.migrate import (
    LayoutGroups,
    State,
    build_groups,
    capture_state,
    migrate_state,
    restore_state,
)

BACKENDS = ["resilient", "gloo"]
OLD = Layout.of(2, 2)

# ---- training -----------------------------------------------------------------------------------

STEPS, MOVE_AT = 6, 3
MICROBATCHES, ROWS, WIDTH = 4, 3, 8


class Stage(nn.Module):
    """A stage with dropout, which needs the random generator, and buffers of both kinds."""

    steps: torch.Tensor
    mean: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.dropout(torch.tanh(self.first(x)))) + 0.1 * self.mean


class Trainer:
    """One rank's part of a job: the stage and the schedule of its place."""

    def __init__(self, layout: Layout, schedule: str, groups: LayoutGroups, seed: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self.place = layout.place(dist.get_rank())
        self.groups = groups
        self.module = Stage(seed + self.place.stage)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, weight_decay=0.1)
        self.is_last = self.place.stage == layout.num_stages - 1
        stage = PipelineStage(
            self.module,
            self.place.stage,
            layout.num_stages,
            torch.device("cpu"),
            group=groups.pipeline,
        )
        schedule_class = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
        self.schedule = schedule_class(stage, MICROBATCHES, loss_fn=F.mse_loss)
        torch.manual_seed(1000 + 10 * self.place.replica + self.place.stage)

    def step(self, number: int) -> list[float]:
        """Trains one step; returns the losses of the microbatches on the last stage."""
        generator = torch.Generator().manual_seed(100 * number + self.place.replica)
        inputs = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
        targets = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        if self.place.stage == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets, losses=losses)
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.groups.data)
        self.optimizer.step()
        self.module.steps += 1
        self.module.mean.mul_(0.9).add_(0.1 * self.module.second.bias.detach())
        return [loss.item() for loss in losses]

    def steps(self, first: int, end: int) -> dict[tuple[int, int], list[float]]:
        return {
            (self.place.replica, number): losses
            for number in range(first, end)
            if (losses := self.step(number))
        }

    def end(self) -> dict[str, Any]:
        """All that is left, by names that do not depend on the rank."""
        state = capture_state(self.module, self.optimizer)
        flat = {f"module {name}": value for name, value in state["module"].items()}
        flat |= {f"buffer {name}": value for name, value in state["buffers"].items()}
        for number, values in state["optimizer"]["state"].items():
            flat |= {f"optimizer {number} {name}": value for name, value in values.items()}
        flat["rng"] = state["rng"]["cpu"]
        return {name: value.clone() for name, value in flat.items()}


Run = tuple[dict[tuple[int, int], list[float]], tuple[int, int], dict[str, Any]]


def copy_of(state: State) -> State:
    """A deep copy, as a checkpoint would give it."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=False)
    return loaded


def train(rank: int, new: Layout, schedule: str) -> list[Run]:
    """Three runs: never moved; moved; restarted in the new layout from a copy of the state."""
    old_groups = build_groups(OLD)
    assert old_groups is not None
    staying = Trainer(OLD, schedule, old_groups, seed=1)
    losses = staying.steps(0, STEPS)
    runs: list[Run] = [(losses, tuple(staying.place), staying.end())]

    moving = Trainer(OLD, schedule, old_groups, seed=1)
    losses = moving.steps(0, MOVE_AT)
    state = capture_state(moving.module, moving.optimizer)
    copies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(copies, (tuple(moving.place), copy_of(state)))
    state = migrate_state(OLD, new, state)
    groups = build_groups(new)
    assert groups is not None
    moved = Trainer(new, schedule, groups, seed=50)
    restore_state(state, moved.module, moved.optimizer)
    losses |= moved.steps(MOVE_AT, STEPS)
    runs.append((losses, tuple(moved.place), moved.end()))

    begun = Trainer(new, schedule, groups, seed=70)
    restore_state(dict(copies)[tuple(begun.place)], begun.module, begun.optimizer)
    losses = begun.steps(MOVE_AT, STEPS)
    runs.append((losses, tuple(begun.place), begun.end()))
    return runs


CIRCLE = Layout(((3, 0), (1, 2)))


@pytest.mark.parametrize(
    ("backend", "new", "schedule"),
    [
        ("resilient", CIRCLE, "1F1B"),  # all four in one circle
        ("gloo", CIRCLE, "GPipe"),
        ("resilient", Layout(((0, 2), (1, 3))), "GPipe"),  # two exchange stages, two stay
        ("resilient", Layout(((2, 3), (0, 1))), "1F1B"),  # replicas: only random numbers differ
    ],
    ids=["circle", "circle-gloo", "swap", "replicas"],
)
def test_training_goes_on_with_the_same_bits(backend: str, new: Layout, schedule: str) -> None:
    results = run_ranks(train, new, schedule, world_size=4, backend=backend)
    losses: list[dict[tuple[int, int], list[float]]] = [{}, {}, {}]
    ends: list[dict[tuple[int, int], dict[str, Any]]] = [{}, {}, {}]
    for runs in results:
        for number, (part, place, end) in enumerate(runs):
            losses[number] |= part
            ends[number][place] = end
    staying, moved, begun = losses
    assert len(staying) == 2 * STEPS
    assert moved == staying
    assert begun == {key: value for key, value in staying.items() if key[1] >= MOVE_AT}
    # The losses tell something: they differ from step to step and between replicas.
    assert len({tuple(value) for value in staying.values()}) == 2 * STEPS
    for end in ends[1:]:
        assert end.keys() == ends[0].keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
        for place, values in end.items():
            assert values.keys() == ends[0][place].keys()
            assert "buffer mean" in values
            for name, value in values.items():
                assert torch.equal(value, ends[0][place][name]), (place, name)


def forget(rank: int, what: str) -> dict[tuple[int, int], list[float]]:
    """Moves all, and puts back all but one part of the state."""
    new = CIRCLE
    old_groups = build_groups(OLD)
    assert old_groups is not None
    moving = Trainer(OLD, "GPipe", old_groups, seed=1)
    losses = moving.steps(0, MOVE_AT)
    state = migrate_state(OLD, new, capture_state(moving.module, moving.optimizer))
    groups = build_groups(new)
    assert groups is not None
    moved = Trainer(new, "GPipe", groups, seed=50)
    fresh = capture_state(moved.module, moved.optimizer)
    if what:
        state[what] = fresh[what]
    restore_state(state, moved.module, moved.optimizer)
    return losses | moved.steps(MOVE_AT, STEPS)


def test_every_part_of_the_state_matters() -> None:
    """The check above can fail: without any one part the losses are others."""

    def losses(what: str) -> dict[tuple[int, int], list[float]]:
        parts = run_ranks(forget, what, world_size=4)
        return {key: value for part in parts for key, value in part.items()}

    complete = losses("")
    for what in ("module", "buffers", "optimizer", "rng"):
        incomplete = losses(what)
        assert all(incomplete[key] == complete[key] for key in complete if key[1] < MOVE_AT)
        assert incomplete != complete, what


# ---- any state ----------------------------------------------------------------------------------


def some_state(replica: int, stage: int) -> State:
    """The state of a place: tensors of all kinds and other objects; two calls give equal ones."""
    generator = torch.Generator().manual_seed(10 * replica + stage)
    numbers = torch.randn(3 + replica, 5 + stage, generator=generator)
    shared = numbers[0].clone()
    return {
        "place": (replica, stage),
        "kinds": [
            numbers.to(kind)
            for kind in (
                torch.float64,
                torch.float16,
                torch.bfloat16,
                torch.bool,
                torch.int8,
                torch.int64,
                torch.complex64,
                torch.float8_e4m3fn,
            )
        ],
        "scalar": numbers[1, 1].clone(),
        "none": torch.empty(0, 4 + stage),
        "transposed": numbers.t(),
        "conjugate": torch.complex(numbers, -numbers).conj(),
        "part": numbers[1:, ::2],
        "parameter": nn.Parameter(numbers.clone()),
        "shared": [shared, shared],
        "nested": {"a": [{"b": (numbers.clone(), 1.5, None)}], 7: "text" * (1 + stage)},
        "large": torch.randn(100_000 + 1000 * replica, generator=generator),
        "numpy": [np.arange(5 + replica), np.zeros((2, 0)), np.float32(1.5), np.array(["a", "bc"])],
        "plain": (True, 1 << 70, -0.0, 1 + 2j, b"\0bytes", {1, 2}, frozenset("x")),
        "torch": [torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 3])],
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "random": [random.Random(replica).getstate(), np.random.RandomState(stage).get_state()],
    }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits: torch.equal has no float8, and nan is not equal to itself."""
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(raw(one), raw(other))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def all_permutations(rank: int, through: str | None) -> int:
    """Every change of places of four ranks, one after the other."""
    layout, moves = OLD, 0
    for order in itertools.permutations(range(4)):
        new = Layout((order[:2], order[2:]))
        state = some_state(*layout.place(rank))
        found = migrate_state(layout, new, state, through=through)
        if new.place(rank) == layout.place(rank):
            assert found is state
        else:
            moves += 1
            assert same(found, some_state(*new.place(rank)))
            assert found["shared"][0] is found["shared"][1]
        # The sent state is unchanged.
        assert same(state, some_state(*layout.place(rank)))
        layout = new
    return moves


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", [None, "cpu"])
def test_any_state_through_every_permutation(backend: str, through: str | None) -> None:
    moves = run_ranks(all_permutations, through, world_size=4, backend=backend)
    assert sum(moves) > 50


def through_a_group(rank: int) -> None:
    """Ranks 1 and 3 change places in a separate group, where they have other numbers."""
    group = dist.new_group([1, 3])
    new = Layout(((0, 3), (2, 1)))
    if rank in (1, 3):
        state = some_state(*OLD.place(rank))
        found = migrate_state(OLD, new, state, group)
        assert same(found, some_state(*new.place(rank)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_those_that_move(backend: str) -> None:
    run_ranks(through_a_group, world_size=4, backend=backend)


def group_orders(rank: int) -> tuple[list[int], list[int]] | None:
    groups = build_groups(Layout(((3, 0), (1, 4))))
    if groups is None:
        return None
    return dist.get_process_group_ranks(groups.data), dist.get_process_group_ranks(groups.pipeline)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_keep_the_order_of_places(backend: str) -> None:
    """Rank 2 has no place: it only takes part in making the groups."""
    found = run_ranks(group_orders, world_size=5, backend=backend)
    assert found == [
        ([0, 4], [3, 0]),
        ([3, 1], [1, 4]),
        None,
        ([3, 1], [3, 0]),
        ([0, 4], [1, 4]),
    ]


# ---- what goes wrong ----------------------------------------------------------------------------


def other_layouts(rank: int) -> str:
    """Each rank believes that it changes places with the other, but in another row."""
    new = Layout(((1, 0),)) if rank == 0 else Layout(((0,), (1,)))
    old = Layout(((0, 1),)) if rank == 0 else Layout(((1,), (0,)))
    return error_of(lambda: migrate_state(old, new, some_state(0, 0)))


def test_ranks_with_different_layouts_say_so() -> None:
    for rank, text in enumerate(run_ranks(other_layouts)):
        assert f"rank {1 - rank} has been given other layouts than rank {rank}" in text


def unfit(rank: int) -> list[str]:
    swap = Layout(((1, 0),))
    now = Layout(((0, 1),))
    circle: State = {}
    circle["self"] = circle
    errors = [
        error_of(lambda: migrate_state(now, Layout(((0,), (1,))), {})),
        error_of(lambda: migrate_state(now, Layout(((0, 2),)), {})),
        error_of(lambda: migrate_state(Layout(((4, 5),)), Layout(((5, 4),)), {})),
        error_of(lambda: migrate_state(now, swap, {"x": torch.ones(3).to_sparse()})),
        error_of(lambda: migrate_state(now, swap, {"x": torch.ones(3, device="meta")})),
        error_of(lambda: migrate_state(now, swap, {"x": [1, Path("file")]})),
        error_of(lambda: migrate_state(now, swap, {"x": np.array([Path("file")])})),
        error_of(lambda: migrate_state(now, swap, circle)),
    ]
    # Nothing has been sent by any of these.
    found = migrate_state(now, swap, {"rank": rank, "x": torch.full((2,), rank)})
    assert found["rank"] == 1 - rank
    assert found["x"].tolist() == [1 - rank] * 2
    return errors


def test_what_cannot_be_moved_is_refused_before_anything_is_sent() -> None:
    for errors in run_ranks(unfit):
        assert "1 x 2 places as before, got 2 x 1" in errors[0]
        assert "the same ranks as before" in errors[1]
        assert "has no place in the layout" in errors[2]
        assert errors[3].startswith("TypeError")
        assert "sparse" in errors[3]
        assert errors[4].startswith("TypeError")
        assert "state['x'][1] is a pathlib" in errors[5]
        assert "state['x'] is a numpy.ndarray" in errors[6]
        assert "state['self'] contains itself" in errors[7]


class RunsCode:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def send_pickle(rank: int, file: Path) -> str:
    """Rank 1 is an attacker, who does as the peer would until the description."""
    now, swap = Layout(((0, 1),)), Layout(((1, 0),))
    if rank == 0:
        return error_of(lambda: migrate_state(now, swap, {"x": 1}))
    evil = bytearray(pickle.dumps(([], RunsCode(file))))
    layouts = zlib.crc32(f"{now.to_json()} {swap.to_json()}".encode())
    header = torch.tensor([layouts, len(evil)]).view(torch.uint8)
    size = torch.empty_like(header)
    dist.send(header, 0)
    dist.recv(size, 0)
    dist.send(torch.frombuffer(evil, dtype=torch.uint8), 0)
    dist.recv(torch.empty(int(size.view(torch.int64)[1]), dtype=torch.uint8), 0)
    return ""


def test_a_peer_cannot_make_a_rank_run_code(tmp_path: Path) -> None:
    file = tmp_path / "made"
    pickle.loads(pickle.dumps(RunsCode(file)))
    assert file.exists()  # the attack works on what unpickles
    file.unlink()
    error, _ = run_ranks(send_pickle, file)
    assert "rank 1: what was received does not describe a state" in error
    assert not file.exists()


@pytest.mark.parametrize(
    "value",
    [
        '{"a":1}',
        '["?"]',
        "[]",
        '["T",0]',
        '["T"]',
        '["d",1]',
        '["s",["l"]]',
        '["b","0"]',
        '["A",0,"O",[1]]',
        '["N","V4","00000000"]',
        '["N","f4",""]',
        '["K","nn"]',
        '["Z",-1]',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_no_state_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="does not describe a state"):
        plain_state.Parts(f"[[],{value}]".encode()).put_together([])


@pytest.mark.parametrize(
    "kinds", ["1", "[[]]", '[["cpu","float99",[1]]]', '[["cpu","nn",[1]]]', '[["cpu","int8",[-1]]]']
)
def test_tensors_that_do_not_exist_are_refused(kinds: str) -> None:
    with pytest.raises(ValueError, match="does not describe a state"):
        plain_state.Parts(f"[{kinds},null]".encode())


def wrong_stage(rank: int) -> None:
    restore_state(capture_state(nn.Linear(3, 4)), nn.Linear(3, 5))


def test_a_state_of_another_stage_is_refused() -> None:
    with pytest.raises(RanksFailed, match="size mismatch"):
        run_ranks(wrong_stage, world_size=1, init=False)
    buffers = capture_state(Stage(1))
    del buffers["module"]["steps"]
    module = Stage(2)
    with pytest.raises(RuntimeError, match="steps"):
        restore_state(buffers, module)
    state = capture_state(Stage(1))
    state["buffers"]["other"] = torch.zeros(1)
    with pytest.raises(ValueError, match="no buffer 'other'"):
        restore_state(state, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="captured without an optimizer"):
        restore_state(capture_state(Stage(1)), module, optimizer)


class Counting(nn.Linear):
    """Keeps more than tensors: what get_extra_state gives is in the state_dict, too."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_state_that_is_no_tensor_goes_along() -> None:
    before, after = Counting(2, 2), Counting(2, 2)
    before.calls = 7
    restore_state(copy_of(capture_state(before)), after)
    assert after.calls == 7
    assert torch.equal(after.weight, before.weight)


def test_random_generators_of_python_and_numpy() -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    module = nn.Linear(2, 2)
    state = copy_of(capture_state(module, python_random=True, numpy_random=True))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw()
    assert draw() != first
    restore_state(state, module)
    assert draw() == first
