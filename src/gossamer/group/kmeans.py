"""Batched k-means over the tokens of every (batch row, head) at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.counter import uniform
from gossamer.group.gpu import kmeans as gpu
from gossamer.group.gpu.available import runs_triton

_CHUNK_BYTES = 64 << 20  # of the float32 distances held at once


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Groups of tokens that lie close together.

    Attributes:
        centroids: [B, H, C, D] float32, the mean of each cluster's valid tokens; an empty cluster
            keeps the centroid it had.
        labels: [B, H, N] int64, the cluster of each token. Padded tokens get the nearest one, but
            count nowhere.
        sizes: [B, H, C] int64, valid tokens per cluster; 0 for empty and for inactive clusters.
    """

    centroids: Tensor
    labels: Tensor
    sizes: Tensor


class Draw(NamedTuple):
    """What the initial centroids' random numbers are keyed by.

    Attributes:
        seed: The call's seed.
        layer: Index of the layer.
        step: Index of the denoising step.
        heads: [H] int64, global index of each head; what lies behind those clustered is not used.
        salt: Tells uses within one call apart (queries, keys).
    """

    seed: int
    layer: int
    step: int
    heads: Tensor
    salt: int


def kmeans(
    x: Tensor,
    num_clusters: int,
    *,
    draw: Draw,
    valid: Tensor | None = None,
    active: Tensor | None = None,
    init: Tensor | None = None,
    iterations: int = 10,
    tolerance: float = 1e-4,
) -> Clusters:
    """Cluster tokens by Euclidean distance (Lloyd's algorithm).

    On a GPU with Triton, kernels of our own run (`group/gpu`). They compare with centroids rounded
    to the tokens' dtype, so a label may be that of a neighbour as near within that rounding.

    Args:
        x: [B, H, N, D] tokens, any floating dtype; distances and sums are float32.
        num_clusters: C, clusters per head, at least 1.
        draw: Key of the random initial centroids.
        valid: [B, N] bool, tokens that count; None for all.
        active: [B] int64, clusters in use per batch row, at most C; None for all.
        init: [B, H, C, D] float32 centroids to start from; None draws one token from each of C
            equal strata of the valid tokens.
        iterations: Assignments, at least 1, each followed by an update.
        tolerance: A head whose centroids all move less than this stops there.

    Returns:
        The clusters. Labels are those of the last assignment and centroids the means under these
        labels, so a cluster's centroid is always the mean of its members.
    """
    batch, heads, _, dim = x.shape
    device = x.device
    in_use = None
    if active is not None:
        in_use = torch.arange(num_clusters, device=device) < active[:, None]  # [B, C]
    if init is None:
        init = _initial(x, num_clusters, draw=draw, valid=valid, active=active)
    if runs_triton(x) and gpu.takes(x):
        centroids, labels, sizes = gpu.lloyd(
            x, init, valid=valid, active=active, iterations=iterations, tolerance=tolerance
        )
        return Clusters(centroids=centroids, labels=labels, sizes=sizes)
    centroids = init
    frozen = torch.zeros(batch, heads, 1, 1, dtype=torch.bool, device=device)
    labels = torch.empty(x.shape[:3], dtype=torch.int64, device=device)
    sizes = torch.zeros(batch, heads, num_clusters, dtype=torch.int64, device=device)
    counted = torch.ones_like(labels) if valid is None else valid[:, None].expand_as(labels).long()
    chunks = _chunks(x, num_clusters, valid)
    for _ in range(iterations):
        sums = _assign(chunks, centroids, in_use=in_use, labels=labels)
        sizes = torch.zeros_like(sizes).scatter_add_(2, labels, counted)
        means = sums.view(batch, heads, num_clusters, dim) / sizes[..., None].clamp(min=1)
        means = torch.where((sizes[..., None] == 0) | frozen, centroids, means)
        shift = (means - centroids).norm(dim=-1).amax(dim=-1)[..., None, None]
        centroids, frozen = means, frozen | (shift < tolerance)
        # Reading the flag would synchronise an accelerator: there all iterations are queued.
        if device.type == "cpu" and bool(frozen.all()):
            break
    return Clusters(centroids=centroids, labels=labels, sizes=sizes)


def _initial(
    x: Tensor, num_clusters: int, *, draw: Draw, valid: Tensor | None, active: Tensor | None
) -> Tensor:
    """Draw one valid token from each of C equal strata: [B, H, C, D] float32."""
    batch, heads, length, dim = x.shape
    device = x.device
    cluster = torch.arange(num_clusters, device=device)
    head = draw.heads[:heads, None]
    at = uniform(draw.salt, draw.seed, draw.layer, draw.step, head, cluster, device=device)
    strata = num_clusters if active is None else active.clamp(min=1)[:, None, None]
    share = (cluster + at) / strata  # [H, C] or [B, H, C], of the valid tokens
    if valid is None:
        token = (share * length).long().clamp(max=length - 1).expand(batch, heads, -1)
        return x.gather(2, token[..., None].expand(-1, -1, -1, dim)).float()
    tokens = valid.sum(-1)[:, None, None]
    rank = (share * tokens).long().minimum((tokens - 1).clamp(min=0))
    by_rank = torch.argsort((~valid).byte(), dim=-1, stable=True)  # valid tokens first
    token = by_rank[:, None].expand(-1, heads, -1).gather(2, rank)
    chosen = x.gather(2, token[..., None].expand(-1, -1, -1, dim)).float()
    # A batch row without any valid token must not start from its padding.
    return chosen.masked_fill(tokens[..., None] == 0, 0.0)


def _chunks(x: Tensor, num_clusters: int, valid: Tensor | None) -> Iterable[tuple[int, Tensor]]:
    """Return tokens in pieces of bounded size: where each begins, and [B * H, n, D] float32.

    Tokens that fit one piece are converted once for all iterations, others anew in each.
    """
    batch, heads, length, dim = x.shape
    chunk = max(1, _CHUNK_BYTES // (4 * batch * heads * max(num_clusters, dim)))

    def piece(begin: int) -> Tensor:
        part = x[:, :, begin : begin + chunk].float()
        if valid is not None:  # padding may hold NaN, which no zero weight takes away
            part = part.masked_fill(~valid[:, None, begin : begin + chunk, None], 0.0)
        return part.flatten(0, 1)

    if chunk >= length:
        return [(0, piece(0))]
    return _Again(lambda: ((begin, piece(begin)) for begin in range(0, length, chunk)))


@dataclass(frozen=True)
class _Again:
    """An iterable that starts anew each time."""

    start: Callable[[], Iterator[tuple[int, Tensor]]]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return self.start()


def _assign(
    chunks: Iterable[tuple[int, Tensor]],
    centroids: Tensor,
    *,
    in_use: Tensor | None,
    labels: Tensor,
) -> Tensor:
    """Write each token's nearest centroid into `labels`; return sums [B * H * C, D] by cluster."""
    batch, heads, num_clusters, dim = centroids.shape
    # argmin |x - c|^2 = argmax x.c - |c|^2 / 2, one matrix product.
    bias = centroids.square().sum(-1)[..., None, :] * -0.5  # [B, H, 1, C]
    if in_use is not None:
        bias = bias.masked_fill(~in_use[:, None, None], -torch.inf)
    bias, by_dim = bias.flatten(0, 1), centroids.flatten(0, 1).mT
    sums = centroids.new_zeros(batch * heads * num_clusters, dim)
    for begin, part in chunks:
        nearest = torch.baddbmm(bias, part, by_dim).max(-1).indices  # [B * H, n]
        labels[:, :, begin : begin + part.shape[1]] = nearest.view(batch, heads, -1)
        sums += _sum_by_label(part, nearest, num_clusters)
    return sums


def _sum_by_label(x: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """Sum x [G, n, D] by labels [G, n] into [G * C, D], in a fixed order of addition."""
    groups, _, dim = x.shape
    if x.device.type == "cpu":
        offset = torch.arange(groups, device=x.device)[:, None] * num_clusters
        sums = x.new_zeros(groups * num_clusters, dim)
        return sums.index_add_(0, (labels + offset).flatten(), x.reshape(-1, dim))
    # index_add_ adds with atomics there, in an order that changes from run to run.
    one_hot = x.new_zeros(groups, labels.shape[1], num_clusters).scatter_(2, labels[..., None], 1.0)
    return (one_hot.mT @ x).view(-1, dim)
