"""The plan that reads every visible key."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.plan.keys import KeyTokens
from gossamer.plan.plan import SparsePlan

_TILE = 128


def full_plan(q: Tensor, k: Tensor, call: Call) -> SparsePlan:
    """Return one full row that all tiles of all heads and batch rows share."""
    every = torch.arange(k.shape[2], device=q.device).view(1, 1, 1, -1)
    num_tiles = -(-q.shape[2] // _TILE)
    return SparsePlan(
        num_queries=q.shape[2],
        num_keys=k.shape[2],
        tile=_TILE,
        keys=KeyTokens.from_lists(every),
        tile_row=torch.zeros(1, 1, num_tiles, dtype=torch.int32, device=q.device),
        causal=call.causal,
        key_valid=call.key_valid,
        scale=call.scale,
    )
