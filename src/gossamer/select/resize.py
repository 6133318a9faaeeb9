"""Threshold maps at another resolution: nothing that was active anywhere near is lost."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

Grid = tuple[int, int, int]

# The orders in which tokens of (frames, rows, columns) can be laid out; 0 is raster order.
AXIS_ORDERS: tuple[Grid, ...] = tuple(itertools.permutations(range(3)))  # pyright: ignore[reportAssignmentType] -- each has three entries


def token_order(grid: Grid, axes: int, device: torch.device) -> Tensor:
    """Return which token stands at each place of an order, [N] int64.

    Args:
        grid: (frames, rows, columns) of the tokens.
        axes: Index into `AXIS_ORDERS`; the axis named first varies slowest.
        device: Where the result lies.
    """
    token = torch.arange(grid[0] * grid[1] * grid[2], device=device).view(grid)
    return token.permute(AXIS_ORDERS[axes]).flatten()


def footprint(source: Grid, target: Grid, *, axes: int, block: int) -> Tensor:
    """List the source blocks that each target block touches in (frame, row, column).

    Both grids cover the same unit cube; a target token touches every source token whose cell its
    own cell overlaps.

    Args:
        source: The grid that the map was made for.
        target: The grid that it is wanted for.
        axes: Index into `AXIS_ORDERS`, the order of both.
        block: Tokens per block.

    Returns:
        [target blocks, K] int64 on the CPU; shorter lists repeat their first entry.
    """
    cpu = torch.device("cpu")
    low: list[Tensor] = []
    high: list[Tensor] = []
    for have, want in zip(source, target, strict=True):
        cell = torch.arange(want, device=cpu)
        low.append(cell * have // want)
        high.append(((cell + 1) * have - 1) // want)
    place_of = torch.empty(source[0] * source[1] * source[2], dtype=torch.int64, device=cpu)
    order = token_order(source, axes, cpu)
    place_of[order] = torch.arange(len(order), device=cpu)
    block_of = (place_of // block).view(source)
    ordered = token_order(target, axes, cpu)
    target_block = torch.arange(len(ordered), device=cpu) // block
    touched = torch.zeros(
        int(target_block[-1]) + 1, -(-len(order) // block), dtype=torch.bool, device=cpu
    )
    spans = [int((b - a).max()) + 1 for a, b in zip(low, high, strict=True)]
    for offset in itertools.product(*(range(span) for span in spans)):
        at = [torch.minimum(a + o, b) for a, o, b in zip(low, offset, high, strict=True)]
        blocks = block_of[at[0][:, None, None], at[1][:, None], at[2]].flatten()
        touched[target_block, blocks[ordered]] = True
    count = touched.sum(1, keepdim=True)
    lists = torch.argsort((~touched).byte(), dim=1, stable=True)[:, : int(count.max())]
    inside = torch.arange(lists.shape[1], device=cpu) < count
    return torch.where(inside, lists, lists[:, :1])


def resize_map(thresholds: Tensor, source: Grid, target: Grid, *, axes: int, block: int) -> Tensor:
    """Resize a threshold map conservatively: the least threshold of each block's footprint.

    For every p, the mask of the result holds each block whose footprint meets the mask of the map:
    bilinear interpolation of the *mask*, rounded up (ScalingAttention), at all p at once.

    Args:
        thresholds: [..., R, C] over the source's blocks.
        source: (frames, rows, columns) that the map was made for.
        target: (frames, rows, columns) that it is wanted for.
        axes: Index into `AXIS_ORDERS`, the token order of the map.
        block: Tokens per block.

    Returns:
        [..., R', C'] over the target's blocks; the map itself where the grids are equal.
    """
    if source == target:
        return thresholds
    lists = footprint(source, target, axes=axes, block=block).to(thresholds.device)
    for axis in (-2, -1):
        least = thresholds.index_select(axis, lists[:, 0])
        for column in lists[:, 1:].unbind(1):
            least = torch.minimum(least, thresholds.index_select(axis, column))
        thresholds = least
    return thresholds
