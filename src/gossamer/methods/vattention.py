"""vAttention: exact top keys and a uniform sample of the rest, sized by a wanted error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError
from gossamer.group import ClusterSettings, pack_tiles
from gossamer.group.pairs import cluster_queries
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.params import check_count, check_share, check_size, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyTokens, SparsePlan
from gossamer.select.uniform_rest import Chosen, ExactAndRest

_CHUNK_BYTES = 16 << 20  # of one of the float32 pieces of the pilot, about eight at once
_PILOT, _SAMPLE = 0, 1  # uses of random numbers: the sample must not depend on the pilot
_EXACT = 0.05  # share of the exact set where neither it nor a density is given
_FEWEST = 2  # keys of a pilot: one has no spread


_LEAST_BOUND = 1e-6  # of epsilon and delta


@register
@dataclass(frozen=True, kw_only=True)
class VAttention(Method):
    """Read sinks, neighbours and the top keys exactly, and a uniform sample of all other keys.

    Queries are clustered as in SVG2, and all queries of a cluster read the same keys. Its exact set
    E are the first keys, the neighbours of its queries and the keys with the highest logits for its
    centroid. Of the other n_R keys a uniformly random set of n is read with weight n_R / n, so that
    numerator and denominator of the softmax are unbiased for every query.

    Without `density`, n follows from the wanted error of the denominator D: a pilot sample of the
    share `base` estimates, for every query by itself, the standard deviation s of exp(logit) over
    the n_R keys and D = sum over E + n_R * mean. The query needs

        n0 = (z * s * n_R / (epsilon * D))^2,    n = n0 / (1 + n0 / n_R),

    with z the normal quantile of 1 - delta / 2 and the second form what n0 comes to without
    replacement. The cluster draws the greatest n of its queries, at least the pilot's size, anew:
    given n the sample is unbiased, which it would not be if the pilot were in it. Then, as far as
    the sum over the sample is normal, |D' - D| <= epsilon * D with probability 1 - delta, for
    every single query. The numerator is not bounded. With `density`, n is what it leaves beside E.

    Differs from the paper, which is for LLM decoding of one query at a time: groups of queries, the
    exact top keys for the centroid instead of an approximate index, and neighbours by cluster. It
    takes 128 first and 128 last keys there; here, where text is joined in full and clusters mix
    positions, a few first keys and the queries' own positions. First keys and neighbours take at
    most half of the exact set, those with the highest logits first.

    Costs one pass of centroids against all keys, and without `density` a second one, the logits of
    all queries with E and the pilot, and one synchronisation to size the rows.

    Attributes:
        density: Share of the keys that every row reads, exact and sampled; instead of `epsilon`,
            `delta` and `base`. None: those decide.
        exact: Share of the keys of the exact set; None for half of `density`, or .05.
        epsilon: Wanted relative error of the denominator (published: .05 to .3).
        delta: Probability with which a query may exceed it (published: .05 to .3).
        base: Share of the keys that are not exact in the pilot (published: .01 to .05).
        sink_keys: First keys, padding not counted, that are exact in any case.
        local: Keys up to so far from a query of the cluster are exact in any case: 0 for the
            queries' own positions, None for none.
        query_clusters: C_q; None for one per 128 queries.

    Other parameters:
        iterations: k-means iterations of a cold start.
        warm_iterations: k-means iterations from the previous step's centroids.
        tile: Queries per tile.
    """

    name: ClassVar[str] = "vattention"
    paper: ClassVar[str] = "vAttention: Verified Sparse Attention, arXiv 2510.05688"
    causal_reason: ClassVar[str] = (
        "a semantic cluster mixes positions, so its early queries might see none of its keys"
    )

    density: float | None = None
    exact: float | None = None
    epsilon: float = 0.1
    delta: float = 0.1
    base: float = 0.02
    sink_keys: int = 16
    local: int | None = 0
    query_clusters: int | None = None
    iterations: int = 10
    warm_iterations: int = 2
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("density", "exact"):
            value = getattr(self, name)
            if value is not None:
                check_share(self.name, name, value, zero=name == "exact")
        for name in ("epsilon", "delta", "base"):
            check_share(self.name, name, getattr(self, name))
        if min(self.epsilon, self.delta) < _LEAST_BOUND:
            raise PlanError(
                f"vattention: epsilon={self.epsilon:g} and delta={self.delta:g} must be at least "
                f"{_LEAST_BOUND:g}: a smaller bound asks for every key"
            )
        if self.delta == 1:
            raise PlanError("vattention: delta=1 bounds nothing: it must be below 1")
        for name in ("query_clusters", "iterations", "warm_iterations", "tile"):
            optional = name == "query_clusters"
            check_count(self.name, name, getattr(self, name), optional=optional)
        check_size(self.name, "sink_keys", self.sink_keys)
        check_size(self.name, "local", self.local, optional=True)
        if self.density is not None and self.exact is not None and self.exact > self.density:
            raise PlanError(
                f"vattention: exact={self.exact:g} must be at most density={self.density:g}"
            )
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", "epsilon", "delta", "base")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with a fixed budget instead of a wanted error."""
        return cls(density=density, **params)

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Cluster the queries, choose exact keys, size the sample, draw it."""
        del v
        batch, _, num_keys, _ = k.shape
        settings = ClusterSettings(
            query_clusters=self.query_clusters,
            key_clusters=None,
            iterations=self.iterations,
            warm_iterations=self.warm_iterations,
        )
        queries = cluster_queries(q, num_keys, call, settings, state)
        query_index, tile_row = pack_tiles(queries.labels, queries.sizes.shape[2], self.tile)
        valid = torch.full((batch, 1, 1), num_keys, device=k.device)
        if call.key_valid is not None:
            valid = call.key_valid.sum(-1)[:, None, None].expand(batch, 1, 1)
        exact = self.exact
        if exact is None:
            exact = _EXACT if self.density is None else self.density / 2
        chooser = ExactAndRest(
            queries=queries,
            k=k,
            call=call,
            scale=logit_scale(q, call),
            sink_keys=self.sink_keys,
            local=self.local,
            exact=(valid.double() * exact).round().long(),
        )
        if self.density is None:
            sampled = self._needed(chooser, q, query_index, tile_row, valid)
            most = sampled + chooser.exact.minimum(valid)
            width = max(1, int(most.max()))  # the one synchronisation
        else:
            total = (valid.double() * self.density).round().long().clamp(min=1)
            sampled = total - chooser.exact.minimum(valid)
            width = max(1, round(num_keys * self.density))
        chosen = chooser.choose(sampled, width, use=_SAMPLE)
        return SparsePlan(
            num_queries=q.shape[2],
            num_keys=num_keys,
            tile=self.tile,
            keys=_listed(chosen),
            query_index=query_index,
            tile_row=tile_row,
            key_valid=call.key_valid,
            scale=call.scale,
        )

    def _needed(
        self,
        chooser: ExactAndRest,
        q: Tensor,
        query_index: Tensor,
        tile_row: Tensor,
        valid: Tensor,
    ) -> Tensor:
        """Return how many keys each row has to sample, [B, H, R] int64."""
        num_keys = chooser.k.shape[2]
        base = (valid.double() * self.base).ceil().long().clamp(min=_FEWEST)
        # Rounding is monotone, so the bounds for all S keys hold for the valid ones.
        room = round(num_keys * (_EXACT if self.exact is None else self.exact))
        room += max(_FEWEST, math.ceil(num_keys * self.base))
        pilot = chooser.choose(base, max(1, min(room, num_keys)), use=_PILOT)
        need = torch.zeros_like(pilot.num_exact)
        batch, heads, tiles, tile = query_index.shape
        width, dim = pilot.tokens.shape[3], q.shape[3]
        chunk = max(1, _CHUNK_BYTES // (4 * max(width, 1) * max(dim, tile)))
        group = heads // chooser.k.shape[1]
        for part in torch.arange(batch * heads * tiles, device=q.device).split(chunk):
            b, h, t = part // (heads * tiles), part // tiles % heads, part % tiles
            row, query = tile_row[b, h, t].long(), query_index[b, h, t].long()  # [n], [n, tile]
            index = pilot.tokens[b, h, row].long()  # [n, width]
            rows = q[b[:, None], h[:, None], query.clamp(min=0)].float()
            keys = chooser.k[b[:, None], h[:, None] // group, index].float()
            counts = [x[b, h, row][:, None] for x in pilot[1:]]
            number = self._sample_size(rows @ keys.mT * chooser.scale, *counts)
            seen = query >= 0
            if chooser.call.key_valid is not None and q.shape[2] == num_keys:
                mask = chooser.call.key_valid.expand(batch, -1)
                seen = seen & mask[b[:, None], query.clamp(min=0)]
            number = torch.where(seen, number, 0).amax(-1)
            slot = (b * heads + h) * need.shape[2] + row
            need.view(-1).scatter_reduce_(0, slot, number, "amax")
        return need.maximum(base).minimum(pilot.num_rest)

    def _sample_size(
        self, logits: Tensor, num_exact: Tensor, num_pilot: Tensor, num_rest: Tensor
    ) -> Tensor:
        """Return the sample size that each query needs, [n, M] int64.

        Args:
            logits: [n, M, L] float32 with the exact keys, then the pilot's; any number behind.
            num_exact: [n, 1] int64.
            num_pilot: [n, 1] int64.
            num_rest: [n, 1] int64, keys from which the pilot was drawn.
        """
        place = torch.arange(logits.shape[2], device=logits.device)
        is_exact = (place < num_exact)[:, None]  # [n, 1, L]
        is_pilot = (place < num_exact + num_pilot)[:, None] & ~is_exact
        known = is_exact | is_pilot
        highest = logits.masked_fill(~known, -torch.inf).amax(-1, keepdim=True)
        e = (logits - highest).masked_fill(~known, -torch.inf).double().exp()
        pilot = num_pilot.clamp(min=1).double()
        mean = (e * is_pilot).sum(-1) / pilot  # [n, M]
        variance = ((e - mean[..., None]) * is_pilot).square().sum(-1) / (pilot - 1).clamp(min=1)
        total = (e * is_exact).sum(-1) + num_rest * mean
        z = NormalDist().inv_cdf(1 - self.delta / 2)
        bound = (self.epsilon * total).clamp(min=1e-300)
        first = (z * num_rest * variance.sqrt() / bound).square()
        number = first / (1 + first / num_rest.clamp(min=1))
        return number.nan_to_num(0.0).ceil().long()  # NaN: a row without any key


def _listed(chosen: Chosen) -> KeyTokens:
    """Return the rows in ascending order, with log weights."""
    place = torch.arange(chosen.tokens.shape[3], device=chosen.tokens.device)
    is_exact = place < chosen.num_exact[..., None]
    count = chosen.num_exact + chosen.num_sampled
    listed = place < count[..., None]
    last = torch.iinfo(torch.int32).max
    index, by = chosen.tokens.masked_fill(~listed, last).sort(dim=-1)
    # Slack repeats the row's greatest key; a row without any key has no slack to read.
    greatest = index.masked_fill(~listed, 0).amax(-1, keepdim=True)
    ratio = chosen.num_rest.double() / chosen.num_sampled.clamp(min=1)
    log_weight = ratio.clamp(min=1).log().float()[..., None].expand(index.shape)
    log_weight = log_weight.masked_fill(is_exact.gather(3, by) | ~listed, 0.0)
    return KeyTokens.from_lists(
        torch.where(listed, index, greatest), count=count, log_weight=log_weight
    )
