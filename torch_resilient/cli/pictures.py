"""Files with pictures, for all commands that draw: SVG, and PNG with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_resilient.pipelining.picture import PAINTS, WIDTH, Picture, svg

# matplotlib's hatches for those of Paint.hatch, dense enough to be visible in short boxes.
_HATCHES = {"/": "////", "\\": "\\\\\\\\", "x": "xxxx", "|": "||||", "-": "----", ".": "...."}
_INCHES_PER_PIXEL = 1 / 100
_HEAD_INCHES = 1.6
_LEGEND_COLUMNS = 5


def write_picture(path: Path, picture: Picture) -> None:
    """Writes .svg or .png, by the name.

    Raises ValueError for another name, or if matplotlib is needed and not installed; OSError.
    """
    suffix = path.suffix.lower()
    if suffix == ".svg":
        path.write_text(svg(picture), encoding="utf-8")
    elif suffix == ".png":
        _png(path, picture)
    else:
        raise ValueError(f"--picture: expected a name in .svg or .png, got {path}")


def _png(path: Path, picture: Picture) -> None:
    try:
        from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.patches import Patch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"--picture: {path} needs matplotlib, which is not installed (pip install matplotlib); "
            ".svg needs nothing"
        ) from None
    inches = _HEAD_INCHES + _INCHES_PER_PIXEL * picture.row_height * len(picture.rows)
    with rc_context({"hatch.linewidth": 0.5, "font.size": 8}):
        figure = Figure(figsize=(WIDTH * _INCHES_PER_PIXEL, inches), layout="constrained")
        axes = figure.add_subplot()
        _draw_rows(axes, picture)
        _draw_lines(axes, picture)
        # Rows are one unit apart, the first at the top.
        axes.set_yticks(range(len(picture.rows)), [row.label for row in picture.rows])
        axes.set_ylim(len(picture.rows) - 0.5, -0.5)
        axes.set_xlim(0, (picture.length_s or 1.0) * 1e3)
        axes.spines[["top", "right"]].set_visible(False)
        below = ["; ".join(["ms", *picture.notes]), *picture.footer]
        axes.set_xlabel("\n".join(below), loc="left")
        title = "\n".join(filter(None, [picture.title, picture.subtitle]))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.legend(
            handles=[Patch(label=meaning, **_look(paint)) for paint, meaning in picture.legend],
            loc="outside lower left",
            ncols=_LEGEND_COLUMNS,
            frameon=False,
        )
        figure.savefig(path, dpi=150)


def _look(paint: str) -> dict[str, Any]:
    """For matplotlib."""
    colour, hatch, _ = PAINTS[paint]
    if not hatch:
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}
    # The alpha applies to the background, not to the lines.
    return {
        "facecolor": f"{colour}29",
        "edgecolor": colour,
        "hatch": _HATCHES[hatch],
        "linewidth": 0.0,
    }


def _draw_rows(axes: Any, picture: Picture) -> None:
    height = picture.bar_height
    for i, row in enumerate(picture.rows):
        for paint in PAINTS:
            boxes = [
                (box.start_s * 1e3, (box.end_s - box.start_s) * 1e3)
                for box in row.boxes
                if box.paint == paint
            ]
            if paint == row.ground:
                boxes = [(0.0, row.until_s * 1e3)]
            if boxes:
                place = (i - height / 2, height)
                axes.broken_barh(
                    boxes, place, zorder=1 if paint == row.ground else 2, **_look(paint)
                )
        for box in row.boxes:
            if box.label and (box.end_s - box.start_s) * picture.scale >= 6.5 * len(box.label):
                middle_ms = (box.start_s + box.end_s) / 2 * 1e3
                axes.text(
                    middle_ms, i, box.label, color="white", fontsize=5.5, ha="center", va="center"
                )


def _draw_lines(axes: Any, picture: Picture) -> None:
    half = picture.bar_height / 2
    for arrow in picture.arrows:
        towards = half if arrow.destination > arrow.source else -half
        axes.plot(
            (arrow.start_s * 1e3, arrow.end_s * 1e3),
            (arrow.source + towards, arrow.destination - towards),
            color=PAINTS[arrow.paint].colour,
            linewidth=0.5,
        )
    for begin_s, heading, text in picture.headings_that_fit():
        points = [
            (start_s * 1e3, row + end)
            for row, start_s in enumerate(heading.starts_s)
            if start_s is not None
            for end in (-0.5, 0.5)
        ]
        axes.plot(
            *zip(*points, strict=True), color="#1b2333", linewidth=2 if heading.badge else 0.5
        )
        title = f"{heading.title}: {heading.badge}" if heading.badge else heading.title
        axes.annotate(
            f"{title}\n{text}",
            (begin_s * 1e3, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=7,
            fontweight="bold" if heading.badge else "normal",
        )
    for flag in picture.flags:
        axes.plot(
            flag.time_s * 1e3,
            1.0,
            marker="v",
            markersize=4,
            color="#1b2333",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
