"""Clustering the queries and the keys of one call, and scoring the clusters against each other."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group.kmeans import Clusters, Draw, kmeans
from gossamer.group.tiles import Sorted, sort_by_group

# Tokens per cluster where the number of clusters is not given (DESIGN.md, "Text and padding").
QUERIES_PER_CLUSTER = 128
KEYS_PER_CLUSTER = 32


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How queries and keys are clustered.

    Attributes:
        query_clusters: C_q; None for one per 128 valid queries.
        key_clusters: C_k; None for one per 32 valid keys.
        iterations: k-means iterations from a cold start.
        warm_iterations: k-means iterations from the previous step's centroids.
    """

    query_clusters: int | None
    key_clusters: int | None
    iterations: int
    warm_iterations: int


class Pairs(NamedTuple):
    """Clustered queries and keys of one call.

    Attributes:
        queries: Query clusters [B, H, C_q].
        keys: Key clusters expanded to the query heads, sorted: [B, H, …] over C_k clusters.
        log_scores: [B, H, C_q, C_k] float32, logit of the centroids: scale * q.k.
        active_keys: [B] int64, key clusters in use; None for all C_k.
        key_clusters: The key clusters as they are, per KV head: [B, Hk, …].
    """

    queries: Clusters
    keys: Sorted
    log_scores: Tensor
    active_keys: Tensor | None
    key_clusters: Clusters


def cluster_pairs(
    q: Tensor,
    k: Tensor,
    call: Call,
    scale: float,
    settings: ClusterSettings,
    state: MutableMapping[str, Tensor] | None,
) -> Pairs:
    """Cluster queries and keys by k-means and score every pair of centroids.

    Args:
        q: [B, H, N, D] queries, after positional encoding.
        k: [B, Hk, S, D] keys.
        call: The call; its key_valid marks the padded keys (and, where N = S, queries).
        scale: Factor on the logits.
        settings: Numbers of clusters and iterations.
        state: Centroids of the previous step, read and replaced; None starts cold and keeps none.
    """
    queries = cluster_queries(q, k.shape[2], call, settings, state)
    heads = call.kv_head_ids(q.shape[1], k.shape[1], k.device)
    draw = Draw(call.seed, call.layer, call.step, heads, salt=1)
    keys, active = _cluster(k, call.key_valid, draw, settings, state)
    return pair(queries, keys, active, call.key_valid, scale)


def cluster_queries(
    q: Tensor,
    num_keys: int,
    call: Call,
    settings: ClusterSettings,
    state: MutableMapping[str, Tensor] | None,
) -> Clusters:
    """Cluster the queries alone; arguments as `cluster_pairs`."""
    valid = call.key_valid if q.shape[2] == num_keys else None
    draw = Draw(call.seed, call.layer, call.step, call.head_ids(q.shape[1], q.device), salt=0)
    return _cluster(q, valid, draw, settings, state)[0]


def pair(
    queries: Clusters, keys: Clusters, active: Tensor | None, valid: Tensor | None, scale: float
) -> Pairs:
    """Sort the keys by cluster and score every pair of centroids.

    Args:
        queries: Query clusters, [B, H, …].
        keys: Key clusters, [B, Hk, …].
        active: [B] int64, key clusters in use; None for all.
        valid: [B, S] bool, keys that count; None for all.
        scale: Factor on the logits.
    """
    heads, kv_heads = queries.labels.shape[1], keys.labels.shape[1]
    group = heads // kv_heads
    of_head = torch.arange(heads, device=keys.labels.device) // group
    ordered = sort_by_group(keys.labels, keys.sizes.shape[2], valid=valid)
    ordered = Sorted(*(x[:, of_head] if group > 1 else x for x in ordered))
    grouped = queries.centroids.unflatten(1, (kv_heads, group))  # [B, Hk, G, C_q, D]
    log_scores = (grouped @ keys.centroids[:, :, None].mT).flatten(1, 2) * scale
    return Pairs(queries, ordered, log_scores, active, keys)


def _cluster(
    x: Tensor,
    valid: Tensor | None,
    draw: Draw,
    settings: ClusterSettings,
    state: MutableMapping[str, Tensor] | None,
) -> tuple[Clusters, Tensor | None]:
    """Cluster one side, warm where the state fits; return the clusters and those in use."""
    length, is_key = x.shape[2], draw.salt == 1
    asked = settings.key_clusters if is_key else settings.query_clusters
    per_cluster = KEYS_PER_CLUSTER if is_key else QUERIES_PER_CLUSTER
    number = -(-length // per_cluster) if asked is None else min(asked, length)
    number = max(number, 1)
    active = None
    if valid is not None:
        valid = valid.expand(x.shape[0], -1)
        tokens = valid.sum(-1)
        active = -(-tokens // per_cluster) if asked is None else tokens.clamp(max=number)
        active = active.clamp(min=1)
    name = "key_centroids" if is_key else "query_centroids"
    warm = None if state is None else state.get(name)
    shape = (*x.shape[:2], number, x.shape[3])
    if warm is not None and (warm.shape != shape or warm.device != x.device):
        warm = None  # another resolution or batch: these centroids are of other tokens
    clusters = kmeans(
        x,
        number,
        draw=draw,
        valid=valid,
        active=active,
        init=warm,
        iterations=settings.iterations if warm is None else settings.warm_iterations,
    )
    if state is not None:
        state[name] = clusters.centroids
    return clusters, active
