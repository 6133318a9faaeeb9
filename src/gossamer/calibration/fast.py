"""FAST's measurement: how far each head is from dense attention at each level of its threshold."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.calibration.capture import Latent, Layers, by_order, latent_of
from gossamer.calibration.setup import Setup
from gossamer.calibration.west import head_order
from gossamer.counter import uniform
from gossamer.select.fidelity import hellinger_fidelity
from gossamer.select.saliency import block_sums, entry_levels, probabilities
from gossamer.session import AttentionEvent

NUM_ROWS = 16
_CHUNK_BYTES = 32 << 20  # of the probabilities and block outputs held at once
_SALT = 11


class Losses(NamedTuple):
    """What heads lose at each level, mean over sampled rows and batch.

    Attributes:
        fidelity: [H, P] float64, 1 minus the Hellinger distance.
        error: [H, P] float64, squared distance of the outputs.
        energy: [H] float64, squared dense output.
    """

    fidelity: Tensor
    error: Tensor
    energy: Tensor


class FastObserver:
    """Watches a dense generation and measures fidelity and output error of every head's masks.

    Of each attention map 16 query rows are looked at, one from each of 16 equal strata.

    Attributes:
        seconds: Time spent in here, to be taken out of the generation's.
    """

    def __init__(
        self,
        setup: Setup,
        thresholds: Tensor,
        levels: Tensor,
        *,
        order: Tensor | None = None,
        num_rows: int = NUM_ROWS,
        seed: int = 0,
    ) -> None:
        """Start without measurements.

        Args:
            setup: What is measured.
            thresholds: [T, L, H, R, R] float16, the maps whose masks are measured.
            levels: [P] float64, thresholds p to measure at; the last one is 1.
            order: [L, H] integer on the CPU, the token order of each head; None for raster order.
            num_rows: Query rows per attention map.
            seed: Seed of the choice of rows.
        """
        self.seconds = 0.0
        self._setup = setup
        self._thresholds = thresholds
        self._levels = levels
        self._order = order
        self._num_rows = num_rows
        self._seed = seed
        self._layers = Layers()

    def __call__(self, event: AttentionEvent) -> None:
        """Measure one attention call, if its step is measured."""
        start = time.perf_counter()
        call = event.call
        buckets = self._setup.readers.get(call.step, [])
        latent = latent_of(event) if buckets else None
        if latent is not None:
            rows = sampled_rows(
                latent.num_tokens, self._num_rows, self._seed, call.layer, call.step
            )
            order = head_order(self._order, call.layer, latent.q.shape[1])
            shape = (self._setup.num_buckets, latent.q.shape[1], 2 * len(self._levels) + 1)
            sums = self._layers.at(
                event, latent, lambda: torch.zeros(shape, dtype=torch.float64, device="cpu")
            )
            for bucket in buckets:
                maps = self._thresholds[bucket, call.layer]
                losses = measure(latent, maps, self._levels, rows, order, self._setup.block)
                error = losses.error / losses.energy.sum().clamp(min=1e-300)
                count = torch.ones_like(losses.energy)[:, None]
                sums[bucket] += torch.cat([losses.fidelity, error, count], dim=1)
        self.seconds += time.perf_counter() - start

    def curves(self) -> tuple[Tensor, Tensor]:
        """Return mean fidelity and output error, each [T, L, H, P] float64.

        Raises:
            UnsupportedError: Nothing, or not every layer, could be measured.
        """
        sums = self._layers.stacked(dim=1)
        mean = sums[..., :-1] / sums[..., -1:].clamp(min=1)
        fidelity, error = mean.chunk(2, dim=-1)
        # Masks grow with the level, so fidelity does, up to rounding.
        return fidelity.cummax(-1).values, error.clone()


def sampled_rows(num_tokens: int, number: int, *keys: int) -> Tensor:
    """Return one row of each of `number` equal strata, [n] int64 on the CPU; all where it exceeds.

    Args:
        num_tokens: Rows to choose from.
        number: Strata.
        *keys: What the choice depends on beside these.
    """
    cpu = torch.device("cpu")
    number = min(number, num_tokens)
    edge = torch.arange(number + 1, device=cpu) * num_tokens // number
    draw = uniform(_SALT, *keys, torch.arange(number, device=cpu), device=cpu)
    return edge[:-1] + (draw * (edge[1:] - edge[:-1])).long()


def measure(
    latent: Latent, maps: Tensor, levels: Tensor, rows: Tensor, order: Tensor, block: int
) -> Losses:
    """Measure what each head loses at each level, on some query rows.

    Args:
        latent: The tokens in raster order.
        maps: [H, R, R] threshold map of each head in its own order.
        levels: [P] thresholds p.
        rows: [n] int64 on the CPU, places of query rows in each head's own order.
        order: [H] integer on the CPU, index into `AXIS_ORDERS`.
        block: Tokens per block.
    """
    heads = latent.q.shape[1]
    fidelity = torch.zeros(heads, len(levels), dtype=torch.float64, device="cpu")
    error, energy = fidelity.clone(), fidelity[:, 0].clone()
    device = latent.q.device
    for of_order, part in by_order(latent, order):
        entry = entry_levels(maps[of_order][:, rows // block], levels).to(device)  # [h, n, C]
        losses = _measure_rows(part, entry, rows.to(device), len(levels), block)
        fidelity[of_order], error[of_order], energy[of_order] = (x.cpu() for x in losses)
    return Losses(fidelity, error, energy)


def _measure_rows(
    latent: Latent, entry: Tensor, rows: Tensor, num_levels: int, block: int
) -> Losses:
    """Measure heads that share one token order, a bounded number of KV heads at a time."""
    batch, heads, num_tokens, dim = latent.q.shape
    kv_heads, total = latent.k.shape[1:3]
    group = heads // kv_heads
    device = latent.q.device
    queries = latent.q[:, :, rows].unflatten(1, (kv_heads, group))  # [B, Hk, G, n, D]
    entry = entry.unflatten(0, (kv_heads, group))  # [Hk, G, n, C]
    valid = None if latent.valid is None else latent.valid.expand(batch, -1)
    real = None if valid is None else valid[:, rows]
    shape = (batch * kv_heads, group)
    fidelity = torch.zeros(*shape, num_levels, dtype=torch.float64, device=device)
    error = torch.zeros_like(fidelity)
    energy = torch.zeros(shape, dtype=torch.float64, device=device)
    bytes_per_head = 4 * group * len(rows) * (total + entry.shape[-1] * dim)
    step = max(1, _CHUNK_BYTES // bytes_per_head)
    for part in torch.arange(batch * kv_heads, device=device).split(step):
        at = (part // kv_heads, part % kv_heads)
        seen = None if valid is None else valid[at[0]]
        p = probabilities(queries[at], latent.k[at].float(), latent.scale, seen)  # [m, G, n, S]
        v = latent.v[at].float()
        if seen is not None:  # padding may hold NaN, which no zero probability takes away
            v = v.masked_fill(~seen[..., None], 0.0)
        level = entry[at[1]]
        counted = torch.ones(p.shape[:3], dtype=torch.float64, device=device)
        if real is not None:
            counted = counted * real[at[0]][:, None]
        number = counted.sum(-1).clamp(min=1)

        def mean(x: Tensor, weight: Tensor = counted, by: Tensor = number) -> Tensor:
            weight = weight.view(*weight.shape, *[1] * (x.dim() - 3))
            return (x * weight).sum(2) / by.view(*by.shape, *[1] * (x.dim() - 3))

        skipped, out, dense = _levels_of(p, v, level, num_tokens, num_levels, block)
        fidelity[part] = mean(hellinger_fidelity(skipped))
        error[part] = mean((out - dense[..., None, :]).square().sum(-1))
        energy[part] = mean(dense.square().sum(-1))
    by_head = (x.view(batch, heads, *x.shape[2:]).mean(0) for x in (fidelity, error, energy))
    return Losses(*by_head)


def _levels_of(
    p: Tensor, v: Tensor, level: Tensor, num_tokens: int, num_levels: int, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return skipped mass [m, G, n, P], outputs [m, G, n, P, D] and dense output [m, G, n, D].

    Args:
        p: [m, G, n, S] probabilities; the keys behind the first `num_tokens` are always read.
        v: [m, S, D] values.
        level: [m, G, n, C] int64, the level at which each block enters.
        num_tokens: Keys that are cut into blocks.
        num_levels: P.
        block: Keys per block.
    """
    mass = block_sums(p, block, num_tokens).double()  # [m, G, n, C]
    shape = (*p.shape[:3], num_levels)
    by_level = torch.zeros(shape, dtype=torch.float64, device=p.device).scatter_add_(3, level, mass)
    # Summed from the far end: what a level skips holds nothing of what it keeps.
    skipped = by_level.flip(-1).cumsum(-1).flip(-1) - by_level
    pad = -num_tokens % block
    by_block = torch.nn.functional.pad(p[..., :num_tokens], (0, pad)).unflatten(-1, (-1, block))
    values = torch.nn.functional.pad(v[:, :num_tokens], (0, 0, 0, pad)).unflatten(1, (-1, block))
    part = torch.einsum("mgncb,mcbd->mgncd", by_block, values).double()
    out = torch.zeros(*shape, v.shape[-1], dtype=torch.float64, device=p.device)
    out = out.scatter_add_(3, level[..., None].expand(part.shape), part).cumsum(3)
    text = (p[..., num_tokens:] @ v[:, None, num_tokens:]).double()  # [m, G, n, D]
    out = out + text[..., None, :]
    kept = (1 - skipped).clamp(min=1e-12)
    return skipped, out / kept[..., None], out[..., -1, :]
