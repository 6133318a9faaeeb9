"""Where each tile begins: the table that the Hopper kernel reads a tile ahead."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, C901 -- a kernel takes flat arguments, its types are Triton's,
# and a branch at compile time is not one at run time

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
    claimed_ptr,
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
    left,  # of the window
    right,
    num_places,
    num_tiles,
    num_heads,
    num_programs,  # of the attention kernel
    WIDTH: tl.constexpr,  # of a row of the table
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys per block; 0: the rows list tokens
    CAUSAL: tl.constexpr,  # a tile reads no key behind its last query
    WINDOW: tl.constexpr,
    ASCENDS: tl.constexpr,  # whether rows list keys in the order of their positions
    HAS_VIRTUAL: tl.constexpr,
):
    """Write the place of one launch slot: [6] int64.

    The tile; where its key row begins in the lists; how many entries the tile reads, -1 for a tile
    without a query; from which of them and up to which every query of the tile sees all, as far as
    causality and the window go; how many come before the first virtual key. Entries are keys. The
    attention kernel would otherwise look these up between two tiles, one after the other, with
    nothing else to do.

    Slot 0 also writes how many slots are claimed: each program of that kernel begins with one.
    """
    slot = tl.program_id(0)
    tile = slot % num_tiles
    head = ((slot // num_tiles) % num_heads).to(tl.int64)
    batch = (slot // num_tiles // num_heads).to(tl.int64)
    if launch_ptr is not None:
        tile = tl.load(launch_ptr + batch * launch_b + head * launch_h + tile)
    elif CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first: what runs last is short
    row = tile.to(tl.int64)
    if tile_row_ptr is not None:
        row = tl.load(tile_row_ptr + batch * tile_b + head * tile_h + row).to(tl.int64)
    count = tl.load(count_ptr + batch * count_b + head * count_h + row)
    if BLOCK > 0:
        first = batch * index_b + head * index_h + row * index_r
    else:
        first = tl.load(start_ptr + batch * start_b + head * start_h + row)
    index_row = index_ptr + first
    query = tile * TILE + tl.arange(0, TILE)
    if query_ptr is not None:
        query = tl.load(query_ptr + batch * query_b + head * query_h + query)
    else:
        query = tl.where(query < num_queries, query, -1)
    shift = num_keys - num_queries
    last = tl.max(query) + shift
    least = tl.min(tl.where(query >= 0, query, num_queries)) + shift
    if CAUSAL and ASCENDS:
        count = count_below(index_row, count, last + 1, BLOCK)
    length = count
    if BLOCK > 0:
        length = count * BLOCK
        if count > 0:  # the last block may end before its size
            block = tl.load(index_row + count - 1)
            length -= tl.maximum((block + 1) * BLOCK - num_places, 0)
    seen_first = 0
    seen_end = length
    if CAUSAL or WINDOW:
        low = 0
        high = num_keys
        if WINDOW:
            low = tl.where(left >= 0, tl.maximum(last - left, 0), 0)
            high = tl.where(right >= 0, tl.minimum(least + right + 1, num_keys), num_keys)
        if CAUSAL:
            high = tl.minimum(high, least + 1)
        if not ASCENDS:
            seen_end = 0
        elif BLOCK > 0:
            seen_first = count_below(index_row, count, (low + BLOCK - 1) // BLOCK, 0) * BLOCK
            seen_end = count_below(index_row, count, high // BLOCK, 0) * BLOCK
        else:
            seen_first = count_below(index_row, count, low, 0)
            seen_end = count_below(index_row, count, high, 0)
    real = length
    if HAS_VIRTUAL:
        real = count_below(index_row, count, num_keys, 0)
    if tl.max(query) < 0:
        length = -1
    if tl.program_id(0) == 0:
        tl.store(claimed_ptr, num_programs)
    place_ptr = table_ptr + slot.to(tl.int64) * WIDTH
    tl.store(place_ptr, tile)
    tl.store(place_ptr + 1, first)
    tl.store(place_ptr + 2, length)
    tl.store(place_ptr + 3, seen_first)
    tl.store(place_ptr + 4, seen_end)
    tl.store(place_ptr + 5, real)
