"""Which keys a query sees by causality and window, as bounds on the key index."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gossamer.plan.plan import SparsePlan


class Bounds(NamedTuple):
    """Bounds on the real keys that queries may read: low <= j < high, or j < sink.

    Attributes:
        low: int64, of the queries' shape.
        high: int64, of the queries' shape, exclusive.
        sink: int64, of the queries' shape, exclusive; never above `high` of a causal query.
    """

    low: Tensor
    high: Tensor
    sink: Tensor


def is_masked(plan: SparsePlan) -> bool:
    """Return whether queries of one tile may see different keys."""
    return plan.causal or plan.window is not None


def bounds(plan: SparsePlan, query: Tensor) -> Bounds:
    """Return the bounds for queries [any shape] int64 (-1, no query, gets those of position -1)."""
    position = query + plan.num_keys - plan.num_queries
    low = torch.zeros_like(position)
    high = torch.full_like(position, plan.num_keys)
    sink = torch.zeros_like(position)
    if plan.causal:
        high = (position + 1).clamp(0, plan.num_keys)
    if plan.window is not None:
        left, right, first = plan.window
        sink = torch.full_like(position, first).minimum(high)
        if left >= 0:
            low = (position - left).clamp(min=0)
        if right >= 0:
            high = high.minimum(position + right + 1).clamp(min=0)
    return Bounds(low, high, sink)


def allowed(limits: Bounds, index: Tensor, num_keys: int) -> Tensor:
    """Return which keys `index` the bounds allow, broadcast; virtual keys always are."""
    inside = (index >= limits.low) & (index < limits.high)
    return inside | (index < limits.sink) | (index >= num_keys)
