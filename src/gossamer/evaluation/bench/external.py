"""Sparse attention of other libraries, on those plans that it can run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.bench.case import TILE

FLEX = "flex-attention"
EXTERNAL = (FLEX,)
"""Names that results have beside those of Gossamer's own kernels."""


def external_kernels(
    q: Tensor, k: Tensor, v: Tensor, plan: gs.SparsePlan, names: Sequence[str] = EXTERNAL
) -> dict[str, Callable[[], Tensor]]:
    """Return what runs a plan, by name: calls without arguments that return [B, H, N, D].

    What they take in place of a plan is made here and is not part of the call.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        plan: The plan.
        names: Which of them are wanted.
    """
    mask = flex_mask(plan, (q.shape[0], q.shape[1])) if FLEX in names else None
    if mask is None:
        return {}
    gqa = q.shape[1] != k.shape[1]
    return {FLEX: partial(_flex_attention(), q, k, v, block_mask=mask, enable_gqa=gqa)}


def flex_mask(plan: gs.SparsePlan, shape: tuple[int, int]) -> Any:
    """Return a plan as FlexAttention's mask of whole blocks, or None where it is no such plan.

    Args:
        plan: The plan.
        shape: B and H.
    """
    from torch.nn.attention.flex_attention import BlockMask

    keys = plan.keys
    if not isinstance(keys, gs.KeyBlocks) or keys.block != TILE or plan.tile != TILE:
        return None
    given = (plan.query_index, plan.tile_row, plan.key_valid, plan.window, keys.key_order)
    if plan.causal or any(x is not None for x in given):
        return None
    number = keys.num_blocks(plan.num_keys)
    count = keys.count.int().expand(*shape, -1)
    kept = torch.arange(keys.index.shape[-1], device=plan.device) < keys.count[..., None]
    index = torch.where(kept, keys.index, 0).int()[..., :number]
    index = torch.nn.functional.pad(index, (0, number - index.shape[-1]))
    index = index.expand(*shape, -1, -1).contiguous()
    return BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(index),
        count.contiguous(),
        index,
        BLOCK_SIZE=TILE,
        seq_lengths=(plan.num_queries, plan.num_keys),
    )


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    """Return FlexAttention, compiled: as it is it attends densely, whatever the mask."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
