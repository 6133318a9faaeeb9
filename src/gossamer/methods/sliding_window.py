"""Sliding windows: every token reads its neighbours in the sequence or on the grid, and sinks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.group.patches import Patches, line_tiles, patch_tiles
from gossamer.methods.base import Method, State, without
from gossamer.methods.blocked import block_plan
from gossamer.methods.geometric import band_entry, runs_plan
from gossamer.methods.params import check_count, check_share, check_size, only_one, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan, join_text
from gossamer.plan.visible import first_end
from gossamer.select import block_layout
from gossamer.select.runs import Runs
from gossamer.select.spans import visible_pairs
from gossamer.select.threshold import force_first, reach_density

_DENSITY = 0.2  # where nothing is given
_MARGIN = 16  # width of the windows for which queries are grouped where a density decides it


@register
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Method):
    """Read the nearest keys, whatever they hold, and the sinks at the beginning.

    One of three forms:

    * `window=w`: w consecutive keys. Query at position p reads p - w // 2 … p + (w - 1) // 2, cut
      off at the ends of the sequence; a causal query the last w keys, itself counted (with sinks:
      the A-shape of StreamingLLM, arXiv 2309.17453). Exact for every query (`SparsePlan.window`).
    * `window3d=(f, r, c)`: a box of f frames, r rows and c columns around the query on the grid,
      *shifted* at the grid's borders rather than cut off, so that every query has as many keys
      (neighbourhood attention, arXiv 2204.07143). Queries are grouped into boxes of the grid, and a
      tile reads the union of its queries' windows. A call without a grid is one row of one frame.
    * `density=d` alone: the widest band of whole blocks around each tile that computes the share d;
      of its outermost blocks some are left out, so that d is met. With `window3d`, which then gives
      proportions only: the box scaled to come nearest to d.

    With text in the sequence, a window over positions has no meaning for the text tokens, which
    read and are read by everything. Latent windows are then held as the union over a tile, up to
    `tile` - 1 keys wider than `window`.

    "Sink" means three things elsewhere: first tokens, first frame, text. The first two are
    parameters here; text is always read in full. Where padding fills a query's whole window, a tile
    of the listed forms reads everything; the exact form reads nothing (this takes causal queries
    that are not the keys' own).

    Attributes:
        window: Keys per query in the sequence, itself counted.
        window3d: (frames, rows, columns) per query; larger than the grid means all of it.
        density: Share of the visible pairs to compute. Without any of the three: 0.2.
        sink: First tokens that every query reads; padding in front of them does not count.
        sink_frames: First frames that every query reads; needs a grid. The larger sink counts.

    Other parameters:
        block: Keys per block.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "sliding-window"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453; neighbourhoods, arXiv 2204.07143"

    window: int | None = None
    window3d: tuple[int, int, int] | None = None
    density: float | None = None
    sink: int = 0
    sink_frames: int = 0
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse contradictory or wrong values; 20% density where none is given."""
        name = self.name
        only_one(name, window=self.window, window3d=self.window3d)
        only_one(name, window=self.window, density=self.density)
        if self.window is None and self.window3d is None and self.density is None:
            object.__setattr__(self, "density", _DENSITY)
        if self.window3d is not None:
            given = self.window3d
            if not isinstance(given, (tuple, list)) or len(given) != 3:
                raise PlanError(
                    f"{name}: window3d={described(given)} must be (frames, rows, columns)"
                )
            sides = (given[0], given[1], given[2])
            for side in sides:
                check_count(name, "window3d", side)
            object.__setattr__(self, "window3d", sides)
        if self.density is not None:
            check_share(name, "density", self.density)
        for field in ("window", "block", "tile"):
            check_count(name, field, getattr(self, field), optional=field == "window")
        for field in ("sink", "sink_frames"):
            check_size(name, field, getattr(self, field))
        if self.window3d is not None:
            refuse_unused(self, "beside window3d", "block")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with a window that computes `density` at each call's size."""
        return cls(density=density, **params)

    def check_call(self, call: Call) -> None:
        """Refuse sink frames where there are no frames; see `Method.check_call`.

        Raises:
            PlanError: `sink_frames` without a grid.
        """
        super().check_call(call)
        if self.sink_frames and call.grid is None:
            raise PlanError(
                f"{self.name}: sink_frames={self.sink_frames} needs call.grid; use sink"
            )

    def static_key(self, call: Call) -> Hashable:
        """Return the parameters: the plan depends on sizes alone."""
        del call
        return self

    def _plan_joint(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Plan the latent tokens by lists, to which text can be joined, and join it."""
        del v, state
        text = call.text or (0, 0)
        if call.causal:
            raise UnsupportedError(f"{self.name}: text and causality at once have no meaning")
        valid = None if call.key_valid is None else without(call.key_valid, text, dim=1)
        lengths = (q.shape[2] - call.text_length, k.shape[2] - call.text_length)
        plan = self._plan_sizes(lengths, call.latent(valid), q.device, listed=True)
        return join_text(plan, text, call.key_valid)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Plan from the lengths alone."""
        del v, state
        return self._plan_sizes((q.shape[2], k.shape[2]), call, q.device, listed=False)

    def _plan_sizes(
        self, lengths: tuple[int, int], call: Call, device: torch.device, *, listed: bool
    ) -> SparsePlan:
        """Plan N queries and S keys; with `listed`, without windows that differ inside a tile."""
        if self.window3d is not None:
            return self._boxes(self.window3d, lengths, call, device)
        if self.window is None:
            density = _DENSITY if self.density is None else self.density
            return self._band(density, lengths, call, device)
        # Queries in front of the first key have a window without keys: lists move it to the keys.
        if listed or (lengths[0] > lengths[1] and not call.causal):
            return self._lines(self.window, lengths, call, device)
        return self._exact(self.window, lengths, call, device)

    def _sink(self, call: Call, num_keys: int) -> int:
        """Return how many first tokens are sinks."""
        sink = self.sink
        if self.sink_frames and call.grid is not None:
            sink = max(sink, self.sink_frames * call.grid[1] * call.grid[2])
        return min(sink, num_keys)

    def _exact(
        self, window: int, lengths: tuple[int, int], call: Call, device: torch.device
    ) -> SparsePlan:
        """Return the blocks that windows of a tile touch, and the window that cuts them."""
        num_queries, num_keys = lengths
        left, right = (window - 1, 0) if call.causal else _sides(window)
        sink = self._sink(call, num_keys)
        layout = block_layout(
            call, num_queries, num_keys, tile=self.tile, block=self.block, device=device
        )
        start = torch.arange(0, num_queries, self.tile, device=device)[:, None]
        end = (start + self.tile).clamp(max=num_queries)
        shift = num_keys - num_queries
        begin = torch.arange(0, num_keys, self.block, device=device)
        touched = (begin < end + shift + right) & (begin + self.block > start + shift - left)
        sinks = first_end(call.key_valid, sink, device)[:, None, None, None]
        keep = (touched | (begin < sinks)) & layout.possible  # [B|1, 1, R, C]
        plan = block_plan(keep, num_queries, num_keys, call, tile=self.tile, block=self.block)
        return replace(plan, window=(left, right, sink))

    def _band(
        self, density: float, lengths: tuple[int, int], call: Call, device: torch.device
    ) -> SparsePlan:
        """Return the band of blocks that meets the density."""
        num_queries, num_keys = lengths
        tile, block = self.tile, self.block
        layout = block_layout(call, num_queries, num_keys, tile=tile, block=block, device=device)
        num_rows, num_columns = -(-num_queries // tile), -(-num_keys // block)
        entry = band_entry(
            num_rows,
            num_columns,
            tile=tile,
            block=block,
            shift=num_keys - num_queries,
            device=device,
        )
        begin = torch.arange(0, num_keys, block, device=device)
        sinks = first_end(call.key_valid, self._sink(call, num_keys), device)
        entry = torch.where(begin < sinks[:, None, None, None], -torch.inf, entry)  # [B|1, 1, R, C]
        entry = force_first(entry, layout.possible)
        if layout.forced is not None:
            entry = entry.masked_fill(layout.forced, -torch.inf)
        # Padding counts neither as keys nor as queries, or it would widen the valid rows' band.
        pairs = visible_pairs(call, num_queries, num_keys, tile=tile, block=block, device=device)
        keep = reach_density(entry, pairs, density)
        return block_plan(keep, num_queries, num_keys, call, tile=tile, block=block)

    def _lines(
        self, window: int, lengths: tuple[int, int], call: Call, device: torch.device
    ) -> SparsePlan:
        """Return lists of the union of the windows of each tile of consecutive queries."""
        num_keys = lengths[1]
        left, right = _sides(window)
        tiles = line_tiles(*lengths, self.tile)
        sink = self._sink(call, num_keys)

        def find(part: Tensor, knob: Tensor) -> tuple[Tensor, Tensor]:
            del knob
            begin = (tiles.first[part, 2:] - left).clamp(min=0)
            end = (tiles.last[part, 2:] + right + 1).clamp(max=num_keys)
            return _with_sink(begin, end, sink)

        runs = Runs(tiles.num_tiles, 2, 1.0, 1.0, find)
        return runs_plan(tiles, runs, lengths, call, device)

    def _boxes(
        self,
        sides: tuple[int, int, int],
        lengths: tuple[int, int],
        call: Call,
        device: torch.device,
    ) -> SparsePlan:
        """Return lists of the union of the 3-D windows of each box of queries."""
        if call.causal:
            raise UnsupportedError(
                f"{self.name} has no causal form with window3d: a box holds later positions too"
            )
        tiles = line_tiles(*lengths, self.tile)
        if call.grid is not None:
            margin = (sides[0] - 1, sides[1] - 1, sides[2] - 1)
            if self.density is not None:  # proportions, of any size
                frames, rows, columns = (side * _MARGIN // max(sides) for side in sides)
                margin = (frames, rows, columns)
            tiles = patch_tiles(call.grid, self.tile, margin)
        runs = _windows(tiles, sides, self._sink(call, lengths[1]))
        return runs_plan(tiles, runs, lengths, call, device, knob=1.0, density=self.density)


def _sides(window: int) -> tuple[int, int]:
    """Return how many keys before and behind the query a window of both sides holds."""
    return window // 2, (window - 1) // 2


def _with_sink(begin: Tensor, end: Tensor, sink: int) -> tuple[Tensor, Tensor]:
    """Put a run of the first `sink` tokens in front of runs [n, L], which lose what it holds."""
    first = torch.zeros_like(begin[:, :1])
    begin, end = begin.clamp(min=sink), end.clamp(min=sink)
    return torch.cat([first, begin], dim=1), torch.cat([first + sink, end], dim=1)


def _windows(tiles: Patches, sides: tuple[int, int, int], sink: int) -> Runs:
    """Return the runs of columns, one for each row of each frame, of windows around a box.

    The knob scales the windows. The union of the windows of a box is a box: axes are apart.
    """
    frames, rows, columns = tiles.grid
    extent = torch.tensor(tiles.grid, device="cpu")
    wanted = torch.tensor(sides, dtype=torch.float64, device="cpu")
    line = torch.arange(frames * rows, device="cpu")
    place = torch.stack([line // rows, line % rows], dim=1)  # [L, 2]

    def find(part: Tensor, knob: Tensor) -> tuple[Tensor, Tensor]:
        side = (knob[:, None] * wanted).round().long().clamp(min=1).minimum(extent)  # [n, 3]

        def start(token: Tensor) -> Tensor:
            return (token - side // 2).clamp(min=0).minimum(extent - side)

        low, high = start(tiles.first[part]), start(tiles.last[part]) + side
        inside = (place >= low[:, None, :2]) & (place < high[:, None, :2])
        begin = line * columns + low[:, 2:]
        end = line * columns + torch.where(inside.all(-1), high[:, 2:], low[:, 2:])
        return _with_sink(begin, end, sink)

    largest = max(2 * n / side for n, side in zip(tiles.grid, sides, strict=True))
    return Runs(tiles.num_tiles, len(line) + 1, 0.0, largest, find)
