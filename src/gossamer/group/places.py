"""Pooling tokens that stand at given places: cubes of a grid, regions of a frame."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20  # of the float32 tokens held at once


def place_means(x: Tensor, places: Tensor, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Average the valid tokens of each row of places.

    Args:
        x: [B, H, N, D] tokens, any floating dtype and strides; no float32 copy of it is made.
        places: [T, W] int64, the tokens of each row; -1 is a hole.
        valid: [B|1, N] bool, tokens that count; None for all.

    Returns:
        means [B, H, T, D] float32, 0 for rows without a valid token, and their sizes [B|1, T]
        int64.
    """
    counted = (places >= 0)[None]  # [B|1, T, W]
    source = places.clamp(min=0)
    if valid is not None:
        counted = counted & valid[:, source]
    size = counted.sum(-1)
    batch, heads, _, dim = x.shape
    means = torch.empty(batch, heads, len(places), dim, device=x.device)
    width = max(places.shape[1], 1)
    chunk = max(1, _CHUNK_BYTES // (4 * batch * heads * width * dim))
    for begin in range(0, len(places), chunk):
        part = slice(begin, begin + chunk)
        tokens = x[:, :, source[part].flatten()].float().unflatten(2, (-1, width))
        # Padding may hold NaN, which no zero weight takes away.
        tokens = tokens.masked_fill(~counted[:, None, part, :, None], 0.0)
        means[:, :, part] = tokens.sum(3) / size[:, None, part, None].clamp(min=1)
    return means, size
