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
        sink: int64, exclusive, of the shape of queries and sinks together; never above `high` of a
            causal query.
    """

    low: Tensor
    high: Tensor
    sink: Tensor


def is_masked(plan: SparsePlan) -> bool:
    """Return whether queries of one tile may see different keys."""
    return plan.causal or plan.window is not None


def first_end(valid: Tensor | None, number: int, device: torch.device) -> Tensor:
    """Return where the first `number` valid keys of each row end, [B|1] int64, exclusive.

    Args:
        valid: [B, S] bool; None where all keys are valid.
        number: How many; all S keys are in front of the end where fewer are valid.
        device: Where the result lies.
    """
    if valid is None or not number:
        return torch.full((1,), number, dtype=torch.int64, device=device)
    before = valid.cumsum(-1) - valid.long()
    return (before < number).sum(-1)


def sink_ends(plan: SparsePlan) -> Tensor:
    """Return up to which key the window's sinks reach in each batch row, [B|1] int64, exclusive.

    They are the first keys that are no padding: prompts that are padded in front keep theirs.
    """
    number = 0 if plan.window is None else plan.window[2]
    return first_end(plan.key_valid, number, plan.device)


def padded_sinks(plan: SparsePlan) -> Tensor | None:
    """Return `sink_ends` [B|1, 1] int32 where padding may move them, else None."""
    if plan.key_valid is None or plan.window is None or not plan.window[2]:
        return None
    return sink_ends(plan).int()[:, None]


def bounds(plan: SparsePlan, query: Tensor, sink: Tensor) -> Bounds:
    """Return the bounds for queries.

    Args:
        plan: The plan.
        query: [any shape] int64; -1, no query, gets the bounds of position -1.
        sink: int64, broadcast with the queries: `sink_ends` of their batch rows.
    """
    position = query + plan.num_keys - plan.num_queries
    low = torch.zeros_like(position)
    high = torch.full_like(position, plan.num_keys)
    if plan.causal:
        high = (position + 1).clamp(0, plan.num_keys)
    sink = sink.minimum(high)
    if plan.window is not None:
        left, right, _ = plan.window
        if left >= 0:
            low = (position - left).clamp(min=0)
        if right >= 0:
            high = high.minimum(position + right + 1).clamp(min=0)
    return Bounds(low, high, sink)


def allowed(limits: Bounds, index: Tensor, num_keys: int) -> Tensor:
    """Return which keys `index` the bounds allow, broadcast; virtual keys always are."""
    inside = (index >= limits.low) & (index < limits.high)
    return inside | (index < limits.sink) | (index >= num_keys)
