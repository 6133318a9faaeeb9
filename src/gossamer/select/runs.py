"""Key rows made of runs of consecutive tokens, as geometric windows on a grid are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.plan import KeyTokens

_CHUNK_BYTES = 64 << 20  # of the runs, or of the int64 lists, held at once
_HALVINGS = 30  # of the knob's range: far finer than the steps of a window


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of consecutive keys that each tile reads, at any value of a pattern's knob.

    Attributes:
        num_tiles: T.
        num_runs: L, runs per tile; some may be empty.
        low: The least knob.
        high: The knob at which every key is read.
        find: Maps tiles [n] int64 and the knob of each, [n] float64, to the runs' begin and end,
            [n, L] int64 each, ascending and apart; a run is empty where end <= begin.
    """

    num_tiles: int
    num_runs: int
    low: float
    high: float
    find: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def parts(self, batch: int) -> tuple[Tensor, ...]:
        """Return the tiles of all batch rows, batch * T + tile, in parts that fit the chunk size.

        Args:
            batch: B.
        """
        chunk = max(1, _CHUNK_BYTES // (64 * max(self.num_runs, 1)))
        return torch.arange(batch * self.num_tiles, device="cpu").split(chunk)


def solve_knob(runs: Runs, queries: Tensor, valid: Tensor, density: float) -> Tensor:
    """Return the knob whose density is nearest to the one asked, [B] float64, on the CPU.

    Args:
        runs: The runs; a greater knob never reads less.
        queries: [B, T] int64, queries of each tile that count.
        valid: [B, S] bool, keys that count.
        density: Share of the pairs of queries and keys.
    """
    batch, length = valid.shape
    upper = torch.full((batch,), runs.high, dtype=torch.float64, device="cpu")
    if density >= 1:
        return upper
    lower = torch.full_like(upper, runs.low)
    running = torch.nn.functional.pad(valid.long().cumsum(1), (1, 0))  # [B, S + 1]
    target = queries.sum(1) * running[:, -1] * density  # [B]
    running = running.flatten()

    def pairs(knob: Tensor) -> Tensor:
        keys: list[Tensor] = []
        for part in runs.parts(batch):
            row = part // runs.num_tiles
            begin, end = runs.find(part % runs.num_tiles, knob[row])  # [n, L]
            offset = row[:, None] * (length + 1)
            keys.append((running[offset + end.maximum(begin)] - running[offset + begin]).sum(1))
        return (torch.cat(keys).view(batch, -1) * queries).sum(1)

    for _ in range(_HALVINGS):
        middle = (lower + upper) / 2
        above = pairs(middle) > target
        upper = torch.where(above, middle, upper)
        lower = torch.where(above, lower, middle)
    below_is_nearer = target - pairs(lower) <= pairs(upper) - target
    return torch.where(below_is_nearer, lower, upper)


def list_runs(runs: Runs, knob: Tensor) -> KeyTokens:
    """List the keys of every tile's runs, a row a tile, on the CPU.

    Args:
        runs: The runs.
        knob: [B|1] float64.
    """
    pool: list[Tensor] = []
    counts: list[Tensor] = []
    for part in runs.parts(len(knob)):
        begin, end = runs.find(part % runs.num_tiles, knob[part // runs.num_tiles])  # [n, L]
        length = (end - begin).clamp(min=0)
        counts.append(length.sum(1))
        longest = int(counts[-1].max())
        chunk = max(1, _CHUNK_BYTES // (32 * max(longest, 1)))
        pieces = zip(begin.split(chunk), length.split(chunk), strict=True)
        pool += [_enumerate(first.flatten(), size.flatten()) for first, size in pieces]
    count = torch.cat(counts)
    shape = (len(knob), 1, runs.num_tiles)
    start = count.cumsum(0) - count
    return KeyTokens(start=start.view(shape), count=count.view(shape).int(), index=torch.cat(pool))


def _enumerate(begin: Tensor, length: Tensor) -> Tensor:
    """Return the tokens of the runs one behind the other, int32."""
    before = length.cumsum(0) - length
    shift = (begin - before).repeat_interleave(length)
    return (shift + torch.arange(len(shift), device="cpu")).int()
