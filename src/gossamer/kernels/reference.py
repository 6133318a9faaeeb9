"""The oracle: every plan, in float64, on any device, with gradients. Slow, and plainly right."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.base import AttentionOutput, BackwardInput, with_virtual_keys
from gossamer.plan import SparsePlan
from gossamer.plan.rows import expand, read_rows, tile_queries, tile_rows
from gossamer.plan.visible import Bounds, allowed, bounds, sink_ends

_CHUNK_BYTES = 128 << 20  # of the float64 gathered keys and logits held at once
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


class ReferenceKernel:
    """Softmax over the listed keys, tile by tile, as the plan's definition says."""

    name = "reference"

    def supports(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, *, gradients: bool
    ) -> list[str]:
        """Return no reason: the reference runs everything."""
        del q, k, v, plan, gradients
        return []

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float
    ) -> AttentionOutput:
        """Run the plan in float64."""
        batch, heads, num_queries, dim = q.shape
        group = heads // k.shape[1]
        keys = plan.keys
        k = with_virtual_keys(k, getattr(keys, "extra_k", None)).double()
        v = with_virtual_keys(v, getattr(keys, "extra_v", None)).double()
        queries = expand(tile_queries(plan), batch, heads).flatten(0, 2)  # [B*H*T, tile]
        rows = expand(tile_rows(plan), batch, heads).flatten()
        tiles = torch.arange(len(rows), device=q.device)
        of_batch, of_head = tiles // (heads * plan.num_tiles), tiles // plan.num_tiles % heads
        sinks = sink_ends(plan).expand(batch)[of_batch]
        outs: list[Tensor] = []
        sums: list[Tensor] = []
        per_tile = 8 * max(k.shape[2], 1) * (2 * dim + 2 * plan.tile)
        for part in tiles.split(max(1, _CHUNK_BYTES // per_tile)):
            b, h, query = of_batch[part], of_head[part], queries[part]
            row = read_rows(plan, b, h, rows[part])
            limits = bounds(plan, query, sinks[part, None])
            limits = Bounds(*(x[..., None] for x in limits))  # [n, tile, 1]
            inside = allowed(limits, row.index[:, None], plan.num_keys)
            seen = row.listed[:, None] & inside  # [n, tile, L]
            at = (b[:, None], (h // group)[:, None], row.index)
            unlisted = ~row.listed[..., None]
            q_tile = q[b[:, None], h[:, None], query.clamp(min=0)].double()
            logits = (q_tile @ k[at].masked_fill(unlisted, 0.0).mT) * scale
            if row.log_weight is not None:
                logits = logits + row.log_weight[:, None].double()
            out, lse = _softmax(logits, v[at].masked_fill(unlisted, 0.0), seen)
            outs.append(out)
            sums.append(lse)
        # Scatter the tiles' rows to their queries; rows without a query go to a slot cut off.
        slot = torch.where(queries < 0, num_queries, queries).view(batch, heads, -1)
        out = q.new_zeros(batch, heads, num_queries + 1, dim, dtype=torch.float64)
        lse = out.new_full(out.shape[:3], -torch.inf)
        if outs:
            values = torch.cat(outs).view(batch, heads, -1, dim)
            out = out.scatter(2, slot[..., None].expand_as(values), values)
            lse = lse.scatter(2, slot, torch.cat(sums).view(batch, heads, -1))
        return AttentionOutput(out[:, :, :num_queries].to(q.dtype), lse[:, :, :num_queries].float())

    def backward(
        self, given: BackwardInput, plan: SparsePlan, scale: float, *, of_keys: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients that torch derives from `run`, which is run once more for it."""
        q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
        d_lse = torch.zeros_like(given.lse) if given.d_lse is None else given.d_lse
        # An op's body runs with autograd shut out, which enabling gradients alone does not undo.
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
            results = self.run(q, k, v, plan, scale)
            d_q, *rest = torch.autograd.grad(
                results, (q, k, v) if of_keys else (q,), (given.d_out, d_lse)
            )
        d_k, d_v = rest or (None, None)
        return d_q, d_k, d_v


def _softmax(logits: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [n, tile, D] and log-sum-exp [n, tile] over the keys `seen` [n, tile, L]."""
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    empty = lse == -torch.inf
    p = (logits - lse.masked_fill(empty, 0.0)[..., None]).exp()
    # 0 * NaN is NaN: an unseen key of the tile must not reach a query through its value.
    broken = ~v.isfinite()
    out = p @ v.masked_fill(broken, 0.0)
    reached = (seen.double() @ broken.double()) > 0
    return out.masked_fill(reached, torch.nan), lse
