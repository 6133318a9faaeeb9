"""Clustering queries by how they see the keys, and keys by how the queries see them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group.kmeans import Clusters, Draw, kmeans
from gossamer.group.moments import cluster_means
from gossamer.group.pairs import Pairs, pair
from gossamer.group.tiles import sort_by_group

_CHUNK_BYTES = 64 << 20  # of the float32 tokens held at once


def co_cluster(
    q: Tensor, k: Tensor, call: Call, pairs: Pairs, scale: float, *, iterations: int
) -> Pairs:
    """Return `pairs` regrouped by profiles: queries first, then keys by the new query clusters.

    A token's profile is its vector of products with the other side's centroids, at unit length.
    Tokens whose profiles lie close together attend, or are attended, alike, however far apart they
    lie themselves. Profiles have as many numbers as the other side has clusters, but lie in D
    dimensions: their distances are those of A x / |A x| with A^T A = sum of c c^T over the other
    side's centroids. So the k-means is that of D-dimensional tokens.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        call: The call.
        pairs: Clusters by the tokens themselves, where the profiles' k-means starts.
        scale: Factor on the logits.
        iterations: k-means iterations on either side.
    """
    valid_q = call.key_valid if q.shape[2] == k.shape[2] else None
    heads = call.head_ids(q.shape[1], q.device)
    draw = Draw(call.seed, call.layer, call.step, heads, salt=0)
    keys, group = pairs.key_clusters, q.shape[1] // k.shape[1]
    metric = _metric(keys.centroids, keys.sizes)  # [B, Hk, D, D]
    of_query = metric.repeat_interleave(group, dim=1)
    queries = _regroup(q, pairs.queries, of_query, valid_q, draw, iterations)
    # A KV head is seen by all queries of its group.
    centroids, sizes = (x.unflatten(1, (-1, group)).flatten(2, 3) for x in _named(queries))
    draw = draw._replace(heads=call.kv_head_ids(q.shape[1], k.shape[1], k.device))
    keys = _regroup(k, keys, _metric(centroids, sizes), call.key_valid, draw, iterations)
    return pair(queries, keys, pairs.active_keys, call.key_valid, scale)


def _named(clusters: Clusters) -> tuple[Tensor, Tensor]:
    return clusters.centroids, clusters.sizes


def _metric(centroids: Tensor, sizes: Tensor) -> Tensor:
    """Return the symmetric A [B, H, D, D] with A A = sum of c c^T over clusters with tokens."""
    centroids = centroids.double().masked_fill((sizes == 0)[..., None], 0.0)
    values, vectors = torch.linalg.eigh(centroids.mT @ centroids)
    root = values.clamp(min=0).sqrt()
    return ((vectors * root[..., None, :]) @ vectors.mT).float()


def _regroup(
    x: Tensor,
    clusters: Clusters,
    metric: Tensor,
    valid: Tensor | None,
    draw: Draw,
    iterations: int,
) -> Clusters:
    """Cluster x [B, H, N, D] by its profiles, from given clusters; return clusters of x itself."""
    batch, heads, length, dim = x.shape
    if valid is not None:
        valid = valid.expand(batch, -1)
    profile = torch.empty_like(x, memory_format=torch.contiguous_format)
    chunk = max(1, _CHUNK_BYTES // (8 * batch * heads * dim))
    for begin in range(0, length, chunk):
        profile[:, :, begin : begin + chunk] = _unit(x[:, :, begin : begin + chunk], metric)
    # A cluster without tokens must not win any by the direction that it happens to have.
    init = _unit(clusters.centroids, metric).masked_fill((clusters.sizes == 0)[..., None], 1e4)
    num_clusters = init.shape[2]
    regrouped = kmeans(
        profile, num_clusters, draw=draw, valid=valid, init=init, iterations=iterations
    )
    means = cluster_means(x, sort_by_group(regrouped.labels, num_clusters, valid=valid))
    means = torch.where(regrouped.sizes[..., None] == 0, clusters.centroids, means)
    return replace(regrouped, centroids=means)


def _unit(x: Tensor, metric: Tensor) -> Tensor:
    """Return A x / |A x|; 0 where it has no length."""
    seen = x.float() @ metric
    return seen / seen.norm(dim=-1, keepdim=True).clamp(min=1e-20)
