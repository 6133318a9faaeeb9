"""The protocol of a method and the registry that finds methods by name."""

from __future__ import annotations

import difflib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError
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
            PlanError: Shapes, grid, text or padding contradict one another.
            UnsupportedError: The method has no causal form and the call is causal.
        """
        call = Call() if call is None else call
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
        return plan

    def check_call(self, call: Call) -> None:
        """Refuse a call that the method can never plan, before any step is dense.

        Raises:
            PlanError: A parameter needs a grid, and the call has none.
            UnsupportedError: The method has no causal form and the call is causal.
        """
        if call.causal and self.causal_reason:
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
        plan = self._plan_latent(q, k, v, call.latent(valid), state)
        return join_text(plan, text, call.key_valid)

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
        raise PlanError(f"method={method!r} is not a method: use gossamer.get_method(name)")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that are not one attention call.

    Raises:
        PlanError: Wrong number of axes, or sizes that do not fit; the message gives the shapes.
        TypeError: The dtypes differ or are not floating.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise PlanError(f"{shapes}: each must be [batch, heads, tokens, head dim]")
    if k.shape != v.shape:
        raise PlanError(f"{shapes}: k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise PlanError(f"{shapes}: batch and head dim of q and k must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise PlanError(
            f"{shapes}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise TypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: cast them to one floating dtype"
        )
    if not q.device == k.device == v.device:
        raise PlanError(f"q is on {q.device}, k on {k.device}, v on {v.device}: move them together")


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
        raise PlanError(f"{method}: {name}={value!r} must be a number with {bound} {name} <= 1")


def check_count(method: str, name: str, value: int | None, *, optional: bool = False) -> None:
    """Refuse a count that is not a positive integer (None passes where it is `optional`).

    Raises:
        PlanError: Naming the parameter and the value.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{method}: {name}={value!r} must be an integer >= 1")


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
    """Register a method class under its name; for use as a decorator."""
    _registry[cls.name] = cls
    return cls


@cache
def _load_entry_points() -> None:
    """Register the methods of other installed packages, once; what does not load is left out."""
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            cls = entry.load()
        except Exception as error:  # noqa: BLE001 -- theirs, whatever it is
            warnings.warn(
                f"the method {entry.name!r} ({entry.value}) of another package does not load and "
                f"is left out: {type(error).__name__}: {error}",
                stacklevel=3,
            )
            continue
        register(cls)


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
        raise PlanError(f"method {name!r}: give its name, one of {', '.join(list_methods())}")
    cls = get_method_class(name)
    density = params.pop("density", None)
    allowed = sorted({field.name for field in fields(cls)} | {"density"})
    for key in params:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"{name} has no parameter {key!r}: {hint}it has {', '.join(allowed)}")
    if density is None:
        return cls(**params)
    check_share(name, "density", density)
    return cls.at_density(density, **params)
