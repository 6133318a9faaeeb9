"""Plans of blocks of 128 keys as flash-attn-4's block sparsity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.kernels.base import AttentionOutput, with_positive_scale
from gossamer.kernels.flash.call import TILE, BlockLists, attend_blocks, differentiate_blocks
from gossamer.kernels.transposed import list_causal_tiles, list_tiles
from gossamer.plan import KeyBlocks, SparsePlan

_PARTIAL = 2  # blocks, at most, that causality cuts for a tile of the same size


def can_run(plan: SparsePlan, group: int) -> bool:
    """Return whether the plan's blocks are whole tiles of keys, in an order that k can be put in.

    Args:
        plan: The plan, which the kernel supports.
        group: Query heads per KV head.
    """
    keys = plan.keys
    if not isinstance(keys, KeyBlocks) or keys.block != TILE or plan.key_valid is not None:
        return False
    if min(plan.num_queries, plan.num_keys, keys.num_rows) == 0:
        return False
    if keys.key_order is None:
        return True
    # As many places as keys: no holes. An order per query head fits keys per query head only.
    whole = keys.key_order.shape[-1] == plan.num_keys
    return whole and (group == 1 or keys.key_order.shape[1] == 1)


def run(q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float) -> AttentionOutput:
    """Run a plan of which `can_run` is true; the output carries gradients to q, k and v.

    Every list ascends and ends in the ragged block where it holds it: flash-attn-4 walks a list
    backwards and masks what lies past the last key in the first block that it meets. It skips tiles
    without any block itself: output 0, log-sum-exp -inf.

    Args:
        q: [B, H, N, D].
        k: [B, Hk, S, D].
        v: [B, Hk, S, D].
        plan: The plan.
        scale: Any factor on the logits.
    """
    keys = plan.keys
    if not isinstance(keys, KeyBlocks):
        raise TypeError("only rows of blocks run block-sparse")
    if keys.key_order is not None:
        k, v = _gather(k, keys.key_order), _gather(v, keys.key_order)
    q_tiles = q if plan.query_index is None else _gather(q, plan.query_index.clamp(min=0))
    if q_tiles.stride(-1) != 1:
        q_tiles = q_tiles.contiguous()
    out, lse = _Attend.apply(q_tiles, k, v, plan, keys, scale)
    if plan.query_index is None:
        return AttentionOutput(out, lse)
    place = _places(plan.query_index, plan.num_queries)  # [B|1, H|1, N]
    place = place.expand(*q.shape[:2], -1)
    return AttentionOutput(
        out.gather(2, place[..., None].expand(-1, -1, -1, q.shape[-1])), lse.gather(2, place)
    )


class _Attend(torch.autograd.Function):
    """Attention of tiles of queries that stand in order, and its gradients."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] -- torch takes any arguments
        ctx: Any,  # noqa: ANN401 -- torch has no type for it
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SparsePlan,
        keys: KeyBlocks,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.keys, ctx.scale = plan, keys, scale
        ctx.set_materialize_grads(False)
        q, scale = with_positive_scale(q, scale)
        attend_blocks(q, k, v, out, lse, _lists(plan, keys), scale)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- as above
        ctx: Any,  # noqa: ANN401
        d_out: Tensor | None,
        d_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # Gradients of sums come with strides of 0, for which flash-attn-4 compiles another kernel.
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        lists = _transposed_lists(ctx.plan, ctx.keys)
        q, scale = with_positive_scale(q, ctx.scale)
        d_q, d_k, d_v = differentiate_blocks(q, k, v, out, lse, d_out, d_lse, lists, scale)
        if ctx.scale < 0:
            d_q = -d_q
        elif ctx.scale == 0:
            d_q = torch.zeros_like(d_q)
        return d_q, d_k, d_v, None, None, None


def _lists(plan: SparsePlan, keys: KeyBlocks) -> BlockLists:
    """Return the lists of every tile, from those of the rows."""
    # A row is no longer than there are blocks, which flash-attn-4 insists on; and no list is
    # narrower than one entry, so that it has an address.
    width = max(1, min(keys.index.shape[-1], keys.num_blocks(plan.num_keys)))
    index = keys.index[..., :width]
    if index.shape[-1] == 0:
        index = index.new_zeros(*index.shape[:3], 1)
    count = keys.count
    if plan.tile_row is not None:
        row = plan.tile_row.long()
        batch = max(row.shape[0], count.shape[0], index.shape[0])
        heads = max(row.shape[1], count.shape[1], index.shape[1])
        row = row.expand(batch, heads, -1)
        count = count.expand(batch, heads, -1).gather(2, row)
        at = row[..., None].expand(-1, -1, -1, width)
        index = index.expand(batch, heads, -1, -1).gather(2, at)
    count, index = (x[:, :, : plan.num_tiles].int().contiguous() for x in (count, index))
    if plan.causal:
        return _causal_lists(plan, count, index)
    # Blocks that all queries see, the ragged one included, need no mask but that of the length.
    none = count.new_zeros(1, 1, plan.num_tiles)
    return BlockLists(count, index, none, none[..., None], causal=False)


def _causal_lists(plan: SparsePlan, count: Tensor, index: Tensor) -> BlockLists:
    """Cut lists [B|1, H|1, T, K] into blocks that all of a tile see and those that some see.

    Rows ascend, so the first are a prefix, the second follow, and what nobody sees is behind.
    """
    tile = torch.arange(plan.num_tiles, device=index.device)
    first = (tile * TILE + plan.num_keys - plan.num_queries).view(1, 1, -1, 1)  # position
    width = index.shape[-1]
    listed = torch.arange(width, device=index.device) < count[..., None]
    begin = index * TILE
    full = (listed & (begin + TILE - 1 <= first)).sum(-1, dtype=torch.int32)
    seen = (listed & (begin <= first + TILE - 1)).sum(-1, dtype=torch.int32)
    rest = torch.arange(min(_PARTIAL, width), device=index.device)
    at = (full[..., None] + rest).clamp(max=width - 1).long()
    partial = index.expand(*at.shape[:2], -1, -1).gather(3, at)
    return BlockLists(full, index, seen - full, partial, causal=True)


def _transposed_lists(plan: SparsePlan, keys: KeyBlocks) -> BlockLists:
    """Return the lists of every block of keys: the tiles that read it."""
    if plan.causal:
        whole, cut = list_causal_tiles(plan, keys)
        return BlockLists(whole.num_tiles, whole.tiles, cut.num_tiles, cut.tiles, causal=True)
    lists = list_tiles(plan, keys)
    none = lists.num_tiles.new_zeros(1, 1, lists.num_tiles.shape[-1])
    return BlockLists(lists.num_tiles, lists.tiles, none, none[..., None], causal=False)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return rows of x [B, H, N, D] named by an index [B|1, H|1, ...] of any further axes."""
    flat = index.long().flatten(2)[..., None]
    return x.gather(2, flat.expand(*x.shape[:2], -1, x.shape[-1]))


def _places(query_index: Tensor, num_queries: int) -> Tensor:
    """Return at which tile row each query stands, [B|1, H|1, N] int64."""
    query = query_index.long().flatten(2)
    # Rows without a query write to a slot that is cut off.
    slot = torch.where(query < 0, num_queries, query)
    place = torch.arange(query.shape[-1], device=query.device).expand_as(slot)
    empty = query.new_zeros(*query.shape[:2], num_queries + 1)
    return empty.scatter_(2, slot, place)[..., :num_queries]
