"""The Hopper kernel: plans with tiles of 128 queries on an H100 or H200, by Triton's Gluon."""

from __future__ import annotations

import importlib.metadata
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, with_positive_scale
from gossamer.kernels.hopper.bulk import bulk_matrices
from gossamer.kernels.strides import dense_rows, shared_strides, virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.visible import padded_sinks

_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = (64, 128)
_TILE = 128
_ARCH = (9, 0)
_TRITON = (3, 6)
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_LEAST_SCALE = 2.0**-20
_ALIGNED = 16  # elements: what rows are copied by, as the compiler proves it
# Per thread of the producer and of the consumers: 128 x (72 + 2 x 216) of 65,536.
_REGISTERS = {"PRODUCER_REGISTERS": 72, "CONSUMER_REGISTERS": 216}


class HopperKernel:
    """Runs plans on Hopper's tensor cores, with float32 scores and sums.

    Rows of single keys, blocks of any size and virtual keys go the same way: the keys are gathered
    into steps of 128. Lengths, densities and orders are run-time values.

    A value that is not finite, listed for a tile of a causal or windowed plan and hidden from some
    of its queries, spreads to all of the tile's queries: they weigh it by 0.
    """

    name = "hopper"

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return why the kernel cannot run: no Gluon, another GPU, dtype, head dim or tile."""
        del k, v
        reasons: list[str] = []
        if not _has_gluon():
            reasons.append('needs Triton 3.6 or newer: pip install "gossamer[gpu]"')
        if q.device.type != "cuda":
            reasons.append(f"runs on Hopper GPUs, these tensors are on {q.device}")
        elif torch.cuda.get_device_capability(q.device) != _ARCH:
            name = torch.cuda.get_device_name(q.device)
            reasons.append(f"runs on Hopper GPUs (compute capability 9.0), this is {name}")
        if q.dtype not in _DTYPES:
            reasons.append(f"dtype {q.dtype} is not one of {', '.join(map(str, _DTYPES))}")
        if q.shape[-1] not in _DIMS:
            reasons.append(f"head dim {q.shape[-1]} is not one of {', '.join(map(str, _DIMS))}")
        if plan.tile != _TILE:
            reasons.append(f"tile {plan.tile} is not {_TILE}")
        if gradients:
            reasons.append("inference only; use kernel='triton' for gradients")
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan: as many programs as multiprocessors, which claim tiles one by one."""
        from gossamer.kernels.hopper import forward as module

        forward: Any = module.forward  # Triton's types do not know that it takes a grid
        batch, heads, num_queries, dim = q.shape
        q, scale = with_positive_scale(q, scale)
        q, k, v = (_aligned(x) for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
        total = batch * heads * plan.num_tiles
        keys = plan.keys
        weighted = not isinstance(keys, KeyBlocks) and keys.log_weight is not None
        if weighted:
            q, scale = _with_moderate_scale(q, scale)
        if not plan.num_keys and (isinstance(keys, KeyBlocks) or not keys.num_extra):
            out.zero_()
            lse.fill_(-math.inf)
        elif total and num_queries:
            programs = min(total, _num_multiprocessors(q.device))
            tensors, numbers = _arguments(plan, q, k, v, out, lse, programs)
            forward[(programs,)](
                *tensors,
                *numbers,
                scale,
                D=dim,
                BLOCK=keys.block if isinstance(keys, KeyBlocks) else 0,
                STAGES=_stages(dim),
                WIDE=plan.num_keys * max(k.stride(2), v.stride(2)) >= _WIDE,
                SAME_STRIDE=k.stride(2) == v.stride(2),
                HAS_WEIGHTS=weighted,
                CAUSAL=plan.causal,
                WINDOW=plan.window is not None,
                num_warps=4,
                enable_fp_fusion=True,
                **_REGISTERS,
            )
        return AttentionOutput(out, lse)


def _with_moderate_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a scale from which logarithms of weights can be divided.

    The tensor cores add them to the scores before those are scaled. Powers of two move exactly, but
    for what underflows in halves, which is nothing beside such weights.
    """
    if scale >= _LEAST_SCALE:
        return q, scale
    mantissa, exponent = math.frexp(scale)
    return q * 2.0**exponent, mantissa


def _stages(dim: int) -> int:
    """Return how many steps' keys and values are held: what fits beside the queries of two tiles.

    Three at 128, when one tile's queries were held, gained nothing.
    """
    return 2 if dim == _DIMS[1] else 4


def _arguments(
    plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, programs: int
) -> tuple[list[Any], list[int]]:
    """Return the kernel's tensors and matrices, and its strides and sizes."""
    keys = plan.keys
    blocks = isinstance(keys, KeyBlocks)
    index = keys.index.contiguous()
    order = dense_rows(keys.key_order) if blocks else None
    log_weight = None if blocks else keys.log_weight
    extra_k, extra_v = virtual_keys(keys, k.dtype)
    valid = None if plan.key_valid is None else plan.key_valid.contiguous().view(torch.uint8)
    query = dense_rows(plan.query_index)
    batch, heads = q.shape[:2]
    places = plan.num_keys if order is None else order.shape[-1]
    table, claimed = _locate_tiles(plan, (batch, heads), query, index, places, programs)
    bulk = bulk_matrices(k, v, plan)
    tensors = [q, k, v, extra_k, extra_v, out, lse, query, table, claimed, index, log_weight]
    sinks = padded_sinks(plan)
    tensors += [order, valid, sinks]
    numbers = [bulk.row_b, bulk.row_h, bulk.col_h]
    numbers += [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared_strides(extra_k)]
    numbers += [*out.stride()[:3], *lse.stride()[:2], *shared_strides(query)]
    numbers += [*shared_strides(order), *shared_strides(valid)[:1], *shared_strides(sinks)[:1]]
    numbers += [plan.num_queries, plan.num_keys, plan.num_tiles, heads, heads // k.shape[1]]
    numbers += [batch * heads * plan.num_tiles, *(plan.window or (-1, -1, 0))]
    return [*tensors, bulk.k, bulk.v], numbers


def _locate_tiles(
    plan: SparsePlan,
    shape: tuple[int, int],
    query: Tensor | None,
    index: Tensor,
    places: int,
    programs: int,
) -> tuple[Tensor, Tensor]:
    """Return where each launch slot's tile begins, and how many slots are claimed.

    [B, H, T, WIDTH] int64, see `places.py`, and [1] int32.

    Args:
        plan: The plan.
        shape: B and H.
        query: The plan's query index with dense rows.
        index: The plan's key lists, contiguous.
        places: Places of the key order of blocks, with holes.
        programs: Programs of the attention kernel.
    """
    from gossamer.kernels.hopper import places as module
    from gossamer.kernels.hopper.walk import WIDTH

    kernel: Any = module.locate_tiles
    keys = plan.keys
    blocks = isinstance(keys, KeyBlocks)
    launch, tile_row, start, count = (
        dense_rows(x)
        for x in (plan.launch_order, plan.tile_row, None if blocks else keys.start, keys.count)
    )
    rows = [launch, query, tile_row, start, count]
    table = torch.empty(*shape, plan.num_tiles, WIDTH, dtype=torch.int64, device=index.device)
    claimed = torch.empty(1, dtype=torch.int32, device=index.device)
    kernel[(math.prod(table.shape[:3]),)](
        *rows,
        index,
        table,
        claimed,
        *(n for x in rows for n in shared_strides(x)),
        *([*shared_strides(index), index.shape[-1]] if blocks else [0, 0, 0]),
        plan.num_queries,
        plan.num_keys,
        *(plan.window or (-1, -1))[:2],
        places,
        plan.num_tiles,
        shape[1],
        programs,
        WIDTH=WIDTH,
        TILE=plan.tile,
        BLOCK=keys.block if blocks else 0,
        CAUSAL=plan.causal,
        WINDOW=plan.window is not None,
        ASCENDS=not blocks or keys.key_order is None,
        HAS_VIRTUAL=not blocks and keys.num_extra > 0,
        num_warps=1,
    )
    return table, claimed


def _aligned(x: Tensor) -> Tensor:
    """Return x with dense rows that begin at multiples of 32 bytes, copied where they do not."""
    strides = x.stride()
    dense = strides[-1] == 1 and all(stride % _ALIGNED == 0 for stride in strides[:-1])
    return x if dense and x.data_ptr() % (2 * _ALIGNED) == 0 else x.contiguous().clone()


@cache
def _has_gluon() -> bool:
    """Return whether Triton is new enough, without importing it: older Gluons differ."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= _TRITON


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
