"""What a kernel is: it says what it cannot run, and runs the rest."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class Kernel(Protocol):
    """Runs plans."""

    @property
    def name(self) -> str:
        """Return the name under which the kernel is asked for."""
        ...

    def supports(self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> list[str]:
        """Return the reasons why the kernel cannot run this; none if it can."""
        ...

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan; only called where `supports` names no reason."""
        ...


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
