"""NSA: blocks selected by compressed keys, joined with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError
from gossamer.group import block_means
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.blocked import block_plan
from gossamer.methods.params import check_count, check_share, check_size, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan
from gossamer.select import BlockLayout, block_layout, top_blocks
from gossamer.select.spans import visible_pairs
from gossamer.select.spread import take_spread

_CHUNK_BYTES = 32 << 20  # of the compressed logits of queries held at once


@register
@dataclass(frozen=True, kw_only=True)
class NSA(Method):
    """Read the blocks that compressed keys select, the nearest keys and the first block.

    Keys are compressed to the means of runs of `length` keys, one every `stride`. A query's softmax
    over the compressed keys, summed over the query heads of one KV head, gives the importance of a
    block as the sum over the runs that overlap it (NSA, section 3.3): selection is per KV head.
    Each query selects its `selected` most important blocks; the first `first_blocks` and the
    `local_blocks` next to it, its own among them, are always selected and count.

    NSA adds three branches (compressed, selected, window), each weighted by a trained gate. Without
    training there is no gate: the compressed branch serves selection only, and the other two are
    one softmax over the union of selected blocks and window. All is held in whole blocks, and a
    tile reads the union of what its queries read (tile=1 is exact up to the window's whole blocks,
    and slow). Under a `density` a tile selects by the importance summed over its queries, since the
    size of a union is not to be asked for.

    Differs from the public code: any number of keys (the last run and the last block may be
    ragged), more blocks asked than there are is every block, any head dim, and any number of query
    heads a KV head. Without causality the window lies on both sides, half on each, and local blocks
    are those on either side; where numbers of queries and keys differ then, queries have no place
    among the keys, and neither window nor local blocks exist.

    Attributes:
        density: Share of the visible pairs. The first and the own blocks come first, then at most
            half of what the row may read goes to the window, the rest to selected blocks, its
            fractions spread over the rows. None: the counts decide.
        selected: Blocks each query selects (paper: 16), forced ones counted.
        first_blocks: First blocks that hold a key, selected in any case (paper: 1).
        local_blocks: Blocks up to the query's own, and without causality from it, that are selected
            in any case (paper: 2).
        window: Keys of the sliding window (paper: 512), the query's own counted.
        length: Keys that one compressed key stands for (paper: 32); a multiple of `stride`.
        stride: Keys from one compressed key to the next (paper: 16).
        block: Keys per block (paper: 64); a multiple of `stride`.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "nsa"
    paper: ClassVar[str] = "Native Sparse Attention, arXiv 2502.11089"

    density: float | None = None
    selected: int = 16
    first_blocks: int = 1
    local_blocks: int = 2
    window: int = 512
    length: int = 32
    stride: int = 16
    block: int = 64
    tile: int = 64

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        for name in ("selected", "local_blocks", "length", "stride", "block", "tile"):
            check_count(self.name, name, getattr(self, name))
        for name in ("first_blocks", "window"):
            check_size(self.name, name, getattr(self, name))
        for name in ("length", "block"):
            if getattr(self, name) % self.stride:
                raise PlanError(
                    f"{self.name}: {name}={getattr(self, name)} must be a multiple of "
                    f"stride={self.stride}"
                )
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "selected", "local_blocks")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Select blocks per KV head, join the window and the first blocks."""
        del v, state
        num_queries, num_keys = q.shape[2], k.shape[2]
        layout = block_layout(
            call, num_queries, num_keys, tile=self.tile, block=self.block, device=q.device
        )
        if self.density is not None and self.density >= 1:
            keep = layout.possible.expand(-1, -1, -(-num_queries // self.tile), -1)
        else:
            choose = self._by_count if self.density is None else self._by_density
            keep = choose(q, k, call, layout).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return block_plan(keep, num_queries, num_keys, call, tile=self.tile, block=self.block)

    def _by_count(self, q: Tensor, k: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Keep what any query of each tile selects or has in its window, [B, Hk, R, C] bool."""
        near = self._near(self.window, q.shape[2], k.shape[2], call, q.device)
        keep = near | self._first(layout)
        keep = keep if layout.forced is None else keep | layout.forced
        keep = keep.expand(q.shape[0], k.shape[1], -1, -1).clone()
        for part in self._importance(q, k, call):
            position = part.position[..., None]  # [t, tile, 1]
            column = torch.arange(part.importance.shape[-1], device=q.device)
            holds_keys = (layout.share > 0).any(2, keepdim=True)[:, :, None]
            possible = holds_keys & ((column * self.block <= position) | (not call.causal))
            forced = self._first(layout)[:, :, None] | torch.zeros_like(possible)
            if call.causal or q.shape[2] == k.shape[2]:
                away = position // self.block - column
                local = away.abs() < self.local_blocks
                forced = forced | (local & ((away >= 0) | (not call.causal)))
            scores = part.importance.masked_fill(~possible, -torch.inf)
            forced = (forced & possible).expand(scores.shape)
            count = torch.full(scores.shape[:4], self.selected, device=q.device)
            count = count.maximum(forced.sum(-1))  # forced blocks are never given up
            chosen = top_blocks(scores, count, forced=forced) & part.counted
            keep[:, :, part.rows] |= chosen.any(3)
        return keep & layout.possible

    def _by_density(self, q: Tensor, k: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Keep what the density pays for, [B, Hk, R, C] bool."""
        shape = (q.shape[0], k.shape[1], -(-q.shape[2] // self.tile), layout.share.shape[-1])
        importance = torch.empty(shape, device=q.device)
        for part in self._importance(q, k, call):
            importance[:, :, part.rows] = part.importance.sum(3)
        importance = importance.masked_fill(~layout.possible, -torch.inf)
        density = 1.0 if self.density is None else self.density
        share = self._share(q, k, call, layout)
        visible = share.sum(-1)  # [B|1, 1, R|1], in blocks
        half = (visible * (self.block * density / 2)).floor().long()
        # A tile's own keys, and up to a block by whole blocks, are read beside the window.
        window = (half - self.tile - self.block).clamp(0, self.window)[..., None]
        forced = self._near(window, q.shape[2], k.shape[2], call, q.device) | self._first(layout)
        if layout.forced is not None:
            forced = forced | layout.forced
        budget = visible.double() * density
        return take_spread(
            importance,
            share,
            budget,
            forced=forced.expand(importance.shape),
            carry=call.causal,
        )

    def _share(self, q: Tensor, k: Tensor, call: Call, layout: BlockLayout) -> Tensor:
        """Return the layout's share without queries of padding, which must not enter budgets.

        Tiles of padding alone keep theirs.
        """
        if not call.causal or call.key_valid is None:
            return layout.share
        sizes = {"tile": self.tile, "block": self.block}
        pairs = visible_pairs(call, q.shape[2], k.shape[2], **sizes, device=q.device)
        share = pairs.double() / (self.tile * self.block)
        return torch.where((pairs > 0).any(-1, keepdim=True), share, layout.share)

    def _near(
        self,
        window: int | Tensor,
        num_queries: int,
        num_keys: int,
        call: Call,
        device: torch.device,
    ) -> Tensor:
        """Return the blocks in which a tile's queries or their windows lie, [B|1, 1, R, C] bool.

        Args:
            window: Keys of the window, or [B|1, 1, R|1, 1] int64 of them.
            num_queries: N.
            num_keys: S.
            call: The call.
            device: Where the result lies.
        """
        tile_start = torch.arange(0, num_queries, self.tile, device=device)[:, None]  # [R, 1]
        tile_end = (tile_start + self.tile).clamp(max=num_queries)
        begin = torch.arange(0, num_keys, self.block, device=device)
        if not call.causal and num_queries != num_keys:
            none = torch.zeros(len(tile_start), len(begin), dtype=torch.bool, device=device)
            return none[None, None]
        shift = num_keys - num_queries
        # A filled tensor, unlike a copied number, does not wait for an accelerator.
        reach = window if isinstance(window, Tensor) else begin.new_full((1,), window)
        before = (reach - 1).clamp(min=0) if call.causal else reach // 2
        low = tile_start + shift - before
        high = tile_end + shift - 1 + (0 if call.causal else reach // 2)
        near = (begin <= high) & (begin + self.block > low)
        return near if near.dim() == 4 else near[None, None]

    def _first(self, layout: BlockLayout) -> Tensor:
        """Return which blocks are the first that hold a key, [B|1, 1, 1, C] bool."""
        holds_keys = (layout.share > 0).any(2, keepdim=True)
        return holds_keys & (holds_keys.cumsum(-1) <= self.first_blocks)

    def _importance(self, q: Tensor, k: Tensor, call: Call) -> Iterator[_Part]:
        """Yield the importance of every block for each query, some tiles at a time."""
        batch, heads, num_queries, dim = q.shape
        kv_heads, num_keys = k.shape[1:3]
        tile, device = self.tile, q.device
        runs, last, exists = self._compress(k, call)
        shift = num_keys - num_queries if call.causal else 0
        valid = call.key_valid if num_queries == num_keys else None
        per_tile = 4 * batch * heads * tile * max(runs.shape[2], dim)
        chunk = max(1, _CHUNK_BYTES // per_tile) * tile
        for begin in range(0, num_queries, chunk):
            query = torch.arange(begin, min(begin + chunk, num_queries), device=device)
            tokens = q[:, :, begin : begin + chunk].float()
            counted = torch.ones(1, len(query), dtype=torch.bool, device=device)
            if valid is not None:
                counted = valid[:, begin : begin + chunk]
                tokens = tokens.masked_fill(~counted[:, None, :, None], 0.0)
            grouped = tokens.unflatten(1, (kv_heads, -1))  # [B, Hk, G, n, D]
            logits = grouped @ runs[:, :, None].mT * logit_scale(q, call)  # [B, Hk, G, n, M]
            seen = exists[:, None, None, None]
            if call.causal:
                seen = seen & (last[:, None, None, None] <= query[:, None] + shift)
            mass = logits.masked_fill_(~seen, -torch.inf).softmax(-1)
            mass = mass.masked_fill_(~seen, 0.0)  # a query without any run has no mass: NaN
            mass = mass.sum(2) * counted[:, None, :, None]  # [B, Hk, n, M]
            past = -len(query) % tile  # places of the last tile without a query
            mass = torch.nn.functional.pad(mass, (0, 0, 0, past))
            importance = self._by_block(mass, num_keys).unflatten(2, (-1, tile))
            counted = torch.nn.functional.pad(counted, (0, past)).unflatten(1, (-1, tile))
            # A tile of padding alone selects as queries without preference do.
            counted = counted | ~counted.any(-1, keepdim=True)
            counted = counted.view(-1, 1, *importance.shape[2:4], 1)
            position = torch.nn.functional.pad(query + shift, (0, past)).view(-1, tile)
            rows = slice(begin // tile, (begin + chunk) // tile)
            yield _Part(rows, importance, position, counted)

    def _compress(self, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Average runs of valid keys.

        Returns:
            means [B, Hk, M, D] float32, the last key of each run [B|1, M] int64, and which runs
            exist [B|1, M] bool: they hold a valid key, and none begins after one that reaches the
            last of all.
        """
        num_keys, device = k.shape[2], k.device
        valid = None if call.key_valid is None else call.key_valid.expand(k.shape[0], -1)
        means, size = block_means(k, self.stride, valid=valid)  # of strides
        per_run = self.length // self.stride
        number = max(1, -(-(num_keys - self.length) // self.stride) + 1)
        past = max(0, number + per_run - 1 - size.shape[1])
        sums = torch.nn.functional.pad(means * size[:, None, :, None], (0, 0, 0, past))
        size = torch.nn.functional.pad(size, (0, past)).unfold(1, per_run, 1).sum(-1)
        means = sums.unfold(2, per_run, 1).sum(-1) / size[:, None, :, None].clamp(min=1)
        end = torch.full((1, 1), num_keys, device=device)
        if valid is not None:
            end = (torch.arange(1, num_keys + 1, device=device) * valid).amax(1, keepdim=True)
        start = torch.arange(number, device=device) * self.stride
        last = (start + self.length).minimum(end) - 1  # [B|1, M]
        reached = (start > 0) & (start - self.stride + self.length >= end)
        return means, last, (size > 0) & ~reached

    def _by_block(self, mass: Tensor, num_keys: int) -> Tensor:
        """Return the mass of each block [..., C]: of the runs [..., M] over each of its strides."""
        per_run, number = self.length // self.stride, mass.shape[-1]
        num_blocks = -(-num_keys // self.block)
        per_block = self.block // self.stride
        width = max(num_blocks * per_block, number + per_run - 1)
        by_stride = mass.new_zeros(*mass.shape[:-1], width)
        for place in range(per_run):
            by_stride[..., place : place + number] += mass
        return by_stride[..., : num_blocks * per_block].unflatten(-1, (-1, per_block)).sum(-1)


class _Part(NamedTuple):
    """The importance of blocks for the queries of some tiles.

    Attributes:
        rows: Which tiles.
        importance: [B, Hk, t, tile, C] float32, 0 for queries that do not count.
        position: [t, tile] int64, the position of each query among the keys.
        counted: [B|1, 1, t, tile, 1] bool, places whose selection counts: of queries that
            are no padding, or all places of a tile without such.
    """

    rows: slice
    importance: Tensor
    position: Tensor
    counted: Tensor
