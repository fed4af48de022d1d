"""Pictures of `torch-resilient geo`: timelines without and with prefills, a map of sites, curves of
variants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_resilient.cli.pictures import write_picture
from torch_resilient.geo.bubbles import BubbleJob, BubblePlan
from torch_resilient.geo.cell import Cell, CellPlan, Transfer
from torch_resilient.geo.dc_selection import Job, Row, Selection
from torch_resilient.geo.what_if import Point
from torch_resilient.pipelining import picture
from torch_resilient.pipelining.picture import Box, Picture, escape, ticks

MEANINGS = {"F": "forward", "R": "recomputation", "B": "backward", "W": "backward of weights"}
_WIDTH = 960
_MARGIN = 36
# Of the timeline with prefills: a later period looks like the second. More rows do not fit a page.
_PERIODS = 2
_MAX_ROWS = 48
# Lines of curves; the first colours are those of operations.
_COLOURS = ("#4f7be8", "#1a9c8c", "#f0a92e", "#8e6bd8", "#d8453b", "#8a93a8")
# From free to the highest price of a map; a single price has the middle one.
_PRICE_COLOURS = ("#1a9c8c", "#f0a92e", "#d8453b")


# --- The timeline of a cell


def _operation_boxes(cell: Cell, plan: CellPlan, pipe: int, stage: int) -> list[Box]:
    boxes = []
    for operation, start_ms in zip(
        plan.orders[pipe][stage], plan.starts_ms[pipe][stage], strict=True
    ):
        kind, microbatch = operation[0], operation[1:]
        end_ms = start_ms + cell.duration_ms(kind, stage)
        tip = (
            f"pipeline {pipe}, stage {stage}: {MEANINGS[kind]} of microbatch {microbatch}, "
            f"{start_ms:.6g} to {end_ms:.6g} ms"
        )
        boxes.append(Box(kind, start_ms / 1e3, end_ms / 1e3, microbatch, tip))
    return boxes


def _lanes(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Rows of transfers that do not overlap."""
    lanes: list[list[Transfer]] = []
    for each in sorted(transfers, key=lambda each: each.start_ms):
        for lane in lanes:
            if lane[-1].end_ms <= each.start_ms * (1 + 1e-9):
                lane.append(each)
                break
        else:
            lanes.append([each])
    return lanes or [[]]


def _transfer_rows(cell: Cell, plan: CellPlan, hop: int) -> Iterator[picture.Row]:
    length_s = plan.iteration_ms / 1e3
    names = cell.sites[hop], cell.sites[hop + 1]
    for direction, paint, (source, target) in (
        ("forward", "sent F", names),
        ("backward", "sent B", names[::-1]),
    ):
        sent = [each for each in plan.transfers if (each.hop, each.direction) == (hop, direction)]
        for lane in _lanes(sent):
            boxes = [
                Box(
                    paint,
                    each.start_ms / 1e3,
                    each.end_ms / 1e3,
                    f"{each.pipe}:{each.microbatch}",
                    f"pipeline {each.pipe}, microbatch {each.microbatch}: {source} to {target}, "
                    f"{each.nodes} nodes, {each.start_ms:.6g} to {each.end_ms:.6g} ms",
                )
                for each in lane
            ]
            yield picture.Row(f"{source[:6]} > {target[:6]}", boxes, length_s)


def cell_picture(cell: Cell, plan: CellPlan) -> Picture:
    """Stages from the top, each with a row for each pipeline; hops between sites between them."""
    length_s = plan.iteration_ms / 1e3
    rows: list[picture.Row] = []
    for stage, site in enumerate(cell.sites):
        for pipe in range(cell.pipelines):
            boxes = _operation_boxes(cell, plan, pipe, stage)
            rows.append(picture.Row(f"{site[:8]} {stage}.{pipe}", boxes, length_s, ground="idle"))
        if stage + 1 < cell.stages and cell.crosses[stage]:
            rows += _transfer_rows(cell, plan, stage)
    legend = [(kind, MEANINGS[kind]) for kind in cell.kinds]
    if any(cell.crosses):
        legend += [("sent F", "activations to another site"), ("sent B", "gradients")]
    return Picture(
        f"{cell.pipelines} pipelines of {cell.stages} stages, {cell.microbatches} microbatches: "
        f"{plan.chosen}",
        rows,
        length_s,
        legend,
        subtitle="rows: site, stage.pipeline; transfers: pipeline:microbatch",
        notes=[f"{plan.iteration_ms:.6g} ms", f"{100 * (1 - plan.utilisation):.1f} % idle"],
    )


def write_cell(path: Path, cell: Cell, plan: CellPlan) -> None:
    """Writes .svg or .png. Raises ValueError as `write_picture`, OSError."""
    write_picture(path, cell_picture(cell, plan))


# --- The timeline of cells with prefills


def _prefill_boxes(
    job: BubbleJob, found: BubblePlan, begin_ms: float, end_ms: float
) -> dict[tuple[int, int, int], list[Box]]:
    """By cell, pipeline and stage, the prefills between two times, as seconds from the first."""
    boxes: dict[tuple[int, int, int], list[Box]] = {}
    for number, place in enumerate(found.places):
        if place is None:
            continue
        request = job.requests[number]
        stage_ms = job.prefill.stage_ms(request.tokens, job.depth)
        for k, cell in enumerate(place.cells):
            start_ms = place.start_ms + k * stage_ms
            shown_ms = max(start_ms, begin_ms), min(start_ms + stage_ms, end_ms)
            if shown_ms[0] >= shown_ms[1]:
                continue
            tip = (
                f"request {number}: {request.tokens} tokens, arrives at {request.arrival_ms:.6g}, "
                f"part {k + 1} of {job.depth} from {start_ms:.6g} to {start_ms + stage_ms:.6g} ms"
            )
            start_s, end_s = ((each - begin_ms) / 1e3 for each in shown_ms)
            box = Box("prefill", start_s, end_s, str(number), tip)
            boxes.setdefault((cell, place.pipe, place.stage), []).append(box)
    return boxes


def bubbles_picture(job: BubbleJob, found: BubblePlan) -> Picture:
    """Two periods from the first placed request, with a row for each GPU of the site, in as many
    cells as there is room for."""
    starts_ms = [place.start_ms for place in found.places if place is not None]
    first = math.floor(min(starts_ms, default=0.0) / job.period_ms)
    begin_ms, period_s = first * job.period_ms, job.period_ms / 1e3
    length_s = _PERIODS * period_s
    prefills = _prefill_boxes(job, found, begin_ms, begin_ms + _PERIODS * job.period_ms)
    shown = max(1, min(job.cells, _MAX_ROWS // len(job.gpus)))
    rows = []
    for cell, (pipe, stage) in itertools.product(range(shown), job.gpus):
        once = _operation_boxes(job.cell, job.plan, pipe, stage)
        boxes = prefills.get((cell, pipe, stage), [])
        for period in range(_PERIODS):
            late_s = period * period_s
            boxes += [
                box._replace(start_s=box.start_s + late_s, end_s=box.end_s + late_s) for box in once
            ]
        boxes.sort(key=lambda box: box.start_s)
        name = f"{job.cell.sites[stage][:6]} {cell}.{stage}.{pipe}"
        rows.append(picture.Row(name, boxes, length_s, ground="idle"))
    kinds = [(kind, MEANINGS[kind]) for kind in job.cell.kinds]
    return Picture(
        f"Prefills in the bubbles of {job.cells} cells, {shown} of them shown",
        rows,
        length_s,
        [("prefill", "prefill"), *kinds],
        subtitle=f"rows: site, cell.stage.pipeline; times from {begin_ms:.6g} ms",
        notes=[
            f"{100 * found.utilisation_training:.1f} to {100 * found.utilisation:.1f} % busy",
            f"{len(starts_ms)} of {len(found.places)} placed",
        ],
    )


def write_bubbles(path: Path, job: BubbleJob, found: BubblePlan) -> None:
    """Writes .svg or .png. Raises ValueError as `write_picture`, OSError."""
    write_picture(path, bubbles_picture(job, found))


# --- Elements of the other pictures


class _Drawing:
    """SVG elements, so far; y grows downwards."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.text(_MARGIN, _MARGIN + 8, title, "title ink")

    def text(self, x: float, y: float, text: str, classes: str, anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def shape(self, element: str, tip: str = "") -> None:
        """`element` without its end, such as '<line x1="0"'."""
        name = element[1:].split(" ", 1)[0]
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f"{element}>{inner}</{name}>")

    def save(self, path: Path, height: float) -> None:
        if path.suffix.lower() != ".svg":
            raise ValueError(f"--picture: expected a name in .svg, got {path}")
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
            f'width="{_WIDTH}" height="{height:.0f}" role="img">'
        )
        page = f'<rect class="page" width="{_WIDTH}" height="{height:.0f}" rx="10"/>'
        style = f"<title>{escape(self._title)}</title><style>{picture.STYLE}</style>"
        text = "\n".join([head, style, page, *self._parts, "</svg>\n"])
        path.write_text(text, encoding="utf-8")


def _significant(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"


# --- The map of sites


def _price_colour(price: float, prices: Sequence[float]) -> str:
    if price == 0:
        return _PRICE_COLOURS[0]
    if min(prices) == max(prices):
        return _PRICE_COLOURS[1]
    return _PRICE_COLOURS[min(2, round(2 * price / max(prices)))]


def _map_lines(job: Job, row: Row) -> list[tuple[str, str, float, float]]:
    """(site, next site, GB both ways, price of a GB) of each hop of all pipelines."""
    both_gb = 2 * job.microbatches * row.cells * job.pipelines * job.activation_bytes / 1e9
    return [
        (a, b, both_gb, (job.egress_gb(a, b) + job.egress_gb(b, a)) / 2)
        for a, b in itertools.pairwise(row.partitions)
    ]


def _map_summary(job: Job, found: Selection) -> list[str]:
    lines = []
    if found.choice is None or found.choice.cost is None:
        lines.append("no number of cells fits")
    else:
        row = found.choice
        lines.append(
            f"pipelines across sites: {row.cells} cells of {job.pipelines}, "
            f"{_significant(row.throughput * 1e3)} pipelines/s, {row.gpus} GPUs, "
            f"{_significant(row.cost or 0)} per iteration"
        )
    best = max(found.replicas or (), key=lambda each: each.throughput, default=None)
    if best is not None:
        lines.append(
            f"replicas in {len(best.sites)} sites: {_significant(best.throughput * 1e3)} "
            f"pipelines/s, {_significant(best.cost)} per iteration"
        )
    return lines


def write_map(path: Path, job: Job, found: Selection) -> None:
    """Sites as circles, by their GPUs; hops as lines, as wide as their bytes and coloured by price.

    Raises ValueError for a name that is not .svg, OSError.
    """
    drawing = _Drawing("Sites of the training")
    for i, line in enumerate(_map_summary(job, found)):
        drawing.text(_MARGIN, _MARGIN + 30 + 16 * i, line, "small soft")
    centre, radius = (_WIDTH / 2, 330.0), 190.0
    count = len(job.sites)
    order = {name: i for i, name in enumerate(found.order)}
    places = {}
    for name, i in order.items():
        angle = math.pi * (1 + 2 * i / count)
        stretch = 1.5 if count > 1 else 0
        places[name] = (
            centre[0] + stretch * radius * math.cos(angle),
            centre[1] + (radius if count > 2 else 0) * math.sin(angle),
        )
    row = found.choice
    lines = _map_lines(job, row) if row is not None else []
    most_gb = max((gb for *_, gb, _ in lines), default=0.0)
    prices = [price for *_, price in lines]
    for a, b, gb, price in lines:
        (x1, y1), (x2, y2) = places[a], places[b]
        wide = 2 + 10 * (gb / most_gb if most_gb > 0 else 0)
        colour = _price_colour(price, prices)
        tip = f"{a} and {b}: {_significant(gb)} GB per iteration, {_significant(price)} per GB"
        drawing.shape(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}" stroke-width="{wide:.1f}" stroke-linecap="round"',
            tip,
        )
        # The text stands outside the ring of sites, where no other text is.
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        away = math.hypot(x - centre[0], y - centre[1])
        if away > 1:
            x += 30 * (x - centre[0]) / away
            y += 30 * (y - centre[1]) / away
        else:
            y -= 24
        anchor = "middle" if abs(x - centre[0]) < 40 else "end" if x < centre[0] else "start"
        drawing.text(x, y, f"{_significant(gb)} GB at {_significant(price)}", "small ink", anchor)
        drawing.text(x, y + 14, f"{job.latency_ms(a, b):.4g} ms", "small soft", anchor)
    largest = max(1, *(site.usable for site in job.sites))
    for site in job.sites:
        x, y = places[site.name]
        size = 14 + 46 * math.sqrt(site.usable / largest)
        partitions = row.partitions.get(site.name, 0) if row is not None else 0
        used = partitions * row.cells * job.pipelines if row is not None else 0
        drawing.shape(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" class="track" stroke="#8a93a8"',
            f"{site.name}: {used} of {site.usable} GPUs, {site.reserve} more in reserve",
        )
        inner = size * math.sqrt(used / site.usable) if site.usable else 0
        drawing.shape(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{inner:.1f}" fill="#4f7be8"')
        below = y + size + 16
        drawing.text(x, below, site.name, "strong ink", "middle")
        about = f"{used} of {site.usable} GPUs at {_significant(site.gpu_hour)} per hour"
        drawing.text(x, below + 14, about, "small soft", "middle")
        if partitions:
            text = f"{partitions} of {job.partitions} partitions"
            drawing.text(x, below + 28, text, "small soft", "middle")
    legend = "filled: used GPUs; lines: bytes between sites, green: cheap, red: expensive"
    drawing.text(_MARGIN, 668, legend, "small soft")
    drawing.save(path, 690)


# --- Curves of variants


class _Curve(NamedTuple):
    name: str
    points: list[tuple[float, float]]
    colour: str
    dashed: bool = False


def _axes(drawing: _Drawing, top: float, title: str, curves: Sequence[_Curve], x_name: str) -> None:
    """A diagram of 230 pixels in height."""
    left, right, bottom = _MARGIN + 50.0, _WIDTH - 230.0, top + 200.0
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    most = max(ys, default=0.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        part = (x - low) / (high - low) if high > low else 0.5
        return left + part * (right - left), bottom - y / most * (bottom - top - 24)

    drawing.text(_MARGIN, top, title, "section ink")
    for y in ticks(most):
        _, height = place(low, y)
        drawing.shape(
            f'<line x1="{left}" y1="{height:.1f}" x2="{right}" y2="{height:.1f}" class="grid"'
        )
        drawing.text(left - 8, height + 4, f"{y:.4g}", "small soft", "end")
    shown = sorted(dict.fromkeys(xs))
    for x in shown[:: max(1, math.ceil(len(shown) / 12))]:
        drawing.text(place(x, 0)[0], bottom + 18, f"{x:.6g}", "small soft", "middle")
    drawing.text((left + right) / 2, bottom + 34, x_name, "small soft", "middle")
    for i, curve in enumerate(curves):
        corners = [place(x, y) for x, y in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        drawing.shape(
            f'<polyline points="{line}" fill="none" stroke="{curve.colour}" '
            f'stroke-width="2"{dashes}'
        )
        for (x, y), (x_value, y_value) in zip(corners, curve.points, strict=True):
            tip = f"{curve.name}: {y_value:.4g} at {x_value:.6g}"
            drawing.shape(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"', tip)
        drawing.text(right + 30, top + 24 + 16 * i, curve.name, "small soft")
        drawing.shape(
            f'<line x1="{right + 10}" y1="{top + 20 + 16 * i}" x2="{right + 26}" '
            f'y2="{top + 20 + 16 * i}" stroke="{curve.colour}" stroke-width="2"{dashes}'
        )


def write_curve(path: Path, vary: Any, points: Sequence[Point]) -> None:
    """Throughput and cost over the values of the last varied field; a curve for each combination
    of the others.

    Raises ValueError for a name that is not .svg, OSError.
    """
    fields = [each["field"] for each in (vary if isinstance(vary, list) else [vary])]
    groups: dict[str, list[Point]] = {}
    for point in points:
        others = ", ".join(
            f"{field} = {value}"
            for field, value in zip(fields[:-1], point.values[:-1], strict=True)
        )
        groups.setdefault(others, []).append(point)
    speeds, costs = [], []
    for (name, group), colour in zip(groups.items(), itertools.cycle(_COLOURS), strict=False):
        speed, cost, alternative = [], [], []
        for i, point in enumerate(group):
            value = point.values[-1]
            known = isinstance(value, int | float) and not isinstance(value, bool)
            x = float(value) if known else float(i)
            row = point.selection.choice
            if row is not None and row.cost is not None and row.total_ms:
                speed.append((x, row.throughput * 1e3))
                cost.append((x, row.cost / (row.throughput * row.total_ms)))
            best = [each.throughput for each in point.selection.replicas or ()]
            if best:
                alternative.append((x, max(best) * 1e3))
        speeds.append(_Curve(name or "pipelines", speed, colour))
        if alternative:
            speeds.append(_Curve(f"{name} replicas".strip(), alternative, colour, dashed=True))
        costs.append(_Curve(name or "pipelines", cost, colour))
    drawing = _Drawing(f"What if {fields[-1]} changes")
    _axes(drawing, 90, "pipelines per second", speeds, fields[-1])
    _axes(drawing, 370, "cost of a pipeline's iteration", costs, fields[-1])
    drawing.save(path, 630)
