"""Which threshold each head gets: fidelity targets over layers and steps (ScalingAttention, FAST).

A head is measured at P levels of its threshold p. At each level it has a fidelity, an output error
and a density; a table of budgets names one level per (step bucket, layer, head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import PlanError, described

# Where fidelity is highest: the layers (deep, shallow) and the steps (noisy: the first ones, clean:
# the last ones).
ORIENTATIONS = ("deep-noisy", "deep-clean", "shallow-noisy", "shallow-clean")
MAX_LEVELS = 64

# omega is given as a multiple of N_L / N_T, so that at 1 layers and steps weigh alike.
_OMEGAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
# Small curvatures leave all fidelity to the far corner, large ones make the surface flat.
_GAMMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_HALVINGS = 40
_NEAR = 0.005  # solutions this near to the density asked for compete by their error


class Solution(NamedTuple):
    """A table of budgets.

    Attributes:
        level: [T, L, H] int64, the level of each step bucket, layer and head.
        density: Share of all pairs that the table keeps.
        error: Mean relative squared output error of a layer under it.
        omega: Weight of a step against a layer in the target.
        gamma: Curvature of the target.
        beta: Ceiling of the target.
    """

    level: Tensor
    density: float
    error: float
    omega: float
    gamma: float
    beta: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """What each head keeps and loses at each level, float64.

    Attributes:
        fidelity: [T, L, H, P] mean fidelity, non-decreasing over the levels.
        error: [T, L, H, P] squared output error over the squared output of the whole layer.
        density: [T, L, H, P] share of the pairs kept.
        num_steps: Denoising steps N_T, cut into T buckets.
    """

    fidelity: Tensor
    error: Tensor
    density: Tensor
    num_steps: int


def make_levels(num_blocks: int) -> Tensor:
    """Return the levels of p that heads are measured at, [P] float64: every rank, or 64 of them."""
    number = min(num_blocks, MAX_LEVELS)
    return torch.arange(1, number + 1, dtype=torch.float64, device="cpu") / number


def hellinger_fidelity(skipped: Tensor) -> Tensor:
    """Return 1 - H(P, P~), with P~ the kept part of P renormalised (ScalingAttention, FAST).

    H = sqrt(1 - sqrt(m)) with m the kept mass. Written with the skipped mass it loses no digits
    near fidelity 1: H^2 = e / (1 + sqrt(1 - e)).

    Args:
        skipped: Probability mass that is not kept, 0…1; any shape.
    """
    skipped = skipped.clamp(0, 1)
    return 1 - (skipped / (1 + (1 - skipped).sqrt())).sqrt()


def bucket_of(step: int, num_steps: int, num_buckets: int) -> int:
    """Return the bucket of a step; `num_steps` need not be those of the calibration."""
    return min(step, num_steps - 1) * num_buckets // num_steps


def bucket_steps(num_steps: int, num_buckets: int) -> list[list[int]]:
    """Return the steps of each bucket."""
    steps: list[list[int]] = [[] for _ in range(num_buckets)]
    for step in range(num_steps):
        steps[bucket_of(step, num_steps, num_buckets)].append(step)
    return steps


def target_shape(
    num_layers: int, buckets: list[list[int]], *, omega: float, gamma: float, orientation: str
) -> Tensor:
    """Return the target fidelity over its ceiling: A / beta = 1 - (1 - x)^gamma (FAST).

    x = (l + omega * t) / (N_L + omega * N_T), with l and t counted from 1 towards the end where the
    orientation wants the highest fidelity; a bucket stands at the mean of its steps.

    Args:
        num_layers: N_L.
        buckets: The steps of each bucket.
        omega: Weight of a step against a layer.
        gamma: Curvature.
        orientation: One of `ORIENTATIONS`.

    Returns:
        [T, L] float64.
    """
    if orientation not in ORIENTATIONS:
        raise PlanError(f"orientation={described(orientation)} must be one of {ORIENTATIONS}")
    layers, steps = orientation.split("-")
    num_steps = sum(len(bucket) for bucket in buckets)
    layer = torch.arange(1, num_layers + 1, dtype=torch.float64, device="cpu")
    if layers == "shallow":
        layer = layer.flip(0)
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    step = torch.tensor(means, dtype=torch.float64, device="cpu")
    time = num_steps - step if steps == "noisy" else step + 1
    x = (layer + omega * time[:, None]) / (num_layers + omega * num_steps)
    return 1 - (1 - x).clamp(min=0) ** gamma


def choose_levels(fidelity: Tensor, target: Tensor) -> Tensor:
    """Return the sparsest level of each head whose fidelity reaches the target.

    Args:
        fidelity: [T, L, H, P], non-decreasing.
        target: [T, L].

    Returns:
        [T, L, H] int64; the last level where none does.
    """
    missed = (fidelity < target[..., None, None]).sum(-1)
    return missed.clamp(max=fidelity.shape[-1] - 1)


def solve_fast(density: float, curves: Curves, *, orientation: str = ORIENTATIONS[0]) -> Solution:
    """Find the table of budgets that meets a global density with the lowest output error.

    For each omega and gamma of a small grid beta is bisected, as the density grows with it; of the
    solutions that meet the density, the one with the lowest output error is kept.

    Args:
        density: Share of the pairs of all steps, layers and heads.
        curves: The measured heads.
        orientation: One of `ORIENTATIONS`.
    """
    if density >= 1:
        return _solution(curves, torch.full_like(curves.fidelity[..., 0].long(), -1), beta=1.0)
    num_buckets, num_layers = curves.fidelity.shape[:2]
    buckets = bucket_steps(curves.num_steps, num_buckets)
    found: list[Solution] = []
    for multiple in _OMEGAS if num_buckets > 1 else (0.0,):
        for gamma in _GAMMAS:
            omega = multiple * num_layers / curves.num_steps
            shape = target_shape(
                num_layers, buckets, omega=omega, gamma=gamma, orientation=orientation
            )
            found.append(_bisect(density, curves, shape, omega, gamma))
    gap = [abs(solution.density - density) for solution in found]
    near = max(_NEAR, min(gap))
    return min(
        (solution for solution, g in zip(found, gap, strict=True) if g <= near),
        key=lambda solution: solution.error,
    )


def _bisect(density: float, curves: Curves, shape: Tensor, omega: float, gamma: float) -> Solution:
    """Find the beta whose table comes nearest to the density."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        beta = (low + high) / 2
        level = choose_levels(curves.fidelity, beta * shape)
        if _mean(curves, curves.density, level) <= density:
            low = beta
        else:
            high = beta
    both = [
        _solution(curves, choose_levels(curves.fidelity, beta * shape), beta, omega, gamma)
        for beta in (low, high)
    ]
    return min(both, key=lambda solution: abs(solution.density - density))


def solve_uniform(density: float, curves: Curves) -> Solution:
    """Give every head the same level, or the next one where the density falls between two.

    Args:
        density: Share of the pairs of all steps, layers and heads.
        curves: The measured heads.
    """
    num_levels = curves.density.shape[-1]
    share = [
        _mean(curves, curves.density, torch.full_like(curves.density[..., 0].long(), level))
        for level in range(num_levels)
    ]
    base = max((level for level in range(num_levels) if share[level] <= density), default=0)
    level = torch.full_like(curves.density[..., 0].long(), base)
    if base == num_levels - 1 or share[base] > density:
        return _solution(curves, level)
    # Raised heads lie spread out: multiples of the golden ratio fill the unit interval evenly.
    number = torch.arange(level.numel(), dtype=torch.float64, device="cpu")
    order = (number * 0.6180339887498949 % 1).argsort()
    steps = curves.density[..., base + 1] - curves.density[..., base]
    gain = (steps * _weights(curves)[:, None, None] / steps[0].numel()).flatten()[order]
    raised = gain.cumsum(0) <= density - share[base]
    level.view(-1)[order[raised]] += 1
    return _solution(curves, level)


def least_density(curves: Curves, floor: float = 0.0) -> float:
    """Return the density of the sparsest table: every head at its first level.

    Args:
        curves: The measured heads.
        floor: Share that every head keeps in any case.
    """
    first = torch.zeros_like(curves.density[..., 0], dtype=torch.int64)
    return _mean(curves, curves.density.clamp(min=floor), first)


def _solution(
    curves: Curves, level: Tensor, beta: float = 0.0, omega: float = 0.0, gamma: float = 0.0
) -> Solution:
    """Complete a table with what it keeps and loses; level -1 is the last one."""
    level = level % curves.fidelity.shape[-1]
    return Solution(
        level=level,
        density=_mean(curves, curves.density, level),
        error=_mean(curves, curves.error, level) * level.shape[2],
        omega=omega,
        gamma=gamma,
        beta=beta,
    )


def _mean(curves: Curves, values: Tensor, level: Tensor) -> float:
    """Return the mean of each head's value at its level; a bucket weighs as much as its steps."""
    chosen = values.gather(-1, level[..., None])[..., 0].mean((1, 2))
    return float((chosen * _weights(curves)).sum())


def _weights(curves: Curves) -> Tensor:
    """Return the share of the steps in each bucket, [T] float64."""
    buckets = bucket_steps(curves.num_steps, curves.fidelity.shape[0])
    sizes = [len(bucket) / curves.num_steps for bucket in buckets]
    return torch.tensor(sizes, dtype=torch.float64, device="cpu")


def level_density(thresholds_entry: Tensor, num_levels: int, num_tokens: int, block: int) -> Tensor:
    """Return which share of the token pairs a head keeps at each level.

    Args:
        thresholds_entry: [H, R, C] int64, the level at which each block enters (`entry_levels`).
        num_levels: P.
        num_tokens: Tokens per axis of the map; the last block may be ragged.
        block: Tokens per block.

    Returns:
        [H, P] float64.
    """
    entry = thresholds_entry.flatten(1)
    sizes = torch.full(
        (thresholds_entry.shape[2],), float(block), dtype=torch.float64, device="cpu"
    )
    sizes[-1] = num_tokens - (len(sizes) - 1) * block
    pairs = (sizes[:, None] * sizes / num_tokens**2).flatten().expand(entry.shape[0], -1)
    share = torch.zeros(entry.shape[0], num_levels, dtype=torch.float64, device="cpu")
    return share.scatter_add_(1, entry, pairs).cumsum(1)
