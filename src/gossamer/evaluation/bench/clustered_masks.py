"""Block masks with uneven rows that share keys in clusters, in the orders WaveAlign can give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.bench.case import TILE, Stage, Tensors, normal
from gossamer.plan import KeyBlocks, SparsePlan

_BLOCK = 128
_CLUSTERS = 8  # per head; the plane that WaveAlign sorts in does not tell 16 apart
_UNEVEN = 0.4  # standard deviation of the logarithm of a row's length


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusteredMasks:
    """Rows of a cluster read its blocks before any others, and arrive in random order.

    The stages show what ordering gains, its own time included: as the rows arrive; sorted by the
    angle of WaveAlign's embedding alone; sorted by length within waves alone; both, which is
    `gossamer.WaveAlign`.

    Attributes:
        name: As results name it, e.g. "clustered-364k".
        num_tokens: N = S.
        heads: Query heads, as many as KV heads.
        dim: Head dim.
        density: Mean share of the blocks that a row reads.
        causal: False: masks know no order.
    """

    name: str
    num_tokens: int
    heads: int = 4
    dim: int = 128
    density: float = 0.2
    causal: bool = False

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        return normal(device, heads=self.heads, num_tokens=self.num_tokens, dim=self.dim)

    def stages(
        self, densities: Sequence[float], tensors: Tensors, device: torch.device
    ) -> Iterator[Stage]:
        """Yield the same plan in four launch orders; the density is the case's own."""
        del densities, tensors
        plan = self.plan(device)
        yield Stage(plan=plan, name="arrival")
        both = gs.WaveAlign(skip="never")
        orders = {
            "by angle": partial(gs.WaveAlign(skip="never", wave=1).order, plan),
            "by length in waves": partial(sorted_in_waves, plan, both._wave(plan)),
            "wavealign": partial(both.order, plan),
        }
        for name, order in orders.items():
            yield Stage(plan=order(), name=name, prepare=order)

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, num_tokens=max(2 * TILE, round(self.num_tokens * factor)))

    def plan(self, device: torch.device) -> SparsePlan:
        """Return the plan with its rows in the order of arrival."""
        rows, blocks = -(-self.num_tokens // TILE), -(-self.num_tokens // _BLOCK)
        generator = torch.Generator(device).manual_seed(1)
        random = partial(torch.rand, generator=generator, device=device)
        masks: list[Tensor] = []
        for _ in range(self.heads):  # a head at a time: scores take four bytes for every pair
            favoured = random(_CLUSTERS, blocks) < self.density
            cluster = (random(rows) * _CLUSTERS).long()
            scores = random(rows, blocks) + favoured[cluster]  # [R, C]
            noise = torch.randn(rows, generator=generator, device=device)
            length = (noise * _UNEVEN - _UNEVEN**2 / 2).exp()  # of mean 1
            count = (length * self.density * blocks).round().long().clamp(1, blocks)
            ranked = scores.sort(-1, descending=True).values
            masks.append(scores >= ranked.gather(1, count[:, None] - 1))
        keys = KeyBlocks.from_mask(torch.stack(masks)[None], block=_BLOCK)
        return SparsePlan(
            num_queries=self.num_tokens, num_keys=self.num_tokens, tile=TILE, keys=keys
        )


def sorted_in_waves(plan: SparsePlan, wave: int) -> SparsePlan:
    """Return the plan with the tiles of each wave by descending length, and the waves as they are.

    The second stage of WaveAlign without the first.

    Args:
        plan: A plan of one row per tile, in order.
        wave: Tiles that run at once.
    """
    count = plan.keys.count.long()  # [1, H, T]
    group = torch.arange(plan.num_tiles, device=plan.device) // wave
    longest = torch.iinfo(torch.int32).max
    order = torch.argsort((group << 32) + (longest - count), dim=-1, stable=True)
    return replace(plan, launch_order=order.int())
