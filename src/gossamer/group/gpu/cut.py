"""The value at which a group is cut, found by all the programs that share the group.

Projections are counted by bin while they are made. The bin that holds the wanted rank is then known
to every program, and its values (some 0.1% of a group) are listed; each program takes the list into
registers and finds the same value. Where a bin holds more than the list, as it does where most
tokens are equal, passes over the whole group find the value: slower, and as exact.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- the types of a kernel are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.group.gpu.ranks import load_ordered

_LEAST = tl.constexpr(-(1 << 31))
_MOST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _quarters(least, most):
    """Return the values behind each of the first three quarters of a range of int64."""
    width = most - least
    return least + (width + 3) // 4, least + (width + 1) // 2, least + (3 * width + 3) // 4


@triton.jit
def _reached(key, one, two, three):
    """Return which of three values each key reaches, as numbers to be added.

    Of 21 bits each, in one int64: rows have up to 2 million values.
    """
    number = (key >= one.to(tl.int32)).to(tl.int64)
    number += (key >= two.to(tl.int32)).to(tl.int64) << 21
    return number + ((key >= three.to(tl.int32)).to(tl.int64) << 42)


@triton.jit
def _narrow(least, most, one, two, three, number, rank):
    """Return the quarter of a range that holds the greatest value which `rank` keys reach."""
    first = (number & 0x1FFFFF) >= rank
    second = ((number >> 21) & 0x1FFFFF) >= rank
    third = (number >> 42) >= rank
    low = tl.where(third, three, tl.where(second, two, tl.where(first, one, least)))
    high = tl.where(third, most, tl.where(second, three, tl.where(first, two, one)) - 1)
    return low, high


@triton.jit
def greatest_of_rank(key, mask, rank):
    """Return the rank-th greatest of some int32, counted from 1: the greatest that `rank` reach.

    Two bits at a time: each step costs a sum over all threads, whose wait is most of it. Masked
    keys are the least integer.
    """
    least = tl.min(tl.where(mask, key, _MOST), 0).to(tl.int64)
    most = tl.max(key, 0).to(tl.int64)
    while least < most:
        one, two, three = _quarters(least, most)
        number = tl.sum(_reached(key, one, two, three), 0)
        least, most = _narrow(least, most, one, two, three, number, rank)
    return least.to(tl.int32)


@triton.jit
def _level_by_passes(row, length, rank, BLOCK: tl.constexpr):
    """Return the rank-th greatest value of a row as an ordered integer."""
    step = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], _MOST, tl.int32)
    high = tl.full([BLOCK], _LEAST, tl.int32)
    for start in range(0, length, BLOCK):
        mask = start + step < length
        key = load_ordered(row, start + step, mask)
        low = tl.minimum(low, tl.where(mask, key, _MOST))
        high = tl.maximum(high, key)
    least = tl.min(low, 0).to(tl.int64)
    most = tl.max(high, 0).to(tl.int64)
    while least < most:
        one, two, three = _quarters(least, most)
        number = tl.zeros([BLOCK], tl.int64)
        for start in range(0, length, BLOCK):
            key = load_ordered(row, start + step, start + step < length)
            number += _reached(key, one, two, three)
        least, most = _narrow(least, most, one, two, three, tl.sum(number, 0), rank)
    return least.to(tl.int32)


@triton.jit
def _count(row, length, level, BLOCK: tl.constexpr):
    """Return how many values of a row are greater than the level, and how many equal it."""
    step = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    ties = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        mask = start + step < length
        key = load_ordered(row, start + step, mask)
        above += (key > level).to(tl.int32)
        ties += (mask & (key == level)).to(tl.int32)
    return tl.sum(above, 0), tl.sum(ties, 0)


@triton.jit
def level_of_chunk(
    row,
    length,
    rank,
    member,
    number,
    higher,
    chunk,
    chunks,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return the rank-th greatest value of a row, and counts of what is above it.

    Args:
        row: Pointer to float32 values.
        length: How many there are, at least 1.
        rank: int32 from 1 to `length`.
        member: Pointer to [2, CAPACITY] int32: the values of the bin that holds the wanted one, as
            ordered integers and in any order, and where they stand in the row.
        number: How many values the bin holds; what exceeds CAPACITY is not listed.
        higher: Pointer to int32, how many values of each chunk have a higher bin.
        chunk: The chunk of BLOCK values that is asked for.
        chunks: How many there are.

    Returns:
        The value as an ordered integer; how many values are greater; how many of these stand before
        the chunk; how many that are equal to it do.
    """
    above = 0
    listed = 0
    for start in range(0, chunks, CHUNKS):
        other = start + tl.arange(0, CHUNKS)
        counts = tl.load(higher + other, mask=other < chunks, other=0)
        above += tl.sum(counts, 0)
        listed += tl.sum(tl.where(other < chunk, counts, 0), 0)
    level = rank
    ties = 0
    if number <= CAPACITY:
        lane = tl.arange(0, CAPACITY)
        key = tl.load(member + lane, mask=lane < number, other=_LEAST)
        before = tl.load(member + CAPACITY + lane, mask=lane < number, other=_MOST) < chunk * BLOCK
        level = greatest_of_rank(key, lane < number, rank - above)
        above += tl.sum((key > level).to(tl.int32), 0)
        listed += tl.sum((before & (key > level)).to(tl.int32), 0)
        ties = tl.sum((before & (key == level)).to(tl.int32), 0)
    else:
        level = _level_by_passes(row, length, rank, BLOCK)
        above, _ = _count(row, length, level, BLOCK)
        listed, ties = _count(row, chunk * BLOCK, level, BLOCK)
    return level, above, listed, ties
