"""MC-Sparse: single keys of greatest exact attention mass, for tiles of queries that look alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.group import Draw, kmeans, pack_tiles
from gossamer.group.pddp import pddp
from gossamer.methods.base import Method, State, logit_scale, without
from gossamer.methods.blocked import trimmed
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan
from gossamer.select import block_layout
from gossamer.select.exact import (
    FullAttention,
    Part,
    Tiles,
    full_attention,
    list_mask,
    stream_mass,
    stream_pooled,
    top_keys,
)
from gossamer.select.spans import visible_pairs
from gossamer.select.whole_head import top_rows

_GROUPINGS = ("pddp", "kmeans", "none")
_SCORES = ("exact", "pooled")
_FULL = "full"  # the key of `state` under which an anchor asks for full attention


@register
@dataclass(frozen=True, kw_only=True)
class MCSparse(Method):
    """Read, for each tile of similar queries, the keys that hold most of its exact softmax mass.

    Queries are ordered by Fast PDDP (principal-direction divisive partitioning) into tiles of equal
    size, so that a tile holds queries that look alike. Then full attention is computed once, and
    key j's mass for tile g is m_gj = sum over i in g of p_ij, with p_ij = exp(l_ij - lse_i) the
    exact probabilities. The tile reads the K keys of greatest mass, K = density * S; ties go to the
    lower index, so all ranks agree. No other choice of K keys covers more mass.

    A plan costs more than dense attention: it pays when it is reused over denoising steps, with
    the output's residual (`anchor`).

    One class holds the paper's ladder of ablations, from block-sparse attention upwards:
    `block=128, scores="pooled", grouping="none"`; then `scores="exact"`; then `block=1`; then
    `grouping="pddp"`.

    What differs from the paper: among text, p is the attention between latent tokens, since text is
    read in any case; a cut of PDDP is the multiple of the tile nearest above the middle, so that
    only one tile is short; k-means draws its start without the global random state.

    Causal calls need `grouping="none"`: tiles of consecutive queries. There the density counts
    visible pairs, keys behind the last query of a tile are never chosen, and the last valid key
    that the first query sees is always kept.

    Attributes:
        density: Share of the keys that each tile reads (paper: 0.15 to 0.25).
        grouping: How queries are put into tiles: "pddp", "kmeans" (one cluster per `tile` queries,
            whose tiles are ragged) or "none" for consecutive queries.
        block: Keys chosen together; 1 chooses single keys, more gives a plan of key blocks.
        scores: "exact" for the softmax mass, "pooled" for the logits of the tile's mean query.

    Other parameters:
        iterations: Power iterations per level of PDDP, or iterations of k-means.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "mc-sparse"
    paper: ClassVar[str] = (
        "MC-Sparse: Deconstructing and Closing the Dense-Sparse Attention Gap in Diffusion "
        "Transformers"
    )

    causal_reason: ClassVar[str] = (
        "grouping queries mixes positions in a tile, so its early queries might see none of its "
        "keys; grouping='none' has one"
    )

    density: float = 0.15
    grouping: str = "pddp"
    block: int = 1
    scores: str = "exact"
    iterations: int = 8
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_share(self.name, "density", self.density)
        for name, allowed in (("grouping", _GROUPINGS), ("scores", _SCORES)):
            if (value := getattr(self, name)) not in allowed:
                raise PlanError(f"{self.name}: {name}={described(value)} must be one of {allowed}")
        for name in ("block", "iterations", "tile"):
            check_count(self.name, name, getattr(self, name))
        if self.grouping == "none":
            object.__setattr__(self, "causal_reason", "")
            refuse_unused(self, "with grouping='none'", "iterations")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def anchor(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call | None = None,
        *,
        state: State | None = None,
    ) -> tuple[SparsePlan, Tensor]:
        """Plan, and return the full attention that exact selection computes on the way.

        Arguments and errors as `plan`.

        Returns:
            The finished plan and full attention [B, H, N, D] in float32 (float64 for float64),
            text joined. Padded queries get 0 where there are as many queries as keys.
        """
        call = Call() if call is None else call
        state = {} if state is None else state
        state[_FULL] = None
        plan = self.plan(q, k, v, call, state=state)
        latent = state.pop(_FULL)
        if latent is None:
            return plan, self._attention(q, k, v, call, call.key_valid)[1]
        if call.text is None or call.text_length == 0:
            return plan, latent[1]
        with torch.no_grad():
            return plan, self._joined(q, k, v, call, latent)

    def _joined(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, latent: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return full attention, where that between latent tokens (log-sum-exp, out) is known."""
        start, stop = call.text or (0, 0)
        text = slice(start, stop)
        valid = call.key_valid
        text_valid = None if valid is None else valid[:, text]
        rest = without(q, (start, stop), dim=2)
        lse, out = self._attention(rest, k[:, :, text], v[:, :, text], call, text_valid)
        both = torch.logaddexp(lse, latent[0])
        base = both.masked_fill(both == -torch.inf, 0.0)
        shares = ((x - base).exp()[..., None] for x in (lse, latent[0]))
        joined = out * next(shares) + latent[1] * next(shares)
        of_text = self._attention(q[:, :, text], k, v, call, valid)[1]
        return torch.cat([joined[:, :, :start], of_text, joined[:, :, start:]], dim=2)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp and output of full attention."""
        with torch.no_grad():
            return full_attention(q, k, v, self._tiles(q, k, call, None, valid))

    def _tiles(
        self, q: Tensor, k: Tensor, call: Call, query_index: Tensor | None, valid: Tensor | None
    ) -> Tiles:
        """Return the tiles of a call."""
        return Tiles(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=self.tile,
            query_index=query_index,
            causal=call.causal,
            key_valid=valid,
            scale=logit_scale(q, call),
        )

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Group the queries, score the keys and keep the best of each tile."""
        query_index = self._group(q, k, call)
        tiles = self._tiles(q, k, call, query_index, call.key_valid)
        full = None
        if state is not None and _FULL in state and self.scores == "exact":
            full = FullAttention(q, v)
        scored = self._scored(q, k, v, tiles, full)
        shape = (q.shape[0], q.shape[1], tiles.num_tiles)
        if self.block == 1:
            keys = self._tokens(scored, shape, tiles, k.device)
        else:
            keys = self._blocks(scored, shape, tiles, call, k.device)
        if state is not None and full is not None:
            state[_FULL] = full.result()
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=self.tile,
            keys=keys,
            query_index=query_index,
            causal=call.causal,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _group(self, q: Tensor, k: Tensor, call: Call) -> Tensor | None:
        """Return the query at each place of the tiles [B, H, T, tile]; None for consecutive."""
        if self.grouping == "none":
            return None
        batch, heads, length, _ = q.shape
        valid = None
        if call.key_valid is not None and length == k.shape[2]:
            valid = call.key_valid.expand(batch, -1)
        if self.grouping == "pddp":
            order = pddp(q, tile=self.tile, valid=valid, iterations=self.iterations)
            order = torch.nn.functional.pad(order, (0, -length % self.tile), value=-1)
            return order.view(batch, heads, -1, self.tile).int()
        number = -(-length // self.tile)
        active = None
        if valid is not None:
            active = (-(-valid.sum(-1) // self.tile)).clamp(min=1)
        draw = Draw(call.seed, call.layer, call.step, call.head_ids(heads, q.device), salt=0)
        clusters = kmeans(
            q, number, draw=draw, valid=valid, active=active, iterations=self.iterations
        )
        labels = clusters.labels
        if valid is not None:  # padding must not take the places of the queries it resembles
            labels = torch.where(valid[:, None], labels, number)
        return pack_tiles(labels, number + (valid is not None), self.tile)[0]

    def _scored(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, full: FullAttention | None
    ) -> Iterator[tuple[Part, Tensor]]:
        """Yield the scores [r, n, S] of some tiles at a time, -inf as in `MassPart`."""
        if self.scores == "pooled":
            yield from stream_pooled(q, k, tiles)
            return
        for got in stream_mass(q, k, None if full is None else v, tiles):
            if full is not None:
                full.add(got)
            yield got.part, got.mass

    def _tokens(
        self,
        scored: Iterator[tuple[Part, Tensor]],
        shape: tuple[int, int, int],
        tiles: Tiles,
        device: torch.device,
    ) -> KeyTokens:
        """Keep single keys; one row a tile."""
        num_keys = tiles.num_keys
        width = max(1, round(num_keys * self.density))
        if tiles.causal:  # keys at the causal edge cost less, and there are `tile` of them
            width = min(width + self.tile + 2, num_keys)
        index = torch.empty(*shape, width, dtype=torch.int32, device=device)
        count = torch.empty(shape, dtype=torch.int64, device=device)
        valid = torch.ones(1, num_keys, dtype=torch.bool, device=device)
        if tiles.key_valid is not None:
            valid = tiles.key_valid
        number = valid.sum(-1)
        budget = (number * self.density).round().long().clamp(min=1).minimum(number)
        budget, valid = budget.expand(shape[0]), valid.expand(shape[0], -1)
        for part, score in scored:
            if tiles.causal:
                keep = _keep_pairs(score, part, tiles, valid[part.batch], self.density)
                num = keep.sum(-1)
                listed = list_mask(keep, num, width)
            else:
                num = budget[part.batch].expand(score.shape[:2])
                listed = top_keys(score, num, width)
            index[part.batch, part.head, part.tile] = listed
            count[part.batch, part.head, part.tile] = num
        return KeyTokens.from_lists(index, count=count)

    def _blocks(
        self,
        scored: Iterator[tuple[Part, Tensor]],
        shape: tuple[int, int, int],
        tiles: Tiles,
        call: Call,
        device: torch.device,
    ) -> KeyBlocks:
        """Keep whole blocks by the sum of their mass or the mean of their logits."""
        num_keys = tiles.num_keys
        layout = block_layout(
            call, tiles.num_queries, num_keys, tile=self.tile, block=self.block, device=device
        )
        by_block = torch.empty(*shape, -(-num_keys // self.block), device=device)
        for part, score in scored:
            padded = torch.nn.functional.pad(score, (0, -num_keys % self.block), value=-torch.inf)
            padded = padded.unflatten(-1, (-1, self.block))  # [r, n, C, block]
            sees = padded > -torch.inf
            total = padded.masked_fill_(~sees, 0.0).sum(-1)
            if self.scores == "pooled":
                total = total / sees.sum(-1).clamp(min=1)
            by_block[part.batch, part.head, part.tile] = total.to(by_block.dtype)
        by_block.masked_fill_(~layout.possible, -torch.inf)
        lengths, sizes = (tiles.num_queries, num_keys), {"tile": self.tile, "block": self.block}
        if self.grouping == "none":
            pairs = visible_pairs(call, *lengths, **sizes, device=device)
        else:  # groups see all keys, and every tile counts the same
            num_valid = (layout.share * self.block).round().long()
            pairs = num_valid.expand(-1, -1, shape[2], -1)
        keep = top_rows(by_block, pairs, self.density, layout)
        return trimmed(KeyBlocks.from_mask(keep, block=self.block))


def _keep_pairs(score: Tensor, part: Part, tiles: Tiles, valid: Tensor, density: float) -> Tensor:
    """Keep keys by descending score until a share of a causal tile's visible pairs is spent.

    Args:
        score: [r, n, S]; -inf for padded keys and those behind the tile's last query.
        part: The tiles, of consecutive queries.
        tiles: What they see.
        valid: [r, 1, S] bool.
        density: Share of the visible pairs.

    Returns:
        [r, n, S] bool. The last valid key that the tile's first query sees, or the first valid key
        where it sees none, is kept: every query that sees any key sees it.
    """
    key = torch.arange(score.shape[-1], device=score.device)
    shift = tiles.num_keys - tiles.num_queries
    first = part.tile[:, None] * tiles.tile + shift  # [n, 1] position of the first query
    last = part.query.amax(-1, keepdim=True) + shift
    before_it = torch.where(valid & (key <= first), key, -1).amax(-1, keepdim=True)
    must = torch.where(before_it < 0, valid.byte().argmax(-1, keepdim=True), before_it)
    sees = score > -torch.inf
    cost = (last - key + 1).clamp(min=0).minimum(last - first + 1) * sees  # visible pairs
    order = score.masked_fill(sees & (key == must), torch.inf)
    order = torch.argsort(order, dim=-1, descending=True, stable=True)
    spent = cost.gather(-1, order)
    before = spent.cumsum(-1) - spent
    budget = cost.sum(-1, keepdim=True).double() * density
    within = before + spent.double() / 2 <= budget
    within[..., 0] = True
    return torch.zeros_like(sees).scatter_(-1, order, within) & sees
