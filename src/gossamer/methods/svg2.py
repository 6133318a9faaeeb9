"""SVG2: semantic clusters of queries and keys, and the top clusters by centroid score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import Pairs
from gossamer.methods.clustered import ClusteredMethod
from gossamer.methods.params import check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyTokens
from gossamer.select import list_keys, take_clusters, top_mass


@register
@dataclass(frozen=True, kw_only=True)
class SVG2(ClusteredMethod):
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

    mass: float = 0.9
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_share(self.name, "mass", self.mass)
        check_share(self.name, "min_ratio", self.min_ratio, zero=True)
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "mass", "min_ratio")

    def _keys(self, pairs: Pairs, k: Tensor, v: Tensor, call: Call) -> KeyTokens:
        """Keep the clusters of greatest estimated mass."""
        del v, call
        sizes = pairs.keys.size[:, :, None]  # [B, H, 1, C]
        log_mass = pairs.log_scores + sizes.double().log()
        if self.density is not None:
            budget = (sizes.sum(-1) * self.density).round().long().clamp(min=1)  # of valid keys
            taken = take_clusters(log_mass, sizes, budget, crossing="cut")
            return list_keys(taken, pairs.keys, width=max(1, round(k.shape[2] * self.density)))
        num_clusters = torch.tensor([[sizes.shape[-1]]], device=sizes.device)
        if pairs.active_keys is not None:
            num_clusters = pairs.active_keys[:, None]
        floor = (num_clusters * self.min_ratio).long()[..., None]  # [B|1, 1, 1]
        return list_keys(top_mass(log_mass, self.mass, at_least=floor) * sizes, pairs.keys)
