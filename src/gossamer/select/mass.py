"""Keeping the smallest set that covers a share of the softmax mass."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mass(log_mass: Tensor, mass: float, *, at_least: Tensor | None = None) -> Tensor:
    """Return the mask of the smallest set of columns that covers `mass`, crossing one included.

    Args:
        log_mass: [..., R, C] natural log of each column's unnormalised mass; -inf for columns that
            must not be chosen.
        mass: Share of the row's total to reach, 0…1. At 1 every column that may be chosen is kept,
            whatever rounding says.
        at_least: [..., 1 or R] integer, columns kept in any case; None for one.

    Returns:
        [..., R, C] bool; a row keeps at least one column wherever it may choose any.
    """
    possible = log_mass > -torch.inf
    if mass >= 1:
        return possible
    share = torch.softmax(log_mass, dim=-1).nan_to_num(0.0)  # NaN: a row without any choice
    order = torch.argsort(log_mass, dim=-1, descending=True, stable=True)
    share = share.gather(-1, order)
    before = share.cumsum(-1) - share
    rank = torch.arange(order.shape[-1], device=order.device)
    floor = 1 if at_least is None else at_least.clamp(min=1)[..., None]
    keep = (before < mass) | (rank < floor)
    return torch.zeros_like(possible).scatter_(-1, order, keep) & possible
