"""Compare methods at equal density on tiny-wan and write benchmarks/results/.

    python benchmarks/compare_tiny_wan.py                     # the README's table, on the CPU
    python benchmarks/compare_tiny_wan.py --set all --device cuda --workers 16 --gpus 2
    python benchmarks/compare_tiny_wan.py --set ladder --device cuda --workers 6

Held-out prompts. They are dealt to worker processes; on the CPU each has cores of its own. A run
that was stopped goes on where it was. Workers that share a GPU make one another slower, so their
results carry no times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gossamer as gs
    from gossamer.evaluation.compare import Comparison
    from gossamer.evaluation.variants import Variant

NUM_PROMPTS = 8
FOLDER = Path(__file__).parent / "results"
TIMES = ("attention_ms", "plan_ms", "plan_share", "total_ms")
MAIN = ("block-topk", "svg2", "instagen-uniform", "instagen-importance")


def main_set() -> list[Variant]:
    """Return the four methods of the README's table, without warm-up."""
    return _at(MAIN, (0.15, 0.3))


def all_set() -> list[Variant]:
    """Return every method that there is, without warm-up."""
    import gossamer as gs
    from gossamer.evaluation.variants import NAMED_VARIANTS

    names = [name for name in gs.list_methods() if name not in ("dense", "instagen")]
    return _at([*NAMED_VARIANTS, *names], (0.15, 0.3, 0.5))


def ladder_set() -> list[Variant]:
    """Return MC-Sparse's ladder (block, exact, token, grouping, residual), residuals, and FAST.

    All of the ladder but the first rung reuse an anchor's plan for three steps, as exact selection
    must. ScalingAttention's FAST budgets stand against uniform ones with and without warm-up.
    """
    import gossamer as gs

    def rung(density: float, **params: object) -> gs.Method:
        return gs.MCSparse(density=density, **params)

    variants = []
    for density in (0.15, 0.3, 0.5):
        plain = gs.Reuse(every=4, residual=False)
        residual = gs.Reuse(every=4)
        block = rung(density, block=128, scores="pooled", grouping="none")
        exact = rung(density, block=128, grouping="none")
        token = rung(density, grouping="none")
        rungs = [
            ("mc-1-block", block, None),
            ("mc-2-exact", exact, plain),
            ("mc-3-token", token, plain),
            ("mc-4-grouping", rung(density), plain),
            ("mc-5-residual", rung(density), residual),
        ]
        others = {
            "block-topk": gs.BlockTopK(density=density),
            "svg2": gs.SVG2(density=density),
            "instagen": gs.InstaGen(density=density),
        }
        for name, method in others.items():
            rungs.append((f"{name}-reuse", method, plain))
            rungs.append((f"{name}-residual", method, residual))
        variants += [
            _variant(name, density, gs.Recipe(method=method, reuse=reuse))
            for name, method, reuse in rungs
        ]
        for budgets in ("uniform", "fast"):
            scaling = gs.ScalingAttention(profile="tiny-wan", density=density, budgets=budgets)
            for name, steps in ((f"scaling-{budgets}", 0), (f"scaling-{budgets}-warm", 0.2)):
                recipe = gs.Recipe(method=scaling, dense_steps=steps)
                variants.append(_variant(name, density, recipe))
    return variants


def _at(names: list[str] | tuple[str, ...], densities: tuple[float, ...]) -> list[Variant]:
    from gossamer.evaluation.variants import parse_variant

    return [parse_variant(f"{name}@{density}") for density in densities for name in names]


def _variant(name: str, density: float, recipe: gs.Recipe) -> Variant:
    from gossamer.evaluation.variants import Variant

    return Variant(name=name, recipe=recipe, density_asked=density)


SETS: dict[str, tuple[Callable[[], list[Variant]], str]] = {
    "main": (main_set, "compare-tiny-wan.json"),
    "all": (all_set, "compare-tiny-wan-all.json"),
    "ladder": (ladder_set, "compare-tiny-wan-ladder.json"),
}


def main() -> None:
    """Deal the prompts to workers, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="main", help="What is compared.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; float32 on both.")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--workers", type=int, default=1, help="Processes side by side.")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the workers share.")
    parser.add_argument("--threads", type=int, default=2, help="Threads and cores per process.")
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="Stop the workers after this.")
    parser.add_argument("--shard", type=int, default=None, help="For workers.")
    arguments = parser.parse_args()
    if arguments.scratch is None:
        arguments.scratch = Path("out/compare-tiny-wan") / arguments.set
    if arguments.results is None:
        arguments.results = FOLDER / SETS[arguments.set][1]
    if arguments.shard is None:
        run_workers(arguments)
        write_results(arguments)
    else:
        run_shard(arguments)


def run_workers(arguments: argparse.Namespace) -> None:
    """Run one process per shard and wait for all."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
    }
    workers = []
    for shard in range(arguments.workers):
        if arguments.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(shard % arguments.gpus)
        command = [sys.executable, *sys.argv, "--shard", str(shard)]
        workers.append(subprocess.Popen(command, env=environment))
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
    pipe = load_pipeline(tiny_wan_path(), device=arguments.device, dtype=torch.float32)
    shard = (arguments.shard, arguments.workers)
    compare(pipe, make_comparison(arguments, shard), arguments.scratch / f"shard-{shard[0]}")


def make_comparison(arguments: argparse.Namespace, shard: tuple[int, int]) -> Comparison:
    """Return what is compared."""
    from gossamer.evaluation.compare import Comparison
    from gossamer.evaluation.settings import Settings
    from gossamer.evaluation.variants import dense_variant
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
        settings = replace(settings, steps=2, height=96, width=96, num_frames=5)
    return Comparison(
        prompts=example_prompts()[: arguments.prompts],
        variants=[dense_variant(), *SETS[arguments.set][0]()],
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
    expected = arguments.prompts * (1 + len(SETS[arguments.set][0]()))
    print(f"{len(runs)} of {expected} runs are finished")
    if not documents or len(runs) < expected:
        sys.exit("not all runs are finished: the same command goes on")
    for run in runs:  # videos and records stay in the scratch folder
        del run["video"], run["records"]
        if arguments.device != "cpu" and arguments.workers > 1:
            run.update(dict.fromkeys(TIMES))
    document = {**documents[0], "runs": runs, "workers": arguments.workers}
    del document["plans"]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {arguments.results}")


if __name__ == "__main__":
    main()
