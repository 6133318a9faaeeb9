"""The Triton kernel: every plan, on any GPU that Triton compiles for."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import UnsupportedError
from gossamer.kernels.base import AttentionOutput, BackwardInput, with_positive_scale
from gossamer.kernels.triton.gradients import differentiate, reasons_against
from gossamer.kernels.triton.launch import call_arguments, forward_configuration, row_arguments
from gossamer.plan import KeyBlocks, SparsePlan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634
_MAX_DIM = 256
_MAX_TILE = 256


class TritonKernel:
    """Runs every plan on CUDA and ROCm tensors, with float32 scores and sums.

    Lengths, densities and orders are run-time values: one compilation serves all of them. Output
    and log-sum-exp have gradients of q, k and v; weights and virtual keys are constants.
    """

    name = "triton"

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return why the kernel cannot run: no Triton, another device, dtype or size, gradients."""
        del v
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
        if not reasons and _configuration(q, plan) is None:
            reasons.append(
                f"tiles of {plan.tile} queries at head dim {q.shape[-1]} in {q.dtype} do not fit "
                f"the {_shared_memory(q.device)} bytes of shared memory that a program may hold"
            )
        if gradients:
            reasons += reasons_against(plan, q.shape[1] // k.shape[1])
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan, a program for each tile, or for each 128 rows of a larger one."""
        from triton.runtime.errors import OutOfResources

        from gossamer.kernels.triton import forward as module

        forward: Any = module.forward  # Triton's types do not know that it takes a grid
        batch, heads, num_queries = q.shape[:3]
        q, scale = with_positive_scale(q, scale)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
        tiles = batch * heads * plan.num_tiles
        if tiles and num_queries:
            arguments = call_arguments(plan, {"q": q, "k": k, "v": v, "out": out, "lse": lse})
            arguments |= row_arguments(plan, k, v)
            arguments |= cast("dict[str, int]", _configuration(q, plan))  # `supports` asked for it
            try:
                forward[(tiles * -(-plan.tile // arguments["M"]),)](
                    **arguments, scale=scale * _LOG2_E
                )
            except OutOfResources as error:  # what a compiler holds beside is not known before
                raise UnsupportedError(f"kernel 'triton' cannot run this: {error}") from error
        return AttentionOutput(out, lse)

    def backward(
        self, given: BackwardInput, plan: SparsePlan, scale: float, *, of_keys: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients from what the forward pass left."""
        return differentiate(given, plan, scale, of_keys=of_keys)


def _configuration(q: Tensor, plan: SparsePlan) -> dict[str, int] | None:
    """Return what the forward kernel is launched with, None where nothing fits the GPU."""
    keys = plan.keys
    ascends = not isinstance(keys, KeyBlocks) or keys.key_order is None
    masks = plan.causal or plan.window is not None
    return forward_configuration(
        plan.tile,
        q.shape[-1],
        q.dtype,
        blocks=isinstance(keys, KeyBlocks) and not masks,
        hides=plan.window is not None or (plan.causal and not ascends),
        memory=_shared_memory(q.device),
    )


@functools.cache
def _shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a program may hold; None for no limit."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # ROCm reports no larger size to opt in to.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def _is_interpreted() -> bool:
    """Return whether Triton interprets its kernels, which then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
