"""Kernels that write the lists of a plan as a mask of tiles and key blocks, a byte an entry.

Program axis 0 is the tile, axis 1 the head of a batch row (a line). Every tile has its own row of
the mask, also where tiles share a key row; tiles that take no part have a row of zeros.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(row_ptr, at, tile):
    """Return the key row that a tile reads, as int64."""
    row = tile.to(tl.int64)
    if row_ptr is not None:
        row = tl.load(row_ptr + at).to(tl.int64)
    return row


@triton.jit(do_not_specialize=["index_b", "index_h", "first", "num_heads", "num_tiles", "width"])
def mark(
    index_ptr,  # [B, H, R, K] int32, blocks
    row_ptr,  # [x, T] int32, or None where tile t reads row t
    number_ptr,  # [x, T] int32, entries that each tile reads; 0: it takes no part
    mask_ptr,  # [x, T, P] uint8, zeros; out: 1 for each block that is listed
    index_b,
    index_h,
    first,  # of the lines b * H + h, that of program 0
    num_heads,  # H
    num_tiles,
    width,  # K
    padded,  # P
    STEP: tl.constexpr,
):
    """Mark the blocks that a tile reads."""
    tile = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    at = line * num_tiles + tile
    number = tl.load(number_ptr + at)
    row = _row_of(row_ptr, at, tile)
    head = first + line
    blocks = index_ptr + head // num_heads * index_b + head % num_heads * index_h + row * width
    for step in range(0, number, STEP):
        place = step + tl.arange(0, STEP)
        inside = place < number
        block = tl.load(blocks + place, mask=inside, other=0)
        tl.store(mask_ptr + at * padded + block, 1, mask=inside)


@triton.jit
def _advance(keys, number, least, found, step):
    """Return how many of some ascending keys are below `least`, `found` known to be.

    Args:
        keys: Pointer to them.
        number: How many there are.
        least: Tensor of keys.
        found: int32 tensor of this shape.
        step: A power of 2; up to 2 * step - 1 keys are found beyond `found`.
    """
    while step > 0:
        reached = found + step
        inside = reached <= number
        key = tl.load(keys + reached - 1, mask=inside, other=0)
        found = tl.where(inside & (key < least), reached, found)
        step = step // 2
    return found


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "most"])
def count(
    index_ptr,  # [pool] int32, single keys
    begin_ptr,  # [x, R] int64, where each row begins in the pool
    row_ptr,  # [x, T] int32, or None where tile t reads row t
    number_ptr,  # [x, T] int32, keys that each tile reads; 0: it takes no part
    mask_ptr,  # [x, T, P] uint8, out: keys of each block that are listed
    num_tiles,
    num_rows,  # R
    padded,  # P
    most,  # the greatest power of 2 that is not above any row's keys
    BLOCK: tl.constexpr,  # keys per block, a power of 2 below 256
    STEP: tl.constexpr,
):
    """Count the keys of each block that a tile reads.

    By two binary searches per block. Reading the lists through instead would take a sum over
    neighbours of unknown number, and the searches read about as many bytes.
    """
    tile = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    at = line * num_tiles + tile
    number = tl.load(number_ptr + at)
    row = _row_of(row_ptr, at, tile)
    keys = index_ptr + tl.load(begin_ptr + line * num_rows + row)
    for step in range(0, padded, STEP):
        column = step + tl.arange(0, STEP)
        none = tl.zeros([STEP], tl.int32)
        before = _advance(keys, number, column * BLOCK, none, most)
        behind = _advance(keys, number, column * BLOCK + BLOCK, before, tl.minimum(most, BLOCK))
        value = (behind - before).to(tl.uint8)
        tl.store(mask_ptr + at * padded + column, value, mask=column < padded)
