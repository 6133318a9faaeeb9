"""The Triton kernel: every plan, on any GPU that Triton compiles for."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput
from gossamer.kernels.strides import dense_rows, shared_strides, virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634
_MAX_DIM = 256
_MAX_TILE = 256
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_MIN_DOT = 16  # the least side of a matrix product on tensor cores


class TritonKernel:
    """Runs every plan on CUDA and ROCm tensors, with float32 scores and sums.

    Lengths, densities and orders are run-time values: one compilation serves all of them.
    """

    name = "triton"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> list[str]:
        """Return why the kernel cannot run: no Triton, another device, dtype or size, gradients."""
        reasons: list[str] = []
        if importlib.util.find_spec("triton") is None:
            reasons.append('needs the package triton: pip install "gossamer[gpu]"')
        if q.device.type != "cuda" and not _is_interpreted():
            reasons.append(f"runs on GPU tensors, these are on {q.device}")
        if q.dtype not in _DTYPES:
            reasons.append(f"dtype {q.dtype} is not one of {', '.join(map(str, _DTYPES))}")
        if q.shape[-1] > _MAX_DIM:
            reasons.append(f"head dim {q.shape[-1]} is above {_MAX_DIM}")
        if plan.tile > _MAX_TILE:
            reasons.append(f"tile {plan.tile} is above {_MAX_TILE}")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            reasons.append("inference only; use kernel='reference' for gradients")
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan, one program per tile."""
        from gossamer.kernels.triton import forward as module

        forward: Any = module.forward  # Triton's types do not know that it takes a grid
        batch, heads, num_queries, dim = q.shape
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
        programs = batch * heads * plan.num_tiles
        if programs and num_queries:
            tensors, numbers, flags = _arguments(plan, q, k, v, out, lse)
            forward[(programs,)](
                *tensors,
                *numbers,
                scale * _LOG2_E,
                M=max(_MIN_DOT, _power_of_2(plan.tile)),
                D=dim,
                DP=max(_MIN_DOT, _power_of_2(dim)),
                enable_fp_fusion=True,  # the default changes with Triton 3.10
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                **flags,
                **_configuration(plan.tile, dim, q.dtype),
            )
        return AttentionOutput(out, lse)


def _configuration(tile: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return keys per step, warps and stages.

    128 rows x 64 keys with 4 warps and 2 stages was the fastest of the shapes tried on an H200 at
    D = 128 in bfloat16 (458 TFLOP/s; 128 keys and 8 warps 411, 32 keys 382).
    """
    if dtype == torch.float32 or dim > 128:
        return {"N": 32, "num_warps": 4, "num_stages": 2}
    return {"N": 64, "num_warps": 8 if tile > 128 else 4, "num_stages": 2}


def _arguments(
    plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[list[Tensor | None], list[int], dict[str, Any]]:
    """Return the kernel's tensors, its strides and sizes, and its compile-time flags."""
    keys = plan.keys
    blocks = isinstance(keys, KeyBlocks)
    order = keys.key_order if blocks else None
    index = keys.index.contiguous()
    start = None if blocks else keys.start
    log_weight = None if blocks else keys.log_weight
    extra_k, extra_v = virtual_keys(keys, k.dtype)
    valid = plan.key_valid
    tensors = [
        *(q, k, v, extra_k, extra_v, out, lse),
        *(dense_rows(x) for x in (plan.query_index, plan.tile_row, plan.launch_order)),
        *(dense_rows(start), dense_rows(keys.count), index, log_weight, dense_rows(order)),
        None if valid is None else valid.contiguous().view(torch.uint8),
    ]
    numbers = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared_strides(extra_k)]
    numbers += [*out.stride()[:3], *lse.stride()[:2]]
    numbers += [n for x in tensors[7:10] for n in shared_strides(x)]
    numbers += [n for x in tensors[10:12] for n in shared_strides(x)]
    numbers += [*shared_strides(index), index.shape[-1]] if blocks else [0, 0, 0]
    numbers += shared_strides(tensors[14])
    numbers += [0 if valid is None or valid.shape[0] == 1 else valid.shape[1]]
    left, right, sink = plan.window or (-1, -1, 0)
    places = plan.num_keys if order is None else order.shape[-1]
    numbers += [plan.num_queries, plan.num_keys, places, plan.num_tiles]
    numbers += [q.shape[1], q.shape[1] // k.shape[1], left, right, sink]
    flags = {
        "TILE": plan.tile,
        "BLOCK": keys.block if blocks else 0,
        "WIDE": plan.num_keys * max(k.stride(2), v.stride(2)) >= _WIDE,
        "RAGGED": blocks and places % keys.block != 0,
        "HAS_QUERIES": plan.query_index is not None,
        "HAS_ROWS": plan.tile_row is not None,
        "HAS_LAUNCH": plan.launch_order is not None,
        "HAS_WEIGHTS": log_weight is not None,
        "HAS_EXTRA": extra_k is not None,
        "HAS_ORDER": order is not None,
        "HAS_VALID": valid is not None,
        "CAUSAL": plan.causal,
        "WINDOW": plan.window is not None,
    }
    return tensors, numbers, flags


def _power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _is_interpreted() -> bool:
    """Return whether Triton interprets its kernels, which then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
