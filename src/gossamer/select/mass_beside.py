"""Covering a share of the mass where some columns are kept, and counted, in any case."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mass_beside(log_mass: Tensor, mass: float, kept: Tensor) -> Tensor:
    """Return the kept columns and the fewest others with which they cover `mass` of a row.

    Args:
        log_mass: [..., R, C] natural log of each column's unnormalised mass; -inf for columns that
            must not be chosen.
        mass: Share of the row's total to reach, crossing column included. At 1 every column that
            may be chosen is kept, whatever rounding says.
        kept: [..., R, C] bool, columns that are counted first.

    Returns:
        [..., R, C] bool.
    """
    possible = log_mass > -torch.inf
    if mass >= 1:
        return possible | kept
    share = torch.softmax(log_mass, dim=-1).nan_to_num(0.0)  # NaN: a row without any choice
    counted = torch.where(kept, share, 0.0).sum(-1, keepdim=True)
    rest = log_mass.masked_fill(kept, -torch.inf)
    order = torch.argsort(rest, dim=-1, descending=True, stable=True)
    share = torch.where(kept, 0.0, share).gather(-1, order)
    needed = counted + share.cumsum(-1) - share < mass
    return kept | (torch.zeros_like(possible).scatter_(-1, order, needed) & possible)
