"""The gradients of queries, keys and values through Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.base import BackwardInput
from gossamer.kernels.transposed import list_tiles
from gossamer.kernels.triton.launch import (
    call_arguments,
    keys_configuration,
    queries_configuration,
    row_arguments,
)
from gossamer.plan import KeyBlocks, SparsePlan

_LEAST_BLOCK = 16  # keys: products of fewer are mostly padding


def reasons_against(plan: SparsePlan, group: int) -> list[str]:
    """Return why the gradients of a plan are refused.

    Args:
        plan: The plan.
        group: Query heads per KV head.
    """
    reasons: list[str] = []
    keys = plan.keys
    if not isinstance(keys, KeyBlocks):
        parts = (keys.log_weight, keys.extra_k, keys.extra_v)
        if any(x is not None and x.requires_grad for x in parts):
            reasons.append("weights and virtual keys that require gradients are constants to it")
    strict = torch.are_deterministic_algorithms_enabled()
    strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict and not _by_blocks(plan, group):
        reasons.append(
            f"gradients of keys that are not read in blocks of {_LEAST_BLOCK} or more are summed "
            "in no fixed order, which torch.use_deterministic_algorithms forbids"
        )
    return reasons


def differentiate(
    given: BackwardInput, plan: SparsePlan, scale: float, *, of_keys: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v.

    Those of keys are sums over the tiles that read them. Where blocks are listed, each block is one
    program's, which walks the transposed lists: the same bits in every run. Single tokens are
    read by too few queries at a time for that: theirs are summed by atomics, in two float32 tensors
    of k's shape.

    Args:
        given: What the forward pass took and returned, and the gradients of that.
        plan: What the forward pass ran.
        scale: Its factor on the logits.
        of_keys: Whether those of keys and values are wanted; None is returned otherwise.
    """
    from gossamer.kernels.triton import backward

    queries, keys = (getattr(backward, f"backward_{of}") for of in ("queries", "keys"))
    out, lse, d_lse = given.out, given.lse, given.d_lse
    q, k, v, d_out = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (given.q, given.k, given.v, given.d_out)
    )
    batch, heads, num_queries, dim = q.shape
    group = heads // k.shape[1]
    by_blocks = of_keys and _by_blocks(plan, group)
    d_q = torch.empty_like(out)
    d_k = d_v = None
    if of_keys:
        # Every key stands in one block, which writes it.
        make, dtype = (torch.empty, k.dtype) if by_blocks else (torch.zeros, torch.float32)
        d_k, d_v = (make(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    delta = torch.empty_like(lse)
    arguments = call_arguments(plan, {"q": q, "k": k, "v": v, "d_out": d_out})
    arguments |= {"lse_ptr": lse, "delta_ptr": delta, "d_k_ptr": d_k, "d_v_ptr": d_v}
    arguments["scale"] = scale
    if tiles := batch * heads * plan.num_tiles * min(num_queries, 1):
        configuration = queries_configuration(plan.tile, dim, q.dtype)
        queries[(tiles * -(-plan.tile // configuration["M"]),)](
            **arguments,
            **row_arguments(plan, k, v),
            **configuration,
            out_ptr=out,
            d_q_ptr=d_q,
            d_lse_ptr=None if d_lse is None else d_lse.float().contiguous(),
            HAS_D_LSE=d_lse is not None,
            ADD=of_keys and not by_blocks,
        )
    if by_blocks and isinstance(plan.keys, KeyBlocks) and k.numel():
        block = plan.keys.block
        configuration = keys_configuration(block, plan.tile, dim, q.dtype)
        lists = list_tiles(plan, plan.keys)
        num_blocks = lists.num_tiles.shape[-1]
        programs = batch * k.shape[1] * num_blocks * -(-block // configuration["N"])
        keys[(programs,)](
            **arguments,
            **configuration,
            **lists.arguments(),
            num_blocks=num_blocks,
        )
    if d_k is None or d_v is None:
        return d_q, None, None
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def _by_blocks(plan: SparsePlan, group: int) -> bool:
    """Return whether a block of keys is the same keys to all heads that read it, and large enough.

    An order per query head makes other blocks for each head of a group.
    """
    keys = plan.keys
    if not isinstance(keys, KeyBlocks) or keys.block < _LEAST_BLOCK:
        return False
    return keys.key_order is None or group == 1 or keys.key_order.shape[1] == 1
