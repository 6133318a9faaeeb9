"""Whether a plan is one, and one for the tensors given."""

from __future__ import annotations

from torch import Tensor

from gossamer.errors import PlanError, described
from gossamer.plan.keys import KeyBlocks
from gossamer.plan.plan import SparsePlan
from gossamer.plan.validate import check_shapes


def check_is_plan(plan: object) -> None:
    """Refuse what is no plan, such as the method that makes one.

    Raises:
        PlanError: With the way to make one.
    """
    if not isinstance(plan, SparsePlan):
        hint = "sparse_attention takes a method, attend its plan: method.plan(q, k, v, Call())"
        raise PlanError(f"plan is {described(plan)}, must be a SparsePlan; {hint}")


def check_fit(q: Tensor, k: Tensor, plan: SparsePlan) -> None:
    """Refuse what is no plan, or one that was made for other tensors; waits for no device.

    Args:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        plan: The plan to run on them.

    Raises:
        PlanError: With the plan's sizes and the tensors'.
    """
    check_is_plan(plan)
    if (plan.num_queries, plan.num_keys) != (q.shape[2], k.shape[2]):
        raise PlanError(
            f"the plan is for {plan.num_queries} queries and {plan.num_keys} keys, but q has "
            f"{q.shape[2]} and k has {k.shape[2]}: make a plan for these"
        )
    if plan.batch not in (1, q.shape[0]) or plan.heads not in (1, q.shape[1]):
        raise PlanError(
            f"the plan is for batch {plan.batch} and {plan.heads} heads, but q has batch "
            f"{q.shape[0]} and {q.shape[1]} heads"
        )
    extra = None if isinstance(plan.keys, KeyBlocks) else plan.keys.extra_k
    if extra is not None and (extra.shape[1], extra.shape[3]) != (k.shape[1], k.shape[3]):
        raise PlanError(
            f"the plan's virtual keys have {extra.shape[1]} KV heads of dim {extra.shape[3]}, "
            f"but k has {k.shape[1]} of dim {k.shape[3]}: make a plan for these"
        )
    if plan.device != q.device:
        raise PlanError(f"the plan is on {plan.device}, q on {q.device}: use plan.to(q.device)")
    check_shapes(plan)
