"""A plan's tensors as GPU kernels take them: dense, with stride 0 on an axis that is shared."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.plan import KeyBlocks, KeyTokens


def dense_rows(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose axes behind batch and head are dense; shared axes stay shared."""
    if x is None:
        return None
    x = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:2])]
    return x.contiguous()


def shared_strides(x: Tensor | None) -> list[int]:
    """Return batch and head strides, 0 where the axis has size 1 and is shared."""
    if x is None:
        return [0, 0]
    return [0 if x.shape[axis] == 1 else x.stride(axis) for axis in (0, 1)]


def virtual_keys(
    keys: KeyBlocks | KeyTokens, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return virtual keys and values [B, Hk, E, D], contiguous and in `dtype`; None for none."""
    if isinstance(keys, KeyBlocks) or keys.extra_k is None or keys.extra_v is None:
        return None, None
    if keys.num_extra == 0:
        return None, None
    return keys.extra_k.to(dtype).contiguous(), keys.extra_v.to(dtype).contiguous()
