"""Writes docs/results.md and its plots of kernels from the committed measurements, or checks them.

python tools/make_results_page.py
python tools/make_results_page.py --check

The sections on kernels, planning and whole models appear where their files do.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gossamer.evaluation.files import write_text
from gossamer.report import markdown_table
from gossamer.report.document import read_results
from gossamer.report.fidelity import _draw, _labels, _Line, _LogAxis, _Point, _style, _text
from gossamer.report.palette import SERIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
KERNELS, PLANS, MODELS = "kernels-h200.json", "plans-h200.json", "model-h200.json"

Row = dict[str, Any]

OPENING = """# Results

Every table here is written by `tools/make_results_page.py` from files in `benchmarks/results`, which one command each made. The
first ones show the bundled `tiny-wan`, a small model: they compare methods, and do not say what a large model gains. The README has
the table with times. What attention costs on a GPU at real sizes stands [at the end](#kernels).
"""

ALL = """
## Every method at equal density

`python benchmarks/compare_tiny_wan.py --set all --device cuda --workers 8`: eight held-out prompts, no dense warm-up, float32.
The workers shared one GPU, so there are no times. At 15% most methods are near the floor at which a video has left its dense
counterpart: {same:.1f} dB between two dense videos of one prompt from different noise, {other:.1f} dB between different prompts.
Densities of which not every method is finished hold those that are.

"""

LADDER = """
## Combinations: MC-Sparse's ladder, residuals, FAST

`python benchmarks/compare_tiny_wan.py --set ladder --device cuda --workers 4 --prompts 4`. `mc-1` to `mc-5` are MC-Sparse's
steps: pooled blocks, exact blocks, single tokens, PDDP groups, the residual; all but the first reuse an anchor's plan for three
steps. `-reuse` and `-residual` are other methods with the same stage around them. `scaling-uniform` and `scaling-fast` are
ScalingAttention's masks with equal and with fidelity budgets, `-warm` with a fifth of the steps dense. Look at the realised
density: anchors with a residual compute full attention.

"""

REUSE = """
## Reusing a plan over steps

`python benchmarks/reuse_steps.py`: relative L2 error of the attention output against dense attention on captured heads of
tiny-wan, by the number of steps since the plan was made. Means over three layers.

"""

FIDELITY = """
## Attention-level error

`python benchmarks/fidelity.py`: relative L2 error and covered softmax mass at three densities, on captured heads of tiny-wan and
on structured heads of high and of low entropy, {seeds} seeds. [Attention-level error](fidelity.md) says what is measured.
`mc-…` are MC-Sparse's choices one at a time. Sorted by the error on captured heads at .24.

![Error against density](images/fidelity.svg)

"""

SCALING = """
## ScalingAttention's design choices

`python benchmarks/scaling_ablations.py --prompts {calibration} --tests {tests}`: {calibration} calibration prompts and {tests} test
prompt(s) of the bundled model. {steps} steps, {buckets} step buckets.

"""

# Key of the document, what it shows.
SCALING_PARTS = {
    "orientation": "Where FAST wants the highest fidelity, and uniform budgets: error predicted by the curves, and PSNR of "
    "generated videos.",
    "prompts": "Density of the union mask after each prompt, and of one prompt's own mask.",
    "profiling": "Budgets from one profiling prompt against those from all: intersection over union of the masks.",
    "rows": "Fidelity from sampled query rows against all rows.",
    "resolution": "Masks of a small size, resized, against the large size's own: recall, and the density it costs.",
    "aspect": "Masks at another aspect ratio, from calibration at one and at both.",
    "metrics": "Hellinger fidelity and cosine similarity of attention rows at falling thresholds.",
}
METRIC_ROWS = 8

MEMORY = """
## Memory of planning

`python benchmarks/plan_memory.py`: one call of {tokens:,} tokens, {heads} heads of {head_dim}, planned on one CPU thread. Extra is
the growth of the peak resident memory without the plan itself. `west` is the saliency that `gossamer calibrate` streams, `anchor`
is MC-Sparse's selection with full attention. Names without a density use the method's own budget. CPU seconds say little about a
GPU; they were taken beside other work.

"""

KERNELS_TEXT = """
## Kernels

`gossamer bench kernels`: {made}. Efficiency is the fastest dense time of the same run over the sparse time, times the density: 1 is the
ideal, and a plan is faster than dense where its density is below its efficiency. Planning is not in it. Every row was checked
against float64 before it was timed. `tokens-…` and `blocks-…` are random rows of single keys and of blocks of 128 (or as many as
the name says), `-weighted` with weights and virtual keys; [the command line](cli.md#bench) has the other names. Milliseconds are
those of one day, each case on one GPU, not all of them on the same: ratios count.

"""

KERNEL_PLOTS = """
![Efficiency against density](images/kernels-density.svg)

![Efficiency against length](images/kernels-length.svg)
"""

DENSE_TEXT = """
Dense attention in the same runs, milliseconds, medians where a shape was run several times:

"""

PLANS_TEXT = """
## Planning

`gossamer bench plans`: {made}. One call's plan, beside the fastest dense attention of the same shape and run. `cold` has no state, `warm`
has the previous step's, `cached` is a plan that depends on the shape alone, the second time. `mc-sparse-anchor` is the whole step
that `Reuse` takes: grouping, full attention with the selection, and the sparse pass for the residual. Waits are the host's
synchronisations in one call, as far as torch counts them.

"""

MODELS_TEXT = """
## Whole models

`gossamer bench model`: {made}. One forward of a Wan2.1 transformer in bfloat16, with random weights and inputs, in the steady state after
the first step. Attention is all self-attention, planning included, as a share of the forward. `blocks-50-fixed` keeps the plan of
the first step. `mc-sparse-15-reuse` is a step that reuses an anchor's plan and residual; all layers share one anchor, so that the
memory column holds one, where a generation keeps one per layer and branch.

"""


def main(arguments: list[str] | None = None) -> int:
    """Run the script and return its exit status: 1 if `--check` found the page stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    stale = [path for path, text in wanted().items() if not holds(path, text)]
    for path in stale:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        if options.check:
            print(f"{name}: stale, run tools/make_results_page.py")
            continue
        write_text(path, wanted()[path])
        print(f"wrote {name}")
    return 1 if stale and options.check else 0


def wanted() -> dict[Path, str]:
    """Return what each generated file should hold."""
    found = {PAGE: page()}
    if (RESULTS / KERNELS).is_file():
        rows = sparse_rows(read(KERNELS)["rows"])
        found[IMAGES / "kernels-density.svg"] = density_plot(rows)
        found[IMAGES / "kernels-length.svg"] = length_plot(rows)
    return found


def holds(path: Path, text: str) -> bool:
    """Return whether a file holds the text."""
    return path.is_file() and path.read_text(encoding="utf-8") == text


def page() -> str:
    """Return the page."""
    floor = read("seed-floor-tiny-wan.json")["psnr_db"]
    fidelity, memory = read("fidelity.json"), read("plan-memory.json")
    parts = [
        OPENING,
        ALL.format(same=floor["same_prompt"], other=floor["other_prompt"]),
        table("compare-tiny-wan-all.json"),
        LADDER,
        table("compare-tiny-wan-ladder.json"),
        REUSE,
        reuse_table(read("reuse-tiny-wan.json")["rows"]),
        FIDELITY.format(seeds=max(row["seeds"] for row in fidelity["rows"])),
        fidelity_table(fidelity["rows"]),
        *scaling(),
        MEMORY.format(**memory),
        memory_table(memory["rows"]),
        *gpu_section(KERNELS, KERNELS_TEXT, kernel_tables),
        *gpu_section(PLANS, PLANS_TEXT, plan_table),
        *gpu_section(MODELS, MODELS_TEXT, model_table),
    ]
    return "".join(parts)


def read(name: str) -> dict[str, Any]:
    """Return a results document."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(name: str) -> str:
    """Return the table of a comparison."""
    return markdown_table(read_results(RESULTS / name, with_files=False))


def reuse_table(rows: list[dict[str, Any]]) -> str:
    """Return the errors by steps past the anchor."""
    steps = range(len(rows[0]["rel_l2"]))
    head = ["Method", "Density", "Plan", *(f"+{step}" for step in steps)]
    lines = [head, ["---", "---:", "---", *("---:" for _ in steps)]]
    for row in rows:
        errors = (f"{error:.3f}" for error in row["rel_l2"])
        lines.append([row["method"], f"{row['density']:.2f}", row["mode"], *errors])
    return markdown(lines)


def fidelity_table(rows: list[dict[str, Any]]) -> str:
    """Return error and mass by method, input and density."""
    inputs = list(dict.fromkeys(row["input"] for row in rows))
    densities = sorted({row["density_asked"] for row in rows})
    cell = {(row["method"], row["input"], row["density_asked"]): row for row in rows}
    methods = sorted(
        dict.fromkeys(row["method"] for row in rows),
        key=lambda method: cell[method, inputs[0], densities[1]]["rel_l2"],
    )
    columns = [(name, density) for name in inputs for density in densities]
    head = ["Method", *(f"{name} {density:g}" for name, density in columns)]
    lines = [head, ["---", *("---:" for _ in columns)]]
    for method in methods:
        found = [cell[method, name, density] for name, density in columns]
        lines.append([method, *(f"{row['rel_l2']:.3f} ({row['mass']:.2f})" for row in found)])
    return markdown(lines)


def scaling() -> list[str]:
    """Return the section of ScalingAttention's ablations."""
    document = read("scaling-tiny-wan.json")
    setup = document["setup"]
    parts = [
        SCALING.format(
            calibration=len(setup["calibration_prompts"]),
            tests=len(setup["test_prompts"]),
            steps=setup["num_steps"],
            buckets=setup["num_buckets"],
        )
    ]
    for name, text in SCALING_PARTS.items():
        rows = document.get(name)
        if not rows:
            continue
        if name == "metrics":
            rows = rows[:: max(1, len(rows) // METRIC_ROWS)]
        parts.append(f"{text}\n\n{plain_table(rows)}\n")
    return parts


def plain_table(rows: list[dict[str, Any]]) -> str:
    """Return rows of like keys as a table."""
    heads = [name.replace("_", " ") for name in rows[0]]
    lines = [heads, ["---"] * len(heads)]
    lines += [[shown(value) for value in row.values()] for row in rows]
    return markdown(lines)


def shown(value: object) -> str:
    """Return a value as text: numbers to three digits, lists by their mean or as a size."""
    if isinstance(value, list) and value and all(isinstance(x, float) for x in value):
        return f"{sum(value) / len(value):.2f}"
    if isinstance(value, list):
        return "×".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Return memory and time by case."""
    lines = [["Case", "Density", "Plan, MiB", "Extra, MiB", "Seconds"], ["---", *["---:"] * 4]]
    for row in rows:
        density = "–" if row["density"] is None else f"{row['density']:.3f}"
        numbers = (row["plan_mib"], row["extra_mib"], row["seconds"])
        lines.append([row["case"], density, *(f"{number:.1f}" for number in numbers)])
    return markdown(lines)


def gpu_section(name: str, text: str, tables: Callable[[list[Row]], str]) -> list[str]:
    """Return a section of measurements on a GPU; nothing where there is no such file."""
    if not (RESULTS / name).is_file():
        return []
    document = read(name)
    where = document["environment"]
    versions = [
        f"{package} {where[package]}"
        for package in ("torch", "triton", "flash-attn-4")
        if where.get(package)
    ]
    made = f"{where['device']}, {', '.join(versions)}, `{name}`"
    parts = [text.format(made=made), tables(document["rows"])]
    notes = [f"{row['case']}: {row['failure']}" for row in document.get("failures", [])]
    if notes:
        parts.append(f"\nRefused, and not timed: {'; '.join(notes)}.\n")
    if document.get("note"):
        parts.append(f"\n{document['note']}\n")
    if document.get("missing"):
        parts.append(f"\nNot run: {', '.join(document['missing'])}.\n")
    return parts


def sparse_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `bench kernels` that are no dense attention's."""
    return [row for row in rows if row["dense_kernel"] is not None]


def kernel_tables(rows: list[Row]) -> str:
    """Return kernels by case, density and efficiency, the plots, and dense attention by case."""
    head = ["Case", "Kernel", "Density", "Time, ms", "Spread, ms"]
    head += ["Dense, ms", "Fastest dense", "Efficiency", "Speed-up"]
    lines = [head, ["---", "---", *["---:"] * 4, "---", "---:", "---:"]]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    ordered = sorted(
        sparse_rows(rows), key=lambda row: (cases.index(row["case"]), round(row["density"], 2))
    )
    for row in ordered:
        numbers = (row["density"], row["median_ms"], row["spread_ms"], row["dense_ms"])
        lines.append(
            [
                f"{row['case']} {row.get('stage', '')}".strip(),
                row["kernel"],
                *(f"{number:.2f}" for number in numbers),
                row["dense_kernel"],
                f"{row['efficiency']:.2f}",
                f"{row['speedup']:.2f}×",
            ]
        )
    return markdown(lines) + KERNEL_PLOTS + DENSE_TEXT + dense_table(rows)


def dense_table(rows: list[Row]) -> str:
    """Return the milliseconds of every dense attention by case."""
    dense = [row for row in rows if row["dense_kernel"] is None]
    names = list(dict.fromkeys(row["kernel"] for row in dense))
    lines = [["Case", *names], ["---", *["---:"] * len(names)]]
    for case in dict.fromkeys(row["case"] for row in dense):
        times = (
            [row["median_ms"] for row in dense if (row["case"], row["kernel"]) == (case, name)]
            for name in names
        )
        lines.append([case, *(f"{statistics.median(x):.2f}" if x else "–" for x in times)])
    return markdown(lines)


def plan_table(rows: list[Row]) -> str:
    """Return what planning costs by case and stage."""
    head = ["Case", "Stage", "Time, ms", "Spread, ms", "Of dense", "Extra, MiB", "Waits", "Density"]
    lines = [head, ["---", "---", *["---:"] * 6]]
    for row in rows:
        density = "–" if row["density"] is None else f"{row['density']:.3f}"
        lines.append(
            [
                row["case"],
                row["stage"],
                f"{row['median_ms']:.2f}",
                "–" if row["spread_ms"] is None else f"{row['spread_ms']:.2f}",
                f"{row['dense_share']:.1%}",
                f"{row['peak_extra_bytes'] / 2**20:.0f}",
                str(row["synchronisations"]),
                density,
            ]
        )
    return markdown(lines)


def model_table(rows: list[Row]) -> str:
    """Return what forwards cost by model and recipe."""
    head = ["Model", "Recipe", "Density", "Time, ms", "Spread, ms"]
    head += ["Attention", "Planning", "Speed-up", "Memory, GiB"]
    lines = [head, ["---", "---", *["---:"] * 7]]
    for row in rows:
        lines.append(
            [
                row["case"],
                row["recipe"],
                f"{row['density']:.2f}",
                f"{row['median_ms']:.0f}",
                f"{row['spread_ms']:.0f}",
                f"{row['attention_share']:.1%}",
                f"{row['plan_share']:.1%}",
                f"{row['speedup']:.2f}×",
                f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    return markdown(lines)


# The layout of the plots, in SVG user units: that of `gossamer fidelity`'s plot, but lower.
WIDTH, HEIGHT = 330, 250
LEFT, LABELS, TOP, BOTTOM = 62, 168, 66, 56
COLUMNS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel of a plot of efficiencies.

    Attributes:
        lines: Points (x, efficiency) by the name of their line.
    """

    lines: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A linear axis from 0: values 0…`high` lie at `start`…`stop`."""

    high: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        """Return where a value lies."""
        return round(self.start + value / self.high * (self.stop - self.start), 2)

    def ticks(self) -> list[float]:
        """Return the values of the ticks."""
        return [step / 5 for step in range(math.floor(self.high * 5 + 1e-9) + 1)]


def density_plot(rows: list[Row]) -> str:
    """Return efficiency against density as SVG: a panel per case of several densities."""
    panels: dict[str, Panel] = {}
    for row in rows:
        if not row.get("stage"):
            add_point(panels, row["case"], row["kernel"], (row["density"], row["efficiency"]))
    return plot(panels, "density realised", "Efficiency against density")


def length_plot(rows: list[Row]) -> str:
    """Return efficiency against the number of tokens as SVG: a panel per kind of plan."""
    panels: dict[str, Panel] = {}
    for row in rows:
        name = f"{row['case']} {row.get('stage', '')}".strip()
        kind = re.sub(r"-\d+k?(?!\w)", "", name)
        line = f"{row['kernel']}, {row['density']:.1f}"
        add_point(panels, kind, line, (num_tokens(row), row["efficiency"]))
    several = {
        title: Panel(lines={name: line for name, line in panel.lines.items() if is_line(line)})
        for title, panel in panels.items()
    }
    return plot(several, "tokens", "Efficiency against length, by kernel and density")


def add_point(panels: dict[str, Panel], title: str, line: str, point: tuple[float, float]) -> None:
    """Add a point to a line of a panel, both of which are made where there are none."""
    panels.setdefault(title, Panel(lines={})).lines.setdefault(line, []).append(point)


def is_line(points: list[tuple[float, float]]) -> bool:
    """Return whether points stand at more than one place."""
    return len({x for x, _ in points}) > 1


def num_tokens(row: Row) -> int:
    """Return the tokens of a row; of the first documents, which lack them, from the case's name."""
    if "num_tokens" in row:
        return row["num_tokens"]
    return max(int(digits) for digits in re.findall(r"\d+", row["case"]))


def plot(panels: dict[str, Panel], x_title: str, title: str) -> str:
    """Draw panels by their titles, in the look of the plots of `gossamer fidelity`.

    Panels without a line of several places are left out. A name has one colour in all panels.
    """
    panels = {
        name: panel for name, panel in panels.items() if any(map(is_line, panel.lines.values()))
    }
    names = sorted({name for panel in panels.values() for name in panel.lines})
    looks = {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}
    width = COLUMNS * (LEFT + WIDTH + LABELS)
    height = max(1, math.ceil(len(panels) / COLUMNS)) * (TOP + HEIGHT + BOTTOM)
    points = [point for panel in panels.values() for line in panel.lines.values() for point in line]
    body = [_text(width / 2, height / 2, "nothing was measured", "middle")]
    if points:
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        x_axis = _LogAxis(low=low / 1.1, high=high * 1.1, start=LEFT, stop=LEFT + WIDTH)
        top = max(1.05, *(y for _, y in points))
        y_axis = Share(high=top, start=TOP + HEIGHT, stop=TOP)
        body = []
        for index, (name, panel) in enumerate(panels.items()):
            row, column = divmod(index, COLUMNS)
            place = f"{column * (LEFT + WIDTH + LABELS)} {row * (TOP + HEIGHT + BOTTOM)}"
            lines = [
                _Line(method=line, look=looks[line], points=noted(line, panel.lines[line]))
                for line in sorted(panel.lines)
            ]
            drawn = draw_panel(name, lines, x_axis, y_axis, x_title)
            body.append(f'<g transform="translate({place})">\n{drawn}\n</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n'
        f"<style>\n{_style()}\n</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def noted(name: str, points: list[tuple[float, float]]) -> tuple[_Point, ...]:
    """Return the points of a line from left to right, with what the reader is told of each."""
    return tuple(
        _Point(x=x, y=y, note=f"{name}: efficiency {y:.2f} at {x:.3g}") for x, y in sorted(points)
    )


def draw_panel(
    title: str, lines: list[_Line], x_axis: _LogAxis, y_axis: Share, x_title: str
) -> str:
    """Draw one panel: title, grid, lines and labels."""
    parts = [_text(LEFT, 36, title, "start", ' class="h"')]
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<path class="g" d="M{LEFT} {y:g}H{LEFT + WIDTH}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    for value in x_axis.ticks(7):
        x = x_axis.place(value)
        parts.append(f'<path class="g" d="M{x:g} {y_axis.start:g}v5"/>')
        parts.append(_text(x, y_axis.start + 20, f"{value:,g}", "middle"))
    parts.append(_text(LEFT + WIDTH / 2, y_axis.start + 42, x_title, "middle"))
    middle = (y_axis.start + y_axis.stop) / 2
    turned = f' transform="rotate(-90 16 {middle:g})"'
    parts.append(_text(16, middle, "efficiency (1 is ideal)", "middle", turned))
    parts += [_draw(line, x_axis, y_axis) for line in lines]
    parts.append(_labels(lines, x_axis, y_axis))
    return "\n".join(parts)


def markdown(lines: list[list[str]]) -> str:
    """Return lines of cells as a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
