"""Pipelines across three sites with real messages: the figures of ATLAS, beside a model of each.

    python benchmarks/geo_training.py --only relays --quick

Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from common import Row, add_common_arguments, median, show_rows
from geo_lab import (
    ACTIVATION_MS,
    HOSTS,
    NODE_BYTES_PER_S,
    PIPELINES,
    ROW_BYTES,
    ROWS,
    WIRE_BYTES_PER_BYTE,
    Contender,
    Setting,
    compared,
    measured,
    sites,
    take_turns,
)
from wan_training import NETWORKS

from torch_resilient.geo.dc_selection import select
from torch_resilient.geo.plan_input import read_job

ABOUT = """\
The set-up of ATLAS, section 6.1: 12 ranks on 12 hosts of a lab, three pipelines of four stages.
Stage 1 is in site a, stage 2 in site b, stages 3 and 4 in site c. All at 1:20: activations of
1.6 MiB, and 250 Mbit/s from each host to each other site: an activation takes 55 ms, headers
included. Operations do little and sleep for the rest of their time; a backward takes twice as long
as a forward, and nothing is recomputed. Activations, gradients and weights are real. After each
iteration the replicas of a stage average their gradients.

--stretch multiplies all times and divides the rates. No ratio of the model changes, and the delays
of the machine count for less. Times are printed as if they had not been stretched. With a
stretch of two the processors were the limit of figure9.

The contenders of a case run in the same lab and take turns of some iterations each. The first
turn and the first iteration of each turn are not counted: connections are still added, or come out
of a rest. An iteration lasts from
the end of the one before, on the slowest rank, until its own end. Losses and weights must be equal
to the last bit.

  relays    relay=off / relay=auto: torch's own Schedule1F1B unchanged, and ScheduleAdaptiveZB
            ("live"). Limits: 1.2 and 1.05.
  figure9   GPipe, 1F1B and Varuna's order on gloo, which has one connection and the buffers of
            wan_training.py, / live. Limits at 40 ms: 14, 11 and 10. At 10 ms there is no limit but
            a ceiling: the ratio of the bandwidths.
  figure10  the same orders on this backend with relay=off, which has many connections, / live.
            Limit: each within 5 % of the model.
  predicted 12 settings, the last three unlike any in the tests, with relay=off and with
            relay=auto; a job for each latency. Limit: a median error of 5 %.
  replicas  pipelines of three stages across the sites, against replicas in each site and an
            all-reduce across, for many microbatches with few parameters and the opposite. `geo
            plan` must name the faster one in advance. ratio = pipelines per second.
  death     relay=auto, with one more rank in site a, which only relays; it is killed in the middle
            of a training. Losses and weights must be those of relay=off.

The model (torch_resilient.geo) replays the same orders, or dispatches B, F, W as they come, with
the bandwidth of each host. With relay=auto, all hosts of a site send for one pipeline after the
other. It knows no processors, and no connections that have to speed up. Figures 11 and 12 are those
of a model only, in geo_planning.py.

Exit status 1 if a limit is missed, or if losses or weights differ.
"""

RELAYS_MIN = {"1F1B": 1.2, "live": 1.05}
# The schedules of Figures 9 and 10, and the least gain at 40 ms with one connection.
OTHERS_MIN = {"GPipe": 14.0, "1F1B": 11.0, "varuna": 10.0}
# ATLAS, Table 1: Mbit/s of one connection and of a link, by ms.
CONNECTION_MBIT = {10.0: 1220, 40.0: 293}
LINK_MBIT = 5000
ERROR_MAX = 0.05
# Of all times, by case: what keeps the processors from being the limit.
STRETCH = {"figure9": 4.0}
USUAL_STRETCH = 2.0

Options = argparse.Namespace


def relays(options: Options) -> Iterator[Row]:
    """relay=auto against relay=off."""
    settings = [Setting(4)]
    if not options.quick:
        settings += [Setting(16), Setting(4, (40.0, 40.0)), Setting(4, forward_ms=(18.0,) * 4)]
    kinds = [(kind, setting) for setting in settings for kind in RELAYS_MIN]
    pairs = [[Contender(job, *each) for job in ("off", "auto")] for each in kinds]
    with sites(options.stretch) as found:
        found.start(list(itertools.chain(*pairs)), options.realtime)
        for off, auto in pairs:
            take_turns(found, [off, auto], options.turns, options.iterations)
            row = compared(found, off, auto)
            yield {"case": f"relays, {off.kind}", **row, "least": RELAYS_MIN[off.kind]}


def figure9(options: Options) -> Iterator[Row]:
    """One connection of gloo against many of this backend."""
    settings = [Setting(4, (40.0, 40.0))]
    if not options.quick:
        settings += [Setting(count, (10.0, 10.0)) for count in (4, 16)]
    cases = []
    for setting in settings:
        ceiling = LINK_MBIT / CONNECTION_MBIT[setting.latency_ms[0]]
        others = [
            Contender("off", kind, setting, "gloo", ACTIVATION_MS * ceiling) for kind in OTHERS_MIN
        ]
        ours = [Contender(job, "live", setting) for job in ("auto", "off")]
        cases.append((ceiling, others, ours))
    with sites(options.stretch, NETWORKS["scaled"].sysctl()) as found:
        found.start(
            [each for _, *some in cases for each in itertools.chain(*some)], options.realtime
        )
        for ceiling, others, ours in cases:
            turns = 1 if options.quick else min(options.turns, 2)
            take_turns(found, [*others, *ours], turns, options.iterations, warm_up=16)
            for slow, fast in itertools.product(others, ours):
                limited = fast.job == "auto" and fast.setting == settings[0]
                yield {
                    "case": f"figure 9, {slow.kind}",
                    **compared(found, slow, fast),
                    "ceiling": ceiling,
                    "least": OTHERS_MIN[slow.kind] if limited else None,
                }


def figure10(options: Options) -> Iterator[Row]:
    """Many connections for everybody."""
    counts = (4,) if options.quick else (4, 16)
    with sites(options.stretch) as found:
        cases = []
        for setting in (Setting(count, (40.0, 40.0)) for count in counts):
            others = [Contender("off", kind, setting) for kind in OTHERS_MIN]
            cases.append((others, Contender("auto", "live", setting)))
        found.start([each for some, ours in cases for each in (*some, ours)], options.realtime)
        for others, ours in cases:
            take_turns(found, [*others, ours], options.turns, options.iterations)
            for each in others:
                row = compared(found, each, ours)
                yield {"case": f"figure 10, {each.kind}", **row, "error_max": ERROR_MAX}


def predicted(options: Options) -> Iterator[Row]:
    """The model against real iterations."""
    uneven = (6.0, 14.0, 10.0, 18.0)
    usual = [
        (kind, setting)
        for setting in (Setting(4), Setting(8, (10.0, 10.0), (18.0,) * 4), Setting(16))
        for kind in ("GPipe", "1F1B", "live")
    ]
    unlike = [
        ("live", Setting(6, (5.0, 60.0), uneven)),
        ("varuna", Setting(7, (35.0, 15.0), uneven[::-1])),
        ("1F1B", Setting(11, (60.0, 5.0), (25.0, 8.0, 8.0, 12.0))),
    ]
    kinds = [usual[0], usual[5], *unlike] if options.quick else [*usual, *unlike]
    rows: dict[str, list[Row]] = {"off": [], "auto": []}
    # A job for each latency: a route that becomes longer costs the iterations after it.
    for latency_ms in dict.fromkeys(setting.latency_ms for _, setting in kinds):
        contenders = [
            Contender(job, kind, setting)
            for job in rows
            for kind, setting in kinds
            if setting.latency_ms == latency_ms
        ]
        with sites(options.stretch) as found:
            found.set_latency(latency_ms)
            found.start(contenders, options.realtime)
            for each in contenders:
                turns = 1 if options.quick else min(options.turns, 2)
                take_turns(found, [each], turns, options.iterations)
                rows[each.job].append({**measured(found, each), "setting": str(each.setting)})
    for job, own in rows.items():
        yield {"case": f"predicted, relay={job}", "contenders": own, "median_max": ERROR_MAX}


def replicas(options: Options) -> Iterator[Row]:
    """Pipelines across the sites against replicas in each, with three stages."""
    # Many small activations and few parameters, and the opposite.
    kinds = [(8, 1 << 18), (4, 16 << 20)]
    with sites(options.stretch) as found:
        pairs = []
        for microbatches, parameters in kinds:
            setting = Setting(microbatches, forward_ms=(10.0,) * 3)
            plan = select(read_job(plan_input(setting, parameters)))
            assert plan.choice is not None
            assert plan.replicas
            inside = plan.replicas[-1]
            # One cell: its three pipelines have a stage in each site.
            across = plan.choice
            assert across.partitions == {"a": 1, "b": 1, "c": 1}, across
            assert inside.sites == {"a": 1, "b": 1, "c": 2}, inside
            layouts = (
                [[p, 3 + p, 6 + p] for p in range(3)],
                [[p, p + 1, p + 2] for p in range(0, 12, 3)],
            )
            pairs.append(
                [
                    Contender(
                        "off",
                        "1F1B",
                        setting,
                        model_ms=total_ms,
                        options={"layout": layout, "gradient_floats": parameters},
                    )
                    for layout, total_ms in zip(
                        layouts, (across.total_ms, inside.total_ms), strict=True
                    )
                ]
            )
        found.start(list(itertools.chain(*pairs)), options.realtime)
        for pair in pairs:
            take_turns(found, pair, options.turns, options.iterations)
            rows = [measured(found, each) for each in pair]
            for row, name in zip(rows, ("pipelines across", "replicas"), strict=True):
                row["name"] = name
            speeds = [
                [
                    len(each.options["layout"]) / row[key] * 1e3
                    for each, row in zip(pair, rows, strict=True)
                ]
                for key in ("ms", "model_ms")
            ]
            (across, inside), (planned_across, planned_inside) = speeds
            yield {
                "case": "pipelines or replicas across",
                "setting": f"{pair[0].setting}, {4 * pair[0].options['gradient_floats'] >> 20} MiB",
                "contenders": rows,
                "pipelines_per_s": speeds[0],
                "ratio": across / inside,
                "model_ratio": planned_across / planned_inside,
                "winner": ["replicas", "pipelines across"][planned_across > planned_inside],
                "named": (across > inside) == (planned_across > planned_inside),
            }


def plan_input(setting: Setting, parameters: int) -> Row:
    """The lab as an input of `torch-resilient geo plan`, for three stages."""
    (forward_ms,) = set(setting.forward_ms)
    gbps = NODE_BYTES_PER_S * 8 / 1e9
    return {
        "sites": [{"name": site, "gpus": count} for site, count in HOSTS.items()],
        "order": "given",
        "cell": PIPELINES,
        "partitions": len(setting.forward_ms),
        "microbatches": setting.microbatches,
        "tF": forward_ms,
        "tR": 0,
        "tB": 2 * forward_ms,
        "activation_bytes": ROWS * ROW_BYTES * WIRE_BYTES_PER_BYTE,
        # The model counts two bytes for each, and gradients here have four.
        "parameters": 2 * parameters * WIRE_BYTES_PER_BYTE,
        "node_gbps": gbps,
        # ATLAS: 100 Gbit/s within a site, 5 Gbit/s to the other ones.
        "lan_gbps": 20 * gbps,
        "latency_ms": {
            "a|b": setting.latency_ms[0],
            "b|c": setting.latency_ms[1],
            "a|c": sum(setting.latency_ms),
        },
        "sharing": "spatial",
        "policy": "1f1b",
        "exchange": "direct",  # as the backend does it; the lab has a limit for each pair
    }


def death(options: Options) -> Iterator[Row]:
    """A rank without a stage, which relays for its site, is killed in the middle of a turn."""
    setting = Setting(4)
    auto, off = (Contender(job, "1F1B", setting) for job in ("auto", "off"))
    count = 6 if options.quick else 12
    with sites(options.stretch, spares=1) as found:
        found.start([off, auto], options.realtime)
        for each in (off, auto):
            found.turn(each, 8)
        found.turn(off, count)
        victim = found.jobs["auto"].processes[-1]
        delay_s = count / 2 * off.predicted_ms() * options.stretch / 1e3
        with contextlib.ExitStack() as stack:
            timer = threading.Timer(delay_s, victim.kill)
            stack.callback(timer.join)
            timer.start()
            found.turn(auto, count)
        assert victim.wait() == -signal.SIGKILL, victim.returncode
        # A rank without a stage answers when a turn begins: this is of the first turn.
        relayed_bytes = found.relayed_bytes[-1]
        times_ms = found.times_ms(auto)[1]
        yield {
            "case": "death of a relay",
            **compared(found, off, auto),
            "relayed_bytes": relayed_bytes,
            "longest_ms": max(times_ms),
            "named": relayed_bytes > 0,
        }


CASES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "relays": relays,
    "figure9": figure9,
    "figure10": figure10,
    "predicted": predicted,
    "replicas": replicas,
    "death": death,
}


def judged(row: Row) -> Row:
    """The row, with what it was measured for and whether its limits are met."""
    errors = [each["ms"] / each["model_ms"] - 1 for each in row["contenders"]]
    met = row.get("equal", True) and row.get("named", True)
    met = met and row.get("ratio", 0.0) >= (row.get("least") or 0.0)
    if "error_max" in row:
        met = met and max(map(abs, errors)) <= row["error_max"]
    found = {**row, "errors": errors}
    if "median_max" in row:
        found["median_error"] = median([abs(each) for each in errors])
        met = met and found["median_error"] <= row["median_max"]
    return {**found, "met": met}


def describe_row(row: Row) -> str:
    """Some lines for people."""
    lines = [row["case"] + (f": {row['setting']}" if "setting" in row else "")]
    for each, error in zip(row["contenders"], row["errors"], strict=True):
        lines.append(
            f"  {each['name']:<18}{each['ms']:8.0f} ms, model {each['model_ms']:6.0f} ms "
            f"({100 * error:+.0f} %), processors {100 * each['busy']:.0f} % busy"
        )
        if "setting" in each:
            lines[-1] += f": {each['setting']}"
    result = "met" if row["met"] else "MISSED"
    if "median_error" in row:
        limit = f"limit {100 * row['median_max']:.0f} %"
        lines.append(f"  median error {100 * row['median_error']:.1f} %, {limit}: {result}")
        return "\n".join(lines)
    if "pipelines_per_s" in row:
        speeds = " and ".join(f"{each:.2f}" for each in row["pipelines_per_s"])
        lines.append(f"  {speeds} pipelines per second; named by the plan: {row['winner']}")
    if "longest_ms" in row:
        lines.append(
            f"  {row['relayed_bytes'] / 1e6:.0f} MB relayed by the rank before its death; longest "
            f"iteration {row['longest_ms']:.0f} ms"
        )
    limit = f", limit {row['least']:g}" if row.get("least") else ""
    limit += f", ceiling {row['ceiling']:.1f}" if "ceiling" in row else ""
    limit += f", limit of errors {100 * row['error_max']:.0f} %" if "error_max" in row else ""
    limited = bool(row.get("least")) or "error_max" in row or "named" in row
    spread = bits = ""
    if "ratio_p10" in row:
        spread = f" (80 % of turns {row['ratio_p10']:.2f} - {row['ratio_p90']:.2f})"
    if "equal" in row:
        bits = f"; losses and weights {'equal' if row['equal'] else 'DIFFER'}"
    lines.append(
        f"  ratio {row['ratio']:.2f}{spread}, model {row['model_ratio']:.2f}{limit}"
        f"{f': {result}' if limited or not row['met'] else ''}{bits}"
    )
    return "\n".join(lines)


def stretched(options: Options, name: str) -> Options:
    """The options of one case."""
    stretch = options.stretch or STRETCH.get(name, USUAL_STRETCH)
    return argparse.Namespace(**{**vars(options), "stretch": stretch})


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each row as soon as it is there; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--only", choices=CASES, help="only this case")
    parser.add_argument("--stretch", type=float, help="of all times (default: 2; figure9: 4)")
    parser.add_argument("--turns", type=int, help="of a contender (default: 9, with --quick 3)")
    parser.add_argument("--iterations", type=int, default=3, help="of a turn (default: 3)")
    options = parser.parse_args(arguments)
    options.turns = options.turns or (3 if options.quick else 9)
    rows = (
        judged(row)
        for name, case in CASES.items()
        if options.only in (None, name)
        for row in case(stretched(options, name))
    )
    return show_rows(options, "geo_training", rows, describe_row)


if __name__ == "__main__":
    sys.exit(main())
