"""SVG2: semantic clusters of queries and keys, and the top clusters by centroid score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import ClusterSettings, cluster_pairs, pack_tiles
from gossamer.methods.base import (
    Method,
    State,
    check_count,
    check_share,
    logit_scale,
    register,
)
from gossamer.plan import SparsePlan
from gossamer.select import list_keys, take_clusters, top_mass


@register
@dataclass(frozen=True, kw_only=True)
class SVG2(Method):
    """Read the key clusters whose centroids score highest against the query cluster's.

    k-means on queries and, apart, on keys (Euclidean, after positional encoding, per head). For
    query cluster g, cluster c has the estimated mass |c| * exp(scale * q_g . k_c). The smallest set
    of clusters covering `mass` is kept, the crossing one included, and in any case the best
    `min_ratio` of the clusters (Sparse VideoGen2, arXiv 2505.18875, section 3).

    Differs from the public code: centroids are kept per guidance branch and dropped at the end of a
    generation, the initial ones are drawn without the global random state, empty clusters are never
    chosen, and each centroid is the mean of the members that its labels name.

    Attributes:
        density: Keys per row as a share of the keys, best clusters first, the last one cut to fit;
            instead of `mass` and `min_ratio`. None: those decide.
        mass: Estimated softmax mass to cover (the paper's top-p).
        min_ratio: Share of the key clusters kept in any case.
        query_clusters: C_q (paper: 100 for Wan 1.3B, 300 for 14B); None for one per 128 queries.
        key_clusters: C_k (paper: 500 and 1000); None for one per 32 keys.

    Other parameters:
        iterations: k-means iterations of a cold start (paper: 50; 10 measured as good).
        warm_iterations: k-means iterations from the previous step's centroids.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "svg2"
    paper: ClassVar[str] = "Sparse VideoGen2, arXiv 2505.18875"
    causal_reason: ClassVar[str] = (
        "a semantic cluster mixes positions, so its early queries might see none of its keys"
    )

    density: float | None = None
    mass: float = 0.9
    min_ratio: float = 0.1
    query_clusters: int | None = None
    key_clusters: int | None = None
    iterations: int = 10
    warm_iterations: int = 2
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        check_share(self.name, "mass", self.mass)
        check_share(self.name, "min_ratio", self.min_ratio, zero=True)
        for name in ("query_clusters", "key_clusters", "iterations", "warm_iterations", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Cluster, score, keep the best clusters."""
        del v
        settings = ClusterSettings(
            query_clusters=self.query_clusters,
            key_clusters=self.key_clusters,
            iterations=self.iterations,
            warm_iterations=self.warm_iterations,
        )
        pairs = cluster_pairs(q, k, call, logit_scale(q, call), settings, state)
        sizes = pairs.keys.size[:, :, None]  # [B, H, 1, C]
        log_mass = pairs.log_scores + sizes.double().log()
        if self.density is None:
            num_clusters = torch.tensor([[sizes.shape[-1]]], device=q.device)
            if pairs.active_keys is not None:
                num_clusters = pairs.active_keys[:, None]
            floor = (num_clusters * self.min_ratio).long()[..., None]  # [B|1, 1, 1]
            taken = top_mass(log_mass, self.mass, at_least=floor) * sizes
            keys = list_keys(taken, pairs.keys)
        else:
            num_keys = sizes.sum(-1)  # [B, H, 1], valid ones
            budget = (num_keys * self.density).round().long().clamp(min=1)
            taken = take_clusters(log_mass, sizes, budget, crossing="cut")
            width = max(1, round(k.shape[2] * self.density))
            keys = list_keys(taken, pairs.keys, width=width)
        num_groups = pairs.queries.sizes.shape[2]
        query_index, tile_row = pack_tiles(pairs.queries.labels, num_groups, self.tile)
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=self.tile,
            keys=keys,
            query_index=query_index,
            tile_row=tile_row,
            key_valid=call.key_valid,
            scale=call.scale,
        )
