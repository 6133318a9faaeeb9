"""Measure ScalingAttention's design choices on tiny-wan and write benchmarks/results/.

    python benchmarks/scaling_ablations.py

Every generation is kept under --scratch, so a run that was stopped goes on where it was. What is
measured, one key of the result each:

    orientation   FAST's four orientations and uniform budgets: predicted error, PSNR to dense
    rows          fidelity from 2 to 64 sampled rows against all rows
    prompts       density of the union mask after 1, 2, … prompts
    profiling     budgets from one profiling prompt against those from all of them
    resolution    recall of the large size's masks by maps of a small one, resized
    metrics       Hellinger fidelity and cosine similarity at falling density
    aspect        recall of masks at another aspect ratio, with one and with mixed calibration
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.calibration import FastObserver, Setup, WestObserver, measured_steps, merge_thresholds
from gossamer.calibration import shards as store
from gossamer.calibration.capture import Latent, Observer, latent_of
from gossamer.calibration.fast import measure, sampled_rows
from gossamer.calibration.profile import write_profile
from gossamer.cli.console import quiet_libraries
from gossamer.cli.model import choose_model
from gossamer.evaluation.environment import environment
from gossamer.evaluation.files import write_json
from gossamer.evaluation.generation import Generation, generate
from gossamer.evaluation.metrics import psnr
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.variants import dense_variant
from gossamer.methods.scaling import ScalingAttention
from gossamer.models import example_prompts
from gossamer.select.fidelity import (
    ORIENTATIONS,
    Curves,
    Solution,
    level_density,
    make_levels,
    solve_fast,
    solve_uniform,
)
from gossamer.select.profile import resize_heads
from gossamer.select.resize import Grid
from gossamer.select.saliency import entry_levels, probabilities, threshold_mask
from gossamer.session import AttentionEvent

RESULTS = Path(__file__).parent / "results" / "scaling-tiny-wan.json"
DENSITIES = (0.3, 0.5)
THRESHOLDS = (0.1, 0.25, 0.5)
ROWS = (2, 4, 8, 16, 32, 64)
BLOCK = 128

Size = tuple[int, int, int]
"""Height, width, frames."""
Kept = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and metadata of one file."""


class Bench:
    """The model, the sizes, and what was measured before."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.scratch: Path = arguments.scratch
        self.choice = choose_model("tiny-wan")
        self.pipe = self.choice.load(arguments.device)
        smoke = arguments.smoke
        self.large, self.small, self.turned = (
            ((96, 128, 13), (64, 96, 9), (128, 96, 13))
            if smoke
            else ((160, 208, 29), (96, 128, 17), (208, 160, 29))
        )
        self.steps = 2 if smoke else 16
        self.setup = Setup(
            num_steps=self.steps,
            num_buckets=2 if smoke else 4,
            measured=measured_steps(self.steps, 2 if smoke else 6),
            block=BLOCK,
        )
        # Held-out prompts: the last ones calibrate, the first ones are generated sparsely.
        self.calibrating = example_prompts()[-(2 if smoke else arguments.prompts) :]
        self.testing = example_prompts()[: 1 if smoke else arguments.tests]

    def settings(self, size: Size) -> Settings:
        """Return what is generated at a size."""
        height, width, num_frames = size
        given = {"height": height, "width": width, "num_frames": num_frames, "steps": self.steps}
        return self.choice.settings(self.pipe, given)

    def run(
        self, prompt: str, size: Size, recipe: gs.Recipe, seed: int, observer: Observer | None
    ) -> Generation:
        """Generate under a recipe."""
        with quiet_libraries():
            return generate(
                self.pipe, prompt, recipe, self.settings(size), seed=seed, observer=observer
            )

    def kept(self, kind: str, facts: dict[str, Any], make: Callable[[], Kept]) -> Kept:
        """Return tensors and metadata from the scratch folder, made if they are not there."""
        key = store.key_of({"kind": kind, "setup": self.setup.to_dict(), **facts})
        path = self.scratch / f"{kind}-{key}.safetensors"
        found = store.load(path, kind)
        if found is None:
            print(f"{kind}: {facts}", flush=True)
            found = make()
            store.save(path, kind, *found)
        return found

    def maps(self, index: int, size: Size) -> tuple[Tensor, Grid]:
        """Return the threshold maps of one calibration prompt at a size."""

        def make() -> Kept:
            observer = WestObserver(self.setup)
            recipe = dense_variant().recipe
            self.run(self.calibrating[index], size, recipe, 1000 + index, observer)
            return {"thresholds": observer.thresholds()}, {"grid": observer.grid}

        facts = {"prompt": self.calibrating[index], "size": size, "seed": 1000 + index}
        tensors, metadata = self.kept("west", facts, make)
        return tensors["thresholds"], tuple(metadata["grid"])

    def union(self, size: Size) -> tuple[Tensor, Grid]:
        """Return the united maps of all calibration prompts."""
        every = [self.maps(index, size) for index in range(len(self.calibrating))]
        return unite(every), every[0][1]

    def curves(self, index: int, thresholds: Tensor, grid: Grid) -> Curves:
        """Return the fidelity curves of one profiling prompt."""
        levels = make_levels(thresholds.shape[-1])

        def make() -> Kept:
            observer = FastObserver(self.setup, thresholds, levels)
            recipe = dense_variant().recipe
            self.run(self.calibrating[index], self.large, recipe, 1000 + index, observer)
            fidelity, error = observer.curves()
            return {"fidelity": fidelity, "error": error}, {}

        facts = {"prompt": self.calibrating[index], "size": self.large, "of": self.calibrating}
        tensors, _ = self.kept("fast", facts, make)
        return with_density(thresholds, levels, grid, tensors["fidelity"], tensors["error"], self)


def with_density(
    thresholds: Tensor, levels: Tensor, grid: Grid, fidelity: Tensor, error: Tensor, bench: Bench
) -> Curves:
    """Complete measured curves with the densities of the maps."""
    number = grid[0] * grid[1] * grid[2]
    density = torch.empty_like(fidelity)
    for bucket, layer in torch.cartesian_prod(
        torch.arange(thresholds.shape[0]), torch.arange(thresholds.shape[1])
    ).tolist():
        entry = entry_levels(thresholds[bucket, layer], levels)
        density[bucket, layer] = level_density(entry, len(levels), number, BLOCK)
    return Curves(fidelity=fidelity, error=error, density=density, num_steps=bench.steps)


def unite(maps: list[tuple[Tensor, Grid]]) -> Tensor:
    """Return the minimum of maps, on the first one's grid."""
    order = torch.zeros(maps[0][0].shape[1:3], dtype=torch.uint8)
    return merge_thresholds(maps, order, maps[0][1], block=BLOCK)


def resized(maps: Tensor, source: Grid, target: Grid) -> Tensor:
    """Resize maps [T, L, H, R, R] in raster order."""
    order = torch.zeros(maps.shape[2], dtype=torch.uint8)
    return resize_heads(maps, order, source, target, block=BLOCK)


def recall(got: Tensor, native: Tensor, p: float) -> dict[str, float]:
    """Compare the masks of two maps of one grid: recall at one p, and at the native density.

    At one p the resized mask is denser, which buys recall; the second number takes that away by
    lowering its p, map by map, until it keeps no more blocks than the native one.
    """
    mask, want = threshold_mask(got, p), threshold_mask(native, p)
    found = (mask & want).sum() / want.sum()
    number = want.flatten(-2).sum(-1, keepdim=True)
    rank = got.float().flatten(-2).argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    equal = (rank < number).view_as(want)
    return {
        "p": p,
        "recall": found.item(),
        "density": mask.float().mean().item(),
        "native_density": want.float().mean().item(),
        "recall_at_native_density": ((equal & want).sum() / want.sum()).item(),
    }


def orientation(bench: Bench) -> list[dict[str, Any]]:
    """FAST's orientations and uniform budgets, predicted and generated."""
    thresholds, grid = bench.union(bench.large)
    curves = bench.curves(0, thresholds, grid)
    levels = make_levels(thresholds.shape[-1])
    path = bench.scratch / "profile.safetensors"
    write_profile(
        path,
        thresholds=thresholds,
        order=torch.zeros(thresholds.shape[1:3], dtype=torch.uint8),
        curves=(levels, curves.fidelity, curves.error),
        model="tiny-wan",
        grid=grid,
        setup=bench.setup,
        metadata={"prompts": bench.calibrating},
    )
    rows = []
    for density in DENSITIES:
        for name in (*ORIENTATIONS, "uniform"):
            if name == "uniform":
                table = solve_uniform(density, curves)
                method = ScalingAttention(profile=str(path), density=density, budgets="uniform")
            else:
                table = solve_fast(density, curves, orientation=name)
                method = ScalingAttention(profile=str(path), density=density, orientation=name)
            row = {
                "orientation": name,
                "density_asked": density,
                "density": table.density,
                "predicted_error": table.error,
                "omega": table.omega,
                "gamma": table.gamma,
                "beta": table.beta,
            }
            found = [quality(bench, index, name, method) for index in range(len(bench.testing))]
            rows.append({**row, "psnr_db": found})
    return rows


def quality(bench: Bench, index: int, name: str, method: ScalingAttention) -> float:
    """Return the PSNR of a sparse generation to the dense one, both kept."""

    def frames(label: str, recipe: gs.Recipe) -> Tensor:
        def make() -> Kept:
            made = bench.run(bench.testing[index], bench.large, recipe, index, None)
            return {"frames": made.frames}, {}

        facts = {
            "prompt": bench.testing[index],
            "size": bench.large,
            "recipe": label,
            "of": bench.calibrating,
        }
        return bench.kept("frames", facts, make)[0]["frames"]

    dense = frames("dense", dense_variant().recipe)
    recipe = gs.Recipe(method=method, min_tokens=0)
    return psnr(dense, frames(f"{name}@{method.density}", recipe))


class Keep:
    """Keeps the tensors of a few calls of the first guidance pass."""

    def __init__(self, steps: set[int], layers: set[int]) -> None:
        self.seconds = 0.0
        self.calls: dict[tuple[int, int], Latent] = {}
        self._wanted = {(step, layer) for step in steps for layer in layers}

    def __call__(self, event: AttentionEvent) -> None:
        """Keep one call."""
        place = (event.call.step, event.call.layer)
        latent = latent_of(event) if place in self._wanted - set(self.calls) else None
        if latent is not None:
            self.calls[place] = latent


def captured(bench: Bench) -> dict[tuple[int, int], Latent]:
    """Return some calls of a dense generation: early, middle and late steps, all depths."""
    layers = {0, 2, 5, 7}
    measured = bench.setup.measured
    keep = Keep({measured[0], measured[len(measured) // 2], measured[-1]}, layers)
    bench.run(bench.calibrating[0], bench.large, dense_variant().recipe, 1000, keep)
    return keep.calls


def rows_and_metrics(bench: Bench) -> dict[str, list[dict[str, Any]]]:
    """Sampled rows against all rows, and Hellinger against cosine, on the same captured calls."""
    thresholds, _ = bench.union(bench.large)
    levels = make_levels(thresholds.shape[-1])
    order = torch.zeros(thresholds.shape[2], dtype=torch.int64)
    exact: list[Tensor] = []
    cosine: list[Tensor] = []
    sampled: dict[int, list[Tensor]] = {number: [] for number in ROWS}
    for (step, layer), latent in captured(bench).items():
        maps = thresholds[bench.setup.readers[step][0], layer]
        every = torch.arange(latent.num_tokens)
        parts = every.split(128)
        total = sum(
            measure(latent, maps, levels, part, order, BLOCK).fidelity * len(part) for part in parts
        )
        exact.append(total / len(every))
        for number in ROWS:
            rows = sampled_rows(latent.num_tokens, number, 0, layer, step)
            sampled[number].append(measure(latent, maps, levels, rows, order, BLOCK).fidelity)
        rows = sampled_rows(latent.num_tokens, 64, 0, layer, step)
        cosine.append(cosine_similarity(latent, maps, levels, rows))
    truth = torch.stack(exact)  # [calls, H, P]
    rows_out = []
    for number, parts in sampled.items():
        gap = (torch.stack(parts) - truth).abs()
        pair = torch.stack([torch.stack(parts).flatten(), truth.flatten()])
        rows_out.append(
            {
                "rows": number,
                "mean_error": gap.mean().item(),
                "worst_error": gap.max().item(),
                "correlation": torch.corrcoef(pair)[0, 1].item(),
            }
        )
    metrics = [
        {
            "p": level,
            "hellinger_fidelity": truth[..., i].mean().item(),
            "cosine": torch.stack(cosine)[..., i].mean().item(),
        }
        for i, level in enumerate(levels.tolist())
    ]
    return {"rows": rows_out, "metrics": metrics}


def cosine_similarity(latent: Latent, maps: Tensor, levels: Tensor, rows: Tensor) -> Tensor:
    """Return the cosine of full and sparse attention rows, mean over rows, [H, P]."""
    heads = latent.q.shape[1]
    queries = latent.q[:1, :, rows].transpose(0, 1)  # [H, 1, n, D]
    p = probabilities(queries, latent.k[0].float(), latent.scale, None)[:, 0]  # [H, n, S]
    squared = p.double().square()
    out = torch.empty(heads, len(levels), dtype=torch.float64)
    for index, level in enumerate(levels.tolist()):
        mask = threshold_mask(maps[:, rows // BLOCK], level)
        mask = mask.repeat_interleave(BLOCK, -1)[..., : latent.num_tokens]
        out[:, index] = ((squared * mask).sum(-1) / squared.sum(-1)).sqrt().mean(-1)
    return out


def prompts(bench: Bench) -> list[dict[str, Any]]:
    """Density of the union after each prompt."""
    every = [bench.maps(index, bench.large) for index in range(len(bench.calibrating))]
    rows = []
    for number in range(1, len(every) + 1):
        united = unite(every[:number])
        rows += [
            {
                "prompts": number,
                "p": p,
                "density": threshold_mask(united, p).float().mean().item(),
                "single_density": threshold_mask(every[number - 1][0], p).float().mean().item(),
            }
            for p in THRESHOLDS
        ]
    return rows


def profiling(bench: Bench) -> list[dict[str, Any]]:
    """Budgets from single profiling prompts against those from all."""
    thresholds, grid = bench.union(bench.large)
    every = [bench.curves(index, thresholds, grid) for index in range(len(bench.calibrating))]
    mean = Curves(
        fidelity=torch.stack([one.fidelity for one in every]).mean(0),
        error=torch.stack([one.error for one in every]).mean(0),
        density=every[0].density,
        num_steps=bench.steps,
    )
    levels = make_levels(thresholds.shape[-1])

    def mask(table: Solution) -> Tensor:
        return threshold_mask(thresholds, levels[table.level][..., None, None])

    rows = []
    for density in DENSITIES:
        reference = solve_fast(density, mean)
        want = mask(reference)
        for prompt, curves in zip(bench.calibrating, every, strict=True):
            table = solve_fast(density, curves)
            got = mask(table)
            rows.append(
                {
                    "prompt": prompt,
                    "density_asked": density,
                    "density": table.density,
                    "reference_density": reference.density,
                    "iou": ((got & want).sum() / (got | want).sum()).item(),
                }
            )
    return rows


def resolution(bench: Bench) -> list[dict[str, Any]]:
    """Recall of large masks by small maps."""
    small, source = bench.union(bench.small)
    large, target = bench.union(bench.large)
    got = resized(small, source, target)
    return [{"from": source, "to": target, **recall(got, large, p)} for p in THRESHOLDS]


def aspect(bench: Bench) -> list[dict[str, Any]]:
    """Recall of masks at another aspect ratio."""
    native, target = bench.union(bench.turned)
    every = [bench.maps(index, bench.large) for index in range(len(bench.calibrating))]
    mixed = [
        bench.maps(index, (bench.large, bench.turned)[index % 2])
        for index in range(len(bench.calibrating))
    ]
    rows = []
    for name, maps in (("one", every), ("mixed", mixed)):
        got = resized(unite(maps), maps[0][1], target)
        rows += [{"calibration": name, "to": target, **recall(got, native, p)} for p in THRESHOLDS]
    return rows


def main() -> None:
    """Measure, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6, help="Calibration prompts.")
    parser.add_argument("--tests", type=int, default=3, help="Prompts that are generated sparsely.")
    parser.add_argument("--scratch", type=Path, default=Path("out/scaling-ablations"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default=None, help="Some of the measurements, with commas.")
    parser.add_argument("--smoke", action="store_true", help="Tiny sizes, to see that it runs.")
    arguments = parser.parse_args()
    if arguments.smoke and arguments.results == RESULTS:
        arguments.results = arguments.scratch / RESULTS.name
    bench = Bench(arguments)
    parts: dict[str, Callable[[Bench], Any]] = {
        "prompts": prompts,
        "resolution": resolution,
        "aspect": aspect,
        "profiling": profiling,
        "rows,metrics": rows_and_metrics,
        "orientation": orientation,
    }
    wanted = None if arguments.only is None else set(arguments.only.split(","))
    document: dict[str, Any] = {}
    if wanted is not None and arguments.results.is_file():
        document = json.loads(arguments.results.read_text())
    document["environment"] = {**environment(arguments.device), "cores": os.cpu_count()}
    document["setup"] = {
        **bench.setup.to_dict(),
        "large": bench.large,
        "small": bench.small,
        "turned": bench.turned,
        "calibration_prompts": bench.calibrating,
        "test_prompts": bench.testing,
    }
    for name, part in parts.items():
        keys = name.split(",")
        if wanted is None or wanted & set(keys):
            found = part(bench)
            document.update(found if len(keys) > 1 else {name: found})
            write_json(arguments.results, document)
            print(f"{name}: done", flush=True)
    print(f"wrote {arguments.results}")


if __name__ == "__main__":
    main()
