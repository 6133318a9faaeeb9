"""Block top-k on mean-pooled queries and keys: the generic block-sparse baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError
from gossamer.methods.blocked import BlockedMethod, pooled_scores
from gossamer.methods.params import check_count, check_share
from gossamer.methods.registry import register
from gossamer.select import BlockLayout, top_blocks, top_mass


@register
@dataclass(frozen=True, kw_only=True)
class BlockTopK(BlockedMethod):
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

    blocks: int | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        """Refuse contradictory budgets; 20% density where none is given."""
        given = [name for name in ("density", "blocks", "mass") if getattr(self, name) is not None]
        if not given:
            object.__setattr__(self, "density", 0.2)
        if len(given) > 1:
            raise PlanError(f"{self.name}: give one of density, blocks and mass, not {given}")
        super().__post_init__()
        if self.mass is not None:
            check_share(self.name, "mass", self.mass)
        check_count(self.name, "blocks", self.blocks, optional=True)

    def _scores(self, q: Tensor, k: Tensor, v: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Return the logits of the means."""
        del v, layout
        return pooled_scores(q, k, call, tile=self.tile, block=self.block)

    def _own(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        """Keep a number of blocks, the forced one counted, or a share of the mass."""
        if self.mass is not None:
            return top_mass(scores, self.mass)
        count = torch.full(scores.shape[:3], self.blocks or 1, device=scores.device)
        return top_blocks(scores, count, forced=layout.forced)
