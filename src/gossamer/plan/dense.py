"""A plan as one dense matrix of weights; for small sizes, tests and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.plan.keys import KeyTokens
from gossamer.plan.rows import expand, read_rows, tile_queries, tile_rows
from gossamer.plan.visible import allowed, bounds, sink_ends

if TYPE_CHECKING:
    from gossamer.plan.plan import SparsePlan


def dense_weights(plan: SparsePlan) -> Tensor:
    """Return the weights [B|1, H|1, N, S + E] float32, 0 where a key is not read."""
    batch, heads, device = plan.batch, plan.heads, plan.device
    num_extra = plan.keys.num_extra if isinstance(plan.keys, KeyTokens) else 0
    width = plan.num_keys + num_extra
    num_rows = plan.keys.num_rows
    flat = torch.arange(batch * heads * num_rows, device=device)
    rows = read_rows(
        plan,
        flat // (heads * num_rows),
        flat // num_rows % heads,
        flat % num_rows,
    )
    weight = rows.listed.float() if rows.log_weight is None else rows.log_weight.exp()
    # Column `width` takes the padding and is cut off.
    column = torch.where(rows.listed, rows.index, width)
    by_row = torch.zeros(len(flat), width + 1, device=device).scatter_(1, column, weight)
    by_row = by_row[:, :width].view(batch, heads, num_rows, width)

    queries = expand(tile_queries(plan), batch, heads)  # [B, H, T, tile]
    rows_of = expand(tile_rows(plan), batch, heads)[..., None].expand_as(queries).flatten(2)
    slot = torch.where(queries < 0, plan.num_queries, queries).flatten(2)
    row_of = torch.zeros(batch, heads, plan.num_queries + 1, dtype=torch.int64, device=device)
    row_of = row_of.scatter_(2, slot, rows_of)[..., : plan.num_queries]  # [B, H, N]
    weights = by_row.gather(2, row_of[..., None].expand(-1, -1, -1, width))

    query = torch.arange(plan.num_queries, device=device)[:, None]
    index = torch.arange(width, device=device)
    limits = bounds(plan, query, sink_ends(plan)[:, None, None, None])  # sinks [B|1, 1, N, 1]
    return torch.where(allowed(limits, index, plan.num_keys), weights, 0.0)
