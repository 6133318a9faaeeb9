"""The gate before every figure: attention must agree with float64 to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

import gossamer as gs
from gossamer.plan.rows import expand, tile_queries, tile_rows

_CHECKED_TILES = 4  # per head, against the float64 reference
_CHECKED_QUERIES = 128  # per head, of dense attention
# A row of few keys in bfloat16 is further from float64 than dense attention is, by its rounding.
_ALLOWED = 2.0


def error_bound(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return how far attention may stand from float64, relative: twice what dense attention does.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
    """
    q, k, v = q[:, :1, :_CHECKED_QUERIES], k[:, :1, :4096], v[:, :1, :4096]
    got = functional.scaled_dot_product_attention(q, k, v).double()
    want = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return _ALLOWED * float((got - want).norm() / want.norm()) + torch.finfo(q.dtype).eps


def check_kernel(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: gs.SparsePlan,
    bound: float,
    *,
    call: Callable[[], Tensor] | None = None,
) -> float:
    """Return the relative error on some tiles of every head, or refuse.

    Args:
        kernel: The kernel's name.
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        plan: What it runs.
        bound: The greatest error allowed, as `error_bound` returns it.
        call: What returns [B, H, N, D] where the kernel is not one of Gossamer's.

    Raises:
        ArithmeticError: The error is above the bound, or no number.
    """
    batch, heads, _, dim = q.shape
    tiles = torch.linspace(0, plan.num_tiles - 1, _CHECKED_TILES, device=q.device).long()
    some = replace(
        plan,
        query_index=tile_queries(plan)[:, :, tiles].int(),
        tile_row=tile_rows(plan)[:, :, tiles].int(),
        launch_order=None,
    )
    queries = expand(tile_queries(some), batch, heads).flatten(2).long()  # [B, H, n]
    at = queries.clamp(min=0)[..., None].expand(-1, -1, -1, dim)
    is_real = queries >= 0
    want = gs.attend(q, k, v, some, kernel="reference").out.gather(2, at)[is_real].double()
    out = gs.attend(q, k, v, plan, kernel=kernel).out if call is None else call()
    got = out.gather(2, at)[is_real].double()
    error = float((got - want).norm() / want.norm())
    if not error <= bound:
        raise ArithmeticError(f"{kernel}: relative error {error:.3g} is above {bound:.3g}")
    return error


def check_dense(
    name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> float:
    """Return the relative error of dense attention on some queries of every head, or refuse.

    Args:
        name: What made it.
        out: [B, H, N, D] its output.
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        causal: Query i sees key j iff j <= i; needs N = S.

    Raises:
        ArithmeticError: The error is above `error_bound`, or no number.
    """
    group = q.shape[1] // k.shape[1]
    step = max(1, q.shape[2] // _CHECKED_QUERIES)
    some, got = q[:, :, ::step], out[:, :, ::step].double()
    mask = None
    if causal:
        position = torch.arange(0, q.shape[2], step, device=q.device)[:, None]
        mask = torch.arange(k.shape[2], device=q.device) <= position
    heads: list[Tensor] = []
    for head in range(q.shape[1]):  # one at a time: float64 keys of all heads take gigabytes
        at = slice(head // group, head // group + 1)
        query, key, value = (x.double() for x in (some[:, head : head + 1], k[:, at], v[:, at]))
        one = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        heads.append(one)
    want = torch.cat(heads, dim=1)
    error, bound = float((got - want).norm() / want.norm()), error_bound(q, k, v)
    if not error <= bound:
        raise ArithmeticError(f"{name}: relative error {error:.3g} is above {bound:.3g}")
    return error
