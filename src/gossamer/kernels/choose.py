"""Choosing a kernel, with the reasons against every other one."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gossamer.call import check_tensors
from gossamer.errors import UnsupportedError
from gossamer.kernels import flash
from gossamer.kernels.base import Kernel, wants_gradients
from gossamer.kernels.cpu import CpuKernel
from gossamer.kernels.flash import FlashKernel
from gossamer.kernels.hopper import HopperKernel
from gossamer.kernels.reference import ReferenceKernel
from gossamer.kernels.triton import TritonKernel
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.fit import check_fit

# In the order of preference of kernel="auto", but for what `_order` says.
_KERNELS: tuple[Kernel, ...] = (
    HopperKernel(),
    FlashKernel(),
    TritonKernel(),
    CpuKernel(),
    ReferenceKernel(),
)


def list_kernels() -> list[str]:
    """Return the names of all kernels, in the order in which "auto" tries them."""
    return [kernel.name for kernel in _KERNELS]


def explain_kernels(q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> dict[str, list[str]]:
    """Return, for every kernel, the reasons why it cannot run this; an empty list if it can.

    Gradients are among what it must do where a tensor requires them.

    Raises:
        PlanError: These are not the tensors of one call, or the plan is none for them.
    """
    check_tensors(q, k, v)
    check_fit(q, k, plan)
    return _explain(q, k, v, plan, gradients=wants_gradients(q, k, v))


def _explain(
    q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
) -> dict[str, list[str]]:
    """Return the reasons against every kernel."""
    return {kernel.name: kernel.supports(q, k, v, plan, gradients=gradients) for kernel in _KERNELS}


def choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, kernel: str, *, gradients: bool
) -> Kernel:
    """Return the kernel asked for, or the first that can run the plan for "auto".

    Args:
        q: [B, H, N, D].
        k: [B, Hk, S, D].
        v: [B, Hk, S, D].
        plan: The plan.
        kernel: One of `list_kernels()`, or "auto".
        gradients: Whether those of q, k and v are wanted; then the kernel is a
            `DifferentiableKernel`.

    Raises:
        UnsupportedError: The kernel asked for is unknown or cannot run this; it never falls back.
    """
    if kernel != "auto":
        by_name = {known.name: known for known in _KERNELS}
        if kernel not in by_name:
            known = ", ".join(["auto", *by_name])
            raise UnsupportedError(f"unknown kernel {kernel!r}: known are {known}")
        reasons = by_name[kernel].supports(q, k, v, plan, gradients=gradients)
        if reasons:
            raise UnsupportedError([f"kernel {kernel!r} cannot run this: {r}" for r in reasons])
        return by_name[kernel]
    for candidate in _order(plan):
        if not candidate.supports(q, k, v, plan, gradients=gradients):
            if candidate.name == "reference" and not gradients:
                _warn_slow(q.device)
            return candidate
    reasons = _explain(q, k, v, plan, gradients=gradients)
    raise UnsupportedError([f"{name}: {'; '.join(found)}" for name, found in reasons.items()])


def _order(plan: SparsePlan) -> tuple[Kernel, ...]:
    """Return the kernels in the order in which "auto" tries them.

    On an H200 `hopper` was ahead of `flash` on single tokens, small blocks and weighted rows, and
    behind on blocks that fill flash-attn-4's own tiles (benchmarks/results/kernels-h200.json). A
    launch order is there for its effect, and `flash` ignores it.
    """
    whole = isinstance(plan.keys, KeyBlocks) and plan.keys.block == flash.TILE
    if whole and plan.launch_order is None:
        return tuple(sorted(_KERNELS, key=lambda kernel: kernel.name != FlashKernel.name))
    return _KERNELS


def _warn_slow(device: torch.device) -> None:
    """Say once that "auto" ended at the float64 reference for want of a fast kernel."""
    warnings.warn(
        f"no fast kernel runs on {device.type} in this version: attention uses the float64 "
        "reference, which is right and slow",
        UserWarning,
        stacklevel=2,
    )
