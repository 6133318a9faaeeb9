"""Plans of blocks of 128 keys as flash-attn-4's block sparsity."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, BackwardInput, with_positive_scale
from gossamer.kernels.flash.call import TILE, BlockLists, attend_blocks, differentiate_blocks
from gossamer.kernels.transposed import list_causal_tiles, list_tiles
from gossamer.plan import KeyBlocks, SparsePlan

# Of head dims 80 and 112 flash-attn-4 4.0.0b36 returns wrong gradients of queries, on an H200; of
# 64, 96 and 128 right ones.
_GRADIENT_DIM_STEP = 32
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
    """Run a plan of which `can_run` is true.

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
    keys = _blocks_of(plan)
    k, v = (_in_order(x, keys.key_order) for x in (k, v))
    q = q if plan.query_index is None else _gather(q, plan.query_index.clamp(min=0))
    q, scale = with_positive_scale(q if q.stride(-1) == 1 else q.contiguous(), scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    attend_blocks(q, k, v, out, lse, _lists(plan, keys), scale)
    if plan.query_index is None:
        return AttentionOutput(out, lse)
    place = _places(plan.query_index, plan.num_queries)
    return AttentionOutput(_gather(out, place), _gather(lse[..., None], place)[..., 0])


def differentiate(
    given: BackwardInput, plan: SparsePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of what `run` returned.

    What it had put in the plan's order is put there once more, so that nothing of that size is kept
    from one pass to the other.

    Args:
        given: What the forward pass took and returned, and the gradients of that.
        plan: The plan.
        scale: The factor on the logits.
    """
    keys, given_scale = _blocks_of(plan), scale
    k, v = (_in_order(x, keys.key_order) for x in (given.k, given.v))
    # flash-attn-4 compiles another kernel for strides of 0, which gradients of sums have.
    by_query = (given.q, given.out, given.d_out.contiguous())
    q, out, d_out = (_in_tiles(x, plan.query_index) for x in by_query)
    lse = _in_tiles(given.lse[..., None], plan.query_index)[..., 0]
    d_lse = given.d_lse
    if d_lse is not None:
        d_lse = _in_tiles(d_lse.float().contiguous()[..., None], plan.query_index)[..., 0]
    q, scale = with_positive_scale(q if q.stride(-1) == 1 else q.contiguous(), given_scale)
    lists = _transposed_lists(plan, keys)
    dim = q.shape[-1]
    q, k, v, out, d_out = (_widened(x) for x in (q, k, v, out, d_out))
    widened = BackwardInput(q, k, v, out, lse, d_out, d_lse)
    grads = differentiate_blocks(widened, lists, scale)
    d_q, d_k, d_v = (x[..., :dim] for x in grads)
    if given_scale < 0:
        d_q = -d_q
    elif given_scale == 0:
        d_q = torch.zeros_like(d_q)
    if plan.query_index is not None:
        d_q = _gather(d_q, _places(plan.query_index, plan.num_queries))
    if keys.key_order is not None:
        place = _places(keys.key_order, plan.num_keys)
        d_k, d_v = _gather(d_k, place), _gather(d_v, place)
    return d_q, d_k, d_v


def _blocks_of(plan: SparsePlan) -> KeyBlocks:
    """Return the plan's blocks."""
    if not isinstance(plan.keys, KeyBlocks):
        raise TypeError("only rows of blocks run block-sparse")
    return plan.keys


def _widened(x: Tensor) -> Tensor:
    """Return x with columns of 0 up to a head dim whose gradients are right."""
    missing = -x.shape[-1] % _GRADIENT_DIM_STEP
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _in_tiles(x: Tensor, query_index: Tensor | None) -> Tensor:
    """Return x [B, H, N, D] as the tiles hold it, 0 where they hold no query: no gradient there."""
    if query_index is None:
        return x
    empty = (query_index < 0).flatten(2)[..., None]
    return _gather(x, query_index.clamp(min=0)).masked_fill_(empty, 0)


def _in_order(x: Tensor, key_order: Tensor | None) -> Tensor:
    """Return keys x [B, Hk, S, D] in the order of the blocks, which has no holes."""
    return x if key_order is None else _gather(x, key_order)


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


def _places(index: Tensor, length: int) -> Tensor:
    """Return where each row stands in an index [B|1, H|1, ...], [B|1, H|1, length] int64."""
    row = index.long().flatten(2)
    # Entries that name no row write to a slot that is cut off.
    slot = torch.where(row < 0, length, row)
    place = torch.arange(row.shape[-1], device=row.device).expand_as(slot)
    empty = row.new_zeros(*row.shape[:2], length + 1)
    return empty.scatter_(2, slot, place)[..., :length]
