"""Pooling consecutive tokens into block means."""

from __future__ import annotations

import torch
from torch import Tensor


def block_means(x: Tensor, block: int, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Average the valid tokens of each block; the last block may be ragged.

    Args:
        x: [B, H, N, D] tokens, any floating dtype and strides; no float32 copy of it is made.
        block: Tokens per block.
        valid: [B, N] bool, tokens that count; None for all.

    Returns:
        means [B, H, R, D] float32, 0 for blocks without a valid token, and their sizes [B|1, R]
        int64, R = ceil(N / block).
    """
    length = x.shape[2]
    whole = length // block * block
    if valid is not None:  # padding may hold NaN, which no zero weight takes away
        x = x.masked_fill(~valid[:, None, :, None], 0.0)
        counted = valid.long()
    else:
        counted = torch.ones(1, length, dtype=torch.int64, device=x.device)
    sums = [x[:, :, :whole].unflatten(2, (-1, block)).sum(3, dtype=torch.float32)]
    sizes = [counted[:, :whole].unflatten(1, (-1, block)).sum(2)]
    if whole < length:
        sums.append(x[:, :, whole:].sum(2, keepdim=True, dtype=torch.float32))
        sizes.append(counted[:, whole:].sum(1, keepdim=True))
    size = torch.cat(sizes, dim=1)
    return torch.cat(sums, dim=2) / size[:, None, :, None].clamp(min=1), size
