"""Pipelines across three sites with real messages: the figures of ATLAS, beside a model of each.

    python benchmarks/geo_training.py --only relays --quick

Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from common import Row, add_common_arguments, median, write_rows
from geo_lab import ACTIVATION_MS, Contender, Setting, compared, measured, sites, take_turns
from wan_training import NETWORKS

from torch_resilient.testing import LabUnavailable

ABOUT = """\
The set-up of ATLAS, section 6.1: 12 ranks on 12 hosts of a lab, three pipelines of four stages.
Stage 1 is in site a, stage 2 in site b, stages 3 and 4 in site c. All at 1:20: activations of
1.6 MiB, and 250 Mbit/s from each host to each other site: an activation takes 55 ms, headers
included. Operations do little and sleep for the rest of their time; a backward takes twice as long
as a forward, and nothing is recomputed. Activations, gradients and weights are real. After each
iteration the replicas of a stage average their gradients.

--stretch multiplies all times and divides the rates. No ratio of the model changes, and the delays
of the machine count for less. Times are printed as if they had not been stretched.

The contenders of a case run in the same lab and take turns of some iterations each. The first
iteration of a turn is not counted, as its connections come out of a rest. An iteration lasts from
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
            relay=auto. Limit: a median error of 5 %.

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
            # An iteration of gloo takes as long as a turn of ours.
            take_turns(found, [*others, *ours], 1 if options.quick else 2, 1)
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
    contenders = [Contender(job, *each) for job in ("off", "auto") for each in kinds]
    with sites(options.stretch) as found:
        found.start(contenders, options.realtime)
        for job in ("off", "auto"):
            own = [each for each in contenders if each.job == job]
            rows = []
            for each in own:
                take_turns(found, [each], 1 if options.quick else 2, options.iterations)
                rows.append({**measured(found, each), "setting": str(each.setting)})
            yield {"case": f"predicted, relay={job}", "contenders": rows, "median_max": ERROR_MAX}


CASES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "relays": relays,
    "figure9": figure9,
    "figure10": figure10,
    "predicted": predicted,
}


def judged(row: Row) -> Row:
    """The row, with what it was measured for and whether its limits are met."""
    errors = [each["ms"] / each["model_ms"] - 1 for each in row["contenders"]]
    met = row.get("equal", True)
    met = met and row.get("ratio", 0.0) >= (row.get("least") or 0.0)
    if "error_max" in row:
        met = met and max(map(abs, errors)) <= row["error_max"]
    found = {"benchmark": "geo_training", **row, "errors": errors}
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
    limit = f", limit {row['least']:g}" if row.get("least") else ""
    limit += f", ceiling {row['ceiling']:.1f}" if "ceiling" in row else ""
    limit += f", limit of errors {100 * row['error_max']:.0f} %" if "error_max" in row else ""
    lines.append(
        f"  ratio {row['ratio']:.2f} (80 % of turns {row['ratio_p10']:.2f} - "
        f"{row['ratio_p90']:.2f}), model {row['model_ratio']:.2f}{limit}: {result}; losses and "
        f"weights {'equal' if row['equal'] else 'DIFFER'}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each row as soon as it is there; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--only", choices=CASES, help="only this case")
    parser.add_argument("--stretch", type=float, default=2.0, help="of all times (default: 2)")
    parser.add_argument("--turns", type=int, help="of a contender (default: 9, with --quick 3)")
    parser.add_argument("--iterations", type=int, default=3, help="of a turn (default: 3)")
    options = parser.parse_args(arguments)
    options.turns = options.turns or (3 if options.quick else 9)
    rows: list[Row] = []
    try:
        for name, case in CASES.items():
            if options.only in (None, name):
                for row in case(options):
                    rows.append(judged(row))
                    print(describe_row(rows[-1]), flush=True)
    except LabUnavailable as error:
        parser.error(str(error))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    write_rows(options.json, rows)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
