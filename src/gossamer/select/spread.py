"""Keeping the best blocks up to a budget of keys, its fractions spread over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0.6180339887498949  # multiples of it are spread most evenly modulo 1


def take_spread(
    scores: Tensor,
    cost: Tensor,
    budget: Tensor,
    *,
    forced: Tensor | None = None,
    carry: bool = False,
) -> Tensor:
    """Return the mask of each row's best blocks that its budget pays for.

    A block that crosses the budget is kept where the budget covers more than a share u of it, u
    running evenly through 0…1 over the rows: rows keep whole blocks, yet all together meet the
    budget, whatever sizes the blocks have. Unless rows carry debts, a greater budget never keeps
    less in any row.

    Args:
        scores: [..., R, C]; -inf marks blocks that must not be chosen. Ties go to the lower index.
        cost: [..., 1 or R, C], what each block costs, >= 0.
        budget: [..., 1 or R] float64, what each row may spend, forced blocks counted.
        forced: [..., R, C] bool, blocks kept whatever they cost. None, or a row without any: the
            row's best.
        carry: Save in later rows what forced blocks cost above a row's budget (the early rows of
            causal attention see little, and must read a whole block of it).

    Returns:
        [..., R, C] bool.
    """
    possible = scores > -torch.inf
    forced = torch.zeros_like(possible) if forced is None else forced & possible
    column = torch.arange(scores.shape[-1], device=scores.device)
    best = column == scores.argmax(-1, keepdim=True)
    forced = forced | (best & possible & ~forced.any(-1, keepdim=True))
    num_rows = scores.shape[-2]
    cost = cost.double().expand(scores.shape)
    left = budget - (cost * forced).sum(-1)  # [..., R]
    if carry:
        spent = left.cumsum(-1).clamp(min=0).cummax(-1).values
        left = torch.diff(spent, dim=-1, prepend=torch.zeros_like(spent[..., :1]))
    order = torch.argsort(
        scores.masked_fill(forced, -torch.inf), dim=-1, descending=True, stable=True
    )
    sorted_cost = cost.masked_fill(forced | ~possible, 0.0).gather(-1, order)
    before = sorted_cost.cumsum(-1) - sorted_cost
    row = torch.arange(num_rows, dtype=torch.float64, device=scores.device)
    share = ((row + 0.5) * _GOLDEN).frac()[:, None]
    keep = before + share * sorted_cost < left[..., None]
    return (torch.zeros_like(possible).scatter_(-1, order, keep) & possible) | forced
