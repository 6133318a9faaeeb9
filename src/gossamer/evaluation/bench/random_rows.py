"""Plans of random rows, all of the same length: what a kernel reaches where nothing is uneven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gossamer.evaluation.bench.case import TILE, Stage, Tensors, normal
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan

_WEIGHTED_EXTRA = 1024  # virtual keys of a weighted case


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomRows:
    """Random rows, one per tile.

    Attributes:
        name: As results name it, e.g. "tokens-75600".
        kind: "tokens" or "blocks".
        num_tokens: N = S.
        heads: Query heads, as many as KV heads.
        dim: Head dim.
        block: Keys per block, of blocks.
        weighted: Whether entries carry weights and rows read virtual keys.
        density: The case's own density, whatever is asked; None takes those that are asked.
        causal: False: rows know no order.
    """

    name: str
    kind: str
    num_tokens: int
    heads: int
    dim: int
    block: int = 128
    weighted: bool = False
    density: float | None = None
    causal: bool = False

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        return normal(device, heads=self.heads, num_tokens=self.num_tokens, dim=self.dim)

    def stages(
        self, densities: Sequence[float], tensors: Tensors, device: torch.device
    ) -> Iterator[Stage]:
        """Yield a plan per density."""
        del tensors
        for density in densities if self.density is None else (self.density,):
            yield Stage(plan=self.plan(density, device))

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, num_tokens=max(2 * TILE, round(self.num_tokens * factor)))

    def plan(self, density: float, device: torch.device) -> SparsePlan:
        """Return a plan of random rows, one per tile, all of the same length."""
        rows = -(-self.num_tokens // TILE)
        places = self.num_tokens if self.kind == "tokens" else -(-self.num_tokens // self.block)
        count = max(1, round(places * density))
        generator = torch.Generator(device).manual_seed(1)
        index = torch.empty(1, self.heads, rows, count, dtype=torch.int32, device=device)
        for head in range(self.heads):  # a whole draw would not fit
            noise = torch.rand(rows, places, generator=generator, device=device)
            index[0, head] = noise.topk(count).indices.sort(-1).values.int()
        keys: KeyBlocks | KeyTokens
        if self.kind == "blocks":
            full = torch.full((1, self.heads, rows), count, dtype=torch.int32, device=device)
            keys = KeyBlocks(block=self.block, count=full, index=index)
        else:
            keys = self._tokens(index, generator)
        return SparsePlan(
            num_queries=self.num_tokens, num_keys=self.num_tokens, tile=TILE, keys=keys
        )

    def _tokens(self, index: Tensor, generator: torch.Generator) -> KeyTokens:
        """Return rows of single keys; weighted ones end in virtual keys, at the same length."""
        if not self.weighted:
            return KeyTokens.from_lists(index)
        device = index.device
        num_extra = min(_WEIGHTED_EXTRA, index.shape[-1])
        virtual = torch.arange(num_extra, dtype=torch.int32, device=device)
        index[..., -num_extra:] = virtual + self.num_tokens
        weight = torch.rand(index.shape, generator=generator, device=device)
        keys = KeyTokens.from_lists(index, log_weight=weight)
        shape = (2, 1, self.heads, num_extra, self.dim)
        extra = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return replace(keys, extra_k=extra[0], extra_v=extra[1])
