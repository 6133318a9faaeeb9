"""Kernels of Lloyd's algorithm: assignment on tensor cores, sums over sorted tokens.

All heads run at once; program axis 1 is the head of a batch row, G = B * H of them. Sums are
float32, each in one fixed order, so the same tokens give the same clusters on every run.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.group.gpu.bucket import is_settled

_LAST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_heads", "num_clusters", "num_padded", "iteration", "tolerance"])
def prepare(
    centroids_ptr,  # [G, C, D] float32
    norm_ptr,  # [G, C] float32, |c|^2
    shift_ptr,  # [G, C] float32, how far each moved in the iteration before; not read in the first
    active_ptr,  # [B] int64, or None
    shifted_ptr,  # [G, P, DP] in the type of the tokens, out
    bias_ptr,  # [G, P] float32, out
    frozen_ptr,  # [iterations + 1, G] int32
    num_heads,
    num_clusters,  # C
    num_padded,  # P
    iteration,
    tolerance,
    ROWS: tl.constexpr,  # centroids per program
    CLUSTERS: tl.constexpr,  # per step of the search for the origin
    LIMIT: tl.constexpr,  # the greatest number of the tokens' type; 0: not reached
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Freeze heads that have settled, and make of the centroids what `assign` multiplies by.

    argmin |x - c|^2 is argmax x.(c - o) + b for any origin o, with b = |o|^2 / 2 - |c|^2 / 2. Moved
    there, centroids that lie close together far from zero keep their differences when rounded, and
    b is that of the rounded ones: labels are exact for centroids moved by their rounding error. The
    origin is the centroid nearest to zero: of the tokens' cloud, and never one of those that are
    put far away in order to stay empty.
    """
    group = tl.program_id(1).to(tl.int64)
    used = num_clusters
    if active_ptr is not None:
        used = tl.load(active_ptr + group // num_heads).to(tl.int32)
    moved = 0.0
    least = float("inf")
    origin = 0
    for step in range(0, num_clusters, CLUSTERS):
        cluster = step + tl.arange(0, CLUSTERS)
        at = group * num_clusters + cluster
        inside = (cluster < num_clusters) & (cluster < used)
        moved = tl.maximum(moved, tl.max(tl.load(shift_ptr + at, mask=inside, other=0.0), 0))
        norm = tl.load(norm_ptr + at, mask=inside, other=float("inf"))
        low = tl.min(norm, 0)
        nearest = tl.min(tl.where(norm == low, cluster, _LAST), 0)
        origin = tl.where(low < least, nearest, origin)
        least = tl.minimum(least, low)
    flag = frozen_ptr + iteration * tl.num_programs(1) + group
    settled = tl.load(flag) != 0
    if tl.program_id(0) == 0:
        frozen = settled | ((iteration > 0) & (moved < tolerance))
        tl.store(flag + tl.num_programs(1), frozen.to(tl.int32))
    if settled:
        return

    cluster = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DP)
    head = centroids_ptr + group * num_clusters * D
    start = tl.load(head + origin * D + dim, mask=dim < D, other=0.0)
    centroid = tl.load(
        head + cluster.to(tl.int64)[:, None] * D + dim[None, :],
        mask=(cluster < num_clusters)[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    shifted = centroid - start[None, :]
    if LIMIT > 0:
        shifted = tl.minimum(tl.maximum(shifted, -LIMIT), LIMIT)
    shifted = shifted.to(shifted_ptr.dtype.element_ty)
    near = shifted.to(tl.float32)
    bias = -tl.sum(near * (start[None, :] + 0.5 * near), 1)
    bias = tl.where((cluster < num_clusters) & (cluster < used), bias, float("-inf"))
    row = group * num_padded + cluster
    tl.store(bias_ptr + row, bias)
    tl.store(shifted_ptr + row[:, None] * DP + dim[None, :], shifted)


@triton.jit(do_not_specialize=["valid_b", "num_heads", "num_tokens", "num_padded", "iteration"])
def assign(
    x_ptr,
    shifted_ptr,  # [G, P, DP]
    bias_ptr,  # [G, P] float32
    valid_ptr,  # [B, N] uint8, or None
    labels_ptr,  # [G, N] int64, out
    frozen_ptr,
    x_b,
    x_h,
    x_n,
    valid_b,
    num_heads,
    num_tokens,
    num_padded,
    iteration,
    M: tl.constexpr,  # tokens per program
    N: tl.constexpr,  # centroids per step
    FOLD: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Label each token with the lowest centroid of greatest score; scores are never written.

    The running maximum is kept for each residue of the centroid modulo FOLD. With 8, all that a
    step compares lies in one thread's registers, and the running pair costs few of them.
    """
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    token = tl.program_id(0) * M + tl.arange(0, M)
    batch = group // num_heads
    inside = token < num_tokens
    read = inside
    if valid_ptr is not None:  # padding may hold NaN; as zeros it gets some label
        read = read & (tl.load(valid_ptr + batch * valid_b + token, mask=inside, other=0) != 0)
    dim = tl.arange(0, DP)
    x_row = x_ptr + batch * x_b + group % num_heads * x_h
    x_at = x_row + token.to(tl.int64)[:, None] * x_n + dim[None, :]
    if D != DP:
        x = tl.load(x_at, mask=read[:, None] & (dim < D)[None, :], other=0.0)
    else:
        x = tl.load(x_at, mask=read[:, None], other=0.0)

    column = tl.arange(0, N)
    lane = tl.arange(0, N // FOLD) * FOLD
    bias_row = bias_ptr + group * num_padded
    shifted_row = shifted_ptr + group * num_padded * DP
    best = tl.full([M, FOLD], float("-inf"), tl.float32)
    label = tl.zeros([M, FOLD], tl.int32)
    for step in range(0, num_padded, N):
        bias = tl.load(bias_row + step + column)
        centroid = tl.load(shifted_row + (step + column)[:, None] * DP + dim[None, :])
        score = tl.dot(x, centroid.T, input_precision=PRECISION) + bias[None, :]
        folded = tl.reshape(score, [M, N // FOLD, FOLD])
        top = tl.max(folded, 1)
        first = tl.min(tl.where(folded == top[:, None, :], lane[None, :, None], N), 1)
        better = top > best
        best = tl.where(better, top, best)
        label = tl.where(better, step + first, label)
    label += tl.arange(0, FOLD)[None, :]
    top = tl.max(best, 1)
    label = tl.min(tl.where(best == top[:, None], label, _LAST), 1)
    tl.store(labels_ptr + group * num_tokens + token, label, mask=inside)


@triton.jit(
    do_not_specialize=["num_heads", "num_tokens", "num_clusters", "num_pieces", "iteration"]
)
def add(
    x_ptr,
    order_ptr,  # [G, N] int32
    piece_ptr,  # [G, pieces, 2] int32
    first_ptr,  # [G, C + 1] int32
    sums_ptr,  # [G, pieces, DP] float32, out
    frozen_ptr,
    x_b,
    x_h,
    x_n,
    num_heads,
    num_tokens,
    num_clusters,
    num_pieces,  # a bound
    iteration,
    PIECE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Add up the tokens of one piece of a cluster."""
    piece = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    at = group * num_pieces + piece
    # Read beside the number of pieces, not after it: what lies behind that number is not used.
    begin = tl.load(piece_ptr + at * 2)
    number = tl.load(piece_ptr + at * 2 + 1)
    if piece >= tl.load(first_ptr + group * (num_clusters + 1) + num_clusters):
        return
    lane = tl.arange(0, PIECE)
    inside = lane < number
    token = tl.load(order_ptr + group * num_tokens + begin + lane, mask=inside, other=0)
    dim = tl.arange(0, DP)
    x_row = x_ptr + group // num_heads * x_b + group % num_heads * x_h
    x_at = x_row + token.to(tl.int64)[:, None] * x_n + dim[None, :]
    if D != DP:
        x = tl.load(x_at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    else:
        x = tl.load(x_at, mask=inside[:, None], other=0.0)
    tl.store(sums_ptr + at * DP + dim, tl.sum(x.to(tl.float32), 0))


@triton.jit(do_not_specialize=["num_pieces", "iteration"])
def finish(
    sums_ptr,  # [G, pieces, DP] float32
    first_ptr,  # [G, C + 1] int32
    sizes_ptr,  # [G, C] int64
    old_ptr,  # [G, C, D] float32
    new_ptr,  # [G, C, D] float32, out; may be the same
    norm_ptr,  # [G, C] float32, out
    shift_ptr,  # [G, C] float32, out
    frozen_ptr,
    num_pieces,
    iteration,
    PIECES: tl.constexpr,  # per step
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Divide a cluster's sum by its size; empty clusters and frozen heads keep what they had."""
    cluster = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    if is_settled(frozen_ptr, iteration, group):
        return
    num_clusters = tl.num_programs(0)
    first = first_ptr + group * (num_clusters + 1) + cluster
    begin = tl.load(first)
    end = tl.load(first + 1)
    at = group * num_clusters + cluster
    size = tl.load(sizes_ptr + at).to(tl.float32)
    dim = tl.arange(0, DP)
    old = tl.load(old_ptr + at * D + dim, mask=dim < D, other=0.0)
    frozen = is_settled(frozen_ptr, iteration + 1, group)
    lane = tl.arange(0, PIECES)
    total = tl.zeros([DP], tl.float32)
    for step in range(begin, end, PIECES):
        piece = group * num_pieces + step + lane
        inside = (step + lane < end)[:, None] & (dim < D)[None, :]
        total += tl.sum(tl.load(sums_ptr + piece[:, None] * DP + dim[None, :], inside, 0.0), 0)
    mean = tl.where((size == 0) | frozen, old, total / tl.maximum(size, 1.0))
    tl.store(new_ptr + at * D + dim, mean, mask=dim < D)
    tl.store(norm_ptr + at, tl.sum(mean * mean, 0))
    tl.store(shift_ptr + at, tl.sqrt(tl.sum((mean - old) * (mean - old), 0)))
