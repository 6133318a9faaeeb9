"""Whole plans as a session makes them: from nothing, from the last step's state, and anchors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.bench.case import Tensors, normal
from gossamer.evaluation.bench.check import check_dense
from gossamer.evaluation.bench.clustered_masks import ClusteredMasks
from gossamer.evaluation.bench.plan_case import PlanStage, Shape
from gossamer.order import OrderDecision
from gossamer.session import AttentionEvent

_OFF = 0.02  # between the density asked and the plan's, at most (law 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """A method's plan of one call: cold, then warm or from the cache of static plans.

    Attributes:
        name: As results name it, e.g. "instagen-75600".
        method: The method.
        shape: The shape of the call.
        density: What the method was asked for; None where it has a rule of its own.
    """

    name: str
    method: gs.Method
    shape: Shape
    density: float | None = None

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        return _tensors(self.shape, device)

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield "cold"; then "warm" of a method that keeps state, "cached" of a static plan."""
        del device
        recipe = gs.Recipe(method=self.method)
        first = gs.Call(grid=self.shape.grid)
        yield PlanStage(
            name="cold",
            call=lambda: _plan(gs.Session(recipe), tensors, first),
            check=self._check,
        )
        session = gs.Session(recipe)
        _plan(session, tensors, first)
        following = partial(_plan, session, tensors, replace(first, step=1))
        if self.method.static_key(first) is not None:
            yield PlanStage(name="cached", call=following, check=self._check)
        elif any(session._states.values()):
            yield PlanStage(name="warm", call=following, check=self._check)

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, shape=self.shape.scaled(factor))

    def _check(self, plan: gs.SparsePlan) -> float:
        """Return the density of a valid plan that met what was asked."""
        plan.validate()
        if self.density is not None and abs(plan.density - self.density) > _OFF:
            raise ArithmeticError(f"density {plan.density:.3f}, and {self.density:g} was asked for")
        return plan.density


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchoring:
    """An anchor step of `Reuse` with its residual, and what of it makes the plan.

    The anchor is what a step costs that replans: grouping, full attention with the selection of
    keys, and the sparse pass that the residual is taken against.

    Attributes:
        name: As results name it, e.g. "mc-sparse-anchor-75600".
        method: The method.
        shape: The shape of the call.
    """

    name: str
    method: gs.Method
    shape: Shape

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        return _tensors(self.shape, device)

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield "plan", grouping and selection alone, and "anchor", the whole step."""
        del device
        q, k, v = tensors
        call = gs.Call(grid=self.shape.grid)

        def checked(plan: gs.SparsePlan) -> float:
            plan.validate()
            return plan.density

        yield PlanStage(name="plan", call=lambda: self.method.plan(q, k, v, call), check=checked)
        recipe = gs.Recipe(method=self.method, reuse=gs.Reuse(), min_tokens=0)
        seen: list[AttentionEvent] = []

        def check_output(out: Tensor) -> float | None:
            check_dense("the anchor", out, q, k, v)
            gs.Session(recipe, observer=seen.append).attention(q, k, v, call)
            plan = seen.pop().plan
            return None if plan is None else plan.density

        yield PlanStage(
            name="anchor",
            call=lambda: gs.Session(recipe).attention(q, k, v, call),
            check=check_output,
        )

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, shape=self.shape.scaled(factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """WaveAlign on clustered masks: deciding whether to order, and ordering.

    Attributes:
        name: As results name it, e.g. "wavealign-148k".
        masks: The masks.
    """

    name: str
    masks: ClusteredMasks

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, D]."""
        return self.masks.tensors(device)

    def stages(self, tensors: Tensors, device: torch.device) -> Iterator[PlanStage]:
        """Yield "decide" and "order"."""
        del tensors
        plan = self.masks.plan(device)
        order = gs.WaveAlign(skip="never")

        def ordered(result: gs.SparsePlan) -> float:
            result.validate()
            return result.density

        def decided(result: OrderDecision) -> float:
            if not result.estimated_gain >= 1:
                raise ArithmeticError(f"an estimated gain of {result.estimated_gain}")
            return plan.density

        yield PlanStage(name="decide", call=lambda: gs.WaveAlign().decide(plan), check=decided)
        yield PlanStage(name="order", call=lambda: order.order(plan), check=ordered)

    def scaled(self, factor: float) -> Self:
        """Return the case on about this share of its tokens."""
        return replace(self, masks=self.masks.scaled(factor))


def _tensors(shape: Shape, device: torch.device) -> Tensors:
    return normal(device, heads=shape.heads, num_tokens=shape.num_tokens, dim=shape.dim)


def _plan(session: gs.Session, tensors: Tensors, call: gs.Call) -> gs.SparsePlan:
    """Plan as a session does before it attends, with the state that it keeps."""
    return session._plan(*tensors, call, with_full=False)[0]
