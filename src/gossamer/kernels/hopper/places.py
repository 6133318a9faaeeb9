"""Where each tile begins: the table that the Hopper kernel reads a tile ahead."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.steps import count_below


@triton.jit
def locate_tiles(
    launch_ptr,
    query_ptr,
    tile_row_ptr,
    start_ptr,
    count_ptr,
    index_ptr,
    table_ptr,
    # Strides in elements; 0 on an axis that is shared.
    launch_b,
    launch_h,
    query_b,
    query_h,
    tile_b,
    tile_h,
    start_b,
    start_h,
    count_b,
    count_h,
    index_b,
    index_h,
    index_r,
    num_queries,
    num_keys,
    num_places,
    num_tiles,
    num_heads,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys per block; 0: the rows list tokens
    CAUSAL: tl.constexpr,  # rows ascend, and a tile reads no key behind its last query
    HAS_VIRTUAL: tl.constexpr,
):
    """Write the place of one launch slot: [5] int64.

    The tile; where its key row begins in the lists; how many entries the tile reads; how many of
    them, from the front, every query of the tile sees; how many come before the first virtual key.
    Entries are keys. The attention kernel would otherwise look these up between two tiles, one
    after the other, with nothing else to do.
    """
    slot = tl.program_id(0)
    tile = slot % num_tiles
    head = ((slot // num_tiles) % num_heads).to(tl.int64)
    batch = (slot // num_tiles // num_heads).to(tl.int64)
    if launch_ptr is not None:
        tile = tl.load(launch_ptr + batch * launch_b + head * launch_h + tile)
    row = tile.to(tl.int64)
    if tile_row_ptr is not None:
        row = tl.load(tile_row_ptr + batch * tile_b + head * tile_h + row).to(tl.int64)
    count = tl.load(count_ptr + batch * count_b + head * count_h + row)
    if BLOCK > 0:
        first = batch * index_b + head * index_h + row * index_r
    else:
        first = tl.load(start_ptr + batch * start_b + head * start_h + row)
    index_row = index_ptr + first
    if CAUSAL:
        query = tile * TILE + tl.arange(0, TILE)
        if query_ptr is not None:
            query = tl.load(query_ptr + batch * query_b + head * query_h + query)
        else:
            query = tl.where(query < num_queries, query, -1)
        shift = num_keys - num_queries
        last = tl.max(query) + shift
        least = tl.min(tl.where(query >= 0, query, num_queries)) + shift
        if tl.max(query) < 0:  # no query stands in the tile
            count = 0
        count = count_below(index_row, count, last + 1, BLOCK)
        if BLOCK > 0:
            whole = count_below(index_row, count, (least + 1) // BLOCK, 0) * BLOCK
        else:
            whole = count_below(index_row, count, least + 1, 0)
    length = count
    if BLOCK > 0:
        length = count * BLOCK
        if count > 0:  # the last block may end before its size
            block = tl.load(index_row + count - 1)
            length -= tl.maximum((block + 1) * BLOCK - num_places, 0)
    if not CAUSAL:
        whole = length
    real = length
    if HAS_VIRTUAL:
        real = count_below(index_row, count, num_keys, 0)
    place_ptr = table_ptr + slot.to(tl.int64) * 5
    tl.store(place_ptr, tile)
    tl.store(place_ptr + 1, first)
    tl.store(place_ptr + 2, length)
    tl.store(place_ptr + 3, whole)
    tl.store(place_ptr + 4, real)
