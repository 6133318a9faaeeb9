"""InstaGen: an exact set of keys plus a weighted sample of the rest, shared by a query cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group import Draw, Pairs
from gossamer.group.cocluster import co_cluster
from gossamer.methods.base import State, logit_scale
from gossamer.methods.clustered import ClusteredMethod
from gossamer.methods.params import check_share
from gossamer.methods.registry import register
from gossamer.plan import KeyTokens
from gossamer.select import (
    inclusion_by_importance,
    list_keys,
    list_sampled,
    row_phases,
    take_clusters,
)
from gossamer.select.lists import list_trials
from gossamer.select.scores import second_order_scores
from gossamer.select.trials import poisson, with_replacement

_SAMPLERS = ("importance", "uniform", "poisson", "replacement")
_RANDOM_SIZE = ("poisson", "replacement")
_SCORERS = ("svg2", "svoo", "variance")
_PHASE_SALT = 2  # apart from the salts of the two clusterings
_SHARES = (0.08, 0.08)  # exact and sampled, the paper's main setting (8+8%)
_ROUNDING = 1e-9  # of sums of shares


@register
@dataclass(frozen=True, kw_only=True)
class InstaGen(ClusteredMethod):
    """Read the best key clusters exactly and an unbiased sample of all other keys.

    Queries and keys are clustered as in SVG2. For query cluster g the exact set E takes whole
    clusters by descending estimated mass while it fits `exact`; from the residual R, m_S keys are
    sampled and read with a weight. Numerator and denominator of the softmax are unbiased for every
    query of the group (InstaGen, section 3.2), whatever the scores. The random numbers are hashes
    of (seed, layer, step, global head, group): not of the batch row nor of the guidance branch, so
    that errors of the two passes cancel in their difference. A row costs O(clusters + keys read).

    Samplers, with target probabilities pi_j = min(1, lambda * s_gc), sum(pi) = m_S (eq. 4):

    * `importance`: systematic sampling without replacement (PPS), one phase a row. Key j is read
      with probability exactly pi_j and weight 1/pi_j. The number of keys per row is exact: what
      whole clusters leave of the exact budget goes to the sample. No simple bound on the variance.
    * `uniform`: the same with pi = m_S / |R|.
    * `poisson`: every key is read independently with probability pi_j and weight 1/pi_j. The
      variance is known, sum(e^2 (1 - pi) / pi), and exponential tail bounds hold. The budget is met
      in expectation: a row's number of keys has variance sum(pi (1 - pi)) <= m_S, so its share of
      the keys a standard deviation of at most sqrt(m_S) / S. Where E is empty, one cluster is read
      exactly (the best that fits the whole budget, else the smallest), so that no row is empty.
    * `replacement`: m independent draws with probability p_j proportional to pi_j, a key drawn n
      times read once with weight n / (m p_j). Bernstein's and Hoeffding's bounds hold, the easiest
      to analyse. Clusters with pi = 1 are read in full, all keys where m_S >= |R|. m is what makes
      the *distinct* keys m_S in expectation, at most 4 m_S: their share falls short by at most
      exp(-4) = .018, and by nothing measurable below half density. Their standard deviation is
      below that of `poisson`.

    The last two have rows of random size and read the greatest, which is one synchronisation;
    nothing is cut off. Where less than one key remains for their sample, one is drawn.

    Scorers, which give log s_gc (they decide the variance and the exact set, never the mean):

    * `svg2`: the logit of the two centroids.
    * `variance`: the second-order estimate of log mean exp of the query centroid's logits with the
      cluster's keys: adds half their variance, from the diagonal of the cluster's covariance.
    * `svoo`: centroid logits after co-clustering (SVOO, arXiv 2603.18636): k-means as in SVG2, then
      queries are regrouped by their products with the key centroids, and keys by theirs with the
      new query centroids, `warm_iterations` each. Its clusters are 256 and 1024. What else SVOO has
      is not a scorer: its offline profile of the density that covers .95 of the mass, per layer and
      head, is a recipe's budget, and keeping clusters for 20 steps a recipe's reuse.

    Attributes:
        density: exact + sampled; what is not given of the two is half of it, or what is left.
        exact: Budget of the exact set as a share of the keys (rho_E).
        sampled: Budget of the sample as a share of the keys (rho_S); with `exact` at most 1. At 0
            this is top-k, and the cluster that crosses the budget is read whole (cut to fit where a
            density is asked). Without a density, what is not given of the two is 0.08, or what the
            other leaves of 1 where that is less.
        sampler: "importance", "uniform", "poisson" or "replacement".
        scorer: "svg2", "svoo" or "variance".
        query_clusters: C_q (paper: 100 or 300); None for one per 128 queries.
        key_clusters: C_k (paper: 500 or 1000); None for one per 32 keys.

    Other parameters:
        iterations: k-means iterations of a cold start (paper: 50; 10 measured as good).
        warm_iterations: k-means iterations from the previous step's centroids.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "instagen"
    paper: ClassVar[str] = "InstaGen: Group-Shared Importance Sampling for Fast Video Generation"

    exact: float | None = None
    sampled: float | None = None
    sampler: str = "importance"
    scorer: str = "svg2"

    def __post_init__(self) -> None:
        """Resolve the shares and refuse values out of range."""
        super().__post_init__()
        for name, allowed in (("sampler", _SAMPLERS), ("scorer", _SCORERS)):
            value = getattr(self, name)
            if value not in allowed:
                raise PlanError(f"instagen: {name}={described(value)} must be one of {allowed}")
        for name in ("exact", "sampled"):
            value = getattr(self, name)
            if value is not None:
                check_share(self.name, name, value, zero=True)
        exact, sampled = _shares(self.density, self.exact, self.sampled)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "sampled", sampled)

    def _pairs(self, q: Tensor, k: Tensor, call: Call, state: State | None) -> Pairs:
        """Cluster and score as the scorer has it."""
        pairs, scale = super()._pairs(q, k, call, state), logit_scale(q, call)
        if self.scorer == "svoo":
            return co_cluster(q, k, call, pairs, scale, iterations=self.warm_iterations)
        if self.scorer == "variance":
            return pairs._replace(log_scores=second_order_scores(k, pairs, scale))
        return pairs

    def with_density(self, density: float) -> Self:
        """Return the same method at another density, exact and sampled in the same proportion."""
        total = (self.exact or 0.0) + (self.sampled or 0.0)
        if self.density is None:
            return super().with_density(density)
        exact = density * (self.exact or 0.0) / total
        return replace(self, density=density, exact=exact, sampled=density - exact)

    def _keys(self, pairs: Pairs, k: Tensor, v: Tensor, call: Call) -> KeyTokens:
        """Choose the keys of each query cluster."""
        del v
        rho_exact, rho_sampled = self.exact or 0.0, self.sampled or 0.0
        sizes = pairs.keys.size[:, :, None]  # [B, H, 1, C]
        valid = sizes.sum(-1)  # [B, H, 1]
        budget = (valid * rho_exact).round().long()
        total_share = min(rho_exact + rho_sampled, 1.0)  # the sum of two floats may round above 1
        width = max(1, round(k.shape[2] * total_share))
        if rho_sampled == 0:
            budget = budget.clamp(min=1)
            asked = self.density is not None
            taken = take_clusters(
                _log_mass(pairs), sizes, budget, crossing="cut" if asked else "include"
            )
            return list_keys(taken, pairs.keys, width=width if asked else None)
        total = (valid * total_share).round().long().clamp(min=1)
        if self.sampler in _RANDOM_SIZE:
            log_mass = _log_mass(pairs)
            taken = take_clusters(log_mass, sizes, budget, crossing="exclude")
            return self._try(taken, total, log_mass, pairs, call)
        batch, heads, groups, _ = pairs.log_scores.shape
        phase = row_phases(_PHASE_SALT, call, heads, groups, k.device).expand(batch, -1, -1)
        return list_sampled(
            pairs.log_scores,
            pairs.keys,
            budget,
            total,
            phase,
            uniform=self.sampler == "uniform",
            width=width,
        )

    def _try(
        self, taken: Tensor, total: Tensor, log_mass: Tensor, pairs: Pairs, call: Call
    ) -> KeyTokens:
        """Sample the keys that are not in the exact set by independent trials."""
        sizes = pairs.keys.size[:, :, None]
        if self.sampler == "poisson":
            taken = _never_empty(taken, sizes, total, log_mass)
        num_exact = taken.sum(-1)
        to_draw = (total - num_exact).clamp(min=1).minimum(sizes.sum(-1) - num_exact)
        certain = (taken > 0) | (sizes == 0)
        log_pi = inclusion_by_importance(pairs.log_scores, sizes, certain, to_draw)
        heads = call.head_ids(log_pi.shape[1], log_pi.device)
        draw = Draw(call.seed, call.layer, call.step, heads, salt=_PHASE_SALT)
        trials = poisson if self.sampler == "poisson" else with_replacement
        return list_trials(trials(log_pi, sizes, draw), pairs.keys)


def _log_mass(pairs: Pairs) -> Tensor:
    """Return the log of each key cluster's estimated mass, [B, H, R, C] float64."""
    return pairs.log_scores + pairs.keys.size[:, :, None].double().log()


def _never_empty(taken: Tensor, sizes: Tensor, total: Tensor, log_mass: Tensor) -> Tensor:
    """Return `taken` with one cluster in every row that had none.

    Args:
        taken: [B, H, R, C] int64, keys read exactly of each cluster.
        sizes: [B, H, 1, C] int64, keys per cluster.
        total: [B, H, 1] int64, keys to read.
        log_mass: [B, H, R, C], by which the best cluster is told.
    """
    fits = (sizes > 0) & (sizes <= total[..., None])
    smallest = torch.where(sizes > 0, -sizes.double(), -torch.inf)
    score = torch.where(
        fits.any(-1, keepdim=True), log_mass.masked_fill(~fits, -torch.inf), smallest
    )
    best = score.argmax(-1, keepdim=True)
    one = torch.zeros_like(taken).scatter_(-1, best, sizes.expand(taken.shape).gather(-1, best))
    return torch.where((taken > 0).any(-1, keepdim=True), taken, one)


def _shares(
    density: float | None, exact: float | None, sampled: float | None
) -> tuple[float, float]:
    """Return exact and sampled shares that agree with what was given.

    Raises:
        PlanError: The shares contradict the density, or add up to nothing or to more than 1.
    """
    if density is None:
        if exact is None:
            exact = _SHARES[0] if sampled is None else min(_SHARES[0], 1 - sampled)
        sampled = min(_SHARES[1], 1 - exact) if sampled is None else sampled
    elif exact is None:
        exact = density / 2 if sampled is None else density - sampled
        sampled = density - exact
    elif sampled is None:
        sampled = density - exact
    total = exact + sampled
    agrees = density is None or abs(total - density) < _ROUNDING
    if exact < 0 or sampled < 0 or not agrees or not 0 < total <= 1 + _ROUNDING:
        raise PlanError(
            f"instagen: exact={exact:g} and sampled={sampled:g} must be >= 0 and add up to "
            + ("more than 0 and at most 1" if density is None else f"density={density:g}")
        )
    return exact, sampled
