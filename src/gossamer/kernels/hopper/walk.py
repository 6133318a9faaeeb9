"""What a program of the Hopper kernel walks: tiles, their steps, the keys of a step."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201 -- its types are Gluon's

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(128)  # queries per tile
HALF = gl.constexpr(64)  # queries per consumer
STEP = gl.constexpr(128)  # keys per step
BIAS = gl.constexpr(16)  # columns of a product that adds weights: the least that there is
_TABLE_WIDTH = gl.constexpr(5)


@gluon.jit
def find_place(table_ptr, slot, sizes):
    """Return a slot's tile, head and batch row, and its key row as `places.py` has it.

    Of the row: where it begins, how many entries the tile reads, how many of these, from the front,
    every query of the tile sees, and how many come before the first virtual key.
    """
    num_tiles, num_heads = sizes
    row = table_ptr + slot * _TABLE_WIDTH
    tile = gl.load(row).to(gl.int32)
    first = gl.load(row + 1)
    length = gl.load(row + 2).to(gl.int32)
    whole = gl.load(row + 3).to(gl.int32)
    real = gl.load(row + 4).to(gl.int32)
    head = ((slot // num_tiles) % num_heads).to(gl.int64)
    batch = (slot // num_tiles // num_heads).to(gl.int64)
    return tile, head, batch, first, length, whole, real


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
