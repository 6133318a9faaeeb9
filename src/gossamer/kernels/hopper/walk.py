"""What a program of the Hopper kernel walks: tiles, their steps, the keys of a step."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201 -- its types are Gluon's

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE = gl.constexpr(128)  # queries per tile
HALF = gl.constexpr(64)  # queries per consumer
STEP = gl.constexpr(128)  # keys per step
BIAS = gl.constexpr(16)  # columns of a product that adds weights: the least that there is
WIDTH = 6  # of a row of the table of places
_WIDTH = gl.constexpr(WIDTH)
_PASSED = gl.constexpr(1 << 30)  # marks a key that no window hides
_UNREAD = gl.constexpr((1 << 30) - 1)  # marks what is not read: behind every position


@gluon.jit
def find_place(table_ptr, slot, sizes):
    """Return a slot's tile, head and batch row, and its key row as `places.py` has it.

    Of the row: where it begins, how many entries the tile reads, from which and up to which of
    these every query of the tile sees all, and how many come before the first virtual key.
    """
    num_tiles, num_heads = sizes
    row = table_ptr + slot * _WIDTH
    tile = gl.load(row).to(gl.int32)
    first = gl.load(row + 1)
    length = gl.load(row + 2).to(gl.int32)
    seen = (gl.load(row + 3).to(gl.int32), gl.load(row + 4).to(gl.int32))
    real = gl.load(row + 5).to(gl.int32)
    head = ((slot // num_tiles) % num_heads).to(gl.int64)
    batch = (slot // num_tiles // num_heads).to(gl.int64)
    return tile, head, batch, first, length, seen, real


@gluon.jit
def tell_slot(smem, full, slot):
    """Let the consumers know which launch slot comes next."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem.store(gl.full([1], 0, gl.int32, one) + slot)
    mbarrier.arrive(full, count=1)


@gluon.jit
def hear_slot(smem):
    """Return which launch slot comes next."""
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def last_step(length):
    """Return where the last step of a row begins; an empty row has one step too."""
    return gl.maximum(length - 1, 0) // STEP * STEP


@gluon.jit
def find_queries(tile, place, head, batch, query, num_queries):
    """Return which queries stand at places of a tile, -1 for none."""
    query_ptr, query_b, query_h = query
    at = tile * TILE + place
    if query_ptr is not None:
        return gl.load(query_ptr + batch * query_b + head * query_h + at)
    else:
        return gl.where(at < num_queries, at, -1)


@gluon.jit
def find_keys(index_ptr, order, head, batch, first, place, length, BLOCK: gl.constexpr):
    """Return the keys at places of a row, -1 for a hole of the key order.

    With a length, past it stands the row's last key again, which nobody counts; key 0 in an empty
    row.
    """
    order_ptr, order_b, order_h = order
    if length is not None:
        exists = (place >= 0) & (length > 0)
        place = gl.maximum(gl.minimum(place, length - 1), 0)
        if BLOCK > 0:
            block = gl.load(index_ptr + first + place // BLOCK, mask=exists, other=0)
            key = block * BLOCK + place % BLOCK
        else:
            key = gl.load(index_ptr + first + place, mask=exists, other=0)
    elif BLOCK > 0:
        key = gl.load(index_ptr + first + place // BLOCK) * BLOCK + place % BLOCK
    else:
        key = gl.load(index_ptr + first + place)
    if order_ptr is not None:
        key = gl.load(order_ptr + batch * order_b + head * order_h + key)
    return key


@gluon.jit
def is_read(key, valid, batch, num_keys):
    """Return which keys are read: neither holes nor padding; a virtual key is neither."""
    valid_ptr, valid_b = valid
    read = key >= 0
    if valid_ptr is not None:
        real = read & (key < num_keys)
        read = read & (gl.load(valid_ptr + batch * valid_b + key, mask=real, other=1) != 0)
    return read


@gluon.jit
def reach_of(window, sinks, batch):
    """Return the window with where its sinks end in a batch row."""
    left, right, sink = window
    sink_ptr, sink_b = sinks
    if sink_ptr is not None:
        sink = gl.load(sink_ptr + batch * sink_b)
    return left, right, sink


@gluon.jit
def mark_key(key, window, num_keys, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Return what `sees` asks of keys, -1 for one that is not read: one number each.

    That is the key + 1. A bit above it says that the window passes it, as it does sinks and virtual
    keys, which stand nowhere; where only the window hides, 0 stands for the key below the bit.
    """
    _left, _right, sink = window
    mark = gl.where(key < 0, _UNREAD, key + 1)
    if WINDOW:
        passed = key + 1 if CAUSAL else gl.full_like(key, 0)
        mark = gl.where((key >= num_keys) | ((key >= 0) & (key < sink)), passed | _PASSED, mark)
    return mark


@gluon.jit
def sees(mark, position, window, num_keys, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Return which marked keys [128] queries at positions [64] see, [64, 128].

    One comparison for each bound.
    """
    left, right, _sink = window
    if CAUSAL or WINDOW:
        last = position
        place = mark
        if WINDOW:
            place = mark & (_PASSED - 1)
            if not CAUSAL:
                last = gl.where(right >= 0, position + right, num_keys)
        seen = place[None, :] <= gl.maximum(last + 1, 0)[:, None]
        if WINDOW:
            first = gl.where(left >= 0, position - left, 0)
            seen = seen & (mark[None, :] > first[:, None])
        return seen
    else:
        return (mark != _UNREAD)[None, :]
