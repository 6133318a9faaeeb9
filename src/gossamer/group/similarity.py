"""How alike the tokens of a block are."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.group.pool import block_means

_CHUNK_BYTES = 64 << 20  # of the float32 unit vectors held at once


def self_similarity(
    x: Tensor, block: int, *, valid: Tensor | None = None, center: Tensor | None = None
) -> Tensor:
    """Return the mean cosine over all pairs of valid tokens of each block, a token's own included.

    Args:
        x: [B, H, N, D] tokens.
        block: Tokens per block; the last one may be ragged.
        valid: [B, N] bool, tokens that count; None for all.
        center: [B, H, 1, D], taken from every token first; None for nothing.

    Returns:
        [B, H, ceil(N / block)] float32, 0…1 up to rounding; 0 for blocks without a valid token. A
        zero vector is at right angles to everything.
    """
    batch, heads, length, dim = x.shape
    step = max(1, _CHUNK_BYTES // (4 * batch * heads * dim * block)) * block
    parts = []
    for begin in range(0, length, step):
        piece = x[:, :, begin : begin + step].float()
        piece = piece if center is None else piece - center
        unit = torch.nn.functional.normalize(piece, dim=-1)
        seen = None if valid is None else valid[:, begin : begin + step]
        parts.append(block_means(unit, block, valid=seen)[0].square().sum(-1))
    return torch.cat(parts, dim=2)
