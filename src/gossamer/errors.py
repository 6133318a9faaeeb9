"""The errors Gossamer raises: each message gives the value, the allowed ones and the fix."""

from __future__ import annotations

from collections.abc import Sequence


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
