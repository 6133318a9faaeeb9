"""Measure what reusing a plan costs over steps, with and without the residual.

    python benchmarks/reuse_steps.py

Steps 4 to 8 of the captured heads of tiny-wan (tests/data): the first is the anchor, the next ones
reuse its plan, and the error of each is that of its attention output against dense attention.
Writes benchmarks/results/reuse-tiny-wan.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gossamer as gs
from gossamer.evaluation.captures import Capture
from gossamer.evaluation.environment import environment
from gossamer.evaluation.files import write_json
from gossamer.testing import attention

ROOT = Path(__file__).resolve().parents[1]
CAPTURE = ROOT / "tests" / "data" / "tiny-wan-capture.safetensors"
RESULTS = ROOT / "benchmarks" / "results" / "reuse-tiny-wan.json"
METHODS = ("block-topk", "svg2", "mc-sparse", "instagen", "svg-ear", "vsa")
DENSITIES = (0.12, 0.24, 0.48)
MODES = {
    "planned each step": None,
    "reused": gs.Reuse(every=5, residual=False),
    "reused with residual": gs.Reuse(every=5, residual=True),
}


def main() -> None:
    """Run every method in every mode and write the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    capture = Capture.open(CAPTURE)
    rows = []
    for density in DENSITIES:
        for name in METHODS:
            for mode, reuse in MODES.items():
                method = gs.get_method(name, density=density)
                recipe = gs.Recipe(method=method, reuse=reuse, min_tokens=0)
                row = {"method": name, "density": density, "mode": mode}
                rows.append({**row, "rel_l2": errors(capture, recipe)})
                shown = ", ".join(f"{error:.3f}" for error in rows[-1]["rel_l2"])
                print(f"{name}@{density} {mode}: {shown}", flush=True)
    write_json(arguments.results, {"environment": environment(), "rows": rows})


def errors(capture: Capture, recipe: gs.Recipe) -> list[float]:
    """Return the mean relative L2 error over layers, for each number of steps past the anchor."""
    found: list[list[float]] = []
    for chain in capture.chains():
        session = gs.Session(recipe)
        of_chain = []
        for key in chain:
            q, k, v = (x[None].float() for x in capture.read(key))
            out = session.attention(q, k, v, capture.call(key)).double()
            exact = attention(q, k, v).out
            of_chain.append(float((out - exact).norm() / exact.norm()))
        found.append(of_chain)
    return [sum(column) / len(column) for column in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
