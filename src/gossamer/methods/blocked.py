"""What methods share that score blocks of consecutive keys: they differ in scores and budgets."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import block_means
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.params import check_count, check_share
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.select import BlockLayout, block_layout
from gossamer.select.spans import visible_pairs
from gossamer.select.whole_head import top_rows


@dataclass(frozen=True, kw_only=True)
class BlockedMethod(Method):
    """Keep, for each tile of consecutive queries, some blocks of consecutive keys.

    A subclass scores the pairs of tiles and blocks and, where it has a budget of its own, says
    which are kept under it.

    Attributes:
        density: Share of the visible pairs, equal in all rows, best scores first. Blocks cut by a
            causal edge or by the end cost what they hold, so the whole plan meets it to half a
            block. None: the method's own budget.
        block: Keys per block.
        tile: Queries per tile.
    """

    density: float | None = None
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        for name in ("block", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    @abstractmethod
    def _scores(self, q: Tensor, k: Tensor, v: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Return the score of each tile and block, [B, H, R, C] floating; any monotone form.

        Blocks that the layout does not allow are masked afterwards.
        """

    @abstractmethod
    def _own(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        """Return the blocks kept under the method's own budget, [B, H, R, C] bool.

        Forced blocks are added afterwards.

        Args:
            scores: [B, H, R, C], -inf where the layout allows nothing.
            layout: The blocks that tiles may read.
        """

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Score pairs of tiles and blocks and keep the best of each row."""
        del state
        lengths, sizes = (q.shape[2], k.shape[2]), {"tile": self.tile, "block": self.block}
        layout = block_layout(call, *lengths, **sizes, device=q.device)
        scores = self._scores(q, k, v, call, layout).masked_fill(~layout.possible, -torch.inf)
        if self.density is not None:
            pairs = visible_pairs(call, *lengths, **sizes, device=q.device)
            keep = top_rows(scores, pairs, self.density, layout)
        else:
            keep = self._own(scores, layout)
            keep = keep if layout.forced is None else keep | layout.forced
        return block_plan(keep, *lengths, call, **sizes)


def pooled_scores(q: Tensor, k: Tensor, call: Call, *, tile: int, block: int) -> Tensor:
    """Return the logits of tile and block means over valid tokens, [B, H, R, C] float32."""
    valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
    valid_q = valid if q.shape[2] == k.shape[2] else None
    mean_q, _ = block_means(q, tile, valid=valid_q)  # [B, H, R, D]
    mean_k, _ = block_means(k, block, valid=valid)  # [B, Hk, C, D]
    grouped = mean_q.unflatten(1, (k.shape[1], -1))  # [B, Hk, G, R, D]
    return (grouped @ mean_k[:, :, None].mT).flatten(1, 2) * logit_scale(q, call)


def block_plan(
    keep: Tensor, num_queries: int, num_keys: int, call: Call, *, tile: int, block: int
) -> SparsePlan:
    """Return the plan of a block mask [B|1, H|1, R, C] bool over consecutive tiles and blocks.

    A row of which padding leaves nothing keeps the first block that it may read.
    """
    if call.key_valid is not None:
        layout = block_layout(
            call, num_queries, num_keys, tile=tile, block=block, device=keep.device
        )
        keep = keep & layout.possible
        first = layout.possible & (layout.possible.long().cumsum(-1) == 1)
        keep = keep | (first & ~keep.any(-1, keepdim=True))
    return SparsePlan(
        num_queries=num_queries,
        num_keys=num_keys,
        tile=tile,
        keys=trimmed(KeyBlocks.from_mask(keep, block=block)),
        causal=call.causal,
        key_valid=call.key_valid,
        scale=call.scale,
    )


def trimmed(keys: KeyBlocks) -> KeyBlocks:
    """Drop the columns that no row uses, where reading the counts does not synchronise."""
    if keys.index.device.type != "cpu" or keys.count.numel() == 0:
        return keys
    width = max(int(keys.count.max()), 1)
    return KeyBlocks(
        block=keys.block,
        count=keys.count,
        index=keys.index[..., :width],
        key_order=keys.key_order,
    )
