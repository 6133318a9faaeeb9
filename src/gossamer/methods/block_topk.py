"""Block top-k on mean-pooled queries and keys: the generic block-sparse baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError
from gossamer.group import block_means
from gossamer.methods.base import (
    Method,
    State,
    check_count,
    check_share,
    logit_scale,
    register,
)
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.select import top_blocks, top_mass


@register
@dataclass(frozen=True, kw_only=True)
class BlockTopK(Method):
    """Keep, for each tile of queries, the key blocks with the highest mean-pooled score.

    Queries and keys are averaged over consecutive blocks of valid tokens; the score of a pair is
    the logit of the means. Exactly one of `density`, `blocks` and `mass` says how much is kept.
    Pooled logits are flatter than token logits, so a block whose one strong key is averaged away is
    missed: that is the baseline's known weakness, not a fault of this implementation.

    Causal calls choose among visible blocks only, and always keep, inside the budget, a block that
    every query of the tile can read.

    Attributes:
        density: Share of the visible blocks of a row; fractions are spread over the rows, so that
            the whole plan meets it.
        blocks: Blocks per row (top-k); clamped to those there are.
        mass: Softmax mass over pooled scores to cover, crossing block included.
        block: Keys per block.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "block-topk"
    paper: ClassVar[str] = "generic block means and top-k (compare arXiv 2509.01085)"

    density: float | None = None
    blocks: int | None = None
    mass: float | None = None
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse contradictory budgets; 20% density where none is given."""
        given = [name for name in ("density", "blocks", "mass") if getattr(self, name) is not None]
        if not given:
            object.__setattr__(self, "density", 0.2)
        if len(given) > 1:
            raise PlanError(f"{self.name}: give one of density, blocks and mass, not {given}")
        for name in ("density", "mass"):
            if getattr(self, name) is not None:
                check_share(self.name, name, getattr(self, name))
        for name in ("blocks", "block", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Score block pairs and keep the best of each row."""
        del v, state
        num_queries, num_keys = q.shape[2], k.shape[2]
        valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
        valid_q = valid if num_queries == num_keys else None
        mean_q, _ = block_means(q, self.tile, valid=valid_q)  # [B, H, R, D]
        mean_k, size = block_means(k, self.block, valid=valid)  # [B, Hk, C, D], [B|1, C]
        grouped = mean_q.unflatten(1, (k.shape[1], -1))  # [B, Hk, G, R, D]
        scores = (grouped @ mean_k[:, :, None].mT).flatten(1, 2) * logit_scale(q, call)
        possible = (size > 0)[:, None, None]  # [B|1, 1, 1, C]
        share = size[:, None, None].double() / self.block  # of each block, what can be read
        forced = None
        if call.causal:
            forced, seen = _causal(call, num_queries, num_keys, self, possible)
            share, possible = seen.masked_fill(~possible, 0.0), possible & (seen > 0)
        scores = scores.masked_fill(~possible, -torch.inf)
        keep = self._select(scores, possible, share, forced)
        return SparsePlan(
            num_queries=num_queries,
            num_keys=num_keys,
            tile=self.tile,
            keys=_trimmed(KeyBlocks.from_mask(keep, block=self.block)),
            causal=call.causal,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _select(
        self, scores: Tensor, possible: Tensor, share: Tensor, forced: Tensor | None
    ) -> Tensor:
        """Return the kept blocks [B, H, R, C]."""
        if self.mass is not None:
            keep = top_mass(scores, self.mass)
            return keep if forced is None else keep | forced
        count = possible.sum(-1).expand(-1, -1, scores.shape[2])  # [B|1, 1, R]
        if self.density is None:
            count = torch.full_like(count, self.blocks or 1)
        elif self.density < 1:
            count = _spread(self.density, share.expand(-1, -1, scores.shape[2], -1), forced)
        return top_blocks(scores, count.expand(*scores.shape[:2], -1), forced=forced)


def _spread(density: float, share: Tensor, forced: Tensor | None) -> Tensor:
    """Return how many blocks each row keeps so that the whole plan meets the density.

    Each row keeps one block, the forced one if there is one. What the density leaves beside these
    accumulates over the rows, and rounding the running sum spreads its fractions.

    Args:
        density: Share of the visible pairs.
        share: [B|1, 1, R, C] float64, visible pairs of each block over those of a whole one.
        forced: [B|1, 1, R, C] bool, or None.

    Returns:
        [B|1, 1, R] int64, at least 1.
    """
    total, number = share.sum(-1), (share > 0).sum(-1)
    mean = total / number.clamp(min=1)
    first = mean if forced is None else (share * forced).sum(-1)
    # One of the other blocks, on average: those at a causal edge are visible in part.
    rest = (total - first).sum(-1, keepdim=True)
    each = rest / (number - 1).clamp(min=0).sum(-1, keepdim=True).clamp(min=1)
    left = ((total * density - first) / torch.where(each > 0, each, 1.0)).cumsum(-1)
    more = left.clamp(min=0).cummax(-1).values.round().long()
    return 1 + torch.diff(more, dim=-1, prepend=torch.zeros_like(more[..., :1]))


def _causal(
    call: Call, num_queries: int, num_keys: int, method: BlockTopK, possible: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the block each tile must keep [B|1, 1, R, C] bool and the visible shares [R, C].

    The forced block holds the last valid key that the tile's first query sees or, where it sees
    none, the first valid key of all: every query of the tile that sees any key sees that one.
    """
    device = possible.device
    key = torch.arange(num_keys, device=device)
    valid = torch.ones_like(key, dtype=torch.bool)[None]
    if call.key_valid is not None:
        valid = call.key_valid
    last_valid = torch.where(valid, key, -1).cummax(-1).values  # [B|1, S], up to each key
    first_valid = valid.byte().argmax(-1, keepdim=True)
    tile_start = torch.arange(0, num_queries, method.tile, device=device)  # [R]
    tile_end = (tile_start + method.tile).clamp(max=num_queries)
    shift = num_keys - num_queries
    must = last_valid[:, (tile_start + shift).clamp(0, max(num_keys - 1, 0))]  # [B|1, R]
    must = torch.where((must < 0) | (tile_start + shift < 0), first_valid, must)
    begin = torch.arange(possible.shape[-1], device=device) * method.block
    # Query i sees clamp(i + shift + 1 - begin, 0, block) keys of a block: sums over a tile of it.
    seen = _ramp(tile_end[:, None] + shift - begin, method.block)
    seen = seen - _ramp(tile_start[:, None] + shift - begin, method.block)  # [R, C] pairs
    forced = (must // method.block)[:, None, :, None] == begin // method.block
    return forced & possible & (seen > 0), seen.double() / (method.tile * method.block)


def _ramp(x: Tensor, block: int) -> Tensor:
    """Return the sum of clamp(t, 0, block) over integers t up to x."""
    inside = x.clamp(0, block)
    return inside * (inside + 1) // 2 + (x - block).clamp(min=0) * block


def _trimmed(keys: KeyBlocks) -> KeyBlocks:
    """Drop the columns that no row uses, where reading the counts does not synchronise."""
    if keys.index.device.type != "cpu" or keys.count.numel() == 0:
        return keys
    width = max(int(keys.count.max()), 1)
    return KeyBlocks(block=keys.block, count=keys.count, index=keys.index[..., :width])
