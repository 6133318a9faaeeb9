"""How far a tile reads its key row in a causal plan, and how much of that every query sees."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.forward import count_below


@triton.jit
def causal_bounds(
    query_ptr,
    tile_row_ptr,
    start_ptr,
    count_ptr,
    index_ptr,
    length_ptr,
    whole_ptr,
    # Strides in elements; 0 on an axis that is shared.
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
    num_tiles,
    num_heads,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys per block; 0: the rows list tokens
    HAS_QUERIES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Write, for one tile, how many entries it reads and how many, in front, all its queries see.

    Entries are keys; rows ascend. The attention kernel would otherwise search the row itself, once
    in each of its warpgroups and with nothing else to do.
    """
    program = tl.program_id(0)
    tile = program % num_tiles
    head = ((program // num_tiles) % num_heads).to(tl.int64)
    batch = (program // num_tiles // num_heads).to(tl.int64)
    row = tile.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(tile_row_ptr + batch * tile_b + head * tile_h + tile).to(tl.int64)
    query = tile * TILE + tl.arange(0, TILE)
    if HAS_QUERIES:
        query = tl.load(query_ptr + batch * query_b + head * query_h + query)
    else:
        query = tl.where(query < num_queries, query, -1)
    shift = num_keys - num_queries
    last = tl.max(query) + shift
    least = tl.min(tl.where(query >= 0, query, num_queries)) + shift
    count = tl.load(count_ptr + batch * count_b + head * count_h + row)
    if BLOCK > 0:
        index_row = index_ptr + batch * index_b + head * index_h + row * index_r
        begun = count_below(index_row, count, last + 1, BLOCK)
        length = begun * BLOCK
        if begun > 0:  # the last block may end before its size
            block = tl.load(index_row + begun - 1)
            length -= tl.maximum((block + 1) * BLOCK - num_keys, 0)
        whole = count_below(index_row, begun, (least + 1) // BLOCK, 0) * BLOCK
    else:
        index_row = index_ptr + tl.load(start_ptr + batch * start_b + head * start_h + row)
        length = count_below(index_row, count, last + 1, 0)
        whole = count_below(index_row, length, least + 1, 0)
    if tl.max(query) < 0:
        length = 0
        whole = 0
    tl.store(length_ptr + program, length)
    tl.store(whole_ptr + program, whole)
