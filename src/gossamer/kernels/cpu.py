"""The CPU kernel: torch alone. It walks key rows: one gather per row, then dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, with_virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.rows import tile_queries, tile_rows
from gossamer.plan.visible import Bounds, allowed, bounds, is_masked

_GATHER_BYTES = 32 << 20  # of gathered keys and values at once; more falls out of the cache
_MASK_BYTES = 16 << 20  # of one additive mask
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CpuKernel:
    """Runs every plan on CPU tensors, in the input's dtype with float32 scores and sums."""

    name = "cpu"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> list[str]:
        """Return why the kernel cannot run: another device or dtype, or gradients wanted."""
        del plan
        reasons = []
        if q.device.type != "cpu":
            reasons.append(f"runs on CPU tensors, these are on {q.device}")
        if q.dtype not in _DTYPES:
            reasons.append(f"dtype {q.dtype} is not one of {', '.join(map(str, _DTYPES))}")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            reasons.append("inference only; use kernel='reference' for gradients")
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan, one (batch, head) after another."""
        keys = plan.keys
        group = q.shape[1] // k.shape[1]
        k = with_virtual_keys(k, getattr(keys, "extra_k", None))
        v = with_virtual_keys(v, getattr(keys, "extra_v", None))
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32)
        reader = _Reader.of(plan)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                head = _Head(q[b, h], k[b, h // group], v[b, h // group], scale, plan)
                _run_head(head, reader, b, h, out[b, h], lse[b, h])
        return AttentionOutput(out, lse)


@dataclass(frozen=True)
class _Head:
    """The tensors of one (batch, head): q [N, D], k and v [S + E, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    plan: SparsePlan


@dataclass(frozen=True)
class _Reader:
    """The plan's small tensors as Python lists, read once for all heads."""

    plan: SparsePlan
    queries: Tensor  # [B|1, H|1, T, tile]
    rows: Tensor  # [B|1, H|1, T]
    start: list[list[list[int]]]
    count: list[list[list[int]]]

    @classmethod
    def of(cls, plan: SparsePlan) -> _Reader:
        keys = plan.keys
        start = [] if isinstance(keys, KeyBlocks) else keys.start.tolist()
        return cls(plan, tile_queries(plan), tile_rows(plan), start, keys.count.tolist())

    def keys_of(self, b: int, h: int, row: int) -> tuple[Tensor, Tensor | None]:
        """Return the row's key indices [L] (ascending) and log weights [L] or None."""
        keys, plan = self.plan.keys, self.plan
        count = _at(self.count, b, h)[row]
        log_weight = None
        if isinstance(keys, KeyBlocks):
            index = _block_keys(keys, plan.num_keys, b, h, row, count)
        else:
            begin = _at(self.start, b, h)[row]
            index = keys.index[begin : begin + count]
            if keys.log_weight is not None:
                log_weight = keys.log_weight[begin : begin + count]
                if not bool(log_weight.any()):
                    log_weight = None  # all weights are 1: no mask to add
        if plan.key_valid is not None:
            valid = plan.key_valid[b if plan.key_valid.shape[0] > 1 else 0]
            kept = valid[index.clamp(max=plan.num_keys - 1)] | (index >= plan.num_keys)
            if not bool(kept.all()):
                index = index[kept]
                log_weight = None if log_weight is None else log_weight[kept]
        return index, log_weight


def _at(table: list[list[list[int]]], b: int, h: int) -> list[int]:
    """Return the entry of a table whose batch and head axes may be shared."""
    heads = table[b if len(table) > 1 else 0]
    return heads[h if len(heads) > 1 else 0]


def _shared(tensor: Tensor, b: int, h: int) -> Tensor:
    """Return tensor[b, h], whose batch and head axes may be shared."""
    return tensor[b if tensor.shape[0] > 1 else 0, h if tensor.shape[1] > 1 else 0]


def _block_keys(keys: KeyBlocks, num_keys: int, b: int, h: int, row: int, count: int) -> Tensor:
    """Return the keys of one row of blocks, ascending."""
    blocks = _shared(keys.index, b, h)[row, :count]
    place = (blocks[:, None] * keys.block + torch.arange(keys.block)).flatten()
    if keys.key_order is None:
        # Only the last block may be ragged, and it stands last.
        return (
            place if count == 0 else place[: place.numel() - max(0, int(place[-1]) + 1 - num_keys)]
        )
    order = _shared(keys.key_order, b, h)
    index = order[place[place < len(order)]]
    return index[index >= 0].sort().values


def _run_head(head: _Head, reader: _Reader, b: int, h: int, out: Tensor, lse: Tensor) -> None:
    """Write out [N, D] and lse [N] of one (batch, head)."""
    queries = _shared(reader.queries, b, h)  # [T, tile]
    rows = _shared(reader.rows, b, h)  # [T]
    by_row = torch.argsort(rows, stable=True)
    flat = queries[by_row].flatten()
    row_of = rows[by_row].repeat_interleave(queries.shape[1])
    kept = flat >= 0
    flat, row_of = flat[kept], row_of[kept]
    in_order = bool((flat == torch.arange(len(flat))).all())
    q = head.q if in_order else head.q.index_select(0, flat)
    row_ids, num_queries = torch.unique_consecutive(row_of, return_counts=True)
    results, sums = [], []
    begin = 0
    for row, number in zip(row_ids.tolist(), num_queries.tolist(), strict=True):
        end = begin + number
        index, log_weight = reader.keys_of(b, h, row)
        query = flat[begin:end]
        result = _run_row(head, q[begin:end], query, index, log_weight)
        results.append(result[0])
        sums.append(result[1])
        begin = end
    if not results:
        return
    if in_order:
        torch.cat(results, out=out)
        torch.cat(sums, out=lse)
    else:
        out.index_copy_(0, flat, torch.cat(results))
        lse.index_copy_(0, flat, torch.cat(sums))


def _run_row(
    head: _Head, q: Tensor, query: Tensor, index: Tensor, log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend queries q [n, D] to the keys of one row, in chunks that stay small."""
    masked = is_masked(head.plan)
    if masked:  # stop at the last key that any query of the row sees
        limits = bounds(head.plan, query)
        last = limits.high.maximum(limits.sink).max()
        reach = torch.searchsorted(index, last.to(index.dtype))
        if head.plan.keys.count is not None and int(reach) < len(index) and _no_virtual(head.plan):
            index = index[:reach]
            log_weight = None if log_weight is None else log_weight[:reach]
    if len(index) == 0:
        return torch.zeros_like(q), q.new_full((len(q),), -torch.inf, dtype=torch.float32)
    every = len(index) == len(head.k)
    per_key = 2 * head.k.shape[1] * head.k.element_size()
    chunk = len(index) if every else max(1, _GATHER_BYTES // per_key)
    chunk = min(chunk, _MASK_BYTES // 4) if masked else chunk
    partial = []
    for begin in range(0, len(index), chunk):
        part = index[begin : begin + chunk]
        k = head.k if every and len(part) == len(index) else head.k.index_select(0, part)
        v = head.v if every and len(part) == len(index) else head.v.index_select(0, part)
        weight = None if log_weight is None else log_weight[begin : begin + chunk]
        if masked:
            partial.append(_masked(head, q, query, k, v, part, weight))
        else:
            partial.append(_attend(q, k, v, head.scale, weight))
    return _merge(partial)


def _no_virtual(plan: SparsePlan) -> bool:
    """Return whether the plan has no virtual keys, which stand behind all real ones."""
    return getattr(plan.keys, "extra_k", None) is None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend q [n, D] to k, v [L, D] with an additive mask [L] or [n, L]: out [n, D], lse [n]."""
    if mask is not None:
        # The op reads a mask of float64 queries as float64, whatever it is; others take float32,
        # in which a weight keeps its precision.
        mask = mask.to(torch.promote_types(q.dtype, torch.float32))
        mask = mask.expand(len(q), -1)[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None, None], k[None, None], v[None, None], 0.0, False, attn_mask=mask, scale=scale
    )
    return out[0, 0], lse[0, 0].float()


def _masked(
    head: _Head,
    q: Tensor,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    log_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend where the queries of a row see different keys, a bounded number of queries at once."""
    broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # [L]
    has_broken = bool(broken.any())
    if has_broken:  # 0 * NaN is NaN: kept out here, put back below where it is seen
        k, v = (x.masked_fill(broken[:, None], 0.0) for x in (k, v))
    results, sums = [], []
    step = max(1, _MASK_BYTES // (4 * len(index)))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        limits = Bounds(*(x[:, None] for x in bounds(head.plan, query[part])))
        seen = allowed(limits, index, head.plan.num_keys)  # [n, L]
        mask = torch.zeros((), dtype=torch.float32) if log_weight is None else log_weight
        mask = torch.where(seen, mask, -torch.inf)
        out, lse = _attend(q[part], k, v, head.scale, mask)
        nothing = ~seen.any(-1)
        out = out.masked_fill(nothing[:, None], 0.0)
        lse = lse.masked_fill(nothing, -torch.inf)
        if has_broken:
            out = out.masked_fill((seen & broken).any(-1)[:, None], torch.nan)
        results.append(out)
        sums.append(lse)
    return torch.cat(results), torch.cat(sums)


def _merge(partial: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys by their log-sum-exp."""
    if len(partial) == 1:
        return partial[0]
    sums = torch.stack([lse for _, lse in partial])  # [chunks, n]
    total = sums.logsumexp(0)
    share = (sums - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = sum(out.float() * w[:, None] for (out, _), w in zip(partial, share, strict=True))
    return torch.as_tensor(out).to(partial[0][0].dtype), total
