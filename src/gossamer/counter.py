"""Random numbers as a hash of a counter: no generator state, the same on every rank and device."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014), its constants as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 `x` right without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 `x` bijectively; multiplication wraps modulo 2**64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(*keys: int | Tensor, device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1) that depend on `keys` alone.

    Args:
        *keys: Integers or int64 tensors, broadcast against one another; their order matters.
        device: Where the result lies; the values do not depend on it.

    Returns:
        float64 tensor of the broadcast shape, with 53 random bits.
    """
    state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        # Filling in place, unlike copying a Python number, does not wait for an accelerator.
        word = (
            key
            if isinstance(key, Tensor)
            else torch.full((), key, dtype=torch.int64, device=device)
        )
        state = _mix((state ^ _mix(word + _GAMMA)) + _GAMMA)
    return _shift_right(state, 11).double() * 2.0**-53
