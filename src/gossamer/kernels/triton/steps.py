"""What the forward and the backward kernels read of a plan in the same way."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

# Sizes, and strides of lists: one compilation serves 1, multiples of 16 and all others.
PLAIN = (
    *("num_queries", "num_keys", "num_places", "num_tiles", "num_blocks", "num_heads", "group"),
    *("left", "right", "sink", "sink_b", "index_r", "valid_b"),
    *(
        f"{name}_{axis}"
        for name in ("lse", "query", "tile", "launch", "start", "count", "index", "order")
        for axis in "bh"
    ),
    *("num_listed_b", "num_listed_h", "listed_b", "listed_h"),
)


@triton.jit
def find_tile(
    program,
    lane,
    query_index_ptr,
    tile_row_ptr,
    launch_ptr,
    query_b,
    query_h,
    tile_b,
    tile_h,
    launch_b,
    launch_h,
    num_queries,
    num_tiles,
    num_heads,
    TILE: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_LAUNCH: tl.constexpr,
):
    """Return batch row, head and key row of a tile, and which queries its rows `lane` are."""
    slot = program % num_tiles
    head = ((program // num_tiles) % num_heads).to(tl.int64)
    batch = (program // num_tiles // num_heads).to(tl.int64)
    tile = slot
    if HAS_LAUNCH:
        tile = tl.load(launch_ptr + batch * launch_b + head * launch_h + slot)
    row = tile.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(tile_row_ptr + batch * tile_b + head * tile_h + tile).to(tl.int64)
    query_row = query_index_ptr
    if HAS_QUERIES:
        query_row = query_index_ptr + batch * query_b + head * query_h
    query = tile_queries(query_row, tile, lane, num_queries, TILE, HAS_QUERIES)
    return batch, head, row, query


@triton.jit
def tile_queries(query_row, tile, lane, num_queries, TILE: tl.constexpr, HAS_QUERIES: tl.constexpr):
    """Return which queries the rows `lane` of a tile are, -1 for none."""
    if HAS_QUERIES:
        place = tile.to(tl.int64) * TILE + lane
        query = tl.load(query_row + place, mask=lane < TILE, other=-1)
    else:
        query = tile * TILE + lane
        query = tl.where((lane < TILE) & (query < num_queries), query, -1)
    return query


@triton.jit
def find_bounds(query, num_queries, num_keys, left, right, WINDOW: tl.constexpr):
    """Return the queries' positions, and the first and last key of their windows."""
    position = query + num_keys - num_queries
    low = position
    high = position
    if WINDOW:
        low = tl.where(left >= 0, position - left, 0)
        high = tl.where(right >= 0, position + right, num_keys)
    return position, low, high


@triton.jit
def find_row(
    batch,
    head,
    row,
    query,
    position,
    start_ptr,
    count_ptr,
    index_ptr,
    start_b,
    start_h,
    count_b,
    count_h,
    index_b,
    index_h,
    index_r,
    num_keys,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return where a key row begins in the lists, its real keys and all its keys.

    RAGGED says whether a block may hold fewer keys; rows ascend, so it is the last of its row.
    """
    count = tl.load(count_ptr + batch * count_b + head * count_h + row)
    if BLOCK > 0:
        first = batch * index_b + head * index_h + row * index_r
    else:
        first = tl.load(start_ptr + batch * start_b + head * start_h + row)
    index_row = index_ptr + first
    if CAUSAL and not HAS_ORDER:
        # What lies behind the tile's last position is cut off.
        last = tl.max(tl.where(query >= 0, position, -1))
        count = count_below(index_row, count, last + 1, BLOCK)
    length = count
    if BLOCK > 0:
        length = count * BLOCK
        if RAGGED:
            block = tl.load(index_row + count - 1, mask=count > 0, other=0)
            length -= tl.maximum((block + 1) * BLOCK - num_keys, 0)
            length = tl.maximum(length, 0)
    real = length
    if HAS_EXTRA:
        real = count_below(index_row, count, num_keys, 0)  # virtual keys stand last
    return first, real, length


@triton.jit
def count_below(index_row, count, bound, BLOCK: tl.constexpr):
    """Return how many entries of an ascending row begin below a key.

    A search whose steps look at 32 places at once: each step waits for memory.
    """
    least = 0
    most = count
    lane = tl.arange(0, 32)
    while least < most:
        width = (most - least + 31) // 32
        place = least + lane * width + width - 1  # the last of each part
        key = tl.load(index_row + place, mask=place < most, other=0)
        if BLOCK > 0:
            key = key * BLOCK
        least += tl.sum(((place < most) & (key < bound)).to(tl.int32), 0) * width
        most = tl.minimum(most, least + width - 1)
    return least


@triton.jit
def load_entries(
    start, stop, index_row, base, N: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Return the entries of a row that the N keys from place `start` come from: [N].

    Past `stop`, which only a masked step reaches, stands block 0 or key `base`.
    """
    step = start + tl.arange(0, N)
    entry = index_row + step
    other = base
    if BLOCK > 0:
        entry = index_row + step // BLOCK
        other = 0
    return tl.load(entry, mask=step < stop, other=other) if MASKED else tl.load(entry)


@triton.jit
def read_keys(
    entry,
    start,
    stop,
    order_row,
    valid_row,
    num_places,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """Return the N keys of a row from place `start`, and whether each is read.

    Args:
        entry: What `load_entries` returned for these places.
    """
    step = start + tl.arange(0, N)
    read = step < stop
    key = entry
    if BLOCK > 0:
        key = entry * BLOCK + step % BLOCK
        if HAS_ORDER:
            read = read & (key < num_places)
            key = tl.load(order_row + key, mask=read, other=-1)
            read = read & (key >= 0)
    if HAS_VALID:
        read = read & (tl.load(valid_row + key, mask=read, other=0) != 0)
    return key, read


@triton.jit
def find_sink(sink, sink_ptr, sink_b, batch):
    """Return up to which key the window's sinks reach in a batch row."""
    if sink_ptr is not None:
        return tl.load(sink_ptr + batch * sink_b)
    else:
        return sink


@triton.jit
def hide(seen, key, position, low, high, sink, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which of the keys that are read causality and window let the queries see."""
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW:
        inside = (key >= low) & (key <= high)
        seen = seen & (inside | (key < sink))
    return seen
