"""Plotly figures, as the JSON that plotly.js draws; the page adds the colours of its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

from gossamer.report.document import CallRecord
from gossamer.report.palette import Series
from gossamer.report.summary import Row, Spread, Summary

Figure: TypeAlias = dict[str, Any]
Grid: TypeAlias = list[list[float | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A measure to draw against density.

    Attributes:
        key: Its name in the page.
        title: Its name for readers.
        axis: What the axis says.
        get: Takes it from a row.
        dense: The value full attention has by definition; None where that is infinite.
    """

    key: str
    title: str
    axis: str
    get: Callable[[Row], Spread | None]
    dense: float | None


MEASURES = (
    Measure(
        key="psnr_db",
        title="PSNR",
        axis="PSNR to dense, dB (higher is closer)",
        get=lambda row: row.psnr_db,
        dense=None,
    ),
    Measure(
        key="ssim",
        title="SSIM",
        axis="SSIM to dense (higher is closer)",
        get=lambda row: row.ssim,
        dense=1.0,
    ),
    Measure(
        key="st_lpips",
        title="ST-LPIPS",
        axis="ST-LPIPS to dense (lower is closer)",
        get=lambda row: row.st_lpips,
        dense=0.0,
    ),
    Measure(
        key="attention_ratio",
        title="Attention time",
        axis="attention time relative to dense",
        get=lambda row: row.attention_ratio,
        dense=1.0,
    ),
)


def quality_figure(summary: Summary, looks: dict[str, Series], measure: Measure) -> Figure | None:
    """Draw a measure against the density realised, one line per method.

    Args:
        summary: The rows to draw; those without density or measure, or at infinity, are left out.
        looks: Colour and marker of each method.
        measure: One of `MEASURES`.

    Returns:
        The figure; None if there is nothing to draw.
    """
    traces: list[Figure] = []
    for position, method in enumerate(summary.methods):
        rows = [row for row in summary.sparse if row.variant.method == method]
        points = sorted(_points(rows, measure), key=lambda point: point[0])
        if points:
            traces.append(_trace(method, looks[method], position, points))
    if not traces:
        return None
    layout: Figure = {
        "xaxis": {
            "title": {"text": "density realised"},
            "autorangeoptions": {"clipmin": 0, "clipmax": 1.02},
        },
        "yaxis": {"title": {"text": measure.axis}},
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
        "margin": {"l": 64, "r": 16, "t": 16, "b": 56},
    }
    if measure.dense is not None:
        layout["shapes"] = [_reference_line(measure.dense)]
    return {"data": traces, "layout": layout}


def heat_grid(records: Iterable[CallRecord], measure: Literal["density", "rel_l2"]) -> Grid:
    """Average a measure of the records over calls of the same layer and step.

    Args:
        records: Calls of all runs of a variant, branches included.
        measure: Which of the two.

    Returns:
        One row per layer and one column per step, both from 0; None where nothing was measured.
    """
    cells: dict[tuple[int, int], list[float]] = {}
    layers = steps = 0
    for record in records:
        layers, steps = max(layers, record.layer + 1), max(steps, record.step + 1)
        value = record.density if measure == "density" else record.rel_l2
        if value is not None and math.isfinite(value):
            cells.setdefault((record.layer, record.step), []).append(value)
    means = {place: round(sum(values) / len(values), 5) for place, values in cells.items()}
    return [[means.get((layer, step)) for step in range(steps)] for layer in range(layers)]


def heat_figure(grid: Grid, measure: Literal["density", "rel_l2"], highest: float) -> Figure | None:
    """Draw a measure over layers and steps.

    Args:
        grid: What `heat_grid` returns.
        measure: What it holds.
        highest: Top of the colour scale, the same for all variants so that they compare.

    Returns:
        The figure; None if no cell was measured.
    """
    if not any(value is not None for line in grid for value in line):
        return None
    gap = 1 if max(len(grid), len(grid[0])) <= 24 else 0  # more cells than that are too small
    name = "density" if measure == "density" else "relative L2 error"
    trace: Figure = {
        "type": "heatmap",
        "z": grid,
        "zmin": 0,
        "zmax": highest,
        "xgap": gap,
        "ygap": gap,
        "hoverongaps": False,
        "hovertemplate": f"layer %{{y}}, step %{{x}}<br>{name} %{{z:.3f}}<extra></extra>",
        "meta": {"scale": measure},
        "colorbar": {"thickness": 10, "outlinewidth": 0, "len": 1, "x": 1.01, "xpad": 4},
    }
    layout: Figure = {
        "xaxis": {"title": {"text": "denoising step"}, **_ticks(len(grid[0]))},
        "yaxis": {"title": {"text": "layer"}, "autorange": "reversed", **_ticks(len(grid))},
        "margin": {"l": 48, "r": 8, "t": 8, "b": 48},
    }
    return {"data": [trace], "layout": layout}


def _points(rows: list[Row], measure: Measure) -> Iterable[tuple[float, Spread, str]]:
    for row in rows:
        value = measure.get(row)
        if row.density is not None and value is not None and math.isfinite(value.high):
            yield row.density.mean, value, row.name


def _trace(
    method: str, look: Series, position: int, points: list[tuple[float, Spread, str]]
) -> Figure:
    values = [value for _, value, _ in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(method),  # plotly reads markup in texts
        "meta": {"series": position},
        "x": [density for density, _, _ in points],
        "y": [value.mean for value in values],
        "text": [
            f"{escape(name)}, {value.low:.3g} to {value.high:.3g}" for _, value, name in points
        ],
        "hovertemplate": "%{text}<br>density %{x:.3f}: <b>%{y:.4g}</b><extra></extra>",
        "marker": {"symbol": look.symbol, "size": 11},
        "line": {"width": 1.75},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [value.high - value.mean for value in values],
            "arrayminus": [value.mean - value.low for value in values],
            "thickness": 1,
            "width": 3,
            "visible": any(value.count > 1 for value in values),
        },
    }


def _reference_line(value: float) -> Figure:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"width": 1, "dash": "dot"},
        "label": {"text": "dense", "textposition": "end", "yanchor": "bottom"},
    }


def _ticks(count: int) -> Figure:
    return {"dtick": max(1, -(-count // 10)), "tick0": 0, "showgrid": False, "zeroline": False}
