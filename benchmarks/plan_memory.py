"""Measure the memory that planning takes and write benchmarks/results/plan-memory.json.

    python benchmarks/plan_memory.py

One call of 75,600 tokens (Wan at 720p: 21 x 45 x 80), 2 heads of 128, bfloat16, at density .15, on
the CPU. Each method plans in a process of its own; what counts is the growth of its peak resident
memory, less the plan that it returns. WEST's saliency, which `gossamer calibrate` streams, and
exact selection with full attention beside it, as an anchor needs, are rows too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "plan-memory.json"
GRID = (21, 45, 80)
NUM_TOKENS, HEADS, DIM, DENSITY = 21 * 45 * 80, 2, 128, 0.15
OWN_BUDGET = ("svg2", "svg-ear", "instagen", "mc-sparse", "xattention", "sparge", "flexprefill")
LIMIT_MIB = 1024


def main() -> None:
    """Measure every method in a process of its own, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=None, help="For the processes.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments.case)))
        return
    import gossamer as gs
    from gossamer.evaluation.environment import environment

    cases = [f"{name}@{DENSITY}" for name in gs.list_methods()]
    cases += [*OWN_BUDGET, "west", "anchor"]
    rows = []
    for case in cases:
        command = [sys.executable, __file__, "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append({"case": case, "error": done.stderr.strip().splitlines()[-1]})
        else:
            rows.append({"case": case, **json.loads(done.stdout)})
        print(rows[-1], flush=True)
    document = {
        "environment": environment(),
        "tokens": NUM_TOKENS,
        "heads": HEADS,
        "head_dim": DIM,
        "rows": rows,
    }
    arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    worst = max(row.get("extra_mib", float("inf")) for row in rows)
    print(f"wrote {arguments.results}; the most is {worst:.0f} MiB")
    sys.exit(worst > LIMIT_MIB)


def measure(case: str) -> dict[str, float]:
    """Run one case and return seconds, density and MiB."""
    import torch

    import gossamer as gs

    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, NUM_TOKENS, DIM)
    # Clustered tokens, as attention has: random ones make every softmax flat.
    centers = torch.randn(1, HEADS, 64, DIM, generator=generator)
    place = torch.randint(64, (NUM_TOKENS,), generator=generator)
    q, k, v = (
        (centers[:, :, place] + 0.7 * torch.randn(shape, generator=generator)).bfloat16()
        for _ in range(3)
    )
    del centers
    call = gs.Call(grid=GRID, num_layers=40, num_steps=50)
    work = prepare(case, q, k, v, call)
    before = resident()
    start = time.perf_counter()
    plan = work()
    seconds = time.perf_counter() - start
    growth = peak() - before
    kept = plan_bytes(plan) if isinstance(plan, gs.SparsePlan) else 0
    return {
        "seconds": round(seconds, 2),
        "density": round(plan.density, 4) if isinstance(plan, gs.SparsePlan) else None,
        "plan_mib": round(kept / 2**20, 1),
        "extra_mib": round((growth - kept) / 2**20, 1),
    }


def prepare(case: str, q: object, k: object, v: object, call: object) -> Callable[[], object]:
    """Return the work of a case, with everything imported and warmed up."""
    import torch

    import gossamer as gs
    from gossamer.select.saliency import block_saliency, threshold_map

    small = [x[:, :, :2560] for x in (q, k, v)]
    if case == "west":
        return lambda: threshold_map(block_saliency(q, k, scale=DIM**-0.5, tile=128, block=128))
    if case == "anchor":
        method = gs.MCSparse(density=DENSITY)
        method.anchor(*small, gs.Call())
        return lambda: method.anchor(q, k, v, call)[0]
    name, _, density = case.partition("@")
    method = gs.get_method(name, **({"density": float(density)} if density else {}))
    method.plan(*small, gs.Call(grid=(2, 32, 40)))
    torch.set_grad_enabled(False)
    return lambda: method.plan(q, k, v, call)


def plan_bytes(plan: object) -> int:
    """Return the bytes of a plan's tensors."""
    import torch

    parts = (plan, plan.keys)
    values = (getattr(part, field.name) for part in parts for field in fields(part))
    return sum(x.untyped_storage().nbytes() for x in values if isinstance(x, torch.Tensor))


def resident() -> int:
    """Return the process's resident memory now, and start its peak from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the most resident memory since `resident`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")


if __name__ == "__main__":
    main()
