"""SpargeAttn: blocks by pooled score where blocks are alike inside, and all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group import block_means
from gossamer.group.similarity import self_similarity
from gossamer.methods.base import logit_scale
from gossamer.methods.blocked import BlockedMethod
from gossamer.methods.params import check_share
from gossamer.methods.registry import register
from gossamer.select import BlockLayout, top_mass
from gossamer.select.spans import valid_queries


@register
@dataclass(frozen=True, kw_only=True)
class SpargeAttn(BlockedMethod):
    """Keep blocks by mean-pooled score, and compute whatever a mean does not represent.

    The mean key of a head is taken from its keys (smoothing). Queries are averaged over tiles, keys
    over blocks. A tile's or block's self-similarity is the mean cosine over all pairs of its
    tokens, a token with itself included: the squared length of the mean of its unit vectors. Below
    the threshold a mean says little, so such a tile reads every block, and such a block is read by
    every tile. Among the other blocks a tile keeps the best by softmax of the pooled logits.

    This is SpargeAttn's selection; its 8-bit products and the skipping of value blocks inside a
    running softmax belong to a kernel and are not done.

    Differs from the public code: the block that crosses `mass` is kept (there it is dropped, so
    that 0.9 may cover 0.8); causal calls are causal inside the diagonal block too; masks, padding,
    short sequences and any head dim are supported; at density 1 the result is exact attention.

    Attributes:
        density: Share of the visible pairs of a row (the top-k interface); 0.5, as published, if
            `mass` is not given either. It is a fixed budget: blocks below the threshold come first
            inside it, and tiles below the threshold keep the budget of the others.
        mass: Softmax mass over the pooled scores of similar blocks to cover, crossing block
            included (published with the cumulative interface: 0.98); give this or `density`.
        similarity: Threshold on self-similarity, -1…1; None for the published 0.6 with `mass` and
            -0.1, which no block is below, with `density`.
        block: Keys per block (published: 64; 128 with 64 queries on Hopper).
        tile: Queries per tile.
    """

    name: ClassVar[str] = "sparge"
    paper: ClassVar[str] = "SpargeAttn, arXiv 2502.18137"

    block: int = 64
    mass: float | None = None
    similarity: float | None = None

    def __post_init__(self) -> None:
        """Refuse contradictory budgets and fill in the published defaults."""
        if self.density is not None and self.mass is not None:
            density, mass = described(self.density), described(self.mass)
            raise PlanError(f"{self.name}: give density={density} or mass={mass}, not both")
        if self.density is None and self.mass is None:
            object.__setattr__(self, "density", 0.5)
        super().__post_init__()
        if self.mass is not None:
            check_share(self.name, "mass", self.mass)
        if self.similarity is None:
            object.__setattr__(self, "similarity", -0.1 if self.mass is None else 0.6)
        value: object = self.similarity
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
            raise PlanError(
                f"{self.name}: similarity={described(value)} must be a number with "
                "-1 <= similarity <= 1"
            )

    def _scores(self, q: Tensor, k: Tensor, v: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Return the logits of the means; +inf, or the top under a density, for dissimilar ones."""
        del v
        valid_q = valid_queries(call, q.shape[2], k.shape[2])
        valid_k = call.key_valid
        if valid_k is not None:
            valid_k = valid_k.expand(q.shape[0], -1)
            valid_q = None if valid_q is None else valid_k
        mean_q, _ = block_means(q, self.tile, valid=valid_q)  # [B, H, R, D]
        mean_k, size = block_means(k, self.block, valid=valid_k)  # [B, Hk, C, D], [B|1, C]
        weight = size[:, None, :, None] / size.sum(-1)[:, None, None, None].clamp(min=1)
        center = (mean_k * weight).sum(2, keepdim=True)  # [B, Hk, 1, D], the mean key
        group = q.shape[1] // k.shape[1]
        grouped = mean_q.unflatten(1, (-1, group))  # [B, Hk, G, R, D]
        scores = grouped @ (mean_k - center)[:, :, None].mT
        scores = scores.flatten(1, 2) * logit_scale(q, call)  # [B, H, R, C]
        threshold = 0.0 if self.similarity is None else self.similarity
        if threshold <= 0:
            return scores  # a squared length is never below
        rough_k = self_similarity(k, self.block, valid=valid_k, center=center) < threshold
        rough_k = rough_k.repeat_interleave(group, dim=1)[:, :, None]  # [B, H, 1, C]
        if self.density is not None:
            allowed = scores.masked_fill(~layout.possible, 0.0)
            span = allowed.amax(-1, keepdim=True) - allowed.amin(-1, keepdim=True) + 1
            return torch.where(rough_k, scores + span, scores)
        rough_q = self_similarity(q, self.tile, valid=valid_q) < threshold
        return scores.masked_fill(rough_k | rough_q[..., None], torch.inf)

    def _own(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        """Keep what must be computed, and cover `mass` among the rest."""
        del layout
        always = scores == torch.inf
        mass = 1.0 if self.mass is None else self.mass
        return always | top_mass(scores.masked_fill(always, -torch.inf), mass)
