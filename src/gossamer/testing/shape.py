"""Sizes of attention calls to test on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call, and the seed of its random tensors.

    Attributes:
        batch: B.
        kv_heads: Hk.
        group: Query heads per KV head.
        num_queries: N.
        num_keys: S.
        dim: D.
        seed: Seed of the tensors.
    """

    batch: int
    kv_heads: int
    group: int
    num_queries: int
    num_keys: int
    dim: int
    seed: int

    @property
    def heads(self) -> int:
        """H, query heads."""
        return self.kv_heads * self.group

    def generator(self) -> torch.Generator:
        """The call's own random numbers."""
        return torch.Generator().manual_seed(self.seed)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D], k and v [B, Hk, S, D], normally distributed, on the CPU."""
        g = self.generator()
        q = torch.randn(self.batch, self.heads, self.num_queries, self.dim, generator=g)
        k = torch.randn(self.batch, self.kv_heads, self.num_keys, self.dim, generator=g)
        v = torch.randn(self.batch, self.kv_heads, self.num_keys, self.dim, generator=g)
        return q.to(dtype), k.to(dtype), v.to(dtype)
