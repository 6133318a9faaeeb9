"""Sampling keys by independent trials: Poisson sampling and draws with replacement.

Both sample sizes are random. Trials fall on an axis on which every key has an interval, so that a
row costs O(clusters + trials), never O(keys), and are hashes of a counter, so that they depend on
no batch row and no generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.counter import uniform
from gossamer.group import Draw
from gossamer.select.sample import CERTAIN

_LIKELY = math.log(0.5)  # keys above are tried one by one: throws would hit them again and again
_MOST_THROWS = 4  # per key wanted; leaves at most exp(-4) = .018 of the keys unread
_NEWTON = 12
_THROW, _KEEP, _NUMBER = 0, 1, 2  # uses of random numbers within one row


@dataclass(frozen=True, eq=False)
class Trials:
    """What each row tries of each cluster.

    Attributes:
        taken: [B, H, R, C] int64, keys tried one by one: the whole cluster or none of it.
        log_keep: [B, H, R, C] float64, log probability with which a key of `taken` is kept.
        sizes: [B, H, 1 or R, C] int64, keys per cluster.
        unit: [B, H, R, C] float64, length on the axis of each key of the clusters not taken.
        count: [B, H, R] int64, points thrown at the axis; a key is read where one hits it.
        log_weight: [B, H, R, C] float64, log weight of a key that is read.
        repeats: Whether a key hit n times weighs n times as much.
        draw: What the random numbers are keyed by, beside head and row.
    """

    taken: Tensor
    log_keep: Tensor
    sizes: Tensor
    unit: Tensor
    count: Tensor
    log_weight: Tensor
    repeats: bool
    draw: Draw

    def throws(self, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        """Return where on the axis, in [0, 1) of it, the throws fall; arguments broadcast."""
        return _uniform(self.draw, _THROW, head, row, place)

    def keeps(self, head: Tensor, row: Tensor, place: Tensor, log_keep: Tensor) -> Tensor:
        """Return whether the keys tried one by one are kept."""
        return _uniform(self.draw, _KEEP, head, row, place) < log_keep.exp()


def poisson(log_pi: Tensor, sizes: Tensor, draw: Draw) -> Trials:
    """Prepare Poisson sampling: every key is read independently, with probability pi.

    Weighted sums are unbiased with variance sum(e^2 * (1 - pi) / pi). The number of keys is random,
    with mean sum(pi) and variance sum(pi * (1 - pi)): exponential tail bounds hold for it and for
    the sums. Keys above 1/2 are tried one by one. For the others, a Poisson number of points falls
    on an axis on which a key has length -log(1 - pi), so that none hits it with probability 1 - pi,
    independently of all others.

    Args:
        log_pi: [B, H, R, C] float64, log inclusion probability of each key of a cluster.
        sizes: [B, H, 1 or R, C] int64, keys per cluster.
        draw: What the random numbers are keyed by.
    """
    sizes = sizes.expand(log_pi.shape)
    log_pi = log_pi.masked_fill(log_pi >= CERTAIN, 0.0)
    singly = log_pi > _LIKELY
    unit = -torch.log1p(-log_pi.masked_fill(singly, -torch.inf).exp())
    return Trials(
        taken=torch.where(singly, sizes, 0),
        log_keep=log_pi.masked_fill(~singly, 0.0),
        sizes=sizes,
        unit=unit,
        count=_poisson_number((unit * sizes).sum(-1), draw),
        log_weight=(-log_pi).masked_fill(log_pi == -torch.inf, 0.0),
        repeats=False,
        draw=draw,
    )


def with_replacement(log_pi: Tensor, sizes: Tensor, draw: Draw) -> Trials:
    """Prepare draws with replacement: key j with probability p_j in each of m draws.

    p is proportional to pi over the keys that are not certain; a key drawn n times weighs
    n / (m * p). The m draws are independent, so weighted sums are unbiased with variance
    sum(e^2 / p) - (sum e)^2 over m, and Hoeffding's and Bernstein's bounds hold for them. m is the
    number of draws for which sum(pi) *distinct* keys are expected, at most 4 times as many: the
    distinct keys fall short by at most exp(-4) of the keys drawn from.

    Args:
        log_pi: [B, H, R, C] float64, log inclusion probability wanted of each key of a cluster; at
            0 the cluster is read in full.
        sizes: [B, H, 1 or R, C] int64, keys per cluster.
        draw: What the random numbers are keyed by.
    """
    sizes = sizes.expand(log_pi.shape)
    sure = log_pi >= CERTAIN
    pi = log_pi.exp().masked_fill(sure, 0.0)
    wanted = (pi * sizes).sum(-1)  # [B, H, R]
    p = pi / wanted.clamp(min=1e-300)[..., None]
    count = _number_of_draws(p, sizes, wanted)
    log_weight = -(count.double().log()[..., None] + p.log())
    return Trials(
        taken=torch.where(sure, sizes, 0),
        log_keep=torch.zeros_like(log_pi),
        sizes=sizes,
        unit=p,
        count=count,
        log_weight=log_weight.masked_fill(p == 0, 0.0),
        repeats=True,
        draw=draw,
    )


def expected_distinct(p: Tensor, sizes: Tensor, count: Tensor) -> Tensor:
    """Return how many distinct keys `count` draws with replacement are expected to hit.

    Args:
        p: [..., C] float64, probability of each key of a cluster in one draw.
        sizes: [..., C] int64, keys per cluster.
        count: [...] draws.
    """
    return (-torch.expm1(_log_miss(p) * count[..., None]) * sizes).sum(-1)


def _number_of_draws(p: Tensor, sizes: Tensor, wanted: Tensor) -> Tensor:
    """Return the draws [...] int64 that are expected to hit `wanted` distinct keys."""
    # The number of distinct keys is concave in the draws: Newton's steps approach from below.
    number = wanted
    log_miss = _log_miss(p)
    for _ in range(_NEWTON):
        slope = (-log_miss * torch.exp(log_miss * number[..., None]) * sizes).sum(-1)
        step = (wanted - expected_distinct(p, sizes, number)) / slope.clamp(min=1e-12)
        number = (number + step.clamp(min=0)).minimum(wanted * _MOST_THROWS)
    return (number - 1e-6).ceil().long()


def _log_miss(p: Tensor) -> Tensor:
    """Return the log probability that one draw misses a key; finite where p is 1."""
    return torch.log1p(-p).clamp(min=-700.0)


def _poisson_number(mean: Tensor, draw: Draw) -> Tensor:
    """Return a Poisson number [B, H, R] int64 for each mean, the same in every batch row.

    The inverse of the distribution function, by bisection: what lies outside the first bracket has
    less probability than one step of the 53 random bits.
    """
    _, heads, rows = mean.shape
    at = _uniform(draw, _NUMBER, draw.heads[:heads, None], torch.arange(rows, device=mean.device))
    spread = 10 * mean.sqrt() + 40
    low = (mean - spread).floor().clamp(min=0)
    high = (mean + spread).ceil()
    positive = mean.clamp(min=1e-300)
    for _ in range(24):  # 2 * spread < 2^24 up to means of 10^11
        middle = ((low + high) / 2).floor()
        reached = torch.special.gammaincc(middle + 1, positive) > at  # P(number <= middle)
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low.minimum(high).long().masked_fill(mean == 0, 0)


def _uniform(draw: Draw, use: int, head: Tensor, row: Tensor, place: int | Tensor = 0) -> Tensor:
    """Return the row's random numbers of one use; `head` is the global one."""
    keys = (draw.salt, draw.seed, draw.layer, draw.step, head, row, use, place)
    return uniform(*keys, device=row.device)
