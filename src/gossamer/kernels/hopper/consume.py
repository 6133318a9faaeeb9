"""A consumer of the Hopper kernel: a warpgroup that attends 64 queries of each tile."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, C901, SIM102 -- a kernel takes flat arguments, its
# types are Gluon's, a branch at compile time is not one at run time, and it has no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gossamer.kernels.hopper.softmax import (
    along,
    fold_max,
    fold_sum,
    pack,
    pin,
    raise_top,
    scale_rows,
    unpack,
)
from gossamer.kernels.hopper.walk import (
    HALF,
    STEP,
    find_place,
    find_queries,
    hear_slot,
    last_step,
    sees,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _hide(
    scores,
    keys,
    begin,
    length,
    position,
    window,
    num_keys,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return a step's scores [64, 128], -inf where the query does not see the key."""
    cols: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    if not HIDES:
        listed = begin + gl.arange(0, STEP, cols) < length
        return gl.where(listed[None, :], scores, float("-inf"))
    else:
        seen = sees(keys.load(cols), position, window, num_keys, CAUSAL, WINDOW)
        return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _release(empty):
    """Say that this consumer has read what a stage holds, each thread for itself.

    As behind copies, of which a consumer has none: a plain arrival would let the four warps wait
    for one another first.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def _score(smem, queries, stage, zeros, HAS_WEIGHTS: gl.constexpr):
    """Begin the product of queries [64, D] and a stage's keys, with the logarithms of weights."""
    _q_smem, k_smem, _v_smem, w_smem, ones, _key_smem, _seen_smem = smem
    keys = k_smem.index(stage).permute((1, 0))
    token = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
    if HAS_WEIGHTS:
        bias = w_smem.index(stage).permute((1, 0))
        token = warpgroup_mma(ones, bias, token, is_async=True)
    return token


@gluon.jit
def consume(
    smem,
    bars,
    out,
    lse,
    walk,
    slots,
    window,
    scale,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    IS_BULK: gl.constexpr,
    half: gl.constexpr,
):
    """Attend 64 queries of each tile."""
    query, order, valid, _index_ptr, table_ptr, sizes, total, num_queries, num_keys = walk
    q_smem, k_smem, v_smem, _w_smem, _ones, _key_smem, seen_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, w_full, s_full = bars
    out_ptr, out_b, out_h, out_n = out
    lse_ptr, lse_b, lse_h = lse
    HIDES_ALWAYS: gl.constexpr = order[0] is not None or valid[0] is not None
    HIDES: gl.constexpr = CAUSAL or WINDOW or HIDES_ALWAYS
    HAS_NOTES: gl.constexpr = HAS_WEIGHTS or HIDES
    dtype: gl.constexpr = k_smem.dtype
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    lanes: gl.constexpr = D // 8  # threads per row of output, 16 bytes each
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    score_rows: gl.constexpr = gl.SliceLayout(1, score_mma)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_mma)
    step = 0
    turn = 0
    zeros = gl.zeros([HALF, STEP], gl.float32, score_mma)
    factor = scale * _LOG2_E
    tile, head, batch, _first, length, seen, _real = find_place(table_ptr, gl.program_id(0), sizes)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    if HAS_NOTES:
        mbarrier.wait(w_full.index(0), 0)
    fence_async_shared()
    q_half = q_smem.index(0).slice(half * HALF, HALF)
    token = _score(smem, q_half, 0, zeros, HAS_WEIGHTS)
    scores = warpgroup_mma_wait(0, deps=[token])
    if not HIDES:
        _release(k_empty.index(0))
    place = gl.program_id(0)
    lane = half * HALF + gl.arange(0, HALF, score_rows)
    at = find_queries(tile, lane, head, batch, query, num_queries)
    while place < total:
        acc = gl.zeros([HALF, D], gl.float32, out_mma)
        position = at + num_keys - num_queries
        q_half = q_smem.index(turn % 2).slice(half * HALF, HALF)
        begin = last_step(length)
        keys = seen_smem.index(step % STAGES if HIDES else 0)
        scores = _hide(
            scores, keys, begin, length, position, window, num_keys, HIDES, CAUSAL, WINDOW
        )
        if HIDES:
            _release(k_empty.index(step % STAGES))
        most = fold_max(scores) * factor
        top = raise_top(gl.full_like(most, float("-inf")), most)
        # A row that has seen no key keeps -inf, and -inf - -inf is not a number.
        base = gl.where(top == float("-inf"), 0.0, top)
        weights = gl.exp2(scores * factor - along(base, scores, STEP))
        parts = fold_sum(weights)
        pairs = pack(weights, dtype)
        begin -= STEP
        # Steps that begin from the first of these to before the second show all to all queries.
        seen_first, seen_end = seen
        seen_end -= STEP - 1
        while begin >= 0:
            before = step % STAGES
            before_phase = (step // STAGES) & 1
            step += 1
            stage = step % STAGES
            pairs = pin(pairs)
            p = unpack(pairs, dtype, p_layout)
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            if HAS_NOTES:
                mbarrier.wait(w_full.index(stage), (step // STAGES) & 1)
            if IS_BULK:
                # A thread's own copies arrive in order, so that the next keys say that the
                # values are there; bulk copies do not.
                mbarrier.wait(v_full.index(before), before_phase)
            fence_async_shared()
            token = _score(smem, q_half, stage, zeros, HAS_WEIGHTS)
            acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[token])
            if HIDES:
                # Not a loop of its own: the assembler has given one, behind another that does not
                # run, descriptors that only the other one computes.
                if HIDES_ALWAYS or (begin < seen_first) | (begin >= seen_end):
                    scores = _hide(
                        scores,
                        seen_smem.index(stage),
                        begin,
                        length,
                        position,
                        window,
                        num_keys,
                        HIDES,
                        CAUSAL,
                        WINDOW,
                    )
            _release(k_empty.index(stage))
            before_top = top
            top = raise_top(top, fold_max(scores) * factor)
            base = top
            if HAS_WEIGHTS or HIDES:  # a weight may be 0
                base = gl.where(top == float("-inf"), 0.0, top)
            weights = gl.exp2(scores * factor - along(base, scores, STEP))
            shrink = gl.exp2(before_top - base)
            # Each thread sums its own columns; a row's threads add theirs at its end.
            parts = parts * along(shrink, parts, 8) + fold_sum(weights)
            acc, pairs = warpgroup_mma_wait(0, deps=[acc_token, pairs])
            _release(v_empty.index(before))
            pairs = pack(weights, dtype)
            acc = scale_rows(acc, shrink, D)
            begin -= STEP
        # The tile's last values beside the next tile's first keys.
        before = step % STAGES
        before_phase = (step // STAGES) & 1
        step += 1
        q_stage = turn % 2
        turn += 1
        stage = step % STAGES
        pairs = pin(pairs)
        p = unpack(pairs, dtype, p_layout)
        mbarrier.wait(v_full.index(before), before_phase)
        fence_async_shared()
        acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        mbarrier.wait(q_full.index(turn % 2), (turn // 2) & 1)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        if HAS_NOTES:
            mbarrier.wait(w_full.index(stage), (step // STAGES) & 1)
        fence_async_shared()
        q_next = q_smem.index(turn % 2).slice(half * HALF, HALF)
        token = _score(smem, q_next, stage, zeros, HAS_WEIGHTS)
        mbarrier.wait(s_full.index(q_stage), ((turn - 1) // 2) & 1)
        place = hear_slot(slots[0].index(q_stage))
        next_tile, next_head, next_batch, _first, next_length, next_seen, _real = find_place(
            table_ptr, gl.minimum(place, total - 1), sizes
        )
        row = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, store_layout))
        row = find_queries(tile, row, head, batch, query, num_queries)
        next_at = find_queries(next_tile, lane, next_head, next_batch, query, num_queries)
        acc, pairs = warpgroup_mma_wait(2 if HAS_WEIGHTS else 1, deps=[acc_token, pairs])
        _release(v_empty.index(before))
        norm = gl.convert_layout(gl.sum(parts, 1), score_rows)
        empty = norm == 0.0
        norm = gl.where(empty, 1.0, norm)
        top = gl.convert_layout(gl.max(top, 1), score_rows)  # the same in the threads of a row
        value = gl.where(empty, float("-inf"), (top + gl.log2(norm)) * _LN_2)
        gl.store(lse_ptr + batch * lse_b + head * lse_h + at, value, mask=at >= 0)
        # What no query weighs may be no number, and 0 times that is none either.
        share = gl.convert_layout(gl.where(empty, 0.0, 1.0 / norm), out_rows)[:, None]
        acc = gl.where(share == 0.0, 0.0, acc * share)
        # Through where the tile's queries were, so that threads store 16 bytes of a row each.
        q_half.store(acc.to(dtype))
        value = q_half.load(store_layout)
        dim = gl.arange(0, D, gl.SliceLayout(0, store_layout))[None, :]
        out_row = out_ptr + batch * out_b + head * out_h
        gl.store(
            out_row + row.to(gl.int64)[:, None] * out_n + dim,
            value,
            mask=(row >= 0)[:, None] & (dim >= 0),
        )
        _release(q_empty.index(q_stage))
        scores = warpgroup_mma_wait(0, deps=[token])
        if not HIDES:  # with its keys, where they may hide
            _release(k_empty.index(stage))
        at = next_at
        tile = next_tile
        head = next_head
        batch = next_batch
        length = next_length
        seen = next_seen
