"""Compare all methods at equal density on tiny-wan and write benchmarks/results/.

    python benchmarks/compare_tiny_wan.py

Eight held-out prompts, no dense warm-up, 15% and 30% density. Prompts are dealt to worker
processes, each on cores of its own; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

NUM_PROMPTS = 8
METHODS = ("block-topk", "svg2", "instagen-uniform", "instagen-importance")
DENSITIES = (0.15, 0.3)
RESULTS = Path(__file__).parent / "results" / "compare-tiny-wan.json"


def main() -> None:
    """Deal the prompts to workers, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="Processes side by side.")
    parser.add_argument("--threads", type=int, default=2, help="Threads and cores per process.")
    parser.add_argument("--scratch", type=Path, default=Path("out/compare-tiny-wan"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=None, help="Stop the workers after this.")
    parser.add_argument("--shard", type=int, default=None, help="For workers.")
    arguments = parser.parse_args()
    if arguments.shard is None:
        run_workers(arguments)
        write_results(arguments)
    else:
        run_shard(arguments)


def run_workers(arguments: argparse.Namespace) -> None:
    """Run one process per shard, each pinned to its own cores, and wait for all."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--shard", str(shard)],
            env=environment,
        )
        for shard in range(arguments.workers)
    ]
    deadline = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    for worker in workers:
        try:
            worker.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.terminate()


def pin(shard: int, threads: int) -> None:
    """Keep this process on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= (shard + 1) * threads:
        os.sched_setaffinity(0, cores[shard * threads : (shard + 1) * threads])


def run_shard(arguments: argparse.Namespace) -> None:
    """Make every missing run of one shard."""
    pin(arguments.shard, arguments.threads)  # before torch counts the cores

    import torch

    from gossamer.evaluation.compare import compare
    from gossamer.evaluation.pipelines import load_pipeline
    from gossamer.models import tiny_wan_path

    torch.set_num_threads(arguments.threads)
    pipe = load_pipeline(tiny_wan_path())
    comparison = make_comparison((arguments.shard, arguments.workers))
    compare(pipe, comparison, arguments.scratch / f"shard-{arguments.shard}")


def make_comparison(shard: tuple[int, int]) -> object:
    """Return what is compared."""
    from gossamer.evaluation.compare import Comparison
    from gossamer.evaluation.settings import Settings
    from gossamer.evaluation.variants import parse_variant
    from gossamer.models import example_prompts, tiny_wan_path

    defaults = json.loads((tiny_wan_path() / "prompts.json").read_text())["defaults"]
    settings = Settings(
        model="tiny-wan",
        height=defaults["height"],
        width=defaults["width"],
        num_frames=defaults["num_frames"],
        steps=defaults["num_inference_steps"],
        guidance_scale=defaults["guidance_scale"],
    )
    if os.environ.get("SMOKE"):
        settings = replace(settings, steps=1, height=96, width=96, num_frames=5)
    specs = ["dense", *(f"{name}@{density}" for density in DENSITIES for name in METHODS)]
    return Comparison(
        prompts=example_prompts()[:NUM_PROMPTS],
        variants=[parse_variant(spec) for spec in specs],
        settings=settings,
        shard=shard,
    )


def write_results(arguments: argparse.Namespace) -> None:
    """Join the shards' documents into the committed one; nothing where a run is missing."""
    documents = [
        json.loads(path.read_text())
        for path in sorted(arguments.scratch.glob("shard-*/results.json"))
    ]
    runs = [run for document in documents for run in document["runs"]]
    expected = NUM_PROMPTS * (1 + len(METHODS) * len(DENSITIES))
    print(f"{len(runs)} of {expected} runs are finished")
    if not documents or len(runs) < expected:
        sys.exit("not all runs are finished: the same command goes on")
    for run in runs:  # videos and records stay in the scratch folder
        del run["video"], run["records"]
    document = {**documents[0], "runs": runs, "workers": arguments.workers}
    del document["plans"]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {arguments.results}")


if __name__ == "__main__":
    main()
