"""The producer of the Hopper kernel: a warpgroup that copies queries, keys, values and weights."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, C901 -- a kernel takes flat arguments, its
# types are Gluon's, a branch at compile time is not one at run time, and it has no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from gossamer.kernels.hopper.walk import (
    BIAS,
    STEP,
    find_keys,
    find_place,
    find_queries,
    is_read,
    last_step,
    mark_key,
    reach_of,
    tell_slot,
)

# Newer versions of Triton name it async_load.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_bulk_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


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
        return gl.multiple_of(real + key * stride, 16)  # shared memory may have held the product


@gluon.jit
def _spread(key, smem, layout: gl.constexpr, ROWS: gl.constexpr):
    """Return a step's keys, one a thread, as the rows that each thread copies.

    Through shared memory, where the keys of a thread's rows lie together: four loads instead of one
    a row.
    """
    groups: gl.constexpr = STEP // ROWS  # of threads that copy a row together
    held: gl.constexpr = gl.BlockedLayout([1, ROWS], [groups // 4, 128 // groups], [4, 1], [1, 0])
    smem.store(gl.permute(gl.reshape(key, [ROWS, groups]), (1, 0)))
    spread = gl.reshape(gl.permute(smem.load(held), (1, 0)), [STEP])
    return gl.convert_layout(spread, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _copy_keys(
    smem,
    full,
    key,
    row,
    stride,
    extra_row,
    num_keys,
    layout: gl.constexpr,
    D: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    IS_MASKED: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Copy a step's rows into shared memory and have each thread arrive behind its copies."""
    dim = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    at = _rows(key, row, stride, extra_row, num_keys, D, HAS_EXTRA, WIDE)[:, None] + dim
    if IS_MASKED:
        _copy(smem, at, mask=(key >= 0)[:, None] & (dim >= 0))
    else:
        _copy(smem, at)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _pause(x, D: gl.constexpr):
    """Return x after about 150 ns at head dim 128, half of that at 64.

    The copies of values and of the next keys at once would fill the queue that the consumers'
    exponentials pass through. Both are needed a step later.
    """
    text: gl.constexpr = (
        "nanosleep.u32 150; mov.b32 $0, $1;" if D == 128 else "nanosleep.u32 75; mov.b32 $0, $1;"
    )
    return gl.inline_asm_elementwise(text, "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_queries(smem, full, query, row, stride, key_smem, layout: gl.constexpr, D: gl.constexpr):
    """Copy a tile's queries; where none stands any will do, as nobody stores what comes of it."""
    dim = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    query = _spread(gl.maximum(query, 0), key_smem, layout, D // 8).to(gl.int64)
    _copy(smem, row + query[:, None] * stride + dim)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _blocks(index_row, begin, BLOCK: gl.constexpr):
    """Return the numbers of a step's blocks."""
    blocks = ()
    for part in gl.static_range(STEP // BLOCK):
        blocks = blocks + (gl.load(index_row + begin // BLOCK + part),)
    return blocks


@gluon.jit
def _fill(smem, full, desc, blocks, row, col, D: gl.constexpr, BLOCK: gl.constexpr):
    """Copy a step of whole blocks into shared memory, one bulk copy a block.

    The barrier counts the producer's threads, as for their own copies: here one arrives for all.
    """
    mbarrier.expect(full, STEP * D * 2)
    for part in gl.static_range(STEP // BLOCK):
        place = [row + blocks[part] * BLOCK, col]
        _bulk_copy(desc, place, full, smem.slice(part * BLOCK, BLOCK))
    mbarrier.arrive(full, count=127)


@gluon.jit
def _weights(weight_ptr, first, begin, length, layout: gl.constexpr):
    """Return the logarithms of a step's weights, 0 past a row's length."""
    entry = begin + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    if length is None:
        return gl.load(weight_ptr + first + entry)
    else:
        return gl.load(weight_ptr + first + entry, mask=entry < length, other=0.0)


@gluon.jit
def _store_weights(smem, weight, inverse, layout: gl.constexpr):
    """Store weights as columns that the tensor cores add to the scores: [128, 16].

    Three halves hold a float32: what the first leaves over stands in the second, and so on.
    """
    dtype: gl.constexpr = smem.dtype
    weight = weight * inverse
    high = weight.to(dtype)
    # What no half reaches weighs 0, as it would: the rest of an infinity is none.
    near = high.to(gl.float32)
    rest = gl.where(near == float("-inf"), 0.0, weight - near)
    middle = rest.to(dtype)
    low = (rest - middle.to(gl.float32)).to(dtype)
    column = gl.arange(0, BIAS, gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([STEP, BIAS], dtype, layout)
    value = gl.where(column == 0, high[:, None], zero)
    value = gl.where(column == 1, middle[:, None], value)
    value = gl.where(column == 2, low[:, None], value)
    smem.store(value)


@gluon.jit
def _note(
    notes,
    stage,
    key,
    weight,
    layout: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Store what the consumers need of a step beside its rows: weights, and keys that may hide."""
    w_smem, seen_smem, full, inverse, window, num_keys = notes
    if HAS_WEIGHTS:
        _store_weights(w_smem.index(stage), weight, inverse, layout)
    if HIDES:
        seen_smem.index(stage).store(mark_key(key, window, num_keys, CAUSAL, WINDOW))
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _claim(claimed_ptr, table_ptr, sizes, total):
    """Return the next launch slot that nobody has claimed, and its place.

    Tiles without a query are passed by. Behind the last slot comes its place again, which nobody
    attends.
    """
    slot = gl.atomic_add(claimed_ptr, 1)
    place = find_place(table_ptr, gl.minimum(slot, total - 1), sizes)
    while (slot < total) & (place[4] < 0):  # its length: no query stands there
        slot = gl.atomic_add(claimed_ptr, 1)
        place = find_place(table_ptr, gl.minimum(slot, total - 1), sizes)
    return slot, place


@gluon.jit
def produce(
    smem,
    bars,
    q,
    k,
    v,
    extra,
    weight_ptr,
    bulk,
    walk,
    slots,
    window,
    sinks,
    group,
    scale,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
    SAME_STRIDE: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Fill the stages."""
    query, order, valid, index_ptr, table_ptr, sizes, total, num_queries, num_keys = walk
    inverse = 1.0 / scale
    k_desc, v_desc, row_b, row_h, col_h = bulk
    q_smem, k_smem, v_smem, w_smem, _ones, key_smem, seen_smem = smem
    slot_smem, claimed_ptr = slots
    q_full, q_empty, k_full, k_empty, v_full, v_empty, w_full, s_full = bars
    q_ptr, q_b, q_h, q_n = q
    k_ptr, k_b, k_h, k_n = k
    v_ptr, v_b, v_h, v_n = v
    extra_k_ptr, extra_v_ptr, extra_b, extra_h = extra
    HAS_EXTRA: gl.constexpr = extra_k_ptr is not None
    IS_MASKED: gl.constexpr = order[0] is not None or valid[0] is not None
    HAS_WEIGHTS: gl.constexpr = weight_ptr is not None
    HAS_NOTES: gl.constexpr = HAS_WEIGHTS or HIDES
    # Where nothing else asks for the keys themselves, a thread multiplies its one key by the stride
    # and hands on the product, instead of multiplying all keys whose rows it copies.
    ARE_OFFSETS: gl.constexpr = SAME_STRIDE and not (HAS_EXTRA or IS_MASKED or WIDE)
    if ARE_OFFSETS:
        k_step = 1
        v_step = 1
    else:
        k_step = k_n
        v_step = v_n
    lanes: gl.constexpr = D // 8  # threads per row, 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    bias_layout: gl.constexpr = gl.BlockedLayout([1, BIAS], [32, 1], [4, 1], [1, 0])
    per_thread: gl.constexpr = D // 8  # rows of a step that a thread copies a part of
    lane = gl.arange(0, STEP, gl.BlockedLayout([1], [32], [4], [0]))
    step = 0
    turn = 0
    tile, head, batch, first, length, _seen, real = find_place(table_ptr, gl.program_id(0), sizes)
    begin = last_step(length)
    coming = find_keys(index_ptr, order, head, batch, first, begin + lane, length, BLOCK)
    weight = None
    if weight_ptr is not None:
        weight = _weights(weight_ptr, first, begin, length, bias_layout)
    here = find_queries(tile, lane, head, batch, query, num_queries)
    q_row = q_ptr + batch * q_b + head * q_h
    _copy_queries(q_smem.index(0), q_full.index(0), here, q_row, q_n, key_smem, layout, D)
    place = gl.program_id(0)
    while place < total:
        kv_head = head // group
        k_row = k_ptr + batch * k_b + kv_head * k_h
        v_row = v_ptr + batch * v_b + kv_head * v_h
        extra_k_row = k_row
        extra_v_row = v_row
        if HAS_EXTRA:
            extra_k_row = extra_k_ptr + batch * extra_b + kv_head * extra_h
            extra_v_row = extra_v_ptr + batch * extra_b + kv_head * extra_h
        reach = reach_of(window, sinks, batch)
        notes = (w_smem, seen_smem, w_full, inverse, reach, num_keys)
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        if IS_MASKED:
            coming = gl.where(is_read(coming, valid, batch, num_keys), coming, -1)
        key = _spread(coming * k_n if ARE_OFFSETS else coming, key_smem, layout, per_thread)
        mbarrier.wait(k_empty.index(stage), phase)
        if HAS_NOTES:
            seen = gl.where(begin + lane < length, coming, -1)
            _note(notes, stage, seen, weight, bias_layout, HAS_WEIGHTS, HIDES, CAUSAL, WINDOW)
        _copy_keys(
            k_smem.index(stage),
            k_full.index(stage),
            key,
            k_row,
            k_step,
            extra_k_row,
            num_keys,
            layout,
            D,
            HAS_EXTRA,
            IS_MASKED,
            WIDE,
        )
        # Tiles differ in length, so each program claims its next one when it begins one.
        place, claimed = _claim(claimed_ptr, table_ptr, sizes, total)
        next_tile, next_head, next_batch, next_first, next_length, _seen, next_real = claimed
        tell_slot(slot_smem.index(turn % 2), s_full.index(turn % 2), place)
        here = find_queries(next_tile, lane, next_head, next_batch, query, num_queries)
        if k_desc is None:
            # Steps that may hold a virtual key choose where it lies; those before know it.
            for is_mixed in gl.static_range(1 if HAS_EXTRA else 0, -1, -1):
                least = STEP
                if is_mixed:
                    least = gl.maximum(real - STEP + 1, STEP)
                while begin >= least:
                    # The next step's keys are on their way while this one waits for its stage.
                    begin -= STEP
                    coming = find_keys(
                        index_ptr, order, head, batch, first, begin + lane, None, BLOCK
                    )
                    if weight_ptr is not None:
                        weight = _weights(weight_ptr, first, begin, None, bias_layout)
                    mbarrier.wait(v_empty.index(stage), phase)
                    _copy_keys(
                        v_smem.index(stage),
                        v_full.index(stage),
                        key,
                        v_row,
                        v_step,
                        extra_v_row,
                        num_keys,
                        layout,
                        D,
                        is_mixed > 0,
                        IS_MASKED,
                        WIDE,
                    )
                    if IS_MASKED:
                        coming = gl.where(is_read(coming, valid, batch, num_keys), coming, -1)
                    at = _pause(coming * k_n if ARE_OFFSETS else coming, D)
                    key = _spread(at, key_smem, layout, per_thread)
                    step += 1
                    stage = step % STAGES
                    phase = ((step // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(stage), phase)
                    if HAS_NOTES:
                        _note(
                            notes,
                            stage,
                            coming,
                            weight,
                            bias_layout,
                            HAS_WEIGHTS,
                            HIDES,
                            CAUSAL,
                            WINDOW,
                        )
                    _copy_keys(
                        k_smem.index(stage),
                        k_full.index(stage),
                        key,
                        k_row,
                        k_step,
                        extra_k_row,
                        num_keys,
                        layout,
                        D,
                        is_mixed > 0,
                        IS_MASKED,
                        WIDE,
                    )
        # The next tile's queries and first keys are on their way before it begins.
        turn += 1
        q_stage = turn % 2
        mbarrier.wait(q_empty.index(q_stage), ((turn // 2) & 1) ^ 1)
        q_row = q_ptr + next_batch * q_b + next_head * q_h
        _copy_queries(
            q_smem.index(q_stage), q_full.index(q_stage), here, q_row, q_n, key_smem, layout, D
        )
        next_begin = last_step(next_length)
        coming = find_keys(
            index_ptr,
            order,
            next_head,
            next_batch,
            next_first,
            next_begin + lane,
            next_length,
            BLOCK,
        )
        if weight_ptr is not None:
            weight = _weights(weight_ptr, next_first, next_begin, next_length, bias_layout)
        mbarrier.wait(v_empty.index(stage), phase)
        _copy_keys(
            v_smem.index(stage),
            v_full.index(stage),
            key,
            v_row,
            v_step,
            extra_v_row,
            num_keys,
            layout,
            D,
            HAS_EXTRA,
            IS_MASKED,
            WIDE,
        )
        step += 1
        if k_desc is not None:
            # Steps before the last hold whole blocks alone, which bulk copies take.
            row = (batch * row_b + kv_head * row_h).to(gl.int32)
            col = (kv_head * col_h).to(gl.int32)
            while begin >= STEP:
                begin -= STEP
                stage = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                blocks = _blocks(index_ptr + first, begin, BLOCK)
                seen = lane
                if HIDES:
                    seen = find_keys(
                        index_ptr, order, head, batch, first, begin + lane, None, BLOCK
                    )
                mbarrier.wait(k_empty.index(stage), phase)
                if HIDES:
                    _note(
                        notes, stage, seen, weight, bias_layout, HAS_WEIGHTS, HIDES, CAUSAL, WINDOW
                    )
                _fill(k_smem.index(stage), k_full.index(stage), k_desc, blocks, row, col, D, BLOCK)
                mbarrier.wait(v_empty.index(stage), phase)
                _fill(v_smem.index(stage), v_full.index(stage), v_desc, blocks, row, col, D, BLOCK)
                step += 1
        tile = next_tile
        head = next_head
        batch = next_batch
        first = next_first
        length = next_length
        real = next_real
        begin = next_begin
    # The consumers multiply once more, for the tile behind the last, by whatever the stage holds.
    stage = step % STAGES
    mbarrier.wait(k_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.arrive(k_full.index(stage), count=128)
    if HAS_NOTES:
        mbarrier.arrive(w_full.index(stage), count=1)
