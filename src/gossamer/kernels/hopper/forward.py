"""The Hopper kernel: one producer warpgroup gathers keys, two consumer warpgroups multiply.

A program walks query tiles of 128 rows. The producer copies the tile's queries and, step by step,
the 128 keys and values that the key row lists into shared memory (cp.async, 16 bytes a thread, each
row from where the plan says it lies); each consumer owns 64 queries, keeps its scores, weights and
output in registers and multiplies on the tensor cores (wgmma). Barriers in shared memory say what
is there and what is read, across tiles too, so that the next tile's first keys are under way while
this tile's output is written.

A row is walked from its end, so that the steps that mask something (the row's end, and in causal
plans what lies behind a query) come first and all later ones mask nothing.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM102 -- a kernel takes flat arguments, its types are
# Gluon's, and a branch at compile time is not one at run time

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

# Newer versions of Triton name it async_load.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

TILE = gl.constexpr(128)  # queries per tile
HALF = gl.constexpr(64)  # queries per consumer
STEP = gl.constexpr(128)  # keys per step
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _locate(place, tables, sizes, BLOCK: gl.constexpr):
    """Return a program's tile, head and batch row, and its key row.

    Of the row: where it begins, how many entries the tile reads, and how many of these, from the
    front, every query of the tile sees.
    """
    launch_ptr, launch_b, launch_h, tile_row_ptr, tile_b, tile_h = tables[0]
    start_ptr, start_b, start_h, count_ptr, count_b, count_h = tables[1]
    index_ptr, index_b, index_h, index_r = tables[2]
    length_ptr, whole_ptr = tables[3]
    num_tiles, num_heads, num_places = sizes
    slot = place % num_tiles
    head = ((place // num_tiles) % num_heads).to(gl.int64)
    batch = (place // num_tiles // num_heads).to(gl.int64)
    tile = slot
    if launch_ptr is not None:
        tile = gl.load(launch_ptr + batch * launch_b + head * launch_h + slot)
    row = tile.to(gl.int64)
    if tile_row_ptr is not None:
        row = gl.load(tile_row_ptr + batch * tile_b + head * tile_h + tile).to(gl.int64)
    if BLOCK > 0:
        first = batch * index_b + head * index_h + row * index_r
    else:
        first = gl.load(start_ptr + batch * start_b + head * start_h + row)
    if length_ptr is not None:
        at = (batch * num_heads + head) * num_tiles + tile
        length = gl.load(length_ptr + at)
        whole = gl.load(whole_ptr + at)
    else:
        length = gl.load(count_ptr + batch * count_b + head * count_h + row)
        if BLOCK > 0:
            if length > 0:  # the last block may end before its size
                last = gl.load(index_ptr + first + length - 1)
                length = length * BLOCK - gl.maximum((last + 1) * BLOCK - num_places, 0)
        whole = length
    return tile, head, batch, first, length, whole


@gluon.jit
def _queries(tile, half, head, batch, query, num_queries, layout: gl.constexpr):
    """Return which queries stand in half a tile, -1 for none."""
    query_ptr, query_b, query_h = query
    at = tile * TILE + half * HALF + gl.arange(0, HALF, layout)
    if query_ptr is not None:
        return gl.load(query_ptr + batch * query_b + head * query_h + at)
    else:
        return gl.where(at < num_queries, at, -1)


@gluon.jit
def _keys(index_ptr, order, head, batch, first, place, length, BLOCK: gl.constexpr):
    """Return the keys at places of a row, -1 for a hole of the key order.

    Past the row's end stands its last key again, which nobody counts.
    """
    order_ptr, order_b, order_h = order
    place = gl.minimum(place, length - 1)
    if BLOCK > 0:
        key = gl.load(index_ptr + first + place // BLOCK) * BLOCK + place % BLOCK
        if order_ptr is not None:
            key = gl.load(order_ptr + batch * order_b + head * order_h + key)
    else:
        key = gl.load(index_ptr + first + place)
    return key


@gluon.jit
def _read(key, valid, batch, num_keys):
    """Return which keys are read: neither holes nor padding; a virtual key is neither."""
    valid_ptr, valid_b = valid
    read = key >= 0
    if valid_ptr is not None:
        real = read & (key < num_keys)
        read = read & (gl.load(valid_ptr + batch * valid_b + key, mask=real, other=1) != 0)
    return read


@gluon.jit
def _rows(
    key,
    real,
    stride,
    virtual,
    num_keys,
    D: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Return where the keys' rows begin, among the real or the virtual ones."""
    if WIDE:
        key = key.to(gl.int64)
    if HAS_EXTRA:
        is_real = key < num_keys
        base = gl.where(is_real, real, virtual)
        at = base + gl.where(is_real, key * stride, (key - num_keys) * D)
        return gl.multiple_of(at, 16)  # bytes; a choice of pointers hides it from the compiler
    else:
        return real + key * stride


@gluon.jit
def _gather(smem, at, read, IS_MASKED: gl.constexpr):
    """Copy rows into shared memory, zeros for those that are not read."""
    if IS_MASKED:
        _copy(smem, at, mask=read)
    else:
        _copy(smem, at)


@gluon.jit
def _produce(
    smem,
    bars,
    q,
    k,
    v,
    extra,
    weight_ptr,
    query,
    order,
    valid,
    tables,
    sizes,
    total,
    num_queries,
    num_keys,
    group,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Fill the stages."""
    q_smem, k_smem, v_smem, w_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_ptr, q_b, q_h, q_n = q
    k_ptr, k_b, k_h, k_n = k
    v_ptr, v_b, v_h, v_n = v
    extra_k_ptr, extra_v_ptr, extra_b, extra_h = extra
    index_ptr = tables[2][0]
    HAS_EXTRA: gl.constexpr = extra_k_ptr is not None
    IS_MASKED: gl.constexpr = order[0] is not None or valid[0] is not None
    lanes: gl.constexpr = D // 8  # threads per row, 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    dim = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    lane = gl.arange(0, STEP, rows)
    step = 0
    turn = 0
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        tile, head, batch, first, length, _whole = _locate(place, tables, sizes, BLOCK)
        if length > 0:
            kv_head = head // group
            q_row = q_ptr + batch * q_b + head * q_h
            k_row = k_ptr + batch * k_b + kv_head * k_h
            v_row = v_ptr + batch * v_b + kv_head * v_h
            extra_k_row = k_row
            extra_v_row = v_row
            if HAS_EXTRA:
                extra_k_row = extra_k_ptr + batch * extra_b + kv_head * extra_h
                extra_v_row = extra_v_ptr + batch * extra_b + kv_head * extra_h
            begin = (length - 1) // STEP * STEP
            key = _keys(index_ptr, order, head, batch, first, begin + lane, length, BLOCK)
            # The first keys come before the queries: they need not wait until the last tile's
            # queries are read.
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            read = _read(key, valid, batch, num_keys)[:, None] & (dim >= 0)
            mbarrier.wait(k_empty.index(stage), phase)
            at = _rows(key, k_row, k_n, extra_k_row, num_keys, D, HAS_EXTRA, WIDE)
            _gather(k_smem.index(stage), at[:, None] + dim, read, IS_MASKED)
            if weight_ptr is not None:
                entry = gl.minimum(begin + gl.arange(0, STEP, flat), length - 1)
                _copy(w_smem.index(stage), weight_ptr + first + entry)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            for half in gl.static_range(2):
                here = _queries(tile, half, head, batch, query, num_queries, rows)
                here = gl.maximum(here, 0).to(gl.int64)  # where no query stands, nobody stores
                _copy(q_smem.index(half), q_row + here[:, None] * q_n + dim)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            turn += 1
            while begin >= STEP:
                # The next step's keys are on their way while this one waits for its stage.
                begin -= STEP
                coming = _keys(index_ptr, order, head, batch, first, begin + lane, length, BLOCK)
                mbarrier.wait(v_empty.index(stage), phase)
                at = _rows(key, v_row, v_n, extra_v_row, num_keys, D, HAS_EXTRA, WIDE)
                read = _read(key, valid, batch, num_keys)[:, None] & (dim >= 0)
                _gather(v_smem.index(stage), at[:, None] + dim, read, IS_MASKED)
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
                key = coming
                step += 1
                stage = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                at = _rows(key, k_row, k_n, extra_k_row, num_keys, D, HAS_EXTRA, WIDE)
                read = _read(key, valid, batch, num_keys)[:, None] & (dim >= 0)
                _gather(k_smem.index(stage), at[:, None] + dim, read, IS_MASKED)
                if weight_ptr is not None:
                    entry = begin + gl.arange(0, STEP, flat)
                    _copy(w_smem.index(stage), weight_ptr + first + entry)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            at = _rows(key, v_row, v_n, extra_v_row, num_keys, D, HAS_EXTRA, WIDE)
            read = _read(key, valid, batch, num_keys)[:, None] & (dim >= 0)
            _gather(v_smem.index(stage), at[:, None] + dim, read, IS_MASKED)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Return [64, 128] float32 as pairs of halves [64, 64] int32.

    Across the loop's edge the compiler would keep halves in registers of their own, and repack them
    twice a step.
    """
    low, high = gl.split(gl.reshape(weights, [HALF, STEP // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _pin(pairs):
    """Return the pairs, in registers that nothing between the products defines.

    Products would wait for one another if what they read were computed between them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [pairs], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the halves [64, 128] of pairs: the same registers, named otherwise."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [HALF, STEP]), layout)


@gluon.jit
def _settle(parts):
    """Return sums of weights, none of them negative, behind an instruction that nothing passes.

    The assembler moves a wait for the tensor cores as early as it can: in front of the exponentials
    that should run beside the product. It does not move it across a sleep, which never happens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 0; mov.b32 $0, $1; }",
        "=r,r",
        [parts],
        gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _halves(x, width: gl.constexpr):
    """Return the left and right halves of [64, 2 * width]; one thread holds both of a pair."""
    return gl.split(gl.permute(gl.reshape(x, [HALF, 2, width]), (0, 2, 1)))


@gluon.jit
def _fold_sum(x):
    """Return [64, 128] summed to the [64, 8] that threads hold, as a tree and not a chain."""
    left, right = _halves(x, 64)
    left, right = _halves(left + right, 32)
    left, right = _halves(left + right, 16)
    left, right = _halves(left + right, 8)
    return left + right


@gluon.jit
def _row_max(x, layout: gl.constexpr):
    """Return the maximum of each row of [64, 128], as a tree and not a chain."""
    left, right = _halves(x, 64)
    left, right = _halves(gl.maximum(left, right), 32)
    left, right = _halves(gl.maximum(left, right), 16)
    left, right = _halves(gl.maximum(left, right), 8)
    return gl.convert_layout(gl.max(gl.maximum(left, right), 1), layout)


@gluon.jit
def _beside(row, x):
    """Return one value per row, laid out beside x [64, 8]."""
    return gl.convert_layout(row, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _hide(
    scores,
    begin,
    position,
    window,
    order,
    valid,
    lists,
    num_keys,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return a step's scores [64, 128], -inf where the query does not see the key."""
    index_ptr, head, batch, first, length = lists
    left, right, sink = window
    cols: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    entry = begin + gl.arange(0, STEP, cols)
    listed = entry < length
    if not CAUSAL and not WINDOW and order[0] is None and valid[0] is None:
        return gl.where(listed[None, :], scores, float("-inf"))
    else:
        key = _keys(index_ptr, order, head, batch, first, entry, length, BLOCK)
        seen = (listed & _read(key, valid, batch, num_keys))[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if WINDOW:
            low = gl.where(left >= 0, position - left, 0)
            high = gl.where(right >= 0, position + right, num_keys)
            inside = (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
            virtual = key >= num_keys  # stands nowhere, so no window excludes it
            seen = seen & (inside | (key < sink)[None, :] | virtual[None, :])
        return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _consume(
    smem,
    bars,
    out,
    lse,
    query,
    order,
    valid,
    tables,
    sizes,
    total,
    num_queries,
    num_keys,
    window,
    scale,
    half: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Attend 64 queries of each tile."""
    q_smem, k_smem, v_smem, w_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    out_ptr, out_b, out_h, out_n = out
    lse_ptr, lse_b, lse_h = lse
    HIDES_ALWAYS: gl.constexpr = WINDOW or order[0] is not None or valid[0] is not None
    HIDES: gl.constexpr = CAUSAL or HIDES_ALWAYS
    dtype: gl.constexpr = k_smem.dtype
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score_mma)
    score_cols: gl.constexpr = gl.SliceLayout(0, score_mma)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_mma)
    step = 0
    turn = 0
    q_half = q_smem.index(half)
    zeros = gl.zeros([HALF, STEP], gl.float32, score_mma)
    # Without weights the scores stay as they are up to the exponent; with them they are logits.
    factor = _LOG2_E if HAS_WEIGHTS else scale * _LOG2_E
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        tile, head, batch, first, length, whole = _locate(place, tables, sizes, BLOCK)
        acc = gl.zeros([HALF, D], gl.float32, out_mma)
        top = gl.full([HALF], float("-inf"), gl.float32, score_rows)
        norm = gl.zeros([HALF], gl.float32, score_rows)
        at = _queries(tile, half, head, batch, query, num_queries, score_rows)
        if length > 0:
            position = at + num_keys - num_queries
            lists = (tables[2][0], head, batch, first, length)
            if HIDES_ALWAYS:
                whole = 0
            mbarrier.wait(q_full, turn & 1)
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            fence_async_shared()
            token = warpgroup_mma(
                q_half, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[token])
            if HAS_WEIGHTS:
                scores = scores * scale + w_smem.index(stage).load(score_cols)[None, :]
            mbarrier.arrive(k_empty.index(stage), count=1)
            begin = (length - 1) // STEP * STEP
            scores = _hide(
                scores,
                begin,
                position,
                window,
                order,
                valid,
                lists,
                num_keys,
                BLOCK,
                CAUSAL,
                WINDOW,
            )
            top = _row_max(scores, score_rows) * factor
            # A row that has seen no key keeps -inf, and -inf - -inf is not a number.
            base = gl.where(top == float("-inf"), 0.0, top)
            weights = gl.exp2(scores * factor - base[:, None])
            parts = _fold_sum(weights)
            pairs = _pack(weights, dtype)
            begin -= STEP
            for hidden in gl.static_range(2 if HIDES else 1):
                least = 0
                if HIDES and hidden == 0:  # steps in which some query may not see some key
                    least = gl.maximum(whole - STEP + 1, 0)
                while begin >= least:
                    before = step % STAGES
                    before_phase = (step // STAGES) & 1
                    step += 1
                    stage = step % STAGES
                    pairs = _pin(pairs)
                    p = _unpack(pairs, dtype, p_layout)
                    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                    mbarrier.wait(v_full.index(before), before_phase)
                    if HAS_WEIGHTS:
                        bias = w_smem.index(stage).load(score_cols)
                    fence_async_shared()
                    token = warpgroup_mma(
                        q_half,
                        k_smem.index(stage).permute((1, 0)),
                        zeros,
                        use_acc=False,
                        is_async=True,
                    )
                    acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[token])
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    if HAS_WEIGHTS:
                        scores = scores * scale + bias[None, :]
                    if HIDES and hidden == 0:
                        scores = _hide(
                            scores,
                            begin,
                            position,
                            window,
                            order,
                            valid,
                            lists,
                            num_keys,
                            BLOCK,
                            CAUSAL,
                            WINDOW,
                        )
                    new_top = gl.maximum(top, _row_max(scores, score_rows) * factor)
                    base = new_top
                    if HAS_WEIGHTS or (HIDES and hidden == 0):  # a weight may be 0
                        base = gl.where(new_top == float("-inf"), 0.0, new_top)
                    weights = gl.exp2(scores * factor - base[:, None])
                    shrink = gl.exp2(top - base)
                    # Each thread sums its own columns; a row's threads add theirs at its end.
                    parts = _settle(parts * _beside(shrink, parts) + _fold_sum(weights))
                    top = new_top
                    acc, pairs = warpgroup_mma_wait(0, deps=[acc_token, pairs])
                    mbarrier.arrive(v_empty.index(before), count=1)
                    pairs = _pack(weights, dtype)
                    acc = acc * gl.convert_layout(shrink, out_rows)[:, None]
                    begin -= STEP
            mbarrier.arrive(q_empty, count=1)
            stage = step % STAGES
            pairs = _pin(pairs)
            p = _unpack(pairs, dtype, p_layout)
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
            fence_async_shared()
            acc_token = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc, pairs = warpgroup_mma_wait(0, deps=[acc_token, pairs])
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
            turn += 1
            norm = gl.convert_layout(gl.sum(parts, 1), score_rows)

        empty = norm == 0.0
        norm = gl.where(empty, 1.0, norm)
        value = gl.where(empty, float("-inf"), (top + gl.log2(norm)) * _LN_2)
        gl.store(lse_ptr + batch * lse_b + head * lse_h + at, value, mask=at >= 0)
        acc = acc * gl.convert_layout(1.0 / norm, out_rows)[:, None]
        at = gl.convert_layout(at, out_rows)
        dim = gl.arange(0, D, gl.SliceLayout(0, out_mma))
        out_row = out_ptr + batch * out_b + head * out_h
        gl.store(
            out_row + at.to(gl.int64)[:, None] * out_n + dim[None, :],
            acc.to(dtype),
            mask=(at >= 0)[:, None] & (dim >= 0)[None, :],
        )


@gluon.jit(
    do_not_specialize=[
        "num_queries",
        "num_keys",
        "num_places",
        "num_tiles",
        "num_heads",
        "total",
        "left",
        "right",
        "sink",
    ]
)
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    extra_k_ptr,
    extra_v_ptr,
    out_ptr,
    lse_ptr,
    query_ptr,
    tile_row_ptr,
    launch_ptr,
    start_ptr,
    count_ptr,
    index_ptr,
    weight_ptr,
    order_ptr,
    valid_ptr,
    length_ptr,
    whole_ptr,
    # Strides in elements; 0 on an axis that is shared.
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    extra_b,
    extra_h,
    out_b,
    out_h,
    out_n,
    lse_b,
    lse_h,
    query_b,
    query_h,
    tile_b,
    tile_h,
    launch_b,
    launch_h,
    start_b,
    start_h,
    count_b,
    count_h,
    index_b,
    index_h,
    index_r,
    order_b,
    order_h,
    valid_b,
    num_queries,
    num_keys,
    num_places,  # places of the key order: of blocks, with holes
    num_tiles,
    num_heads,
    group,  # query heads per KV head
    total,  # tiles of all heads and batch rows
    left,
    right,
    sink,
    scale,
    D: gl.constexpr,  # head dim
    BLOCK: gl.constexpr,  # keys per block; 0: the rows list tokens
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,  # whether offsets inside a head need 64 bits
    HAS_WEIGHTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Attend tiles to their key rows; see `kernels.hopper.HopperKernel`."""
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = (
        gl.allocate_shared_memory(dtype, [2, HALF, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, STEP, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, STEP, D], rows),
        gl.allocate_shared_memory(gl.float32, [STAGES, STEP], flat),
    )
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    # Full: the copies of each of the producer's threads are there. Empty: both consumers have read.
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(v_empty.index(stage), count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    q = (q_ptr, q_b, q_h, q_n)
    k = (k_ptr, k_b, k_h, k_n)
    v = (v_ptr, v_b, v_h, v_n)
    extra = (extra_k_ptr, extra_v_ptr, extra_b, extra_h)
    out = (out_ptr, out_b, out_h, out_n)
    lse = (lse_ptr, lse_b, lse_h)
    query = (query_ptr, query_b, query_h)
    order = (order_ptr, order_b, order_h)
    valid = (valid_ptr, valid_b)
    tables = (
        (launch_ptr, launch_b, launch_h, tile_row_ptr, tile_b, tile_h),
        (start_ptr, start_b, start_h, count_ptr, count_b, count_h),
        (index_ptr, index_b, index_h, index_r),
        (length_ptr, whole_ptr),
    )
    sizes = (num_tiles, num_heads, num_places)
    window = (left, right, sink)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    smem,
                    bars,
                    out,
                    lse,
                    query,
                    order,
                    valid,
                    tables,
                    sizes,
                    total,
                    num_queries,
                    num_keys,
                    window,
                    scale,
                    gl.constexpr(0),
                    D,
                    BLOCK,
                    STAGES,
                    HAS_WEIGHTS,
                    CAUSAL,
                    WINDOW,
                ),
            ),
            (
                _consume,
                (
                    smem,
                    bars,
                    out,
                    lse,
                    query,
                    order,
                    valid,
                    tables,
                    sizes,
                    total,
                    num_queries,
                    num_keys,
                    window,
                    scale,
                    gl.constexpr(1),
                    D,
                    BLOCK,
                    STAGES,
                    HAS_WEIGHTS,
                    CAUSAL,
                    WINDOW,
                ),
            ),
            (
                _produce,
                (
                    smem,
                    bars,
                    q,
                    k,
                    v,
                    extra,
                    weight_ptr,
                    query,
                    order,
                    valid,
                    tables,
                    sizes,
                    total,
                    num_queries,
                    num_keys,
                    group,
                    D,
                    BLOCK,
                    STAGES,
                    WIDE,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
