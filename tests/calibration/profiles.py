"""Small profiles with random maps, written as calibration writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from gossamer.calibration import Setup, write_profile
from gossamer.select.fidelity import hellinger_fidelity, make_levels
from gossamer.select.saliency import threshold_map

GRID = (4, 4, 6)
BLOCK = 16
LAYERS, HEADS, BUCKETS, STEPS = 2, 4, 2, 8
NUM_BLOCKS = 6


def random_maps(seed: int = 0) -> torch.Tensor:
    """Return [T, L, H, R, R] maps, each the union of two prompts'."""
    g = torch.Generator().manual_seed(seed)
    shape = (2, BUCKETS, LAYERS, HEADS, NUM_BLOCKS, NUM_BLOCKS)
    return threshold_map(torch.rand(shape, generator=g)).amin(0).half()


def make_profile(path: Path, *, permute: str = "none", seed: int = 0, model: str = "toy") -> str:
    """Write a profile and return its path."""
    g = torch.Generator().manual_seed(seed)
    levels = make_levels(NUM_BLOCKS)
    skipped = torch.rand(BUCKETS, LAYERS, HEADS, 1, generator=g) * (1 - levels)
    order = torch.zeros(LAYERS, HEADS, dtype=torch.uint8)
    if permute == "axis":
        order = torch.randint(6, (LAYERS, HEADS), generator=g).byte()
    write_profile(
        path,
        thresholds=random_maps(seed),
        order=order,
        curves=(levels, hellinger_fidelity(skipped), skipped.square()),
        model=model,
        grid=GRID,
        setup=Setup(
            num_steps=STEPS,
            num_buckets=BUCKETS,
            measured=tuple(range(STEPS)),
            block=BLOCK,
            permute=permute,
        ),
        metadata={"prompts": ["a", "b"]},
    )
    return str(path)
