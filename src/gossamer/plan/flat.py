"""A plan as a list of tensors and a list of integers, so that it can cross a `torch.library` op."""

from __future__ import annotations

from torch import Tensor

from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.plan import SparsePlan

_NO_BLOCK = 0  # in place of KeyBlocks.block: the keys are tokens


def flatten(plan: SparsePlan) -> tuple[list[Tensor | None], list[int]]:
    """Return the plan's tensors and integers, without its scale (attention gets its own)."""
    keys = plan.keys
    tensors = [plan.query_index, plan.tile_row, plan.launch_order, plan.key_valid]
    if isinstance(keys, KeyBlocks):
        block = keys.block
        tensors += [keys.count, keys.index, keys.key_order]
    else:
        block = _NO_BLOCK
        tensors += [keys.start, keys.count, keys.index, keys.log_weight]
        tensors += [keys.extra_k, keys.extra_v, keys.extra_of]
    numbers = [plan.num_queries, plan.num_keys, plan.tile, int(plan.causal), block]
    return tensors, numbers + list(plan.window or ())


def unflatten(tensors: list[Tensor | None], numbers: list[int]) -> SparsePlan:
    """Return the plan that `flatten` took apart."""
    num_queries, num_keys, tile, causal, block, *window = numbers
    query_index, tile_row, launch_order, key_valid, *rest = tensors
    if block != _NO_BLOCK:
        count, index, key_order = rest
        keys = KeyBlocks(block=block, count=_given(count), index=_given(index), key_order=key_order)
    else:
        start, count, index, log_weight, extra_k, extra_v, extra_of = rest
        keys = KeyTokens(
            start=_given(start),
            count=_given(count),
            index=_given(index),
            log_weight=log_weight,
            extra_k=extra_k,
            extra_v=extra_v,
            extra_of=extra_of,
        )
    return SparsePlan(
        num_queries=num_queries,
        num_keys=num_keys,
        tile=tile,
        keys=keys,
        query_index=query_index,
        tile_row=tile_row,
        launch_order=launch_order,
        causal=bool(causal),
        key_valid=key_valid,
        window=(window[0], window[1], window[2]) if window else None,
    )


def _given(tensor: Tensor | None) -> Tensor:
    """Return a tensor that a plan always has."""
    if tensor is None:
        raise TypeError("a flattened plan lacks one of its key tensors")
    return tensor
