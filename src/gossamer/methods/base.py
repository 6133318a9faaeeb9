"""The protocol of a method and the registry that finds methods by name."""

from __future__ import annotations

import difflib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, MutableMapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from gossamer.call import Call, check_tensors, given_call
from gossamer.errors import PlanError, UnsupportedError, described
from gossamer.plan import SparsePlan, full_plan, join_text

State = MutableMapping[str, Any]

# The order in which methods are listed: dense, the five systems, the baselines.
_ORDER = (
    ("dense", "instagen", "mc-sparse", "scaling", "intra")
    + ("svg", "svg2", "svg-ear", "block-topk", "xattention", "sparge", "minference")
    + ("flexprefill", "radial", "clear", "sliding-window", "moba", "nsa", "vsa", "draft")
    + ("pisa", "sol", "vattention")
)
_ENTRY_POINTS = "gossamer.methods"
_registry: dict[str, type[Method]] = {}
MethodClass = TypeVar("MethodClass", bound="type[Method]")


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


def logit_scale(q: Tensor, call: Call) -> float:
    """Return the factor on the logits: the call's, or 1/sqrt(D)."""
    return q.shape[-1] ** -0.5 if call.scale is None else call.scale


def check_share(method: str, name: str, value: float, *, zero: bool = False) -> None:
    """Refuse a share outside (0, 1], or [0, 1] where `zero`.

    Raises:
        PlanError: Naming the parameter, the value and the range.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not (0 < value <= 1 or (zero and value == 0)):
        bound = "0 <=" if zero else "0 <"
        raise PlanError(
            f"{method}: {name}={described(value)} must be a number with {bound} {name} <= 1"
        )


def check_count(method: str, name: str, value: int | None, *, optional: bool = False) -> None:
    """Refuse a count that is not a positive integer (None passes where it is `optional`).

    Raises:
        PlanError: Naming the parameter and the value.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{method}: {name}={described(value)} must be an integer >= 1")


def refuse_unused(method: Method, why: str, *names: str) -> None:
    """Refuse parameters that were set and that the method's other parameters leave without effect.

    A parameter at its default passes: nothing tells whether it was given.

    Args:
        method: The method, its parameters checked.
        why: What leaves them without effect, such as "beside density=0.2".
        *names: The parameters.

    Raises:
        PlanError: Naming the first one that is not at its default, and the reason.
    """
    defaults = {field.name: field.default for field in fields(method)}
    for name in names:
        value = getattr(method, name)
        if value != defaults[name]:
            raise PlanError(
                f"{method.name}: {name}={value!r} has no effect {why}: leave out one of them"
            )


def register(cls: MethodClass) -> MethodClass:
    """Register a method class under its name; for use as a decorator.

    A class in a notebook or a script needs this alone. The same class may come again, as when its
    module is reloaded or its cell is run once more.

    Args:
        cls: A subclass of `Method` with a `name` of its own.

    Returns:
        The class.

    Raises:
        PlanError: It is no such class, or another one has the name already.
    """
    name = _name_of(cls)
    known = _registry.get(name)
    if known is not None and _path(known) != _path(cls):
        raise PlanError(
            f"{_path(cls)} cannot be registered as {name!r}, the name of {_path(known)}: "
            "give it a name of its own"
        )
    _registry[name] = cls
    return cls


def _name_of(cls: object) -> str:
    """Return the registry name that a method class gives itself.

    Raises:
        PlanError: It is no method class, or has no name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise PlanError(f"{described(cls)} cannot be registered: must be a subclass of Method")
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and name):
        raise PlanError(
            f'{_path(cls)} has no name: write name: ClassVar[str] = "my-method" in the class'
        )
    return name


def _path(cls: type) -> str:
    """Return module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _load_entry_points() -> None:
    """Register the methods of other installed packages, once.

    What does not load, cannot be registered or has another name than its entry point is left out.
    """
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            cls = entry.load()
            name = _name_of(cls)
            if name != entry.name:
                raise PlanError(
                    f"{_path(cls)} has the name {name!r}: name the entry point and the class alike"
                )
            register(cls)
        except Exception as error:  # noqa: BLE001 -- theirs, whatever it is
            warnings.warn(
                f"the method {entry.name!r} ({entry.value}) of another package does not load and "
                f"is left out: {type(error).__name__}: {error}",
                stacklevel=3,
            )


def list_methods() -> list[str]:
    """Return the names of all methods: Gossamer's in a fixed order, then third parties'."""
    _load_entry_points()
    known = [name for name in _ORDER if name in _registry]
    return known + sorted(set(_registry) - set(known))


def get_method_class(name: str) -> type[Method]:
    """Return the class of a method.

    Raises:
        PlanError: No method has this name; the message names the nearest ones.
    """
    _load_entry_points()
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"unknown method {name!r}: {hint}known are {', '.join(list_methods())}")
    return _registry[name]


def required_params(cls: type[Method]) -> list[str]:
    """Return the parameters of a method class that have no default."""
    return [
        field.name
        for field in fields(cls)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]


def get_method(name: str, **params: Any) -> Method:
    """Return a method by its registry name.

    Args:
        name: One of `list_methods()`.
        **params: The method's parameters. `density` asks any method to compute this share of the
            visible latent-latent pairs, so that methods compare at equal density.

    Raises:
        PlanError: Unknown name or parameter, or a value out of range.
    """
    if not isinstance(name, str):
        raise PlanError(
            f"method {described(name)}: give its name, one of {', '.join(list_methods())} "
            "(gossamer.methods.register adds a class of your own)"
        )
    cls = get_method_class(name)
    density = params.pop("density", None)
    allowed = sorted({field.name for field in fields(cls)} | {"density"})
    for key in params:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"{name} has no parameter {key!r}: {hint}it has {', '.join(allowed)}")
    if density is None:
        missing = [key for key in required_params(cls) if key not in params]
        if missing:
            raise PlanError(f"{name} needs {', '.join(missing)}: give a value, or a density")
        return cls(**params)
    check_share(name, "density", density)
    return cls.at_density(density, **params)
