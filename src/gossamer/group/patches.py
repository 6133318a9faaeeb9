"""Tiles of queries that lie together on a grid: boxes, so that what they read overlaps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.group.cubes import cubes


@dataclass(frozen=True, eq=False)
class Patches:
    """Queries cut into boxes of a grid, a tile each; on the CPU.

    Attributes:
        grid: (frames, rows, columns) of the keys.
        tile: Queries per tile.
        query_index: [1, 1, T, tile] int32, the queries of each tile; None for consecutive ones.
        first: [T, 3] int64, the box's lowest frame, row and column.
        last: [T, 3] int64, its highest ones.
    """

    grid: tuple[int, int, int]
    tile: int
    query_index: Tensor | None
    first: Tensor
    last: Tensor

    @property
    def num_tiles(self) -> int:
        """T."""
        return len(self.first)


def patch_tiles(grid: tuple[int, int, int], tile: int, margin: tuple[int, int, int]) -> Patches:
    """Cut a grid into boxes of up to `tile` queries, shaped so that their surroundings are small.

    Args:
        grid: (frames, rows, columns); queries and keys are its tokens.
        tile: Queries per tile.
        margin: Frames, rows and columns that a box reads beside its own, both sides together.
    """
    shape = patch_shape(grid, tile, margin)
    device = torch.device("cpu")
    members = cubes(grid, shape, device)
    members = torch.nn.functional.pad(members, (0, tile - members.shape[1]), value=-1)
    starts = [torch.arange(0, n, side, device=device) for n, side in zip(grid, shape, strict=True)]
    first = torch.cartesian_prod(*starts)  # [T, 3]
    sides, extent = (torch.tensor(x, device=device) for x in (shape, grid))
    last = (first + sides).minimum(extent) - 1
    return Patches(grid, tile, members.int()[None, None].contiguous(), first, last)


def line_tiles(num_queries: int, num_keys: int, tile: int) -> Patches:
    """Cut a sequence into tiles of consecutive queries; the last query stands at the last key.

    Queries in front of the first key are taken to stand at it.
    """
    start = torch.arange(0, num_queries, tile, device="cpu")
    end = (start + tile).clamp(max=num_queries) - 1
    shift = num_keys - num_queries
    first, last = ((x + shift).clamp(min=0) for x in (start, end))
    zero = torch.zeros_like(first)
    lines = (torch.stack([zero, zero, x], dim=1) for x in (first, last))
    return Patches((1, 1, num_keys), tile, None, *lines)


@lru_cache(maxsize=64)
def patch_shape(
    grid: tuple[int, int, int], tile: int, margin: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the box of at most `tile` tokens whose tiles read least; arguments as `patch_tiles`.

    Tiles are computed whole, so one costs as much where its box is ragged.
    """

    def cost(shape: tuple[int, int, int]) -> int:
        tiles = area = 1
        for extent, side, more in zip(grid, shape, margin, strict=True):
            tiles *= -(-extent // side)
            area *= min(side + more, extent)
        return tiles * area

    shapes = [
        (frames, rows, min(tile // (frames * rows), grid[2]))
        for frames in range(1, min(tile, grid[0]) + 1)
        for rows in range(1, min(tile // frames, grid[1]) + 1)
    ]
    return min(shapes, key=cost)
