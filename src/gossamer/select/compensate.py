"""Lists of exact keys in which every group left out is stood for by one virtual key."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gossamer.group.tiles import Sorted
from gossamer.plan import KeyTokens
from gossamer.select.lists import list_keys

_CHUNK_BYTES = 64 << 20  # of the float32 tokens, one-hot labels or int64 places held at once


def list_compensated(
    taken: Tensor,
    keys: Sorted,
    k: Tensor,
    v: Tensor,
    *,
    labels: Tensor,
    width: int | None = None,
) -> KeyTokens:
    """List the keys taken of each group, and a virtual key for each group of which none is.

    The virtual key of group c is the mean of its keys, its value the mean of their values and its
    weight their number, which is attention to the whole group at zeroth order. A group of which
    only some keys are taken gets none: its mean would count these twice.

    Args:
        taken: [B, H, R, C] int64, keys taken of each group in key order: 0 … its size.
        keys: The keys sorted by group, C groups; [B|1, …] on the axis of the query heads (H), of
            the KV heads (Hk) or shared (1).
        k: [B, Hk, S, D] keys; what stands at keys of no group (padding) is not read.
        v: [B, Hk, S, D] values.
        labels: [B|1, Hk|1, S] integer, the group of each key; -1 for keys of no group. The groups
            must be those of `keys`.
        width: Room for each row, its virtual keys counted (see `entries`), where the caller knows a
            bound; None reads the counts (one synchronisation) and packs the rows without slack.

    Returns:
        The key rows, R per head: real keys, then virtual ones; C virtual keys per KV head, virtual
        key c being group c's, with `extra_of` so that `SparsePlan.refresh` can renew them.
    """
    batch, heads, _, num_groups = taken.shape
    kv_heads, num_keys = k.shape[1:3]
    order, start, size = (_on_heads(x, batch, heads) for x in keys)
    # The virtual keys join as groups of one, behind all real keys: lists ascend, so they come last.
    virtual = torch.arange(num_groups, device=k.device).expand(batch, heads, -1)
    joined = Sorted(
        torch.cat([order, virtual + num_keys], dim=2),
        torch.cat([start, virtual + order.shape[2]], dim=2),
        torch.cat([size, (size > 0).long()], dim=2),
    )
    missed = (taken == 0) & (size > 0)[:, :, None]
    rows = list_keys(torch.cat([taken, missed.long()], dim=3), joined, width=width)
    labels = labels.expand(batch, kv_heads, -1)
    return replace(
        rows,
        log_weight=_log_weights(rows, size, num_keys),
        extra_k=group_means(k, labels, num_groups),
        extra_v=group_means(v, labels, num_groups),
        extra_of=labels.int(),
    )


def entries(taken: Tensor, size: Tensor) -> Tensor:
    """Return how many keys `list_compensated` lists in each row, [B, H, R] int64.

    Args:
        taken: [B, H, R, C] int64, keys taken of each group.
        size: [B|1, H|1, C] int64, keys of each group.
    """
    return (taken + ((taken == 0) & (size > 0)[:, :, None])).sum(-1)


def group_means(x: Tensor, labels: Tensor, num_groups: int) -> Tensor:
    """Return the mean token of each group, [B, H, C, D] in x's dtype; 0 for empty groups.

    Sums are float32, in an order that does not change from run to run.

    Args:
        x: [B, H, N, D] tokens.
        labels: [B|1, H|1, N] integer, the group of each token; -1 for tokens of no group.
        num_groups: C.
    """
    batch, heads, length, dim = x.shape
    # Tokens of no group are summed, as zeros, into a last slot that is cut off.
    owner = torch.where(labels < 0, num_groups, labels).long().expand(batch, heads, -1)
    slots = num_groups + 1
    on_cpu = x.device.type == "cpu"
    sums = torch.zeros(batch * heads, slots, dim, device=x.device)
    sizes = torch.zeros(batch, heads, slots, dtype=torch.int64, device=x.device)
    sizes.scatter_add_(2, owner, torch.ones_like(owner))
    offset = torch.arange(batch * heads, device=x.device)[:, None] * slots
    chunk = max(1, _CHUNK_BYTES // (4 * batch * heads * (dim if on_cpu else max(dim, slots))))
    for begin in range(0, length, chunk):
        of = owner[..., begin : begin + chunk].flatten(0, 1)  # [B * H, n]
        part = x[:, :, begin : begin + chunk].float().flatten(0, 1)  # [B * H, n, D]
        part = part.masked_fill((of == num_groups)[..., None], 0.0)  # padding may hold NaN
        if on_cpu:
            sums.view(-1, dim).index_add_(0, (of + offset).flatten(), part.reshape(-1, dim))
        else:  # index_add_ adds with atomics there, in an order that changes from run to run
            one_hot = part.new_zeros(*of.shape, slots).scatter_(2, of[..., None], 1.0)
            sums += one_hot.mT @ part
    means = sums.view(batch, heads, slots, dim) / sizes[..., None].clamp(min=1)
    return means[:, :, :num_groups].to(x.dtype)


def _on_heads(x: Tensor, batch: int, heads: int) -> Tensor:
    """Return `x` [B|1, H|Hk|1, n] on the axes of the query heads."""
    if x.shape[1] not in (1, heads):
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
    return x.expand(batch, heads, -1)


def _log_weights(rows: KeyTokens, size: Tensor, num_keys: int) -> Tensor:
    """Return the log weight of each pool entry: a virtual key's group's size, 0 for real keys."""
    log_size = size.clamp(min=1).float().log().flatten(0, 1)  # [B * H, C]
    num_groups = log_size.shape[1]
    log_size = log_size.flatten()
    start = rows.start.flatten()
    weights = torch.zeros(rows.index.shape, device=rows.index.device)
    chunk = _CHUNK_BYTES // 8
    for begin in range(0, len(weights), chunk):
        part = torch.arange(begin, min(begin + chunk, len(weights)), device=start.device)
        # Rows lie one behind the other: an entry's row is the last one that begins before it.
        row = torch.searchsorted(start, part, right=True) - 1
        virtual = rows.index[part].long() - num_keys
        at = row // rows.num_rows * num_groups + virtual.clamp(min=0)
        weights[part] = torch.where(virtual >= 0, log_size[at], 0.0)
    return weights
