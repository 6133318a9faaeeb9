"""How much the weighted values change where a cluster of keys is replaced by its centroid."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.group import Pairs, Sorted
from gossamer.group.moments import cluster_means, place_labels, segment_lengths, segment_reduce

_CHUNK_BYTES = 16 << 20  # of one of the float32 [keys, rows] pieces, about eight at once


def log_replacement_error(k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> Tensor:
    """Return log of sum_j |exp(l_gj) v_j - exp(l_gc) v_c|^2 over the keys j of each cluster c.

    l_gj is the logit of query centroid g with key j, l_gc with the key centroid, and v_c the mean
    of the values. With d = l_gj - l_gc and u = v_j - v_c, a term is exp(2 l_gc) times

        |a u + (a - b) v_c|^2 exp(2 max(d, 0)),    a = exp(min(d, 0)), b = exp(-max(d, 0)),

    in which nothing overflows and nothing cancels where key and value lie close to their means.
    Logarithms are summed, so that a spread of logits loses no pair. Keys are streamed in pieces of
    bounded size, in sorted order, and summed in an order that does not change from run to run.

    Args:
        k: [B, Hk, S, D] keys; padded ones, which no cluster counts, may hold NaN.
        v: [B, Hk, S, D] values.
        pairs: The clusters.
        scale: Factor on the logits.

    Returns:
        [B, H, C_q, C_k] float32; -inf where nothing is lost (one key, or none).
    """
    batch, kv_heads, length, dim = k.shape
    heads, rows, num_clusters = pairs.log_scores.shape[1:]
    group = heads // kv_heads
    ordered = Sorted(*(x[:, ::group] for x in pairs.keys))  # the KV heads' own
    means = cluster_means(v, ordered)  # [B, Hk, C, D]
    queries = pairs.queries.centroids.unflatten(1, (kv_heads, group)).flatten(2, 3) * scale
    logits = pairs.log_scores.unflatten(1, (kv_heads, group)).flatten(2, 3).mT  # [B, Hk, C, G * R]
    total = logits.new_full((batch * kv_heads, num_clusters, group * rows), -torch.inf)
    chunk = max(1, _CHUNK_BYTES // (4 * batch * kv_heads * max(group * rows, dim)))
    for begin in range(0, length, chunk):
        index = ordered.order[..., begin : begin + chunk]  # [B, Hk, n]
        place = place_labels(ordered, begin, index.shape[2])
        label = place.clamp(max=num_clusters - 1)[..., None]
        index = index[..., None].expand(-1, -1, -1, dim)
        mean = means.gather(2, label.expand(-1, -1, -1, dim))
        apart = v.gather(2, index).float() - mean  # [B, Hk, n, D]
        d = k.gather(2, index).float() @ queries.mT  # [B, Hk, n, G * R]
        d = d - logits.gather(2, label.expand(-1, -1, -1, group * rows))
        a = d.clamp(max=0).exp()
        a_less_b = d.sign() * -torch.expm1(-d.abs())
        square = a.square() * apart.square().sum(-1, keepdim=True)
        square = square + 2 * a * a_less_b * (apart * mean).sum(-1, keepdim=True)
        square = square + a_less_b.square() * mean.square().sum(-1, keepdim=True)
        term = (2 * d.clamp(min=0) + square.clamp(min=0).log()).flatten(0, 1)  # [B * Hk, n, G * R]
        lengths = segment_lengths(ordered, begin, place.shape[2])
        greatest = segment_reduce(term.flatten(0, 1), "max", lengths)  # [B * Hk, C + 1, G * R]
        greatest = greatest.masked_fill(greatest == -torch.inf, 0.0)
        at = place.flatten(0, 1)[..., None].expand_as(term)
        share = (term - greatest.gather(1, at)).exp().flatten(0, 1)
        piece = segment_reduce(share, "sum", lengths).log() + greatest
        total = torch.logaddexp(total, piece[:, :num_clusters])
    total = total.view(batch, kv_heads, num_clusters, -1) + 2 * logits
    total = total.mT.unflatten(2, (group, rows)).flatten(1, 2)  # [B, H, C_q, C_k]
    # Rounding leaves a cluster of one key a trace of error.
    return total.masked_fill(pairs.keys.size[:, :, None] <= 1, -torch.inf)
