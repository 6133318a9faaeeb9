"""Checks of methods' parameters: ranges, and what others leave without effect."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from gossamer.errors import PlanError, described

if TYPE_CHECKING:
    from gossamer.methods.base import Method


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


def check_number(
    method: str, name: str, value: float | None, *, zero: bool = False, optional: bool = False
) -> None:
    """Refuse what is not a finite number above 0, or from 0 on where `zero`.

    None passes where it is `optional`.

    Raises:
        PlanError: Naming the parameter, the value and the range.
    """
    if value is None and optional:
        return
    if (
        value is None
        or isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and not zero)
    ):
        raise PlanError(
            f"{method}: {name}={described(value)} must be a number {'>=' if zero else '>'} 0"
        )


def check_size(method: str, name: str, value: int | None, *, optional: bool = False) -> None:
    """Refuse what is not an integer from 0 on (None passes where it is `optional`).

    Raises:
        PlanError: Naming the parameter and the value.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"{method}: {name}={described(value)} must be an integer >= 0")


def only_one(method: str, **given: object) -> str | None:
    """Return the name of the one parameter that is given, None for none.

    Raises:
        PlanError: More than one is given.
    """
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise PlanError(f"{method}: give one of {', '.join(given)}, not {' and '.join(names)}")
    return names[0] if names else None


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
