"""What the Triton kernels are launched with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.strides import dense_rows, shared_strides, virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.visible import padded_sinks

_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_MIN_DOT = 16  # the least side of a matrix product on tensor cores
_BESIDE = 1024  # bytes of shared memory for what is exchanged between threads


def forward_configuration(
    tile: int, dim: int, dtype: torch.dtype, *, blocks: bool, hides: bool, memory: int | None
) -> dict[str, int] | None:
    """Return rows per program, keys per step, warps and stages; None where nothing fits.

    Args:
        tile: Queries per tile.
        dim: Head dim.
        dtype: Of queries, keys and values.
        blocks: Whether the rows list blocks of which neither causality nor a window hides anything.
        hides: Whether any step may hide keys from some of its queries, as those of a window do.
        memory: Bytes of shared memory that a program may hold; None for no limit.
    """
    width = max(_MIN_DOT, up_to_power_of_2(dim))
    for most, keys, warps, stages in _shapes(tile, dim, dtype, blocks=blocks):
        rows = _side(up_to_power_of_2(tile), most)
        held = (rows + 2 * stages * keys) * width * dtype.itemsize + _BESIDE
        held += 2 * keys * width if hides else 0  # which values are not finite, a product's operand
        if memory is None or held <= memory:
            configuration = {"M": rows, "N": keys, "num_warps": warps, "STAGES": stages}
            if memory is not None and warps == 8 and 2 * held <= memory and not torch.version.hip:
                configuration["maxnreg"] = 128  # so that two programs share a multiprocessor
            return configuration
    return None


def _shapes(
    tile: int, dim: int, dtype: torch.dtype, *, blocks: bool
) -> list[tuple[int, int, int, int]]:
    """Return most rows, keys per step, warps and stages to choose from, the fastest first.

    On an H200, 12 heads of 75,600 tokens, D = 128, bfloat16, density .1, in ms: single keys 7.3
    with (128, 128, 8, 3), 8.2 with (128, 64, 8, 2) and 9.5 with (128, 64, 4, 2); blocks 6.4 with
    (128, 64, 8, 2), of which two programs fit, and 7.2 with (128, 128, 8, 3). Tiles of 64 queries
    .47 with (64, 64, 4, 3), .57 with (64, 64, 4, 2) and .62 with (64, 128, 4, 3). Hiding keys takes
    more registers than two programs leave. Above 128 and in float32 nothing was measured. The later
    ones are for less memory.
    """
    if dtype == torch.float32:
        if dim > 128:
            return [(64, 32, 4, 2), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]
        return [(128, 32, 4, 2), (64, 32, 4, 2), (64, 16, 4, 1), (16, 16, 4, 1)]
    if dim > 128:
        return [(128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 1), (16, 16, 4, 1)]
    if tile <= 64:
        return [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (16, 16, 4, 1)]
    large, two = (128, 128, 8, 3), (128, 64, 8, 2)
    first = [two, large] if blocks and dim > 64 else [large, (128, 128, 8, 2), two]
    return [*first, (128, 32, 4, 2), (64, 16, 4, 1), (16, 16, 4, 1)]


def queries_configuration(tile: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return rows per program, keys per step, warps and stages of `backward_queries`.

    Chosen by registers and shared memory, not measured.
    """
    rows = up_to_power_of_2(tile)
    if dtype == torch.float32:
        return {
            "M": _side(rows, 32),
            "N": 32 if dim <= 128 else 16,
            "num_warps": 8,
            "num_stages": 1,
        }
    if dim > 128:
        return {"M": _side(rows, 64), "N": 32, "num_warps": 8, "num_stages": 1}
    return {"M": _side(rows, 128), "N": 64, "num_warps": 8 if tile > 64 else 4, "num_stages": 2}


def keys_configuration(block: int, tile: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return rows per step, keys per program, warps and stages of `backward_keys`.

    Chosen by registers and shared memory, not measured.
    """
    rows, keys = up_to_power_of_2(tile), up_to_power_of_2(block)
    if dtype == torch.float32:
        return {"M": _side(rows, 16), "N": _side(keys, 32), "num_warps": 8, "num_stages": 1}
    if dim > 128:
        return {"M": _side(rows, 32), "N": _side(keys, 64), "num_warps": 8, "num_stages": 1}
    # At D = 128 the two sums of 128 keys leave registers for 32 rows, and not for 64.
    most = 64 if dim <= 64 else 32
    warps = 8 if block > 32 else 4
    return {"M": _side(rows, most), "N": _side(keys, 128), "num_warps": warps, "num_stages": 2}


def _side(wanted: int, most: int) -> int:
    """Return a side of a matrix product: as large as wanted where tensor cores and `most` allow."""
    return max(_MIN_DOT, min(wanted, most))


def call_arguments(plan: SparsePlan, strided: dict[str, Tensor]) -> dict[str, Any]:
    """Return what all kernels take: tensors and strides, sizes, and what is known when compiling.

    Args:
        plan: The plan.
        strided: Tensors [B, H, N, D] or [B, H, N] that the kernel takes strides of, by their names
            there; q and k are among them. The last axis is dense.
    """
    q, k = strided["q"], strided["k"]
    valid = plan.key_valid
    keys = plan.keys
    order = dense_rows(keys.key_order) if isinstance(keys, KeyBlocks) else None
    dim = q.shape[-1]
    left, right, sink = plan.window or (-1, -1, 0)
    sinks = padded_sinks(plan)
    arguments: dict[str, Any] = {
        **{f"{name}_ptr": x for name, x in strided.items()},
        "query_index_ptr": dense_rows(plan.query_index),
        "key_order_ptr": order,
        "key_valid_ptr": None if valid is None else valid.contiguous().view(torch.uint8),
        "valid_b": 0 if valid is None or valid.shape[0] == 1 else valid.shape[1],
        "num_queries": plan.num_queries,
        "num_keys": plan.num_keys,
        "num_places": plan.num_keys if order is None else order.shape[-1],
        "num_tiles": plan.num_tiles,
        "num_heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "left": left,
        "right": right,
        "sink": sink,
        "sink_ptr": sinks,
        "sink_b": shared_strides(sinks)[0],
        "TILE": plan.tile,
        "D": dim,
        "DP": max(_MIN_DOT, up_to_power_of_2(dim)),
        "BLOCK": keys.block if isinstance(keys, KeyBlocks) else 0,
        "HAS_QUERIES": plan.query_index is not None,
        "HAS_ORDER": order is not None,
        "HAS_VALID": valid is not None,
        "CAUSAL": plan.causal,
        "WINDOW": plan.window is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": True,  # the default changes with Triton 3.10
    }
    for name, x in strided.items():
        arguments |= {f"{name}_{a}": n for a, n in zip("bhn", x.stride()[:-1], strict=False)}
    return arguments | _shared("query", arguments["query_index_ptr"]) | _shared("order", order)


def row_arguments(plan: SparsePlan, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return what kernels take that walk the key rows of query tiles."""
    keys = plan.keys
    blocks = isinstance(keys, KeyBlocks)
    order = keys.key_order if blocks else None
    index = keys.index.contiguous()
    start = None if blocks else dense_rows(keys.start)
    count, tile_row = dense_rows(keys.count), dense_rows(plan.tile_row)
    launch = dense_rows(plan.launch_order)
    log_weight = None if blocks else keys.log_weight
    extra_k, extra_v = virtual_keys(keys, k.dtype)
    return {
        "extra_k_ptr": extra_k,
        "extra_v_ptr": extra_v,
        "tile_row_ptr": tile_row,
        "launch_ptr": launch,
        "start_ptr": start,
        "count_ptr": count,
        "index_ptr": index,
        "log_weight_ptr": log_weight,
        **_shared("extra", extra_k),
        **_shared("tile", tile_row),
        **_shared("launch", launch),
        **_shared("start", start),
        **_shared("count", count),
        **_shared("index", index if blocks else None),
        "index_r": index.shape[-1] if blocks else 0,
        "WIDE": plan.num_keys * max(k.stride(2), v.stride(2)) >= _WIDE,
        "RAGGED": blocks and order is None and plan.num_keys % keys.block != 0,
        "HAS_ROWS": tile_row is not None,
        "HAS_LAUNCH": launch is not None,
        "HAS_WEIGHTS": log_weight is not None,
        "HAS_EXTRA": extra_k is not None,
    }


def up_to_power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _shared(name: str, x: Tensor | None) -> dict[str, int]:
    """Return the batch and head strides of `x` by their names in the kernel."""
    return dict(zip((f"{name}_b", f"{name}_h"), shared_strides(x), strict=True))
