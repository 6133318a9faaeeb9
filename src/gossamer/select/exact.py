"""Exact selection: the softmax mass of every key for every tile of queries, streamed.

Full attention is computed once, a few tiles of queries at a time, so that nothing of the size N x S
is ever held: 64 MiB of scores, whatever the length. On a GPU with Triton kernels of our own compute
the same (`select/gpu`), where only the masses are held, T x S of some heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import PlanError
from gossamer.group.gpu.available import runs_triton

_CHUNK_BYTES = 64 << 20  # of the scores held at once
# Of the masses held at once on a GPU. At 75,600 keys two heads of tiles: selection runs one program
# a tile, so that fewer would leave multiprocessors idle.
_GPU_BYTES = 384 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Queries in tiles, and which keys they see.

    Attributes:
        num_queries: N.
        num_keys: S.
        tile: Queries per tile.
        query_index: [B|1, H|1, T, tile] integer, the query at each place, -1 for none; every query
            stands once. None: consecutive queries.
        causal: Query i sees key j iff j <= i + S - N.
        key_valid: [B|1, S] bool, False for keys that nothing sees; None for no padding. Where
            N = S these are also the queries that add nothing to their tile.
        scale: Factor on the logits.
    """

    num_queries: int
    num_keys: int
    tile: int = 128
    query_index: Tensor | None = None
    causal: bool = False
    key_valid: Tensor | None = None
    scale: float = field(kw_only=True)

    @property
    def num_tiles(self) -> int:
        """T."""
        if self.query_index is not None:
            return self.query_index.shape[2]
        return -(-self.num_queries // self.tile)

    def queries(self, batch: int, heads: int, device: torch.device) -> Tensor:
        """Return the query at each place, [B, H, T, tile] int64, -1 for none."""
        index = self.query_index
        if index is None:
            place = torch.arange(self.num_tiles * self.tile, device=device)
            index = torch.where(place < self.num_queries, place, -1)
            index = index.view(1, 1, self.num_tiles, self.tile)
        return index.long().expand(batch, heads, -1, -1)


class Part(NamedTuple):
    """Some tiles of some KV heads.

    Attributes:
        batch: [r, 1] int64, batch row of each line.
        head: [r, n] int64, query head of each tile.
        tile: [n] int64, the tile.
        query: [r, n, tile] int64, the queries, -1 for none.
        kv_head: [r, 1] int64, the KV head of each line.
        stop: Where the keys end that a query of the part may see.
        at_once: Keys whose scores are held at once.
    """

    batch: Tensor
    head: Tensor
    tile: Tensor
    query: Tensor
    kv_head: Tensor
    stop: int
    at_once: int


class MassPart(NamedTuple):
    """What a part of the tiles reads.

    Attributes:
        part: Which tiles.
        mass: [r, n, S], sum of each key's softmax probability over the tile's queries; -inf for
            padded keys and, where causal, for those behind the tile's last query.
        lse: [r, n, tile] log-sum-exp of each query's visible logits; -inf where it sees none.
        out: [r, n, tile, D], the full attention's output; None where no values were given.
        is_whole: Whether `lse` and `out` are of all queries instead, [B, H, N] and [B, H, N, D]: on
            a GPU they are known before the first part.
    """

    part: Part
    mass: Tensor
    lse: Tensor
    out: Tensor | None
    is_whole: bool = False


class ExactMass(NamedTuple):
    """The exact mass of all tiles, and full attention.

    Attributes:
        mass: [B, H, T, S] as in `MassPart`.
        lse: [B, H, N].
        out: [B, H, N, D], float32 or float64; None where no values were given.
    """

    mass: Tensor
    lse: Tensor
    out: Tensor | None


def exact_mass(q: Tensor, k: Tensor, v: Tensor | None, tiles: Tiles) -> ExactMass:
    """Return the softmax mass of every key for every tile, and full attention in the same pass.

    Holds [B, H, T, S]: for many tokens read `stream_mass`, a part at a time.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys; query head h reads KV head h // (H / Hk).
        v: [B, Hk, S, D] values, for the output; None for mass alone.
        tiles: The tiles and what they see.
    """
    batch, heads = q.shape[:2]
    mass = q.new_empty(batch, heads, tiles.num_tiles, tiles.num_keys, dtype=_work(q))
    full = FullAttention(q, k if v is None else v)
    for got in stream_mass(q, k, v, tiles):
        mass[got.part.batch, got.part.head, got.part.tile] = got.mass
        full.add(got)
    lse, out = full.result()
    return ExactMass(mass, lse, None if v is None else out)


def full_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp [B, H, N] and output [B, H, N, D] of full attention.

    Arguments as `stream_mass`; how queries stand in tiles does not matter.
    """
    full = FullAttention(q, v)
    if runs_kernels(q, k, tiles):
        full.add_whole(*_attention_by_kernels(q, k, v, tiles))
        return full.result()
    for got in stream_mass(q, k, v, tiles):
        full.add(got)
    return full.result()


class FullAttention:
    """Collects full attention from the parts that `stream_mass` yields with values."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        """Prepare for the attention of queries q [B, H, N, D] over values v [B, Hk, S, D]."""
        self._q, self._dim = q, v.shape[3]
        self._lse: Tensor | None = None
        self._out: Tensor | None = None

    def add(self, got: MassPart) -> None:
        """Write the part's queries to their places."""
        if got.is_whole:
            self.add_whole(got.lse, got.out)
            return
        lse, out = self._room()
        slot = torch.where(got.part.query < 0, lse.shape[2] - 1, got.part.query)
        at = (got.part.batch[..., None], got.part.head[..., None], slot)
        lse[at] = got.lse
        if got.out is not None:
            out[at] = got.out

    def add_whole(self, lse: Tensor, out: Tensor | None) -> None:
        """Take log-sum-exp [B, H, N] and output [B, H, N, D] of all queries."""
        self._lse = lse
        self._out = lse.new_zeros(*lse.shape, self._dim) if out is None else out

    def result(self) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp [B, H, N] and output [B, H, N, D]."""
        lse, out = self._room()
        length = self._q.shape[2]
        return lse[:, :, :length], out[:, :, :length]

    def _room(self) -> tuple[Tensor, Tensor]:
        """Return where parts are written, made at the first one."""
        if self._lse is None or self._out is None:
            q = self._q
            # Places without a query go to a slot of their own, which is then cut off.
            shape = (*q.shape[:2], q.shape[2] + 1)
            self._lse = q.new_full(shape, -torch.inf, dtype=_work(q))
            self._out = q.new_zeros(*shape, self._dim, dtype=_work(q))
        return self._lse, self._out


def chunk_sizes(
    lines: int, tiles: int, tile: int, num_keys: int, size: int, most: int | None = None
) -> tuple[int, ...]:
    """Return how many (lines, tiles, keys) are computed at once: at most 64 MiB of scores.

    Args:
        lines: KV heads of all batch rows.
        tiles: Tiles of all query heads that read one KV head.
        tile: Queries per tile whose scores are held, 1 where only their sum is.
        num_keys: S.
        size: Bytes of one score.
        most: Bytes held at once, instead of 64 MiB.
    """
    most = _CHUNK_BYTES if most is None else most
    scores = max(most // (size * tile), 1)  # of one query of the tile
    keys = min(max(num_keys, 1), scores)
    at_once = max(1, min(tiles, scores // keys))
    several = max(1, scores // (keys * tiles)) if at_once == tiles else 1
    return min(lines, several), at_once, keys


def split_tiles(
    k: Tensor, heads: int, tiles: Tiles, size: int, *, sums_alone: bool = False
) -> Iterator[list[Part]]:
    """Cut all tiles into parts of bounded size.

    Args:
        k: [B, Hk, S, D] keys.
        heads: H, query heads.
        tiles: The tiles.
        size: Bytes of one score.
        sums_alone: Whether one score a tile and key is held, not one a query and key.

    Yields:
        The parts that read the same KV heads.
    """
    batch, kv_heads, num_keys, _ = k.shape
    device, group, num_tiles = k.device, heads // kv_heads, tiles.num_tiles
    index = tiles.queries(batch, heads, device)
    line = torch.arange(batch * kv_heads, device=device)
    number = group * num_tiles
    # What a causal tile keeps is decided by a sort, whose temporaries are many times the scores.
    most = _GPU_BYTES if sums_alone and not tiles.causal else None
    held = 1 if sums_alone else tiles.tile
    several, at_once, keys = chunk_sizes(len(line), number, held, num_keys, size, most)
    for lines in line.split(several):
        row, kv_head = (lines // kv_heads)[:, None], (lines % kv_heads)[:, None]
        parts: list[Part] = []
        for begin in range(0, number, at_once):
            end = min(begin + at_once, number)
            stop = num_keys
            if tiles.causal and tiles.query_index is None:  # tiles in order: the rest is future
                is_one_head = begin // num_tiles == (end - 1) // num_tiles
                last = (end - 1) % num_tiles if is_one_head else num_tiles - 1
                stop = (last + 1) * tiles.tile + num_keys - tiles.num_queries
                stop = min(max(stop, 0), num_keys)
            some = torch.arange(begin, end, device=device)
            tile = some % num_tiles
            head = kv_head * group + some // num_tiles
            query = index[row, head, tile]
            parts.append(Part(row, head, tile, query, kv_head, stop, keys))
        yield parts


def stream_mass(q: Tensor, k: Tensor, v: Tensor | None, tiles: Tiles) -> Iterator[MassPart]:
    """Yield the exact mass of the keys for each tile, some tiles at a time.

    Pass 1 is full attention with its log-sum-exp; pass 2 takes the probabilities
    p_ij = exp(l_ij - lse_i) and sums them over the queries i of a tile (MC-Sparse). Where
    the scores of all keys fit the 64 MiB, pass 2 uses those of pass 1. A query that sees no key has
    p = 0. Scores and sums are float32, float64 for float64 inputs. On a GPU both passes are
    kernels, and full attention is known before the first part.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values; None for mass alone.
        tiles: The tiles and what they see.

    Raises:
        PlanError: The tensors have other lengths than the tiles.
    """
    if (tiles.num_queries, tiles.num_keys) != (q.shape[2], k.shape[2]):
        raise PlanError(
            f"tiles of {tiles.num_queries} queries and {tiles.num_keys} keys, "
            f"but q has {q.shape[2]} and k {k.shape[2]}"
        )
    if runs_kernels(q, k, tiles):
        yield from _stream_by_kernels(q, k, v, tiles)
        return
    work = _work(q)
    for parts in split_tiles(k, q.shape[1], tiles, work.itemsize):
        keys = _Keys.take(k, v, parts[0], tiles, work)
        for part in parts:
            query = part.query
            rows = q[part.batch[..., None], part.head[..., None], query.clamp(min=0)].to(work)
            rows = rows.flatten(1, 2) * tiles.scale  # [r, n * tile, D]
            mass, lse, out = keys.attend(rows, part, tiles)
            out = None if out is None else out.view(*query.shape, -1)
            yield MassPart(part, mass, lse.view_as(query), out)


def runs_kernels(q: Tensor, k: Tensor, tiles: Tiles) -> bool:
    """Return whether the kernels of `select/gpu` compute these tiles."""
    if not runs_triton(q):
        return False
    from gossamer.select.gpu import mass

    return (
        q.dtype in mass.DTYPES
        and q.dtype == k.dtype
        and q.shape[3] <= mass.MAX_DIM
        and tiles.tile <= mass.MAX_TILE
    )


def _attention_by_kernels(
    q: Tensor, k: Tensor, v: Tensor | None, tiles: Tiles
) -> tuple[Tensor, Tensor | None]:
    """Return log-sum-exp [B, H, N] and output [B, H, N, D], None where no values were given."""
    from gossamer.select.gpu import mass

    sight = mass.Sight(tiles.scale, tiles.causal, tiles.key_valid)
    return mass.full_attention(q, k, None if v is None else v.to(q.dtype), sight)


def _stream_by_kernels(q: Tensor, k: Tensor, v: Tensor | None, tiles: Tiles) -> Iterator[MassPart]:
    """Yield what `stream_mass` does, from the kernels for a GPU."""
    from gossamer.select.gpu import mass

    sight = mass.Sight(tiles.scale, tiles.causal, tiles.key_valid)
    whole = _attention_by_kernels(q, k, v, tiles)
    for parts in split_tiles(k, q.shape[1], tiles, whole[0].itemsize, sums_alone=True):
        for part in parts:
            shape = part.query.shape[:2]
            batch = part.batch.expand(shape).flatten()
            some = mass.Some(batch, part.head.flatten(), part.query.flatten(0, 1))
            sums = mass.tile_mass(q, k, whole[0], some, sight)
            yield MassPart(part, sums.view(*shape, -1), *whole, is_whole=True)


def stream_pooled(q: Tensor, k: Tensor, tiles: Tiles) -> Iterator[tuple[Part, Tensor]]:
    """Yield the logits of each tile's mean query, some tiles at a time: the usual estimate.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        tiles: The tiles and what they see.

    Yields:
        The part and its scores [r, n, S], -inf as in `MassPart`.
    """
    work = _work(q)
    sums_alone = runs_triton(q)  # the selection behind it then wants few large parts
    for parts in split_tiles(k, q.shape[1], tiles, work.itemsize, sums_alone=sums_alone):
        keys = _Keys.take(k, None, parts[0], tiles, work)
        for part in parts:
            counted = keys.counted(part.query.flatten(1), tiles).view_as(part.query)[..., None]
            rows = q[part.batch[..., None], part.head[..., None], part.query.clamp(min=0)]
            rows = rows.to(work).masked_fill_(~counted, 0.0)
            mean = rows.sum(2) / counted.sum(2).clamp(min=1) * tiles.scale  # [r, n, D]
            yield part, keys.masked(mean @ keys.k.mT, part, tiles)


def _work(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class _Keys:
    """The keys of some KV heads: k and v [r, S, D] in the scores' dtype, valid [r, S] or None."""

    k: Tensor
    v: Tensor | None
    valid: Tensor | None

    @classmethod
    def take(
        cls, k: Tensor, v: Tensor | None, part: Part, tiles: Tiles, work: torch.dtype
    ) -> _Keys:
        """Copy the part's KV heads; padding may hold NaN, which no zero weight takes away."""
        at = (part.batch[:, 0], part.kv_head[:, 0])
        valid = None
        if tiles.key_valid is not None:
            valid = tiles.key_valid.expand(k.shape[0], -1)[at[0]]
        values = None if v is None else v[at].to(work)
        if values is not None and valid is not None:
            values = values.masked_fill(~valid[..., None], 0.0)
        return cls(k[at].to(work), values, valid)

    def attend(
        self, rows: Tensor, part: Part, tiles: Tiles
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mass [r, n, S], log-sum-exp [r, L] and output [r, L, D].

        Args:
            rows: [r, L, D], the scaled queries of the part, L = n * tile of them.
            part: The part.
            tiles: The tiles.
        """
        query = part.query.flatten(1)
        steps = [
            slice(begin, min(begin + part.at_once, part.stop))
            for begin in range(0, part.stop, part.at_once)
        ]
        top = rows.new_full(query.shape, -torch.inf)
        total = torch.zeros_like(top)
        out = None if self.v is None else torch.zeros_like(rows)
        share = rows.new_empty(0)
        for step in steps:
            scores = self._scores(rows, query, tiles, step)
            above = top.maximum(scores.amax(-1))
            base = above.masked_fill(above == -torch.inf, 0.0)  # -inf - -inf is no number
            share = scores.sub_(base[..., None]).exp_()  # [r, L, keys]
            shrink = (top - base).exp()
            total = total * shrink + share.sum(-1)
            if out is not None and self.v is not None:
                more = share @ self.v[:, step]
                out = more if len(steps) == 1 else out * shrink[..., None] + more
            top = above
        seen = total > 0
        weight = torch.where(seen, total.clamp(min=1).reciprocal(), 0.0)  # the top key adds 1
        out = None if out is None else out * weight[..., None]
        weight = weight.masked_fill(~self.counted(query, tiles), 0.0)
        weight = weight.unflatten(1, (-1, 1, tiles.tile))  # [r, n, 1, tile]
        base = top.masked_fill(~seen, 0.0)
        mass = rows.new_full((len(rows), weight.shape[1], self.k.shape[1]), -torch.inf)
        for step in steps:
            if len(steps) > 1:
                share = self._scores(rows, query, tiles, step).sub_(base[..., None]).exp_()
            mass[..., step] = (weight @ share.unflatten(1, (-1, tiles.tile)))[..., 0, :]
        return self.masked(mass, part, tiles), top + total.log(), out

    def _scores(self, rows: Tensor, query: Tensor, tiles: Tiles, step: slice) -> Tensor:
        """Return the logits [r, L, keys] of some keys, -inf where not seen."""
        scores = rows @ self.k[:, step].mT
        if tiles.causal:
            position = query + tiles.num_keys - tiles.num_queries
            key = torch.arange(step.start, step.stop, device=rows.device)
            scores.masked_fill_(key > position[..., None], -torch.inf)
        if self.valid is not None:
            scores.masked_fill_(~self.valid[:, None, step], -torch.inf)
            # Padded queries may hold NaN, which no weight of 0 takes away.
            scores.masked_fill_(~self.counted(query, tiles)[..., None], -torch.inf)
        return scores

    def counted(self, query: Tensor, tiles: Tiles) -> Tensor:
        """Tell which places [r, L] hold a query that is not padding."""
        counted = query >= 0
        if self.valid is not None and tiles.num_queries == tiles.num_keys:
            counted = counted & self.valid.gather(1, query.clamp(min=0))
        return counted

    def masked(self, mass: Tensor, part: Part, tiles: Tiles) -> Tensor:
        """Write -inf to the mass of padded keys and of those behind a causal tile's last query."""
        if self.valid is not None:
            mass.masked_fill_(~self.valid[:, None], -torch.inf)
        if tiles.causal:
            last = part.query.amax(-1) + tiles.num_keys - tiles.num_queries
            key = torch.arange(mass.shape[-1], device=mass.device)
            mass.masked_fill_(key > last[..., None], -torch.inf)
        return mass


def top_keys(score: Tensor, count: Tensor, width: int) -> Tensor:
    """Return the keys of highest score, ascending; ties go to the lower index.

    Args:
        score: [..., S]; -inf marks keys that must not be chosen.
        count: [...] integer, keys to choose: at most `width`, and at most those that may be chosen.
        width: L, room for each row, at most S.

    Returns:
        [..., L] int32. Behind `count` the greatest chosen key is repeated.
    """
    if score.dtype == torch.float32 and runs_triton(score):
        from gossamer.select.gpu import top_keys as module

        return module.top_keys(score, count, width)
    # The threshold does not tell apart the keys that equal it; their index does.
    best = score.topk(width, dim=-1).values
    last = best.gather(-1, (count - 1).clamp(min=0)[..., None])
    above, level = score > last, score == last
    left = count[..., None] - above.sum(-1, keepdim=True)
    return list_mask(above | (level & (level.cumsum(-1) <= left)), count, width)


def list_mask(keep: Tensor, count: Tensor, width: int) -> Tensor:
    """List the keys kept in each row [..., S] bool, `count` [...] of them: [..., width] int32."""
    key = torch.arange(keep.shape[-1], dtype=torch.int32, device=keep.device)
    # Keys that are not kept go to a column of their own, which is then cut off.
    place = torch.where(keep, (keep.cumsum(-1) - 1).clamp(max=width), width)
    index = key.new_zeros(*keep.shape[:-1], width + 1)
    index = index.scatter_(-1, place, key.expand_as(place))[..., :width]
    greatest = index.gather(-1, (count.long() - 1).clamp(min=0)[..., None])
    listed = torch.arange(width, device=keep.device) < count[..., None]
    return torch.where(listed, index, greatest)
