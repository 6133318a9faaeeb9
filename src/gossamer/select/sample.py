"""Sampling keys with exact inclusion probabilities, group by group.

Sampling is decided for clusters, whose keys share one probability, and resolved to keys by a closed
form, so that it costs O(clusters + keys drawn) a row, never O(keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# At least this much probability is certainty: 1 - 1e-9 would be left out once in 1e9 draws, while
# two successive thresholds less than one fp64 rounding apart could meet in the same key.
CERTAIN = -1e-9


def inclusion_by_importance(
    log_score: Tensor, sizes: Tensor, certain: Tensor, budget: Tensor
) -> Tensor:
    """Return log inclusion probabilities proportional to the scores: pi = min(1, lambda * s).

    The exact solution of sum(pi) = budget over the clusters that are not certain already (InstaGen,
    eq. 4), in float64 logs throughout: a spread of 40 between logits must not zero half of them.

    Args:
        log_score: [..., R, C] log of one key's score s in each cluster.
        sizes: [..., 1 or R, C] int64, keys per cluster.
        certain: [..., R, C] bool, clusters read in full in any case; they pay nothing here.
        budget: [..., R] int64, keys to draw, at most the keys of the uncertain clusters.

    Returns:
        [..., R, C] float64: 0 for certain and promoted clusters, -inf for empty ones and where
        nothing is drawn.
    """
    sizes = sizes.expand(log_score.shape)
    drawn_from = ~certain & (sizes > 0)
    score = log_score.double().masked_fill(~drawn_from, -torch.inf)
    score, order = score.sort(dim=-1, descending=True, stable=True)
    size = torch.where(drawn_from, sizes, 0).gather(-1, order)
    before = size.cumsum(-1) - size
    log_mass = size.double().log() + score
    suffix = log_mass.flip(-1).logcumsumexp(-1).flip(-1)
    # lambda if every cluster before this one has pi = 1; the first one that needs no cap is it.
    left = (budget[..., None] - before).clamp(min=0)
    log_lambda = left.double().log() - suffix
    # One that holds all that is left needs none, whatever rounding says: behind it lambda is 0.
    uncapped = (log_lambda + score <= 0) | (left <= size)
    first = uncapped.byte().argmax(-1, keepdim=True)
    log_lambda = log_lambda.gather(-1, first)
    found = uncapped.any(-1, keepdim=True)  # none: the budget covers every cluster
    log_pi = torch.where(found, (log_lambda + score).clamp(max=0.0), 0.0)
    log_pi = log_pi.masked_fill(size == 0, -torch.inf)
    log_pi = torch.empty_like(log_pi).scatter_(-1, order, log_pi)
    return log_pi.masked_fill(certain & (sizes > 0), 0.0)


def inclusion_uniform(sizes: Tensor, certain: Tensor, budget: Tensor) -> Tensor:
    """Return equal log inclusion probabilities: pi = budget / keys of the uncertain clusters.

    Args:
        sizes: [..., 1 or R, C] int64, keys per cluster.
        certain: [..., R, C] bool, clusters read in full in any case.
        budget: [..., R] int64, keys to draw.

    Returns:
        [..., R, C] float64, as `inclusion_by_importance`.
    """
    sizes = sizes.expand(certain.shape)
    rest = torch.where(certain, 0, sizes).sum(-1)
    log_pi = (budget.double().log() - rest.clamp(min=1).double().log()).clamp(max=0.0)
    log_pi = log_pi[..., None].expand(certain.shape).masked_fill(sizes == 0, -torch.inf)
    return log_pi.masked_fill(certain & (sizes > 0), 0.0)


@dataclass(frozen=True, eq=False)
class Draws:
    """What a row reads of each cluster.

    Attributes:
        taken: [..., R, C] int64, keys read for certain: the whole cluster or none of it.
        log_pi: [..., R, C] float64, log inclusion probability of each key; 0 where taken.
        offset: [..., R, C] float64, sum of pi over the uncertain keys in front of each cluster.
        count: [..., R] int64, keys drawn from the uncertain clusters.
        phase: [..., R] float64 in [0, 1), where the first threshold stands.
    """

    taken: Tensor
    log_pi: Tensor
    offset: Tensor
    count: Tensor
    phase: Tensor


def systematic(log_pi: Tensor, sizes: Tensor, phase: Tensor) -> Draws:
    """Prepare systematic sampling: key j is read where the running sum of pi crosses phase + i.

    Every key is read with probability exactly pi_j over a uniform phase (Madow 1949), and the
    number of keys is exactly sum(pi), an integer.

    Args:
        log_pi: [..., R, C] float64 log inclusion probability of each key of a cluster.
        sizes: [..., 1 or R, C] int64, keys per cluster.
        phase: [..., R] float64 in [0, 1) with at most 32 random bits, so that phase + i is exact.
    """
    sizes = sizes.expand(log_pi.shape)
    sure = log_pi >= CERTAIN
    taken = torch.where(sure, sizes, 0)
    log_pi = log_pi.masked_fill(sure, 0.0)
    mass = torch.where(sure, 0.0, log_pi.exp() * sizes)
    end = mass.cumsum(-1)
    count = end[..., -1].round().long()
    # The exact total is an integer; rounding of the running sum must not lose the last key.
    end = end * (count / end[..., -1].clamp(min=1e-300))[..., None]
    last = end.amax(-1, keepdim=True)
    end = torch.where(end >= last, count[..., None].double(), end)
    offset = torch.nn.functional.pad(end[..., :-1], (1, 0))
    return Draws(taken, log_pi, offset, count, phase)
