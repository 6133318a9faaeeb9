"""The plot of `gossamer fidelity`: error against density, one panel per input, as one SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gossamer.evaluation.files import write_text
from gossamer.report.palette import SERIES, Series

# Drawn in colour and labelled in bold, whatever they achieve: the systems this library is about.
# All others are grey, unless all lines together are few enough to tell colours apart.
_FEATURED = {
    "instagen": SERIES[0],
    "instagen-importance": SERIES[0],
    "instagen-uniform": SERIES[5],
    "mc-sparse": SERIES[1],
    "scaling": SERIES[2],
    "intra": SERIES[3],
}

# The layout, in SVG user units.
_COLUMNS = 2
_PLOT_WIDTH, _PLOT_HEIGHT = 330, 380
_LEFT, _LABELS, _TOP, _BOTTOM = 62, 168, 66, 56
_PANEL_WIDTH = _LEFT + _PLOT_WIDTH + _LABELS
_PANEL_HEIGHT = _TOP + _PLOT_HEIGHT + _BOTTOM
_LABEL_STEP = 14.5  # between the baselines of two labels, at least
_MARKER = 4.6
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # of the ticks within a decade


def write_fidelity_plot(document: Mapping[str, Any], path: Path) -> Path:
    """Write the plot as an SVG file, whole or not at all.

    Both axes are logarithmic. The file follows the reader's light or dark theme, and names the
    values of a point where the pointer rests on it.

    Args:
        document: What `gossamer.evaluation.fidelity.measure` returns.
        path: The file to write.

    Returns:
        `path`.
    """
    write_text(path, fidelity_plot(document))
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """One density of a line, with what the reader is told of it."""

    x: float
    y: float
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One method of a panel: its points by density, and its look, None for grey."""

    method: str
    look: Series | None
    points: tuple[_Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LogAxis:
    """A logarithmic axis: values `low`…`high` lie at `start`…`stop`."""

    low: float
    high: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        """Return where a value lies."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.stop - self.start), 2)

    def ticks(self, most: int = 9) -> list[float]:
        """Return round values within the axis, as many as there is room for."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in (_STEPS, (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
            decades = [10.0**decade * step for decade in range(first, last + 1) for step in steps]
            values = [
                value for value in decades if self.low <= value * 1.0001 <= self.high * 1.0002
            ]
            if len(values) <= most:
                return values
        return []


def fidelity_plot(document: Mapping[str, Any]) -> str:
    """Return the plot as SVG."""
    names = [source["input"] for source in document["inputs"]]
    methods = list(dict.fromkeys(row["method"] for row in document["rows"]))
    looks = _looks([method for method in methods if method != "dense"])
    panels = [
        (source, _lines(document["rows"], source["input"], looks)) for source in document["inputs"]
    ]
    panels = [(source, lines) for source, lines in panels if lines]
    columns = max(1, min(_COLUMNS, len(panels)))
    width = columns * _PANEL_WIDTH
    height = max(1, math.ceil(len(panels) / columns)) * _PANEL_HEIGHT
    points = [point for _, lines in panels for line in lines for point in line.points]
    if points:
        drawn: list[str] = []
        limits = _limits([point.x for point in points]), _limits([point.y for point in points])
        for index, (source, lines) in enumerate(panels):
            row, column = divmod(index, columns)
            in_row = min(
                columns, len(panels) - row * columns
            )  # a last row that is short is centred
            left = (column + (columns - in_row) / 2) * _PANEL_WIDTH
            place = f"translate({left:g} {row * _PANEL_HEIGHT})"
            drawn.append(f'<g transform="{place}">\n{_panel(source, lines, limits)}\n</g>')
        body = "\n".join(drawn)
    else:
        body = _text(width / 2, height / 2, "nothing was measured", "middle")
    title = f"Relative error against density on {', '.join(names)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n'
        f"<style>\n{_style()}\n</style>\n{body}\n</svg>\n"
    )


def _looks(methods: Sequence[str]) -> dict[str, Series | None]:
    """Give colours: to the featured methods, or to all where they are few."""
    if len(methods) <= len(SERIES):
        return dict(zip(methods, SERIES, strict=False))
    return {name: _FEATURED.get(name) for name in methods}


def _lines(
    rows: Sequence[Mapping[str, Any]], name: str, looks: Mapping[str, Series | None]
) -> list[_Line]:
    """Return the lines of a panel; rows without an error, which no logarithm has, are left out."""
    lines: list[_Line] = []
    for method, look in looks.items():
        points = [
            _Point(x=row["density"], y=row["rel_l2"], note=_note(row))
            for row in rows
            if (row["input"], row["method"]) == (name, method)
            and row["density"] > 0
            and row["rel_l2"] > 0
        ]
        if points:
            ordered = sorted(points, key=lambda point: point.x)
            lines.append(_Line(method=method, look=look, points=tuple(ordered)))
    return lines


def _note(row: Mapping[str, Any]) -> str:
    return f"{row['method']}: error {row['rel_l2']:.3g} at density {row['density']:.3f}"


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis, with some room and at least a factor of 2."""
    low, high = min(values), max(values)
    middle, reach = math.sqrt(low * high), max(math.sqrt(high / low), math.sqrt(2.0))
    return middle / reach / 1.1, middle * reach * 1.1


def _panel(
    source: Mapping[str, Any],
    lines: Sequence[_Line],
    limits: tuple[tuple[float, float], tuple[float, float]],
) -> str:
    """Draw one input: title, grid, lines and labels."""
    (low_x, high_x), (low_y, high_y) = limits
    x_axis = _LogAxis(low=low_x, high=high_x, start=_LEFT, stop=_LEFT + _PLOT_WIDTH)
    y_axis = _LogAxis(low=low_y, high=high_y, start=_TOP + _PLOT_HEIGHT, stop=_TOP)
    heads, calls = len(source["heads"]), source["calls"]
    facts = (
        f"{source['tokens']:,} tokens · {_counted(heads, 'head')} · {_counted(calls, 'call')} · "
        f"entropy {source['entropy']:.2f} of its maximum"
    )
    grey = [line for line in lines if line.look is None]
    coloured = [line for line in lines if line.look is not None]
    return "\n".join(
        [
            _text(_LEFT, 26, source["input"], "start", ' class="h"'),
            _text(_LEFT, 45, facts, "start"),
            _frame(x_axis, y_axis),
            *(_draw(line, x_axis, y_axis) for line in [*grey, *coloured]),
            _labels(lines, x_axis, y_axis),
        ]
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _frame(x_axis: _LogAxis, y_axis: _LogAxis) -> str:
    """Draw grid, ticks and titles."""
    parts: list[str] = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<path class="g" d="M{x_axis.start:g} {y:g}H{x_axis.stop:g}"/>')
        parts.append(_text(x_axis.start - 8, y + 4, f"{value:g}", "end"))
    for value in x_axis.ticks(7):
        x = x_axis.place(value)
        parts.append(f'<path class="g" d="M{x:g} {y_axis.start:g}v5"/>')
        parts.append(_text(x, y_axis.start + 20, f"{value:g}", "middle"))
    parts.append(f'<path class="g" d="M{x_axis.start:g} {y_axis.start:g}H{x_axis.stop:g}"/>')
    middle = (x_axis.start + x_axis.stop) / 2
    parts.append(_text(middle, y_axis.start + 42, "density realised", "middle"))
    height = (y_axis.start + y_axis.stop) / 2
    turned = f' transform="rotate(-90 16 {height:g})"'
    parts.append(_text(16, height, "relative L2 error (lower is closer)", "middle", turned))
    return "\n".join(parts)


def _draw(line: _Line, x_axis: _LogAxis, y_axis: _LogAxis) -> str:
    """Draw one method: its line and its markers."""
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in line.points]
    path = "L".join(f"{x:g} {y:g}" for x, y in places)
    markers: list[str] = []
    for (x, y), point in zip(places, line.points, strict=True):
        note = f"<title>{escape(point.note)}</title>"
        if line.look is None:
            markers.append(f'<circle class="m" cx="{x:g}" cy="{y:g}" r="2">{note}</circle>')
        else:
            turn = f"translate({x:g} {y:g}) scale({_MARKER})"
            markers.append(f'<path class="m" transform="{turn}" d="{line.look.path}">{note}</path>')
    return f'<g class="{_class_of(line)}"><path class="l" d="M{path}"/>{"".join(markers)}</g>'


def _labels(lines: Sequence[_Line], x_axis: _LogAxis, y_axis: _LogAxis) -> str:
    """Name the lines at the right, each as near to its last point as the others allow."""
    ends = [(line, line.points[-1]) for line in lines]
    ends.sort(key=lambda end: -end[1].y)
    wanted = [y_axis.place(point.y) for _, point in ends]
    places = _spread(wanted, _LABEL_STEP, (y_axis.stop - 6, y_axis.start + 6))
    x = x_axis.stop + 34
    parts: list[str] = []
    for (line, point), y in zip(ends, places, strict=True):
        from_x, from_y = x_axis.place(point.x), y_axis.place(point.y)
        bend = max(x_axis.stop + 6, from_x + 6)
        leader = f"M{from_x + 6:g} {from_y:g}H{bend:g}L{x - 12:g} {y:g}H{x - 4:g}"
        name = _text(x, y + 4, line.method, "start", ' class="n"')
        parts.append(f'<g class="{_class_of(line)}"><path class="e" d="{leader}"/>{name}</g>')
    return "\n".join(parts)


def _spread(wanted: Sequence[float], step: float, limits: tuple[float, float]) -> list[float]:
    """Return places near the wanted ascending ones, at least `step` apart and within limits.

    Neighbours that would overlap are moved together as one block around the mean of what they
    want, so that no label moves further than it must.
    """
    low, high = limits
    step = min(step, (high - low) / max(1, len(wanted) - 1))
    blocks: list[tuple[float, int]] = []  # the mean of (place - position in block * step), length
    for place in wanted:
        top, count = place, 1
        while blocks:
            above, length = blocks[-1]
            if above + length * step <= top:
                break
            blocks.pop()
            top = (above * length + (top - length * step) * count) / (length + count)
            count += length
        blocks.append((top, count))
    places = [top + index * step for top, count in blocks for index in range(count)]
    for index, place in enumerate(places):  # from above: stay under the upper limit
        places[index] = max(place, low if index == 0 else places[index - 1] + step)
    for index in reversed(range(len(places))):  # from below: stay over the lower limit
        bound = high if index == len(places) - 1 else places[index + 1] - step
        places[index] = round(min(places[index], bound), 2)
    return places


def _class_of(line: _Line) -> str:
    return "o" if line.look is None else f"s{SERIES.index(line.look)} f"


def _style() -> str:
    light = "".join(f".s{i}{{--c:{look.light}}}" for i, look in enumerate(SERIES))
    dark = "".join(f".s{i}{{--c:{look.dark}}}" for i, look in enumerate(SERIES))
    return (
        'text{font:12.5px -apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5a6270}'
        ".h{font-size:17px;font-weight:600;fill:#1f2733}"
        ".g{stroke:#dfe1e4}.l,.e{fill:none;stroke:var(--c)}.m{fill:var(--c)}"
        ".n{fill:var(--c)}.e{stroke-width:.8;opacity:.55}"
        ".f .l{stroke-width:2.4}.f .n{font-weight:600}"
        ".o{--c:#8a929e}.o .l{stroke-width:1;opacity:.6}.o .m{opacity:.8}.o .n{fill:#6b7280}"
        ".o:hover{--c:#1f2733}.o:hover .l{stroke-width:2;opacity:1}.o:hover .n{fill:#1f2733}"
        f"{light}\n@media(prefers-color-scheme:dark){{text{{fill:#9ba3af}}.h{{fill:#e6e9ee}}"
        ".g{stroke:#303640}.o{--c:#737b88}.o .n{fill:#9ba3af}.n{fill:var(--c)}"
        ".o:hover{--c:#e6e9ee}.o:hover .n{fill:#e6e9ee}"
        f"{dark}}}"
    )


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
