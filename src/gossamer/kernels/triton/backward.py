"""The backward kernels: programs of query rows make dQ, programs of keys dK and dV."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- a kernel takes flat arguments, and its types are
# Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.steps import (
    PLAIN,
    find_bounds,
    find_row,
    find_sink,
    find_tile,
    hide,
    load_entries,
    read_keys,
    tile_queries,
)


@triton.jit
def _walk(
    begin,
    stop,  # places in the row
    q,
    d_out,
    lse,  # in base 2, +inf for a query without any key
    delta,
    d_q,
    k_row,
    v_row,
    k_n,
    v_n,
    d_k_row,
    d_v_row,
    index_row,
    weight_row,
    order_row,
    valid_row,
    position,
    low,
    high,
    sink,
    base,  # taken from every key: of virtual keys, the number of real ones
    num_places,
    scale,
    N: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last step may be a part of one
    HAS_WEIGHTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ADD: tl.constexpr,  # whether the gradients of keys and values are summed here
    PRECISION: tl.constexpr,
):
    """Read the entries begin … stop of a key row; return d_q, which lacks the factor scale."""
    PARTIAL: tl.constexpr = MASKED or HAS_ORDER or HAS_VALID
    dim = tl.arange(0, DP)
    for start in range(begin, stop, N):
        key, read = read_keys(
            load_entries(start, stop, index_row, base, N, BLOCK, MASKED),
            start,
            stop,
            order_row,
            valid_row,
            num_places,
            N,
            BLOCK,
            HAS_ORDER,
            HAS_VALID,
        )
        at = key - base
        if WIDE:
            at = at.to(tl.int64)
        k_at = k_row + at[:, None] * k_n + dim[None, :]
        v_at = v_row + at[:, None] * v_n + dim[None, :]
        held = dim[None, :] < D
        if PARTIAL:
            held = held & read[:, None]
        if PARTIAL or D != DP:
            k = tl.load(k_at, mask=held, other=0.0)
            v = tl.load(v_at, mask=held, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        if HAS_WEIGHTS:
            step = start + tl.arange(0, N)
            if MASKED:
                log_weight = tl.load(weight_row + step, mask=step < stop, other=0.0)
            else:
                log_weight = tl.load(weight_row + step)
            logits += (log_weight * 1.4426950408889634)[None, :]
        p = tl.exp2(logits - lse[:, None])
        d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        d_s = p * (d_p - delta[:, None])
        if PARTIAL or CAUSAL or WINDOW:
            seen = hide(
                read[None, :],
                key[None, :],
                position[:, None],
                low[:, None],
                high[:, None],
                sink,
                CAUSAL,
                WINDOW,
            )
            p = tl.where(seen, p, 0.0)
            d_s = tl.where(seen, d_s, 0.0)
        d_s = d_s.to(k.dtype)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)
        if ADD:
            d_v = tl.dot(tl.trans(p.to(d_out.dtype)), d_out, input_precision=PRECISION)
            d_k = tl.dot(tl.trans(d_s), q, input_precision=PRECISION) * scale
            d_at = at[:, None].to(tl.int64) * D + dim[None, :]
            tl.atomic_add(d_v_row + d_at, d_v, mask=held, sem="relaxed")
            tl.atomic_add(d_k_row + d_at, d_k, mask=held, sem="relaxed")
    return d_q


@triton.jit(do_not_specialize=PLAIN)
def backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    extra_k_ptr,
    extra_v_ptr,
    out_ptr,
    lse_ptr,
    d_out_ptr,
    d_lse_ptr,
    delta_ptr,
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    query_index_ptr,
    tile_row_ptr,
    launch_ptr,
    start_ptr,
    count_ptr,
    index_ptr,
    log_weight_ptr,
    key_order_ptr,
    key_valid_ptr,
    # Strides in elements; 0 on an axis that is shared. What has none is contiguous.
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
    d_out_b,
    d_out_h,
    d_out_n,
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
    num_places,
    num_tiles,
    num_heads,
    group,
    left,
    right,
    sink,
    sink_ptr,  # int32, where padding moves the ends of sinks
    sink_b,
    scale,
    TILE: tl.constexpr,  # query rows per tile of the plan
    M: tl.constexpr,  # query rows per program
    N: tl.constexpr,  # keys per step
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_LAUNCH: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_D_LSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ADD: tl.constexpr,  # whether to add to d_k and d_v (float32)
    PRECISION: tl.constexpr,
):
    """Write dQ and delta = sum(out * d_out) - d_lse of M rows of a tile.

    With P = exp(logits - lse) and dP = d_out V', dS = P (dP - delta) is the gradient of the logits:
    that of the log-sum-exp is P, so d_lse joins delta.
    """
    STEPS: tl.constexpr = (TILE + M - 1) // M
    program = tl.program_id(0)
    batch, head, row, query = find_tile(
        program // STEPS,
        program % STEPS * M + tl.arange(0, M),
        query_index_ptr,
        tile_row_ptr,
        launch_ptr,
        query_b,
        query_h,
        tile_b,
        tile_h,
        launch_b,
        launch_h,
        num_queries,
        num_tiles,
        num_heads,
        TILE,
        HAS_QUERIES,
        HAS_ROWS,
        HAS_LAUNCH,
    )
    is_query = query >= 0
    if tl.max(query) < 0:
        return  # past this head's own number of tiles

    dim = tl.arange(0, DP)
    held = is_query[:, None] & (dim < D)[None, :]
    wide = query.to(tl.int64)
    pair = (batch * num_heads + head) * num_queries  # first of the pair's queries
    q_row = q_ptr + batch * q_b + head * q_h
    q = tl.load(q_row + wide[:, None] * q_n + dim[None, :], mask=held, other=0.0)
    d_out_row = d_out_ptr + batch * d_out_b + head * d_out_h
    d_out = tl.load(d_out_row + wide[:, None] * d_out_n + dim[None, :], mask=held, other=0.0)
    own = (pair + wide)[:, None] * D + dim[None, :]
    out = tl.load(out_ptr + own, mask=held, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + pair + wide, mask=is_query, other=0.0)
    tl.store(delta_ptr + pair + wide, delta, mask=is_query)
    lse = tl.load(lse_ptr + pair + wide, mask=is_query, other=float("-inf"))
    # A query without any key keeps 0: exp2(x - inf).
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)

    position, low, high = find_bounds(query, num_queries, num_keys, left, right, WINDOW)
    sink = find_sink(sink, sink_ptr, sink_b, batch)
    first, real, length = find_row(
        batch,
        head,
        row,
        query,
        position,
        start_ptr,
        count_ptr,
        index_ptr,
        start_b,
        start_h,
        count_b,
        count_h,
        index_b,
        index_h,
        index_r,
        num_keys,
        BLOCK,
        RAGGED,
        HAS_EXTRA,
        HAS_ORDER,
        CAUSAL,
    )
    index_row = index_ptr + first
    weight_row = log_weight_ptr
    if HAS_WEIGHTS:
        weight_row = log_weight_ptr + first
    order_row = key_order_ptr
    if HAS_ORDER:
        order_row = key_order_ptr + batch * order_b + head * order_h
    valid_row = key_valid_ptr
    if HAS_VALID:
        valid_row = key_valid_ptr + batch * valid_b
    kv_head = head // group
    d_k_row = d_k_ptr
    d_v_row = d_v_ptr
    if ADD:
        kv_pair = (batch * (num_heads // group) + kv_head) * num_keys * D
        d_k_row = d_k_ptr + kv_pair
        d_v_row = d_v_ptr + kv_pair

    d_q = tl.zeros([M, DP], tl.float32)
    k_row = k_ptr + batch * k_b + kv_head * k_h
    v_row = v_ptr + batch * v_b + kv_head * v_h
    whole = real // N * N
    for masked in tl.static_range(2):
        d_q = _walk(
            whole if masked else 0,
            real if masked else whole,
            q,
            d_out,
            lse,
            delta,
            d_q,
            k_row,
            v_row,
            k_n,
            v_n,
            d_k_row,
            d_v_row,
            index_row,
            weight_row,
            order_row,
            valid_row,
            position,
            low,
            high,
            sink,
            0,
            num_places,
            scale,
            N,
            D,
            DP,
            BLOCK,
            WIDE,
            masked == 1,
            HAS_WEIGHTS,
            HAS_ORDER,
            HAS_VALID,
            CAUSAL,
            WINDOW,
            ADD,
            PRECISION,
        )
    if HAS_EXTRA:
        # Virtual keys are constants: they carry a gradient to the queries alone.
        d_q = _walk(
            real,
            length,
            q,
            d_out,
            lse,
            delta,
            d_q,
            extra_k_ptr + batch * extra_b + kv_head * extra_h,
            extra_v_ptr + batch * extra_b + kv_head * extra_h,
            D,
            D,
            d_k_row,
            d_v_row,
            index_row,
            weight_row,
            order_row,
            valid_row,
            position,
            low,
            high,
            sink,
            num_keys,
            num_places,
            scale,
            N,
            D,
            DP,
            0,
            False,
            True,
            HAS_WEIGHTS,
            False,
            False,
            False,
            False,
            False,
            PRECISION,
        )
    tl.store(d_q_ptr + own, (d_q * scale).to(d_q_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=PLAIN)
def backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    d_out_ptr,
    delta_ptr,
    d_k_ptr,
    d_v_ptr,
    query_index_ptr,
    key_order_ptr,
    key_valid_ptr,
    num_listed_ptr,
    listed_ptr,
    # Strides in elements; 0 on an axis that is shared. What has none is contiguous.
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    d_out_b,
    d_out_h,
    d_out_n,
    query_b,
    query_h,
    order_b,
    order_h,
    valid_b,
    num_listed_b,
    num_listed_h,
    listed_b,
    listed_h,
    num_queries,
    num_keys,
    num_places,
    num_tiles,
    num_blocks,
    num_heads,
    group,
    left,
    right,
    sink,
    sink_ptr,  # int32, where padding moves the ends of sinks
    sink_b,
    scale,
    TILE: tl.constexpr,  # query rows per tile of the plan
    M: tl.constexpr,  # query rows per step
    N: tl.constexpr,  # keys per program
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dK and dV of N keys of one block: sums over the tiles that list it, in their order.

    The heads of a group are walked one after another, so no two programs write the same key.
    """
    PARTS: tl.constexpr = (BLOCK + N - 1) // N
    STEPS: tl.constexpr = (TILE + M - 1) // M
    program = tl.program_id(0)
    part = program % (num_blocks * PARTS)
    pair = program // (num_blocks * PARTS)
    kv_heads = num_heads // group
    kv_head = (pair % kv_heads).to(tl.int64)
    batch = (pair // kv_heads).to(tl.int64)
    block = part // PARTS
    sink = find_sink(sink, sink_ptr, sink_b, batch)

    in_block = part % PARTS * N + tl.arange(0, N)
    key = block * BLOCK + in_block
    stands = (in_block < BLOCK) & (key < num_places)
    if HAS_ORDER:
        # Heads of one group share their order, or there is one head in a group.
        order_row = key_order_ptr + batch * order_b + kv_head * group * order_h
        key = tl.load(order_row + key, mask=stands, other=-1)
        stands = stands & (key >= 0)
    read = stands
    if HAS_VALID:
        read = read & (tl.load(key_valid_ptr + batch * valid_b + key, mask=read, other=0) != 0)
    wide = key.to(tl.int64)
    dim = tl.arange(0, DP)
    in_dim = dim < D
    held = read[:, None] & in_dim[None, :]
    k_row = k_ptr + batch * k_b + kv_head * k_h
    v_row = v_ptr + batch * v_b + kv_head * v_h
    k = tl.load(k_row + wide[:, None] * k_n + dim[None, :], mask=held, other=0.0)
    v = tl.load(v_row + wide[:, None] * v_n + dim[None, :], mask=held, other=0.0)

    d_k = tl.zeros([N, DP], tl.float32)
    d_v = tl.zeros([N, DP], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        first = (batch * num_heads + head) * num_queries
        q_row = q_ptr + batch * q_b + head * q_h
        d_out_row = d_out_ptr + batch * d_out_b + head * d_out_h
        query_row = query_index_ptr
        if HAS_QUERIES:
            query_row = query_index_ptr + batch * query_b + head * query_h
        listed_row = listed_ptr + batch * listed_b + head * listed_h
        listed_row += block.to(tl.int64) * num_tiles
        count = tl.load(num_listed_ptr + batch * num_listed_b + head * num_listed_h + block)
        for step in range(count * STEPS):
            tile = tl.load(listed_row + step // STEPS)
            lane = step % STEPS * M + tl.arange(0, M)
            query = tile_queries(query_row, tile, lane, num_queries, TILE, HAS_QUERIES)
            is_query = query >= 0
            at = query.to(tl.int64)
            here = is_query[:, None] & in_dim[None, :]
            q = tl.load(q_row + at[:, None] * q_n + dim[None, :], mask=here, other=0.0)
            d_out = tl.load(d_out_row + at[:, None] * d_out_n + dim[None, :], mask=here, other=0.0)
            lse = tl.load(lse_ptr + first + at, mask=is_query, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
            delta = tl.load(delta_ptr + first + at, mask=is_query, other=0.0)
            # Keys lie along the rows: P' and dS' are the left sides of the products that follow.
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            p = tl.exp2(logits * (scale * 1.4426950408889634) - lse[None, :])  # [N, M]
            d_p = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
            d_s = p * (d_p - delta[None, :])
            position, low, high = find_bounds(query, num_queries, num_keys, left, right, WINDOW)
            seen = hide(
                read[:, None] & is_query[None, :],
                key[:, None],
                position[None, :],
                low[None, :],
                high[None, :],
                sink,
                CAUSAL,
                WINDOW,
            )
            p = tl.where(seen, p, 0.0)
            d_s = tl.where(seen, d_s, 0.0)
            d_v = tl.dot(p.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
            d_k = tl.dot(d_s.to(q.dtype), q, d_k, input_precision=PRECISION)

    own = ((batch * kv_heads + kv_head) * num_keys + wide)[:, None] * D + dim[None, :]
    written = stands[:, None] & in_dim[None, :]
    tl.store(d_k_ptr + own, (d_k * scale).to(d_k_ptr.dtype.element_ty), mask=written)
    tl.store(d_v_ptr + own, d_v.to(d_v_ptr.dtype.element_ty), mask=written)
