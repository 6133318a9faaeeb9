"""Block-scored methods whose density is met to half a block, whatever sizes blocks have."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from torch import Tensor

from gossamer.call import Call
from gossamer.methods.base import State
from gossamer.methods.blocked import BlockedMethod, block_plan
from gossamer.plan import SparsePlan
from gossamer.select import block_layout
from gossamer.select.spans import visible_pairs
from gossamer.select.whole_head import top_rows


@dataclass(frozen=True, kw_only=True)
class BudgetedMethod(BlockedMethod, ABC):
    """A `BlockedMethod` that counts pairs, not blocks, where a density is its budget.

    Rows keep equal shares of their visible pairs. Blocks cut by the causal edge or by the end of
    the sequence cost what they hold, so the density is met on short and misaligned calls too.
    """

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Score pairs of tiles and blocks and keep the best of each row."""
        if self.density is None:
            return super()._plan_latent(q, k, v, call, state)
        lengths, tile, block = (q.shape[2], k.shape[2]), self.tile, self.block
        layout = block_layout(call, *lengths, tile=tile, block=block, device=q.device)
        pairs = visible_pairs(call, *lengths, tile=tile, block=block, device=q.device)
        keep = top_rows(self._scores(q, k, v, call, layout), pairs, self.density, layout)
        return block_plan(keep, *lengths, call, tile=tile, block=block)
