"""How tokens are grouped: k-means clusters, block means, tiles of one group."""

from gossamer.group.cubes import cubes
from gossamer.group.kmeans import Clusters, Draw, kmeans
from gossamer.group.pairs import ClusterSettings, Pairs, cluster_pairs
from gossamer.group.pool import block_means
from gossamer.group.tiles import Sorted, pack_tiles, sort_by_group

__all__ = [
    "ClusterSettings",
    "Clusters",
    "Draw",
    "Pairs",
    "Sorted",
    "block_means",
    "cluster_pairs",
    "cubes",
    "kmeans",
    "pack_tiles",
    "sort_by_group",
]
