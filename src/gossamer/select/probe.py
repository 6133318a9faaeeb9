"""Exact attention of a few queries, from which a pattern of the whole head is estimated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.select.spans import valid_queries

_CHUNK_BYTES = 32 << 20  # of the float32 rows, and of the float32 keys, held at once


class Probe(NamedTuple):
    """The queries whose exact attention is looked at.

    Attributes:
        query: [B|1, m] int64, ascending where present.
        present: [B|1, m] bool, False for places that a short sequence leaves empty.
    """

    query: Tensor
    present: Tensor


class Lines(NamedTuple):
    """What a probe's attention sums to along the columns and the diagonals of the score matrix.

    Attributes:
        columns: [B, H, S] float64, mean mass per probed query on each key; they sum to 1.
        diagonals: [B, H, L] float64, mean mass on each offset p - j, from `first` on.
        first: The offset of the first diagonal.
    """

    columns: Tensor
    diagonals: Tensor
    first: int


def probe(
    call: Call,
    num_queries: int,
    num_keys: int,
    count: int,
    *,
    where: Literal["last", "middle", "spread"],
    device: torch.device,
) -> Probe:
    """Pick up to `count` valid queries of each batch row.

    Args:
        call: The call: its padding says which queries are valid.
        num_queries: N.
        num_keys: S.
        count: m.
        where: "last" and "middle" pick consecutive ones, "spread" evenly spaced ones.
        device: Where the result lies.
    """
    valid = valid_queries(call, num_queries, num_keys)
    place = torch.arange(count, device=device)
    number = torch.full((1, 1), num_queries, device=device)
    if valid is not None:
        number = valid.sum(-1, keepdim=True)
    if where == "last":
        rank = number - count + place
    elif where == "middle":
        rank = (number - count).clamp(min=0) // 2 + place
    else:
        rank = torch.where(number >= count, (2 * place + 1) * number // (2 * count), place)
    present = (rank >= 0) & (rank < number)  # [B|1, m]
    rank = rank.clamp(0, num_queries - 1)
    if valid is None:
        return Probe(rank, present)
    order = torch.argsort((~valid).byte(), dim=-1, stable=True)  # the valid ones first, in order
    return Probe(order.gather(1, rank), present)


def probe_rows(
    q: Tensor, k: Tensor, call: Call, picked: Probe, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the softmax rows of the probed queries, a bounded number at a time.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        call: The call: causality and padding.
        picked: The queries.
        scale: Factor on the logits.

    Yields:
        The places among the probed queries and their rows [B, H, n, S] float32; zero for queries
        that are not present or see nothing.
    """
    batch, heads, num_queries, dim = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    key = torch.arange(num_keys, device=q.device)
    width = max(1, _CHUNK_BYTES // (4 * batch * kv_heads * dim))
    step = max(1, _CHUNK_BYTES // (4 * batch * heads * num_keys))
    for begin in range(0, picked.query.shape[1], step):
        part = slice(begin, begin + step)
        index, present = picked.query[:, part], picked.present[:, part]
        rows = q.gather(2, index[:, None, :, None].expand(batch, heads, -1, dim)).float()
        rows = rows.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [B, Hk, G * n, D]
        logits = torch.cat([rows @ x.float().mT for x in k.split(width, dim=2)], dim=-1)
        logits = logits.view(batch, heads, -1, num_keys).mul_(scale)
        seen = present[:, :, None]
        if call.causal:
            seen = seen & (key <= (index + num_keys - num_queries)[:, :, None])
        if call.key_valid is not None:
            seen = seen & call.key_valid[:, None]
        # Padding may be NaN: what it gave is replaced, not multiplied.
        logits = logits.masked_fill_(~seen[:, None], -torch.inf)
        yield part, torch.softmax(logits, dim=-1).nan_to_num_(0.0)


def line_sums(q: Tensor, k: Tensor, call: Call, picked: Probe, scale: float) -> Lines:
    """Sum the probed queries' exact attention over columns and over diagonals.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        call: The call: causality and padding.
        picked: The queries.
        scale: Factor on the logits.
    """
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    first = 0 if call.causal else 1 - num_queries
    offset = torch.arange(first, num_keys, device=q.device)
    columns = q.new_zeros(batch, heads, num_keys, dtype=torch.float64)
    diagonals = q.new_zeros(batch, heads, len(offset), dtype=torch.float64)
    for part, rows in probe_rows(q, k, call, picked, scale):
        columns += rows.sum(2, dtype=torch.float64)
        position = picked.query[:, part] + num_keys - num_queries
        key = position[:, :, None] - offset  # [B|1, n, L]
        inside = (key >= 0) & (key < num_keys)
        key = key.clamp(0, num_keys - 1)[:, None].expand(batch, heads, -1, -1)
        # Gathering sums in a fixed order; scattering would not on a GPU.
        found = rows.gather(3, key).masked_fill_(~inside[:, None], 0.0)
        diagonals += found.sum(2, dtype=torch.float64)
    number = picked.present.sum(-1).clamp(min=1)[:, None, None]
    return Lines(columns / number, diagonals / number, first)
