"""The forward kernel: a program for each query tile, or part of one, walks the tile's key row."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, C901, SIM102 -- a kernel takes flat arguments, its types are
# Triton's, and a branch at compile time is not one at run time

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.steps import (
    PLAIN,
    count_below,
    find_bounds,
    find_row,
    find_sink,
    find_tile,
    hide,
    load_entries,
    read_keys,
)


@triton.jit
def _load_weights(weight_row, start, stop, N: tl.constexpr):
    """Return the logarithms of a step's weights to base 2, 0 past the row's end.

    With more than a step's are loaded as many as there are threads: fewer the compiler would have
    each thread copy for itself, 32 times 4 bytes a thread and step.
    """
    WIDTH: tl.constexpr = max(2 * N, 256)
    place = start + tl.arange(0, WIDTH)
    weight = tl.load(weight_row + place, mask=place < stop, other=0.0) * 1.4426950408889634
    weight = tl.reshape(weight, [WIDTH // N, N])
    if WIDTH == 2 * N:
        weight, _ = tl.split(tl.trans(weight))
        return weight
    else:
        first = tl.arange(0, WIDTH // N)[:, None] == 0
        return tl.sum(tl.where(first, weight, 0.0), 0)


@triton.jit
def _walk(
    begin,
    stop,  # places in the row
    q,
    acc,
    top,
    total,
    k_row,
    v_row,
    k_n,
    v_n,
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
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
    MASKED: tl.constexpr,  # whether the last step may be a part of one
    HAS_WEIGHTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read the entries begin … stop of a key row; return acc, top and total.

    Where nothing is masked, loads carry no mask: predicates cost a third of the time.
    """
    PARTIAL: tl.constexpr = MASKED or HAS_ORDER or HAS_VALID
    HIDES: tl.constexpr = PARTIAL or CAUSAL or WINDOW
    dim = tl.arange(0, DP)
    # Every step loads the entries of the next, so that copies need not wait for them. What is
    # carried is the bare load: the compiler does not pipeline what is computed from it.
    entry = load_entries(begin, stop, index_row, base, N, BLOCK, True)
    for start in tl.range(begin, stop, N, num_stages=STAGES):
        key, read = read_keys(
            entry,
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
        coming = start + N
        if not MASKED:
            coming = tl.minimum(coming, stop - N)
        entry = load_entries(coming, stop, index_row, base, N, BLOCK, MASKED)
        at = (key - base)[:, None]
        if WIDE:
            at = at.to(tl.int64)
        k_at = k_row + at * k_n + dim[None, :]
        v_at = v_row + at * v_n + dim[None, :]
        if PARTIAL and D != DP:
            k = tl.load(k_at, mask=read[:, None] & (dim < D)[None, :], other=0.0)
        elif PARTIAL:
            k = tl.load(k_at, mask=read[:, None], other=0.0)
        elif D != DP:
            k = tl.load(k_at, mask=(dim < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_WEIGHTS:
            log_weight = _load_weights(weight_row, start, stop, N)
            logits = logits * scale + log_weight[None, :]
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
        if HIDES:
            logits = tl.where(seen, logits, float("-inf"))
        factor = scale
        if HAS_WEIGHTS:
            factor = 1.0
        new_top = tl.maximum(top, tl.max(logits, 1) * factor)
        safe = new_top
        if HIDES or HAS_WEIGHTS:
            # A row that has seen no key yet keeps -inf, and -inf - -inf is not a number.
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits * factor - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        if PARTIAL and D != DP:
            v = tl.load(v_at, mask=read[:, None] & (dim < D)[None, :], other=0.0)
        elif PARTIAL:
            v = tl.load(v_at, mask=read[:, None], other=0.0)
        elif D != DP:
            v = tl.load(v_at, mask=(dim < D)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = acc * shrink[:, None]
        if CAUSAL or WINDOW:
            # 0 * NaN is NaN: what one query of the tile may not see must not reach it through its
            # value. Sums of values times 0 are 0 unless one is not finite.
            if tl.sum(tl.sum(v.to(tl.float32) * 0.0, 1), 0) != 0.0:
                broken = (v.to(tl.float32) * 0.0) != 0.0  # [N, DP]
                hit = tl.dot(seen.to(tl.float16), broken.to(tl.float16))  # counts, exact
                acc = tl.where(hit > 0, float("nan"), acc)
                v = tl.where(broken, 0.0, v)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=PLAIN)
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    extra_k_ptr,
    extra_v_ptr,
    out_ptr,
    lse_ptr,
    query_index_ptr,
    tile_row_ptr,
    launch_ptr,
    start_ptr,
    count_ptr,
    index_ptr,
    log_weight_ptr,
    key_order_ptr,
    key_valid_ptr,
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
    left,
    right,
    sink,
    sink_ptr,  # int32, where padding moves the ends of sinks
    sink_b,
    scale,  # times log2(e)
    TILE: tl.constexpr,  # query rows per tile of the plan
    M: tl.constexpr,  # query rows per program, a power of two
    N: tl.constexpr,  # keys per step
    D: tl.constexpr,  # head dim
    DP: tl.constexpr,  # the same, a power of two
    BLOCK: tl.constexpr,  # keys per block; 0: the rows list tokens
    RAGGED: tl.constexpr,  # whether a block may hold fewer than BLOCK keys
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
    HAS_QUERIES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_LAUNCH: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,  # steps whose keys and values are held
):
    """Attend M rows of a tile to its key row; see `kernels.triton.TritonKernel`.

    Scores and sums are float32, in base 2; address arithmetic is 64-bit. A key that is not listed,
    padded or masked for all queries is never loaded.
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
    in_dim = dim < D
    q_row = q_ptr + batch * q_b + head * q_h
    q = tl.load(
        q_row + query.to(tl.int64)[:, None] * q_n + dim[None, :],
        mask=is_query[:, None] & in_dim[None, :],
        other=0.0,
    )
    kv_head = head // group
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

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    k_row = k_ptr + batch * k_b + kv_head * k_h
    v_row = v_ptr + batch * v_b + kv_head * v_h
    whole = real // N * N
    if CAUSAL and not HAS_ORDER:
        # Up to here every query sees every key, and nothing is compared.
        least = tl.min(tl.where(query >= 0, position, num_keys))
        if BLOCK > 0:
            seen = count_below(index_row, real // BLOCK, (least + 1) // BLOCK, 0) * BLOCK
        else:
            seen = count_below(index_row, real, least + 1, 0)
        whole = tl.minimum(real, seen) // N * N
    for masked in tl.static_range(2):
        acc, top, total = _walk(
            whole if masked else 0,
            real if masked else whole,
            q,
            acc,
            top,
            total,
            k_row,
            v_row,
            k_n,
            v_n,
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
            CAUSAL and (HAS_ORDER or masked == 1),
            WINDOW,
            PRECISION,
            1 if masked else STAGES,
        )
    if HAS_EXTRA:
        extra_k_row = extra_k_ptr + batch * extra_b + kv_head * extra_h
        extra_v_row = extra_v_ptr + batch * extra_b + kv_head * extra_h
        acc, top, total = _walk(
            real,
            length,
            q,
            acc,
            top,
            total,
            extra_k_row,
            extra_v_row,
            D,
            D,
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
            PRECISION,
            STAGES,
        )

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    out_row = out_ptr + batch * out_b + head * out_h
    tl.store(
        out_row + query.to(tl.int64)[:, None] * out_n + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & in_dim[None, :],
    )
    tl.store(lse_ptr + batch * lse_b + head * lse_h + query, lse, mask=is_query)
