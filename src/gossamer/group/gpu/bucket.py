"""Kernels that sort tokens by label: a stable counting sort, the same on every run.

Four launches: `rank` ranks the tokens of a label within a chunk, `sum_chunks` and `begin` say where
each label's tokens of each chunk go, `place` puts them there. Atomics only count, in integers, so
that their order does not matter. `place` also cuts each label's tokens into pieces of at most
PIECE, so that work on them is spread evenly however uneven the labels are.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_settled(frozen_ptr, iteration, group):
    """Return whether a head's centroids are those of the iteration before, and so all is done.

    Row i of `frozen` [iterations + 1, G] says who is frozen at the start of iteration i - 1.
    """
    return tl.load(frozen_ptr + iteration * tl.num_programs(1) + group) != 0


@triton.jit(do_not_specialize=["valid_b", "num_heads", "num_tokens", "num_labels", "iteration"])
def rank(
    labels_ptr,  # [G, N] int64
    valid_ptr,  # [B, N] uint8, or None
    rank_ptr,  # [G, N] int32, out
    count_ptr,  # [G, chunks, L + 1] int32, zeros; the last label is that of padding
    frozen_ptr,
    valid_b,
    num_heads,
    num_tokens,
    num_labels,  # L
    iteration,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Count the labels of a chunk, and rank each token among those of its label.

    A step compares its tokens with one another; what came before it stands in the counts.
    """
    chunk = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    row = group * num_tokens
    counts = count_ptr + (group * tl.num_programs(0) + chunk) * (num_labels + 1)
    lane = tl.arange(0, STEP)
    for step in range(0, tl.minimum(CHUNK, num_tokens - chunk * CHUNK), STEP):
        token = chunk * CHUNK + step + lane
        inside = token < num_tokens
        label = tl.load(labels_ptr + row + token, mask=inside, other=0).to(tl.int32)
        if valid_ptr is not None:
            valid = tl.load(valid_ptr + group // num_heads * valid_b + token, mask=inside, other=0)
            label = tl.where(valid != 0, label, num_labels)
        # Atomics count in the L2 cache, so the L1 cache would return what was there before.
        before = tl.load(counts + label, mask=inside, other=0, cache_modifier=".cg")
        # Summed over the axis that lies in a thread's registers.
        equal = (label[:, None] == label[None, :]) & (lane[:, None] < lane[None, :])
        tl.store(rank_ptr + row + token, before + tl.sum(equal.to(tl.int32), 0), mask=inside)
        tl.debug_barrier()  # all threads have read the counts
        tl.atomic_add(counts + label, 1, mask=inside, sem="relaxed")
        tl.debug_barrier()  # all threads have counted


@triton.jit(do_not_specialize=["num_chunks", "num_labels", "iteration"])
def sum_chunks(
    count_ptr,  # [G, chunks, L + 1] int32, in: counts; out: their sums over the chunks before
    sizes_ptr,  # [G, L] int64, out
    frozen_ptr,
    num_chunks,
    num_labels,
    iteration,
    CHUNKS: tl.constexpr,  # per step
    LABELS: tl.constexpr,  # per program
):
    """Add up each label's counts over the chunks."""
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    label = tl.program_id(0) * LABELS + tl.arange(0, LABELS)
    base = count_ptr + group * num_chunks * (num_labels + 1)
    total = tl.zeros([LABELS], tl.int32)
    for begin in range(0, num_chunks, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        at = base + chunk.to(tl.int64)[:, None] * (num_labels + 1) + label[None, :]
        inside = (chunk < num_chunks)[:, None] & (label <= num_labels)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    tl.store(sizes_ptr + group * num_labels + label, total.to(tl.int64), mask=label < num_labels)


@triton.jit(do_not_specialize=["num_labels", "iteration"])
def begin(
    sizes_ptr,  # [G, L] int64
    start_ptr,  # [G, L + 1] int32, out: where each label begins in the order; padding last
    first_ptr,  # [G, L + 1] int32, out: the first piece of each label; the last is their number
    frozen_ptr,
    num_labels,
    iteration,
    PIECE: tl.constexpr,
    LABELS: tl.constexpr,  # per step
):
    """Add up sizes and pieces over the labels of a head."""
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    tokens = 0
    pieces = 0
    for step in range(0, num_labels + 1, LABELS):
        label = step + tl.arange(0, LABELS)
        at = group * num_labels + label
        size = tl.load(sizes_ptr + at, mask=label < num_labels, other=0).to(tl.int32)
        piece = (size + PIECE - 1) // PIECE
        at += group
        inside = label <= num_labels
        tl.store(start_ptr + at, tl.cumsum(size, 0) - size + tokens, mask=inside)
        tl.store(first_ptr + at, tl.cumsum(piece, 0) - piece + pieces, mask=inside)
        tokens += tl.sum(size, 0)
        pieces += tl.sum(piece, 0)


@triton.jit(
    do_not_specialize=[
        "valid_b",
        "num_heads",
        "num_tokens",
        "num_labels",
        "num_pieces",
        "iteration",
    ]
)
def place(
    labels_ptr,  # [G, N] int64
    valid_ptr,  # [B, N] uint8, or None
    rank_ptr,  # [G, N] int32
    count_ptr,  # [G, chunks, L + 1] int32, sums over the chunks before
    sizes_ptr,  # [G, L] int64
    start_ptr,  # [G, L + 1] int32
    first_ptr,  # [G, L + 1] int32
    order_ptr,  # [G, N] int32, out: tokens by (label, index)
    piece_ptr,  # [G, pieces, 2] int32, out: where a piece begins in `order`, and its tokens
    frozen_ptr,
    valid_b,
    num_heads,
    num_tokens,
    num_labels,
    num_pieces,  # a bound
    iteration,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Put the tokens of a chunk into the order, and name the pieces that begin among them."""
    chunk = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < num_tokens
    row = group * num_tokens
    label = tl.load(labels_ptr + row + token, mask=inside, other=0).to(tl.int32)
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + group // num_heads * valid_b + token, mask=inside, other=0)
        label = tl.where(valid != 0, label, num_labels)
    counts = count_ptr + (group * tl.num_programs(0) + chunk) * (num_labels + 1)
    within = tl.load(counts + label, mask=inside, other=0)
    within += tl.load(rank_ptr + row + token, mask=inside, other=0)
    of_label = group * (num_labels + 1) + label
    at = tl.load(start_ptr + of_label, mask=inside, other=0) + within
    tl.store(order_ptr + row + at, token, mask=inside)
    leads = inside & (label < num_labels) & (within % PIECE == 0)
    piece = tl.load(first_ptr + of_label, mask=leads, other=0) + within // PIECE
    size = tl.load(sizes_ptr + group * num_labels + label, mask=leads, other=0).to(tl.int32)
    piece_at = piece_ptr + (group * num_pieces + piece) * 2
    tl.store(piece_at, at, mask=leads)
    tl.store(piece_at + 1, tl.minimum(size - within, PIECE), mask=leads)
