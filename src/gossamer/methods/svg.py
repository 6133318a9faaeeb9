"""SVG: each head reads a band over space or a band over time, whichever loses less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.counter import uniform
from gossamer.errors import PlanError
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.blocked import trimmed
from gossamer.methods.geometric import padded_order, places_valid, valid_tokens
from gossamer.methods.params import check_count, check_share, check_size
from gossamer.methods.registry import register
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.select.threshold import count_pairs, force_first, reach_density

_SALT = 12  # apart from the salts of other methods
_CHUNK_BYTES = 64 << 20  # of the sampled rows' logits, or of the keys they are made of
_PIECE = 4096  # keys at once


@register
@dataclass(frozen=True, kw_only=True)
class SVG(Method):
    """Give each head a band in frame-major or in token-major order, by trial on sampled queries.

    In frame-major (raster) order the band |p - p'| <= w holds neighbours in space; in token-major
    order, where the tokens at one place of all frames lie together, it holds the same place at
    other times. Both have the half-width w = (1 - sqrt(1 - density)) * N, which computes `density`
    of the pairs. For every call and head, `samples` random queries attend to all keys, through the
    spatial band and through the temporal one; the band with the lower mean squared error of the
    output is used (Sparse VideoGen, arXiv 2502.01776, sections 3 and 4). Temporal heads read
    permuted keys with permuted queries. A call without a grid has no time: all heads are spatial.

    Bands are of whole blocks: pairs of a tile and a block by ascending distance, of the outermost
    ones as many as meet the density. All heads share one set of tensors, so nothing waits for the
    choice.

    Differs from the public code: the parameter is the density kept, not a "sparsity"; the trial
    uses the very blocks that are then read, not a band of fixed width; its queries come from the
    whole sequence, not from the first 10,000 tokens, and are a hash of (seed, layer, step, global
    head); a sink frame is the same frame in both orders, not the first positions of either; text
    may stand anywhere and have any length.

    Attributes:
        density: Share of the pairs to compute (published: 0.25 for HunyuanVideo, 0.3 for Wan at
            720p, 0.2 at 480p).
        samples: Queries per head on which the bands are tried.
        sink_frames: First frames that every query reads, inside the density (the public code has
            one for Wan).

    Other parameters:
        block: Keys per block.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "svg"
    paper: ClassVar[str] = "Sparse VideoGen, arXiv 2502.01776"
    causal_reason: ClassVar[str] = "its bands hold later positions as well as earlier ones"

    density: float = 0.25
    samples: int = 64
    sink_frames: int = 0
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_share(self.name, "density", self.density)
        check_size(self.name, "sink_frames", self.sink_frames)
        for name in ("samples", "block", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with bands that compute `density`."""
        return cls(density=density, **params)

    def check_call(self, call: Call) -> None:
        """Refuse sink frames where there are no frames; see `Method.check_call`.

        Raises:
            PlanError: `sink_frames` without a grid.
        """
        super().check_call(call)
        if self.sink_frames and call.grid is None:
            raise PlanError(f"svg: sink_frames={self.sink_frames} needs call.grid; leave it out")

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Make both bands, try them, and give each head one."""
        del state
        num_queries, num_keys = lengths = q.shape[2], k.shape[2]
        device = q.device
        frames, rows, columns = call.grid or (1, 1, num_keys)
        sinks = min(self.sink_frames, frames) * rows * columns
        spatial = self._order(num_queries, num_keys, device)
        keep = self._band(spatial, sinks, call, lengths)
        has_time = frames > 1 and rows * columns > 1 and self.density < 1
        query_index = key_order = None
        if has_time:
            temporal = self._token_major((frames, rows * columns), sinks, device)
            other = self._band(temporal, sinks, call, lengths)
            bands = (_Band(spatial, keep), _Band(temporal, other))
            pick = self._is_temporal(q, k, v, call, bands)[..., None]  # [B, H, 1]
            query_index = torch.where(pick, temporal.queries, spatial.queries)
            query_index = query_index.unflatten(2, (-1, self.tile)).int()
            key_order = torch.where(pick, temporal.keys, spatial.keys).int()
            if sinks or call.key_valid is not None:  # else the same blocks of both orders
                keep = torch.where(pick[..., None], other, keep)
        keys = KeyBlocks.from_mask(keep, block=self.block, key_order=key_order)
        return SparsePlan(
            num_queries=num_queries,
            num_keys=num_keys,
            tile=self.tile,
            keys=trimmed(keys),
            query_index=query_index,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _order(self, num_queries: int, num_keys: int, device: torch.device) -> _Order:
        """Return the order in which tokens stand; the last query stands at the last key."""
        queries = padded_order(num_queries, self.tile, device)
        keys = padded_order(num_keys, self.block, device)
        at = torch.arange(0, num_queries, self.tile, device=device) + num_keys - num_queries
        return _Order(
            queries=queries,
            keys=keys,
            query_place=torch.arange(num_queries, device=device),
            key_place=torch.arange(num_keys, device=device),
            query_at=at,
            key_at=torch.arange(0, num_keys, self.block, device=device),
        )

    def _token_major(self, sizes: tuple[int, int], sinks: int, device: torch.device) -> _Order:
        """Return the order in which the tokens at one place of all frames lie together.

        Args:
            sizes: Frames, and tokens per frame.
            sinks: First tokens that are sinks; as keys they stand in front of all others, so that
                whole blocks hold them.
            device: Where the result lies.
        """
        token = torch.arange(sizes[0] * sizes[1], device=device).view(sizes)
        place = token.view(sizes[1], sizes[0]).T.flatten()  # [N], of each token
        order = token.T.flatten()  # [N], the token at each place
        rest = token[sinks // sizes[1] :].T.flatten()
        as_keys = torch.cat([token.flatten()[:sinks], rest])
        return _Order(
            queries=torch.nn.functional.pad(order, (0, -len(order) % self.tile), value=-1),
            keys=torch.nn.functional.pad(as_keys, (0, -len(order) % self.block), value=-1),
            query_place=place,
            key_place=as_keys.argsort(),
            query_at=torch.arange(0, len(order), self.tile, device=device),
            key_at=place[as_keys[:: self.block]],
        )

    def _band(self, order: _Order, sinks: int, call: Call, lengths: tuple[int, int]) -> Tensor:
        """Return the blocks that each tile reads in an order, [B|1, 1, R, C] bool."""
        device = order.keys.device
        row = order.query_at.double()[:, None] + (self.tile - 1) / 2
        column = order.key_at.double() + (self.block - 1) / 2
        entry = (row - column).abs()[None, None]
        begin = torch.arange(0, len(order.keys), self.block, device=device)
        entry = entry.masked_fill(begin < sinks, -torch.inf)
        valid_q, valid = _valid(call, lengths, device)
        columns = places_valid(valid, order.keys, self.block)
        pairs = count_pairs(places_valid(valid_q, order.queries, self.tile), columns)
        entry = force_first(entry, columns.any(-1)[:, None, None])
        return reach_density(entry, pairs, self.density)

    def _is_temporal(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, bands: tuple[_Band, _Band]
    ) -> Tensor:
        """Return which heads lose less through the second band, [B, H] bool."""
        batch, heads, num_queries, dim = q.shape
        sampled = self._sampled(q, call)  # [B, H, m]
        q = q.gather(2, sampled[..., None].expand(-1, -1, -1, dim)).flatten(0, 1)
        sampled = sampled.flatten(0, 1)
        valid = _valid(call, (num_queries, k.shape[2]), k.device)[1]
        piece = min(_PIECE, k.shape[2])
        per_head = 4 * piece * (6 * self.samples + 2 * dim)
        chosen: list[Tensor] = []
        for part in torch.arange(batch * heads, device=q.device).split(
            max(1, _CHUNK_BYTES // per_head)
        ):
            of_batch, of_head = part // heads, part % heads // (heads // k.shape[1])
            kept = [band.kept(of_batch, sampled[part], self.tile) for band in bands]
            sums = _Softmax(q[part].float() * logit_scale(q, call))
            for keys in torch.arange(k.shape[2], device=k.device).split(piece):
                real = valid[of_batch if len(valid) > 1 else torch.zeros_like(part)][:, keys]
                at = (of_batch[:, None], of_head[:, None], keys)
                # Padding may hold NaN, which no zero weight takes away.
                k_piece, v_piece = (
                    x[at].float().masked_fill(~real[..., None], 0.0) for x in (k, v)
                )
                inside = [
                    blocks[..., band.block_of(keys, self.block)] & real[:, None]
                    for band, blocks in zip(bands, kept, strict=True)
                ]
                every = real[:, None].expand_as(inside[0])
                sums.add(k_piece, v_piece, torch.stack([every, *inside], dim=1))
            out = sums.out()  # [n, 3, m, D]: all keys, the first band, the second
            loss = (out[:, 1:] - out[:, :1]).square().mean((-1, -2))
            chosen.append(loss[:, 1] < loss[:, 0])
        return torch.cat(chosen).view(batch, heads)

    def _sampled(self, q: Tensor, call: Call) -> Tensor:
        """Return the queries on which heads are tried, [B, H, samples] int64.

        One falls into each of `samples` equal parts of the valid queries.
        """
        batch, heads, num_queries, _ = q.shape
        valid = _valid(call, (num_queries, num_queries), q.device)[0].expand(batch, -1)
        head = call.head_ids(heads, q.device)[:, None]
        number = torch.arange(self.samples, device=q.device)
        shift = uniform(_SALT, call.seed, call.layer, call.step, head, number, device=q.device)
        running = valid.long().cumsum(1)  # [B, N]
        count = running[:, -1:, None]
        rank = ((number + shift) / self.samples * count).long().minimum(count - 1) + 1
        found = torch.searchsorted(running, rank.flatten(1))
        return found.clamp(max=num_queries - 1).view(batch, heads, -1)


class _Order(NamedTuple):
    """An order of the tokens.

    Attributes:
        queries: [R * tile] int64, the query at each place, -1 for none.
        keys: [C * block] int64, the key at each place, -1 for none.
        query_place: [N] int64, the place of each query.
        key_place: [S] int64, the place of each key.
        query_at: [R] int64, position of each tile's first query along the band.
        key_at: [C] int64, the same of each block's first key.
    """

    queries: Tensor
    keys: Tensor
    query_place: Tensor
    key_place: Tensor
    query_at: Tensor
    key_at: Tensor


class _Band(NamedTuple):
    """The blocks of an order that its tiles read.

    Attributes:
        order: The order.
        keep: [B|1, 1, R, C] bool.
    """

    order: _Order
    keep: Tensor

    def kept(self, batch: Tensor, query: Tensor, tile: int) -> Tensor:
        """Return the blocks that queries [n, m] of batch rows [n] read, [n, m, C] bool."""
        row = self.order.query_place[query] // tile
        batch = batch if self.keep.shape[0] > 1 else torch.zeros_like(batch)
        return self.keep[batch[:, None], 0, row]

    def block_of(self, key: Tensor, block: int) -> Tensor:
        """Return the block of each key."""
        return self.order.key_place[key] // block


class _Softmax:
    """Attention of the same queries through several masks, a piece of the keys at a time."""

    def __init__(self, q: Tensor) -> None:
        """Start without keys; q [n, m, D] float32, scaled."""
        self._q = q
        self._out = q.new_zeros(())
        self._sum = q.new_zeros(())
        self._top = q.new_full((), -torch.inf)

    def add(self, k: Tensor, v: Tensor, masks: Tensor) -> None:
        """Take in keys and values [n, P, D], seen where masks [n, M, m, P] bool says so."""
        logits = (self._q @ k.mT)[:, None].masked_fill(~masks, -torch.inf)
        top = logits.amax(-1).maximum(self._top)  # [n, M, m]
        base = top.masked_fill(top == -torch.inf, 0.0)
        weight = (logits - base[..., None]).exp_()
        fade = (self._top - base).exp()
        self._out = self._out * fade[..., None] + weight @ v[:, None]
        self._sum = self._sum * fade + weight.sum(-1)
        self._top = top

    def out(self) -> Tensor:
        """Return the output [n, M, m, D]; 0 where no key was seen."""
        seen = self._sum > 0
        return self._out / torch.where(seen, self._sum, 1.0)[..., None]


def _valid(call: Call, lengths: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which of N queries and of S keys count, [B|1, N] and [B|1, S] bool."""
    num_queries, num_keys = lengths
    keys = valid_tokens(call, num_keys, device)
    return keys if num_queries == num_keys else keys.new_ones(1, num_queries), keys
