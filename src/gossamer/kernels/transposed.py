"""Plans of blocks seen from the keys: which tiles of queries read each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.strides import shared_strides
from gossamer.plan import KeyBlocks, SparsePlan

_WORK_BYTES = 256 << 20  # of what it takes to make the lists of some heads at once
# Per pair of a tile and a block: the mask and its copies, the lists' places in 64 bits while the
# mask is written, and the sort's keys and places. The lists that are kept take 4.
_PAIR_BYTES = 32


class TileLists(NamedTuple):
    """Tiles that read each block of keys.

    Attributes:
        num_tiles: [B|1, H|1, num_blocks] int32, tiles that read block b.
        tiles: [B|1, H|1, num_blocks, T] int32, tile indices, ascending in the first `num_tiles`
            entries; what lies behind them names other tiles.
    """

    num_tiles: Tensor
    tiles: Tensor

    def arguments(self) -> dict[str, Tensor | int]:
        """Return the lists as a kernel takes them, with stride 0 on an axis that is shared."""
        named = {"num_listed": self.num_tiles, "listed": self.tiles}
        strides = {
            f"{name}_{axis}": stride
            for name, x in named.items()
            for axis, stride in zip("bh", shared_strides(x), strict=True)
        }
        return {f"{name}_ptr": x for name, x in named.items()} | strides


def list_tiles(plan: SparsePlan, keys: KeyBlocks) -> TileLists:
    """List the tiles that read each block, without waiting for the device.

    Args:
        plan: The plan.
        keys: Its blocks. Blocks that a causal tile in order lists and cannot see are left out.
    """
    lists = _new_lists(plan, keys)
    for part, mask in _tile_masks(plan, keys):
        _write(lists, part, mask)
    return lists


def list_causal_tiles(plan: SparsePlan, keys: KeyBlocks) -> tuple[TileLists, TileLists]:
    """List the tiles all of whose queries see a block, and those of which some see a part of it.

    Args:
        plan: A causal plan whose queries and keys stand in order.
        keys: Its blocks.
    """
    whole, cut = _new_lists(plan, keys), _new_lists(plan, keys)
    first, begin = _positions(plan, keys)
    is_whole = begin + keys.block - 1 <= first  # [T, num_blocks]
    for part, mask in _tile_masks(plan, keys):
        _write(whole, part, mask & is_whole)
        _write(cut, part, mask & ~is_whole)
    return whole, cut


def _tile_masks(plan: SparsePlan, keys: KeyBlocks) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield places in the batch and head axes, and which tiles there read which blocks.

    The masks are [b, h, T, num_blocks] bool.
    """
    batch, heads = _shared_shape(plan, keys)
    num_blocks = keys.num_blocks(plan.num_keys)
    seen = None
    if plan.causal and plan.query_index is None and keys.key_order is None:
        first, begin = _positions(plan, keys)
        seen = begin <= first + plan.tile - 1
    per_pair = max(1, _PAIR_BYTES * max(plan.num_tiles, keys.num_rows) * num_blocks)
    step = max(1, _WORK_BYTES // per_pair)  # pairs of a batch row and a head
    for row in range(0, batch, max(1, step // heads)):
        rows = slice(row, row + max(1, step // heads))
        for head in range(0, heads, step):
            part = (rows, slice(head, head + step))
            count, index = _take(keys.count, part), _take(keys.index, part)
            shape = torch.broadcast_shapes(count.shape[:2], index.shape[:2])
            count, index = count.expand(*shape, -1), index.expand(*shape, -1, -1)
            mask = replace(keys, count=count, index=index).to_mask(plan.num_keys)
            if plan.tile_row is not None:
                tile_row = _take(plan.tile_row, part).long()[..., None]
                shape = torch.broadcast_shapes(mask.shape[:2], tile_row.shape[:2])
                at = tile_row.expand(*shape, -1, num_blocks)
                mask = mask.expand(*shape, -1, -1).gather(2, at)
            mask = mask[:, :, : plan.num_tiles]
            yield part, mask if seen is None else mask & seen


def _shared_shape(plan: SparsePlan, keys: KeyBlocks) -> tuple[int, int]:
    """Return batch rows and heads that the lists tell apart."""
    placed = [x for x in (keys.count, keys.index, plan.tile_row) if x is not None]
    return max(x.shape[0] for x in placed), max(x.shape[1] for x in placed)


def _take(x: Tensor, part: tuple[slice, slice]) -> Tensor:
    """Return a part of x [B|1, H|1, ...]; shared axes stay shared."""
    rows, heads = (p if n > 1 else slice(None) for p, n in zip(part, x.shape[:2], strict=True))
    return x[rows, heads]


def _positions(plan: SparsePlan, keys: KeyBlocks) -> tuple[Tensor, Tensor]:
    """Return the position of each tile's first query [T, 1], and each block's first key."""
    tile = torch.arange(plan.num_tiles, device=plan.device)
    block = torch.arange(keys.num_blocks(plan.num_keys), device=plan.device)
    return (tile * plan.tile + plan.num_keys - plan.num_queries)[:, None], block * keys.block


def _new_lists(plan: SparsePlan, keys: KeyBlocks) -> TileLists:
    """Return lists that are not written yet."""
    shape = (*_shared_shape(plan, keys), keys.num_blocks(plan.num_keys))
    index = torch.empty(*shape, plan.num_tiles, dtype=torch.int32, device=plan.device)
    return TileLists(torch.empty(shape, dtype=torch.int32, device=plan.device), index)


def _write(lists: TileLists, part: tuple[slice, slice], mask: Tensor) -> None:
    """Write the lists of a mask [b, h, T, num_blocks]."""
    turned = KeyBlocks.from_mask(mask.mT, block=1)
    lists.num_tiles[part] = turned.count
    lists.tiles[part] = turned.index
