"""Measure the attention-level error of all methods and write benchmarks/results/fidelity.json.

    python benchmarks/fidelity.py

Every registered method at densities .12, .24 and .48, eight seeds, on the captured heads of
tiny-wan (tests/data) and on the structured sets of high and low entropy. Nothing is generated and
no time is measured, so other programs may run beside it. A run that was stopped goes on where it
was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CAPTURE = ROOT / "tests" / "data" / "tiny-wan-capture.safetensors"
RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"


def ladder() -> list[object]:
    """Return MC-Sparse's rungs below its own: how much each choice adds at equal density."""
    import gossamer as gs
    from gossamer.evaluation.fidelity import DENSITIES
    from gossamer.evaluation.variants import Variant

    rungs = {
        "mc-block-pooled": {"block": 128, "scores": "pooled", "grouping": "none"},
        "mc-block-exact": {"block": 128, "grouping": "none"},
        "mc-token-pooled": {"scores": "pooled", "grouping": "none"},
        "mc-token-exact": {"grouping": "none"},
    }
    return [
        Variant(
            name=name,
            recipe=gs.Recipe(method=gs.MCSparse(density=density, **params)),
            density_asked=density,
        )
        for density in DENSITIES
        for name, params in rungs.items()
    ]


def main() -> None:
    """Measure what is missing, and write the results once nothing is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, default=ROOT / "out" / "fidelity-benchmark")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=None, help="Also draw the results, as SVG.")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads.")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--methods", default=None, help="With commas; all if left out.")
    parser.add_argument("--grid", default=None, help="Of the structured sets: frames,rows,columns.")
    arguments = parser.parse_args()
    # Threads that spin against each other cost more than they save at these sizes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import torch

    from gossamer.evaluation.captures import Capture
    from gossamer.evaluation.fidelity import Fidelity, choose_variants, measure
    from gossamer.evaluation.structured import GRID, NAMED_SETS, structured_set

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    grid = GRID
    if arguments.grid is not None:
        frames, rows, columns = map(int, arguments.grid.split(","))
        grid = (frames, rows, columns)
    inputs = {"tiny-wan": Capture.open(CAPTURE)}
    inputs |= {name: structured_set(name, grid=grid).capture() for name in NAMED_SETS}
    names = None if arguments.methods is None else arguments.methods.split(",")
    variants = choose_variants(names)
    if names is None:
        variants += ladder()
    spec = Fidelity(inputs=inputs, variants=variants, seeds=arguments.seeds)
    start, said = time.monotonic(), [""]

    def show(progress: object) -> None:
        cell = f"[{progress.cells_done + 1}/{progress.cells_total}] {progress.cell}"
        if cell != said[0]:
            print(f"{time.monotonic() - start:6.0f} s  {cell}", file=sys.stderr, flush=True)
        said[0] = cell

    document = measure(spec, arguments.scratch, on_progress=show)
    for skipped in document["skipped"]:
        print(f"skipped: {json.dumps(skipped)}", file=sys.stderr)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {arguments.results} ({len(document['rows'])} rows)")
    if arguments.plot is not None:
        from gossamer.report.fidelity import write_fidelity_plot

        print(f"wrote {write_fidelity_plot(document, arguments.plot)}")


if __name__ == "__main__":
    main()
