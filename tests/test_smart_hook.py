"""SMART's tolerated gradient loss: replicas stay identical and nothing that was lost stays lost.

The lossy network is a stand-in: every message travels exactly, then its receiver zero-fills what
a seed picks among the packets below the threshold, and the sender computes the same ranges from
the same seed. So it keeps the promises of tolerant delivery, with any loss a test wants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import error_of, on_gloo, run_outcomes, run_ranks, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_resilient import recovery
from torch_resilient.ddp import (
    SmartOptions,
    SmartState,
    SmartStatistics,
    smart_hook,
    smart_reduce_scatter,
)
from torch_resilient.gradient_loss import ErrorMemory, Range, sampled_cutoff

lossy_only = pytest.mark.skipif(on_gloo(), reason="gloo loses nothing")

PACKET_BYTES = 256
# All messages of the small models here may lose something, and no guard stops it.
OPEN = SmartOptions(
    top_fraction=0.1, max_low_priority_loss=1.0, max_mean_loss=1.0, exact_below_bytes=0
)
Gradients = list[list[float]]


# ---- the lossy network --------------------------------------------------------------------------


def losses_of(
    message: Tensor, threshold: float, max_lost_fraction: float, rate: float, seed: int
) -> list[Range]:
    """What of a message gets lost: packets below the threshold, each with probability `rate`."""
    if threshold < 0:
        return []
    generator = torch.Generator().manual_seed(seed)
    length = PACKET_BYTES // message.element_size()
    budget = int(max_lost_fraction * message.numel())
    ranges = []
    for start in range(0, message.numel(), length):
        stop = min(start + length, message.numel())
        unlucky = float(torch.rand((), generator=generator)) < rate
        small = float(message[start:stop].abs().double().mean()) < threshold
        if unlucky and small and stop - start <= budget:
            budget -= stop - start
            ranges.append((start, stop))
    return ranges


class LossyNetwork:
    """Stands in for recovery.exchange on all ranks; `rate` may be changed between steps."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.rate, self.seed = rate, seed
        self.exact_exchange = recovery.exchange
        self.thresholds: list[float] = []
        self.messages_hit = 0
        recovery.exchange = self.exchange  # type: ignore[assignment]

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        group: dist.ProcessGroup,
        *,
        tag: int,
        threshold: float = -1.0,
        max_lost_fraction: float = 0.0,
    ) -> Any:
        """As recovery.exchange, with losses."""
        self.thresholds.append(threshold)
        limits = torch.tensor([threshold, max_lost_fraction], dtype=torch.float64)
        theirs = {peer: torch.empty_like(limits) for peer in incoming}
        first = self.exact_exchange(dict.fromkeys(outgoing, limits), theirs, group, tag=tag)
        made = self.exact_exchange(outgoing, incoming, group, tag=tag)
        rate, rank = self.rate, group.rank()

        def seed_of(sender: int, receiver: int) -> int:
            return hash((self.seed, tag, sender, receiver))

        def lose(_: Any) -> None:
            for peer, message in incoming.items():
                theirs_threshold, fraction = theirs[peer].tolist()
                for start, stop in losses_of(
                    message, theirs_threshold, fraction, rate, seed_of(peer, rank)
                ):
                    message[start:stop] = 0

        def lost() -> dict[int, list[Range]]:
            found = {
                peer: losses_of(message, threshold, max_lost_fraction, rate, seed_of(rank, peer))
                for peer, message in outgoing.items()
            }
            self.messages_hit += sum(1 for ranges in found.values() if ranges)
            return found

        if incoming:
            received = torch.futures.collect_all([*first.received, *made.received]).then(lose)
            made.received = [received]
        made.sent = [*first.sent, *made.sent]
        made.lost = lost
        return made


@dataclasses.dataclass
class Bucket:
    """What smart_hook asks of DDP's bucket."""

    flat: Tensor
    params: Sequence[Tensor]

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> Sequence[Tensor]:
        return self.params


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 120), nn.Tanh(), nn.Linear(120, 60), nn.Linear(60, 4))


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def as_numbers(tensor: Tensor) -> list[str]:
    """Bit for bit, and small enough to be sent to the test."""
    return [float(x).hex() for x in tensor.double().reshape(-1)]


def train(
    model: DistributedDataParallel, rank: int, steps: Sequence[int], optimizer: Any
) -> list[list[str]]:
    """The parameters after each step."""
    after = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(8, 24, generator=generator)
        targets = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        after.append(as_numbers(flat_parameters(model)))
    return after


def smart_training(
    rank: int,
    rate: float | None,
    options: SmartOptions = OPEN,
    sites: Sequence[str] | None = None,
    steps: int = 5,
    **ddp_options: Any,
) -> tuple[list[list[str]], SmartStatistics]:
    """Trains with the hook; `rate` None: on the backend as it is."""
    if rate is not None:
        LossyNetwork(rate)
    model = DistributedDataParallel(net(), **{"bucket_cap_mb": 0.02, **ddp_options})
    state = SmartState(options=options, model=model, sites=sites)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return train(model, rank, range(steps), optimizer), state.statistics()


def default_training(rank: int, steps: int = 5) -> list[list[str]]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    return train(model, rank, range(steps), torch.optim.Adam(model.parameters(), 0.01))


def close(ours: list[str], theirs: list[str]) -> bool:
    a = torch.tensor([float.fromhex(x) for x in ours])
    b = torch.tensor([float.fromhex(x) for x in theirs])
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- replicas stay identical --------------------------------------------------------------------


@lossy_only
@pytest.mark.parametrize(
    ("rate", "sites"),
    [
        (0.05, None),
        (0.2, None),
        (0.05, ["a", "a", "b", "b"]),
        (0.2, ["a", "b", "a", "c", "a"]),
    ],
    ids=["flat, 5 %", "flat, 20 %", "2+2, 5 %", "3+1+1, 20 %"],
)
def test_replicas_stay_identical_bit_for_bit(rate: float, sites: list[str] | None) -> None:
    """DESIGN's second invariant, after every step."""
    size = len(sites) if sites else 3
    results = run_ranks(smart_training, rate, OPEN, sites, world_size=size)
    for rank in range(size):
        assert results[rank][0] == results[0][0], f"rank {rank}"
    assert sum(statistics.bytes_zero_filled for _, statistics in results) > 0
    # The loss was real: an exact training goes elsewhere.
    exact = run_ranks(smart_training, 0.0, OPEN, sites, world_size=size)
    assert exact[0][0][-1] != results[0][0][-1]


def test_without_loss_the_result_is_ddps_to_rounding() -> None:
    ours = run_ranks(smart_training, None, world_size=3)
    theirs = run_ranks(default_training, world_size=3)
    for rank in range(3):
        for step in range(5):
            assert close(ours[rank][0][step], theirs[rank][step])


@lossy_only
@pytest.mark.parametrize("sites", [["a", "a", "b", "b"], ["a", "b", "a", "a"]])
def test_without_loss_sites_change_nothing_but_rounding(sites: list[str]) -> None:
    ours = run_ranks(smart_training, 0.0, OPEN, sites, world_size=4)
    theirs = run_ranks(default_training, world_size=4)
    assert all(close(ours[0][0][step], theirs[0][step]) for step in range(5))
    if sites.count("a") == 2:
        sent = [statistics.bytes_sent for _, statistics in ours]
        assert len(set(sent)) == 1, "the ranks of a site share what crosses the border"


@pytest.mark.parametrize(
    "debug",
    [
        "OFF",
        pytest.param(
            "DETAIL",
            marks=pytest.mark.skipif(on_gloo(), reason="DDP itself crashes there on gloo"),
        ),
    ],
)
def test_two_ranks_give_ddps_bits(debug: str) -> None:
    """Halves are exact, and a sum of two has one order."""
    env = {"TORCH_DISTRIBUTED_DEBUG": debug}
    ours = run_ranks(smart_training, None, world_size=2, env=env)
    theirs = run_ranks(default_training, world_size=2)
    assert [steps for steps, _ in ours] == theirs


def with_option(rank: int, option: str) -> list[list[str]]:
    return smart_training(rank, None, **{option: True})[0]


@pytest.mark.parametrize(
    "option", ["gradient_as_bucket_view", "static_graph", "find_unused_parameters"]
)
def test_ddps_options_change_no_bit(option: str) -> None:
    ours = run_ranks(with_option, option, world_size=2)
    assert ours == run_ranks(default_training, world_size=2)


@lossy_only
def test_tolerance_without_loss_gives_the_bits_of_exact() -> None:
    tolerant = run_ranks(smart_training, 0.0, OPEN, world_size=3)
    exact = run_ranks(
        smart_training, 0.9, dataclasses.replace(OPEN, max_low_priority_loss=0.0), world_size=3
    )
    assert [steps for steps, _ in tolerant] == [steps for steps, _ in exact]
    assert tolerant[0][1].bytes_tolerant > 0
    assert exact[0][1].bytes_tolerant == 0


def on_another_backend(rank: int) -> tuple[list[list[str]], str]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    state = SmartState(model=model)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return train(model, rank, range(5), optimizer), state.statistics().exact_reason


def test_another_backend_reduces_as_ddp_does() -> None:
    ours = run_ranks(on_another_backend, world_size=2, backend="gloo")
    theirs = run_ranks(default_training, world_size=2, backend="gloo")
    assert [steps for steps, _ in ours] == theirs
    assert "backend" in ours[0][1]


def staged_training(rank: int, sites: list[str]) -> tuple[list[list[str]], SmartStatistics]:
    from torch_resilient import _native

    _native.load()._pretend_device(0.01)
    return smart_training(rank, None, OPEN, sites)


@lossy_only
@pytest.mark.parametrize("sites", [["a", "b", "c"], ["a", "b", "a"]])
def test_copies_of_device_tensors_that_end_late_change_no_bit(sites: list[str]) -> None:
    staged = run_ranks(staged_training, sites, world_size=3)
    assert [steps for steps, _ in staged] == [
        steps for steps, _ in run_ranks(smart_training, None, OPEN, sites, world_size=3)
    ]


def from_a_checkpoint(rank: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(10))
    state = SmartState(model=nn.ParameterList([parameter]))
    lost = ErrorMemory()
    lost.remember(torch.full((10,), 4.0), [("0", 10)], [(2, 4)])
    state.load_state_dict({**state.state_dict(), "error_memory": lost.state_dict()})
    means = torch.zeros(10)
    for _ in range(2):
        bucket = Bucket(torch.ones(10), [parameter])
        means += smart_hook(state, bucket).wait()  # type: ignore[arg-type]
    return means.tolist()


@pytest.mark.parametrize("backend", ["gloo", "resilient"])
def test_what_a_checkpoint_remembers_is_delivered_on_any_backend(backend: str) -> None:
    assert (
        run_ranks(from_a_checkpoint, world_size=2, backend=backend)
        == [[2.0, 2.0, 6.0, 6.0] + [2.0] * 6] * 2
    )


def one_rank(rank: int) -> bool:
    model = DistributedDataParallel(net())
    model.register_comm_hook(SmartState(options=OPEN, model=model), smart_hook)
    alone = net()
    for wrapped in (model, alone):
        F.mse_loss(wrapped(torch.ones(2, 24)), torch.zeros(2, 4)).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


def test_one_rank_alone() -> None:
    assert run_ranks(one_rank, world_size=1) == [True]


# ---- nothing stays lost -------------------------------------------------------------------------


def conservation(
    rank: int,
    seed: int,
    rate: float,
    sites: Sequence[str] | None,
    dtype: torch.dtype,
    shapes: Sequence[int],
) -> tuple[Gradients, Gradients, Gradients, int]:
    """What all ranks had to send, what was delivered, what is remembered; all by step or rank.

    Gradients are small integers, so that sums and memories are exact in every type.
    """
    network = LossyNetwork(rate, seed)
    size = dist.get_world_size()
    model = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=dtype)) for n in shapes])
    state = SmartState(options=OPEN, model=model, sites=sites)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    wanted = torch.zeros(sum(shapes), dtype=torch.float64)
    delivered = torch.zeros(sum(shapes), dtype=torch.float64)
    for step in range(6):
        # As DDP: buckets in another order and of other parameters after the first step.
        groups = [[0], [1, 2], [3]] if step == 0 else [[3, 2], [1, 0]]
        futures = []
        for group in groups:
            parts = []
            for index in group:
                values = torch.randint(-2, 3, (shapes[index],), generator=generator)
                at = sum(shapes[:index])
                wanted[at : at + shapes[index]] += values
                parts.append(values.to(dtype))
            bucket = Bucket(torch.cat(parts), [model[index] for index in group])
            futures.append((group, smart_hook(state, bucket)))  # type: ignore[arg-type]
        for group, future in futures:
            value, at_value = future.wait().double() * size, 0
            for index in group:
                at = sum(shapes[:index])
                delivered[at : at + shapes[index]] += value[at_value : at_value + shapes[index]]
                at_value += shapes[index]
    memory = state.error_memory()
    remembered = [
        memory.get(str(i), torch.zeros(n)).double().tolist() for i, n in enumerate(shapes)
    ]
    flat = [x for part in remembered for x in part]
    return [wanted.tolist()], [delivered.tolist()], [flat], network.messages_hit


@lossy_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sites", [None, ["a", "a", "b", "b"]], ids=["flat", "2+2"])
@pytest.mark.parametrize("seed", [1, 2])
def test_delivered_is_sent_less_what_is_remembered(
    seed: int, sites: list[str] | None, dtype: torch.dtype
) -> None:
    """Exactly, in integers: nothing is lost for good and nothing counts twice."""
    results = run_ranks(conservation, seed, 0.3, sites, dtype, [301, 77, 1, 450], world_size=4)
    wanted = sum(torch.tensor(result[0][0]) for result in results)
    remembered = sum(torch.tensor(result[2][0]) for result in results)
    assert sum(result[3] for result in results) > 10, "hardly anything was lost"
    assert float(remembered.abs().sum()) > 0  # type: ignore[union-attr]
    for rank, result in enumerate(results):
        delivered = torch.tensor(result[1][0])
        assert torch.equal(delivered, wanted - remembered), f"rank {rank}"


@lossy_only
def test_an_exact_step_delivers_all_that_was_remembered() -> None:
    wanted, delivered, remembered = (torch.tensor(x) for x in run_ranks(flushed, world_size=2)[0])
    assert torch.equal(delivered, wanted)
    assert not remembered.any()


def flushed(rank: int) -> tuple[list[float], list[float], list[float]]:
    LossyNetwork(0.9)
    parameter = nn.Parameter(torch.zeros(1000))
    model = nn.ParameterList([parameter])
    state = SmartState(options=OPEN, model=model)
    wanted, delivered = torch.zeros(1000), torch.zeros(1000)
    for step in range(3):
        if step == 2:
            assert state.statistics().error_norm > 0
            state.exact_next_step()
        gradient = torch.arange(1000.0) % 7
        wanted += 2 * gradient
        bucket = Bucket(gradient.clone(), [parameter])
        delivered += 2 * smart_hook(state, bucket).wait()  # type: ignore[arg-type]
    assert state.statistics().exact_steps == 1
    memory = state.error_memory().get("0", torch.zeros(1000))
    return wanted.tolist(), delivered.tolist(), memory.tolist()


# ---- the error memory by itself -----------------------------------------------------------------


@st.composite
def layouts_and_losses(draw: Any) -> tuple[list[int], list[Range]]:
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    total = sum(sizes) + draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.integers(0, total), max_size=10)))
    return sizes, list(zip(cuts[::2], cuts[1::2], strict=False))


@given(layouts_and_losses(), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_the_memory_is_the_payload_where_it_was_lost(
    case: tuple[list[int], list[Range]], seed: int
) -> None:
    """Paper: SMART §3.3, Equations 3 to 6, against the same with a dense vector."""
    sizes, lost = case
    layout = [(str(i), n) for i, n in enumerate(sizes)]
    total = max([sum(sizes), *(stop for _, stop in lost)])
    payload = torch.randn(total, generator=torch.Generator().manual_seed(seed))
    memory = ErrorMemory()
    memory.remember(payload + 1, layout, [(0, total)] if total else [])  # is replaced
    memory.remember(payload, layout, lost)
    dense = torch.zeros(total)
    for start, stop in lost:
        dense[start:stop] = payload[start:stop]
    dense[sum(sizes) :] = 0  # padding belongs to nobody
    for entry in memory.state_dict().values():
        assert bool((entry["ranges"][:, 0] < entry["ranges"][:, 1]).all()), "an empty range"
    again = ErrorMemory()
    again.load_state_dict(memory.state_dict(), dict(layout))
    for one in (memory, again):
        corrected = torch.ones(total)
        one.add_to(corrected, layout)
        assert torch.equal(corrected, 1 + dense)
        assert math.isclose(one.norm(), float(dense.double().norm()), abs_tol=1e-12)
        at = 0
        for key, elements in layout:
            assert torch.equal(one.dense(key, elements), dense[at : at + elements])
            at += elements


def test_the_memory_takes_as_much_as_was_lost() -> None:
    memory = ErrorMemory()
    memory.remember(torch.ones(1000), [("a", 600), ("b", 400)], [])
    assert memory.elements() == 0
    assert memory.state_dict() == {}
    memory.remember(torch.ones(1000), [("a", 600), ("b", 400)], [(590, 610)])
    assert memory.elements() == 20


@pytest.mark.parametrize("lost", [[(3, 2)], [(0, 5), (4, 6)], [(5, 6), (0, 1)], [(0, 11)]])
def test_ranges_that_make_no_sense_are_refused(lost: list[Range]) -> None:
    with pytest.raises(ValueError, match="lost range"):
        ErrorMemory().remember(torch.ones(10), [("a", 10)], lost)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(other=s.pop("a")), "other"),
        (lambda s: s["a"].update(elements=9), "does not fit"),
        (lambda s: s["a"].update(ranges=torch.tensor([[5, 11]])), "does not fit"),
        (lambda s: s["a"].update(ranges=torch.tensor([[-1, 1]])), "does not fit"),
        (lambda s: s["a"].update(values=torch.ones(3)), "does not fit"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    memory = ErrorMemory()
    memory.remember(torch.ones(10), [("a", 10)], [(2, 4)])
    state = memory.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        memory.load_state_dict(state, {"a": 10})
    assert torch.equal(memory.dense("a", 10), torch.tensor([0, 0, 1.0, 1, 0, 0, 0, 0, 0, 0]))


def test_the_threshold_is_the_cutoff_of_the_largest() -> None:
    """Paper: SMART §3.1."""
    flat = torch.randperm(100_000, generator=torch.Generator().manual_seed(3)).float()
    flat[::2] *= -1  # by magnitude
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    cutoff = sampled_cutoff(flat, 0.01, 4096, generator)
    assert 98_500 < cutoff < 99_500
    assert torch.equal(torch.get_rng_state(), before), "the program's random numbers changed"
    assert sampled_cutoff(flat, 0.5, 4096, generator) < 55_000


# ---- guard rails --------------------------------------------------------------------------------


def not_finite(rank: int, bad: float) -> tuple[list[bool], bool, float, float]:
    """A bad step in the middle: what the results are, and what the memory does."""
    network = LossyNetwork(0.5)
    parameter = nn.Parameter(torch.zeros(1000))
    state = SmartState(options=OPEN, model=nn.ParameterList([parameter]))
    finite, norms = [], []
    for step in range(4):
        gradient = torch.arange(1000.0) % 7
        if step == 2 and rank == 0:
            gradient[999] = bad  # in the shard of rank 1
        network.thresholds.clear()
        bucket = Bucket(gradient, [parameter])
        result = smart_hook(state, bucket).wait()  # type: ignore[arg-type]
        finite.append(bool(torch.isfinite(result).all()))
        if step == 2:
            exact = network.thresholds == [-1.0]
        norms.append(state.statistics().error_norm)
    return finite, exact, norms[1], norms[2]


@lossy_only
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_nan_is_exact_and_leaves_the_memory_alone(bad: float) -> None:
    results = run_ranks(not_finite, bad, world_size=2)
    for finite, _, before, after in results:
        assert finite == [True, True, False, True], "everybody sees it, and only then"
        assert before > 0
        assert after == before
    assert [exact for _, exact, _, _ in results] == [True, False]


def guarded(
    rank: int, rate: float, options: SmartOptions, breaks_promise: bool
) -> tuple[list[int], str, bool]:
    """By step, the bytes zero-filled; why it is exact in the end; whether the sums agree."""
    network = LossyNetwork(rate)
    parameter = nn.Parameter(torch.zeros(4096))
    state = SmartState(options=options, model=nn.ParameterList([parameter]))
    if breaks_promise:
        promised = network.exchange

        def careless(*arguments: Any, max_lost_fraction: float, **named: Any) -> Any:
            return promised(*arguments, max_lost_fraction=1.0, **named)

        recovery.exchange = careless  # type: ignore[assignment]
    lost = []
    wanted, delivered = torch.zeros(4096), torch.zeros(4096)
    for _ in range(8):
        gradient = torch.arange(4096.0) % 64
        wanted += gradient
        bucket = Bucket(gradient.clone(), [parameter])
        before = state.statistics().bytes_zero_filled
        delivered += smart_hook(state, bucket).wait()  # type: ignore[arg-type]
        lost.append(state.statistics().bytes_zero_filled - before)
    return lost, state.statistics().exact_reason, torch.equal(wanted, delivered)


@lossy_only
def test_at_most_the_bound_of_a_message_is_lost() -> None:
    options = dataclasses.replace(OPEN, max_low_priority_loss=0.1)
    for lost, reason, _ in run_ranks(guarded, 0.9, options, False, world_size=2):
        assert 0 < max(lost) <= 0.1 * 2048 * 4
        assert reason == ""


@lossy_only
def test_a_network_that_loses_more_than_the_bound_is_not_trusted_again() -> None:
    options = dataclasses.replace(OPEN, max_low_priority_loss=0.1)
    for lost, reason, whole in run_ranks(guarded, 0.9, options, True, world_size=2):
        assert lost[0] > 0.1 * 2048 * 4
        assert not any(lost[1:])
        assert "bound of 10.0%" in reason
        assert whole, "what was lost in the first step came later"


@lossy_only
def test_too_much_loss_in_the_mean_ends_the_tolerance() -> None:
    options = dataclasses.replace(OPEN, max_mean_loss=0.3, loss_window_steps=3)
    for lost, reason, whole in run_ranks(guarded, 0.6, options, False, world_size=2):
        assert all(lost[:3])
        assert not any(lost[3:])
        assert "in the last 3 steps, more than max_mean_loss=30.0%" in reason
        assert whole
    for lost, reason, _ in run_ranks(guarded, 0.1, options, False, world_size=2):
        assert sum(lost) > 0
        assert reason == ""


def exact_cases(rank: int) -> dict[str, list[bool]]:
    """For each way to ask for it, which steps were exact."""
    network = LossyNetwork(0.5)
    found = {}
    for name, options in {
        "every": dataclasses.replace(OPEN, exact_every=3),
        "small": dataclasses.replace(OPEN, exact_below_bytes=2001),
        "large enough": dataclasses.replace(OPEN, exact_below_bytes=2000),
        "set": OPEN,
        "next": OPEN,
    }.items():
        parameter = nn.Parameter(torch.zeros(1000))
        state = SmartState(options=options, model=nn.ParameterList([parameter]))
        found[name] = []
        for step in range(4):
            if name == "set" and step in (1, 3):
                state.exact = step == 1
            if name == "next" and step == 1:
                state.exact_next_step()
            network.thresholds.clear()
            bucket = Bucket(torch.arange(1000.0), [parameter])
            smart_hook(state, bucket).wait()  # type: ignore[arg-type]
            found[name].append(network.thresholds == [-1.0])
    return found


@lossy_only
def test_what_was_asked_to_be_exact_is() -> None:
    assert run_ranks(exact_cases, world_size=2)[0] == {
        "every": [False, False, True, False],
        "small": [True] * 4,
        "large enough": [False] * 4,
        "set": [False, True, True, False],
        "next": [False, True, False, False],
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_fraction", 0.0),
        ("top_fraction", 1.0),
        ("max_low_priority_loss", 1.1),
        ("max_low_priority_loss", math.nan),
        ("max_mean_loss", -0.1),
        ("loss_window_steps", 0),
        ("exact_below_bytes", -1),
        ("exact_every", -1),
        ("samples", 99),
    ],
)
def test_options_are_checked_at_once(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected"):
        SmartOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "fraction", "name"),
    [
        (math.nan, 0.1, "threshold"),
        (math.inf, 0.1, "threshold"),
        (1.0, -0.1, "max_lost_fraction"),
        (1.0, math.nan, "max_lost_fraction"),
    ],
)
def test_tolerate_checks_its_numbers(threshold: float, fraction: float, name: str) -> None:
    with pytest.raises(ValueError, match=f"tolerate: {name}="):
        recovery.tolerate(threshold, fraction)


def test_tolerate_restores_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        now: tuple[float, float] | None = None

        def set_tolerance(self, threshold: float, fraction: float) -> Any:
            before, self.now = self.now, (threshold, fraction)
            return before

        def zero_filled(self, work: Any) -> list[tuple[int, int]]:
            return [(1, 3)]

    native = Native()
    monkeypatch.setattr("torch_resilient._native.load", lambda: native)
    with recovery.tolerate(0.5, 0.1):
        within = []

        def fail() -> None:
            with recovery.tolerate(0.25, 0.2):
                within.append(native.now)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert within == [(0.25, 0.2)]
        assert native.now == (0.5, 0.1)
    assert native.now is not None
    assert native.now[0] < 0, "exact again"
    assert recovery.zero_filled(object()) == [(1, 3)]  # type: ignore[arg-type]


def wrong_uses(rank: int) -> list[str]:
    messages = [error_of(lambda: SmartState(sites=["a"]))]
    unnamed = SmartState()
    messages.append(error_of(unnamed.state_dict))
    other = SmartState(model=net())
    bucket = Bucket(torch.zeros(5), [nn.Parameter(torch.zeros(5))])
    messages.append(error_of(lambda: smart_hook(other, bucket)))  # type: ignore[arg-type]
    messages.append(error_of(lambda: unnamed.scale_error_memory(math.nan)))
    return messages


def test_wrong_uses_are_errors() -> None:
    expected = ["1 sites for 2 ranks", "model=model", "`model` lacks", "factor=nan"]
    for messages in run_ranks(wrong_uses, world_size=2):
        for message, part in zip(messages, expected, strict=True):
            assert message.startswith("ValueError")
            assert part in message


# ---- buckets overlap, and a failure ends them ---------------------------------------------------


def overlapping(rank: int) -> tuple[bool, bool, list[float]]:
    """Rank 1 calls late: rank 0's hooks have returned by then, with both buckets under way."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    buckets = [Bucket(torch.full((1000,), float(i + rank)), [parameters[i]]) for i in range(2)]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    early = any(future.done() for future in futures) if rank == 0 else False
    if rank == 0:
        dist.send(torch.ones(1), 1)
    values = [future.wait() for future in futures]
    same = all(
        value.data_ptr() == b.flat.data_ptr() for value, b in zip(values, buckets, strict=True)
    )
    return early, same, [float(value.unique()) for value in values]


def test_the_hook_returns_before_anything_has_arrived() -> None:
    assert run_ranks(overlapping, world_size=2) == [(False, True, [0.5, 1.5])] * 2


def out_of_order(rank: int) -> list[float]:
    """On rank 0, the first bucket's message seems to arrive after the second bucket's."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, second = recovery.exchange, torch.futures.Future[None]()
    calls = 0

    def slow_first(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        made = real(*arguments, **named)
        calls += 1
        if rank == 0 and calls == 1:
            made.received.append(second)
        elif rank == 0:
            # Long after the second has been reduced.
            gone = torch.futures.collect_all(made.received)
            gone.add_done_callback(
                lambda _: state._worker.submit(state._worker.submit, second.set_result, None)
            )
        return made

    recovery.exchange = slow_first
    buckets = [Bucket(torch.full((1000,), float(i + rank)), [parameters[i]]) for i in range(2)]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    between = torch.ones(1)
    if rank == 0:  # the program's own collectives do not match those of the hook
        dist.all_reduce(between)
    values = [float(future.wait().unique()) for future in futures]
    if rank == 1:
        dist.all_reduce(between)
    return [*values, float(between)]


@lossy_only
def test_buckets_are_gathered_in_their_order_whatever_arrives_first() -> None:
    assert run_ranks(out_of_order, world_size=2) == [[0.5, 1.5, 2.0]] * 2


def held_send(rank: int) -> tuple[bool, bool]:
    """The receiver of the first bucket's message has not said yet what it has zero-filled."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, told = recovery.exchange, torch.futures.Future[None]()
    begun = []

    def held(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        begun.append(made)
        if len(begun) == 1:
            made.sent.append(told)
        return made

    recovery.exchange = held
    buckets = [Bucket(torch.ones(1000), [parameter]) for parameter in parameters]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    futures[1].wait()  # the shards of both buckets have been gathered
    early = futures[0].done()
    told.set_result(None)
    futures[0].wait()
    return early, futures[0].done()


@lossy_only
def test_a_bucket_ends_when_it_is_known_what_was_lost() -> None:
    assert run_ranks(held_send, world_size=2) == [(False, True)] * 2


def first_fails(rank: int) -> list[str]:
    """The first bucket fails when the second waits for its turn."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, first = recovery.exchange, torch.futures.Future[None]()
    begun = []

    def failing(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        begun.append(made)
        if len(begun) == 1:
            made.received.append(first)
        return made

    recovery.exchange = failing
    buckets = [Bucket(torch.ones(1000), [parameter]) for parameter in parameters]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    wait_until(lambda: len(state._gathers) == 2 and state._gathers[1].shard is not None, "waiting")
    first.set_exception(RuntimeError("the network is gone"))
    return [error_of(future.wait) for future in futures]


@lossy_only
def test_a_bucket_that_fails_takes_those_along_that_wait_for_it() -> None:
    for message in run_ranks(first_fails, world_size=1, timeout_s=30)[0]:
        assert "the network is gone" in message


def failing_backward(rank: int) -> str:
    model = DistributedDataParallel(net())
    model.register_comm_hook(SmartState(model=model), smart_hook)

    def failing(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("the network is gone")

    recovery.exchange = failing
    return error_of(model(torch.ones(2, 24)).sum().backward)


@lossy_only
def test_the_backward_raises_what_went_wrong() -> None:
    (message,) = run_ranks(failing_backward, world_size=1, timeout_s=30)
    assert "RuntimeError: the network is gone" in message
    assert "to Tensor" not in message, "torch complains about the error instead"


def crashed_peer(rank: int) -> list[str]:
    parameters = [nn.Parameter(torch.zeros(100_000)) for _ in range(3)]
    state = SmartState(model=nn.ParameterList(parameters))
    buckets = [Bucket(torch.ones(100_000), [parameter]) for parameter in parameters]
    smart_hook(state, buckets[0]).wait()  # type: ignore[arg-type]
    if rank == 1:
        import os

        os._exit(7)
    futures = [smart_hook(state, bucket) for bucket in buckets[1:]]  # type: ignore[arg-type]
    return [error_of(future.wait) for future in futures]


@lossy_only
def test_a_rank_that_dies_fails_every_bucket() -> None:
    survivor, dead = run_outcomes(crashed_peer, world_size=2, group_timeout_s=20)
    assert dead.exit_code == 7
    assert survivor.ok, survivor.describe()
    assert len(survivor.value) == 2
    assert all("rank 1" in message for message in survivor.value)


# ---- checkpoints --------------------------------------------------------------------------------


def restarted(
    rank: int, break_at: int | None, bucket_cap_mb: float, keep_memory: bool = True
) -> tuple[list[list[str]], list[float]]:
    """Seven steps with loss; with `break_at`, everything is made anew from a checkpoint there.

    Returns the parameters after each step, and the thresholds of all messages.
    """
    network = LossyNetwork(0.3)
    options = dataclasses.replace(OPEN, exact_every=4)
    model = DistributedDataParallel(net(), bucket_cap_mb=100)
    state = SmartState(options=options, model=model)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    after = []
    for step in range(7):
        # Losses depend on the step alone, not on how many messages there were before.
        network.seed = step
        state._flights = 0
        if step == break_at:
            saved = state.state_dict(), model.module.state_dict(), optimizer.state_dict()
            assert saved[0]["error_memory"]
            module = net(seed=9)
            module.load_state_dict(saved[1])
            model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
            state = SmartState(options=options, model=model)
            if keep_memory:
                state.load_state_dict(saved[0])
            model.register_comm_hook(state, smart_hook)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            optimizer.load_state_dict(saved[2])
        after += train(model, rank, [step], optimizer)
    return after, network.thresholds


@lossy_only
def test_a_restart_with_the_same_buckets_changes_no_bit() -> None:
    straight = run_ranks(restarted, None, 100, world_size=2)
    # One bucket holds everything, so DDP's rebuilding after the first step changes at most its
    # order: break where the next step builds it anew, too.
    broken = run_ranks(restarted, 3, 100, world_size=2)
    assert broken[0][0] == broken[1][0]
    assert broken == straight
    forgetful = run_ranks(restarted, 3, 100, False, world_size=2)
    assert forgetful[0][0] != straight[0][0]


def moved(rank: int) -> tuple[list[float], list[float]]:
    """Lossy steps, a checkpoint, other buckets, an exact step: what was to send, what came."""
    LossyNetwork(0.6)
    shapes = [500, 30, 800]
    wanted, delivered = torch.zeros(sum(shapes)), torch.zeros(sum(shapes))
    saved = None
    for order in ([0, 1, 2], [2, 0, 1]):
        model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in shapes])
        state = SmartState(options=OPEN, model=model)
        if saved is not None:
            state.load_state_dict(saved)
            state.exact_next_step()
        for _ in range(3 if saved is None else 1):
            gradient = torch.arange(float(sum(shapes))) % 5
            wanted += 2 * gradient
            parts = [p.clone() for p in gradient.split(shapes)]
            bucket = Bucket(torch.cat([parts[i] for i in order]), [model[i] for i in order])
            got = smart_hook(state, bucket).wait().split([shapes[i] for i in order])  # type: ignore[arg-type]
            delivered += 2 * torch.cat([got[order.index(i)] for i in range(3)])
        saved = state.state_dict()
    return wanted.tolist(), delivered.tolist()


@lossy_only
def test_a_restart_with_other_buckets_loses_nothing() -> None:
    for wanted, delivered in run_ranks(moved, world_size=2):
        assert wanted == delivered


@lossy_only
def test_a_bucket_cap_changed_by_a_restart_keeps_replicas_identical() -> None:
    results = run_ranks(restarted, 3, 0.01, world_size=2)
    assert results[0][0] == results[1][0]


# ---- FSDP2 --------------------------------------------------------------------------------------


def sharded(rank: int, rate: float | None, smart: bool) -> tuple[list[list[str]], int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if rate is not None:
        LossyNetwork(rate)
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    state = SmartState(mesh.get_group(), OPEN, model=model)
    if smart:
        smart_reduce_scatter(state, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    after = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * rank + step)
        inputs = torch.randn(8, 24, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), torch.zeros(8, 4)).backward()
        optimizer.step()
        whole = [p.full_tensor().detach().reshape(-1) for p in model.parameters()]  # type: ignore[attr-defined]
        after.append(as_numbers(torch.cat(whole)))
    if smart:
        saved = state.state_dict()
        state.load_state_dict(saved)
    return after, state.statistics().bytes_zero_filled


@lossy_only
def test_fsdp2_reduces_the_same_without_loss_and_learns_with_it() -> None:
    theirs = run_ranks(sharded, None, False, world_size=2)
    ours = run_ranks(sharded, 0.0, True, world_size=2)
    for step in range(4):
        assert close(ours[0][0][step], theirs[0][0][step])
    lossy = run_ranks(sharded, 0.3, True, world_size=2)
    assert lossy[0][1] > 0
    assert lossy[0][0] == lossy[1][0], "gathered parameters are the same everywhere"
    assert lossy[0][0][-1] != ours[0][0][-1]
