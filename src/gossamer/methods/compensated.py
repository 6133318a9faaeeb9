"""What methods share that read some key blocks exactly and all others by their means."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import Sorted, block_means, sort_by_group
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.params import check_count, check_share
from gossamer.plan import KeyTokens, SparsePlan
from gossamer.select import list_keys
from gossamer.select.compensate import list_compensated
from gossamer.select.spread import take_spread


class Pooled(NamedTuple):
    """Tiles and blocks of one call by their means over valid tokens.

    Attributes:
        mean_q: [B, H, R, D] float32, means of the tiles.
        mean_k: [B, Hk, C, D] float32, means of the blocks.
        size: [B|1, C] int64, valid keys of each block.
        scores: [B, H, R, C] float32, the mean logit of each tile and block; -inf for empty blocks.
        scale: Factor on the logits.
        aligned: Whether query i stands at key i, so that tiles have blocks of their own.
    """

    mean_q: Tensor
    mean_k: Tensor
    size: Tensor
    scores: Tensor
    scale: float
    aligned: bool


@dataclass(frozen=True, kw_only=True)
class CompensatedMethod(Method):
    """Read some blocks of consecutive keys exactly, and every other block as one virtual key.

    A subclass says which blocks are exact under its own budget, and which always are.

    Attributes:
        density: Share of the visible pairs, one for each virtual key of a query counted; best
            scores first, fractions of blocks spread over the rows. None: the method's own budget.
        block: Keys per block.
        tile: Queries per tile.
    """

    causal_reason: ClassVar[str] = (
        "a block's mean mixes positions, so it has none at which causality could cut"
    )

    density: float | None = None
    block: int = 64
    tile: int = 64

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        for name in ("block", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget, virtual keys counted, set to `density`."""
        return cls(density=density, **params)

    @abstractmethod
    def _own(self, pooled: Pooled) -> Tensor:
        """Return the blocks read exactly under the method's own budget, [B, H, R, C] bool."""

    def _most_own(self, num_blocks: int) -> int | None:
        """Return an upper bound of the exact blocks of a row; None where it depends on tensors."""
        del num_blocks

    def _forced(self, pooled: Pooled) -> Tensor | None:
        """Return the blocks that are exact in any case, [B|1, 1, R, C] bool; None for each best."""
        del pooled

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Score the pairs of tiles and blocks, keep the best, let means stand for the others."""
        del state
        pooled = self._pool(q, k, call)
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=self.tile,
            keys=self._keys(pooled, k, v, call),
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _pool(self, q: Tensor, k: Tensor, call: Call) -> Pooled:
        """Average tiles and blocks over their valid tokens and score every pair."""
        aligned = q.shape[2] == k.shape[2]
        valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
        mean_q, _ = block_means(q, self.tile, valid=valid if aligned else None)
        mean_k, size = block_means(k, self.block, valid=valid)
        scale = logit_scale(q, call)
        grouped = mean_q.unflatten(1, (k.shape[1], -1))  # [B, Hk, G, R, D]
        scores = (grouped @ mean_k[:, :, None].mT).flatten(1, 2) * scale
        scores = scores.masked_fill((size == 0)[:, None, None], -torch.inf)
        return Pooled(mean_q, mean_k, size, scores, scale, aligned)

    def _keys(self, pooled: Pooled, k: Tensor, v: Tensor, call: Call) -> KeyTokens:
        """Choose the exact blocks and list their keys, with virtual keys for all others."""
        batch, heads, _, num_blocks = pooled.scores.shape
        num_keys, sizes = k.shape[2], pooled.size[:, None, None]  # [B|1, 1, 1, C]
        labels = (torch.arange(num_keys, device=k.device) // self.block).view(1, 1, -1)
        if call.key_valid is not None:
            labels = torch.where(call.key_valid[:, None], labels, -1)
        keys = sort_by_group(labels, num_blocks, valid=call.key_valid)
        if self.density is not None and self.density >= 1:
            keys = Sorted(*(x.expand(batch, heads, -1) for x in keys))
            return list_keys(sizes.expand(pooled.scores.shape), keys, width=num_keys)
        forced = self._forced(pooled)
        if self.density is None:
            exact = self._own(pooled)
            exact = exact if forced is None else exact | forced
            most = self._most_own(num_blocks)
            width = None if most is None else min(num_keys, num_blocks + most * (self.block - 1))
        else:
            # A block read exactly costs its keys and saves its virtual key.
            budget = sizes.sum(-1).double() * self.density - (sizes > 0).sum(-1)  # [B|1, 1, 1]
            cost = (sizes - 1).clamp(min=0)
            exact = take_spread(pooled.scores, cost, budget, forced=forced)
            width = self._width(num_keys, num_blocks)
        return list_compensated(exact * sizes, keys, k, v, labels=labels, width=width)

    def _width(self, num_keys: int, num_blocks: int) -> int:
        """Return an upper bound of the keys of a row under a density, virtual ones counted."""
        density = 1.0 if self.density is None else self.density
        least = num_blocks + self._most_forced * (self.block - 1)
        return min(num_keys, max(math.ceil(num_keys * density), least) + self.block)

    @property
    def _most_forced(self) -> int:
        """An upper bound of the blocks that are exact in any case in one row."""
        return 1
