"""Joining text to a plan of latent tokens: text rows read everything, every row reads the text."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gossamer.errors import PlanError
from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.plan import SparsePlan
from gossamer.plan.rows import tile_queries, tile_rows


def join_text(plan: SparsePlan, text: tuple[int, int], key_valid: Tensor | None) -> SparsePlan:
    """Return the plan of the joint sequence.

    Args:
        plan: A plan of the latent tokens alone (num_queries = num_keys = latent tokens), whose rows
            lie one behind the other in their pool.
        text: [start, stop) of the text tokens in the joint sequence.
        key_valid: [B, S] bool over the joint sequence, or None.

    Returns:
        A plan in which each text query reads every key and each latent query, beside its own keys,
        every text key.

    Raises:
        PlanError: The plan is causal or windowed, which has no meaning across a text span.
    """
    start, stop = text
    if stop == start:
        return replace(plan, key_valid=key_valid)
    if plan.causal or plan.window is not None:
        raise PlanError("a causal or windowed plan cannot be joined with a text span")
    length = stop - start
    text_tiles = -(-length // plan.tile)

    queries = tile_queries(plan)  # [B, H, T, tile]
    queries = torch.where(queries < 0, -1, _to_joint(queries, start, length))
    slots = torch.arange(text_tiles * plan.tile, device=plan.device)
    slots = torch.where(slots < length, slots + start, -1).view(1, 1, text_tiles, plan.tile)
    queries = torch.cat([queries, slots.expand(*queries.shape[:2], -1, -1)], dim=2)

    rows = tile_rows(plan)
    text_row = torch.full((1, 1, text_tiles), plan.keys.num_rows, device=plan.device)
    rows = torch.cat([rows, text_row.expand(*rows.shape[:2], -1)], dim=2)

    joined = _join_blocks if isinstance(plan.keys, KeyBlocks) else _join_tokens
    return replace(
        plan,
        num_queries=plan.num_queries + length,
        num_keys=plan.num_keys + length,
        keys=joined(plan.keys, plan.num_keys, start, length),  # pyright: ignore[reportArgumentType] -- chosen by type
        query_index=queries.int(),
        tile_row=rows.int(),
        key_valid=key_valid,
    )


def _to_joint(index: Tensor, start: int, length: int) -> Tensor:
    """Map latent token indices to the joint sequence."""
    return index + (index >= start) * length


def _join_blocks(keys: KeyBlocks, num_keys: int, start: int, length: int) -> KeyBlocks:
    """Append the text as blocks of its own, behind holes that fill up the last latent block."""
    device = keys.index.device
    num_blocks = keys.num_blocks(num_keys)
    order = keys.key_order
    if order is None:
        order = torch.arange(num_keys, device=device).view(1, 1, -1)
    order = torch.where(order < 0, -1, _to_joint(order, start, length)).int()
    text = torch.arange(start, start + length, dtype=torch.int32, device=device).view(1, 1, -1)
    fill = (num_blocks * keys.block - order.shape[-1], -length % keys.block)
    order = torch.nn.functional.pad(order, (0, fill[0]), value=-1)
    text = torch.nn.functional.pad(text, (0, fill[1]), value=-1)
    order = torch.cat([order, text.expand(*order.shape[:2], -1)], dim=2)

    text_blocks = text.shape[-1] // keys.block
    total = num_blocks + text_blocks
    batch, heads, _, width = keys.index.shape
    place = torch.arange(total, device=device)
    count = keys.count[..., None].long()
    index = torch.nn.functional.pad(keys.index, (0, total - width))
    # Behind a row's own blocks come the text's; what lies further back is ignored.
    index = torch.where(place < count, index, (num_blocks + place - count).clamp(max=total - 1))
    full = place.view(1, 1, 1, -1).expand(batch, heads, 1, -1)
    count = (keys.count + text_blocks, torch.full_like(keys.count[..., :1], total))
    return KeyBlocks(
        block=keys.block,
        count=torch.cat(count, dim=2),
        index=torch.cat([index, full], dim=2).int(),
        key_order=order,
    )


def _join_tokens(keys: KeyTokens, num_keys: int, start: int, length: int) -> KeyTokens:
    """Insert the text keys at their place in every row and append one shared full row."""
    device = keys.index.device
    shape = torch.broadcast_shapes(keys.start.shape, keys.count.shape)
    begin = keys.start.expand(shape).flatten()
    count = keys.count.expand(shape).flatten().long()
    pool = keys.index.long()
    size, num_rows = pool.numel(), begin.numel()

    row_of = torch.searchsorted(begin, torch.arange(size, device=device), right=True) - 1
    is_before = pool < start
    running = torch.nn.functional.pad(is_before.long().cumsum(0), (1, 0))
    num_before = running[begin + count] - running[begin]  # [rows], keys in front of the text
    behind = torch.arange(size, device=device) - begin[row_of] >= num_before[row_of]
    place = torch.arange(size, device=device) + row_of * length + behind * length
    joined_begin = begin + torch.arange(num_rows, device=device) * length
    text = torch.arange(length, device=device)
    text_place = (joined_begin + num_before)[:, None] + text

    total = size + num_rows * length
    num_joint = num_keys + length
    index = torch.empty(total + num_joint, dtype=torch.int32, device=device)
    # A virtual key's index starts behind the real ones, so it moves like a key past the text.
    index[place] = _to_joint(pool, start, length).int()
    index[text_place.flatten()] = (text + start).repeat(num_rows).int()
    index[total:] = torch.arange(num_joint, dtype=torch.int32, device=device)
    log_weight = keys.log_weight
    if log_weight is not None:
        joined = log_weight.new_zeros(total + num_joint)
        joined[place] = log_weight
        log_weight = joined

    heads = (*shape[:2], 1)
    full_start = torch.full(heads, total, dtype=torch.int64, device=device)
    full_count = torch.full(heads, num_joint, dtype=torch.int32, device=device)
    extra_of = keys.extra_of
    if extra_of is not None:
        text_of = torch.full_like(extra_of[..., :1], -1).expand(*extra_of.shape[:2], length)
        extra_of = torch.cat([extra_of[..., :start], text_of, extra_of[..., start:]], dim=-1)
    return KeyTokens(
        start=torch.cat([joined_begin.view(shape), full_start], dim=2),
        count=torch.cat([(count + length).view(shape).int(), full_count], dim=2),
        index=index,
        log_weight=log_weight,
        extra_k=keys.extra_k,
        extra_v=keys.extra_v,
        extra_of=extra_of,
    )
