"""Keeping the pairs of tiles and blocks that a geometric pattern reaches first."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.counter import uniform

_SALT = 11  # apart from the salts of the methods


def count_pairs(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the pairs of valid queries and keys in each pair of tile and block.

    Args:
        queries: [B|1, R, tile] bool, which places of a tile hold a query that counts.
        keys: [B|1, C, block] bool, the same of blocks and keys.

    Returns:
        [B|1, 1, R, C] int64.
    """
    return (queries.sum(-1)[:, :, None] * keys.sum(-1)[:, None])[:, None]


def reach_density(entry: Tensor, pairs: Tensor, density: float) -> Tensor:
    """Return the mask of pairs of tiles and blocks with the lowest entries that meets a density.

    A geometric pattern with one knob (a width, a radius, a decay) is an *entry* for each pair: the
    knob's value from which on the pair is kept. Pairs are taken by ascending entry until the
    density is met, to within half a pair; equal entries are taken in a fixed scattered order,
    so that no row gets them all. A greater density never keeps less.

    Args:
        entry: [B|1, 1, R, C] float; -inf for pairs that are kept in any case, inf for those that
            must not be.
        pairs: [B|1, 1, R, C] int64, visible pairs of queries and keys, which the density counts.
        density: Share of the pairs to keep.

    Returns:
        [B|1, 1, R, C] bool.
    """
    possible = entry < torch.inf
    if density >= 1:
        return possible
    num_rows, num_columns = entry.shape[-2:]
    row = torch.arange(num_rows, device=entry.device)[:, None]
    column = torch.arange(num_columns, device=entry.device)
    scattered = uniform(_SALT, row, column, device=entry.device).flatten().argsort()
    batch = max(entry.shape[0], pairs.shape[0])
    line = entry.expand(batch, -1, -1, -1).flatten(1)[:, scattered]  # [B|1, R * C]
    by_entry = line.argsort(dim=1, stable=True)
    cost = pairs.masked_fill(~possible, 0).expand(batch, -1, -1, -1).flatten(1)[:, scattered]
    cost = cost.gather(1, by_entry)
    end = cost.cumsum(1)
    # Integers, so that padding, which costs nothing, moves no rounding.
    taken = (end - cost) + end <= end[:, -1:].double() * (2 * density)
    kept = torch.zeros_like(taken).scatter_(1, by_entry, taken)
    kept = torch.zeros_like(kept).scatter_(1, scattered.expand_as(kept), kept)
    return (kept.view(batch, 1, num_rows, num_columns) & possible) | (entry == -torch.inf)


def force_first(entry: Tensor, possible: Tensor) -> Tensor:
    """Forbid what is not possible and force the pair that each row reaches first.

    Args:
        entry: [B|1, 1, R, C] float, as `reach_density` reads it.
        possible: [B|1, 1, R|1, C] bool.

    Returns:
        [B|1, 1, R, C] float: inf where not possible, -inf at each row's lowest entry.
    """
    entry = torch.where(possible, entry, torch.inf)
    column = torch.arange(entry.shape[-1], device=entry.device)
    first = column == entry.argmin(-1, keepdim=True)
    return entry.masked_fill(first & (entry < torch.inf), -torch.inf)
