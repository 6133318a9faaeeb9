"""Hears from diffusers which pass (cond, uncond, …) a model is run for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from diffusers.hooks.hooks import BaseState, CacheContext, StateManager

from gossamer.integrations.diffusers.progress import Progress


class _NoState(BaseState):
    """State of one pass; the session holds all there is."""

    def reset(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""


class PassListener(StateManager):
    """Hears of every `cache_context` that a pipeline enters around the model.

    Attributes:
        check: Called before every pass, outside compiled code.
    """

    def __init__(self, progress: Progress) -> None:
        """Report to `progress`."""
        super().__init__(cast("BaseState", _NoState))
        self.check: Callable[[], None] | None = None
        self._progress = progress

    @property
    def current(self) -> CacheContext | None:
        """The pass being run, None outside every `cache_context`."""
        return self._context

    def set_context(self, context: CacheContext | None) -> None:
        """Take over what `cache_context` says; None when it is left."""
        if context is not None:
            if self.check is not None:
                self.check()
            self._progress.enter(context.name)
        super().set_context(context)
