"""How much of the visible work a plan computes, counted on true tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.plan.keys import KeyBlocks
from gossamer.plan.rows import Rows, expand, read_rows, tile_queries, tile_rows
from gossamer.plan.visible import bounds, is_masked, sink_ends

if TYPE_CHECKING:
    from gossamer.plan.plan import SparsePlan

_CHUNK_BYTES = 32 << 20  # of the padded lists held at once


def count_keys(plan: SparsePlan) -> Tensor:
    """Return how many keys each query reads: [B, H, N] int64, virtual keys included."""
    batch, heads, device = plan.batch, plan.heads, plan.device
    queries = expand(tile_queries(plan), batch, heads).flatten(0, 2)  # [B*H*T, tile]
    rows = expand(tile_rows(plan), batch, heads).flatten()
    tiles = torch.arange(batch * heads * plan.num_tiles, device=device)
    of_batch = tiles // (heads * plan.num_tiles)
    of_head = tiles // plan.num_tiles % heads
    sinks = sink_ends(plan).expand(batch)[of_batch]
    counts = torch.zeros(len(tiles), plan.tile, dtype=torch.int64, device=device)
    for part in tiles.split(_tiles_per_chunk(plan)):
        listed = read_rows(plan, of_batch[part], of_head[part], rows[part])
        counts[part] = _count_in(plan, listed, queries[part], sinks[part, None])
    slot = torch.where(queries < 0, plan.num_queries, queries).view(batch, heads, -1)
    result = torch.zeros(batch, heads, plan.num_queries + 1, dtype=torch.int64, device=device)
    return result.scatter_(2, slot, counts.view(batch, heads, -1))[..., : plan.num_queries]


def count_visible(plan: SparsePlan) -> Tensor:
    """Return how many real keys each query could read: [B|1, N] int64."""
    query = torch.arange(plan.num_queries, device=plan.device)
    position = query + plan.num_keys - plan.num_queries
    seen = (position + 1).clamp(0, plan.num_keys) if plan.causal else None
    if plan.key_valid is None:
        return (torch.full_like(query, plan.num_keys) if seen is None else seen)[None]
    running = plan.key_valid.long().cumsum(-1)
    running = torch.nn.functional.pad(running, (1, 0))  # [B, S + 1], valid keys before each
    if seen is None:
        return running[:, -1:].expand(-1, plan.num_queries)
    return running[:, seen]


def density(plan: SparsePlan) -> Tensor:
    """Return the plan's density as a 0-d float64 tensor (see `SparsePlan.density`)."""
    read = count_keys(plan).sum(-1) if is_masked(plan) else _pairs_unmasked(plan)  # [B, H]
    read = read.double().mean(-1)
    visible = count_visible(plan).sum(-1).double()  # [B or 1]
    share = torch.where(visible > 0, read / visible.clamp(min=1), 1.0)
    return share.clamp(max=1.0).mean()


def _pairs_unmasked(plan: SparsePlan) -> Tensor:
    """Return the pairs computed [B, H], where all queries of a tile see the same keys.

    Nothing is read back from the device, so a session can record densities without waiting.
    """
    sizes = row_sizes(plan)
    queries = (tile_queries(plan) >= 0).sum(-1)  # [B|1, H|1, T]
    heads = (plan.batch, plan.heads)
    by_tile = expand(sizes, *heads).gather(2, expand(tile_rows(plan), *heads))
    return (by_tile * queries).sum(-1)


def row_sizes(plan: SparsePlan) -> Tensor:
    """Return how many keys with a weight above 0 each row lists, [B|1, H|1, R] int64."""
    keys, valid = plan.keys, plan.key_valid
    if isinstance(keys, KeyBlocks):
        by_block = _block_sizes(keys, plan)  # [B|1, H|1, C]
        batch = max(by_block.shape[0], keys.index.shape[0])
        heads = max(by_block.shape[1], keys.index.shape[1])
        listed = torch.arange(keys.index.shape[-1], device=plan.device) < keys.count[..., None]
        index = torch.where(listed, keys.index, 0).long()
        rows = expand(by_block[:, :, None], batch, heads).expand(-1, -1, index.shape[2], -1)
        return (rows.gather(3, expand(index, batch, heads)) * listed).sum(-1)
    counted = torch.ones_like(keys.index, dtype=torch.bool)
    if keys.log_weight is not None:
        counted = keys.log_weight > -torch.inf
    sizes = []
    for b in range(1 if valid is None else plan.batch):
        kept = counted
        if valid is not None:
            row = valid[b if valid.shape[0] > 1 else 0]
            inside = keys.index.clamp(max=max(plan.num_keys - 1, 0)).long()
            kept = counted & (row[inside] | (keys.index >= plan.num_keys))
        before = torch.nn.functional.pad(kept.long().cumsum(0), (1, 0))
        pick = slice(None) if valid is None else slice(b, b + 1)
        start = keys.start[pick if keys.start.shape[0] > 1 else slice(None)]
        count = keys.count[pick if keys.count.shape[0] > 1 else slice(None)]
        sizes.append(before[start + count] - before[start])
    return torch.cat(sizes)


def _block_sizes(keys: KeyBlocks, plan: SparsePlan) -> Tensor:
    """Return how many valid keys stand in each block, [B|1, H|1, C] int64."""
    num_blocks = keys.num_blocks(plan.num_keys)
    order = keys.key_order
    if order is None:
        order = torch.arange(plan.num_keys, device=plan.device).view(1, 1, -1)
    order = torch.nn.functional.pad(order, (0, num_blocks * keys.block - order.shape[-1]), value=-1)
    counted = order >= 0
    if plan.key_valid is not None:
        batch = max(order.shape[0], plan.key_valid.shape[0])
        valid = plan.key_valid[:, None].expand(batch, order.shape[1], -1)
        at = expand(order, batch, order.shape[1]).clamp(min=0).long()
        counted = counted & valid.gather(2, at)
    return counted.unflatten(-1, (num_blocks, keys.block)).sum(-1)


def _tiles_per_chunk(plan: SparsePlan) -> int:
    """Return how many tiles' lists fit the chunk size."""
    keys = plan.keys
    width = keys.index.shape[-1] * keys.block if isinstance(keys, KeyBlocks) else plan.num_keys
    return max(1, _CHUNK_BYTES // (16 * max(width, 1)))


def _count_in(plan: SparsePlan, rows: Rows, query: Tensor, sink: Tensor) -> Tensor:
    """Return how many listed keys each query [n, tile] sees, [n, tile]; `sink` is [n, 1]."""
    if not is_masked(plan):
        return rows.listed.sum(1, keepdim=True).expand_as(query)
    # Lists ascend, so the keys below a bound are a prefix: count the listed ones before it.
    before = torch.nn.functional.pad(rows.listed.long().cumsum(1), (1, 0))
    # Entries that are not listed hold index 0: carry the running maximum so that lists ascend.
    ascending = rows.index.cummax(1).values if rows.index.shape[1] else rows.index

    def below(bound: Tensor) -> Tensor:
        return before.gather(1, torch.searchsorted(ascending, bound.contiguous()))

    limits = bounds(plan, query, sink)
    window = below(limits.high) - below(limits.low)
    sink = below(limits.sink.minimum(limits.low))
    sink_past_window = below(limits.sink.maximum(limits.high)) - below(limits.high)
    virtual = before[:, -1:] - below(torch.full_like(query, plan.num_keys))
    return window + sink + sink_past_window + virtual
