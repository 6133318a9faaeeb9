"""Scores of cluster pairs beyond the logit of their centroids."""

from __future__ import annotations

from torch import Tensor

from gossamer.group import Pairs, Sorted
from gossamer.group.moments import cluster_variances


def second_order_scores(k: Tensor, pairs: Pairs, scale: float) -> Tensor:
    """Estimate log mean exp of a query centroid's logits with a cluster's keys.

    For logits of mean m and variance s^2 it is m + s^2 / 2 to second order (exactly so for a normal
    distribution). The variance is taken from the diagonal of the cluster's covariance. No n numbers
    have a log mean exp more than s * sqrt(n - 1) above their mean (Samuelson's inequality), which
    bounds the correction where the cluster is far from normal.

    Args:
        k: [B, Hk, S, D] keys.
        pairs: Their clusters, and those of the queries.
        scale: Factor on the logits.

    Returns:
        [B, H, C_q, C_k] float32.
    """
    kv_heads = k.shape[1]
    group = pairs.keys.order.shape[1] // kv_heads
    ordered = Sorted(*(x[:, ::group] for x in pairs.keys))  # the KV heads' own
    variance = cluster_variances(k, ordered, pairs.key_clusters.centroids)  # [B, Hk, C_k, D]
    queries = pairs.queries.centroids.unflatten(1, (kv_heads, group)) * scale
    spread = (queries.square() @ variance[:, :, None].mT).flatten(1, 2)  # [B, H, C_q, C_k]
    others = (pairs.keys.size[:, :, None] - 1).clamp(min=0)
    return pairs.log_scores + (spread / 2).minimum((spread * others).sqrt())
