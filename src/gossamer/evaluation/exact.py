"""Attention without approximation, streamed: outputs, entropies, and what a plan's rows read.

Everything here works on one call without a batch axis, in float64 inside, and never holds a matrix
of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.counter import uniform
from gossamer.plan import KeyTokens, SparsePlan
from gossamer.plan.rows import expand, read_rows, tile_queries, tile_rows
from gossamer.plan.visible import allowed, bounds, sink_ends

_CHUNK_BYTES = 64 << 20  # of one matrix of logits or weights
_ROW_SALT = 3  # apart from the salts of planning


@dataclass(frozen=True, eq=False)
class DenseReference:
    """What dense attention gives.

    Attributes:
        out: [H, N, D] float32, rounded from float64.
        entropy: [H] float64, mean entropy of the attention rows in nats.
    """

    out: Tensor
    entropy: Tensor


def dense_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> DenseReference:
    """Compute dense attention over all keys.

    Args:
        q: [H, N, D] queries.
        k: [Hk, S, D] keys.
        v: [Hk, S, D] values.
        scale: Factor on the logits; None for 1/sqrt(D).
    """
    group = q.shape[0] // k.shape[0]
    out = q.new_empty(q.shape, dtype=torch.float32)
    entropy = q.new_zeros(q.shape[0], dtype=torch.float64)
    for head in range(q.shape[0]):
        values = v[head // group].double()  # [S, D]
        for rows, logits in _logits(q[head], k[head // group], scale):
            out[head, rows] = (logits.softmax(-1) @ values).float()
            entropy[head] += row_entropy(logits).sum()
    return DenseReference(out, entropy / q.shape[1])


def row_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of each attention row, [rows], of its logits [rows, S]."""
    lse = logits.logsumexp(-1, keepdim=True)
    p = (logits - lse).exp_()
    # An underflown p is 0 and its logit finite, so the product is 0, as it should be.
    return lse.squeeze(-1) - (p * logits).sum(-1)


def sample_rows(num_queries: int, count: int, *, device: torch.device) -> Tensor:
    """Choose query rows, one at random from each of `count` equal strata, the same every time.

    Evenly spaced rows would meet the columns of a grid at few places only.

    Returns:
        [min(count, N)] int64, ascending.
    """
    count = min(count, num_queries)
    bound = torch.arange(count + 1, device=device) * num_queries // count
    start, size = bound[:-1], bound.diff()
    inside = uniform(_ROW_SALT, num_queries, start, device=device)
    return start + (inside * size).long()


class PlanRows:
    """Reads single query rows of a plan that was made for one call of batch size 1."""

    def __init__(self, plan: SparsePlan, heads: int) -> None:
        """Find the key row of every query.

        Args:
            plan: The plan.
            heads: H, query heads.
        """
        queries = expand(tile_queries(plan), 1, heads)  # [1, H, T, tile]
        row_of_tile = expand(tile_rows(plan), 1, heads)[..., None].expand_as(queries).flatten(2)
        slot = torch.where(queries < 0, plan.num_queries, queries).flatten(2)
        shape = (1, heads, plan.num_queries + 1)
        row_of = torch.zeros(shape, dtype=torch.int64, device=plan.device)
        self._row_of = row_of.scatter_(2, slot, row_of_tile)[0]  # [H, N + 1]
        self._plan = plan
        self.num_extra = plan.keys.num_extra if isinstance(plan.keys, KeyTokens) else 0

    def weights(self, queries: Tensor) -> Tensor:
        """Return the weights of some query rows, [H, n, S + E] float64; 0 for not read."""
        plan, heads = self._plan, self._row_of.shape[0]
        row = self._row_of[:, queries].flatten()  # [H * n]
        head = torch.arange(heads, device=row.device).repeat_interleave(len(queries))
        rows = read_rows(plan, torch.zeros_like(row), head, row)
        width = plan.num_keys + self.num_extra
        weight = rows.listed.double() if rows.log_weight is None else rows.log_weight.double().exp()
        # The last column takes the padding and is cut off.
        column = torch.where(rows.listed, rows.index, width)
        result = weight.new_zeros(len(row), width + 1).scatter_(1, column, weight)[:, :width]
        index = torch.arange(width, device=row.device)
        limits = bounds(plan, queries[:, None], sink_ends(plan)[0])
        inside = allowed(limits, index, plan.num_keys)  # [n, S + E]
        return result.view(heads, len(queries), width) * inside


@dataclass(frozen=True, eq=False)
class Coverage:
    """How close the rows of a plan are to dense attention, as distributions over keys.

    Attributes:
        mass: [H] float64, mean probability of the keys read.
        hellinger: [H] float64, mean Hellinger distance.
    """

    mass: Tensor
    hellinger: Tensor


def coverage(q: Tensor, k: Tensor, plan: SparsePlan, rows: Tensor) -> Coverage:
    """Compare the attention rows of a plan with those of dense attention.

    With P the dense distribution of a row, w the plan's weights, and P~ proportional to w * P, the
    Hellinger distance is H = sqrt(1 - sum sqrt(P * P~)). Where all weights are 1 this is
    sqrt(1 - sqrt(m)) with m the mass covered, computed from the mass left out so that it is 0 for
    a full row. What a virtual key gets is spread evenly over the keys that it stands for; where the
    plan does not name them, it counts as probability that P does not have.

    Args:
        q: [H, N, D] queries.
        k: [Hk, S, D] keys.
        plan: For this call, batch size 1.
        rows: [n] int64, the query rows to compare.
    """
    reader = PlanRows(plan, q.shape[0])
    group = q.shape[0] // k.shape[0]
    scale = q.shape[-1] ** -0.5 if plan.scale is None else plan.scale
    keys = k.double()
    if isinstance(plan.keys, KeyTokens) and plan.keys.extra_k is not None:
        keys = torch.cat([keys, plan.keys.extra_k[0].double()], dim=1)  # [Hk, S + E, D]
    weighted = reader.num_extra > 0 or getattr(plan.keys, "log_weight", None) is not None
    mass = q.new_zeros(q.shape[0], dtype=torch.float64)
    distance = torch.zeros_like(mass)
    per_row = 8 * q.shape[0] * keys.shape[1]
    for part in rows.split(max(1, _CHUNK_BYTES // per_row)):
        queries = q[:, part].double().unflatten(0, (-1, group)).flatten(1, 2)  # [Hk, G * n, D]
        logits = (queries @ keys.mT * scale).view(q.shape[0], len(part), -1)  # [H, n, S + E]
        weights = reader.weights(part)
        p = logits[..., : plan.num_keys].softmax(-1)
        left_out = (p * (weights[..., : plan.num_keys] == 0)).sum(-1)  # [H, n]
        mass += (1 - left_out).sum(-1)
        if weighted:
            squared = 1 - (p * _read_share(logits, weights, plan)).sqrt().sum(-1)
        else:
            squared = left_out / (1 + (1 - left_out).clamp(min=0).sqrt())
        distance += squared.clamp(min=0).sqrt().sum(-1)
    return Coverage(mass / len(rows), distance / len(rows))


def _read_share(logits: Tensor, weights: Tensor, plan: SparsePlan) -> Tensor:
    """Return the plan's distribution over the real keys, [H, n, S], of weighted or virtual rows."""
    read = logits + weights.log()
    total = read.logsumexp(-1, keepdim=True)
    share = (read - total.masked_fill(total == -torch.inf, 0.0)).exp()  # 0 where nothing is read
    real, virtual = share[..., : plan.num_keys], share[..., plan.num_keys :]
    owner = plan.keys.extra_of if isinstance(plan.keys, KeyTokens) else None
    if owner is None or virtual.shape[-1] == 0:
        return real
    heads = logits.shape[0]
    owner = owner[0].long()  # [Hk, S]
    owner = owner.repeat_interleave(heads // owner.shape[0], dim=0)  # [H, S]
    owned = owner >= 0
    sizes = virtual.new_zeros(heads, virtual.shape[-1])
    sizes.scatter_add_(1, owner.clamp(min=0), owned.double())
    each = virtual / sizes.clamp(min=1)[:, None]
    index = owner.clamp(min=0)[:, None].expand_as(real)
    return real + each.gather(2, index) * owned[:, None]


def _logits(q: Tensor, k: Tensor, scale: float | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits [rows, S] float64, for one head's q [N, D] and k [S, D]."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.double().mT
    step = max(1, _CHUNK_BYTES // (8 * k.shape[0]))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        yield rows, q[rows].double() @ keys * factor
