"""Results for a README: a Markdown table, and a plot as one small SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gossamer.evaluation.files import write_text
from gossamer.report.columns import COLUMNS, cells
from gossamer.report.document import Results
from gossamer.report.headline import headline
from gossamer.report.palette import Series, series_of
from gossamer.report.summary import Summary, summarise

_README_COLUMNS = (
    "Method",
    "Density asked",
    "Density realised",
    "PSNR, dB",
    "SSIM",
    "ST-LPIPS",
    "Attention time",
    "Relative to dense",
    "Total time",
    "Plan share",
)

# The plot's layout, in SVG user units.
_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 20, 56
_MARKER = 5.5


def claim(results: Results) -> str:
    """Return what was measured, in one sentence with its conditions; the report opens with it."""
    opening = headline(results, summarise(results))
    facts = dict(opening.conditions)
    names = ("model", "video", "steps", "threads", "cpu")
    where = ", ".join(f"{name} {_plain(facts[name])}" for name in names if name in facts)
    text = f"{opening.claim[0].upper()}{opening.claim[1:]}".rstrip(".")
    basis = f"{opening.basis[0].lower()}{opening.basis[1:]}"
    return f"{text} ({basis}; {where})."


def markdown_table(results: Results) -> str:
    """Write the comparison as a Markdown table, means over prompts and seeds.

    The best values at each density asked are bold. Columns that no sparse method has a value for
    are left out. A line of conditions follows the table.
    """
    summary = summarise(results)
    chosen = [
        column
        for column in COLUMNS
        if column.title in _README_COLUMNS
        and any(column.value(row) is not None for row in summary.sparse)
    ]
    lines = [
        [column.title for column in chosen],
        ["---" if column.title == "Method" else "---:" for column in chosen],
    ]
    lines += [
        [f"**{_plain(cell.text)}**" if cell.best else _plain(cell.text) for cell in row]
        for row in cells(summary.rows, chosen)
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    opening = headline(results, summary)
    conditions = ", ".join(f"{name} {_plain(value)}" for name, value in opening.conditions)
    notes = f"{opening.basis}; {conditions}." if conditions else f"{opening.basis}."
    has_times = any(column.title == "Attention time" for column in chosen)
    timed = "Attention time includes planning; q" if has_times else "Q"
    return (
        f"{table}\n\n{notes} Bold: best of the sparse methods at the same density asked. "
        f"{timed}uality is measured against the dense video of the same prompt and seed.\n"
    )


def quality_plot_svg(results: Results, path: Path) -> Path:
    """Write the plot of PSNR against density as an SVG file, whole or not at all.

    The file follows the reader's light or dark theme. Points at infinity are left out.

    Args:
        results: The document to draw.
        path: The file to write.

    Returns:
        `path`.
    """
    write_text(path, quality_plot(results))
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One method of the plot: its name, its look and its (density, PSNR) points, by density."""

    method: str
    look: Series
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """A linear axis: values `low`…`high` lie at `start`…`stop`, with a tick every `step`."""

    low: float
    high: float
    step: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        """Return where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 2)

    def ticks(self) -> list[float]:
        """Return the values of the ticks."""
        count = round((self.high - self.low) / self.step)
        return [self.low + position * self.step for position in range(count + 1)]


def quality_plot(results: Results) -> str:
    """Return the plot of PSNR against density as SVG."""
    lines = _lines(summarise(results))
    points = [point for line in lines for point in line.points]
    if not points:
        body = _text(_WIDTH / 2, _HEIGHT / 2, "no run with both density and PSNR", "middle")
    else:
        x_axis = _axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
        y_axis = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
        drawn = [_draw(line, position, x_axis, y_axis) for position, line in enumerate(lines)]
        body = "\n".join([_frame(x_axis, y_axis), *drawn, _legend(lines)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="PSNR to dense against density">\n'
        f"<style>\n{_style(lines)}\n</style>\n{body}\n</svg>\n"
    )


def _plain(text: str) -> str:
    """Take from a text what Markdown or HTML would read as markup."""
    for mark in "\\`*_|[]":
        text = text.replace(mark, f"\\{mark}")
    return escape(" ".join(text.split()), quote=False)


def _lines(summary: Summary) -> list[_Line]:
    looks = series_of(summary.methods)
    lines: list[_Line] = []
    for method in summary.methods:
        points = [
            (row.density.mean, row.psnr_db.mean)
            for row in summary.sparse
            if row.variant.method == method and row.density is not None and row.psnr_db is not None
        ]
        finite = sorted(point for point in points if math.isfinite(point[1]))
        if finite:
            lines.append(_Line(method=method, look=looks[method], points=tuple(finite)))
    return lines


def _axis(values: Sequence[float], start: float, stop: float) -> _Axis:
    """Choose round limits and four to eight ticks."""
    low, high = min(values), max(values)
    reach = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(reach))
    step = next(m * magnitude for m in (0.2, 0.25, 0.5, 1, 2) if reach / (m * magnitude) <= 6)
    bottom = math.floor(low / step) * step
    top = max(math.ceil(high / step) * step, bottom + step)
    return _Axis(low=bottom, high=top, step=step, start=start, stop=stop)


def _style(lines: Sequence[_Line]) -> str:
    light = "".join(f".s{i}{{--c:{line.look.light}}}" for i, line in enumerate(lines))
    dark = "".join(f".s{i}{{--c:{line.look.dark}}}" for i, line in enumerate(lines))
    return (
        'text{font:13px -apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5a6270}'
        ".g{stroke:#dfe1e4}.l{fill:none;stroke:var(--c);stroke-width:1.75}.m{fill:var(--c)}"
        f"{light}\n@media(prefers-color-scheme:dark){{text{{fill:#9ba3af}}.g{{stroke:#303640}}"
        f"{dark}}}"
    )


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _frame(x_axis: _Axis, y_axis: _Axis) -> str:
    """Draw grid, ticks and titles."""
    parts: list[str] = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<path class="g" d="M{x_axis.start:g} {y:g}H{x_axis.stop:g}"/>')
        parts.append(_text(x_axis.start - 8, y + 4, f"{value:.6g}", "end"))
    for value in x_axis.ticks():
        parts.append(_text(x_axis.place(value), y_axis.start + 20, f"{value:.6g}", "middle"))
    middle = (x_axis.start + x_axis.stop) / 2
    parts.append(_text(middle, _HEIGHT - 10, "density realised", "middle"))
    turned = f' transform="rotate(-90 16 {(y_axis.start + y_axis.stop) / 2:g})"'
    height = (y_axis.start + y_axis.stop) / 2
    parts.append(_text(16, height, "PSNR to dense, dB (higher is closer)", "middle", turned))
    return "\n".join(parts)


def _marker(look: Series, x: float, y: float) -> str:
    place = f"translate({x:g} {y:g}) scale({_MARKER})"
    return f'<path class="m" fill-rule="evenodd" transform="{place}" d="{look.path}"/>'


def _draw(line: _Line, position: int, x_axis: _Axis, y_axis: _Axis) -> str:
    """Draw one method: its line and its markers."""
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
    path = "L".join(f"{x:g} {y:g}" for x, y in places)
    markers = "".join(_marker(line.look, x, y) for x, y in places)
    return f'<g class="s{position}"><path class="l" d="M{path}"/>{markers}</g>'


def _legend(lines: Sequence[_Line]) -> str:
    """Name the methods at the right, in the order of their last points, the highest first."""
    order = sorted(enumerate(lines), key=lambda entry: -entry[1].points[-1][1])
    x = _WIDTH - _RIGHT + 28
    parts: list[str] = []
    for place, (position, line) in enumerate(order):
        y = _TOP + 12 + 24 * place
        parts.append(f'<g class="s{position}">{_marker(line.look, x, y)}</g>')
        parts.append(_text(x + 14, y + 4.5, line.method, "start"))
    return "\n".join(parts)
