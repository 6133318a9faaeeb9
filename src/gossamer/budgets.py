"""Sharing a method's density out over steps, layers and heads."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, RecipeError, described
from gossamer.methods import Method
from gossamer.plan import SparsePlan
from gossamer.plan.heads import merge_heads
from gossamer.select.fidelity import ORIENTATIONS
from gossamer.select.profile import budgets, read_profile, settle_profile

_LEAST = 0.01  # a head keeps at least this share, whatever the profile says


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Give each step, layer and head the share of the pairs that its fidelity asks for.

    FAST (as in `ScalingAttention`) solves for the least densities at which every head reaches
    a target fidelity, from curves that `gossamer calibrate` measured. Here any method that has a
    density is given them: the recipe's density is met over the whole generation, single calls and
    heads lie above or below it. Heads are planned in a few groups of about equal density, each
    with its mean, so that planning costs about the same.

    Attributes:
        profile: A file written by `gossamer calibrate`, or the name of a bundled model with one. It
            is read here, and a file kept by its absolute path.
        orientation: Where FAST wants the highest fidelity, as in `ScalingAttention`.
        groups: Groups of heads, at most, in a call.

    Raises:
        RecipeError: A value out of range, or no such profile.
        ProfileMismatchError: The file is no profile, or of another format version.
    """

    profile: str
    orientation: str = ORIENTATIONS[0]
    groups: int = 4

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not isinstance(self.profile, str) or not self.profile:
            raise RecipeError(
                f"budgets: profile={described(self.profile)} must be a name or a file"
            )
        if self.orientation not in ORIENTATIONS:
            allowed = ", ".join(ORIENTATIONS)
            raise RecipeError(
                f"budgets: orientation={described(self.orientation)} must be one of {allowed}"
            )
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise RecipeError(f"budgets: groups={described(self.groups)} must be an integer >= 1")
        try:
            object.__setattr__(self, "profile", settle_profile(self.profile))
        except PlanError as error:
            raise RecipeError(f"budgets: {error}") from error

    def params(self) -> dict[str, Any]:
        """Return every parameter by name, as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def densities(self, density: float, call: Call, num_heads: int) -> Tensor:
        """Return the density of each query head of a call, [H] float64 on the CPU.

        Args:
            density: Of all steps, layers and heads together. Where the profile's sparsest masks
                exceed it, theirs is returned, with a warning.
            call: Its grid, layer, step and heads.
            num_heads: H.

        Raises:
            PlanError: The call has no grid.
            ProfileMismatchError: The profile is of another number of layers or heads.
        """
        profile = read_profile(self.profile)
        if call.grid is None:
            raise PlanError(f"{profile.path} was made on a grid, and this call has none")
        heads = call.head_ids(num_heads, torch.device("cpu"))
        total = call.num_heads
        if total is None and call.heads is None and call.head_offset == 0:
            total = num_heads
        profile.check(num_layers=call.num_layers, num_heads=total)
        profile.check_place(call.layer, int(heads.max()))
        table = budgets(profile, density, call.grid, "fast", self.orientation, floor=_LEAST)
        bucket = profile.bucket(call.step, call.num_steps)
        level = table.level[bucket, call.layer][heads]
        kept = profile.curves(call.grid).density[bucket, call.layer][heads]
        return kept.gather(1, level[:, None])[:, 0].clamp(_LEAST, 1.0)


def plan_by_heads(
    method: Method,
    tensors: tuple[Tensor, Tensor, Tensor],
    call: Call,
    densities: Tensor,
    groups: int,
    state: MutableMapping[str, Any] | None,
) -> SparsePlan:
    """Plan every head at a density of its own.

    Args:
        method: A method that was given a density.
        tensors: q [B, H, N, D], k and v [B, Hk, S, D].
        call: The call.
        densities: [H] float64 on the CPU; the mean of a KV head's query heads counts.
        groups: KV heads are planned in as many groups, at most.
        state: As `Method.plan`; each group keeps its own part of it.

    Returns:
        The plan of all heads.
    """
    q, k, v = tensors
    size = q.shape[1] // k.shape[1]
    of_kv = densities.view(-1, size).mean(1)  # [Hk]
    ranked = of_kv.argsort(stable=True)
    plans: list[SparsePlan] = []
    places: list[Tensor] = []
    ids = call.head_ids(q.shape[1], torch.device("cpu"))
    for part in ranked.tensor_split(min(groups, len(ranked))):
        part = part.sort().values
        heads = (part[:, None] * size + torch.arange(size)).flatten()
        one = replace(call, heads=tuple(ids[heads].tolist()), head_offset=0)
        at, kv_at = (x.to(q.device) for x in (heads, part))
        own = method.with_density(float(of_kv[part].mean()))
        kept = None if state is None else state.setdefault(f"heads {part.tolist()}", {})
        plans.append(own.plan(q[:, at], k[:, kv_at], v[:, kv_at], one, state=kept))
        places.append(at)
    return merge_heads(plans, places, size)
