"""What a case of `gossamer bench kernels` is: tensors, and the plans that kernels run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from gossamer.plan import SparsePlan

TILE = 128
Tensors = tuple[Tensor, Tensor, Tensor]
"""q [1, H, N, D], k and v [1, Hk, N, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One plan of a case, and what stands beside it.

    Attributes:
        plan: The plan.
        name: Tells the plans of a case apart; "" where there is one.
        prepare: What has to be done anew for every plan of this kind, such as ordering it; its time
            counts with the kernel's. None: nothing.
        layers: In how many layers of the case's model the plan runs; 0 where there is no model.
    """

    plan: SparsePlan
    name: str = ""
    prepare: Callable[[], object] | None = None
    layers: int = 0


class Case(Protocol):
    """One shape, and the plans of one kind on it."""

    @property
    def name(self) -> str:
        """As results name it, e.g. "tokens-75600"."""
        ...

    @property
    def causal(self) -> bool:
        """Whether attention is causal, the dense one too."""
        ...

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v, bfloat16, the same every time."""
        ...

    def stages(
        self, densities: Sequence[float], tensors: Tensors, device: torch.device
    ) -> Iterator[Stage]:
        """Yield the plans to run.

        Args:
            densities: The densities asked for; a case whose kind of plan fixes it has its own.
            tensors: What `tensors` returned.
            device: Where the plans lie.
        """
        ...

    def scaled(self, factor: float) -> Self:
        """Return the same case on about this share of its tokens; for tests."""
        ...


def normal(
    device: torch.device, *, heads: int, num_tokens: int, dim: int, kv_heads: int | None = None
) -> Tensors:
    """Return q, k and v in bfloat16, normally distributed, the same every time.

    Args:
        device: Where they lie.
        heads: H, query heads.
        num_tokens: N = S.
        dim: D.
        kv_heads: Hk; None for H.

    Returns:
        q [1, H, N, D], k and v [1, Hk, N, D].
    """
    generator = torch.Generator(device).manual_seed(0)
    kv_heads = heads if kv_heads is None else kv_heads
    q, k, v = (
        torch.randn(
            (1, count, num_tokens, dim), generator=generator, device=device, dtype=torch.bfloat16
        )
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v
