"""From what rows read of each cluster to ascending lists: mark by cluster, emit by key.

A key's place among its cluster's keys is the same for all rows of a head. So rows are marked 32 at
a time in cluster order, where neighbours share their cluster's numbers, and the marks, a word a
key, are scattered to the order of the keys: one store for 32 rows instead of a look-up for each.
Turned to a word for 32 keys of a row, they tell each key's place in the list by counting bits.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM102 -- a kernel takes flat arguments, its types are
# Triton's, and a branch at compile time is not one at run time

from __future__ import annotations

import triton
import triton.language as tl

ROWS_PER_WORD = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_clusters", "num_keys"])
def name(
    order_ptr,  # [lines, S] int64, keys by (cluster, key)
    begin_ptr,  # [lines, C] int64, ascending
    size_ptr,  # [lines, C] int64
    at_place_ptr,  # [lines, S] int32, the cluster at each place of the order; -1 for none
    of_key_ptr,  # [lines, S] int16 or int32, the cluster of each key; 0 for none
    num_clusters,
    num_keys,
    BLOCK: tl.constexpr,
):
    """Name the cluster of each place and of each key; a program a block of places."""
    line = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_keys
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + num_clusters
    width = num_clusters
    while (
        width > 0
    ):  # the last cluster that begins here or before: of those that do, only it has keys
        middle = (low + high) // 2
        begin = tl.load(begin_ptr + line * num_clusters + middle, mask=low < high, other=0)
        after = (low < high) & (begin <= place)
        high = tl.where((low < high) & (begin > place), middle, high)
        low = tl.where(after, middle + 1, low)
        width = width // 2
    cluster = tl.maximum(low - 1, 0)
    at = line * num_clusters + cluster
    begin = tl.load(begin_ptr + at)
    found = inside & (place >= begin) & (place < begin + tl.load(size_ptr + at))
    key = tl.load(order_ptr + line * num_keys + place, mask=inside, other=0)
    tl.store(at_place_ptr + line * num_keys + place, tl.where(found, cluster, -1), mask=inside)
    tl.store(of_key_ptr + line * num_keys + key, tl.where(found, cluster, 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_words", "num_clusters", "num_keys", "num_blocks"])
def mark(
    taken_ptr,  # [lines * R, C] int64, keys read for certain; None where tables say it
    begins_ptr,  # the tables of `tables_of_draws`; None
    pi_ptr,
    order_ptr,  # [lines, S] int64
    begin_ptr,  # [lines, C] int64
    at_place_ptr,  # [lines, S] int32
    word_ptr,  # [lines, words, S] int32, bit r of word w: whether row 32 w + r reads the key
    num_rows,
    num_words,
    num_clusters,
    num_keys,
    num_blocks,  # of places
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the keys that 32 rows read; a program a block of places in cluster order.

    Counted in thresholds, the key of rank r lies from begin + r pi to begin + (r + 1) pi, and is
    read where it holds an integer. Both ends are rounded as its neighbours' are, so that every
    threshold is read by exactly one key.
    """
    which = (tl.program_id(0) // num_blocks).to(tl.int64)  # line * words + word
    place = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    line = which // num_words
    inside = place < num_keys
    cluster = tl.load(at_place_ptr + line * num_keys + place, mask=inside, other=-1)
    key = tl.load(order_ptr + line * num_keys + place, mask=inside, other=0)
    known = cluster >= 0
    cluster = tl.maximum(cluster, 0)
    rank = (place - tl.load(begin_ptr + line * num_clusters + cluster)).to(tl.int32)
    low = rank.to(tl.float64)
    high = low + 1.0

    first_row = (which % num_words).to(tl.int32) * ROWS_PER_WORD
    at = (line * num_rows + first_row) * num_clusters + cluster
    if SAMPLED:
        begins_ptr += at
        pi_ptr += at
    else:
        taken_ptr += at
    word = tl.zeros([BLOCK], dtype=tl.int32)
    for bit in tl.static_range(0, ROWS_PER_WORD):
        step = tl.minimum(bit, num_rows - 1 - first_row) * num_clusters
        if SAMPLED:
            begin = tl.load(begins_ptr + step)
            pi = tl.load(pi_ptr + step)
            read = tl.ceil(tl.fma(low, pi, begin)) < tl.fma(high, pi, begin)
        else:
            read = rank < tl.load(taken_ptr + step)
        word |= read.to(tl.int32) << bit
    word = tl.where(known, word, 0)
    tl.store(word_ptr + which * num_keys + key, word, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_words", "num_keys", "num_blocks", "num_bits"])
def turn(
    word_ptr,  # [lines, words, S] int32
    bits_ptr,  # [lines * R, num_bits] int32, bit k of word w: whether the row reads key 32 w + k
    num_rows,
    num_words,
    num_keys,
    num_blocks,
    num_bits,  # words of 32 keys, ceil(S / 32)
    WORDS: tl.constexpr,
):
    """Turn words of 32 rows a key into words of 32 keys a row; a program a block of keys."""
    which = (tl.program_id(0) // num_blocks).to(tl.int64)
    line = which // num_words
    of = tl.program_id(0) % num_blocks * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    key = of[None, :] * 32 + bit[:, None]  # [32, WORDS]
    word = tl.load(word_ptr + which * num_keys + key, mask=key < num_keys, other=0)
    is_read = (word[:, :, None] >> bit[None, None, :]) & 1  # [32 keys, WORDS, 32 rows]
    turned = tl.sum(is_read << bit[:, None, None], 0)
    row = (which % num_words).to(tl.int32) * ROWS_PER_WORD + bit
    at = (line * num_rows + row)[None, :] * num_bits + of[:, None]
    tl.store(bits_ptr + at, turned, mask=(row < num_rows)[None, :] & (of < num_bits)[:, None])


@triton.jit
def _count_bits(x):
    """Return the bits set in 32-bit words; the compiler makes one instruction of it."""
    x = x.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_clusters", "num_keys", "num_bits", "room"])
def emit(
    bits_ptr,  # [lines * R, num_bits] int32
    of_key_ptr,  # [lines, S] int16 or int32
    log_weight_ptr,  # [lines * R, C] float32, of the tables; None for no weights
    start_ptr,  # [lines * R] int64, where each row begins in the pool
    index_ptr,  # [pool] int32
    weight_ptr,  # [pool] float32; None
    count_ptr,  # [lines * R] int32
    num_rows,
    num_clusters,
    num_keys,
    num_bits,
    room,  # places of each row, where slack is to be filled
    WEIGHTS: tl.constexpr,
    SLACK: tl.constexpr,
    WORDS: tl.constexpr,  # of 32 keys, in one step
):
    """List the keys that a row reads, ascending; a program a row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + row)
    index_ptr += start
    bits_ptr += row * num_bits
    if WEIGHTS:
        weight_ptr += start
        log_weight_ptr += row * num_clusters
        of_key_ptr += row // num_rows * num_keys
    bit = tl.arange(0, 32)
    below = ((1 << bit) - 1)[None, :]
    done = start.to(tl.int32) * 0
    for step in range(0, num_bits, WORDS):
        of = step + tl.arange(0, WORDS)
        word = tl.load(bits_ptr + of, mask=of < num_bits, other=0)
        number = _count_bits(word)
        before = (tl.cumsum(number, 0) - number + done)[:, None]
        word = word[:, None]
        slot = before + _count_bits(word & below)  # [WORDS, 32]
        read = ((word >> bit[None, :]) & 1) != 0
        if SLACK:
            read = read & (slot < room)  # a bound that is none must not reach the next row
        key = of[:, None] * 32 + bit[None, :]
        tl.store(index_ptr + slot, key, mask=read)
        if WEIGHTS:
            cluster = tl.load(of_key_ptr + key, mask=read, other=0).to(tl.int32)
            log_weight = tl.load(log_weight_ptr + cluster, mask=read, other=0.0)
            tl.store(weight_ptr + slot, log_weight, mask=read)
        done += tl.sum(number, 0)
    tl.store(count_ptr + row, done)
    if SLACK:
        if done < room:
            # Slack repeats the row's greatest key; key 0 may be padding that holds NaN.
            tl.debug_barrier()  # another thread wrote it
            greatest = tl.load(index_ptr + done - 1, mask=done > 0, other=0)
            for step in range(done, room, 128):
                slot = step + tl.arange(0, 128)
                tl.store(index_ptr + slot, greatest, mask=slot < room)
                if WEIGHTS:
                    tl.store(weight_ptr + slot, 0.0, mask=slot < room)
