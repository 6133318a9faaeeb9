"""The registry: methods by name, those of other installed packages too."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import MISSING, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from gossamer.errors import PlanError, described
from gossamer.methods.base import Method
from gossamer.methods.params import check_share

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
