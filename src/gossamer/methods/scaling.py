"""ScalingAttention: a static block topology from calibration, budgets from fidelity."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.methods.base import Method, State, logit_scale
from gossamer.methods.blocked import block_plan, trimmed
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.select import block_layout
from gossamer.select.fidelity import ORIENTATIONS
from gossamer.select.profile import (
    BUDGETS,
    PERMUTES,
    Profile,
    announce_resize,
    budgets,
    read_profile,
    settle_profile,
)
from gossamer.select.resize import Grid, token_order
from gossamer.select.saliency import block_saliency, threshold_map, threshold_mask
from gossamer.select.spans import visible_pairs
from gossamer.select.whole_head import top_rows

_BLOCK = 128
_DENSITY = 0.5  # the paper's main setting


@register
@dataclass(frozen=True, kw_only=True)
class ScalingAttention(Method):
    """Keep the blocks whose calibrated threshold lies under the head's budget.

    `gossamer calibrate` measures, per step bucket, layer and head, the exact mean attention
    probability S(u, v) of each 128 x 128 block (WEST), and stores the threshold map
    T(u, v): the least p at which the block is among the best share p of its row for any
    calibration prompt. The mask at p is T <= max(p, 1/n), which is a lookup, and the plan
    is static given layer and step bucket. At another resolution the maps are resized
    conservatively and the budgets solved again.

    FAST gives each head the least p at which the fidelity of its attention, 1 minus the Hellinger
    distance to the full one, reaches the target A(l, t) = beta * (1 - (1 - x)^gamma),
    x = (l + omega * t) / (N_L + omega * N_T). For a density, beta is bisected for a
    grid of (omega, gamma) and the table with the lowest measured output error is kept. The density
    is that of all steps, layers and heads together: single calls lie above or below it.

    Without a profile the method measures S of the call's own q and k, exactly, and keeps each
    row's best blocks. This costs as much as dense attention: it is the oracle that a profile is
    compared with, and what `density` alone means. It knows causality and grouped heads; a profile
    is of bidirectional self-attention, so a causal call with one is refused.

    Different from the paper: ranks are taken per query row, so that no row is ever empty; maps
    are resized by the minimum over the footprint, since bilinear interpolation of T itself loses
    active blocks; step buckets stand for single steps; the mask format is the plan's `KeyBlocks`,
    whose `to_bits` is CRM. The paper leaves open which ends of layers and steps get the highest
    fidelity: see `orientation`.

    Attributes:
        profile: A file written by `gossamer calibrate`, or the name of a bundled model with one
            ("tiny-wan"). It is read when the method is made, and a file kept by its absolute path.
            None: self-calibrating, as said above.
        density: Share of the pairs; with a profile of the whole generation, and at least what its
            sparsest masks come to: asking for less warns. 0.5 where neither it nor p is given.
        p: One threshold for all heads instead: the kept share of a row for a single prompt.
        budgets: How a density is shared out with a profile: "fast" by fidelity, or "uniform".
        orientation: Where FAST wants the highest fidelity: "deep-noisy" (late layers and first
            steps, the text's reading), "deep-clean", "shallow-noisy" or "shallow-clean".
        permute: "axis" where the profile has a token order per head (`calibrate --permute axis`):
            blocks are then cut along that permutation of frames, rows and columns, as in PARO.
        block: Tokens per block, of queries and of keys; None for the profile's, or 128.
    """

    name: ClassVar[str] = "scaling"
    paper: ClassVar[str] = (
        "ScalingAttention: Discovering Intrinsic Sparse Attention Topology for Video Diffusion "
        "Transformers (arXiv 2606.23019)"
    )
    file_params: ClassVar[tuple[str, ...]] = ("profile",)

    profile: str | None = None
    density: float | None = None
    p: float | None = None
    budgets: str = "fast"
    orientation: str = ORIENTATIONS[0]
    permute: str = "none"
    block: int | None = None

    def __post_init__(self) -> None:
        """Refuse contradictions; 50% density where no budget is given."""
        if self.density is not None and self.p is not None:
            density, p = described(self.density), described(self.p)
            raise PlanError(f"scaling: give density={density} or p={p}, not both of them")
        if self.density is None and self.p is None:
            object.__setattr__(self, "density", _DENSITY)
        for name in ("density", "p"):
            if getattr(self, name) is not None:
                check_share(self.name, name, getattr(self, name))
        check_count(self.name, "block", self.block, optional=True)
        if self.profile is not None and (not isinstance(self.profile, str) or not self.profile):
            raise PlanError(f"scaling: profile={described(self.profile)} must be a name or a path")
        allowed = {"budgets": BUDGETS, "orientation": ORIENTATIONS, "permute": PERMUTES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise PlanError(
                    f"scaling: {name}={described(getattr(self, name))} must be one of {values}"
                )
        if self.profile is None and self.permute != "none":
            raise PlanError(
                f"scaling: permute={self.permute!r} needs a profile that holds the orders: make "
                "one with `gossamer calibrate --permute axis`"
            )
        if self.profile is not None:
            object.__setattr__(self, "profile", settle_profile(self.profile))
            read_profile(self.profile).check(block=self.block, permute=self.permute)
        else:
            refuse_unused(self, "without a profile", "budgets", "orientation")
        if self.p is not None:
            refuse_unused(self, f"beside p={self.p:g}", "budgets", "orientation")
        if self.budgets != "fast":
            refuse_unused(self, f"with budgets={self.budgets!r}", "orientation")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def static_key(self, call: Call) -> Hashable | None:
        """Return layer and step bucket where there is a profile, else None."""
        if self.profile is None:
            return None
        bucket = read_profile(self.profile).bucket(call.step, call.num_steps)
        return call.layer, bucket, call.num_heads

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Look the mask up, or measure it."""
        del v, state
        if self.profile is None:
            return self._plan_measured(q, k, call)
        profile = read_profile(self.profile)
        grid = self._check(profile, q, k, call)
        bucket = profile.bucket(call.step, call.num_steps)
        heads = call.head_ids(q.shape[1], torch.device("cpu"))
        maps = profile.thresholds(bucket, call.layer, grid)[heads]
        keep = threshold_mask(maps, self._thresholds(profile, call.layer, bucket, grid)[heads])
        keep = keep[None].to(q.device)  # [1, H, R, C]
        if self.permute == "none":
            return block_plan(
                keep, q.shape[2], k.shape[2], call, tile=profile.block, block=profile.block
            )
        return _ordered_plan(keep, profile.order[call.layer, heads], grid, call, profile.block)

    def _plan_measured(self, q: Tensor, k: Tensor, call: Call) -> SparsePlan:
        """Keep the best blocks of each row by the call's own saliency."""
        block = _BLOCK if self.block is None else self.block
        layout = block_layout(
            call, q.shape[2], k.shape[2], tile=block, block=block, device=q.device
        )
        saliency = block_saliency(
            q,
            k,
            scale=logit_scale(q, call),
            tile=block,
            block=block,
            valid=call.key_valid,
            causal=call.causal,
        ).masked_fill(~layout.possible, -torch.inf)
        if self.p is None:
            density = 1.0 if self.density is None else self.density
            # Blocks are paid for by the pairs visible in them: the best ones are seldom those at a
            # causal edge, which hold few.
            pairs = visible_pairs(
                call, q.shape[2], k.shape[2], tile=block, block=block, device=q.device
            )
            keep = top_rows(saliency, pairs, density, layout)
        else:
            if layout.forced is not None:  # a causal edge block enters first
                saliency = saliency.masked_fill(layout.forced, torch.inf)
            keep = threshold_mask(threshold_map(saliency, layout.possible), self.p)
        return block_plan(keep, q.shape[2], k.shape[2], call, tile=block, block=block)

    def _check(self, profile: Profile, q: Tensor, k: Tensor, call: Call) -> Grid:
        """Refuse a profile that is not of this call, and return the call's grid."""
        if call.causal:
            raise UnsupportedError(
                "a profile is of bidirectional attention, and this call is causal: leave the "
                "profile out"
            )
        num_heads = call.num_heads
        if num_heads is None and call.head_offset == 0 and call.heads is None:
            num_heads = q.shape[1]
        profile.check(
            num_layers=call.num_layers,
            num_heads=num_heads,
            block=self.block,
            permute=self.permute,
        )
        heads = call.head_ids(q.shape[1], torch.device("cpu"))
        profile.check_place(call.layer, int(heads.max()))
        grid = call.grid
        if grid is None:
            raise PlanError(
                f"{profile.path} was made on the grid {profile.grid}, and this call of "
                f"{q.shape[2]} queries and {k.shape[2]} keys has none: pass call.grid"
            )
        if grid != profile.grid:
            announce_resize(profile.path, profile.stamp, grid)
        return grid

    def _thresholds(self, profile: Profile, layer: int, bucket: int, grid: Grid) -> Tensor:
        """Return the threshold of each head, [H, 1, 1] float64."""
        if self.p is not None:
            p = torch.full((profile.num_heads,), self.p, dtype=torch.float64, device="cpu")
        else:
            density = 1.0 if self.density is None else self.density
            table = budgets(profile, density, grid, self.budgets, self.orientation)
            p = profile.levels[table.level[bucket, layer]]
        return p[:, None, None]


def _ordered_plan(keep: Tensor, axes: Tensor, grid: Grid, call: Call, block: int) -> SparsePlan:
    """Return the plan of a block mask whose heads have token orders of their own.

    Args:
        keep: [1, H, R, C] bool.
        axes: [H] uint8, the order of each head.
        grid: (frames, rows, columns).
        call: The call; self-attention over the grid.
        block: Tokens per tile and per block.
    """
    device, num_tokens = keep.device, grid[0] * grid[1] * grid[2]
    orders = {a: token_order(grid, a, device) for a in axes.unique().tolist()}
    order = torch.stack([orders[a] for a in axes.tolist()])  # [H, N]
    order = torch.nn.functional.pad(order, (0, -num_tokens % block), value=-1)[None].int()
    if call.key_valid is not None:
        valid = call.key_valid[:, None].expand(-1, order.shape[1], -1)
        at = order.clamp(min=0).long().expand(valid.shape[0], -1, -1)
        counted = valid.gather(2, at) & (order >= 0)
        possible = counted.unflatten(2, (-1, block)).any(3)[:, :, None]  # [B, H, 1, C]
        keep = keep & possible
        first = possible & (possible.long().cumsum(-1) == 1)
        keep = keep | (first & ~keep.any(-1, keepdim=True))
    return SparsePlan(
        num_queries=num_tokens,
        num_keys=num_tokens,
        tile=block,
        keys=trimmed(KeyBlocks.from_mask(keep, block=block, key_order=order)),
        query_index=order.unflatten(2, (-1, block)),
        key_valid=call.key_valid,
        scale=call.scale,
    )
