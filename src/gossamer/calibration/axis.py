"""Choosing the token order of each head, as in PARO: the one whose attention is most blockwise."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gossamer.calibration.capture import Layers, latent_of, reordered
from gossamer.calibration.setup import Setup
from gossamer.select.resize import AXIS_ORDERS
from gossamer.select.saliency import block_saliency
from gossamer.session import AttentionEvent

# Orders are compared by the mass that the best quarter of the blocks covers: about what the sparse
# recipes keep.
_SHARE = 0.25


class AxisObserver:
    """Watches a dense generation and scores the six orders of (frames, rows, columns) per head.

    Attributes:
        seconds: Time spent in here, to be taken out of the generation's.
    """

    def __init__(self, setup: Setup) -> None:
        """Start without scores; only the steps that `setup` measures count."""
        self.seconds = 0.0
        self._setup = setup
        self._layers = Layers()

    def __call__(self, event: AttentionEvent) -> None:
        """Score one attention call."""
        start = time.perf_counter()
        latent = latent_of(event) if event.call.step in self._setup.readers else None
        if latent is not None:
            shape = (latent.q.shape[1], len(AXIS_ORDERS))
            scores = self._layers.at(
                event, latent, lambda: torch.zeros(shape, dtype=torch.float64, device="cpu")
            )
            for axes in range(len(AXIS_ORDERS)):
                part = reordered(latent, axes)
                saliency = block_saliency(
                    part.q,
                    part.k,
                    scale=part.scale,
                    tile=self._setup.block,
                    block=self._setup.block,
                    valid=part.valid,
                    num_keys=part.num_tokens,
                )
                scores[:, axes] += covered(saliency).mean(0).double().cpu()
        self.seconds += time.perf_counter() - start

    def order(self) -> Tensor:
        """Return the best order of each head, [L, H] uint8; of equals the first, raster order."""
        scores = self._layers.stacked(dim=0)
        # Orders that differ by rounding alone are equals.
        best = scores >= scores.amax(-1, keepdim=True) * (1 - 1e-6)
        return best.byte().argmax(-1).to(torch.uint8)


def covered(saliency: Tensor) -> Tensor:
    """Return the mass that the best quarter of each row's blocks covers, mean over rows [B, H]."""
    number = max(1, round(saliency.shape[-1] * _SHARE))
    best = saliency.topk(number, dim=-1).values.sum(-1)
    return (best / saliency.sum(-1).clamp(min=1e-30)).mean(-1)
