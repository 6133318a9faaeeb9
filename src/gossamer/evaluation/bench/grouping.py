"""Grouping alone, the costliest part of planning: k-means, beside flash-kmeans, and PDDP."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from gossamer.evaluation.bench.case import TILE, Tensors, normal
from gossamer.evaluation.bench.plan_case import PlanStage, Shape
from gossamer.group import Draw, kmeans
from gossamer.group.pddp import pddp

_COLD, _WARM = 10, 2  # iterations, as methods take them
# Of a centroid, relative: how far sums of 75,600 float32 numbers may be from float64's. Centroids
# of half precision are allowed two roundings.
_ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class KMeans:
    """k-means of the queries of one call; `flash_kmeans` beside it where it is installed.

    Attributes:
        name: As results name it, e.g. "kmeans300-75600".
        clusters: Clusters per head.
        shape: The shape of the call.
    """

    name: str
    clusters: int
    shape: Shape

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        shape = self.shape
        return normal(device, heads=shape.heads, num_tokens=shape.num_tokens, dim=shape.dim)

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield "cold", 10 iterations, and "warm", 2 from given centroids; then flash-kmeans'."""
        x = tensors[0]
        heads = torch.arange(x.shape[1], device=device)
        draw = Draw(0, 0, 0, heads, salt=0)

        def cluster(init: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
            found = kmeans(x, self.clusters, draw=draw, init=init, iterations=iterations)
            return found.labels, found.centroids

        def check(result: tuple[Tensor, Tensor]) -> None:
            check_clusters(x, *result)

        yield PlanStage(name="cold", call=lambda: cluster(None, _COLD), check=check)
        centroids = cluster(None, _COLD)[1]
        yield PlanStage(name="warm", call=lambda: cluster(centroids, _WARM), check=check)
        other = flash_kmeans()
        if other is None:
            return
        for stage, iterations in (("cold", _COLD), ("warm", _WARM)):
            yield PlanStage(
                name=f"{stage}, flash-kmeans",
                call=_flash_call(other, x, centroids, iterations),
                check=check,
            )

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens, with as much fewer clusters."""
        clusters = max(4, round(self.clusters * factor))
        return replace(self, shape=self.shape.scaled(factor), clusters=clusters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pddp:
    """Fast PDDP of the queries of one call.

    Attributes:
        name: As results name it, e.g. "pddp-75600".
        shape: The shape of the call.
    """

    name: str
    shape: Shape

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        shape = self.shape
        return normal(device, heads=shape.heads, num_tokens=shape.num_tokens, dim=shape.dim)

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield "cold": PDDP keeps no state."""
        del device
        x = tensors[0]
        yield PlanStage(
            name="cold",
            call=lambda: pddp(x, tile=TILE),
            check=lambda order: check_order(x, order),
        )

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, shape=self.shape.scaled(factor))


def flash_kmeans() -> Callable[..., Any] | None:
    """Return flash-kmeans' `batch_kmeans_Euclid`; None where the package cannot be imported."""
    try:
        return importlib.import_module("flash_kmeans").batch_kmeans_Euclid
    except ImportError:  # it, or something it needs
        return None


def _flash_call(
    cluster: Callable[..., Any], x: Tensor, centroids: Tensor, iterations: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call of flash-kmeans that starts from the same centroids every time.

    It takes tokens as [H, N, D]; with a tolerance of 0 it never stops early.
    """
    flat = x.flatten(0, 1)
    init = centroids.flatten(0, 1).to(x.dtype)

    def call() -> tuple[Tensor, Tensor]:
        labels, found, _ = cluster(
            flat,
            n_clusters=init.shape[1],
            max_iters=iterations,
            tol=0.0,
            init_centroids=init.clone(),  # not all versions leave it as it is
            verbose=False,
        )
        return labels.view(x.shape[:3]), found.view(*x.shape[:2], *found.shape[1:])

    return call


def check_clusters(x: Tensor, labels: Tensor, centroids: Tensor) -> None:
    """Refuse clusters whose centroids are not their members' means, or which say nothing.

    Args:
        x: [B, H, N, D] tokens.
        labels: [B, H, N] integer, the cluster of each token.
        centroids: [B, H, C, D].

    Raises:
        ArithmeticError: In the first head something of this does not hold.
    """
    tokens, label, centre = x[0, 0].double(), labels[0, 0].long(), centroids[0, 0].double()
    num_clusters = len(centre)
    if not bool(((label >= 0) & (label < num_clusters)).all()):
        raise ArithmeticError(f"labels outside 0…{num_clusters - 1}")
    size = torch.bincount(label, minlength=num_clusters)
    sums = torch.zeros_like(centre).index_add_(0, label, tokens)
    means = sums / size.clamp(min=1)[:, None]
    full = size > 0
    error = float((centre - means)[full].norm() / means[full].norm())
    bound = max(_ROUNDING, 2 * torch.finfo(centroids.dtype).eps)
    if not error <= bound:
        raise ArithmeticError(f"centroids are off by {error:.3g}, above {bound:.3g}")
    within, around = (tokens - centre[label]).square().sum(), (tokens - tokens.mean(0)).square()
    if not bool(within <= around.sum()):
        raise ArithmeticError("clusters are wider than all tokens together")


def check_order(x: Tensor, order: Tensor) -> None:
    """Refuse an order of tokens that is none, or whose tiles are no tighter than without it.

    Args:
        x: [B, H, N, D] tokens.
        order: [B, H, N] int64.

    Raises:
        ArithmeticError: One of this holds in the first head.
    """
    tokens, by = x[0, 0].double(), order[0, 0]
    if not torch.equal(by.sort().values, torch.arange(len(by), device=by.device)):
        raise ArithmeticError("the order names some token twice")
    whole = len(by) // TILE * TILE

    def spread(some: Tensor) -> float:
        tiles = some[:whole].unflatten(0, (-1, TILE))
        return float((tiles - tiles.mean(1, keepdim=True)).square().sum())

    if not spread(tokens[by]) < spread(tokens):
        raise ArithmeticError("tiles in this order are no tighter than tokens as they come")
