"""Packing groups of unequal size: tokens sorted by group, queries cut into tiles of one group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sorted(NamedTuple):
    """Tokens sorted by group.

    Attributes:
        order: [B, H, N] int64, token indices by (group, index); tokens left out stand last.
        start: [B, H, G] int64, where each group begins in `order`.
        size: [B, H, G] int64, tokens in each group.
    """

    order: Tensor
    start: Tensor
    size: Tensor


def sort_by_group(labels: Tensor, num_groups: int, *, valid: Tensor | None = None) -> Sorted:
    """Sort tokens by their group, keeping their own order inside it.

    Args:
        labels: [B, H, N] int64, the group of each token.
        num_groups: G.
        valid: [B, N] bool, tokens to count; None for all.
    """
    if valid is not None:
        labels = torch.where(valid[:, None], labels, num_groups)
    order = torch.argsort(labels, dim=-1, stable=True)
    size = labels.new_zeros(*labels.shape[:2], num_groups + 1)
    size = size.scatter_add_(2, labels, torch.ones_like(labels))[..., :num_groups]
    return Sorted(order, size.cumsum(-1) - size, size)


def pack_tiles(
    labels: Tensor, num_groups: int, tile: int, *, num_tiles: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cut the queries of each group into tiles that hold queries of that group alone.

    Args:
        labels: [B, H, N] int64, the group of each query.
        num_groups: G.
        tile: Query rows per tile.
        num_tiles: T, where the caller knows the most tiles that a head fills.

    Returns:
        query_index [B, H, T, tile] int32 and tile_row [B, H, T] int32, the group of each tile.
        T is otherwise an upper bound known without reading the labels; tiles past a head's own
        number are all -1 and name the last group.
    """
    batch, heads, length = labels.shape
    order, start, size = sort_by_group(labels, num_groups)
    filled = -(-size // tile)
    end = filled.cumsum(-1)  # [B, H, G], tiles up to and with each group
    if num_tiles is None:
        # Each non-empty group adds less than one tile to N / tile.
        num_tiles = length // tile + min(num_groups, length)
    tiles = torch.arange(num_tiles, device=labels.device).expand(batch, heads, -1).contiguous()
    group = torch.searchsorted(end, tiles, right=True)
    used = group < num_groups
    group = group.clamp(max=num_groups - 1)
    first = (tiles - (end - filled).gather(2, group)) * tile  # place inside the group
    place = first[..., None] + torch.arange(tile, device=labels.device)  # [B, H, T, tile]
    inside = used[..., None] & (place < size.gather(2, group)[..., None])
    source = (start.gather(2, group)[..., None] + place).clamp(max=max(length - 1, 0))
    query = order.gather(2, source.flatten(2)).view_as(source)
    return torch.where(inside, query, -1).int(), group.int()
