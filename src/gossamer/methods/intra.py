"""INTRA: fixed patterns, alternating over the layers, that relay between distant tokens."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.group import pack_tiles, sort_by_group
from gossamer.group.relay import (
    Shape,
    cyclic_groups,
    exact_patch,
    nearest_patch,
    nearest_span,
    nearest_window,
    patch_numbers,
    patch_positions,
    patch_windows,
    segment_groups,
)
from gossamer.methods.base import Method, State
from gossamer.methods.params import check_count, check_size, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan, join_text
from gossamer.plan.visible import first_end

_CHOICES = {
    "schedule": ("interleave", "scatter", "gather", "g2s4"),
    "neighbourhood": ("patch", "strided"),
    "gather": ("window", "segment", "cyclic"),
}
_WINDOW = (8, 16, 16)  # twice the query patch; rows and columns are the paper's
_SPAN = 575
_BLOCK = 128  # key blocks of a global layer are listed in pieces of this many, which kernels like


@register
@dataclass(frozen=True, kw_only=True)
class Intra(Method):
    """Read fixed groups of tokens: Scatter samples every neighbourhood, Gather joins the samples.

    With T neighbourhoods of G tokens, **Scatter** puts the r-th token of every neighbourhood into
    group r: each group is a coarse view of everything, and computes 1/G of the pairs. Groups are
    apart from one another, so layers alternate with **Gather**, whose groups meet every Scatter
    group. Where ⌊N/G⌋ >= G, two layers lead from any token to any other.

    * Scatter: neighbourhoods are patches of the grid (`patch`) or G consecutive tokens
      (`strided`, and `patch` without a grid): group = position inside the neighbourhood.
    * Gather `window` (the paper's Gather 0): each query patch reads a window around it, shifted
      inward at the borders. Without a grid, or where one axis holds all tokens, it is `segment`.
    * Gather `segment` (Gather 1): token j goes to group ⌊j/G⌋ mod G. A sequence shorter than G²
      is cut into G segments, each a group: segments of G tokens would leave groups empty and make
      the others the larger, the more groups there are.
    * Gather `cyclic` (the proof's): token r of neighbourhood t goes to group (t + r) mod G.
    * Text: every query reads all text; text query p, counted from the span's begin, also reads the
      Scatter group p mod G, in Gather layers too. Text queries are no full rows.
    * Causal: positions are absolute, p = i + S - N, and lists end at the query's position.
    * `g2s4`, for language models: layers 0, 8, 16, … are global, and query block u reads key blocks
      v with (u - v) mod 2 = 0, its own too; the others read a sliding window and the first tokens.
      32 layers have 4 global ones, 36 have 5, as published. It takes no text span. Sinks are the
      first positions of the tensors: pad batches on the right.

    Groups depend on shapes alone, so plans are made once per shape and kind of layer, for all heads
    and batch rows. The density is what the geometry gives: `at_density` takes the nearest 1/G, so
    nothing lies between 1/2 and 1. Padded keys are left out of the lists; they move no group.
    A query outside the keys, or whose position is padding (both only where N != S), reads the
    first valid key, a global layer its block, where its group shows it none.

    Models are adapted to these patterns before use (the paper trains LoRA on the model's own dense
    outputs); Scatter alone breaks images even then.

    Beyond the paper: grids and lengths that nothing divides, frames as a third axis, `fit`.
    The paper says neither which layers are global nor from where the parity of blocks counts: by
    absolute parity half of the blocks would never be read by the others.

    Attributes:
        groups: G, Scatter and Gather groups.
        interleave: Layers that share a pattern before it switches; Scatter comes first.
        schedule: Which layers do what: "interleave", "scatter" or "gather" in all, "g2s4".
        neighbourhood: What Scatter samples from: "patch" or "strided".
        patch: (frames, rows, columns) of Scatter's patch, of volume G; None for the most cubic one
            that the grid holds.
        gather: Gather's groups: "window", "segment" or "cyclic".
        query_patch: (frames, rows, columns) of the queries that share a window; cut at the grid.
        window: (frames, rows, columns) of the keys they read; cut at the grid. None for
            (8, 16, 16), or with `fit` for N/G keys.
        fit: Choose patch, window and span so that every layer comes nearest to 1/G of the pairs;
            `at_density` sets it.
        global_every: One layer in so many is global under g2s4.
        global_groups: Every so many-th block is read by a global layer.
        global_block: Tokens per block of a global layer.
        span: Keys before a query that a window layer reads; also behind it where not causal. None
            for 575, or with `fit` for 1/G of the pairs.
        sink: First tokens that every query of a window layer reads; padding does not count.

    Other parameters:
        tile: Queries per tile; 64 at most for windows of query patches of up to 64 tokens.
    """

    name: ClassVar[str] = "intra"
    paper: ClassVar[str] = "INTRA: Interleaved Non-contiguous Token spaRse Attention"
    fixed_density: ClassVar[bool] = True
    own_text_rule: ClassVar[bool] = True

    groups: int = 8
    interleave: int = 2
    schedule: str = "interleave"
    neighbourhood: str = "patch"
    patch: Shape | None = None
    gather: str = "window"
    query_patch: Shape = (4, 8, 8)
    window: Shape | None = None
    fit: bool = False
    global_every: int = 8
    global_groups: int = 2
    global_block: int = 256
    span: int | None = None
    sink: int = 64
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range and fill in the published ones."""
        counts = ("groups", "interleave", "global_every", "global_groups", "global_block", "tile")
        for name in counts:
            check_count(self.name, name, getattr(self, name))
        check_size(self.name, "span", self.span, optional=True)
        check_size(self.name, "sink", self.sink)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise PlanError(
                    f"intra: {name}={described(value)} must be one of {', '.join(allowed)}"
                )
        if not isinstance(self.fit, bool):
            raise PlanError(f"intra: fit={described(self.fit)} must be True or False")
        self._set_shapes()
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Refuse what the schedule or the choice of groups leaves without effect."""
        shapes = ("query_patch", "window")
        if self.schedule == "g2s4":
            others = ("interleave", "neighbourhood", "patch", "gather", *shapes)
            unused = others if self.fit else ("groups", *others)  # a fitted span follows the groups
        else:
            unused = ("global_every", "global_groups", "global_block", "span", "sink")
        if self.schedule == "scatter":
            unused = (*unused, "interleave", "gather", *shapes)
        elif self.schedule == "gather":  # text queries read Scatter groups all the same
            unused = (*unused, "interleave")
        self._refuse(f"with schedule={self.schedule!r}", *unused)
        if self.gather != "window":
            self._refuse(f"with gather={self.gather!r}", *shapes)
        if self.neighbourhood == "strided":
            self._refuse("with neighbourhood='strided'", "patch")

    def _refuse(self, why: str, *names: str) -> None:
        """Refuse parameters without effect; what was filled in where nothing was given passes."""
        filled = {"window": _WINDOW, "span": _SPAN}
        given = [name for name in names if getattr(self, name) != filled.get(name)]
        refuse_unused(self, why, *given)

    def _set_shapes(self) -> None:
        """Make tuples of the shapes given, and fill in the published ones unless fitted."""
        given = [name for name in ("patch", "window", "span") if getattr(self, name) is not None]
        if self.fit and given:
            raise PlanError(f"intra: fit=True chooses {' and '.join(given)}: leave out one of both")
        if not self.fit:
            for name, published in (("window", _WINDOW), ("span", _SPAN)):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, published)
        for name in ("patch", "query_patch", "window"):
            if name == "query_patch" or getattr(self, name) is not None:
                object.__setattr__(self, name, _shape(name, getattr(self, name)))
        if self.patch is not None and math.prod(self.patch) != self.groups:
            raise PlanError(
                f"intra: patch={self.patch} holds {math.prod(self.patch)} tokens, "
                f"but groups={self.groups}: they must agree"
            )

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with the number of groups whose 1/G is nearest to `density`.

        Of two that are equally near, the more groups. Patches, windows and spans are fitted.
        """
        if "groups" in params or "global_groups" in params:
            raise PlanError("intra: density chooses the number of groups: give one, not both")
        fewer = math.floor(1 / density)
        nearest = fewer + (density - 1 / (fewer + 1) <= 1 / fewer - density)
        chosen: dict[str, Any] = {"fit": True, **params}
        is_global = chosen.get("schedule") == "g2s4"
        if is_global:
            chosen["global_groups"] = nearest
        if not is_global or chosen["fit"]:
            chosen["groups"] = nearest
        return cls(**chosen)

    def layer_kind(self, layer: int) -> str:
        """Return what a layer does: "scatter", "gather", "global" or "window"."""
        if self.schedule == "g2s4":
            return "global" if layer % self.global_every == 0 else "window"
        if self.schedule != "interleave":
            return self.schedule
        return "scatter" if layer // self.interleave % 2 == 0 else "gather"

    def static_key(self, call: Call) -> str:
        """Return the kind of the layer: with the shapes, it decides the plan."""
        return self.layer_kind(call.layer)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Give every query a row of keys and pack the queries of a row into tiles."""
        del v, state
        num_queries, num_keys = q.shape[2], k.shape[2]
        kind = self.layer_kind(call.layer)
        if kind == "window":
            return self._sliding(q, k, call)
        if kind == "global" and self.global_block % _BLOCK == 0:
            return self._blocks(call, num_queries, num_keys, q.device)
        rows = self._rows(kind, call.grid, (num_queries, num_keys), q.device)
        row, keys = rows.of_query[None, None], rows.keys
        if num_queries == num_keys:
            tiles = _count_tiles(self, kind, call.grid, num_keys, None)
            return self._plan_of(row, keys, call, num_keys, rows.per_tile, tiles)
        row, first = _with_fallback(row, rows.of_key, keys.num_rows, call)
        return self._plan_of(row, _with_single(keys, first), call, num_keys, rows.per_tile)

    def _plan_joint(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Add the text keys to every row; text queries read Scatter rows."""
        del v, state
        if self.schedule == "g2s4":
            raise UnsupportedError(
                f"intra: g2s4 runs over one sequence, but text={call.text} was given: "
                "leave the span out of the call, so that text counts as tokens like all others"
            )
        start, stop = cast("tuple[int, int]", call.text)
        length = stop - start
        num_latent = q.shape[2] - length
        kind = self.layer_kind(call.layer)
        rows = self._joint_rows(kind, call.grid, num_latent, (start, stop), q.device)
        keys = _with_text(rows.keys, num_latent, start, length)
        tiles = _count_tiles(self, kind, call.grid, num_latent, (start, stop))
        return self._plan_of(
            rows.of_query[None, None], keys, call, k.shape[2], rows.per_tile, tiles
        )

    def _joint_rows(
        self,
        kind: str,
        grid: Shape | None,
        num_latent: int,
        text: tuple[int, int],
        device: torch.device,
    ) -> _Rows:
        """Return the rows of latent keys that latent and text queries read, text in its place."""
        start, stop = text
        lengths = (num_latent, num_latent)
        rows = self._rows(kind, grid, lengths, device)
        keys, first_row, groups = rows.keys, 0, rows.keys.num_rows
        if kind == "gather":
            scatter = self._rows("scatter", grid, lengths, device).keys
            keys, first_row, groups = _stack(keys, scatter), groups, scatter.num_rows
        text_row = torch.arange(stop - start, device=device) % groups + first_row
        row = torch.cat([rows.of_query[:start], text_row, rows.of_query[start:]])
        return _Rows(keys, row, rows.of_key, rows.per_tile)

    def _plan_of(
        self,
        row: Tensor,
        keys: KeyTokens | KeyBlocks,
        call: Call,
        num_keys: int,
        per_tile: int | None = None,
        num_tiles: int | None = None,
    ) -> SparsePlan:
        """Return the plan in which query i reads row `row[b, 0, i]`, [B|1, 1, N] int64."""
        tile = _tile(self, per_tile)
        query_index, tile_row = pack_tiles(row, keys.num_rows, tile, num_tiles=num_tiles)
        if num_tiles is None and row.device.type == "cpu":  # drop tiles of no query, which end it
            used = int((query_index >= 0).any(-1).sum(-1).max())
            query_index, tile_row = query_index[:, :, :used], tile_row[:, :, :used]
        return SparsePlan(
            num_queries=row.shape[-1],
            num_keys=num_keys,
            tile=tile,
            keys=keys,
            query_index=query_index,
            tile_row=tile_row,
            causal=call.causal,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _rows(
        self, kind: str, grid: Shape | None, lengths: tuple[int, int], device: torch.device
    ) -> _Rows:
        """Return the rows of a layer for lengths (N, S); a grid comes with N = S only."""
        num_queries, num_keys = lengths
        if grid is not None and max(grid) == math.prod(grid):
            grid = None  # one axis holds all tokens
        if kind == "gather" and self.gather == "window" and grid is not None:
            return self._windows(grid, device)
        of_key = torch.arange(num_keys, device=device)
        position = torch.arange(num_keys - num_queries, num_keys, device=device)
        number = self.groups
        if kind == "global":
            number = self.global_groups
            of_key, position = (x // self.global_block % number for x in (of_key, position))
        elif kind == "gather" and self.gather == "cyclic":
            of_key, position = (cyclic_groups(x, number) for x in (of_key, position))
        elif kind == "gather":
            of_key, position = (segment_groups(x, number, num_keys) for x in (of_key, position))
        elif self.neighbourhood == "patch" and grid is not None:
            patch = self._patch(grid)
            number = math.prod(patch)
            of_key = position = patch_positions(grid, patch, device)
        else:
            of_key, position = of_key % number, position % number
        order, start, size = sort_by_group(of_key[None, None], number)
        keys = KeyTokens(start=start, count=size.int(), index=order.flatten().int())
        return _Rows(keys, position, of_key)

    def _patch(self, grid: Shape) -> Shape:
        """Return Scatter's patch."""
        if self.patch is not None:
            return self.patch
        return nearest_patch(grid, self.groups) if self.fit else exact_patch(grid, self.groups)

    def _windows(self, grid: Shape, device: torch.device) -> _Rows:
        """Return one row per query patch: the window around it."""
        asked = nearest_window(grid, self.groups) if self.window is None else self.window
        window = _cut(asked, grid)
        # A window of everything needs no patches: one row serves all.
        patch = grid if window == grid else _cut(self.query_patch, window)
        index = patch_windows(grid, patch, window, device)
        per_tile = 64 if math.prod(patch) <= 64 else None  # the paper's patch of 8 * 8 fills one
        keys = KeyTokens.from_lists(index[None, None])
        of_query = patch_numbers(grid, patch, device)
        return _Rows(keys, of_query, of_query, per_tile)

    def _blocks(
        self, call: Call, num_queries: int, num_keys: int, device: torch.device
    ) -> SparsePlan:
        """Plan a global layer whose blocks are whole kernel blocks."""
        groups = self.global_groups
        block = torch.arange(-(-num_keys // _BLOCK), device=device)
        of_block = block * _BLOCK // self.global_block % groups
        mask = of_block == torch.arange(groups, device=device)[:, None]  # [G, C]
        mask = mask[None, None]
        position = torch.arange(num_keys - num_queries, num_keys, device=device)
        row = (position // self.global_block % groups)[None, None]
        tiles = None
        if num_queries == num_keys:
            tiles = _count_tiles(self, "global", None, num_keys, None)
        else:
            of_key = of_block.repeat_interleave(_BLOCK)[:num_keys]
            row, first = _with_fallback(row, of_key, groups, call)
            single = block == first[:, None, None, None] // _BLOCK  # [B, 1, 1, C]
            mask = torch.cat([mask.expand(len(first), -1, -1, -1), single], dim=2)
        keys = KeyBlocks.from_mask(mask, block=_BLOCK)
        return self._plan_of(row, keys, call, num_keys, num_tiles=tiles)

    def _sliding(self, q: Tensor, k: Tensor, call: Call) -> SparsePlan:
        """Plan a layer of sliding windows and sinks."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        if num_queries != num_keys and not call.causal:
            raise UnsupportedError(
                f"intra: g2s4's window has no place for {num_queries} queries over {num_keys} keys "
                "that are not causal: it is for causal prefill and self-attention"
            )
        span = self.span
        if span is None:
            lengths = (num_queries, num_keys, self.groups)
            span = nearest_span(*lengths, sink=self.sink, causal=call.causal)
        right = 0 if call.causal else span
        sink = min(self.sink, num_keys)
        # A tile's row: the first tokens, then what lies between its first query's window and its
        # last one's.
        first = torch.arange(0, num_queries, self.tile, device=q.device)
        last = (first + self.tile).clamp(max=num_queries) - 1
        shift = num_keys - num_queries
        sinks, number, end = self._sinks(sink, call, q.device)
        low = (first + shift - span).maximum(end[:, None])  # [B|1, T]
        high = (last + shift + right).clamp(max=num_keys - 1)
        place = torch.arange(sink + self.tile + span + right, device=q.device)
        is_sink = place < number[:, None]  # [B|1, L]
        behind = low[..., None] + (place - number[:, None])[:, None]  # [B|1, T, L]
        listed = torch.nn.functional.pad(sinks, (0, len(place) - sink))
        key = torch.where(is_sink[:, None], listed[:, None], behind)
        return SparsePlan(
            num_queries=num_queries,
            num_keys=num_keys,
            tile=self.tile,
            keys=KeyTokens.from_lists(
                key.clamp(max=num_keys - 1)[:, None],
                count=(number[:, None] + (high - low + 1).clamp(min=0))[:, None],
            ),
            causal=call.causal,
            key_valid=call.key_valid,
            window=(span, right, self.sink),
            scale=call.scale,
        )

    @staticmethod
    def _sinks(number: int, call: Call, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sinks [B|1, number], ascending, how many there are [B|1], and where they end.

        They are the first keys that are no padding.
        """
        end = first_end(call.key_valid, number, device)
        if call.key_valid is None:
            return torch.arange(number, device=device)[None], end, end
        first = (~call.key_valid).byte().argsort(dim=-1, stable=True)[:, :number]
        return first, call.key_valid.sum(-1).clamp(max=number), end


class _Rows(NamedTuple):
    """Rows of keys, and which row each token belongs to.

    Attributes:
        keys: The rows, batch and head axes of size 1.
        of_query: [N] int64, the row that each query reads.
        of_key: [S] int64, a row that lists each key; its only one, except for windows.
        per_tile: Most queries in a tile; None for the method's tile.
    """

    keys: KeyTokens
    of_query: Tensor
    of_key: Tensor
    per_tile: int | None = None


@functools.lru_cache(maxsize=256)
def _count_tiles(
    method: Intra,
    kind: str,
    grid: Shape | None,
    num_latent: int,
    text: tuple[int, int] | None,
) -> int:
    """Return how many tiles the queries of self-attention fill.

    From the geometry, on the CPU: what stands on a GPU could only be counted by waiting for it, and
    a bound that needs no count would be up to twice as many, of no query each.
    """
    device = torch.device("cpu")
    if text is None:
        rows = method._rows(kind, grid, (num_latent, num_latent), device)
    else:
        rows = method._joint_rows(kind, grid, num_latent, text, device)
    filled = -(-torch.bincount(rows.of_query) // _tile(method, rows.per_tile))
    return int(filled.sum())


def _tile(method: Intra, per_tile: int | None) -> int:
    """Return the queries of a tile, of which there are at most `per_tile`."""
    return method.tile if per_tile is None else min(method.tile, per_tile)


def _with_fallback(row: Tensor, of_key: Tensor, num_rows: int, call: Call) -> tuple[Tensor, Tensor]:
    """Send queries whose row shows them no valid key to a row of their own.

    Args:
        row: [1, 1, N] int64, the row of each query.
        of_key: [S] int64, the row of each key.
        num_rows: R.
        call: Its padding and causality.

    Returns:
        row [B|1, 1, N], which is R for those queries, and the first valid key [B|1] for that row.
    """
    num_queries, num_keys = row.shape[2], of_key.shape[0]
    key = torch.arange(num_keys, device=row.device)
    valid = call.key_valid
    where = key[None] if valid is None else torch.where(valid, key, num_keys)  # [B|1, S]
    first = torch.full((where.shape[0], num_rows), num_keys, device=row.device)
    first = first.scatter_reduce(1, of_key.expand_as(where), where, "amin")  # [B|1, R]
    last = torch.full_like(row[0, 0], num_keys - 1)
    if call.causal:
        last = torch.arange(num_keys - num_queries, num_keys, device=row.device)
    row = row[:, 0].expand(where.shape[0], -1)
    starved = first.gather(1, row) > last
    single = first.amin(-1).clamp(max=num_keys - 1)
    return torch.where(starved, num_rows, row)[:, None], single


def _with_single(keys: KeyTokens, single: Tensor) -> KeyTokens:
    """Append a row of one key to rows [1, 1, R]: `single` [B|1] int64, one a batch row."""
    batch = len(single)
    place = torch.arange(batch, device=single.device).view(-1, 1, 1) + keys.index.numel()
    start = torch.cat([keys.start.expand(batch, -1, -1), place], dim=2)
    count = torch.cat([keys.count.expand(batch, -1, -1), torch.ones_like(place).int()], dim=2)
    return KeyTokens(start=start, count=count, index=torch.cat([keys.index, single.int()]))


def _stack(first: KeyTokens, second: KeyTokens) -> KeyTokens:
    """Return the rows of both, one behind the other."""
    return KeyTokens(
        start=torch.cat([first.start, second.start + first.index.numel()], dim=2),
        count=torch.cat([first.count, second.count], dim=2),
        index=torch.cat([first.index, second.index]),
    )


def _with_text(keys: KeyTokens, num_latent: int, start: int, length: int) -> KeyTokens:
    """Move rows of latent keys to the joint sequence and add the text keys to each."""
    latent = SparsePlan(num_queries=num_latent, num_keys=num_latent, tile=128, keys=keys)
    joined = cast(KeyTokens, join_text(latent, (start, start + length), None).keys)
    # The last row is the full one of text queries that read everything.
    end = joined.index.numel() - num_latent - length
    return KeyTokens(
        start=joined.start[:, :, :-1], count=joined.count[:, :, :-1], index=joined.index[:end]
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape(name: str, value: object) -> Shape:
    """Return three positive sides as a tuple; recipe files give lists.

    Raises:
        PlanError: Naming the parameter and the value.
    """
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(sides) != 3 or not all(_is_integer(side) and side >= 1 for side in sides):
        raise PlanError(
            f"intra: {name}={described(value)} must be (frames, rows, columns), integers >= 1"
        )
    return cast(Shape, sides)


def _cut(shape: Shape, limit: Shape) -> Shape:
    """Return the shape, no side longer than the limit's."""
    frames, rows, columns = map(min, shape, limit)
    return frames, rows, columns
