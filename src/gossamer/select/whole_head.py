"""Choosing blocks over a whole head: one ranking and one budget for all rows together."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.select.layout import BlockLayout
from gossamer.select.topk import top_blocks

_GOLDEN = 0.6180339887498949  # its multiples are spread most evenly modulo 1


def top_pairs(scores: Tensor, pairs: Tensor, density: float, layout: BlockLayout) -> Tensor:
    """Return the best blocks of a head, rows competing, that hold a share of its visible pairs.

    Every row keeps its forced block, or its best one where nothing is forced; these are paid first.
    The others follow in one ranking (ties go to the upper row, then to the lower block), rounded to
    the nearest block, so that the sets of growing densities contain one another.

    Args:
        scores: [B|1, H|1, R, C] floating, finite.
        pairs: [B|1, 1, R, C] int64, visible pairs of valid tokens in each block.
        density: Share of the head's visible pairs.
        layout: The blocks that tiles may read.

    Returns:
        [B|1, H|1, R, C] bool.
    """
    shape = torch.broadcast_shapes(scores.shape, pairs.shape, layout.possible.shape)
    possible = layout.possible.expand(shape)
    if density >= 1:
        return possible
    scores = scores.masked_fill(~layout.possible, -torch.inf).expand(shape)
    forced = layout.forced
    if forced is None:
        forced = top_blocks(scores, torch.ones_like(scores[..., 0], dtype=torch.int64))
    flat = scores.masked_fill(forced, torch.inf).flatten(-2)
    order = torch.argsort(flat, dim=-1, descending=True, stable=True)
    cost = pairs.expand(shape).flatten(-2).gather(-1, order).double()
    budget = pairs.sum((-2, -1))[..., None] * density
    chosen = cost.cumsum(-1) - cost / 2 < budget
    keep = torch.empty_like(chosen).scatter_(-1, order, chosen).view(shape)
    return (keep & possible) | forced


def top_rows(scores: Tensor, pairs: Tensor, density: float, layout: BlockLayout) -> Tensor:
    """Return each row's best blocks, rows keeping equal shares, that meet a head's density.

    The blocks of all rows are ranked by the share of its row's visible pairs at which a row would
    take them, so a row takes its own in order of score and the whole head meets the density to half
    a block, whatever sizes blocks have. Where inside the block the share counts runs evenly through
    the rows, or the upper ones would hold all that is rounded up.

    Args:
        scores: [B|1, H|1, R, C] floating; they are compared inside rows only.
        pairs: [B|1, 1, R, C] int64, visible pairs of valid tokens in each block.
        density: Share of the head's visible pairs.
        layout: The blocks that tiles may read.

    Returns:
        [B|1, H|1, R, C] bool; sets of growing densities contain one another.
    """
    shape = torch.broadcast_shapes(scores.shape, pairs.shape, layout.possible.shape)
    scores = scores.masked_fill(~layout.possible, -torch.inf).expand(shape)
    if layout.forced is not None:
        scores = scores.masked_fill(layout.forced, torch.inf)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    total = pairs.sum(-1, keepdim=True)
    cost = torch.where(total > 0, pairs, layout.share)  # rows of padding pay for keys alone
    cost = cost.double().expand(shape).gather(-1, order)
    row = torch.arange(shape[-2], dtype=torch.float64, device=scores.device)
    inside = ((row + 0.5) * _GOLDEN).frac()[:, None]
    taken = cost.cumsum(-1) - (1 - inside) * cost
    reached = taken / cost.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    reached = torch.empty_like(reached).scatter_(-1, order, reached)
    return top_pairs(-reached, pairs, density, layout)
