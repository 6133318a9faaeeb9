"""What methods share that read keys by semantic clusters: they differ in the keys they choose."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from gossamer.call import Call
from gossamer.group import Clusters, ClusterSettings, Pairs, cluster_pairs, pack_tiles
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.params import check_count, check_share
from gossamer.plan import KeyTokens, SparsePlan


@dataclass(frozen=True, kw_only=True)
class ClusteredMethod(Method):
    """Cluster queries and keys; every tile holds queries of one cluster and reads its keys.

    Attributes:
        density: Share of the keys that each query cluster reads; None: the method's own budgets.
        query_clusters: C_q; None for one per 128 queries.
        key_clusters: C_k; None for one per 32 keys.
        iterations: k-means iterations of a cold start.
        warm_iterations: k-means iterations from the previous step's centroids.
        tile: Queries per tile.
    """

    causal_reason: ClassVar[str] = (
        "a semantic cluster mixes positions, so its early queries might see none of its keys"
    )

    density: float | None = None
    query_clusters: int | None = None
    key_clusters: int | None = None
    iterations: int = 10
    warm_iterations: int = 2
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        for name in ("query_clusters", "key_clusters", "iterations", "warm_iterations", "tile"):
            optional = name.endswith("_clusters")
            check_count(self.name, name, getattr(self, name), optional=optional)

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    @abstractmethod
    def _keys(self, pairs: Pairs, k: Tensor, v: Tensor, call: Call) -> KeyTokens:
        """Choose the keys of each query cluster, one row a cluster.

        Args:
            pairs: The clusters and the logits of their centroids.
            k: [B, Hk, S, D] keys, padded ones too.
            v: [B, Hk, S, D] values.
            call: The call.
        """

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Cluster, choose keys, pack each cluster's queries into tiles."""
        pairs = self._pairs(q, k, call, state)
        return self._packed(self._keys(pairs, k, v, call), pairs.queries, k.shape[2], call)

    def _pairs(self, q: Tensor, k: Tensor, call: Call, state: State | None) -> Pairs:
        """Cluster queries and keys and score the pairs of clusters."""
        return cluster_pairs(q, k, call, logit_scale(q, call), self._settings(), state)

    def _settings(self) -> ClusterSettings:
        """Return how queries and keys are clustered."""
        return ClusterSettings(
            query_clusters=self.query_clusters,
            key_clusters=self.key_clusters,
            iterations=self.iterations,
            warm_iterations=self.warm_iterations,
        )

    def _packed(self, keys: KeyTokens, queries: Clusters, num_keys: int, call: Call) -> SparsePlan:
        """Return the plan in which the queries of cluster g read row g of `keys`."""
        num_groups = queries.sizes.shape[2]
        query_index, tile_row = pack_tiles(queries.labels, num_groups, self.tile)
        return SparsePlan(
            num_queries=queries.labels.shape[2],
            num_keys=num_keys,
            tile=self.tile,
            keys=keys,
            query_index=query_index,
            tile_row=tile_row,
            key_valid=call.key_valid,
            scale=call.scale,
        )
