"""Radial: windows inside pairs of frames that shrink with the distance of the frames."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.methods.base import Method, State
from gossamer.methods.blocked import block_plan
from gossamer.methods.geometric import padded_order, places_valid, valid_tokens
from gossamer.methods.params import check_count, check_number, check_share, check_size, only_one
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan
from gossamer.select.threshold import count_pairs, force_first, reach_density

_DECAY = 0.2  # published for Wan 2.1
_CHUNK_BYTES = 32 << 20  # of the columns of pairs of tiles and blocks looked at at once
_HALVINGS = 10  # of the decays between a pair's nearest and farthest tokens: a quarter token


@register
@dataclass(frozen=True, kw_only=True)
class Radial(Method):
    """Read frames at distance D through a window that halves whenever D doubles.

    With s tokens per frame, bits(x) the number of binary digits of x, and tokens at places p and p'
    of frames at distance D, the key is kept where

        D <= 1,  or  |p - p'| <= max(block, w(D) * decay)  and  D mod max(1, block / w(D)) = 0,

    with w(D) = 2^bits(s) / 2^bits(D) (Radial Attention, section 4), the divisor rounded up to a
    power of two where `block` is none. Keys of the first `sink_frames` frames are kept by all. Of a
    tile of queries and a block of keys, more than 60% of the keys that any of the queries reads
    must be read by more than a third of the queries; then all are read.
    Published decays: 0.2 for Wan 2.1 (26% of the pairs at 720p), 0.8 for Wan 2.2 (36%), each with
    one sink frame; 0.95 for HunyuanVideo (27%), without.

    A decay above 1, which is not published, thins out distant frames less, up to full attention:
    the last factor becomes block / (w(D) * decay), rounded up to a power of two. A density below
    what a decay of 0 leaves keeps, of that, the tokens nearest in the sequence. A call without a
    grid is a sequence of frames of `block` tokens.

    Differs from the public code: the pattern is computed from distances (75,600 tokens in a second;
    no mask of pairs of tokens) and for each call's own grid, not once for all resolutions; a ragged
    tail is treated as the rest is, neither dropped nor read by all; batch rows do not mix; text may
    stand anywhere; the rule for blocks counts a block that two frames share once, not once a frame
    (0.04% of the blocks), so that frames may be smaller than a block.

    Attributes:
        decay: Factor on the windows; 0.2 where nothing is given.
        density: Share of the pairs to compute, by the decay that does; of the blocks that enter at
            that decay some are left out, so that it is met. Instead of `decay`; None: that decides.
        sink_frames: First frames that every query reads (published: 1 for Wan, 0 for HunyuanVideo).

    Other parameters:
        block: Keys per block, and the least width of a window.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "radial"
    paper: ClassVar[str] = "Radial Attention, arXiv 2506.19852"
    causal_reason: ClassVar[str] = "frames are read at earlier and at later positions alike"

    decay: float | None = None
    density: float | None = None
    sink_frames: int = 1
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse contradictory or wrong values; a decay of 0.2 where none is given."""
        if only_one(self.name, decay=self.decay, density=self.density) is None:
            object.__setattr__(self, "decay", _DECAY)
        if self.density is not None:
            check_share(self.name, "density", self.density)
        check_number(self.name, "decay", self.decay, zero=True, optional=True)
        check_size(self.name, "sink_frames", self.sink_frames)
        for name in ("block", "tile"):
            check_count(self.name, name, getattr(self, name))

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with the decay that computes `density` at each call's size."""
        return cls(density=density, **params)

    def static_key(self, call: Call) -> Hashable:
        """Return the parameters: the plan depends on sizes alone."""
        del call
        return self

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Decide for every pair of a tile and a block from the distances of their tokens."""
        del v, state
        num_queries, num_keys, device = q.shape[2], k.shape[2], q.device
        per_frame = self.block if call.grid is None else call.grid[1] * call.grid[2]
        video = _Video(num_queries, num_keys, per_frame, self.sink_frames, self.tile, self.block)
        valid = valid_tokens(call, num_keys, device)
        valid_q = valid if num_queries == num_keys else valid.new_ones(1, num_queries)
        rows = places_valid(valid_q, padded_order(num_queries, self.tile, device), self.tile)
        columns = places_valid(valid, padded_order(num_keys, self.block, device), self.block)
        possible = columns.any(-1)[:, None, None]  # [B|1, 1, 1, C]
        if self.density is None:
            kept = _kept(video, _DECAY if self.decay is None else self.decay).to(
                device, non_blocking=True
            )
            entry = torch.where(kept, 0.0, torch.inf)[None, None]
            keep = force_first(entry, possible) < torch.inf
        else:
            entry = _entries(video).to(device, non_blocking=True)[None, None]
            pairs = count_pairs(rows, columns)
            keep = reach_density(force_first(entry, possible), pairs, self.density)
        return block_plan(keep, num_queries, num_keys, call, tile=self.tile, block=self.block)


@dataclass(frozen=True)
class _Video:
    """What the pattern depends on.

    Attributes:
        num_queries: N.
        num_keys: S; the last query stands at the last key.
        per_frame: s, tokens per frame.
        sink_frames: Frames that all queries read.
        tile: Queries per tile.
        block: Keys per block.
    """

    num_queries: int
    num_keys: int
    per_frame: int
    sink_frames: int
    tile: int
    block: int

    @property
    def shift(self) -> int:
        """Position of the first query among the keys."""
        return self.num_keys - self.num_queries

    @property
    def size(self) -> tuple[int, int]:
        """R and C, tiles and blocks."""
        return -(-self.num_queries // self.tile), -(-self.num_keys // self.block)

    def width(self, distance: Tensor) -> Tensor:
        """Return w of frames at a distance above 0, float64, before the decay."""
        bits = torch.frexp(distance.double()).exponent  # of a whole number
        return torch.exp2((self.per_frame.bit_length() - bits).double())

    def seen_from(self, distance: Tensor) -> Tensor:
        """Return the decay from which on frames at a distance above 0 are read at all, float64."""
        # Read where the divisor, a power of two, divides the distance: is at most its lowest bit.
        needed = self.block / (self.width(distance) * (distance & -distance))
        return torch.where(needed <= 1, 0.0, needed)


class _Places:
    """Where the tokens of pairs [P] of tiles and blocks stand in their frames.

    Attributes:
        low: [P, F, 1] int32, first place of the tile's queries in each frame it touches.
        high: [P, F, 1] int32, behind the last place.
        low_k: [P, 1, F'] int32, the same of the block's keys.
        high_k: [P, 1, F'] int32, behind the last of them.
        place: [P, 1, block] int32, place of each key in its frame.
        real: [P, block] bool, False behind the last key.
        rows: [P, 1] int64, queries of the tile.
        distance: [P, F, F'] int64, of each of the tile's frames from each of the block's, at least
            1, where nothing else changes.
        full: [P, F, F'] bool, frames that are read in full whatever the decay.
        which: [P, F, block] int64, index of each key's frame among the block's.
    """

    def __init__(self, video: _Video, pair: Tensor) -> None:
        """Look up pairs [P], each given as tile * C + block."""
        s, num_columns = video.per_frame, video.size[1]
        begin = pair // num_columns * video.tile + video.shift  # [P]
        end = (begin + video.tile).clamp(max=video.num_keys)
        frames = torch.arange((video.tile - 1) // s + 2, device="cpu")
        frame = (begin // s)[:, None] + frames
        self.low = (begin[:, None] - frame * s).clamp(min=0).int()[..., None]
        self.high = (end[:, None] - frame * s).clamp(max=s).int()[..., None]
        first = pair % num_columns * video.block
        key = first[:, None] + torch.arange(video.block, device="cpu")
        self.place = (key % s).int()[:, None]
        self.real = key < video.num_keys
        self.rows = (end - begin)[:, None]
        frames_k = torch.arange((video.block - 1) // s + 2, device="cpu")
        frame_k = ((first // s)[:, None] + frames_k)[:, None]  # [P, 1, F']
        last = (first + video.block).clamp(max=video.num_keys)
        self.low_k = (first[:, None, None] - frame_k * s).clamp(min=0).int()
        self.high_k = (last[:, None, None] - frame_k * s).clamp(max=s).int()
        distance = (frame[..., None] - frame_k).abs()
        self.full = (distance <= 1) | (frame_k < video.sink_frames)
        self.distance = distance.clamp(min=1)
        self.which = (key // s - (first // s)[:, None])[:, None].expand(-1, len(frames), -1)

    def of_keys(self, value: Tensor) -> Tensor:
        """Return the value [P, F, F'] of each key's frame, [P, F, block]."""
        return value.gather(2, self.which)


def _kept(video: _Video, decay: float) -> Tensor:
    """Return which pairs of tiles and blocks are kept at a decay, [R, C] bool."""
    pairs, shape_of = _distinct(video)
    kept = [
        _rule(video, places, places.rows.new_full((len(places.rows),), decay, dtype=torch.float64))
        for places in _in_parts(video, pairs)
    ]
    return torch.cat(kept)[shape_of].view(video.size)


@lru_cache(maxsize=8)
def _entries(video: _Video) -> Tensor:
    """Return the decay at which each pair of a tile and a block is kept first, [R, C] float64.

    Pairs that are kept at 0 come before all others, the nearest in the sequence first: their
    entries are below 0.
    """
    pairs, shape_of = _distinct(video)
    entry = torch.cat([_entry(video, places) for places in _in_parts(video, pairs)])
    entry = entry[shape_of].view(video.size)
    row = torch.arange(video.size[0], device="cpu").double()[:, None] * video.tile + video.shift
    column = torch.arange(video.size[1], device="cpu").double() * video.block
    return torch.where(entry == 0, -1 / (1 + (row - column).abs()), entry)


def _in_parts(video: _Video, pairs: Tensor) -> Iterator[_Places]:
    """Yield the places of pairs [P], as many at a time as fit the chunk size."""
    frames = (video.tile - 1) // video.per_frame + 2
    frames_k = (video.block - 1) // video.per_frame + 2
    per_pair = 32 * frames * (video.block + frames_k)
    for part in pairs.split(max(1, _CHUNK_BYTES // per_pair)):
        yield _Places(video, part)


def _distinct(video: _Video) -> tuple[Tensor, Tensor]:
    """Return pairs of tiles and blocks that differ in shape.

    Whether a pair is kept depends on the distance of its frames and the places in them: where tile
    and block lie in one frame each, on the distance of the places alone.

    Returns:
        One pair of each shape, [P] int64 as tile * C + block, and the shape of every pair, [R * C].
    """
    num_rows, num_columns = video.size
    s = video.per_frame
    query = torch.arange(num_rows, device="cpu")[:, None] * video.tile + video.shift
    key = torch.arange(num_columns, device="cpu") * video.block
    query_last, key_last = query + video.tile - 1, key + video.block - 1
    whole = (query // s == query_last // s) & (key // s == key_last // s)
    place_q = torch.where(whole, 0, query % s)
    place_k = torch.where(whole, key % s - query % s + s, key % s)  # 1…2s - 1, or 0…s - 1
    distance = key // s - query // s
    distance = distance - distance.min()
    sink = (key // s).clamp(max=video.sink_frames)
    ragged = (query_last >= video.num_keys, key_last >= video.num_keys)
    sizes = (2, s, 2 * s, int(distance.max()) + 1, int(sink.max()) + 1, 2, 2)
    code = torch.zeros((), dtype=torch.int64, device="cpu")
    for field, size in zip((whole, place_q, place_k, distance, sink, *ragged), sizes, strict=True):
        code = code * size + field
    code = code.expand(num_rows, num_columns).flatten()
    distinct, shape_of = torch.unique(code, return_inverse=True)
    one = torch.zeros_like(distinct)
    one[shape_of] = torch.arange(len(code), device="cpu")  # any pair of the shape will do
    return one, shape_of


def _rule(video: _Video, places: _Places, decay: Tensor) -> Tensor:
    """Return whether pairs are kept, each at its own decay [P] float64: [P] bool."""
    decay = decay[:, None, None]
    width = (video.width(places.distance) * decay).clamp(min=video.block).long()
    unseen = video.seen_from(places.distance) > decay
    width = torch.where(places.full, video.per_frame, width.clamp(max=video.per_frame))
    width = width.masked_fill(unseen & ~places.full, -video.per_frame)  # leaves no query
    width = places.of_keys(width.int())
    last = torch.minimum(places.high, places.place + width + 1)
    count = (last - torch.maximum(places.low, places.place - width)).clamp_(min=0)
    count = count.sum(1).masked_fill_(~places.real, 0)  # [P, block] queries that read each key
    good, any_at_all = (3 * count > places.rows).sum(1), (count > 0).sum(1)
    return 5 * good > 3 * any_at_all


def _entry(video: _Video, places: _Places) -> Tensor:
    """Return the lowest decay at which pairs are kept, [P] float64, 0 where at any."""
    first_last = (places.low, places.high - 1), (places.low_k, places.high_k - 1)
    (low, high), (low_k, high_k) = first_last  # [P, F, 1] and [P, 1, F'] places, ends included
    nearest = (low - high_k).maximum(low_k - high).clamp(min=0)
    farthest = (high - low_k).maximum(high_k - low)
    holds_any = (high >= low) & (high_k >= low_k)
    width, seen_from = video.width(places.distance), video.seen_from(places.distance)

    def enters(gap: Tensor) -> Tensor:
        at = torch.where(gap > video.block, gap / width, 0.0).maximum(seen_from)
        return at.masked_fill(places.full, 0.0)

    # No token enters before the nearest one, all have entered with the farthest one.
    lower = enters(nearest).masked_fill(~holds_any, torch.inf).flatten(1).amin(1)
    upper = enters(farthest).masked_fill(~holds_any, 0.0).flatten(1).amax(1)
    start = lower
    at_once = _rule(video, places, start)
    for _ in range(_HALVINGS):
        middle = (lower + upper) / 2
        kept = _rule(video, places, middle)
        upper = torch.where(kept, middle, upper)
        lower = torch.where(kept, lower, middle)
    return torch.where(at_once, start, upper)
