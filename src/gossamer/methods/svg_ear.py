"""SVG-EAR: clusters whose centroids would err most are read exactly, all others as centroids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group import Pairs
from gossamer.methods.base import logit_scale
from gossamer.methods.clustered import ClusteredMethod
from gossamer.methods.params import check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyTokens
from gossamer.select import list_keys, top_mass
from gossamer.select.compensate import list_compensated
from gossamer.select.replacement_error import log_replacement_error

_PASSES = 8  # over the clusters, each taking more of the small ones that still fit the budget


@register
@dataclass(frozen=True, kw_only=True)
class SVGEAR(ClusteredMethod):
    """Read the key clusters that a centroid would replace worst; centroids stand for the others.

    Queries and keys are clustered as in SVG2, and each key cluster c has a value centroid v_c, the
    mean of its values. What replacing it costs query cluster g is estimated at the query centroid,

        err_gc = sum_{j in c} |exp(l_gj) v_j - exp(l_gc) v_c|^2,

    in logarithms. Each row spends a budget of keys: first the best `min_ratio` of the clusters by
    estimated mass (SVG2's), then by descending log err - gamma * log area, where the area of a pair
    is its number of (query, key) pairs; a cluster that no longer fits is passed over for the next
    that does. Every cluster not read is one virtual key in the same softmax: its key centroid with
    weight |c|, valued v_c (SVG-EAR, arXiv 2603.08982). Virtual keys count in the density.

    The budget of exact keys is what SVG2 would read at `mass`; the virtual keys come on top. With
    `density` it is what they leave, and a cluster read exactly saves its virtual key. The density
    is at least that of virtual keys alone, C_k / S (1/32 by default).

    Differs from the public code: routing is per row, since errors of different query clusters have
    no common unit (each row's softmax has its own denominator); `min_ratio` has one default; padded
    keys enter no centroid; text is joined in full, so it is never compensated.

    Attributes:
        density: Keys per row as a share of the keys, virtual ones too; instead of `mass`. None:
            that decides.
        mass: Estimated softmax mass whose clusters' size is the budget (the paper's top-p).
        min_ratio: Share of the key clusters that is read by mass before errors are compared, as far
            as the budget goes (paper: .1).
        gamma: How much a cluster's size counts against its error: 1 is error per pair, 0 error.
        query_clusters: C_q (paper: 100 for Wan 1.3B, 300 for 14B); None for one per 128 queries.
        key_clusters: C_k (paper: 500 and 1000); None for one per 32 keys.

    Other parameters:
        iterations: k-means iterations of a cold start (paper: 50; 10 measured as good).
        warm_iterations: k-means iterations from the previous step's centroids.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "svg-ear"
    paper: ClassVar[str] = "SVG-EAR, arXiv 2603.08982"

    mass: float = 0.9
    min_ratio: float = 0.1
    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_share(self.name, "mass", self.mass)
        check_share(self.name, "min_ratio", self.min_ratio, zero=True)
        number = isinstance(self.gamma, (int, float)) and not isinstance(self.gamma, bool)
        if not number or not 0 <= self.gamma <= 10:
            raise PlanError(
                f"svg-ear: gamma={described(self.gamma)} must be a number with 0 <= gamma <= 10"
            )
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "mass")

    def _keys(self, pairs: Pairs, k: Tensor, v: Tensor, call: Call) -> KeyTokens:
        """Route the budget by error and let centroids stand for the rest."""
        sizes = pairs.keys.size[:, :, None]  # [B, H, 1, C]
        valid, used = sizes.sum(-1), (sizes > 0).sum(-1)  # [B, H, 1]
        width = None
        if self.density == 1:
            return list_keys(sizes.expand(pairs.log_scores.shape), pairs.keys, width=k.shape[2])
        log_mass = pairs.log_scores + sizes.double().log()
        floor = self._floor(pairs, sizes.shape[3])
        if self.density is None:
            kept = top_mass(log_mass, self.mass, at_least=floor)
            cost, budget = sizes, (kept * sizes).sum(-1)
        else:
            total = (valid.double() * self.density).round().long()
            cost, budget = sizes - 1, (total - used).clamp(min=0)
            width = max(round(k.shape[2] * self.density), sizes.shape[3])
        score = log_replacement_error(k, v, pairs, logit_scale(k, call))
        score = score - self.gamma * sizes.clamp(min=1).log()
        order = _ranking(score, log_mass.masked_fill(sizes == 0, -torch.inf), floor)
        taken = _fill(order, cost.expand(score.shape), budget) * sizes
        labels = pairs.key_clusters.labels
        if call.key_valid is not None:
            labels = labels.masked_fill(~call.key_valid[:, None], -1)
        return list_compensated(taken, pairs.keys, k, v, labels=labels, width=width)

    def _floor(self, pairs: Pairs, num_clusters: int) -> Tensor:
        """Return how many clusters are read by mass alone, [B|1, 1, 1] int64."""
        number = torch.full((1,), num_clusters, device=pairs.log_scores.device)
        if pairs.active_keys is not None:
            number = pairs.active_keys
        return (number * self.min_ratio).long()[:, None, None]


def _ranking(score: Tensor, log_mass: Tensor, floor: Tensor) -> Tensor:
    """Return the clusters of each row [B, H, R, C] in the order in which they are read.

    Args:
        score: [B, H, R, C].
        log_mass: [B, H, R, C], by which the first `floor` are told.
        floor: [B|1, 1, 1] int64.
    """
    by_mass = log_mass.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(score.shape[-1], device=score.device)
    first = (rank < floor[..., None]).expand_as(by_mass)
    is_first = torch.zeros_like(first).scatter_(-1, by_mass, first)
    # Those read by mass stand first, in the order of mass; all others follow by score.
    by_score = score.masked_fill(is_first, torch.inf).argsort(dim=-1, descending=True, stable=True)
    return torch.where(first, by_mass, by_score)


def _fill(order: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
    """Return the mask [B, H, R, C] of clusters that the budget pays for, one after the other.

    Args:
        order: [B, H, R, C] int64, clusters in the order in which they are tried.
        cost: [B, H, R, C] int64, what each cluster costs; those below 0 are never taken.
        budget: [B, H, R] int64.
    """
    ranked = cost.gather(-1, order)
    taken = torch.zeros_like(ranked, dtype=torch.bool)
    for _ in range(_PASSES):
        left = budget[..., None] - (ranked * taken).sum(-1, keepdim=True)
        fits = (ranked >= 0) & (ranked <= left) & ~taken
        taken = taken | (fits & ((ranked * fits).cumsum(-1) <= left))
    return torch.zeros_like(taken).scatter_(-1, order, taken)
