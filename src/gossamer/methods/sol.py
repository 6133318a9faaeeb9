"""Sol-Attn: blocks above a predicted threshold exactly, all others by their means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.errors import PlanError, described
from gossamer.methods.compensated import CompensatedMethod, Pooled
from gossamer.methods.params import check_size, refuse_unused
from gossamer.methods.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class SolAttn(CompensatedMethod):
    """Read the blocks whose score stands out exactly, and every other block as its mean.

    Consecutive queries and keys are cut into blocks. Over the key blocks, a query block with mean q
    has scores of predicted mean scale * q . m and standard deviation scale * sqrt(sum_d q_d^2 s_d),
    where m and s are mean and variance (diagonal, over blocks) of the block key means. Block j is
    exact for query block i if its mean score over the queries exceeds mean + tau * deviation, if
    |i - j| <= near, or if it is one of the first `first_blocks`. Every other block enters the same
    softmax at zeroth order: one virtual key, the mean of its keys, with the mean of its values and
    its size as weight.

    Differs from the public code: the diagonal variance only, no Morton order of the tokens; ragged
    and padded blocks count with their true sizes, and blocks without a key in neither mean nor
    variance; text is read exactly by every row and reads everything.

    Virtual keys count in the density. Where one is asked, the best blocks by score are exact, the
    near and first ones before all others, so that exact keys and virtual ones together meet it;
    these and the virtual keys of the rest are the least there is, and what asking for less gives.
    At density 1, or with tau low enough, all blocks are exact and no virtual key is read.

    Attributes:
        density: Share of the visible pairs, one for each virtual key of a query counted; whole
            blocks are read, and fractions are spread over the rows. None: `tau` decides.
        tau: Standard deviations above the mean at which a block becomes exact (published: 1.0,
            about 16% of the blocks, and 1.3); -inf for all blocks, inf for the forced ones alone.
        near: Blocks on either side of a tile's own that are exact in any case (published: 1). Where
            numbers of queries and keys differ, tiles have no blocks of their own.
        first_blocks: First blocks that hold a key, exact in any case (the sink).
        block: Keys per block (published: 64).
        tile: Queries per tile (published: 64).
    """

    name: ClassVar[str] = "sol"
    paper: ClassVar[str] = "Sol-Attn (public code)"

    tau: float = 1.0
    near: int = 1
    first_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        number = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool)
        if not number or math.isnan(self.tau):
            raise PlanError(f"{self.name}: tau={described(self.tau)} must be a number")
        for name in ("near", "first_blocks"):
            check_size(self.name, name, getattr(self, name))
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "tau")

    def _own(self, pooled: Pooled) -> Tensor:
        """Keep the blocks whose score exceeds the threshold predicted for the row."""
        if math.isinf(self.tau):
            return torch.full_like(pooled.scores, self.tau < 0, dtype=torch.bool)
        holds_keys = (pooled.size > 0)[:, None, :, None]  # [B|1, 1, C, 1]
        number = holds_keys.sum(2).clamp(min=1)  # [B|1, 1, 1]
        mean = (pooled.mean_k * holds_keys).sum(2) / number  # [B, Hk, D]
        spread = ((pooled.mean_k - mean[:, :, None]).square() * holds_keys).sum(2) / number
        grouped = pooled.mean_q.unflatten(1, (pooled.mean_k.shape[1], -1))  # [B, Hk, G, R, D]
        predicted = (grouped @ mean[:, :, None, :, None])[..., 0]  # [B, Hk, G, R]
        deviation = (grouped.square() @ spread[:, :, None, :, None])[..., 0].sqrt()
        # The deviation scales with |scale|: a negative factor flips scores, not their spread.
        above = (predicted * pooled.scale).flatten(1, 2)[..., None]
        unit = (deviation * abs(pooled.scale)).flatten(1, 2)[..., None]
        return pooled.scores > above + self.tau * unit

    def _forced(self, pooled: Pooled) -> Tensor | None:
        """Return the near and the first blocks; each row's best where there are none."""
        num_rows, num_blocks = pooled.scores.shape[2:]
        device = pooled.scores.device
        column = torch.arange(num_blocks, device=device)
        holds_keys = (pooled.size > 0)[:, None, None]  # [B|1, 1, 1, C]
        first = holds_keys & (holds_keys.cumsum(-1) <= self.first_blocks)
        forced = first.expand(-1, -1, num_rows, -1)
        if pooled.aligned:
            begin = torch.arange(num_rows, device=device)[:, None] * self.tile
            last = (begin + self.tile - 1) // self.block
            forced = forced | (
                (column >= begin // self.block - self.near) & (column <= last + self.near)
            )
        elif self.first_blocks == 0:
            return None
        return forced & holds_keys

    @property
    def _most_forced(self) -> int:
        """An upper bound of the blocks that are exact in any case in one row."""
        own = -(-self.tile // self.block) + 1
        return own + 2 * self.near + self.first_blocks
