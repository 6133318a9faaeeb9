"""The Hopper kernel: plans with tiles of 128 queries on an H100 or H200, by Triton's Gluon."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, with_positive_scale
from gossamer.kernels.strides import dense_rows, shared_strides, virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan

_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = (64, 128)
_TILE = 128
_ARCH = (9, 0)
_TRITON = (3, 6)
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
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

    def supports(self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> list[str]:
        """Return why the kernel cannot run: no Gluon, another GPU, dtype, head dim or tile."""
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
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            reasons.append("inference only; use kernel='reference' for gradients")
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan: as many programs as multiprocessors, each walking its share of tiles."""
        from gossamer.kernels.hopper import forward as module

        forward: Any = module.forward  # Triton's types do not know that it takes a grid
        batch, heads, num_queries, dim = q.shape
        q, scale = with_positive_scale(q, scale)
        q, k, v = (_aligned(x) for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
        total = batch * heads * plan.num_tiles
        if total and num_queries:
            keys = plan.keys
            tensors, numbers = _arguments(plan, q, k, v, out, lse)
            programs = min(total, _num_multiprocessors(q.device))
            forward[(programs,)](
                *tensors,
                *numbers,
                scale,
                D=dim,
                BLOCK=keys.block if isinstance(keys, KeyBlocks) else 0,
                STAGES=_stages(dim),
                WIDE=plan.num_keys * max(k.stride(2), v.stride(2)) >= _WIDE,
                HAS_WEIGHTS=not isinstance(keys, KeyBlocks) and keys.log_weight is not None,
                CAUSAL=plan.causal,
                WINDOW=plan.window is not None,
                num_warps=4,
                enable_fp_fusion=True,
                **_REGISTERS,
            )
        return AttentionOutput(out, lse)


def _stages(dim: int) -> int:
    """Return how many steps' keys and values are held.

    Three fit at 128 and gained nothing on long rows, and lost a tenth on rows of 26 steps.
    """
    return 2 if dim == _DIMS[1] else 4


def _arguments(
    plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[list[Tensor | None], list[int]]:
    """Return the kernel's tensors, and its strides and sizes."""
    keys = plan.keys
    blocks = isinstance(keys, KeyBlocks)
    index = keys.index.contiguous()
    order = dense_rows(keys.key_order) if blocks else None
    log_weight = None if blocks else keys.log_weight
    extra_k, extra_v = virtual_keys(keys, k.dtype)
    valid = None if plan.key_valid is None else plan.key_valid.contiguous().view(torch.uint8)
    rows = [plan.query_index, plan.tile_row, plan.launch_order]
    rows += [None if blocks else keys.start, keys.count]
    query, tile_row, launch, start, count = (dense_rows(x) for x in rows)
    index_strides = [*shared_strides(index), index.shape[-1]] if blocks else [0, 0, 0]
    length, whole = None, None
    if plan.causal and order is None:
        rows = [query, tile_row, start, count]
        length, whole = _causal_bounds(plan, (q.shape[0], q.shape[1]), rows, index, index_strides)
    tensors = [q, k, v, extra_k, extra_v, out, lse, query, tile_row, launch, start, count]
    tensors += [index, log_weight, order, valid, length, whole]
    numbers = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared_strides(extra_k)]
    numbers += [*out.stride()[:3], *lse.stride()[:2]]
    numbers += [n for x in (query, tile_row, launch, start, count) for n in shared_strides(x)]
    numbers += [*index_strides, *shared_strides(order)]
    numbers += [0 if valid is None or valid.shape[0] == 1 else valid.shape[1]]
    places = plan.num_keys if order is None else order.shape[-1]
    heads = q.shape[1]
    numbers += [plan.num_queries, plan.num_keys, places, plan.num_tiles, heads]
    numbers += [heads // k.shape[1], q.shape[0] * heads * plan.num_tiles]
    return tensors, numbers + list(plan.window or (-1, -1, 0))


def _causal_bounds(
    plan: SparsePlan,
    shape: tuple[int, int],
    rows: list[Tensor | None],
    index: Tensor,
    index_strides: list[int],
) -> tuple[Tensor, Tensor]:
    """Return how many keys each tile reads and how many, in front, all its queries see.

    Both [B, H, T] int32.
    """
    from gossamer.kernels.hopper import bounds as module

    kernel: Any = module.causal_bounds
    keys = plan.keys
    length, whole = (
        torch.empty(*shape, plan.num_tiles, dtype=torch.int32, device=index.device)
        for _ in range(2)
    )
    kernel[(length.numel(),)](
        *rows,
        index,
        length,
        whole,
        *(n for x in rows for n in shared_strides(x)),
        *index_strides,
        plan.num_queries,
        plan.num_keys,
        plan.num_tiles,
        shape[1],
        TILE=plan.tile,
        BLOCK=keys.block if isinstance(keys, KeyBlocks) else 0,
        HAS_QUERIES=plan.query_index is not None,
        HAS_ROWS=plan.tile_row is not None,
        num_warps=4,
    )
    return length, whole


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
