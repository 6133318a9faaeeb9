"""The errors Gossamer raises: each message gives the value, the allowed ones and the fix."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 60  # characters of a value in a message


def described(value: object) -> str:
    """Return what a value is, for a message: never what a tensor or another container holds.

    Short plain values stand as they are written, others with their type and, where they have one,
    their shape and dtype.
    """
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{_package(kind)}.{kind.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {name} of shape {tuple(shape)} and {getattr(value, 'dtype', 'no dtype')}"
    if isinstance(value, (str, bytes)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    if isinstance(value, (tuple, list)) and all(isinstance(x, (int, float, str)) for x in value):
        text = repr(value)
        if len(text) <= _LONGEST:
            return text
    if isinstance(value, (tuple, list, dict, set)):
        return f"a {name} of {len(value)}"
    return f"a {name}"


def _package(kind: type) -> str:
    """Return the package that a class comes from."""
    return kind.__module__.partition(".")[0]


class GossamerError(Exception):
    """Base class of every error raised by Gossamer on purpose."""


class PlanError(GossamerError, ValueError):
    """A plan, a call or a method's parameters contradict themselves or the tensors given."""


class UnsupportedError(GossamerError, ValueError):
    """What was asked for is well formed, but nothing here can run it.

    Attributes:
        reasons: One sentence per reason, in the order found.
    """

    def __init__(self, reasons: Sequence[str] | str) -> None:
        """Keep the reasons and join them into the message."""
        self.reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        super().__init__("; ".join(self.reasons))


class RecipeError(GossamerError, ValueError):
    """A recipe is unreadable, or has a key or a value that is not allowed."""


class ProfileMismatchError(GossamerError, ValueError):
    """A calibration profile was made for another model, head count or layer count."""


class MissingExtraError(GossamerError, ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, extra: str, package: str) -> None:
        """Name the package and the extra that brings it."""
        self.extra = extra
        self.package = package
        super().__init__(f'needs {package}: pip install "gossamer[{extra}]"')
