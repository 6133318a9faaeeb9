"""The same plan in another form."""

from __future__ import annotations

from dataclasses import replace

import torch

from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.plan import SparsePlan
from gossamer.plan.rows import read_rows


def to_tokens(plan: SparsePlan) -> SparsePlan:
    """Return the plan with its key rows as `KeyTokens`; computes the same.

    Rows of blocks become ascending lists of the keys that stand in them, holes and padded keys
    left out. One synchronisation, for the size of the pool.
    """
    keys = plan.keys
    if not isinstance(keys, KeyBlocks):
        return plan
    batch, heads, num_rows = plan.batch, plan.heads, keys.num_rows
    flat = torch.arange(batch * heads * num_rows, device=plan.device)
    rows = read_rows(plan, flat // (heads * num_rows), flat // num_rows % heads, flat % num_rows)
    count = rows.listed.sum(1)
    shape = (batch, heads, num_rows)
    tokens = KeyTokens(
        start=(count.cumsum(0) - count).view(shape),
        count=count.view(shape).int(),
        index=rows.index[rows.listed].int(),
    )
    return replace(plan, keys=tokens)
