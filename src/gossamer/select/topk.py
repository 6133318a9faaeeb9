"""Keeping the best: the top blocks of a row, or the top clusters up to a number of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.select.gpu import clustered as gpu


def top_blocks(scores: Tensor, count: Tensor, *, forced: Tensor | None = None) -> Tensor:
    """Return the mask of the highest-scored blocks of each row.

    Args:
        scores: [..., R, C]; -inf marks blocks that must not be chosen. Ties go to the lower index.
        count: [..., R] integer, blocks to keep, forced ones counted; clamped to those there are.
        forced: [..., R, C] bool, blocks kept before all others; None for none.

    Returns:
        [..., R, C] bool.
    """
    if forced is not None:
        scores = scores.masked_fill(forced, torch.inf)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return (rank < count[..., None]) & (scores > -torch.inf)


def take_clusters(scores: Tensor, sizes: Tensor, budget: Tensor, *, crossing: str) -> Tensor:
    """Take whole clusters by descending score until a budget of keys is spent.

    Args:
        scores: [..., R, C]; the sum over a cluster's keys, any monotone form.
        sizes: [..., 1 or R, C] int64, keys per cluster; empty clusters are never taken.
        budget: [..., 1 or R] int64, keys per row.
        crossing: What happens to the cluster that crosses the budget: "exclude" it, "include" it
            whole, or "cut" it to what is left.

    Returns:
        [..., R, C] int64, keys taken from each cluster: 0, its size or, where cut, fewer.
    """
    if scores.shape[-1] <= gpu.MOST_CLUSTERS and gpu.can_run(scores):
        return gpu.take_clusters(scores, sizes, budget, crossing)
    sizes = sizes.expand(scores.shape)
    scores = scores.masked_fill(sizes == 0, -torch.inf)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    sorted_size = sizes.gather(-1, order)
    end = sorted_size.cumsum(-1)
    before = end - sorted_size
    left = budget[..., None] - before
    if crossing == "exclude":
        taken = torch.where(end <= budget[..., None], sorted_size, 0)
    elif crossing == "include":
        taken = torch.where(left > 0, sorted_size, 0)
    else:
        taken = sorted_size.minimum(left.clamp(min=0))
    return torch.zeros_like(taken).scatter_(-1, order, taken)
