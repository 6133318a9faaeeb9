"""WEST: the threshold maps of one generation (ScalingAttention, section on topology)."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gossamer.calibration.capture import Latent, Layers, by_order, latent_of
from gossamer.calibration.setup import Setup
from gossamer.select.resize import Grid
from gossamer.select.saliency import block_saliency, threshold_map
from gossamer.session import AttentionEvent


class WestObserver:
    """Watches a dense generation and keeps, per step bucket, layer and head, its threshold map.

    A map is the minimum over the bucket's measured steps, the guidance passes and the batch rows:
    the union of their masks at every p.

    Attributes:
        seconds: Time spent in here, to be taken out of the generation's.
    """

    def __init__(self, setup: Setup, order: Tensor | None = None) -> None:
        """Start without maps.

        Args:
            setup: What is measured.
            order: [L, H] integer on the CPU, the token order of each head; None for raster order.
        """
        self.seconds = 0.0
        self._setup = setup
        self._order = order
        self._layers = Layers()

    def __call__(self, event: AttentionEvent) -> None:
        """Measure one attention call, if its step is measured."""
        start = time.perf_counter()
        buckets = self._setup.readers.get(event.call.step, [])
        latent = latent_of(event) if buckets else None
        if latent is not None:
            order = head_order(self._order, event.call.layer, latent.q.shape[1])
            found = latent_thresholds(latent, order, self._setup.block)

            def make() -> Tensor:
                shape = (self._setup.num_buckets, *found.shape)
                return torch.full(shape, torch.inf, dtype=found.dtype, device="cpu")

            maps = self._layers.at(event, latent, make)
            for bucket in buckets:
                maps[bucket] = torch.minimum(maps[bucket], found)
        self.seconds += time.perf_counter() - start

    @property
    def grid(self) -> Grid | None:
        """(frames, rows, columns) of the calls; None before the first."""
        return self._layers.grid

    def thresholds(self) -> Tensor:
        """Return the maps of the generation, [T, L, H, R, R] float16.

        Raises:
            UnsupportedError: Nothing, or not every layer, could be measured.
        """
        return self._layers.stacked(dim=1)


def head_order(order: Tensor | None, layer: int, num_heads: int) -> Tensor:
    """Return the token order of a layer's heads, [H] int64 on the CPU."""
    if order is None:
        return torch.zeros(num_heads, dtype=torch.int64, device="cpu")
    return order[layer].long()


def latent_thresholds(latent: Latent, order: Tensor, block: int) -> Tensor:
    """Return the threshold map of each head, united over the batch: [H, R, R] float16, on the CPU.

    Args:
        latent: The tokens in raster order.
        order: [H] integer on the CPU, index into `AXIS_ORDERS`.
        block: Tokens per block.
    """
    num_blocks = -(-latent.num_tokens // block)
    shape = (latent.q.shape[1], num_blocks, num_blocks)
    maps = torch.empty(shape, dtype=torch.float16, device="cpu")
    for heads, part in by_order(latent, order):
        saliency = block_saliency(
            part.q,
            part.k,
            scale=part.scale,
            tile=block,
            block=block,
            valid=part.valid,
            num_keys=part.num_tokens,
        )
        # A block of padding has no saliency, and so enters last.
        maps[heads] = threshold_map(saliency).amin(0).half().cpu()
    return maps
