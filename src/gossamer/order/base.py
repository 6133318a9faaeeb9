"""The protocol of an order and the registry that finds orders by name."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from gossamer.errors import PlanError, described
from gossamer.plan import SparsePlan

OrderParam = int | str  # what an order's parameters may be, so that recipe files hold them
_registry: dict[str, type[Order]] = {}
OrderClass = TypeVar("OrderClass", bound="type[Order]")


@dataclass(frozen=True, kw_only=True)
class OrderDecision:
    """Whether launching a plan's tiles in another order pays, and why.

    Attributes:
        order: Whether to order.
        reason: One sentence, for the record.
        estimated_gain: Attention time now over attention time ordered, without what ordering costs.
    """

    order: bool
    reason: str
    estimated_gain: float


@dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """Decides when each tile of a plan is launched; what it computes stays the same, bit for bit.

    An order is a frozen dataclass of its parameters, as a method is.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""

    @abstractmethod
    def decide(self, plan: SparsePlan) -> OrderDecision:
        """Return whether ordering the plan pays; one synchronisation at most."""

    @abstractmethod
    def order(self, plan: SparsePlan, decision: OrderDecision | None = None) -> SparsePlan:
        """Return the plan with a launch order, or as it is where the decision says so.

        Args:
            plan: The plan.
            decision: What `decide` returned for this plan; None asks it.
        """

    def explain(self, plan: SparsePlan) -> tuple[bool, str]:
        """Return whether `order` would order the plan, and the reason."""
        decision = self.decide(plan)
        return decision.order, decision.reason

    def params(self) -> dict[str, OrderParam]:
        """Return every parameter by name, as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def register(cls: OrderClass) -> OrderClass:
    """Register an order class under its name; for use as a decorator.

    Raises:
        PlanError: Another class has the name already.
    """
    known = _registry.get(cls.name)
    if known is not None and _path(known) != _path(cls):
        raise PlanError(
            f"{_path(cls)} cannot be registered as {cls.name!r}, the name of {_path(known)}: "
            "give it a name of its own"
        )
    _registry[cls.name] = cls
    return cls


def _path(cls: type) -> str:
    """Return module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def list_orders() -> list[str]:
    """Return the names of all orders."""
    return sorted(_registry)


def get_order(name: str, **params: OrderParam) -> Order:
    """Return an order by its registry name.

    Args:
        name: One of `list_orders()`.
        **params: The order's parameters.

    Raises:
        PlanError: Unknown name or parameter, or a value out of range.
    """
    if not isinstance(name, str):
        raise PlanError(
            f"order is {described(name)}: give its name, one of {', '.join(list_orders())}"
        )
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"unknown order {name!r}: {hint}known are {', '.join(list_orders())}")
    allowed = sorted(field.name for field in fields(_registry[name]))
    for key in params:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"{name} has no parameter {key!r}: {hint}it has {', '.join(allowed)}")
    return _registry[name](**params)
