"""Writes docs/results.md from the committed measurements, or checks that it is fresh.

python tools/make_results_page.py
python tools/make_results_page.py --check
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gossamer.evaluation.files import write_text
from gossamer.report import markdown_table
from gossamer.report.document import read_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

OPENING = """# Results

Every table here is written by `tools/make_results_page.py` from files in `benchmarks/results`, which one command each made. They
show the bundled `tiny-wan`, a small model: they compare methods, and do not say what a large model gains. The README has the
table with times.
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


def main(arguments: list[str] | None = None) -> int:
    """Run the script and return its exit status: 1 if `--check` found the page stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    text = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        print("docs/results.md: stale, run tools/make_results_page.py")
        return 1
    write_text(PAGE, text)
    print("wrote docs/results.md")
    return 0


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


def markdown(lines: list[list[str]]) -> str:
    """Return lines of cells as a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
