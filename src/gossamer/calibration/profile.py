"""Writing profiles, and loading them for a model that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.calibration import shards
from gossamer.calibration.setup import Setup
from gossamer.errors import PlanError
from gossamer.select.profile import KIND, Profile, announce_resize, read_profile, resize_heads
from gossamer.select.resize import Grid


def merge_thresholds(
    maps: Sequence[tuple[Tensor, Grid]], order: Tensor, grid: Grid, *, block: int
) -> Tensor:
    """Unite the threshold maps of several generations: their minimum, on one grid.

    Args:
        maps: Of each generation its maps [T, L, H, R, R] and its grid.
        order: [L, H] integer, the token order of each head.
        grid: The grid of the result; maps of others are resized conservatively.
        block: Tokens per block.

    Returns:
        [T, L, H, R, R].

    Raises:
        PlanError: The maps have different numbers of buckets, layers or heads.
    """
    if len({tuple(part.shape[:3]) for part, _ in maps}) != 1:
        shapes = sorted({tuple(part.shape[:3]) for part, _ in maps})
        raise PlanError(f"maps of (buckets, layers, heads) {shapes} cannot be united")
    merged: Tensor | None = None
    for part, source in maps:
        if source != grid:
            layers = [
                resize_heads(layer, order[index], source, grid, block=block)
                for index, layer in enumerate(part.unbind(1))
            ]
            part = torch.stack(layers, dim=1)
        merged = part.clone() if merged is None else torch.minimum(merged, part)
    if merged is None:
        raise PlanError("no maps to unite")
    return merged


def write_profile(
    path: Path,
    *,
    thresholds: Tensor,
    order: Tensor,
    curves: tuple[Tensor, Tensor, Tensor],
    model: str,
    grid: Grid,
    setup: Setup,
    metadata: Mapping[str, Any],
) -> None:
    """Write a profile, whole or not at all.

    Args:
        path: The file.
        thresholds: [T, L, H, R, R] float16.
        order: [L, H] uint8.
        curves: The levels [P], and fidelity and output error at them, each [T, L, H, P].
        model: Id of the model.
        grid: (frames, rows, columns) of the maps.
        setup: What was measured.
        metadata: Further JSON-able facts: prompts, sizes, the command.

    Raises:
        OSError: It cannot be written.
    """
    tensors = {
        "thresholds": thresholds.half(),
        "order": order.to(torch.uint8),
        "levels": curves[0].double(),
        "fidelity": curves[1].float(),
        "error": curves[2].float(),
    }
    facts = {
        **metadata,
        **setup.to_dict(),
        "model": model,
        "num_layers": order.shape[0],
        "num_heads": order.shape[1],
        "grid": list(grid),
    }
    shards.save(path, KIND, tensors, facts)


def load_profile(
    name_or_path: str | Path,
    *,
    model: str | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    grid: Grid | None = None,
) -> Profile:
    """Load a profile for a model; None is not checked.

    Args:
        name_or_path: A profile file, or the name of a bundled model with one.
        model: Id of the model.
        num_layers: Its attention layers.
        num_heads: Its heads.
        grid: The grid that it will run on. Another one than the profile's is no error: maps are
            resized, and a warning says so.

    Raises:
        PlanError: There is no such profile.
        ProfileMismatchError: It is of another model, number of layers or heads, or format; the
            message gives the expected and the actual value.
    """
    profile = read_profile(str(name_or_path))
    profile.check(model=model, num_layers=num_layers, num_heads=num_heads)
    if grid is not None and grid != profile.grid:
        announce_resize(profile.path, profile.stamp, grid)
    return profile
