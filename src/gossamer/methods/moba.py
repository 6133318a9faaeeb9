"""MoBA: chunks of keys gated by their means, the own chunk always among the chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import block_means
from gossamer.group.places import place_means
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.blocked import trimmed
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.select import BlockLayout, top_blocks
from gossamer.select.whole_head import top_rows

_CHUNK = 2048  # keys per chunk in the paper's long-context runs
_LEAST_CHUNKS = 32  # of a sequence too short for these
_CHUNK_BYTES = 32 << 20  # of the gates of queries held at once


@register
@dataclass(frozen=True, kw_only=True)
class MoBA(Method):
    """Read the own chunk and the chunks of keys whose mean scores highest against the query.

    The gate of chunk c for one query token of one head is q . mean(k over c). The query's own chunk
    is always chosen and counts in top-k; chunks in the future of a causal query are never
    candidates, and its own chunk is cut causally. k = 1 is attention inside the own chunk, by the
    same rule as any other k.

    Gates are per query token, while the plan holds whole tiles. With `top_k` a tile reads the union
    of what its queries choose (tile=1 is exact, and slow). Under a `density` the tile has one gate,
    the mean of its queries' gates, since the size of a union is not to be asked for. Tiles never
    cross a chunk's border, so that all queries of one have the same own chunk.

    Differs from the public code: the ragged last chunk is a candidate for all queries that see it,
    grouped heads share keys in memory, and top-1 is no special case. Without causality there is no
    future, and every chunk is a candidate; where numbers of queries and keys differ then, no chunk
    is a query's own.

    Attributes:
        density: Share of the visible pairs: the own chunk, then the best by the mean gate, whose
            fractions are spread over the rows. At least the own chunk. None: `top_k` decides.
        top_k: Chunks each query chooses, its own counted (paper: 3); clamped to those there are.
        chunk: Keys per chunk. None: 2048 as in the paper, less where a sequence would have fewer
            than 32 chunks.
        tile: Queries per tile; at most a chunk.
    """

    name: ClassVar[str] = "moba"
    paper: ClassVar[str] = "MoBA: Mixture of Block Attention for Long-Context LLMs, 2502.13189"

    density: float | None = None
    top_k: int = 3
    chunk: int | None = None
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        for name in ("top_k", "chunk", "tile"):
            check_count(self.name, name, getattr(self, name), optional=name == "chunk")
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "top_k")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Gate the chunks, per query or per tile, and keep the best."""
        del v, state
        chunk = self._chunk(k.shape[2])
        layout = _lay_out(q, k, call, chunk, min(self.tile, chunk))
        valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
        mean_k, _ = block_means(k, chunk, valid=valid)
        mean_k = mean_k * logit_scale(q, call)  # [B, Hk, C, D]
        if self.density is None:
            keep = self._union(q, mean_k, layout)
        else:
            keep = self._mean(q, mean_k, layout)
        possible = layout.pairs > 0
        keep = keep & possible
        first = possible & (possible.long().cumsum(-1) == 1)
        keep = keep | (first & ~keep.any(-1, keepdim=True))
        tile = layout.places.shape[1]
        shift = k.shape[2] - q.shape[2] if call.causal else 0
        consecutive = chunk % tile == 0 and shift % tile == 0
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            tile=tile,
            keys=trimmed(KeyBlocks.from_mask(keep, block=chunk)),
            query_index=None if consecutive else layout.places.int()[None, None],
            causal=call.causal,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _chunk(self, num_keys: int) -> int:
        """Return the keys per chunk; for short sequences a multiple of 64."""
        if self.chunk is not None:
            return self.chunk
        return min(_CHUNK, -(-num_keys // (64 * _LEAST_CHUNKS)) * 64)

    def _mean(self, q: Tensor, mean_k: Tensor, layout: _Layout) -> Tensor:
        """Keep what the density pays for by the mean gate of each tile, [B, H, R, C] bool."""
        # A query's gates are linear in it, so that their mean is the gate of the mean.
        mean_q, _ = place_means(q, layout.places, valid=layout.valid_queries)
        gate = _gates(mean_q, mean_k).masked_fill(layout.pairs == 0, -torch.inf)
        if self.density is None or self.density >= 1:
            return gate > -torch.inf
        forced = None if layout.own is None else layout.own.expand(gate.shape)
        blocks = BlockLayout(layout.pairs > 0, layout.pairs.double(), forced)
        return top_rows(gate, layout.paid, self.density, blocks)

    def _union(self, q: Tensor, mean_k: Tensor, layout: _Layout) -> Tensor:
        """Keep what any query of each tile chooses, [B, H, R, C] bool."""
        batch, heads, _, dim = q.shape
        num_rows, tile = layout.places.shape
        num_chunks = mean_k.shape[2]
        counted = layout.places >= 0  # [R, tile]
        source = layout.places.clamp(min=0)
        if layout.valid_queries is not None:
            counted = counted & layout.valid_queries[:, source]  # [B|1, R, tile]
        is_query = counted.view(-1, 1, num_rows, tile, 1)
        # A tile of padding alone chooses as zeros do.
        counted = counted | ~counted.any(-1, keepdim=True)
        counted = counted.view(-1, 1, num_rows, tile, 1)
        keep = torch.zeros(batch, heads, num_rows, num_chunks, dtype=torch.bool, device=q.device)
        per_query = 8 * max(num_chunks, dim)  # the order of the gates is int64
        rows = max(1, _CHUNK_BYTES // (batch * heads * tile * per_query))
        for begin in range(0, num_rows, rows):
            part = slice(begin, begin + rows)
            tokens = q[:, :, source[part].flatten()].float()  # [B, H, n * tile, D]
            if layout.valid_queries is not None:
                tokens = tokens.masked_fill(~is_query[:, :, part].flatten(2, 3), 0.0)
            gate = _gates(tokens, mean_k).unflatten(2, (-1, tile))  # [B, H, n, tile, C]
            gate = gate.masked_fill(layout.pairs[:, :, part, None] == 0, -torch.inf)
            own = None
            if layout.own is not None:
                own = layout.own[:, :, part, None].expand(gate.shape)
            count = torch.full(gate.shape[:4], self.top_k, device=q.device)
            chosen = top_blocks(gate, count, forced=own) & counted[:, :, part]
            keep[:, :, part] = chosen.any(3)
        return keep if layout.own is None else keep | layout.own


class _Layout(NamedTuple):
    """Tiles that never cross a chunk's border, and what they see of each chunk.

    Attributes:
        places: [R, tile] int64, the query at each place, -1 for none.
        valid_queries: [B|1, N] bool, queries that are no padding; None where that is unknown.
        pairs: [B|1, 1, R, C] int64, visible pairs of each tile and chunk.
        paid: [B|1, 1, R, C] int64, those of valid queries, which budgets are made of.
        own: [B|1, 1, R, C] bool, the chunks that each tile reads in any case: its own, and the one
            before where padding leaves some of its queries nothing in it; None without own chunks.
    """

    places: Tensor
    valid_queries: Tensor | None
    pairs: Tensor
    paid: Tensor
    own: Tensor | None


def _lay_out(q: Tensor, k: Tensor, call: Call, chunk: int, tile: int) -> _Layout:
    """Cut the queries into tiles inside chunks and count the visible pairs."""
    num_queries, num_keys, device = q.shape[2], k.shape[2], q.device
    aligned = call.causal or num_queries == num_keys
    shift = num_keys - num_queries if call.causal else 0
    position = _positions(shift, shift + num_queries, chunk, tile, device)  # [R, tile]
    is_query = (position >= shift) & (position < shift + num_queries)
    places = torch.where(is_query, position - shift, -1)
    valid = call.key_valid
    if valid is None:
        valid = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    running = torch.nn.functional.pad(valid.long().cumsum(-1), (1, 0))  # [B|1, S + 1]
    begin = torch.arange(0, num_keys, chunk, device=device)  # [C]
    size = running[:, (begin + chunk).clamp(max=num_keys)] - running[:, begin]  # [B|1, C]
    valid_queries = call.key_valid if num_queries == num_keys else None
    counted = is_query[None]
    if valid_queries is not None:
        counted = counted & valid_queries[:, places.clamp(min=0)]  # [B|1, R, tile]
    pairs, paid = (
        (x.sum(-1)[..., None] * size[:, None])[:, None] for x in (is_query[None], counted)
    )  # [B|1, 1, R, C]
    if not aligned:
        return _Layout(places, valid_queries, pairs, paid, None)
    column = torch.arange(len(begin), device=device)
    number = (position[:, :1] // chunk)[None, None]  # [1, 1, R, 1], below 0 before the first key
    own = column == number
    if call.causal:
        # Inside its own chunk a query sees the keys up to its position, and of earlier ones all.
        own_begin = (number[0, 0] * chunk).clamp(min=0)
        seen = running[:, (position + 1).clamp(0, num_keys)] - running[:, own_begin]
        seen = torch.where(is_query & (position >= 0), seen, 0)  # [B|1, R, tile]
        pairs, paid = (
            torch.where(column < number, x, own * y.sum(-1)[:, None, :, None])
            for x, y in ((pairs, seen), (paid, seen * counted))
        )
        blind = (is_query & (position >= 0) & (seen == 0)).any(-1)[:, None, :, None]
        earlier = torch.where((size > 0)[:, None, None] & (column < number), column, -1)
        blind = blind & (pairs * own > 0).any(-1, keepdim=True)  # else gates choose among all
        own = own | (blind & (earlier >= 0) & (earlier == earlier.amax(-1, keepdim=True)))
    return _Layout(places, valid_queries, pairs, paid, own & (pairs > 0))


def _positions(start: int, stop: int, chunk: int, tile: int, device: torch.device) -> Tensor:
    """Return the positions of tiles that cover start … stop, [R, tile]; `stop` past a chunk's end.

    A chunk's tiles begin with it; the last of them may be short.
    """
    per_chunk = -(-chunk // tile)
    first = start // chunk * per_chunk + start % chunk // tile
    last = (stop - 1) // chunk * per_chunk + (stop - 1) % chunk // tile
    number = torch.arange(first, last + 1, device=device)[:, None]
    inside = number % per_chunk * tile + torch.arange(tile, device=device)
    return torch.where(inside < chunk, number // per_chunk * chunk + inside, stop)


def _gates(tokens: Tensor, mean_k: Tensor) -> Tensor:
    """Return the products of tokens [B, H, n, D] and chunk means [B, Hk, C, D], [B, H, n, C]."""
    grouped = tokens.unflatten(1, (mean_k.shape[1], -1))  # [B, Hk, G, n, D]
    return (grouped @ mean_k[:, :, None].mT).flatten(1, 2)
