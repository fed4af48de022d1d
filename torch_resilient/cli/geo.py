"""`torch-resilient geo`: sites, times and prices of a training, before any money is spent.

cell: a schedule for pipelines that share the links between sites. plan: the number of pipelines
and their sites, time and cost of an iteration, and replicas as the alternative. what-if: the plan
for many variants of one input. bubbles: prefills of inference requests in the idle time of cells.
Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_resilient.cli import geo_pictures
from torch_resilient.cli.errors import bad_input
from torch_resilient.cli.json_input import read_json
from torch_resilient.geo.bubbles_input import solve_bubbles
from torch_resilient.geo.cell_input import solve_cell
from torch_resilient.geo.cell_policies import POLICIES
from torch_resilient.geo.plan_input import solve_plan
from torch_resilient.geo.sites import sites_from_bench
from torch_resilient.geo.what_if import solve_what_if

OVERVIEW = """\
Ask these questions, in this order:

  torch-resilient geo plan --json job.json       Is the second site worth it? What does it cost?
  torch-resilient geo what-if --json vary.json   How many GPUs there, at which price?
  torch-resilient geo cell --json cell.json      What does each GPU do, and when?
  torch-resilient geo bubbles --json load.json   How many prefills fit into its idle time?

`torch-resilient geo COMMAND --help` shows the fields and an example. Input and output are JSON, and
an output can be input again. Times are milliseconds.

exit status: 0, or 2 if the input cannot be used; then one line on stderr names the field.
"""

_OPTIONAL = f"""\
optional:
  tW                     backward of weights, if it is an operation of its own and not part of tB
  sharing                temporal: all nodes of a cell send for one pipeline after the other;
                         spatial: each pipeline uses its own node (default: temporal)
  relays                 nodes that send a transfer together (default: the number of pipelines)
  cap                    maximum number of microbatches between F and B (with tW, between F and W):
                         a number or one per stage
  policy                 {", ".join(POLICIES)} (default: best)"""

CELL = f"""\
The pipelines of a cell have their stages on the same sites. Stage 1 sends activations over hop
"1-2" to stage 2, which sends gradients back. Between sites, a transfer by n nodes takes wan_ms / n
and arrives latency_ms later.

example:
  echo '{{"pipelines": 2, "stages": 4, "microbatches": 8, "tF": 10, "tR": 10, "tB": 20,
         "sites": ["oregon", "oregon", "tokyo", "tokyo"], "wan_ms": 20, "latency_ms": 45}}' |
    torch-resilient geo cell --json - --picture cell.svg

required:
  pipelines, stages, microbatches
  tF, tR, tB             forward, recomputation, backward: a number or one per stage. The last stage
                         does not recompute
  sites                  the site of each stage
  wan_ms                 if there are several sites: a transfer over one node. A number, or by hop:
                         {{"1-2": 20, "3-4": [20, 25], "default": 30}}; a list is for activations
                         and gradients

{_OPTIONAL}
  latency_ms             between sites, one way; a number or by hop (default: 0)
  intra_ms               within a site, from the end of an operation to the arrival of its result; a
                         number or by hop (default: 0)
  budget_ms              planning time of best (default: 15)

output: the same object with `iteration_ms`, `lower_bound_ms`, `utilisation` (the part of the time
that GPUs compute), `chosen` (the rules), `orders` and `starts_ms` (by pipeline and stage), and
`transfers` between sites."""

PLAN = f"""\
D cells of C pipelines are placed on sites that are filled one after the other (ATLAS, Algorithm 1).
Each row of the result is a number of cells.

example:
  echo '{{"sites": [{{"name": "oregon", "gpus": 64, "gpu_hour": 2.1}},
                   {{"name": "tokyo", "gpus": 32, "gpu_hour": 1.7}}],
         "cell": 2, "partitions": 8, "microbatches": 16, "tF": 27, "tR": 27, "tB": 54,
         "activation_bytes": 33554432, "parameters": 4e8, "lan_gbps": 100, "node_gbps": 5,
         "latency_ms": 45, "egress_gb": 0.05}}' |
    torch-resilient geo plan --json - --picture map.svg

required:
  sites                  [{{"name", "gpus", "reserve": GPUs kept free, "gpu_hour": price}}]; reserve
                         and gpu_hour are optional
  cell                   C: pipelines that share links
  partitions             stages of a pipeline, one GPU each
  microbatches           of each pipeline
  tF, tR, tB             as in geo cell
  node_gbps              between sites: bandwidth of a node, or instead of it
  wan_ms                 the time of a transfer over one node

{_OPTIONAL}
  activation_bytes       of a transfer; required with node_gbps and egress_gb
  parameters, lan_gbps   parameters of a partition, and a node's bandwidth within a site: for the
                         all-reduce
  latency_ms             between sites, one way (default: 0)
  egress_gb              price of 10^9 bytes to another site (default: 0)
  order                  of the sites: given; gpus (largest first); search (the best); or a list of
                         names (default: gpus)
  tolerance              choose fewer cells if the throughput is at most this part lower
                         (default: 0)
  max_cells              plan at most this many cells
  exchange               between sites, of replicas: ring (default), or direct, to all other sites
                         at once (each pair with its own rate), as this backend does

node_gbps, wan_ms, latency_ms and egress_gb are numbers or tables by pair of sites:
{{"oregon|tokyo": 5, "tokyo|oregon": 4, "default": 3}}. A pair holds in both directions unless both
are there.

output: the same object with `rows`, `choice` (a row, or null), `order`, `seconds` and, with
node_gbps and parameters, `replicas`: whole pipelines in the first sites, and an all-reduce between
sites. Throughput is in pipelines per ms; costs are for one iteration."""

WHAT_IF = """\
example:
  {"base": {...}, "vary": {"field": "sites[1].gpus", "values": [0, 16, 32, 48, 64]}}

required:
  base                   the input of geo plan
  vary                   a field and its values; or a list of such objects, for all combinations.
                         Fields are for example sites[1].gpus, relays, egress_gb, latency_ms.a|b

output: the same object with `points`, each with its `values`, `choice` and `replicas`."""

BUBBLES = """\
Cells run the schedule of geo cell, period after period. A prefill of L tokens takes base_ms +
per_token_ms L + per_token2_ms L^2. It is divided into `depth` parts. They run one after the other
on the GPUs of the same pipeline and stage in `depth` cells, between training operations. Requests
are placed or rejected in the order of arrival (BUBBLETEA).

example:
  echo '{"cell": {"pipelines": 2, "stages": 4, "microbatches": 8, "tF": 10, "tR": 10, "tB": 20,
                  "sites": ["oregon", "oregon", "tokyo", "tokyo"], "wan_ms": 20, "latency_ms": 45},
         "cells": 4, "depth": 2, "requests": [[0, 512], [12.5, 2048], [13, 100]],
         "prefill": {"base_ms": 5, "per_token_ms": 0.02, "hop_ms": 0.5}}' |
    torch-resilient geo bubbles --json - --picture bubbles.svg

required:
  cell                   the input of geo cell
  requests               [[arrival_ms, tokens], ...]
  prefill                {"per_token_ms", "base_ms", "per_token2_ms", "hop_ms"}: the times on one
                         GPU; hop_ms is added to each part if there are several. All but
                         per_token_ms default to 0

optional:
  cells                  cells that run the schedule in step (default: 1)
  depth                  cells over which a prefill is divided (default: 1)
  period_extra_ms        from the end of an iteration to the start of the next, such as an
                         all-reduce; GPUs are idle then (default: 0)
  guard_ms               minimum time from the end of a prefill to the next training operation
                         (default: 5)
  max_wait_ms            maximum time from arrival to start (default: 8)
  site                   run prefills on the GPUs of this site only (default: all sites)

output: the same object with `schedule` (the output of geo cell), `period_ms`, `placements`
({request, gpus: [[cell, pipeline, stage], ...], start_ms}; part k runs on gpus[k] from start_ms + k
times the length of a part), `rejected` (requests), `utilisation_training` and `utilisation` (of the
GPUs of the site, without and with prefills), and the time to place or reject a request:
`lookup_p50_us`, `lookup_p99_us`."""


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "geo",
        help="plan a training across sites: schedule, choice of sites, price",
        description=__doc__,
        epilog=OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="geo", metavar="COMMAND", required=True)
    for name, run, about, summary, drawn in (
        ("cell", _cell, CELL, "a schedule for pipelines that share links", "the timeline"),
        ("plan", _plan, PLAN, "the number of cells and their sites, with the price", "the map"),
        ("what-if", _what_if, WHAT_IF, "plans of many variants", "throughput and cost as curves"),
        ("bubbles", _bubbles, BUBBLES, "prefills in the idle time of cells", "the timeline"),
    ):
        kind = kinds.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        kind.add_argument(
            "--json", required=True, metavar="FILE", help="the input; - for standard input"
        )
        also = ", or as .png with matplotlib" if drawn == "the timeline" else ""
        kind.add_argument(
            "--picture", type=Path, metavar="FILE", help=f"draw {drawn} as .svg{also}"
        )
        if name == "plan":
            kind.add_argument(
                "--bench",
                metavar="FILE",
                help="take sites, node_gbps, latency_ms and lan_gbps from the output of "
                "`torch-resilient bench --json`; fields of the input take precedence, and its "
                "sites name those of the bench in the order of their first ranks",
            )
        kind.set_defaults(run=_runner(name, run))


def _runner(
    name: str, answer: Callable[[argparse.Namespace], dict[str, Any]]
) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        """Prints the answer; returns the exit status."""
        try:
            text = _text(answer(options))
        except (ValueError, OSError) as error:
            return bad_input(f"geo {name}", error)
        print(text)
        return 0

    return run


def _text(output: dict[str, Any]) -> str:
    try:
        return json.dumps(output, allow_nan=False)
    except ValueError:
        # Checked fields have none. The results of an earlier output, such as those of `base`, are
        # ignored and not checked.
        raise ValueError("input: NaN or infinity in a field that is ignored") from None


def _input(options: argparse.Namespace) -> Any:
    # NaN is accepted as a number here. The check of its field then refuses it by name.
    return read_json(options.json, constant=float)


def _cell(options: argparse.Namespace) -> dict[str, Any]:
    output, cell, plan = solve_cell(_input(options))
    if options.picture:
        geo_pictures.write_cell(options.picture, cell, plan)
    return output


def _with_bench(given: Any, source: str) -> Any:
    """The input, completed by the measured fields that it does not have."""
    if not isinstance(given, dict):
        return given
    sites = given.get("sites")
    names = None
    if isinstance(sites, list):
        names = [str(site.get("name")) for site in sites if isinstance(site, dict)]
    measured = sites_from_bench(read_json(source, "--bench", float), names)
    if "wan_ms" in given:
        measured.pop("node_gbps", None)
    return {**measured, **given}


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    given = _input(options)
    if options.bench:
        given = _with_bench(given, options.bench)
    output, job, found = solve_plan(given)
    if options.picture:
        geo_pictures.write_map(options.picture, job, found)
    return output


def _what_if(options: argparse.Namespace) -> dict[str, Any]:
    given = _input(options)
    output, points = solve_what_if(given)
    if options.picture:
        geo_pictures.write_curve(options.picture, given["vary"], points)
    return output


def _bubbles(options: argparse.Namespace) -> dict[str, Any]:
    output, job, found = solve_bubbles(_input(options))
    if options.picture:
        geo_pictures.write_bubbles(options.picture, job, found)
    return output
