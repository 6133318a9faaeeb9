"""Which blocks of keys each tile of consecutive queries may read, must read, and what they hold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.call import Call


class BlockLayout(NamedTuple):
    """The blocks that tiles of consecutive queries may read.

    Attributes:
        possible: [B|1, 1, R|1, C] bool, blocks of which a query of the tile may read a key.
        share: [B|1, 1, R|1, C] float64, visible pairs of tile and block over those of a whole one.
        forced: [B|1, 1, R, C] bool, the block that holds a key which every query of the tile sees
            that sees any; None where all queries of a tile see the same keys.
    """

    possible: Tensor
    share: Tensor
    forced: Tensor | None


def block_layout(
    call: Call, num_queries: int, num_keys: int, *, tile: int, block: int, device: torch.device
) -> BlockLayout:
    """Return the layout of tiles of `tile` consecutive queries and blocks of `block` keys.

    Args:
        call: The call: causality and padding.
        num_queries: N.
        num_keys: S.
        tile: Queries per tile.
        block: Keys per block.
        device: Where the result lies.
    """
    valid = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    if call.key_valid is not None:
        valid = call.key_valid
    padded = torch.nn.functional.pad(valid, (0, -num_keys % block))
    size = padded.unflatten(1, (-1, block)).sum(2)[:, None, None]  # [B|1, 1, 1, C]
    possible = size > 0
    if not call.causal:
        return BlockLayout(possible, size.double() / block, None)

    key = torch.arange(num_keys, device=device)
    last_valid = torch.where(valid, key, -1).cummax(-1).values  # [B|1, S], up to each key
    first_valid = valid.byte().argmax(-1, keepdim=True)
    tile_start = torch.arange(0, num_queries, tile, device=device)  # [R]
    tile_end = (tile_start + tile).clamp(max=num_queries)
    shift = num_keys - num_queries
    # The last valid key that the tile's first query sees or, where it sees none, the first of all.
    must = last_valid[:, (tile_start + shift).clamp(0, max(num_keys - 1, 0))]  # [B|1, R]
    must = torch.where((must < 0) | (tile_start + shift < 0), first_valid, must)
    begin = torch.arange(possible.shape[-1], device=device) * block
    # Query i sees clamp(i + shift + 1 - begin, 0, block) keys of a block: sums over a tile of it.
    seen = _ramp(tile_end[:, None] + shift - begin, block)
    seen = seen - _ramp(tile_start[:, None] + shift - begin, block)  # [R, C] pairs
    forced = (must // block)[:, None, :, None] == begin // block
    share = (seen.double() / (tile * block)).masked_fill(~possible, 0.0)
    return BlockLayout(possible & (seen > 0), share, forced & possible & (seen > 0))


def _ramp(x: Tensor, block: int) -> Tensor:
    """Return the sum of clamp(t, 0, block) over integers t up to x."""
    inside = x.clamp(0, block)
    return inside * (inside + 1) // 2 + (x - block).clamp(min=0) * block
