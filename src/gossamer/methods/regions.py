"""What methods share that cut the latent grid into regions of tokens and keep pairs of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group import cubes
from gossamer.group.places import place_means
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.blocked import trimmed
from gossamer.methods.params import check_count, check_share
from gossamer.plan import KeyBlocks, SparsePlan


class Regions(NamedTuple):
    """The regions of one call and how they score against one another.

    Attributes:
        scores: [B, H, R, C] float32, logits of the means over valid tokens; -inf for regions
            without a valid key.
        num_queries: [B|1, R] int64, valid queries of each region.
        num_keys: [B|1, C] int64, valid keys of each region.
    """

    scores: Tensor
    num_queries: Tensor
    num_keys: Tensor


@dataclass(frozen=True, kw_only=True)
class RegionMethod(Method):
    """Cut the grid into regions, and read whole regions of keys for whole regions of queries.

    A region is one tile of queries and one block of keys, in a permuted order in which regions are
    contiguous. Regions at the grid's borders may be ragged: their missing places are holes, and all
    counts and means are of true tokens. A call without a grid, or with different numbers of queries
    and keys, is cut into runs of consecutive tokens of a whole region's size.

    Attributes:
        density: Share of the visible pairs, best regions first. None: the method's own budget.
    """

    causal_reason: ClassVar[str] = (
        "a region of the grid mixes positions, so its early queries might see none of its keys"
    )

    density: float | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    @abstractmethod
    def _shape(self) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of a region."""

    @abstractmethod
    def _keep(self, regions: Regions) -> Tensor:
        """Return the pairs of regions that are read, [B, H, R, C] bool."""

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Score the pairs of regions and keep the best."""
        del v, state
        of_keys = self._places(k.shape[2], call, k.device)
        aligned = q.shape[2] == k.shape[2]
        of_queries = of_keys if aligned else self._places(q.shape[2], call, q.device)
        valid = call.key_valid
        mean_q, num_queries = place_means(q, of_queries, valid=valid if aligned else None)
        mean_k, num_keys = place_means(k, of_keys, valid=valid)
        grouped = mean_q.unflatten(1, (k.shape[1], -1))  # [B, Hk, G, R, D]
        scores = (grouped @ mean_k[:, :, None].mT).flatten(1, 2) * logit_scale(q, call)
        possible = (num_keys > 0)[:, None, None]  # [B|1, 1, 1, C]
        scores = scores.masked_fill(~possible, -torch.inf)
        keep = self._keep(Regions(scores, num_queries, num_keys)) & possible
        # Regions without a valid query are no choice of the method's, but read a key all the same.
        first = possible & (possible.long().cumsum(-1) == 1)
        keep = keep | (first & ~keep.any(-1, keepdim=True))
        volume = of_keys.shape[1]
        keys = KeyBlocks.from_mask(keep, block=volume, key_order=of_keys.int().view(1, 1, -1))
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=volume,
            keys=trimmed(keys),
            query_index=of_queries.int()[None, None],
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _places(self, length: int, call: Call, device: torch.device) -> Tensor:
        """Return the tokens of each region, [R, volume] int64, -1 for none."""
        frames, rows, columns = self._shape()
        if call.grid is not None:
            return cubes(call.grid, (frames, rows, columns), device)
        return cubes((1, 1, length), (1, 1, frames * rows * columns), device)


def check_sides(method: str, name: str, value: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """Return `value` as a tuple of `axes` positive integers.

    Raises:
        PlanError: It is not; the message gives the value.
    """
    if not isinstance(value, (tuple, list)) or len(value) != axes:
        raise PlanError(f"{method}: {name}={described(value)} must be {axes} integers, each >= 1")
    for side in value:
        check_count(method, name, side)
    return tuple(value)
