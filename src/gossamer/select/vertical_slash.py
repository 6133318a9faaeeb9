"""Columns and diagonals of the score matrix as blocks: what they cross, and what they promise."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.select.probe import Lines
from gossamer.select.spans import Spans


def block_sums(columns: Tensor, block: int) -> Tensor:
    """Sum each block of the last axis, [..., S] to [..., ceil(S / block)]."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % block))
    return padded.unflatten(-1, (-1, block)).sum(-1)


def column_blocks(chosen: Tensor, block: int) -> Tensor:
    """Return the blocks that hold a chosen column, [..., S] bool to [..., 1, C] bool."""
    return (block_sums(chosen.byte(), block) > 0)[..., None, :]


def diagonal_blocks(chosen: Tensor, first: int, spans: Spans) -> Tensor:
    """Return the blocks that hold a pair on a chosen diagonal: a tile's union.

    Args:
        chosen: [B, H, L] bool, diagonals by offset, from offset `first` on.
        first: The offset of the first one.
        spans: What tiles and blocks span.

    Returns:
        [B, H, R, C] bool.
    """
    before = torch.nn.functional.pad(chosen.long().cumsum(-1), (1, 0))  # [B, H, L + 1]
    low, high = spans.offsets()
    length = chosen.shape[-1]
    low = (low - first).clamp(0, length)
    high = (high + 1 - first).clamp(0, length).maximum(low)
    return _at(before, high) > _at(before, low)


def diagonal_mass(lines: Lines, spans: Spans) -> Tensor:
    """Return the mass per query that each block holds if mass depends on the offset alone.

    The mean, over a tile's queries p, of the sum over a block's keys j of the mass at offset p - j:
    by prefix sums of prefix sums, in float64.

    Args:
        lines: The probe's sums; only diagonals are read.
        spans: What tiles and blocks span.

    Returns:
        [B, H, R, C] float64, at least 0; 0 for empty tiles and blocks.
    """
    # Entry x + 1 is the sum, over offsets up to x, of the sums over offsets up to them.
    twice = torch.nn.functional.pad(lines.diagonals.cumsum(-1).cumsum(-1), (1, 0))
    length = lines.diagonals.shape[-1]

    def up_to(tile_edge: Tensor, block_edge: Tensor) -> Tensor:
        last = (tile_edge[:, :, None] - block_edge[:, None])[:, None] - 1  # [B|1, 1, R, C]
        return _at(twice, (last - lines.first + 1).clamp(0, length))

    start, stop = spans.tile_start, spans.tile_stop
    total = up_to(stop, spans.block_start) - up_to(start, spans.block_start)
    total -= up_to(stop, spans.block_stop) - up_to(start, spans.block_stop)
    low, high = spans.offsets()
    number = (stop - start).clamp(min=1)[:, None, :, None]
    return (total / number).clamp_(min=0).masked_fill_(high < low, 0.0)


def line_scores(lines: Lines, spans: Spans, block: int) -> Tensor:
    """Return one ranking of columns and diagonals: the better promise of a block's two lines.

    Keeping the best blocks of it keeps whole block columns and block diagonals, best first, and the
    last line in part.

    Args:
        lines: The probe's sums.
        spans: What tiles and blocks span.
        block: Keys per block.

    Returns:
        [B, H, R, C] float32, mass per query, 0…1.
    """
    columns = block_sums(lines.columns, block)[:, :, None]  # [B, H, 1, C]
    return diagonal_mass(lines, spans).maximum(columns).float()


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Return x [B, H, L] at the places `index` [B|1, 1, R, C], as [B, H, R, C]."""
    places = index.flatten(1).unsqueeze(1).expand(x.shape[0], x.shape[1], -1)
    return x.gather(2, places).unflatten(2, index.shape[-2:])
