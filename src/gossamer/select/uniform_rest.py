"""The best keys of each group of queries exactly, and a uniform sample of all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.counter import uniform
from gossamer.group import Clusters
from gossamer.plan.visible import first_end

_CHUNK_BYTES = 32 << 20  # of the int64 places of one piece of scores
_LINE_BYTES = 64 << 20  # of the float32 keys held at once
_ORDER_SALT, _PHASE_SALT = 3, 4  # apart from those of the clusterings and of InstaGen
_PHASE_BITS = 2.0**32  # so that phase + i is exact in float64


class Chosen(NamedTuple):
    """The keys of each row: first the exact ones, then the sampled ones.

    Attributes:
        tokens: [B, H, R, L] int32, keys in no order; what stands behind the counts is no key.
        num_exact: [B, H, R] int64.
        num_sampled: [B, H, R] int64.
        num_rest: [B, H, R] int64, the keys sampled from.
    """

    tokens: Tensor
    num_exact: Tensor
    num_sampled: Tensor
    num_rest: Tensor


@dataclass(frozen=True, eq=False)
class ExactAndRest:
    """Chooses keys for groups of queries: the exact set by score, the sample by chance.

    Attributes:
        queries: The groups, [B, H, R] of them, with their centroids.
        k: [B, Hk, S, D] keys.
        call: The call.
        scale: Factor on the logits.
        sink_keys: So many first valid keys are exact in any case.
        local: Keys within this distance of a query of the group are; None for no such keys.
        exact: [B, 1, 1] int64, keys of the exact set. Keys that are exact in any case take at most
            half of it, those with the highest logits first.
    """

    queries: Clusters
    k: Tensor
    call: Call
    scale: float
    sink_keys: int
    local: int | None
    exact: Tensor

    def choose(self, sampled: Tensor, width: int, *, use: int) -> Chosen:
        """Choose the exact keys of each group and sample from the others, without replacement.

        The sample of a row is a uniformly random set of its size: the keys of each head stand in a
        random order, from which every row takes evenly spaced ones of those not exact.

        Args:
            sampled: [B, 1 or H, 1 or R] int64, keys to sample, as far as there are so many.
            width: Room for the keys of a row, exact and sampled.
            use: Tells samples of one call apart; they are independent.
        """
        batch, heads, groups, _ = self.queries.centroids.shape
        group = heads // self.k.shape[1]
        sampled = sampled.expand(batch, heads, groups)
        shape = (batch, self.k.shape[1], group * groups)  # rows of one KV head
        index = torch.empty(*shape, width, dtype=torch.int32, device=self.k.device)
        counts = torch.empty(3, *shape, dtype=torch.int64, device=self.k.device)
        phase = self._phases(use).unflatten(1, (-1, group)).flatten(2).expand(shape)
        sampled = sampled.unflatten(1, (-1, group)).flatten(2)
        for b, h, order, keys, valid in self._lines(use):
            size = max(1, _CHUNK_BYTES // (8 * len(b) * keys.shape[1]))
            for rows in torch.arange(shape[2], device=self.k.device).split(size):
                at = (b[:, None], h[:, None], rows)
                exact = self._exact_set(at, order, keys, valid)  # [L, r, S]
                places, number = _places(exact, valid, sampled[at], phase[at], width)
                index[at] = order[:, None].expand_as(exact).gather(2, places).int()
                counts[:, *at] = number
        index = index.view(batch, heads, groups, width)
        return Chosen(index, *counts.view(3, batch, heads, groups))

    def _phases(self, use: int) -> Tensor:
        """Return the phase of each row, [H, R] float64 with 32 random bits, on a batch axis."""
        _, heads, groups, _ = self.queries.centroids.shape
        call, device = self.call, self.k.device
        head = call.head_ids(heads, device)[:, None]
        keys = (_PHASE_SALT, call.seed, call.layer, call.step, head)
        phase = uniform(*keys, torch.arange(groups, device=device), use, device=device)
        return ((phase * _PHASE_BITS).floor() / _PHASE_BITS)[None]

    def _lines(self, use: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yield pieces of the KV heads of all batch rows.

        Each is their batch rows and KV heads [L], the random order of the keys [L, S], the keys in
        it [L, S, D] float32 and which of these count [L, S].
        """
        batch, kv_heads, length, dim = self.k.shape
        call, device = self.call, self.k.device
        heads = self.queries.labels.shape[1]
        head = call.kv_head_ids(heads, kv_heads, device)[:, None]
        number = torch.arange(length, device=device)
        keys = (_ORDER_SALT, call.seed, call.layer, call.step, head, number, use)
        # The order of any two keys is theirs alone, whatever padding stands among them.
        order = uniform(*keys, device=device).argsort(dim=-1, stable=True)  # [Hk, S]
        size = max(1, _LINE_BYTES // (4 * length * dim))
        for line in torch.arange(batch * kv_heads, device=device).split(size):
            b, h = line // kv_heads, line % kv_heads
            shuffled = self.k[b[:, None], h[:, None], order[h]].float()
            valid = torch.ones(len(line), length, dtype=torch.bool, device=device)
            if call.key_valid is not None:
                mask = call.key_valid.expand(batch, -1)
                valid = mask[b[:, None], order[h]]
                shuffled = shuffled.masked_fill(~valid[..., None], 0.0)  # it may hold NaN
            yield b, h, order[h], shuffled, valid

    def _exact_set(
        self, at: tuple[Tensor, Tensor, Tensor], order: Tensor, keys: Tensor, valid: Tensor
    ) -> Tensor:
        """Return the mask [L, r, S] of the exact keys, in the random order."""
        b, h, rows = at
        group = self.queries.labels.shape[1] // self.k.shape[1]
        groups = self.queries.centroids.shape[2]
        head, of = h * group + rows // groups, rows % groups  # [L, r] and [r]
        centroid = self.queries.centroids[b, head, of]  # [L, r, D]
        score = (centroid @ keys.mT * self.scale).masked_fill(~valid[:, None], -torch.inf)
        ranked = score.argsort(dim=-1, descending=True, stable=True)
        budget = self.exact[b, 0, 0][..., None].expand(-1, len(rows), 1)  # [L, r, 1]
        seen = valid[:, None].expand_as(score).gather(2, ranked)
        kept = torch.zeros_like(seen)
        if self.sink_keys > 0 or self.local is not None:
            always = self._always(b, head, of).gather(2, order[:, None].expand_as(score))
            always = always.gather(2, ranked) & seen
            kept = always & (always.cumsum(-1) <= budget // 2)
        left = budget - kept.sum(-1, keepdim=True)
        rest = seen & ~kept
        kept = kept | (rest & (rest.cumsum(-1) <= left))
        return torch.zeros_like(kept).scatter_(2, ranked, kept)

    def _always(self, batch: Tensor, head: Tensor, of: Tensor) -> Tensor:
        """Return the mask [L, r, S] of keys that are exact in any case, in their own order."""
        length, number = self.k.shape[2], self.queries.labels.shape[2]
        place = torch.arange(length, device=self.k.device)
        end = first_end(self.call.key_valid, self.sink_keys, self.k.device)
        end = end.expand(self.k.shape[0])[batch]
        sink = (place < end[..., None]).expand(*head.shape, -1)
        if self.local is None:
            return sink
        labels = self.queries.labels[batch, head]  # [L, r, N]
        if self.call.key_valid is not None and number == length:
            seen = self.call.key_valid.expand(self.k.shape[0], -1)
            labels = labels.masked_fill(~seen[batch], -1)
        # Query i stands at key i + S - N; those before the first key have no neighbourhood.
        own = torch.nn.functional.pad(labels == of[:, None], (length - number, 0))
        if self.local > 0:
            window = 2 * self.local + 1
            near = torch.nn.functional.max_pool1d(own.float(), window, 1, self.local)
            own = near > 0
        return sink | own


def _places(
    exact: Tensor, valid: Tensor, sampled: Tensor, phase: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return the places [L, r, width] of exact, then sampled keys, and the counts [3, L, r].

    Args:
        exact: [L, r, S] bool.
        valid: [L, S] bool.
        sampled: [L, r] int64, keys to sample.
        phase: [L, r] float64, where the first of the evenly spaced keys stands.
        width: Places a row.
    """
    num_exact = exact.sum(-1)  # [L, r]
    num_rest = valid.sum(-1, keepdim=True) - num_exact
    sampled = sampled.minimum(num_rest).clamp(min=0)
    place = torch.arange(width, device=exact.device).expand(*num_exact.shape, -1)
    first = torch.searchsorted(exact.cumsum(-1), (place + 1).contiguous())
    turn = place - num_exact[..., None]
    # At least one apart, so that no key is taken twice; evenly over all keys that are not exact.
    rank = (phase[..., None] + turn) * num_rest[..., None] / sampled[..., None].clamp(min=1)
    rest = (~exact & valid[:, None]).cumsum(-1)
    second = torch.searchsorted(rest, rank.floor().long() + 1)
    place = torch.where(turn < 0, first, second).clamp(max=exact.shape[2] - 1)
    return place, torch.stack([num_exact, sampled, num_rest])
