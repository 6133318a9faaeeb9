"""Exact clusters and a systematic sample of all other keys, from scores to lists."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.counter import uniform as uniform_numbers
from gossamer.group.tiles import Sorted
from gossamer.plan import KeyTokens
from gossamer.select.gpu import clustered as gpu
from gossamer.select.lists import laid_out, list_draws
from gossamer.select.sample import (
    CERTAIN,
    inclusion_by_importance,
    inclusion_uniform,
    systematic,
)
from gossamer.select.topk import take_clusters

_PHASE_BITS = 2.0**32  # so that phase + i is exact in float64


def list_sampled(
    log_scores: Tensor,
    keys: Sorted,
    exact: Tensor,
    total: Tensor,
    phase: Tensor,
    *,
    uniform: bool,
    width: int,
) -> KeyTokens:
    """List the best clusters, whole and unweighted, and a weighted sample of all other keys.

    A row takes whole clusters by descending mass while they fit `exact`, the crossing one excluded.
    What they leave of `total` is sampled systematically from the rest, with probabilities
    proportional to the scores (InstaGen, eq. 4) or equal ones.

    Args:
        log_scores: [B, H, R, C] float32, log of one key's score in each cluster.
        keys: The keys sorted by cluster, over C clusters.
        exact: [B, H, 1] int64, keys of the exact set at most.
        total: [B, H, 1] int64, keys to read.
        phase: [B, H, R] float64 in [0, 1) with at most 32 random bits, as `row_phases` gives.
        uniform: Whether all sampled keys have one probability.
        width: Room for each row: an upper bound of `total`.

    Returns:
        The key rows, R per head, each entry weighted so that sums over it are unbiased.
    """
    shape = log_scores.shape
    if shape[-1] <= gpu.MOST_CLUSTERS and gpu.can_run(log_scores):
        listed = gpu.list_sampled(
            log_scores,
            keys,
            exact,
            total,
            phase,
            uniform=uniform,
            certain=CERTAIN,
            width=width,
        )
        return laid_out(shape[:3], width, *listed)
    sizes = keys.size[:, :, None]  # [B, H, 1, C]
    taken = take_clusters(log_scores + sizes.double().log(), sizes, exact, crossing="exclude")
    num_exact = taken.sum(-1)  # [B, H, R]
    to_draw = (total - num_exact).clamp(min=0).minimum(sizes.sum(-1) - num_exact)
    certain = (taken > 0) | (sizes == 0)
    if uniform:
        log_pi = inclusion_uniform(sizes, certain, to_draw)
    else:
        log_pi = inclusion_by_importance(log_scores, sizes, certain, to_draw)
    return list_draws(systematic(log_pi, sizes, phase), keys, width=width)


def row_phases(
    salt: int, call: Call, num_heads: int, num_rows: int, device: torch.device
) -> Tensor:
    """Return where the first threshold of each row stands, [H, R] float64 in [0, 1).

    A hash of salt, seed, layer, step, global head and row, with 32 random bits.

    Args:
        salt: Tells uses of one call apart.
        call: The call.
        num_heads: H.
        num_rows: R.
        device: Where the result lies.
    """
    head = call.head_ids(num_heads, device)
    shared = (salt, call.seed, call.layer, call.step)
    if gpu.can_run(head):
        return gpu.row_phases(shared, head, num_rows)
    row = torch.arange(num_rows, device=device)
    phase = uniform_numbers(*shared, head[:, None], row, device=device)
    return (phase * _PHASE_BITS).floor() / _PHASE_BITS
