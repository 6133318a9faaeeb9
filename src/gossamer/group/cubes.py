"""Cutting the grid of latent tokens into cubes; those at the borders may be ragged."""

from __future__ import annotations

import torch
from torch import Tensor


def cubes(grid: tuple[int, int, int], shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return the tokens of each cube, cubes and the tokens inside them in raster order.

    A row holds one cube; a column holds the tokens at one position inside all cubes, which is a
    strided neighbourhood.

    Args:
        grid: (frames, rows, columns) of the latent tokens.
        shape: (frames, rows, columns) of a cube; it may be larger than the grid.
        device: Where the result lies.

    Returns:
        [num_cubes, volume] int64 token indices; -1 where a cube reaches past the grid.
    """
    token = torch.arange(grid[0] * grid[1] * grid[2], device=device).view(grid)
    past = [-size % side for size, side in zip(grid, shape, strict=True)]
    pad = [0, past[2], 0, past[1], 0, past[0]]
    token = torch.nn.functional.pad(token, pad, value=-1)
    split = token
    for axis, side in enumerate(shape):
        split = split.unflatten(2 * axis, (-1, side))  # frames, f, rows, r, columns, c
    return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, shape[0] * shape[1] * shape[2])
