"""Plans as paged attention: every key row is a sequence, and its list is a page table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.kernels.base import AttentionOutput, with_virtual_keys
from gossamer.kernels.flash.call import Sequences, attend_pages
from gossamer.kernels.flash.lists import Lists
from gossamer.plan import SparsePlan
from gossamer.plan.rows import tile_queries, tile_rows

_WORK_BYTES = 2 << 30  # of page tables at once, and of what it takes to make them


def run(q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float) -> AttentionOutput:
    """Run a plan without causality and window.

    Tiles that share a key row become one sequence, so its list is written once and its last tile
    alone is ragged. Queries move only where the plan moves them.
    """
    batch, heads, num_queries, dim = q.shape
    out = q.new_zeros(batch * heads * num_queries, dim)
    lse = q.new_full((batch * heads * num_queries,), -torch.inf, dtype=torch.float32)
    k = with_virtual_keys(k, getattr(plan.keys, "extra_k", None))
    v = with_virtual_keys(v, getattr(plan.keys, "extra_v", None))
    if out.numel() and k.shape[2]:
        lists = Lists.of(plan, batch, heads)
        pool = _Pool.of(k, v, lists.page, heads // k.shape[1])
        queries = _Queries.of(plan)
        flat = q.contiguous().view(-1, dim)
        pairs = batch * heads  # of a batch row and a query head
        step = max(1, _WORK_BYTES // lists.bytes_per_pair)
        for first in range(0, pairs, step):
            part = slice(first, min(first + step, pairs))
            _run_part(flat, pool, lists, queries, part, (out, lse), scale)
    return AttentionOutput(
        out.view(batch, heads, num_queries, dim), lse.view(batch, heads, num_queries)
    )


def _run_part(
    q: Tensor,
    pool: _Pool,
    lists: Lists,
    queries: _Queries,
    part: slice,
    results: tuple[Tensor, Tensor],
    scale: float,
) -> None:
    """Run some pairs of batch row and head, and write their outputs.

    Args:
        q: [B * H * N, D].
        pool: The keys and values.
        lists: Makes the page table.
        queries: Which queries read which row.
        part: The pairs.
        results: out [B * H * N, D] and lse [B * H * N] of all pairs.
        scale: Factor on the logits.
    """
    num_queries = queries.num_queries
    num_pairs = part.stop - part.start
    rows = lists.make(part, pool.base[part], pool.step)
    begin = lists.select(queries.begin, part)  # [pairs, R + 1]
    num_used = (begin[:, 1:] - begin[:, :-1]).flatten()
    ahead = torch.arange(num_pairs, device=q.device)[:, None] * num_queries
    end = begin.new_full((1,), num_pairs * num_queries)
    sequences = Sequences(
        begin=torch.cat([(begin[:, :-1] + ahead).flatten(), end]).int(),
        # A sequence without keys gets no tile, and its output keeps the 0 and -inf that it was
        # filled with. flash-attn-4 would take places modulo a length of 0 for the weights, and read
        # a page in front of the list where pages come by TMA.
        used=torch.where(rows.length > 0, num_used, 0).int(),
        longest=queries.longest,
        table=rows.table,
        # A tensor of one length may come with any stride, and flash-attn-4 insists on 1.
        length=rows.length.clone(memory_format=torch.contiguous_format),
        log_weight=rows.log_weight,
    )
    inside = slice(part.start * num_queries, part.stop * num_queries)
    out, lse = results[0][inside], results[1][inside]
    if queries.order is None:
        _attend(q[inside], pool, (out, lse), sequences, scale)
        return
    order = (lists.select(queries.order, part) + ahead).flatten()  # [pairs * N]
    sorted_out, sorted_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    sorted_q = q[inside].index_select(0, order)
    _attend(sorted_q, pool, (sorted_out, sorted_lse), sequences, scale)
    out.index_copy_(0, order, sorted_out)
    lse.index_copy_(0, order, sorted_lse)


def _attend(
    q: Tensor, pool: _Pool, results: tuple[Tensor, Tensor], sequences: Sequences, scale: float
) -> None:
    """Attend with a head axis of one: a head's keys are told from another's by their pages."""
    out, lse = results
    attend_pages(q[:, None], pool.k, pool.v, out[:, None], lse[None], sequences, scale)


class _Pool(NamedTuple):
    """The keys and values of all batch rows and KV heads as pages.

    Attributes:
        k: [pages, keys per page, 1, D].
        v: As k.
        base: [B * H] int32, page of the first key of each pair of batch row and query head.
        step: Pages from one key (or block, where a page is one) of a head to the next.
    """

    k: Tensor
    v: Tensor
    base: Tensor
    step: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, page: int, group: int) -> _Pool:
        """Cut k and v [B, Hk, S, D] into pages, without a copy where their memory allows."""
        batch, kv_heads, num_keys, dim = k.shape
        row = torch.arange(batch, dtype=torch.int32, device=k.device)[:, None]
        head = torch.arange(kv_heads, dtype=torch.int32, device=k.device).repeat_interleave(group)
        token_major = page == 1 and all(x.transpose(1, 2).is_contiguous() for x in (k, v))
        if token_major:  # as models hold them, [B, S, Hk, D] in memory
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            base, step = row * (num_keys * kv_heads) + head, kv_heads
        else:
            base, step = (row * kv_heads + head) * (num_keys // page), 1
        k, v = (x.contiguous().view(-1, page, 1, dim) for x in (k, v))
        return cls(k, v, base.flatten(), step)


class _Queries(NamedTuple):
    """Which queries read which key row.

    Attributes:
        num_queries: N.
        order: [B|1, H|1, N] int64, the queries of row 0, then those of row 1, …; None where they
            stand so.
        begin: [B|1, H|1, R + 1] int64, where in that order each row begins, and the end.
        longest: Host bound on the queries of one row.
    """

    num_queries: int
    order: Tensor | None
    begin: Tensor
    longest: int

    @classmethod
    def of(cls, plan: SparsePlan) -> _Queries:
        """Sort the queries by the key row that their tile reads, on the device."""
        num_queries, tile, num_rows = plan.num_queries, plan.tile, plan.keys.num_rows
        numbers = torch.arange(num_rows + 1, device=plan.device)
        if plan.query_index is None and plan.tile_row is None:
            begin = (numbers * tile).clamp(max=num_queries).view(1, 1, -1)
            return cls(num_queries, None, begin, tile)
        queries, rows = tile_queries(plan), tile_rows(plan)
        batch, heads = (max(queries.shape[i], rows.shape[i]) for i in (0, 1))
        # Tiles are few: sorting them costs nothing beside sorting queries.
        rows, tiles = rows.expand(batch, heads, -1).sort(dim=-1, stable=True)
        at = tiles[..., None].expand(-1, -1, -1, tile)
        queries = queries.expand(batch, heads, -1, -1).gather(2, at)  # [B, H, T, tile]
        is_query = queries >= 0
        place = is_query.flatten(2).cumsum(-1) - 1
        # Tile rows without a query write to a slot that is cut off.
        place = torch.where(is_query.flatten(2), place, num_queries)
        order = queries.new_zeros(batch, heads, num_queries + 1)
        order = order.scatter_(2, place, queries.flatten(2))[..., :num_queries]
        before = pad(is_query.sum(-1).cumsum(-1), (1, 0))  # [B, H, T + 1], queries before a tile
        first = torch.searchsorted(rows, numbers.expand(batch, heads, -1).contiguous())
        longest = tile if plan.tile_row is None else num_queries
        return cls(num_queries, order, before.gather(2, first), longest)
