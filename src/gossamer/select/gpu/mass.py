"""Exact softmax mass on a GPU: full attention with its log-sum-exp, then sums of probabilities.

The mass of N queries and S keys takes a second product Q K^T, 2 N S D operations, half of
attention's, and N S exponentials. At 12 heads x 75,600 tokens x 128 that is 17.6 TFLOP, 22 ms of an
H200's tensor cores at 790 TFLOP/s, and 68.6 G exponentials, 18.5 ms of its special function units
at 16 a clock and multiprocessor: neither hides behind the other unless programs share a
multiprocessor. At the 450 TFLOP/s that other Triton kernels reach here it is 39 ms.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913, C901 -- a kernel takes flat arguments, its types are Triton's,
# and a branch at compile time is not one at run time

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256
MAX_TILE = 256
_LOG2_E = 1.4426950408889634
_MIN_DOT = 16  # the least side of a matrix product on tensor cores
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_PLAIN = ("num_tiles", "num_heads", "group")  # one compilation, whether they are 1 or 16
_ROWS = 128  # queries per program of full attention
_SPAN = 8192  # keys per program of the mass: many programs, so that the last wave costs little


class Sight(NamedTuple):
    """What queries see.

    Attributes:
        scale: Factor on the logits.
        causal: Query i sees key j iff j <= i + S - N.
        key_valid: [B|1, S] bool, False for padded keys and, where N = S, queries; None for none.
    """

    scale: float
    causal: bool = False
    key_valid: Tensor | None = None


class Some(NamedTuple):
    """Tiles whose mass is computed together.

    Attributes:
        batch: [n] int64, batch row of each tile.
        head: [n] int64, query head of each tile.
        query: [n, tile] int64, the queries, -1 for none.
    """

    batch: Tensor
    head: Tensor
    query: Tensor


@triton.jit
def _load_rows(row, at, stride, mask, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of D elements; without predicates where nothing is masked, as they cost time."""
    dim = tl.arange(0, DP)
    pointer = row + at[:, None] * stride + dim[None, :]
    if MASKED and D != DP:
        return tl.load(pointer, mask=mask[:, None] & (dim < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointer, mask=mask[:, None], other=0.0)
    elif D != DP:
        return tl.load(pointer, mask=(dim < D)[None, :], other=0.0)
    else:
        return tl.load(pointer)


@triton.jit(do_not_specialize=_PLAIN)
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    valid_ptr,
    out_ptr,
    lse_ptr,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    valid_b,
    num_queries,
    num_keys,
    num_tiles,
    num_heads,
    group,  # query heads per KV head
    scale,  # times log2(e)
    M: tl.constexpr,  # queries per program
    N: tl.constexpr,  # keys per step
    D: tl.constexpr,
    DP: tl.constexpr,  # D, a power of two
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
    SQUARE: tl.constexpr,  # whether padded keys are padded queries too
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to all visible keys: log-sum-exp and, where values are given, the output.

    Both are written densely, [B, H, N] and [B, H, N, D], in float32.
    """
    HAS_V: tl.constexpr = v_ptr is not None
    HAS_VALID: tl.constexpr = valid_ptr is not None
    program = tl.program_id(0)
    tile = program % num_tiles
    if CAUSAL:  # long tiles first
        tile = num_tiles - 1 - tile
    line = (program // num_tiles).to(tl.int64)
    head = line % num_heads
    batch = line // num_heads
    query = tile * M + tl.arange(0, M)
    counted = query < num_queries
    if HAS_VALID:
        valid_row = valid_ptr + batch * valid_b
        if SQUARE:
            counted = counted & (tl.load(valid_row + query, mask=counted, other=0) != 0)
    dim = tl.arange(0, DP)
    q = _load_rows(q_ptr + batch * q_b + head * q_h, query.to(tl.int64), q_n, counted, D, DP, True)
    k_row = k_ptr + batch * k_b + head // group * k_h
    if HAS_V:
        v_row = v_ptr + batch * v_b + head // group * v_h
    position = query + num_keys - num_queries
    stop = num_keys
    whole = num_keys // N * N
    if CAUSAL:
        last = tile * M + M - 1 + num_keys - num_queries
        stop = tl.maximum(tl.minimum(num_keys, last + 1), 0)
        # Up to here all queries of the tile see all keys.
        whole = tl.maximum(tl.minimum(num_keys, last - M + 2), 0) // N * N
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, stop if masked else whole, N):
            key = start + tl.arange(0, N)
            read = key < stop
            if HAS_VALID:
                read = read & (tl.load(valid_row + key, mask=read, other=0) != 0)
            at = key
            if WIDE:
                at = key.to(tl.int64)
            k = _load_rows(k_row, at, k_n, read, D, DP, masked == 1 or HAS_VALID)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if masked == 1 and CAUSAL:
                seen = read[None, :] & (key[None, :] <= position[:, None])
                logits = tl.where(seen, logits, float("-inf"))
            elif masked == 1 or HAS_VALID:
                logits = tl.where(read[None, :], logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1))
            # A row that has seen no key yet keeps -inf, and -inf - -inf is not a number.
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(logits - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(p, 1)
            top = new_top
            if HAS_V:
                v = _load_rows(v_row, at, v_n, read, D, DP, masked == 1 or HAS_VALID)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    empty = (total == 0.0) | (counted == 0)
    total = tl.where(empty, 1.0, total)
    place = line * num_queries + query
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + place, lse, mask=query < num_queries)
    if HAS_V:
        out = tl.where(empty[:, None], 0.0, acc / total[:, None])
        tl.store(
            out_ptr + place[:, None] * D + dim[None, :],
            out,
            mask=(query < num_queries)[:, None] & (dim < D)[None, :],
        )


@triton.jit(do_not_specialize=_PLAIN)
def _sum_mass(
    q_ptr,
    k_ptr,
    lse_ptr,
    batch_ptr,
    head_ptr,
    query_ptr,
    valid_ptr,
    mass_ptr,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    valid_b,
    num_queries,
    num_keys,
    num_tiles,
    num_heads,
    group,  # query heads per KV head
    span,  # keys per program, a multiple of N
    scale,  # times log2(e)
    TILE: tl.constexpr,  # queries per tile
    M: tl.constexpr,  # the same, a power of two
    N: tl.constexpr,  # keys per step
    D: tl.constexpr,
    DP: tl.constexpr,  # D, a power of two
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the probabilities of some keys over the queries of one tile.

    The product is K Q^T, keys by queries: a key's sum then lies in the registers of four threads,
    and the log-sum-exps, one a column, stay in registers too.
    """
    HAS_VALID: tl.constexpr = valid_ptr is not None
    program = tl.program_id(0)
    item = program % num_tiles  # tiles side by side read the same keys at the same time
    begin = program // num_tiles * span
    end = tl.minimum(begin + span, num_keys)
    batch = tl.load(batch_ptr + item)
    head = tl.load(head_ptr + item)
    lane = tl.arange(0, M)
    place = item.to(tl.int64) * TILE + lane
    query = tl.load(query_ptr + place, mask=lane < TILE, other=-1)
    row = (batch * num_heads + head) * num_queries
    lse = tl.load(lse_ptr + row + query, mask=query >= 0, other=float("-inf"))
    # A query that sees nothing, or that does not count, gives exp(0 - inf) = 0.
    counted = lse > float("-inf")
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    q = _load_rows(q_ptr + batch * q_b + head * q_h, query, q_n, counted, D, DP, True)
    q = tl.trans(q)  # [DP, M]
    k_row = k_ptr + batch * k_b + head // group * k_h
    mass_row = mass_ptr + item.to(tl.int64) * num_keys
    if HAS_VALID:
        valid_row = valid_ptr + batch * valid_b
    stop = end
    whole = begin + (end - begin) // N * N
    position = query
    if CAUSAL:
        position = tl.where(query >= 0, query + num_keys - num_queries, -1)
        least = tl.min(tl.where(query >= 0, position, num_keys - 1), 0)
        stop = tl.maximum(tl.minimum(end, tl.max(position, 0).to(tl.int32) + 1), begin)
        below = tl.maximum(tl.minimum(end, least.to(tl.int32) + 1), begin)
        whole = begin + (below - begin) // N * N
        position = position.to(tl.int32)
    for masked in tl.static_range(2):
        for start in range(whole if masked else begin, stop if masked else whole, N):
            key = start + tl.arange(0, N)
            read = key < stop
            if HAS_VALID:
                read = read & (tl.load(valid_row + key, mask=read, other=0) != 0)
            at = key
            if WIDE:
                at = key.to(tl.int64)
            k = _load_rows(k_row, at, k_n, read, D, DP, masked == 1 or HAS_VALID)
            logits = tl.dot(k, q, input_precision=PRECISION)  # [N, M]
            p = tl.exp2(logits * scale - lse[None, :])
            if masked == 1 and CAUSAL:
                p = tl.where(key[:, None] <= position[None, :], p, 0.0)
            mass = tl.sum(p, 1)
            if HAS_VALID:
                mass = tl.where(read, mass, float("-inf"))
            if masked == 1:
                tl.store(mass_row + key, mass, mask=key < stop)
            else:
                tl.store(mass_row + key, mass)
    if CAUSAL:
        for start in range(stop, end, N):
            key = start + tl.arange(0, N)
            tl.store(mass_row + key, key * 0.0 + float("-inf"), mask=key < end)


def full_attention(
    q: Tensor, k: Tensor, v: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor | None]:
    """Return log-sum-exp [B, H, N] and output [B, H, N, D] of full attention, in float32.

    The output, where it is asked for, is cuDNN's where that has the mask: on an H200 it is the
    faster one (580 TFLOP/s against 450), and its log-sum-exp costs nothing. For the log-sum-exp
    alone a pass without values is cheaper, as half the work.

    Args:
        q: [B, H, N, D] bfloat16, float16 or float32.
        k: [B, Hk, S, D].
        v: [B, Hk, S, D]; None for no output.
        sight: What queries see. Queries that see no key, or are padded, get -inf and 0.
    """
    if v is not None and _takes_cudnn(q, k, v, sight):
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, sight.causal, False, scale=sight.scale
        )[:2]
        return lse.reshape(q.shape[:3]), out.float()  # some versions keep an axis of 1
    batch, heads, num_queries, dim = q.shape
    q, k = _with_unit_stride(q), _with_unit_stride(k)
    v = None if v is None else _with_unit_stride(v)
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    out = None if v is None else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    valid = _bytes(sight.key_valid)
    num_keys, num_tiles = k.shape[2], triton.cdiv(num_queries, _ROWS)
    if programs := batch * heads * num_tiles:
        kernel: Any = _attend  # Triton's types do not know that it takes a grid
        kernel[(programs,)](
            *(q, k, v, valid, out, lse),
            *(*q.stride()[:3], *k.stride()[:3], *(k if v is None else v).stride()[:3]),
            0 if valid is None or valid.shape[0] == 1 else valid.shape[1],
            *(num_queries, num_keys, num_tiles, heads, heads // k.shape[1]),
            sight.scale * _LOG2_E,
            M=_ROWS,
            D=dim,
            WIDE=num_keys * max(k.stride(2), 0 if v is None else v.stride(2)) >= _WIDE,
            SQUARE=num_queries == num_keys,
            CAUSAL=sight.causal,
            **_shared(q),
            **attend_configuration(dim, q.dtype, has_values=v is not None),
        )
    return lse, out


def tile_mass(q: Tensor, k: Tensor, lse: Tensor, some: Some, sight: Sight) -> Tensor:
    """Return the mass of every key for some tiles, [n, S] float32.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        lse: [B, H, N] float32 log-sum-exp over all that each query sees, -inf for queries that add
            nothing.
        some: The tiles.
        sight: What queries see.

    Returns:
        The sums of probabilities; -inf for padded keys and, where causal, for those behind the
        tile's last query.
    """
    q, k = _with_unit_stride(q), _with_unit_stride(k)
    number, tile = some.query.shape
    heads, num_queries, dim = q.shape[1:]
    num_keys = k.shape[2]
    valid = _bytes(sight.key_valid)
    mass = torch.empty(number, num_keys, dtype=torch.float32, device=q.device)
    if number and num_keys:
        kernel: Any = _sum_mass
        kernel[(number * triton.cdiv(num_keys, _SPAN),)](
            *(q, k, lse.contiguous()),
            *(some.batch.contiguous(), some.head.contiguous(), some.query.contiguous()),
            *(valid, mass, *q.stride()[:3], *k.stride()[:3]),
            0 if valid is None or valid.shape[0] == 1 else valid.shape[1],
            *(num_queries, num_keys, number, heads, heads // k.shape[1], _SPAN),
            sight.scale * _LOG2_E,
            TILE=tile,
            M=max(_MIN_DOT, triton.next_power_of_2(tile)),
            D=dim,
            WIDE=num_keys * k.stride(2) >= _WIDE,
            CAUSAL=sight.causal,
            **_shared(q),
            **mass_configuration(tile, dim, q.dtype),
        )
    return mass


def attend_configuration(dim: int, dtype: torch.dtype, *, has_values: bool) -> dict[str, int]:
    """Return keys per step, warps and stages of full attention.

    The output of 128 queries takes the registers of 8 warps; without it 4 are enough, and three
    programs fit a multiprocessor.
    """
    if dtype == torch.float32 or dim > 128:
        return {"N": 32, "num_warps": 8, "num_stages": 2}
    return {"N": 64, "num_warps": 8 if has_values else 4, "num_stages": 2}


def mass_configuration(tile: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return keys per step, warps and stages of the mass.

    Chosen so that several programs fit a multiprocessor, as each alone waits for its product before
    it takes exponentials; not yet measured.
    """
    if dtype == torch.float32 or dim > 128:
        return {"N": 32, "num_warps": 4, "num_stages": 2}
    return {"N": 64, "num_warps": 8 if tile > 128 else 4, "num_stages": 2}


def _shared(q: Tensor) -> dict[str, Any]:
    """Return what both kernels are compiled with."""
    return {
        "DP": max(_MIN_DOT, triton.next_power_of_2(q.shape[-1])),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": True,  # the default changes with Triton 3.10
    }


def _with_unit_stride(x: Tensor) -> Tensor:
    """Return the tensor with neighbouring elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(valid: Tensor | None) -> Tensor | None:
    """Return a mask as bytes in order."""
    return None if valid is None else valid.contiguous().view(torch.uint8)


def _takes_cudnn(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> bool:
    """Return whether cuDNN computes exactly this attention."""
    if q.device.type != "cuda" or torch.version.cuda is None or sight.key_valid is not None:
        return False
    square = q.shape == k.shape  # causality is aligned at the other end where lengths differ
    if (sight.causal and not square) or q.shape[1] != k.shape[1] or k.shape[2] == 0:
        return False
    inputs = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, sight.causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(inputs)
