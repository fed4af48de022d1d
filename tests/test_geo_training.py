"""The pure parts of benchmarks/geo_training.py: its model, orders and limits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import geo_training
from geo_lab import ACTIVATION_MS, Contender, Setting, same_bits

from torch_resilient.geo.dc_selection import select
from torch_resilient.geo.plan_input import read_job
from torch_resilient.pipelining.schedule import checked_orders

SETTINGS = [
    Setting(count, (ms, ms), (forward,) * 4)
    for count in (4, 16)
    for ms in (20.0, 40.0)
    for forward in (10.0, 18.0)
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_relays_help_fixed_orders_most(setting: Setting) -> None:
    gains = [
        Contender("off", kind, setting).predicted_ms()
        / Contender("auto", kind, setting).predicted_ms()
        for kind in ("1F1B", "live")
    ]
    assert 1.2 < gains[0] < 1.6
    assert 1.05 < gains[1] < gains[0]


def test_one_connection_is_the_gap_of_figure_9() -> None:
    setting = Setting(4, (40.0, 40.0))
    ours = Contender("auto", "live", setting).predicted_ms()
    ratios = [
        Contender("off", kind, setting, "gloo", ACTIVATION_MS * 5000 / 293).predicted_ms() / ours
        for kind in ("GPipe", "1F1B", "varuna")
    ]
    assert ratios == sorted(ratios, reverse=True)
    for ratio, least in zip(ratios, geo_training.OTHERS_MIN.values(), strict=True):
        assert least < ratio < 1.5 * least


def test_orders_of_varuna_are_run_with_whole_backwards() -> None:
    setting = Setting(7, (35.0, 15.0), (18.0, 10.0, 14.0, 6.0))
    orders = Contender("off", "varuna", setting).to_worker(stretch=2)["orders"]
    checked_orders(orders, 4, 7)
    for order in orders:
        backwards = [k for k, name in enumerate(order) if name[0] == "B"]
        assert all(order[k + 1] == "W" + order[k][1:] for k in backwards)


def test_the_plan_has_a_winner_each_way() -> None:
    wins = []
    for count, parameters in ((8, 1 << 18), (4, 16 << 20)):
        given = geo_training.plan_input(Setting(count, forward_ms=(10.0,) * 3), parameters)
        plan = select(read_job(given))
        assert plan.choice is not None
        assert plan.replicas
        wins.append(plan.choice.throughput > plan.replicas[-1].throughput)
    assert wins == [False, True]


def test_bits_are_those_of_common_iterations() -> None:
    one = [[["", "w0"], ["", "w1"]], [["l0", "v0"], ["l1", "v1"]]]
    shorter = [each[:1] for each in one]
    assert same_bits(one, shorter)
    assert not same_bits(one, [one[0][:1], [["l0", "other"]]])
    assert not same_bits(one, [[], []])


def row(**values: Any) -> dict[str, Any]:
    """A row of two contenders, 2 % and 10 % slower than the model."""
    contenders = [
        {"name": name, "ms": ms, "model_ms": 100.0, "busy": 0.5}
        for name, ms in (("a", 102.0), ("b", 110.0))
    ]
    return {"case": "x", "contenders": contenders, "model_ratio": 1.0, **values}


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({"ratio": 1.3, "equal": True, "least": 1.2}, True),
        ({"ratio": 1.1, "equal": True, "least": 1.2}, False),
        ({"ratio": 1.3, "equal": False, "least": 1.2}, False),
        ({"ratio": 1.3, "equal": True, "error_max": 0.2}, True),
        ({"ratio": 1.3, "equal": True, "error_max": 0.05}, False),
        ({"ratio": 1.3, "named": False}, False),
        ({"median_max": 0.07}, True),
        ({"median_max": 0.05}, False),
    ],
)
def test_limits(values: dict[str, Any], met: bool) -> None:
    judged = geo_training.judged(row(**values))
    assert judged["met"] is met
    assert ("MISSED" in geo_training.describe_row(judged)) is not met
