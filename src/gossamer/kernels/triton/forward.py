"""The forward kernel: one program per query tile, walking the tile's key row."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: ANN001, ANN201, PLR0913, C901, SIM102 -- a kernel takes flat arguments, its types are
# Triton's, and a branch at compile time is not one at run time

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
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
    scale,  # times log2(e)
    TILE: tl.constexpr,  # query rows per tile of the plan
    M: tl.constexpr,  # the same, a power of two
    N: tl.constexpr,  # keys per step
    D: tl.constexpr,  # head dim
    DP: tl.constexpr,  # the same, a power of two
    BLOCK: tl.constexpr,  # keys per block; 0: the rows list tokens
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
):
    """Attend one tile to its key row; see `kernels.triton.TritonKernel`.

    Scores and sums are float32, in base 2; address arithmetic is 64-bit. A key that is not listed,
    padded or masked for all queries is never loaded.
    """
    program = tl.program_id(0)
    slot = program % num_tiles
    head = ((program // num_tiles) % num_heads).to(tl.int64)
    batch = (program // num_tiles // num_heads).to(tl.int64)
    tile = slot
    if HAS_LAUNCH:
        tile = tl.load(launch_ptr + batch * launch_b + head * launch_h + slot)
    row = tile.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(tile_row_ptr + batch * tile_b + head * tile_h + tile).to(tl.int64)

    lane = tl.arange(0, M)
    if HAS_QUERIES:
        place = tile.to(tl.int64) * TILE + lane
        query = tl.load(
            query_index_ptr + batch * query_b + head * query_h + place, mask=lane < TILE, other=-1
        )
    else:
        query = tile * TILE + lane
        query = tl.where((lane < TILE) & (query < num_queries), query, -1)
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
    k_row = k_ptr + batch * k_b + kv_head * k_h
    v_row = v_ptr + batch * v_b + kv_head * v_h
    if HAS_EXTRA:
        extra_k_row = extra_k_ptr + batch * extra_b + kv_head * extra_h
        extra_v_row = extra_v_ptr + batch * extra_b + kv_head * extra_h
    position = query + num_keys - num_queries
    if WINDOW:
        low = tl.where(left >= 0, position - left, 0)
        high = tl.where(right >= 0, position + right, num_keys)

    count = tl.load(count_ptr + batch * count_b + head * count_h + row)
    if BLOCK > 0:
        first = batch * index_b + head * index_h + row * index_r
    else:
        first = tl.load(start_ptr + batch * start_b + head * start_h + row)
    if CAUSAL and not HAS_ORDER:
        # Rows ascend: what lies behind the tile's last position is cut off by bisection.
        last = tl.max(tl.where(is_query, position, -1))
        least = 0
        most = count
        while least < most:
            middle = (least + most) // 2
            key_at = tl.load(index_ptr + first + middle)
            if BLOCK > 0:
                key_at = key_at * BLOCK
            if key_at <= last:
                least = middle + 1
            else:
                most = middle
        count = least
    length = count
    if BLOCK > 0:
        length = count * BLOCK

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for begin in range(0, length, N):
        step = begin + tl.arange(0, N)
        listed = step < length
        if BLOCK > 0:
            block = tl.load(index_ptr + first + step // BLOCK, mask=listed, other=0)
            key = block * BLOCK + step % BLOCK
            listed = listed & (key < num_places)
            if HAS_ORDER:
                key = tl.load(
                    key_order_ptr + batch * order_b + head * order_h + key, mask=listed, other=-1
                )
                listed = listed & (key >= 0)
        else:
            key = tl.load(index_ptr + first + step, mask=listed, other=0)
        real = listed & (key < num_keys)
        if HAS_VALID:
            valid = tl.load(key_valid_ptr + batch * valid_b + key, mask=real, other=0)
            real = real & (valid != 0)
        at = key.to(tl.int64)
        k = tl.load(
            k_row + at[None, :] * k_n + dim[:, None],
            mask=real[None, :] & in_dim[:, None],
            other=0.0,
        )
        read = real
        if HAS_EXTRA:
            virtual = listed & (key >= num_keys)
            read = real | virtual
            far = (at - num_keys) * D
            k += tl.load(
                extra_k_row + far[None, :] + dim[:, None],
                mask=virtual[None, :] & in_dim[:, None],
                other=0.0,
            )
        logits = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_WEIGHTS:
            log_weight = tl.load(log_weight_ptr + first + step, mask=listed, other=0.0)
            logits += (log_weight * 1.4426950408889634)[None, :]
        seen = read[None, :]
        if CAUSAL:
            seen = seen & ((key[None, :] <= position[:, None]) | (key[None, :] >= num_keys))
        if WINDOW:
            inside = (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
            seen = seen & (inside | (key[None, :] < sink) | (key[None, :] >= num_keys))
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # A row that has seen no key yet keeps -inf, and -inf - -inf is not a number.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(
            v_row + at[:, None] * v_n + dim[None, :],
            mask=real[:, None] & in_dim[None, :],
            other=0.0,
        )
        if HAS_EXTRA:
            v += tl.load(
                extra_v_row + far[:, None] + dim[None, :],
                mask=virtual[:, None] & in_dim[None, :],
                other=0.0,
            )
        acc = acc * shrink[:, None]
        if CAUSAL or WINDOW:
            # 0 * NaN is NaN: what one query of the tile may not see must not reach it through its
            # value. Sums of values minus themselves are 0 unless one is not finite.
            if tl.sum(tl.sum(v.to(tl.float32) * 0.0, 1), 0) != 0.0:
                broken = (v.to(tl.float32) * 0.0) != 0.0  # [N, DP]
                hit = tl.dot(seen.to(tl.float32), broken.to(tl.float32), input_precision="ieee")
                acc = tl.where(hit > 0, float("nan"), acc)
                v = tl.where(broken, 0.0, v)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top

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
