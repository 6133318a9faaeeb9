"""The protocol of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.call import Call, check_tensors, given_call
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.plan import SparsePlan, full_plan, join_text
from gossamer.plan.agreement import check_plan

State = MutableMapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Decides which keys each tile of queries reads, and with which weight.

    A method is a frozen dataclass of its parameters. It implements `_plan_latent`, which sees
    latent tokens only; `plan` takes the text out before and joins it afterwards.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    causal_reason: ClassVar[str] = ""
    """Why the method has no causal form; empty where it has one."""
    fixed_density: ClassVar[bool] = False
    """Whether geometry fixes the density, so that the nearest there is stands for the asked one.

    `dense`, which has one alone, warns of the others.
    """
    file_params: ClassVar[tuple[str, ...]] = ()
    """Parameters that name profiles; in a recipe file relative paths count from its folder."""
    own_text_rule: ClassVar[bool] = False
    """Whether text queries follow a rule of the method's own instead of reading everything."""

    def plan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call | None = None,
        *,
        state: State | None = None,
    ) -> SparsePlan:
        """Make the finished plan of one call: text joined, padding left out.

        Args:
            q: [B, H, N, D] queries, after positional encoding.
            k: [B, Hk, S, D] keys; query head h reads KV head h // (H / Hk).
            v: [B, Hk, S, D] values.
            call: The facts about the call; None for self-standing attention.
            state: What the method may keep from one step to the next; a dict that the session owns
                per (layer, branch). None plans cold, without memory.

        Returns:
            The plan, on q's device. The global random state is neither read nor changed.

        Raises:
            PlanError: Shapes, grid, text or padding contradict one another, or the plan says
                otherwise than the call (a method's fault; the message names the field).
            UnsupportedError: The method has no causal form and the call is causal.
        """
        call = given_call(call)
        if state is not None and not isinstance(state, MutableMapping):
            raise PlanError(f"state={described(state)}: must be a dict, or None to plan cold")
        check_tensors(q, k, v)
        call.check(q.shape[0], q.shape[2], k.shape[2], q.shape[1])
        self.check_call(call)
        with torch.no_grad():
            if min(q.shape[2], k.shape[2] - call.text_length) == 0:
                plan = full_plan(q, k, call)  # nothing latent to choose from
            elif call.text_length == 0:
                plan = self._plan_latent(q, k, v, call, state)
            else:
                plan = self._plan_joint(q, k, v, call, state)
        check_plan(self._label(), plan, q, k, call)
        return plan

    def check_call(self, call: Call) -> None:
        """Refuse a call that the method can never plan, before any step is dense.

        Raises:
            PlanError: A parameter needs a grid, and the call has none.
            UnsupportedError: The method has no causal form and the call is causal.
        """
        if given_call(call).causal and self.causal_reason:
            raise UnsupportedError(f"{self.name} has no causal form: {self.causal_reason}")

    def anchor(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call | None = None,
        *,
        state: State | None = None,
    ) -> tuple[SparsePlan, Tensor | None]:
        """Plan, and return full attention where planning computes it on the way.

        Arguments and errors as `plan`.

        Returns:
            The plan; full attention [B, H, N, D] floating, or None where it was not computed.
        """
        return self.plan(q, k, v, call, state=state), None

    def _plan_joint(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Plan the latent tokens and join the text: full rows and full columns."""
        text = call.text or (0, 0)
        q, k, v = (without(x, text, dim=2) for x in (q, k, v))
        valid = None if call.key_valid is None else without(call.key_valid, text, dim=1)
        latent = call.latent(valid)
        plan = self._plan_latent(q, k, v, latent, state)
        check_plan(self._label(), plan, q, k, latent)  # before text hides what the method left out
        return join_text(plan, text, call.key_valid)

    def _label(self) -> str:
        """Return what messages call the method; without a name it works, but is not registered."""
        return getattr(self, "name", type(self).__name__)

    @abstractmethod
    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Plan latent tokens; arguments as `plan`, with no text in them."""

    @classmethod
    @abstractmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method set to compute the share `density` of latent-latent pairs.

        A method whose density is fixed by its geometry returns the nearest it has.

        Raises:
            PlanError: A parameter contradicts the density, or has no effect beside it.
        """

    def with_density(self, density: float) -> Self:
        """Return the same method at another density.

        Raises:
            UnsupportedError: The method was not given a density but budgets of its own.
        """
        if self.params().get("density") is None:
            raise UnsupportedError(
                f"{self.name} has no density to change: make it by density, such as "
                f"gossamer.get_method({self.name!r}, density=0.2)"
            )
        return replace(self, density=density)  # pyright: ignore[reportCallIssue] -- checked above

    def static_key(self, call: Call) -> Hashable | None:
        """Return a key under which the plan may be kept, None where it depends on the tensors."""
        del call
        return None

    def params(self) -> dict[str, Any]:
        """Return every parameter by name, as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def without(x: Tensor, span: tuple[int, int], *, dim: int) -> Tensor:
    """Return `x` without the tokens of `span`; a view where the span lies at an end."""
    start, stop = span
    before = x.narrow(dim, 0, start)
    after = x.narrow(dim, stop, x.shape[dim] - stop)
    if start == 0:
        return after
    if stop == x.shape[dim]:
        return before
    return torch.cat([before, after], dim=dim)


def check_method(method: object) -> None:
    """Refuse what is not a method, such as its name.

    Raises:
        PlanError: With the way to make one.
    """
    if not isinstance(method, Method):
        hint = "use gossamer.get_method(name)"
        if isinstance(method, str):
            hint = f"use gossamer.get_method({method!r})"
        elif isinstance(method, type) and issubclass(method, Method):
            hint = f"make one, {method.__name__}(…)"
        elif isinstance(method, SparsePlan):
            hint = "gossamer.attend runs a plan"
        raise PlanError(f"method={described(method)} is not a method: {hint}")


def logit_scale(q: Tensor, call: Call) -> float:
    """Return the factor on the logits: the call's, or 1/sqrt(D)."""
    return q.shape[-1] ** -0.5 if call.scale is None else call.scale
