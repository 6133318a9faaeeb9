"""Means and variances of clusters, summed in an order that does not change from run to run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.group.tiles import Sorted

_CHUNK_BYTES = 64 << 20  # of the float32 tokens held at once


def cluster_means(x: Tensor, ordered: Sorted) -> Tensor:
    """Return the mean of each cluster's tokens, [B, H, C, D] float32; 0 for empty ones.

    Args:
        x: [B, H, S, D] tokens, any floating dtype; those left out of `ordered` may hold NaN.
        ordered: The tokens sorted by cluster, [B, H, …].
    """
    return _averages(x, ordered, None)


def cluster_variances(x: Tensor, ordered: Sorted, means: Tensor) -> Tensor:
    """Return the variance of each cluster's tokens along each axis, [B, H, C, D] float32.

    Args:
        x: [B, H, S, D] tokens, as in `cluster_means`.
        ordered: The tokens sorted by cluster, [B, H, …].
        means: [B, H, C, D] float32; deviations from them are summed, so that nothing cancels.
    """
    dim = x.shape[3]

    def square(token: Tensor, label: Tensor) -> Tensor:
        mean = means.gather(2, label[..., None].expand(-1, -1, -1, dim))
        return (token - mean).square()

    return _averages(x, ordered, square)


def _averages(x: Tensor, ordered: Sorted, of: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
    """Average `of(tokens, labels)`, or the tokens, over each cluster, in pieces of bounded size."""
    batch, heads, length, dim = x.shape
    num_clusters = ordered.size.shape[2]
    sums = torch.zeros(batch * heads, num_clusters, dim, device=x.device)
    chunk = max(1, _CHUNK_BYTES // (8 * batch * heads * dim))
    for begin in range(0, length, chunk):
        index = ordered.order[..., begin : begin + chunk]  # [B, H, n]
        token = x.gather(2, index[..., None].expand(-1, -1, -1, dim)).float()
        if of is not None:
            label = place_labels(ordered, begin, index.shape[2])
            token = of(token, label.clamp(max=num_clusters - 1))
        lengths = segment_lengths(ordered, begin, index.shape[2])
        sums += segment_reduce(token.view(-1, dim), "sum", lengths)[:, :num_clusters]
    return sums.view(batch, heads, num_clusters, dim) / ordered.size[..., None].clamp(min=1)


def place_labels(ordered: Sorted, begin: int, number: int) -> Tensor:
    """Return the cluster [B, H, number] of the sorted places from `begin` on; C behind all."""
    end = (ordered.start + ordered.size).contiguous()
    places = torch.arange(begin, begin + number, device=end.device)
    return torch.searchsorted(end, places.expand(*end.shape[:2], -1).contiguous(), right=True)


def segment_lengths(ordered: Sorted, begin: int, number: int) -> Tensor:
    """Return how many of `number` sorted places from `begin` on each cluster holds.

    Returns:
        [B * H, C + 1] int64 that adds up to `number` in each line; the last are the places behind
        all clusters.
    """
    low = ordered.start.clamp(min=begin)
    high = (ordered.start + ordered.size).clamp(max=begin + number)
    inside = (high - low).clamp(min=0).flatten(0, 1)
    return torch.cat([inside, number - inside.sum(-1, keepdim=True)], dim=-1)


def segment_reduce(value: Tensor, reduce: str, lengths: Tensor) -> Tensor:
    """Reduce consecutive places to segments.

    Args:
        value: [G * n, X], n places of each of G lines.
        reduce: "sum" or "max".
        lengths: [G, C] int64 that adds up to n in each line.

    Returns:
        [G, C, X]; 0 ("sum") or -inf ("max") for segments without places.
    """
    initial = 0.0 if reduce == "sum" else -torch.inf
    reduced = torch.segment_reduce(
        value, reduce, lengths=lengths.flatten(), axis=0, unsafe=True, initial=initial
    )
    return reduced.view(*lengths.shape, -1)
