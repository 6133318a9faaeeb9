"""InstaGen: an exact set of keys plus a weighted sample of the rest, shared by a query cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.counter import uniform
from gossamer.errors import PlanError
from gossamer.group import Pairs
from gossamer.methods.base import check_share, register
from gossamer.methods.clustered import ClusteredMethod
from gossamer.plan import KeyTokens
from gossamer.select import (
    inclusion_by_importance,
    inclusion_uniform,
    list_draws,
    list_keys,
    systematic,
    take_clusters,
)

_SAMPLERS = ("importance", "uniform")
_PHASE_SALT = 2  # apart from the salts of the two clusterings
_PHASE_BITS = 2.0**32  # so that phase + i is exact in float64
_SHARES = (0.08, 0.08)  # exact and sampled, the paper's main setting (8+8%)


@register
@dataclass(frozen=True, kw_only=True)
class InstaGen(ClusteredMethod):
    """Read the best key clusters exactly and an unbiased sample of all other keys.

    Queries and keys are clustered as in SVG2. For query cluster g the exact set E takes whole
    clusters by descending estimated mass while it fits `exact`; from the residual, keys are drawn
    without replacement with probability pi_j = min(1, lambda * s_gc) (`importance`, PPS; eq. 4) or
    equally (`uniform`), by systematic sampling with one phase per (head, group), and read with
    weight 1/pi_j. Numerator and denominator of the softmax are unbiased for every query of the
    group (InstaGen, section 3.2). The number of keys per row is exact: what whole clusters leave of
    the exact budget goes to the sample.

    The phase is a hash of (seed, layer, step, global head, group): not of the batch row nor of the
    guidance branch, so that errors of the two passes cancel in their difference.

    Attributes:
        density: exact + sampled; what is not given of the two is half of it, or what is left.
        exact: Budget of the exact set as a share of the keys (rho_E).
        sampled: Budget of the sample as a share of the keys (rho_S). At 0 this is top-k, and the
            cluster that crosses the budget is read whole (cut to fit where a density is asked).
        sampler: "importance" or "uniform".
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

    def __post_init__(self) -> None:
        """Resolve the shares and refuse values out of range."""
        super().__post_init__()
        if self.sampler not in _SAMPLERS:
            raise PlanError(f"instagen: sampler={self.sampler!r} must be one of {_SAMPLERS}")
        for name in ("exact", "sampled"):
            value = getattr(self, name)
            if value is not None:
                check_share(self.name, name, value, zero=True)
        exact, sampled = _shares(self.density, self.exact, self.sampled)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "sampled", sampled)

    def _keys(self, pairs: Pairs, num_keys: int, call: Call) -> KeyTokens:
        """Choose the keys of each query cluster."""
        rho_exact, rho_sampled = self.exact or 0.0, self.sampled or 0.0
        sizes = pairs.keys.size[:, :, None]  # [B, H, 1, C]
        valid = sizes.sum(-1)  # [B, H, 1]
        budget = (valid * rho_exact).round().long()
        log_mass = pairs.log_scores + sizes.double().log()
        total_share = min(rho_exact + rho_sampled, 1.0)
        width = max(1, round(num_keys * total_share))
        if rho_sampled == 0:
            budget = budget.clamp(min=1)
            asked = self.density is not None
            taken = take_clusters(log_mass, sizes, budget, crossing="cut" if asked else "include")
            return list_keys(taken, pairs.keys, width=width if asked else None)
        taken = take_clusters(log_mass, sizes, budget, crossing="exclude")
        num_exact = taken.sum(-1)  # [B, H, R]
        total = (valid * total_share).round().long().clamp(min=1)
        to_draw = (total - num_exact).clamp(min=0).minimum(valid - num_exact)
        certain = (taken > 0) | (sizes == 0)
        if self.sampler == "importance":
            log_pi = inclusion_by_importance(pairs.log_scores, sizes, certain, to_draw)
        else:
            log_pi = inclusion_uniform(sizes, certain, to_draw)
        draws = systematic(log_pi, sizes, self._phase(log_pi, call))
        return list_draws(draws, pairs.keys, width=width)

    def _phase(self, log_pi: Tensor, call: Call) -> Tensor:
        """Return the phase of each (head, group), [B, H, R] float64 with 32 random bits."""
        batch, heads, groups, _ = log_pi.shape
        device = log_pi.device
        head = torch.arange(heads, device=device)[:, None] + call.head_offset
        group = torch.arange(groups, device=device)
        phase = uniform(_PHASE_SALT, call.seed, call.layer, call.step, head, group, device=device)
        return ((phase * _PHASE_BITS).floor() / _PHASE_BITS).expand(batch, -1, -1)


def _shares(
    density: float | None, exact: float | None, sampled: float | None
) -> tuple[float, float]:
    """Return exact and sampled shares that agree with what was given.

    Raises:
        PlanError: The shares contradict the density, or add up to nothing or to more than 1.
    """
    if density is None:
        exact = _SHARES[0] if exact is None else exact
        sampled = _SHARES[1] if sampled is None else sampled
    elif exact is None:
        exact = density / 2 if sampled is None else density - sampled
        sampled = density - exact
    elif sampled is None:
        sampled = density - exact
    total = exact + sampled
    agrees = density is None or abs(total - density) < 1e-9
    if exact < 0 or sampled < 0 or not agrees or total <= 0:
        raise PlanError(
            f"instagen: exact={exact:g} and sampled={sampled:g} must be >= 0 and add up to "
            + ("more than 0" if density is None else f"density={density:g}")
        )
    return exact, sampled
