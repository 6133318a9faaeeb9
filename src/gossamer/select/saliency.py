"""How much attention falls on each block, exactly, and at which threshold a block enters a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.select.exact import Tiles, runs_kernels, stream_mass

_CHUNK_BYTES = 32 << 20  # of the float32 probabilities held at once; softmax holds them twice


def block_saliency(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    tile: int,
    block: int,
    valid: Tensor | None = None,
    causal: bool = False,
    num_keys: int | None = None,
) -> Tensor:
    """Return the mean attention probability of each tile and block (ScalingAttention, WEST).

    Exact: a chunk of query rows meets all keys at once, so that its probabilities are final, and
    only their sums over blocks are kept.

    Args:
        q: [B, H, N, D] queries, any floating dtype and strides.
        k: [B, Hk, S, D] keys.
        scale: Factor on the logits.
        tile: Queries per tile.
        block: Keys per block.
        valid: [B or 1, S] bool, False for padded keys; where N = num_keys, for padded queries too.
        causal: Query i sees key j iff j <= i + num_keys - N.
        num_keys: Keys that are cut into blocks, the first ones; those behind (text) only take
            their share of the softmax. None for all.

    Returns:
        [B, H, R, C] float32, block mass / (tile * block), also for ragged tiles and blocks.
    """
    batch, heads, num_queries, _ = q.shape
    kv_heads, total = k.shape[1:3]
    group = heads // kv_heads
    num_keys = total if num_keys is None else num_keys
    # Tiles count padding and causality by all keys.
    if num_keys == total or (valid is None and not causal):
        tiles = Tiles(
            num_queries=num_queries,
            num_keys=total,
            tile=tile,
            causal=causal,
            key_valid=valid,
            scale=scale,
        )
        if runs_kernels(q, k, tiles):
            return _saliency_by_kernels(q, k, tiles, block, num_keys)
    num_tiles, num_blocks = -(-num_queries // tile), -(-num_keys // block)
    shape = (batch * kv_heads, group, num_tiles, num_blocks)
    mass = torch.zeros(shape, dtype=torch.float32, device=q.device)
    grouped = q.unflatten(1, (kv_heads, group))
    valid = None if valid is None else valid.expand(batch, -1)
    key = torch.arange(total, device=q.device)
    num_heads, num_rows = _chunk(group * total, tile)
    for part in torch.arange(batch * kv_heads, device=q.device).split(num_heads):
        of_batch, of_head = part // kv_heads, part % kv_heads
        queries, keys = grouped[of_batch, of_head], k[of_batch, of_head].float()
        seen = None if valid is None else valid[of_batch]
        for start in range(0, num_queries, num_rows):
            rows = queries[:, :, start : start + num_rows]  # [n, G, r, D]
            hidden = None
            if causal:
                row = torch.arange(start, start + rows.shape[2], device=q.device)
                hidden = key > (row + num_keys - num_queries)[:, None]  # [r, S]
            by_row = block_sums(probabilities(rows, keys, scale, seen, hidden), block, num_keys)
            if seen is not None and num_queries == num_keys:
                real = seen[:, None, start : start + rows.shape[2], None]
                by_row = by_row.masked_fill(~real, 0.0)
            by_row = torch.nn.functional.pad(by_row, (0, 0, 0, -by_row.shape[2] % num_rows))
            by_tile = by_row.unflatten(2, (-1, min(tile, num_rows))).sum(3)
            first = start // tile
            into = mass[part, :, first : first + by_tile.shape[2]]
            # Past the last tile there is only the padding of the last chunk.
            mass[part, :, first : first + by_tile.shape[2]] = into + by_tile[:, :, : into.shape[2]]
    return (mass / (tile * block)).view(batch, heads, num_tiles, num_blocks)


def _saliency_by_kernels(q: Tensor, k: Tensor, tiles: Tiles, block: int, num_keys: int) -> Tensor:
    """Return what `block_saliency` does, from the masses that kernels for a GPU compute."""
    num_blocks = -(-num_keys // block)
    saliency = torch.empty(
        *q.shape[:2], tiles.num_tiles, num_blocks, dtype=torch.float32, device=q.device
    )
    for got in stream_mass(q, k, None, tiles):
        # What no query sees has the mass -inf.
        by_block = block_sums(got.mass.clamp_(min=0.0), block, num_keys)
        saliency[got.part.batch, got.part.head, got.part.tile] = by_block
    return saliency.div_(tiles.tile * block)


def _chunk(row_width: int, tile: int) -> tuple[int, int]:
    """Return how many heads and query rows are taken at once; rows are whole tiles or divide one.

    Args:
        row_width: Probabilities that one query row of one KV head's group has.
        tile: Queries per tile.
    """
    fit = max(1, _CHUNK_BYTES // (4 * row_width))
    if fit < tile:
        return 1, max(rows for rows in range(1, fit + 1) if tile % rows == 0)
    num_heads = max(1, fit // (8 * tile))  # eight tiles make a product efficient
    return num_heads, fit // num_heads // tile * tile


def probabilities(
    rows: Tensor, keys: Tensor, scale: float, seen: Tensor | None, hidden: Tensor | None = None
) -> Tensor:
    """Return softmax probabilities of query rows over all keys.

    Args:
        rows: [n, G, r, D] queries of n KV heads.
        keys: [n, S, D] float32 keys.
        scale: Factor on the logits.
        seen: [n, S] bool, False for padded keys; None for none.
        hidden: [r, S] bool, True where a query does not see a key; None for none.

    Returns:
        [n, G, r, S] float32; 0 in rows that see nothing or are no number.
    """
    scores = (rows.flatten(1, 2).float() * scale) @ keys.mT  # [n, G * r, S]
    scores = scores.unflatten(1, rows.shape[1:3])
    if seen is None and hidden is None:
        return torch.softmax(scores, dim=-1)
    if seen is not None:
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1).nan_to_num_(0.0)


def block_sums(x: Tensor, block: int, num_keys: int) -> Tensor:
    """Sum the first `num_keys` of the last axis over consecutive blocks, the last one ragged."""
    whole = num_keys // block * block
    sums = x[..., :whole].unflatten(-1, (-1, block)).sum(-1) if whole else x[..., :0]
    if whole == num_keys:
        return sums
    return torch.cat([sums, x[..., whole:num_keys].sum(-1, keepdim=True)], dim=-1)


def threshold_map(saliency: Tensor, possible: Tensor | None = None) -> Tensor:
    """Return at which kept share of its row each block enters: rank / n (WEST).

    The union over prompts is the elementwise minimum of their maps.

    Args:
        saliency: [..., R, C]; ties go to the lower index.
        possible: [..., R|1, C] bool, blocks that a row may read; None for all.

    Returns:
        [..., R, C] float32 in (0, 1]; inf for blocks that are not possible.
    """
    if possible is None:
        possible = torch.ones_like(saliency, dtype=torch.bool)
    possible = possible.expand(saliency.shape)
    saliency = saliency.masked_fill(~possible, -torch.inf)
    order = torch.argsort(saliency, dim=-1, descending=True, stable=True)
    place = torch.arange(1, saliency.shape[-1] + 1, device=saliency.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    share = rank.float() / possible.sum(-1, keepdim=True).clamp(min=1)
    return share.masked_fill(~possible, torch.inf)


def threshold_mask(thresholds: Tensor, p: float | Tensor) -> Tensor:
    """Return the blocks with T <= max(p, 1/n), so that every row keeps at least one.

    1/n is the least threshold of a row. p is rounded like the map, so that a rank of exactly p
    is kept in float16 too.

    Args:
        thresholds: [..., R, C], any floating dtype.
        p: Number, or a tensor that broadcasts against `thresholds`.

    Returns:
        [..., R, C] bool.
    """
    bound = torch.as_tensor(p, device=thresholds.device).to(thresholds.dtype)
    least = thresholds.amin(-1, keepdim=True)
    return (thresholds <= torch.maximum(bound, least)) & (thresholds < torch.inf)


def entry_levels(thresholds: Tensor, levels: Tensor) -> Tensor:
    """Return the first of some levels at which `threshold_mask` holds each block.

    Args:
        thresholds: [..., R, C], at most 1.
        levels: [P] ascending, the last one 1.

    Returns:
        [..., R, C] int64 in 0…P-1.
    """
    rounded = levels.to(thresholds.device, thresholds.dtype).float()
    entry = torch.searchsorted(rounded, thresholds.float().contiguous())
    least = thresholds.amin(-1, keepdim=True)
    return entry.clamp(max=len(levels) - 1).masked_fill(thresholds <= least, 0)
