"""DraftAttention: regions of each frame, and the top entries of a low-resolution attention map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.methods.params import check_share
from gossamer.methods.regions import RegionMethod, Regions, check_sides
from gossamer.methods.registry import register
from gossamer.select.spread import take_spread


@register
@dataclass(frozen=True, kw_only=True)
class DraftAttention(RegionMethod):
    """Read the region pairs with the highest entries in a draft of the attention map.

    Each frame is cut into regions; queries and keys are averaged over regions, and the softmax of
    their logits is the draft. Per head the top entries of the whole draft are kept (so rows share
    one budget, and peaked rows win over flat ones), with tokens permuted region by region.

    Differs from the public code, where a flat row can end without any key: every row keeps its best
    region, paid from the same budget. The grid need not be a multiple of the region; regions at the
    borders are ragged, and means, budgets and density count their true tokens. A call without a
    grid is cut into runs of as many consecutive tokens as a region holds. Text is read by every row
    and reads everything.

    Attributes:
        density: Share of the visible pairs (1 - sparsity of the public code, whose default is 0.9);
            where each row's best region alone exceeds it, these are the plan.
        region: (rows, columns) of a region inside a frame (paper: 8, 16).
    """

    name: ClassVar[str] = "draft"
    paper: ClassVar[str] = "DraftAttention, arXiv 2505.14708"

    density: float = 0.1
    region: tuple[int, int] = (8, 16)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_share(self.name, "density", self.density)  # there is no other budget
        object.__setattr__(self, "region", check_sides(self.name, "region", self.region, 2))

    def _shape(self) -> tuple[int, int, int]:
        """Return the region, one frame deep."""
        return (1, *self.region)

    def _keep(self, regions: Regions) -> Tensor:
        """Keep each row's best and the top entries of the flattened map."""
        num_regions = regions.scores.shape[-1]
        possible = regions.scores > -torch.inf
        if self.density >= 1:
            return possible
        # The map's log: where probabilities underflow they would tie.
        draft = regions.scores.log_softmax(-1).masked_fill(~possible, -torch.inf)
        # Rows without a valid query would compete with noise, and padding change the others.
        has_query = (regions.num_queries > 0)[:, None, :, None]
        draft = draft.masked_fill(~has_query, -torch.inf)
        best = draft.argmax(-1, keepdim=True)
        forced = torch.zeros_like(possible).scatter_(-1, best, value=True)
        pairs = regions.num_queries[:, None, :, None] * regions.num_keys[:, None, None]
        pairs = pairs.flatten(2)[:, :, None]  # [B|1, 1, 1, R * C]
        budget = pairs.sum(-1).double() * self.density
        kept = take_spread(
            draft.flatten(2)[:, :, None], pairs, budget, forced=forced.flatten(2)[:, :, None]
        )
        return kept.unflatten(3, (-1, num_regions))[:, :, 0]
