"""Putting plans of some heads each together to the plan of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.errors import PlanError
from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.plan import SparsePlan
from gossamer.plan.rows import expand, tile_queries, tile_rows

_Join = Callable[..., Tensor]


def merge_heads(plans: Sequence[SparsePlan], heads: Sequence[Tensor], group: int) -> SparsePlan:
    """Return one plan of all heads from plans of some of them.

    Args:
        plans: Plans by one method, of the same call but for the heads, without launch orders.
        heads: [H_i] int64 for each plan, the place of its query heads in the whole; together a
            permutation of 0…H-1. KV heads come whole, with all of their query heads.
        group: Query heads per KV head.

    Raises:
        PlanError: The plans are not of one kind.
    """
    first = plans[0]
    kinds = {
        (p.num_queries, p.num_keys, p.tile, p.causal, p.window, p.scale, type(p.keys).__name__)
        for p in plans
    }
    if len(kinds) > 1 or any(p.launch_order is not None for p in plans):
        raise PlanError(
            f"plans of different kinds cannot be put together: {sorted(map(str, kinds))}"
        )
    if len(plans) == 1:
        return first
    batch = max(plan.batch for plan in plans)
    places = torch.cat(list(heads)).argsort()  # where each head stands in the concatenation

    def joined(parts: Sequence[Tensor], sides: Sequence[int], value: int = 0) -> Tensor:
        """Concatenate [B|1, H_i|1, …] along the heads, the axes `sides` padded to one length."""
        whole: list[Tensor] = []
        for part, of in zip(parts, heads, strict=True):
            amount = [0] * (2 * part.dim())
            for axis in sides:
                most = max(other.shape[axis] for other in parts)
                amount[2 * (part.dim() - 1 - axis) + 1] = most - part.shape[axis]
            whole.append(expand(pad(part, amount, value=value), batch, len(of)))
        return torch.cat(whole, dim=1)[:, places]

    queries = joined([tile_queries(plan) for plan in plans], [2], -1)
    rows = joined([tile_rows(plan) for plan in plans], [2])
    keys = [plan.keys for plan in plans]
    if isinstance(first.keys, KeyBlocks):
        merged: KeyBlocks | KeyTokens = _merge_blocks(
            [k for k in keys if isinstance(k, KeyBlocks)], first.num_keys, joined
        )
    else:
        tokens = [k for k in keys if isinstance(k, KeyTokens)]
        kv_places = places.view(-1, group)[:, 0] // group
        merged = _merge_tokens(tokens, joined, kv_places, [len(h) // group for h in heads])
    return SparsePlan(
        num_queries=first.num_queries,
        num_keys=first.num_keys,
        tile=first.tile,
        keys=merged,
        query_index=queries.int(),
        tile_row=rows.int(),
        causal=first.causal,
        key_valid=first.key_valid,
        scale=first.scale,
        window=first.window,
    )


def _merge_blocks(keys: Sequence[KeyBlocks], num_keys: int, joined: _Join) -> KeyBlocks:
    """Concatenate rows of blocks."""
    order = None
    if any(k.key_order is not None for k in keys):
        device = keys[0].index.device
        plain = torch.arange(num_keys, dtype=torch.int32, device=device).view(1, 1, -1)
        orders = [plain if k.key_order is None else k.key_order for k in keys]
        order = joined(orders, [2], -1)
    return KeyBlocks(
        block=keys[0].block,
        count=joined([k.count for k in keys], [2]),
        index=joined([k.index for k in keys], [2, 3]),
        key_order=order,
    )


def _merge_tokens(
    keys: Sequence[KeyTokens], joined: _Join, kv_places: Tensor, kv_heads: Sequence[int]
) -> KeyTokens:
    """Concatenate pools, and virtual keys along the KV heads, of which parts have `kv_heads`."""
    starts: list[Tensor] = []
    size = 0
    for part in keys:
        starts.append(part.start + size)
        size += part.index.numel()
    weights = None
    if any(k.log_weight is not None for k in keys):
        weights = torch.cat(
            [
                k.index.new_zeros(k.index.shape, dtype=torch.float32)
                if k.log_weight is None
                else k.log_weight
                for k in keys
            ]
        )
    extras: dict[str, Tensor] = {}
    if any(k.extra_k is not None for k in keys):
        most = max(k.num_extra for k in keys)
        for name in ("extra_k", "extra_v", "extra_of"):
            parts = [getattr(k, name) for k in keys]
            # A part may have no virtual keys at all, at density 1: it gets some that none reads.
            given = [part for part, k in zip(parts, keys, strict=True) if k.extra_k is not None]
            if any(part is None for part in given):
                continue  # virtual keys that are no means
            blank = given[0].new_full((), -1 if name == "extra_of" else 0)
            filled: list[Tensor] = []
            for part, number in zip(parts, kv_heads, strict=True):
                if part is None:
                    part = blank.expand(given[0].shape[0], number, *given[0].shape[2:])
                if name != "extra_of":
                    part = pad(part, (0, 0, 0, most - part.shape[2]))
                filled.append(part)
            extras[name] = torch.cat(filled, dim=1)[:, kv_places]
    return KeyTokens(
        start=joined(starts, [2]),
        count=joined([k.count for k in keys], [2]),
        index=torch.cat([k.index for k in keys]),
        log_weight=weights,
        **extras,
    )
