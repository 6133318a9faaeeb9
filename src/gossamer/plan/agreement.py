"""Whether a method's plan says what its call says: kernels go by the plan alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.plan.plan import SparsePlan


def check_plan(method: str, plan: object, q: Tensor, k: Tensor, call: Call) -> None:
    """Refuse a plan that says otherwise than the call it was made for.

    The kernels go by the plan alone: without `causal` they read what lies ahead, without
    `key_valid` padding. Nothing waits for a device; masks are compared by value on a CPU alone.

    Args:
        method: Name of the method that made the plan.
        plan: What it made.
        q: [B, H, N, D] queries that it was given.
        k: [B, Hk, S, D] keys.
        call: The facts that it was given.

    Raises:
        PlanError: Naming the method, the field, both values and what to pass.
    """
    if not isinstance(plan, SparsePlan):
        raise PlanError(f"{method} planned {described(plan)}: must return a gossamer.SparsePlan")
    said = {
        "num_queries": (plan.num_queries, q.shape[2], "q.shape[2]"),
        "num_keys": (plan.num_keys, k.shape[2], "k.shape[2]"),
        "causal": (bool(plan.causal), bool(call.causal), "call.causal"),
    }
    for field, (got, want, source) in said.items():
        if got != want:
            raise _contradiction(method, field, str(got), str(want), source)
    for axis, got, given in (("batch", plan.batch, q.shape[0]), ("heads", plan.heads, q.shape[1])):
        if got not in (1, given):
            raise PlanError(f"{method} made a plan of {axis} {got}: must be 1 or q's {given}")
    if plan.device != q.device:
        raise PlanError(
            f"{method} made a plan on {plan.device}: make its tensors on q's device, {q.device}"
        )
    # One factor in other words is the same: None or 1/sqrt(D), whichever way it is rounded.
    default = q.shape[-1] ** -0.5
    factor, want = (default if x is None else float(x) for x in (plan.scale, call.scale))
    if abs(factor - want) > 1e-6 * abs(want):  # math.isclose cannot be traced
        raise _contradiction(method, "scale", str(plan.scale), str(call.scale), "call.scale")
    if not _same_keys(plan.key_valid, call.key_valid):
        got, want = described(plan.key_valid), described(call.key_valid)
        raise _contradiction(method, "key_valid", got, want, "call.key_valid")


def _contradiction(method: str, field: str, got: str, want: str, source: str) -> PlanError:
    """Return the error for a plan whose field is not the call's."""
    return PlanError(
        f"{method} made a plan with {field}={got} where the call has {want}: "
        f"pass SparsePlan(…, {field}={source})"
    )


def _same_keys(planned: Tensor | None, given: Tensor | None) -> bool:
    """Return whether a plan's mask is the call's; by shape and device alone where looking waits."""
    if planned is given:
        return True
    if planned is None or given is None or planned.device != given.device:
        return False
    if planned.shape[-1] != given.shape[-1]:
        return False
    if given.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    batch = max(planned.shape[0], given.shape[0])
    return torch.equal(planned.expand(batch, -1), given.expand(batch, -1))
