"""XAttention: blocks by the mass that strided anti-diagonals estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group.antidiagonal import Strides, antidiagonal_mass
from gossamer.methods.base import logit_scale
from gossamer.methods.blocked import BlockedMethod
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.select import BlockLayout
from gossamer.select.mass_beside import top_mass_beside
from gossamer.select.spans import valid_queries


@register
@dataclass(frozen=True, kw_only=True)
class XAttention(BlockedMethod):
    """Keep the blocks that hold most of a mass estimated from anti-diagonals.

    Tokens are grouped by `stride`. The logit of a query group a and a key group b is the mean over
    one anti-diagonal of the square of their pairs,

        l_ab = scale / stride * sum_i q[a * stride + stride - 1 - i] . k[b * stride + i],

    which crosses every vertical and every slash pattern. Softmax over the key groups that a group
    sees, summed over a tile's and a block's groups, is the block's mass. Each tile keeps the fewest
    blocks that reach `mass` of its total, the crossing one included. Causal tiles keep the first
    block that holds a key (the sink, a column) and the diagonal in any case; their mass counts
    first.

    Differs from the public code: selection does not depend on how the work is cut into chunks
    (there, a length that is a whole number of chunks hides every earlier chunk); `keep_sink` keeps
    a key column, not a query row; calls that are not causal force no block unless asked; no mass
    falls on padding: a ragged group is filled up with the mean of its tokens, and weighs as many
    keys as it has. Batches, padding and grouped heads are handled without repeating keys.

    Attributes:
        density: Share of the visible pairs of every row instead of `mass`; the sink comes first.
        mass: Share of the estimated mass to cover (paper: 0.9; its prefill function 0.8).
        keep_sink: Whether tiles of calls that are not causal keep the first key block too.
        stride: Tokens per group (paper: 8 or 16); cost falls as 1 / stride.
        block: Keys per block, a multiple of `stride`.
        tile: Queries per tile, a multiple of `stride`.
    """

    name: ClassVar[str] = "xattention"
    paper: ClassVar[str] = "XAttention, arXiv 2503.16428"

    mass: float = 0.9
    keep_sink: bool = False
    stride: int = 8

    def __post_init__(self) -> None:
        """Refuse values out of range, and blocks that cut groups."""
        super().__post_init__()
        check_share(self.name, "mass", self.mass)
        check_count(self.name, "stride", self.stride)
        if not isinstance(self.keep_sink, bool):
            raise PlanError(
                f"{self.name}: keep_sink={described(self.keep_sink)} must be True or False"
            )
        for name in ("block", "tile"):
            size = getattr(self, name)
            if size % self.stride:
                raise PlanError(
                    f"{self.name}: {name}={size} must be a multiple of stride={self.stride}"
                )
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "mass")

    def _scores(self, q: Tensor, k: Tensor, v: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Return the log of the estimated mass of each tile and block."""
        del v
        strides = Strides(
            stride=self.stride,
            tile=self.tile,
            block=self.block,
            scale=logit_scale(q, call),
            causal=call.causal,
        )
        valid_q = valid_queries(call, q.shape[2], k.shape[2])
        mass = antidiagonal_mass(q, k, strides, valid_q=valid_q, valid_k=call.key_valid)
        # Softmax may round to zero, but only blocks that nobody sees are out of the question.
        scores = mass.clamp_(min=torch.finfo(torch.float32).tiny).log_()
        if self.density is None:
            return scores
        best = torch.finfo(torch.float32).max  # first, but below what the layout forces
        return scores.masked_fill(self._sink(layout), best)

    def _own(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        """Cover `mass`, counting the sink and the diagonal first."""
        kept = self._sink(layout)
        if layout.forced is not None:
            # From the block that all of a tile's queries see on, it is the diagonal.
            kept = kept | (layout.forced.cummax(-1).values & layout.possible)
        return top_mass_beside(scores, self.mass, kept.expand(scores.shape))

    def _sink(self, layout: BlockLayout) -> Tensor:
        """Return the first block that a tile may read, where it is kept: [B|1, 1, R|1, C] bool."""
        if layout.forced is None and not self.keep_sink:
            return torch.zeros_like(layout.possible)
        return layout.possible & (layout.possible.long().cumsum(-1) == 1)
