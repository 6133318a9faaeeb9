"""The plans that kernels are timed on, by the names their results carry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan

_TILE = 128
_WEIGHTED_EXTRA = 1024  # virtual keys of a weighted case


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One shape and kind of plan.

    Attributes:
        name: As results name it, e.g. "tokens-75600".
        kind: "tokens" or "blocks".
        num_tokens: N = S.
        heads: Query heads.
        dim: Head dim.
        block: Keys per block, of blocks.
        weighted: Whether entries carry weights and rows read virtual keys.
    """

    name: str
    kind: str
    num_tokens: int
    heads: int
    dim: int
    block: int = 128
    weighted: bool = False

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [1, H, N, D] bfloat16, normally distributed, the same every time."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, self.heads, self.num_tokens, self.dim)
        q, k, v = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(3)
        )
        return q, k, v

    def plan(self, density: float, device: torch.device) -> SparsePlan:
        """Return a plan of random rows, one per tile, all of the same length."""
        rows = -(-self.num_tokens // _TILE)
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
            num_queries=self.num_tokens, num_keys=self.num_tokens, tile=_TILE, keys=keys
        )

    def _tokens(self, index: Tensor, generator: torch.Generator) -> KeyTokens:
        """Return rows of single keys; weighted ones end in virtual keys, at the same length."""
        if not self.weighted:
            return KeyTokens.from_lists(index)
        device = index.device
        virtual = torch.arange(_WEIGHTED_EXTRA, dtype=torch.int32, device=device)
        index[..., -_WEIGHTED_EXTRA:] = virtual + self.num_tokens
        weight = torch.rand(index.shape, generator=generator, device=device)
        keys = KeyTokens.from_lists(index, log_weight=weight)
        shape = (2, 1, self.heads, _WEIGHTED_EXTRA, self.dim)
        extra = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return replace(keys, extra_k=extra[0], extra_v=extra[1])


CASES = (
    Case(name="tokens-75600", kind="tokens", num_tokens=75_600, heads=12, dim=128),
    Case(
        name="tokens-75600-weighted",
        kind="tokens",
        num_tokens=75_600,
        heads=12,
        dim=128,
        weighted=True,
    ),
    Case(name="tokens-32760", kind="tokens", num_tokens=32_760, heads=12, dim=128),
    Case(name="tokens-32768-d64", kind="tokens", num_tokens=32_768, heads=16, dim=64),
    Case(name="blocks-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128),
    Case(name="blocks64-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=64),
    Case(name="blocks32-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=32),
    Case(name="blocks16-75600", kind="blocks", num_tokens=75_600, heads=12, dim=128, block=16),
    Case(name="blocks-32760", kind="blocks", num_tokens=32_760, heads=12, dim=128),
)
"""Every case, in the order in which it runs."""
