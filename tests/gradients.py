"""Gradients of plans against the float64 reference, with a tolerance that rounding explains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import gossamer as gs
from gossamer.testing import attention

__all__ = ["check_gradients", "in_dtype", "run"]

_LOG2_E = 1.4426950408889634


def in_dtype(plan: gs.SparsePlan, dtype: torch.dtype) -> gs.SparsePlan:
    """Return the plan with its virtual keys rounded to `dtype`, as kernels read them."""
    keys = plan.keys
    if isinstance(keys, gs.KeyBlocks) or keys.extra_k is None:
        return plan
    extra = {name: getattr(keys, name).to(dtype) for name in ("extra_k", "extra_v")}
    return replace(plan, keys=replace(keys, **extra))


def run(
    tensors: tuple[Tensor, ...],
    plan: gs.SparsePlan,
    weights: tuple[Tensor, Tensor],
    kernel: str,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v of sum(out * weights[0]) + sum(lse * weights[1])."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = gs.attend(*leaves, plan, kernel=kernel, scale=scale)
    assert out.requires_grad
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * weights[0].to(out)).double().sum() + (lse * weights[1].to(lse)).double().sum()
    loss.backward()
    return tuple(leaf.grad for leaf in leaves)


def check_gradients(
    tensors: tuple[Tensor, ...],
    plan: gs.SparsePlan,
    kernel: str,
    *,
    scale: float | None = None,
    seed: int = 0,
    with_lse: bool = True,
    device: str = "cpu",
) -> None:
    """Hold a kernel's gradients of q, k and v [on the CPU] to the reference's."""
    q = tensors[0]
    plan = in_dtype(plan, q.dtype)
    generator = torch.Generator().manual_seed(seed)
    d_out = torch.randn(q.shape, generator=generator).to(q.dtype)
    d_lse = torch.randn(q.shape[:3], generator=generator) * with_lse
    there = tuple(x.to(device) for x in tensors)
    got = run(there, plan.to(device), (d_out, d_lse), kernel, scale)
    want = run(tuple(x.double() for x in tensors), plan, (d_out, d_lse), "reference", scale)
    allowed = _tolerances(tensors, plan, (d_out, d_lse), want, scale)
    for name, a, b, most in zip("qkv", got, want, allowed, strict=True):
        assert a.dtype == q.dtype
        assert a.shape == b.shape
        error = (a.cpu().double() - b).abs().max().item() if b.numel() else 0.0
        assert error <= most, f"the gradient of {name} differs by {error:.3g}, allowed {most:.3g}"


def _tolerances(
    tensors: tuple[Tensor, ...],
    plan: gs.SparsePlan,
    weights: tuple[Tensor, Tensor],
    want: tuple[Tensor, ...],
    scale: float | None,
) -> list[float]:
    """Return twice what rounding where kernels round costs, and one rounding of the largest."""
    rounded = _rounded(tensors, plan, weights, scale)
    allowed = []
    for a, b in zip(rounded, want, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0
        error = (a.double() - b).abs().max().item() if b.numel() else 0.0
        allowed.append(2 * (error + torch.finfo(tensors[0].dtype).eps * max(largest, 1.0)))
    return allowed


def _rounded(
    tensors: tuple[Tensor, ...],
    plan: gs.SparsePlan,
    weights: tuple[Tensor, Tensor],
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return the gradients by the textbook's dense matrices in float32, P and dS in the dtype."""
    q, k, v = tensors
    dtype, group, num_keys = q.dtype, q.shape[1] // k.shape[1], k.shape[2]
    keys = plan.keys
    if isinstance(keys, gs.KeyTokens) and keys.extra_k is not None and keys.extra_v is not None:
        k, v = torch.cat([k, keys.extra_k], 2), torch.cat([v, keys.extra_v], 2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    listed = plan.weights()
    out, lse = attention(q, k, v, listed, scale=factor)
    q, k, v = q.float(), *(x.float().repeat_interleave(group, dim=1) for x in (k, v))
    d_out, d_lse = weights[0].float(), weights[1].float().masked_fill(lse == -torch.inf, 0.0)
    lse = lse.float().masked_fill(lse == -torch.inf, torch.inf)
    logits = _in_order(q, k.mT) * (factor * _LOG2_E) + listed.log() * _LOG2_E
    p = (logits - lse[..., None] * _LOG2_E).exp2()  # [B, H, N, S + E], as kernels take it
    delta = (out.to(dtype).float() * d_out).sum(-1) - d_lse
    d_s = (p * (_in_order(d_out, v.mT) - delta[..., None])).to(dtype).float()
    d_q = _in_order(d_s, k) * factor
    d_k = _in_order(d_s.mT, q) * factor
    d_v = _in_order(p.to(dtype).float().mT, d_out)
    d_k, d_v = (x.unflatten(1, (-1, group)).sum(2)[:, :, :num_keys] for x in (d_k, d_v))
    return d_q.to(dtype), d_k.to(dtype), d_v.to(dtype)


def _in_order(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, one product added after another, as kernels may: the least exact order."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for column, row in zip(a.unbind(-1), b.unbind(-2), strict=True):
        total += column[..., None] * row[..., None, :]
    return total
