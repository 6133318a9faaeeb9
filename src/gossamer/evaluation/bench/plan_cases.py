"""The cases that planning is timed on, by the names their results carry."""

from __future__ import annotations

import gossamer as gs
from gossamer.evaluation.bench.clustered_masks import ClusteredMasks
from gossamer.evaluation.bench.grouping import KMeans, Pddp
from gossamer.evaluation.bench.plan_case import VIDEO_480P, VIDEO_720P, PlanCase, Shape
from gossamer.evaluation.bench.planning import Anchoring, Ordering, Planning

_DENSITY = 0.15
_QUERY_CLUSTERS, _KEY_CLUSTERS = 300, 1000


def _at(shape: Shape) -> tuple[PlanCase, ...]:
    """Return every method at one shape; InstaGen's clusters are those of its paper."""
    size = shape.num_tokens
    return (
        Planning(
            name=f"instagen-{size}",
            method=gs.InstaGen(
                exact=0.08,
                sampled=0.08,
                query_clusters=_QUERY_CLUSTERS,
                key_clusters=_KEY_CLUSTERS,
            ),
            shape=shape,
            density=0.16,
        ),
        Planning(
            name=f"svg2-{size}",
            method=gs.SVG2(
                density=_DENSITY, query_clusters=_QUERY_CLUSTERS, key_clusters=_KEY_CLUSTERS
            ),
            shape=shape,
            density=_DENSITY,
        ),
        Anchoring(
            name=f"mc-sparse-anchor-{size}", method=gs.MCSparse(density=_DENSITY), shape=shape
        ),
        Planning(
            name=f"block-topk-{size}",
            method=gs.BlockTopK(density=_DENSITY),
            shape=shape,
            density=_DENSITY,
        ),
        Planning(
            name=f"xattention-{size}",
            method=gs.get_method("xattention", density=_DENSITY),
            shape=shape,
            density=_DENSITY,
        ),
        Planning(name=f"intra-{size}", method=gs.Intra(groups=8, fit=True), shape=shape),
        # By its decay: what it computes to meet a density it keeps, beside the session's cache.
        Planning(name=f"radial-{size}", method=gs.Radial(), shape=shape),
        KMeans(name=f"kmeans300-{size}", clusters=300, shape=shape),
        KMeans(name=f"kmeans1000-{size}", clusters=1000, shape=shape),
        Pddp(name=f"pddp-{size}", shape=shape),
    )


_ORDERED = tuple(
    Ordering(name=f"wavealign-{size}", masks=ClusteredMasks(name=f"clustered-{size}", num_tokens=n))
    for size, n in (("148k", 148_480), ("364k", 364_544))
)

DEFAULT_CASES: tuple[PlanCase, ...] = (*_at(VIDEO_720P), *_ORDERED)
"""What runs where nothing is asked, in this order."""

PLAN_CASES: tuple[PlanCase, ...] = (*DEFAULT_CASES, *_at(VIDEO_480P))
"""Every case."""
