"""Which positions tiles and blocks span, and how many pairs they hold, counted on valid tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.call import Call


class Spans(NamedTuple):
    """The absolute positions that tiles of queries and blocks of keys span.

    Spans are cut to those of the valid tokens, so padding at either end widens none of them.

    Attributes:
        tile_start: [B|1, R] int64, position of a tile's first query.
        tile_stop: [B|1, R] int64, one past its last; not above `tile_start` where empty.
        block_start: [B|1, C] int64, a block's first key.
        block_stop: [B|1, C] int64, one past its last key.
    """

    tile_start: Tensor
    tile_stop: Tensor
    block_start: Tensor
    block_stop: Tensor

    def offsets(self) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest offset p - j of each pair, [B|1, 1, R, C] int64.

        Pairs with an empty tile or block have a greatest offset below the least.
        """
        low = self.tile_start[:, :, None] - self.block_stop[:, None] + 1
        high = self.tile_stop[:, :, None] - 1 - self.block_start[:, None]
        empty = (self.tile_stop <= self.tile_start)[:, :, None]
        empty = empty | (self.block_stop <= self.block_start)[:, None]
        return low[:, None], torch.where(empty, low - 1, high)[:, None]


def valid_queries(call: Call, num_queries: int, num_keys: int) -> Tensor | None:
    """Return [B|1, N] bool, which queries are known not to be padding; None where all count."""
    return call.key_valid if num_queries == num_keys else None


def block_spans(
    call: Call, num_queries: int, num_keys: int, *, tile: int, block: int, device: torch.device
) -> Spans:
    """Return the spans of tiles of `tile` consecutive queries and blocks of `block` keys."""
    shift = num_keys - num_queries
    queries = valid_queries(call, num_queries, num_keys)
    tile_start, tile_stop = _cut(num_queries, tile, queries, device)
    return Spans(
        tile_start + shift, tile_stop + shift, *_cut(num_keys, block, call.key_valid, device)
    )


def _cut(
    length: int, size: int, valid: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return start and stop [B|1, ceil(length / size)] of the pieces, cut to the valid tokens."""
    start = torch.arange(0, length, size, device=device)[None]
    stop = (start + size).clamp(max=length)
    if valid is None:
        return start, stop
    place = torch.arange(1, length + 1, device=device)
    end = torch.where(valid, place, 0).amax(-1, keepdim=True)  # [B|1, 1]
    return start.maximum(valid.byte().argmax(-1, keepdim=True)), stop.minimum(end)


def visible_pairs(
    call: Call, num_queries: int, num_keys: int, *, tile: int, block: int, device: torch.device
) -> Tensor:
    """Return how many pairs of valid query and visible valid key each tile and block hold.

    Returns:
        [B|1, 1, R, C] int64, exact for any padding and causal alignment.
    """
    queries = valid_queries(call, num_queries, num_keys)
    if queries is None:
        queries = torch.ones(1, num_queries, dtype=torch.bool, device=device)
    keys = call.key_valid
    if keys is None:
        keys = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    start = torch.arange(0, num_queries, tile, device=device)  # [R]
    stop = (start + tile).clamp(max=num_queries)
    edge = torch.arange(-(-num_keys // block) + 1, device=device) * block  # [C + 1]
    edge = edge.clamp(max=num_keys)
    keys_before = _before(keys.long())  # [B|1, S + 1]
    queries_before = _before(queries.long())  # [B|1, N + 1]
    if not call.causal:
        in_tile = queries_before[:, stop] - queries_before[:, start]
        return (in_tile[:, :, None] * keys_before[:, edge].diff(dim=-1)[:, None])[:, None]
    shift = num_keys - num_queries
    seen_end = (torch.arange(num_queries, device=device) + shift + 1).clamp(0, num_keys)
    seen_before = _before(keys_before[:, seen_end] * queries)  # [B|1, N + 1], pairs
    # From query `split` on, a tile's queries see all keys below the edge; those before it do not
    # see past it. Both together are the pairs below the edge.
    split = (edge - shift).clamp(start[:, None], stop[:, None])  # [R, C + 1]
    below = seen_before[:, split] - seen_before[:, start][:, :, None]
    rest = queries_before[:, stop][:, :, None] - queries_before[:, split]
    below = below + rest * keys_before[:, edge][:, None]
    return below.diff(dim=-1)[:, None]


def _before(x: Tensor) -> Tensor:
    """Return the sums of all entries before each place, [..., L + 1]."""
    return torch.nn.functional.pad(x.cumsum(-1), (1, 0))
