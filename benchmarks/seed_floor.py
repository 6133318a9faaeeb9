"""Measure where PSNR between tiny-wan's videos bottoms out, and write benchmarks/results/.

    python benchmarks/seed_floor.py

Two dense videos of one prompt from different noise, and two of different prompts: a method whose
trajectory has left the dense one completely cannot do worse than these.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path

import torch

import gossamer as gs
from gossamer.evaluation.environment import environment
from gossamer.evaluation.files import write_json
from gossamer.evaluation.generation import generate
from gossamer.evaluation.metrics import psnr
from gossamer.evaluation.pipelines import load_pipeline
from gossamer.evaluation.settings import Settings
from gossamer.models import example_prompts, tiny_wan_path

RESULTS = Path(__file__).parent / "results" / "seed-floor-tiny-wan.json"


def main() -> None:
    """Generate the videos and compare them pairwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = load_pipeline(tiny_wan_path()).to(device)
    defaults = json.loads((tiny_wan_path() / "prompts.json").read_text())["defaults"]
    settings = Settings(
        model="tiny-wan",
        height=defaults["height"],
        width=defaults["width"],
        num_frames=defaults["num_frames"],
        steps=defaults["num_inference_steps"],
        guidance_scale=defaults["guidance_scale"],
    )
    recipe = gs.Recipe(method=gs.Dense())
    videos = {
        (prompt, seed): generate(pipe, prompt, recipe, settings, seed=seed).frames
        for prompt in example_prompts()[: arguments.prompts]
        for seed in range(arguments.seeds)
    }
    found: dict[str, list[float]] = {"same_prompt": [], "other_prompt": []}
    for a, b in combinations(videos, 2):
        kind = "same_prompt" if a[0] == b[0] else "other_prompt"
        found[kind].append(psnr(videos[a], videos[b]))
    document = {
        "environment": environment(device),
        "settings": settings.to_dict(),
        "prompts": arguments.prompts,
        "seeds": arguments.seeds,
        "psnr_db": {name: sum(values) / len(values) for name, values in found.items()},
    }
    write_json(arguments.results, document)
    print(document["psnr_db"])


if __name__ == "__main__":
    main()
