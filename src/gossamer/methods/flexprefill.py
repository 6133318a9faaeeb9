"""FlexPrefill: per head, blocks by pooled score or by columns and diagonals, to a share of mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group import block_means
from gossamer.methods.base import Method, State, check_tensors, logit_scale
from gossamer.methods.blocked import block_plan
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan
from gossamer.select import BlockLayout, block_layout, top_blocks, top_mass
from gossamer.select.probe import Lines, Probe, line_sums, probe
from gossamer.select.spans import Spans, block_spans, valid_queries, visible_pairs
from gossamer.select.vertical_slash import (
    block_sums,
    diagonal_blocks,
    line_scores,
)
from gossamer.select.whole_head import top_pairs


class _Pooled(NamedTuple):
    """What both patterns are decided from.

    Attributes:
        log_share: [B, H, R, C] float32, log of each row's pooled softmax; -inf where not visible.
        aware: [B, H] bool, heads that take the query-aware pattern.
        lines: The representative queries' column and diagonal sums.
    """

    log_share: Tensor
    aware: Tensor
    lines: Lines


@register
@dataclass(frozen=True, kw_only=True)
class FlexPrefill(Method):
    """Choose a pattern per head by how well pooled attention predicts exact attention.

    The last `tile` queries represent the head (the middle ones in calls that are not causal, where
    the last see no key behind them). Their exact attention, averaged over them and summed per key
    block, is compared with the softmax of pooled logits by the square root of the Jensen-Shannon
    divergence (natural logs). Below `tau` the head is *query-aware*: the pooled softmax of all
    tiles is ranked as one list, and the fewest blocks covering `mass` of it are kept. Otherwise it
    is *vertical-slash*: the fewest block columns that cover `mass` of the representative queries'
    attention, and the fewest bands of `block` diagonals that do; a tile reads every block that a
    chosen band crosses. The first key block, the main diagonal and `min_budget` keys per tile are
    kept in any case.

    Under `density` the pattern is chosen as before; a query-aware head keeps the best entries of
    its ranking, a vertical-slash head the blocks of the best lines, a block promising the mass of
    its column or of its diagonals, whichever is more. The first block and the main diagonal come
    first inside the budget, so that it holds; every tile keeps a block.

    Differs from the public code: a probability of exactly zero contributes zero to the divergence
    (there it makes it NaN, and the head silently vertical-slash); columns are counted in the blocks
    where they lie (there their number is divided by 128 as if they were neighbours); the entry that
    crosses `mass` is kept by both patterns; the call's scale is used throughout; nothing is kept
    between calls; ragged blocks weigh as many keys as they hold; batches and padding are handled.

    Attributes:
        density: Share of a head's visible pairs instead of `mass` and `min_budget`.
        mass: Share of the attention to cover (the paper's gamma).
        tau: Greatest divergence of a query-aware head, 0…1; 0 makes every head vertical-slash.
        min_budget: Keys that each tile keeps at least, where it sees as many.
        block: Keys per block.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "flexprefill"
    paper: ClassVar[str] = "FlexPrefill, arXiv 2502.20766"

    density: float | None = None
    mass: float = 0.9
    tau: float = 0.1
    min_budget: int = 512
    block: int = 128
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.density is not None:
            check_share(self.name, "density", self.density)
        check_share(self.name, "mass", self.mass)
        check_share(self.name, "tau", self.tau, zero=True)
        for name in ("min_budget", "block", "tile"):
            check_count(self.name, name, getattr(self, name))
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "mass", "min_budget")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def query_aware(self, q: Tensor, k: Tensor, call: Call | None = None) -> Tensor:
        """Return which heads take the query-aware pattern, [B, H] bool.

        Args:
            q: [B, H, N, D] queries of a call without text.
            k: [B, Hk, S, D] keys.
            call: The facts about the call; None for self-standing attention.
        """
        call = Call() if call is None else call
        check_tensors(q, k, k)
        call.check(q.shape[0], q.shape[2], k.shape[2])
        return self._pooled(q, k, call, self._layout(q, k, call)).aware

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Decide each head's pattern and keep its blocks."""
        del v, state
        layout = self._layout(q, k, call)
        spans = block_spans(
            call, q.shape[2], k.shape[2], tile=self.tile, block=self.block, device=q.device
        )
        pooled = self._pooled(q, k, call, layout)
        first = layout.possible & (layout.possible.long().cumsum(-1) == 1)
        main = _main_diagonal(spans) & layout.possible
        aware = pooled.aware[:, :, None, None]
        scores = torch.where(
            aware, pooled.log_share.exp(), line_scores(pooled.lines, spans, self.block)
        )
        if self.density is not None:
            pairs = visible_pairs(
                call, q.shape[2], k.shape[2], tile=self.tile, block=self.block, device=q.device
            )
            # Both kinds of score lie in 0…1: two more come before all others.
            keep = top_pairs(scores + 2.0 * (first | main), pairs, self.density, layout)
        elif self.mass >= 1:  # whatever rounds to zero is covered too
            keep = layout.possible.expand(scores.shape)
        else:
            empty = (spans.tile_stop <= spans.tile_start)[:, None, :, None]
            by_query = _cover(pooled.log_share.masked_fill(empty, -torch.inf), self.mass)
            keep = torch.where(aware, by_query, self._lines(pooled.lines, spans))
            scores = scores.masked_fill(~layout.possible, -torch.inf)
            count = torch.full(scores.shape[:3], -(-self.min_budget // self.block), device=q.device)
            keep = keep | top_blocks(scores, count) | first | main
            keep = keep & layout.possible
            keep = keep if layout.forced is None else keep | layout.forced
        return block_plan(keep, q.shape[2], k.shape[2], call, tile=self.tile, block=self.block)

    def _layout(self, q: Tensor, k: Tensor, call: Call) -> BlockLayout:
        """Return the blocks that tiles may read."""
        return block_layout(
            call, q.shape[2], k.shape[2], tile=self.tile, block=self.block, device=q.device
        )

    def _pooled(self, q: Tensor, k: Tensor, call: Call, layout: BlockLayout) -> _Pooled:
        """Pool, look at the representative queries exactly, and compare."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        valid = None if call.key_valid is None else call.key_valid.expand(q.shape[0], -1)
        valid_q = None if valid_queries(call, num_queries, num_keys) is None else valid
        scale = logit_scale(q, call)
        mean_q, _ = block_means(q, self.tile, valid=valid_q)  # [B, H, R, D]
        mean_k, size = block_means(k, self.block, valid=valid)  # [B, Hk, C, D], [B|1, C]
        log_size = size.float().log()[:, None, None]  # -inf for blocks of padding
        log_share = _log_share(_logits(mean_q, mean_k) * scale + log_size, layout.possible)

        where = "last" if call.causal else "middle"
        picked = probe(call, num_queries, num_keys, self.tile, where=where, device=q.device)
        lines = line_sums(q, k, call, picked, scale)
        exact = block_sums(lines.columns, self.block)  # [B, H, C]
        logits = _logits(_mean_of(q, picked), mean_k) * scale + log_size
        guess = _log_share(logits, torch.ones_like(layout.possible[..., :1, :])).exp()[:, :, 0]
        return _Pooled(log_share, divergence(exact, guess).sqrt() < self.tau, lines)

    def _lines(self, lines: Lines, spans: Spans) -> Tensor:
        """Return the blocks on the fewest columns and bands of diagonals, [B, H, R, C] bool."""
        columns = _cover(block_sums(lines.columns, self.block).log(), self.mass)
        # Bands begin at offset 0, so the first one may be cut: fill it up.
        missing = lines.first % self.block
        padded = torch.nn.functional.pad(lines.diagonals, (missing, 0))
        bands = _cover(block_sums(padded, self.block).log(), self.mass)
        length = lines.diagonals.shape[-1]
        chosen = bands.repeat_interleave(self.block, dim=-1)[..., missing : missing + length]
        return columns[:, :, None] | diagonal_blocks(chosen, lines.first, spans)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of distributions along the last axis, natural logs.

    An entry that is zero in one or both contributes what its limit is: never NaN.

    Args:
        p: [..., C], sums to 1.
        q: [..., C], sums to 1.

    Returns:
        [...] float64, 0…ln 2.
    """
    p, q = p.double(), q.double()
    middle = (p + q) / 2
    terms = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(middle, middle)
    return (terms.sum(-1) / 2).clamp(min=0)


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the products of queries [B, H, n, D] and keys [B, Hk, C, D]: [B, H, n, C]."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [B, Hk, G, n, D]
    return (grouped @ keys[:, :, None].mT).flatten(1, 2)


def _log_share(logits: Tensor, possible: Tensor) -> Tensor:
    """Return the log-softmax of each row over what is possible; -inf elsewhere."""
    share = torch.log_softmax(logits.masked_fill(~possible, -torch.inf), dim=-1)
    return share.masked_fill(share.isnan(), -torch.inf)  # NaN: a row without any choice


def _mean_of(q: Tensor, picked: Probe) -> Tensor:
    """Return the mean of the probed queries, [B, H, 1, D] float32."""
    batch, heads, _, dim = q.shape
    index = picked.query[:, None, :, None].expand(batch, heads, -1, dim)
    present = picked.present[:, None, :, None]
    total = q.gather(2, index).masked_fill(~present, 0.0).sum(2, keepdim=True, dtype=torch.float32)
    return total / present.sum(2, keepdim=True).clamp(min=1)


def _cover(log_mass: Tensor, mass: float) -> Tensor:
    """Return the fewest entries of each head that cover `mass`, crossing one included.

    Args:
        log_mass: [B, H, ...], log of unnormalised masses; all axes behind the second compete.
        mass: Share of the total.

    Returns:
        bool, of the same shape.
    """
    flat = log_mass.flatten(2)
    return top_mass(flat[:, :, None], mass)[:, :, 0].view(log_mass.shape)


def _main_diagonal(spans: Spans) -> Tensor:
    """Return the blocks that hold a key at the position of one of the tile's queries."""
    low, high = spans.offsets()
    return (low <= 0) & (high >= 0)
