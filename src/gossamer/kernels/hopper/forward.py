"""The Hopper kernel: one producer warpgroup gathers keys, two consumer warpgroups multiply.

A program walks query tiles of 128 rows. The producer copies the tile's queries and, step by step,
the 128 keys and values that the key row lists into shared memory (cp.async, 16 bytes a thread, each
row from where the plan says it lies); each consumer owns 64 queries, keeps its scores, weights and
output in registers and multiplies on the tensor cores (wgmma). Barriers in shared memory say what
is there and what is read.

Steps follow one another across tiles: the product of the next tile's queries with its first keys
runs beside the last product with this tile's values, as the next step's does inside a tile, and
this tile's output is written meanwhile. Where each tile begins stands in a table (`places.py`), so
that nothing is looked up between two tiles.

A row is walked from its end, so that the steps that mask something (the row's end, and in causal
plans what lies behind a query) come first and all later ones mask nothing. A tile whose row is
empty takes one step that sees nothing.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, PLR0913 -- a kernel takes flat arguments, and its types are Gluon's

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gossamer.kernels.hopper.consume import consume
from gossamer.kernels.hopper.produce import produce
from gossamer.kernels.hopper.walk import BIAS, HALF, STEP, TILE


@gluon.jit(
    do_not_specialize=[
        "num_queries",
        "num_keys",
        "num_tiles",
        "num_heads",
        "group",
        "total",
        "lse_b",
        "lse_h",
        "query_b",
        "query_h",
        "order_b",
        "order_h",
        "valid_b",
        "left",
        "right",
        "sink",
        "sink_b",
        "row_b",
        "row_h",
        "col_h",
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
    table_ptr,  # of `places.py`
    claimed_ptr,  # how many launch slots are claimed, by programs that ran
    index_ptr,
    weight_ptr,
    order_ptr,
    valid_ptr,
    sink_ptr,  # where padding moves the ends of sinks
    k_desc,  # K and V as matrices, for bulk copies of blocks; None where each key is copied
    v_desc,
    # Of those matrices: rows from one batch row or KV head to the next, columns from one KV head.
    row_b,
    row_h,
    col_h,
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
    order_b,
    order_h,
    valid_b,
    sink_b,
    num_queries,
    num_keys,
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
    SAME_STRIDE: gl.constexpr,  # of keys and of values
    HAS_WEIGHTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Attend tiles to their key rows; see `kernels.hopper.HopperKernel`."""
    HIDES: gl.constexpr = CAUSAL or WINDOW or order_ptr is not None or valid_ptr is not None
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * BIAS, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    single: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    spread: gl.constexpr = gl.BlockedLayout([1, BIAS], [32, 1], [4, 1], [1, 0])
    ones = k_ptr
    if HAS_WEIGHTS:
        # Times a step's weights in three columns, these give the weights of every query.
        column = gl.arange(0, BIAS, gl.SliceLayout(0, spread))[None, :]
        value = gl.where(column < 3, 1.0, gl.zeros([HALF, BIAS], gl.float32, spread))
        ones = gl.allocate_shared_memory(dtype, [HALF, BIAS], narrow)
        ones.store(value.to(dtype))
        fence_async_shared()
    smem = (
        gl.allocate_shared_memory(dtype, [2, TILE, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, STEP, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, STEP, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES if HAS_WEIGHTS else 1, STEP, BIAS], narrow),
        ones,
        gl.allocate_shared_memory(gl.int32, [STEP // (D // 8), D // 8], flat),
        gl.allocate_shared_memory(gl.int32, [STAGES if HIDES else 1, STEP], single),
    )
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    # Full: the copies of each of the producer's threads are there. Empty: both consumers have read.
    for stage in gl.static_range(2):
        mbarrier.init(q_full.index(stage), count=128)
        mbarrier.init(q_empty.index(stage), count=256)
        mbarrier.init(s_full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=256)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(v_empty.index(stage), count=256)
        mbarrier.init(w_full.index(stage), count=1)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, w_full, s_full)
    q = (q_ptr, q_b, q_h, q_n)
    k = (k_ptr, k_b, k_h, k_n)
    v = (v_ptr, v_b, v_h, v_n)
    extra = (extra_k_ptr, extra_v_ptr, extra_b, extra_h)
    bulk = (k_desc, v_desc, row_b, row_h, col_h)
    out = (out_ptr, out_b, out_h, out_n)
    lse = (lse_ptr, lse_b, lse_h)
    query = (query_ptr, query_b, query_h)
    order = (order_ptr, order_b, order_h)
    valid = (valid_ptr, valid_b)
    sizes = (num_tiles, num_heads)
    window = (left, right, sink)
    sinks = (sink_ptr, sink_b)
    walk = (query, order, valid, index_ptr, table_ptr, sizes, total, num_queries, num_keys)
    slots = (gl.allocate_shared_memory(gl.int32, [2, 1], single), claimed_ptr)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    smem,
                    bars,
                    out,
                    lse,
                    walk,
                    slots,
                    window,
                    scale,
                    D,
                    STAGES,
                    HAS_WEIGHTS,
                    CAUSAL,
                    WINDOW,
                    k_desc is not None,
                    gl.constexpr(0),
                ),
            ),
            (
                consume,
                (
                    smem,
                    bars,
                    out,
                    lse,
                    walk,
                    slots,
                    window,
                    scale,
                    D,
                    STAGES,
                    HAS_WEIGHTS,
                    CAUSAL,
                    WINDOW,
                    k_desc is not None,
                    gl.constexpr(1),
                ),
            ),
            (
                produce,
                (
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
                    D,
                    BLOCK,
                    STAGES,
                    WIDE,
                    SAME_STRIDE,
                    HIDES,
                    CAUSAL,
                    WINDOW,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
