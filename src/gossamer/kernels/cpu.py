"""The CPU kernel: torch alone. It walks key rows: one gather per row, then dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, with_positive_scale, with_virtual_keys
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.rows import tile_queries, tile_rows
from gossamer.plan.visible import Bounds, allowed, bounds, is_masked, sink_ends

_GATHER_BYTES = 32 << 20  # of gathered keys and values at once; more falls out of the cache
_MASK_BYTES = 16 << 20  # of one additive mask
_BATCH_BYTES = 8 << 20  # of several rows together; 1 MiB took 1.4 times as long, 32 MiB 1.1
_QUERY_BLOCK = 32  # queries that torch's kernel takes at once
_PADDING = 1.15  # padded over real queries of a batch, at most; 1.0 and 1.4 are no faster
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CpuKernel:
    """Runs every plan on CPU tensors, in the input's dtype with float32 scores and sums."""

    name = "cpu"

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return why the kernel cannot run: another device or dtype, or gradients wanted."""
        del k, v, plan
        reasons = []
        if q.device.type != "cpu":
            reasons.append(f"runs on CPU tensors, these are on {q.device}")
        if q.dtype not in _DTYPES:
            reasons.append(f"dtype {q.dtype} is not one of {', '.join(map(str, _DTYPES))}")
        if gradients:
            reasons.append("inference only; use kernel='reference' for gradients")
        return reasons

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan: a full causal one as a whole, others one (batch, head) after another."""
        if plan.causal and _is_full(plan):
            whole = _run_causal(q, k, v, plan, scale)
            if whole is not None:
                return whole
        keys = plan.keys
        group = q.shape[1] // k.shape[1]
        k = with_virtual_keys(k, getattr(keys, "extra_k", None))
        v = with_virtual_keys(v, getattr(keys, "extra_v", None))
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32)
        reader = _Reader.of(plan)
        sinks = sink_ends(plan).expand(q.shape[0])
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                head = _Head(q[b, h], k[b, h // group], v[b, h // group], scale, plan, sinks[b])
                _run_head(head, reader, b, h, out[b, h], lse[b, h])
        return AttentionOutput(out, lse)


def _is_full(plan: SparsePlan) -> bool:
    """Return whether every query is listed with every key, all of weight 1."""
    keys = plan.keys
    # A query_index may leave queries out, where somebody checks a kernel on some of the tiles.
    if plan.query_index is not None or plan.window is not None:
        return False
    if isinstance(keys, KeyBlocks):
        return bool((keys.count == keys.num_blocks(plan.num_keys)).all())
    if keys.extra_k is not None or (keys.log_weight is not None and bool(keys.log_weight.any())):
        return False
    return bool((keys.count == plan.num_keys).all())


def _run_causal(
    q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
) -> AttentionOutput | None:
    """Run a full causal plan by torch's causal kernel; None where it would spread a NaN.

    That kernel passes by what lies above the diagonal, which a mask would have it compute: .24 of
    the time of `_masked` at 4,096 tokens, one thread. Its diagonal is that of a square, so keys in
    front of it, which all queries see, are a part of their own, and queries in front see nothing.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if min(num_queries, num_keys) == 0:
        return None
    valid = plan.key_valid
    if valid is not None:  # padding may hold anything, and 0 * NaN is NaN
        padding = ~valid[:, None, :, None]
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    if not bool(k.isfinite().all() & v.isfinite().all()):
        return None  # some queries see it and others of their block do not
    q, scale = with_positive_scale(q, scale)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    blind = max(0, num_queries - num_keys)
    before = max(0, num_keys - num_queries)
    parts = []
    for span, causal in ((slice(before, None), True), (slice(0, before), False)):
        keys, values = k[:, :, span], v[:, :, span]
        if keys.shape[2]:
            shown = None if valid is None else valid[:, span]
            parts.append(_run_part(q[:, :, blind:], keys, values, scale, shown, causal=causal))
    out, lse = _merge(parts)
    if blind:
        out = torch.nn.functional.pad(out, (0, 0, blind, 0))
        lse = torch.nn.functional.pad(lse, (blind, 0), value=-torch.inf)
    return AttentionOutput(out, lse)


def _run_part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend all heads to some of the keys.

    Args:
        q: [B, H, n, D].
        k: [B, H, L, D], finite.
        v: [B, H, L, D], finite.
        scale: Factor on the logits, above 0: the kernel masks before it scales.
        valid: [B|1, L] bool, False for padded keys; None for none.
        causal: Query i sees key j iff j <= i; L is n then.

    Returns:
        out as q, 0 for queries that see no key, and the log-sum-exp [B, H, n], -inf there.
    """
    mask = None
    if valid is not None:
        zeros = torch.zeros(valid.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        mask = zeros.masked_fill(~valid, -torch.inf)[:, None, None]
        mask = mask.expand(q.shape[0], 1, q.shape[2], -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if valid is None:
        return out, lse
    seen = valid.cumsum(-1) > 0 if causal else valid.any(-1, keepdim=True)  # [B|1, n or 1]
    out = out.masked_fill(~seen[:, None, :, None], 0.0)
    return out, lse.masked_fill(~seen[:, None], -torch.inf)


@dataclass(frozen=True)
class _Head:
    """The tensors of one (batch, head): q [N, D], k and v [S + E, D]; where its sinks end, []."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    plan: SparsePlan
    sink: Tensor


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


@dataclass(frozen=True)
class _Job:
    """The queries that read one key row, and the row."""

    query: Tensor  # [n] int64
    index: Tensor  # [L] int32 or int64, ascending
    log_weight: Tensor | None  # [L]


def _run_head(head: _Head, reader: _Reader, b: int, h: int, out: Tensor, lse: Tensor) -> None:
    """Write out [N, D] and lse [N] of one (batch, head)."""
    queries = _shared(reader.queries, b, h)  # [T, tile]
    rows = _shared(reader.rows, b, h)  # [T]
    by_row = torch.argsort(rows, stable=True)
    flat = queries[by_row].flatten()
    row_of = rows[by_row].repeat_interleave(queries.shape[1])
    kept = flat >= 0
    flat, row_of = flat[kept], row_of[kept]
    row_ids, num_queries = torch.unique_consecutive(row_of, return_counts=True)
    jobs = [
        _Job(query, *reader.keys_of(b, h, row))
        for row, query in zip(row_ids.tolist(), flat.split(num_queries.tolist()), strict=True)
    ]
    jobs = [job for job in jobs if len(job.index) > 0]  # no key: 0 and -inf stay
    if is_masked(head.plan):
        batches = [[job] for job in jobs]
    else:
        batches = _batches(jobs, 2 * head.k.shape[1] * head.k.element_size())
    for batch in batches:
        if len(batch) == 1:
            job = batch[0]
            result = _run_row(head, head.q[job.query], job)
            out[job.query], lse[job.query] = result
        else:
            _run_batch(head, batch, out, lse)


def _batches(jobs: list[_Job], key_bytes: int) -> list[list[_Job]]:
    """Put rows of equally many keys and about as many queries together.

    Each operation starts its threads anew, which costs more than a small row's work: one batch of
    rows took 0.6 of the time of its rows one by one (4,160 tokens, density .15, 2 threads).

    Args:
        jobs: The rows.
        key_bytes: Bytes of one gathered key and value.
    """
    batches: list[list[_Job]] = []
    padded = real = 0
    for job in sorted(jobs, key=lambda job: (len(job.index), -len(job.query))):
        size = -(-len(job.query) // _QUERY_BLOCK) * _QUERY_BLOCK
        if batches and len(batches[-1][0].index) == len(job.index):
            batch = batches[-1]
            weighted = (batch[0].log_weight is None) == (job.log_weight is None)
            fits = (len(batch) + 1) * len(job.index) * key_bytes <= _BATCH_BYTES
            if weighted and fits and padded + len(batch[0].query) <= _PADDING * (real + size):
                batch.append(job)
                padded, real = padded + len(batch[0].query), real + size
                continue
        batches.append([job])
        padded = real = size
    return batches


def _run_batch(head: _Head, batch: list[_Job], out: Tensor, lse: Tensor) -> None:
    """Write the results of several rows of equally many keys, in one attention call."""
    slots = torch.nn.utils.rnn.pad_sequence(
        [job.query for job in batch], batch_first=True, padding_value=-1
    )  # [G, n]
    index = torch.cat([job.index for job in batch])  # [G * L]
    shape = (len(batch), -1, head.k.shape[1])
    q = head.q.index_select(0, slots.clamp(min=0).flatten()).view(shape)
    k, v = (x.index_select(0, index).view(shape) for x in (head.k, head.v))
    weights = [job.log_weight for job in batch if job.log_weight is not None]
    mask = torch.stack(weights)[:, None] if weights else None  # [G, 1, L]
    results, sums = _attend(q, k, v, head.scale, mask)
    kept = slots >= 0
    out[slots[kept]] = results[kept]
    lse[slots[kept]] = sums[kept].float()


def _run_row(head: _Head, q: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
    """Attend queries q [n, D] to the keys of one row, in chunks that stay small."""
    query, index, log_weight = job.query, job.index, job.log_weight
    masked = is_masked(head.plan)
    if masked:  # stop at the last key that any query of the row sees
        limits = bounds(head.plan, query, head.sink)
        last = limits.high.maximum(limits.sink).max()
        reach = torch.searchsorted(index, last.to(index.dtype))
        if int(reach) < len(index) and _no_virtual(head.plan):
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
    """Attend with an additive mask.

    Args:
        q: [n, D] or [G, n, D].
        k: [L, D] or [G, L, D].
        v: [L, D] or [G, L, D].
        scale: Factor on the logits.
        mask: Broadcasts to [n, L] or [G, n, L]; None for none.

    Returns:
        out as q, and the log-sum-exp [n] or [G, n], float64 for float64 and float32 otherwise.
    """
    single = q.dim() == 2
    if single:
        q, k, v = q[None], k[None], v[None]
    if mask is not None:
        # The op reads a mask of float64 queries as float64, whatever it is; others take float32,
        # in which a weight keeps its precision.
        mask = mask.to(torch.promote_types(q.dtype, torch.float32))
        mask = mask.expand(q.shape[0], q.shape[1], -1)[:, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], k[:, None], v[:, None], 0.0, False, attn_mask=mask, scale=scale
    )
    out, lse = out[:, 0], lse[:, 0]
    return (out[0], lse[0]) if single else (out, lse)


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
        limits = bounds(head.plan, query[part], head.sink)
        limits = Bounds(*(x[:, None] for x in limits))
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
    """Merge attention over disjoint sets of keys, out [..., n, D], by log-sum-exp [..., n].

    The log-sum-exp comes back in float32; before, the shares of float64 need its own precision.
    """
    if len(partial) == 1:
        return partial[0][0], partial[0][1].float()
    sums = torch.stack([lse for _, lse in partial])  # [chunks, ..., n]
    total = sums.logsumexp(0)
    share = (sums - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = sum(out.to(w.dtype) * w[..., None] for (out, _), w in zip(partial, share, strict=True))
    return torch.as_tensor(out).to(partial[0][0].dtype), total.float()
