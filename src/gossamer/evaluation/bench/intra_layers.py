"""Plans of INTRA: one per kind of layer, and what they cost over all layers of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

import gossamer as gs
from gossamer.evaluation.bench.case import TILE, Stage, Tensors, normal

_PATTERN = 4  # layers in which an interleaved method shows both of its kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class IntraLayers:
    """The kinds of layers that `gossamer.Intra` alternates.

    Attributes:
        name: As results name it, e.g. "intra8-16384-causal".
        method: The method.
        heads: Query heads.
        kv_heads: KV heads.
        dim: Head dim.
        num_tokens: Tokens of the sequence, text too.
        grid: (frames, rows, columns) of the latent tokens; None for a sequence.
        text: Text tokens, which stand first.
        causal: Whether attention is causal.
        num_layers: Layers of the model, over which a kernel's times are added up; 0 for no model.
    """

    name: str
    method: gs.Intra
    heads: int
    kv_heads: int
    dim: int
    num_tokens: int
    grid: tuple[int, int, int] | None = None
    text: int = 0
    causal: bool = False
    num_layers: int = 0

    def tensors(self, device: torch.device) -> Tensors:
        """Return q [1, H, N, D], k and v [1, Hk, N, D]."""
        return normal(
            device,
            heads=self.heads,
            num_tokens=self.num_tokens,
            dim=self.dim,
            kv_heads=self.kv_heads,
        )

    def stages(
        self, densities: Sequence[float], tensors: Tensors, device: torch.device
    ) -> Iterator[Stage]:
        """Yield the plan of each kind of layer; geometry fixes the density."""
        del densities, device
        kinds = [self.method.layer_kind(layer) for layer in range(self.num_layers or _PATTERN)]
        layers = Counter(kinds)
        for kind in layers:
            call = gs.Call(
                layer=kinds.index(kind),
                grid=self.grid,
                text=(0, self.text) if self.text else None,
                causal=self.causal,
            )
            plan = self.method.plan(*tensors, call)
            yield Stage(plan=plan, name=kind, layers=layers[kind] if self.num_layers else 0)

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens; a grid keeps its proportions."""
        if self.grid is None:
            return replace(self, num_tokens=max(2 * TILE, round(self.num_tokens * factor)))
        frames, rows, columns = self.grid
        side = math.sqrt(factor)
        grid = (frames, max(16, round(rows * side)), max(16, round(columns * side)))
        text = round(self.text * factor)
        return replace(self, grid=grid, text=text, num_tokens=math.prod(grid) + text)
