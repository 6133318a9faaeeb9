"""The value of a given rank in a long row, without sorting it: what top-k and balanced splits need.

The program that owns a row draws a few thousand of its values and from them a bracket that holds
the wanted one almost surely. One pass over the row counts what lies above the bracket and copies
what lies in it (some 5%), and bisection over bits in registers finds the value among these. So a
row is read once, and once more to list what was chosen, where a radix selection reads it four times
and more. Where the bracket fails, bisection over the whole row finds the value: slow, and as exact.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202 -- the types of a kernel are Triton's

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # values per step of a pass
SAMPLE = 4096  # values drawn for the bracket
CAPACITY = 8192  # values that fit the registers of one program

_LEAST = tl.constexpr(-(1 << 31))
_MOST = tl.constexpr((1 << 31) - 1)
_ODD = tl.constexpr(-1640531527)  # 2^32 / golden ratio: multiples of it spread evenly


@triton.jit
def ordered(x):
    """Map float32 to int32 in the same order; masked values are the least integer."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0.0 equal to 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def load_ordered(row, at, mask):
    """Load values as ordered integers, the least one where masked."""
    x = tl.load(row + at, mask=mask, other=0.0)
    return tl.where(mask, ordered(x), _LEAST)


@triton.jit
def greatest_of_rank(key, rank):
    """Return the rank-th greatest of some int32, counted from 1: the greatest that `rank` reach."""
    least = tl.min(key, 0).to(tl.int64)
    most = tl.max(key, 0).to(tl.int64)
    while least < most:
        middle = least + (most - least + 1) // 2
        if tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0) >= rank:
            least = middle
        else:
            most = middle - 1
    return least.to(tl.int32)


@triton.jit
def _count_above(row, length, bound, BLOCK: tl.constexpr):
    """Return how many values of a row are greater than `bound`."""
    lane = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        mask = start + lane < length
        key = load_ordered(row, start + lane, mask)
        number += (key > bound).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def _bracket(row, length, rank, SAMPLE: tl.constexpr):
    """Return two ordered integers between which the rank-th greatest value of a row lies, likely.

    One value is drawn from each of SAMPLE equal stretches, at a place that a hash decides: rows
    have periods, and even steps would fall in with them.
    """
    number = tl.arange(0, SAMPLE).to(tl.int64)
    begin = number * length // SAMPLE
    width = (number + 1) * length // SAMPLE - begin
    spread = (tl.arange(0, SAMPLE) * _ODD).to(tl.uint32, bitcast=True) >> 16
    at = begin + (spread.to(tl.int64) * width >> 16)
    key = ordered(tl.load(row + at))
    share = rank.to(tl.float32) / length
    # Four standard deviations of a random sample; one per stretch deviates less.
    margin = 4.0 * tl.sqrt(SAMPLE * share * (1.0 - share)) + 4.0
    above = (share * SAMPLE - margin).to(tl.int32)
    below = (share * SAMPLE + margin).to(tl.int32)
    high = greatest_of_rank(key, tl.maximum(above, 1))
    low = greatest_of_rank(key, tl.minimum(below, SAMPLE))
    return tl.where(below > SAMPLE, _LEAST, low), tl.where(above < 1, _MOST, high)


@triton.jit
def level_in_registers(row, length, rank, CAPACITY: tl.constexpr):
    """Return what `level_of_rank` does of a row of at most CAPACITY values."""
    lane = tl.arange(0, CAPACITY)
    key = load_ordered(row, lane, lane < length)
    level = greatest_of_rank(key, rank)
    return level, tl.sum((key > level).to(tl.int32), 0)


@triton.jit
def level_of_rank(
    row, length, rank, scratch, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, CAPACITY: tl.constexpr
):
    """Return the rank-th greatest value of a row as an ordered integer, and how many are greater.

    Args:
        row: Pointer to float32 values.
        length: How many there are, at least 1.
        rank: int32 from 1 to `length`.
        scratch: Pointer to room for CAPACITY int32; not touched where the row fits the registers.
    """
    lane = tl.arange(0, CAPACITY)
    above = 0
    level = rank
    if length <= CAPACITY:
        level, above = level_in_registers(row, length, rank, CAPACITY)
    else:
        low, high = _bracket(row, length, rank, SAMPLE)
        step = tl.arange(0, BLOCK)
        greater = tl.zeros([BLOCK], tl.int32)
        inside = 0
        for start in range(0, length, BLOCK):
            mask = start + step < length
            key = load_ordered(row, start + step, mask)
            greater += (key > high).to(tl.int32)
            is_in = mask & (key >= low) & (key <= high)
            place = inside + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(scratch + place, key, mask=is_in & (place < CAPACITY))
            inside += tl.sum(is_in.to(tl.int32), 0)
        above = tl.sum(greater, 0)
        if (above < rank) & (rank <= above + inside) & (inside <= CAPACITY):
            tl.debug_barrier()  # other threads wrote what this one reads
            key = tl.load(scratch + lane, mask=lane < inside, other=low)
            level = greatest_of_rank(key, rank - above)
            above += tl.sum((key > level).to(tl.int32), 0)
        else:
            least = tl.full([], _LEAST, tl.int64)
            most = tl.full([], _MOST, tl.int64)
            while least < most:
                middle = least + (most - least + 1) // 2
                if _count_above(row, length, (middle - 1).to(tl.int32), BLOCK) >= rank:
                    least = middle
                else:
                    most = middle - 1
            level = least.to(tl.int32)
            above = _count_above(row, length, level, BLOCK)
    return level, above
