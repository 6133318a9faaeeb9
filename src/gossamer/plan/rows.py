"""Reading a plan: its tiles, and its key rows as padded lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.plan.keys import KeyBlocks

if TYPE_CHECKING:
    from gossamer.plan.plan import SparsePlan


@dataclass(frozen=True, eq=False)
class Rows:
    """Some key rows as padded lists.

    Attributes:
        index: [..., L] int64, key indices, ascending (virtual keys last); 0 where not `listed`.
        listed: [..., L] bool, False for padding and for keys that key_valid excludes.
        log_weight: [..., L] float32, or None where all weights are 1.
    """

    index: Tensor
    listed: Tensor
    log_weight: Tensor | None


def tile_queries(plan: SparsePlan) -> Tensor:
    """Return which query each tile row is: [B|1, H|1, T, tile] int64, -1 for none."""
    if plan.query_index is not None:
        return plan.query_index.long()
    slots = torch.arange(plan.num_tiles * plan.tile, device=plan.device)
    slots = torch.where(slots < plan.num_queries, slots, -1)
    return slots.view(1, 1, plan.num_tiles, plan.tile)


def tile_rows(plan: SparsePlan) -> Tensor:
    """Return the key row of each tile: [B|1, H|1, T] int64."""
    if plan.tile_row is not None:
        return plan.tile_row.long()
    return torch.arange(plan.num_tiles, device=plan.device).view(1, 1, -1)


def expand(tensor: Tensor, batch: int, heads: int) -> Tensor:
    """Expand the leading batch and head axes of `tensor` without copying."""
    return tensor.expand(batch, heads, *tensor.shape[2:])


def read_rows(plan: SparsePlan, batch: Tensor, head: Tensor, row: Tensor) -> Rows:
    """Return key rows as padded lists of tokens.

    Args:
        plan: The plan.
        batch: [n] int64, batch index of each wanted row.
        head: [n] int64, query-head index of each.
        row: [n] int64, key-row index of each.

    Returns:
        The n rows, padded to the longest of them; one synchronisation for that length.
    """
    keys = plan.keys
    if isinstance(keys, KeyBlocks):
        index, listed = _read_blocks(keys, plan.num_keys, batch, head, row)
        log_weight = None
    else:
        at = _axis(keys.start, batch, head)
        start, count = keys.start[*at, row], keys.count[*_axis(keys.count, batch, head), row]
        place = torch.arange(_longest(count), device=row.device)
        listed = place < count[:, None]
        pool = torch.where(listed, start[:, None] + place, 0)
        index = keys.index[pool].long() if keys.index.numel() else pool
        log_weight = None
        if keys.log_weight is not None:
            log_weight = keys.log_weight[pool]
            listed = listed & (log_weight > -torch.inf)
    if plan.key_valid is not None:
        valid = plan.key_valid[batch if plan.key_valid.shape[0] > 1 else torch.zeros_like(batch)]
        inside = index.clamp(max=max(plan.num_keys - 1, 0))
        listed = listed & ((index >= plan.num_keys) | valid.gather(1, inside))
    return Rows(torch.where(listed, index, 0), listed, log_weight)


def _read_blocks(
    keys: KeyBlocks, num_keys: int, batch: Tensor, head: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (index, listed), each [n, L], for rows of blocks; holes are not listed."""
    count = keys.count[*_axis(keys.count, batch, head), row].long()
    width = _longest(count)
    blocks = keys.index[*_axis(keys.index, batch, head), row, :width].long()  # [n, width]
    offset = torch.arange(keys.block, device=row.device)
    place = (blocks[..., None] * keys.block + offset).flatten(1)  # [n, width * block]
    kept = torch.arange(width, device=row.device) < count[:, None]
    kept = kept.repeat_interleave(keys.block, dim=1)
    place = torch.where(kept, place, 0)
    if keys.key_order is None:
        return place, kept & (place < num_keys)
    length = keys.key_order.shape[-1]
    order = keys.key_order[*_axis(keys.key_order, batch, head)]  # [n, length]
    index = order.gather(1, place.clamp(max=length - 1)).long()
    kept = kept & (place < length) & (index >= 0)
    # A permuted order is not ascending: sort, padding last.
    index, by = torch.where(kept, index, num_keys).sort(dim=1)
    return index, kept.gather(1, by)


def _axis(tensor: Tensor, batch: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return batch and head indices into `tensor`, whose first two axes may be shared."""
    zero = torch.zeros_like(batch)
    return (
        batch if tensor.shape[0] > 1 else zero,
        head if tensor.shape[1] > 1 else zero,
    )


def _longest(count: Tensor) -> int:
    """Return the greatest count; 0 for no rows."""
    return int(count.max()) if count.numel() else 0
