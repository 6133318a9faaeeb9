"""What a kernel is: it says what it cannot run, and runs the rest."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gossamer.plan import SparsePlan


class AttentionOutput(NamedTuple):
    """What attention returns.

    Attributes:
        out: [B, H, N, D] in q's dtype; 0 for a query without any key.
        lse: [B, H, N] float32, natural log of the sum of weights times exponentiated logits; -inf
            for a query without any key.
    """

    out: Tensor
    lse: Tensor


class BackwardInput(NamedTuple):
    """What a backward pass is made from.

    Attributes:
        q: [B, H, N, D].
        k: [B, Hk, S, D].
        v: [B, Hk, S, D].
        out: [B, H, N, D], contiguous, as the forward pass returned it.
        lse: [B, H, N] float32, contiguous, likewise.
        d_out: [B, H, N, D], the gradient of out, of any strides.
        d_lse: [B, H, N] float32, the gradient of lse, likewise; None for 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None


class Kernel(Protocol):
    """Runs plans."""

    @property
    def name(self) -> str:
        """Return the name under which the kernel is asked for."""
        ...

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return the reasons why the kernel cannot run this; none if it can.

        Args:
            q: [B, H, N, D].
            k: [B, Hk, S, D].
            v: [B, Hk, S, D].
            plan: The plan.
            gradients: Whether those of q, k and v are wanted. The tensors do not say, since inside
                a `torch.library` op autograd is off.
        """
        ...

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan; only called where `supports` names no reason."""
        ...


@runtime_checkable
class DifferentiableKernel(Kernel, Protocol):
    """A kernel that has gradients, where `supports` names no reason against them."""

    def backward(
        self, given: BackwardInput, plan: SparsePlan, scale: float, *, of_keys: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of q, k and v, in their dtypes.

        Args:
            given: What the forward pass took and returned, and the gradients of that.
            plan: What `run` ran.
            scale: Its factor on the logits.
            of_keys: Whether those of k and v are wanted; they are None otherwise.
        """
        ...


def wants_gradients(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether gradients of one of the tensors are asked for, outside of any op."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def with_virtual_keys(x: Tensor, extra: Tensor | None) -> Tensor:
    """Append virtual keys (or values) [B, Hk, E, D] to x [B, Hk, S, D]."""
    return x if extra is None else torch.cat([x, extra.to(x.dtype)], dim=2)


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a scale above 0 with the same logits.

    For kernels that take the maximum before they scale: below 0 that is the minimum, and at 0 a
    masked logit becomes 0 * -inf.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
