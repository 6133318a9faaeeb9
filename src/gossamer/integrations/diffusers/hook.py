"""The one hook on a model's root: it hears of passes and generations, and publishes the grid."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import nn

from gossamer.errors import UnsupportedError
from gossamer.integrations.diffusers.families import Family
from gossamer.integrations.diffusers.frame import FRAME
from gossamer.integrations.diffusers.passes import PassListener
from gossamer.integrations.diffusers.processor import check_processors
from gossamer.integrations.diffusers.progress import Progress
from gossamer.integrations.diffusers.sites import Site

HOOK_NAME = "gossamer"


class RootHook(ModelHook):
    """Connects one attached model with the generation it takes part in.

    It is listed in the model's hook registry, through which diffusers hands `cache_context` down
    and resets its caches, but it does not wrap `forward`: accelerate replaces `forward` at the end
    of every generation (`enable_model_cpu_offload`), and two wrappers that know nothing of each
    other cannot be taken off in any order.

    Attributes:
        passes: Hears of the model's passes; diffusers finds it among the attributes.
        sites: The model's sites, which live as long as the hook.
        undo: Restores all models that were attached together.
    """

    _is_stateful = True

    def __init__(self, passes: PassListener, progress: Progress, sites: Sequence[Site]) -> None:
        """Make the hook of one model.

        Args:
            passes: Hears of the model's passes.
            progress: Hears of the end of a generation.
            sites: The model's sites.
        """
        super().__init__()
        self.passes = passes
        self.sites = tuple(sites)
        self.undo = ExitStack()
        self._progress = progress
        passes.check = self.check

    def check(self) -> None:
        """Refuse to go on when one of the sites was taken away since `apply`."""
        check_processors(self.sites)

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "a model that is attached to cannot be copied, as both copies would report to one "
            "session: copy it before apply(), or remove() the handle first"
        )

    def reset_state(self, module: nn.Module) -> nn.Module:
        """End the generation: diffusers resets its caches when a pipeline returns."""
        self.passes.reset()
        self._progress.end()
        return module


def install(model: nn.Module, hook: RootHook, family: Family, undo: ExitStack) -> None:
    """List the hook on a model and publish the grid of every forward.

    Args:
        model: The transformer.
        hook: Its hook.
        family: Knows the grid.
        undo: Receives what takes all of it away again.
    """

    def publish_grid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            hook.check()
        # A tensor, as a compiled block is guarded on its shape alone: no recompilation per grid.
        FRAME.grid = torch.tensor(family.grid(module, args, kwargs), device="cpu")

    def clear_grid(_module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        FRAME.grid = None

    undo.callback(_remove_listing, model, "_diffusers_hook" in vars(model))
    registry = HookRegistry.check_if_exists_or_initialize(model)
    # First in the list: removing another hook rewires the one behind it, and this one has no wire.
    registry.hooks[HOOK_NAME] = hook
    registry._hook_order.insert(0, HOOK_NAME)
    registry._fn_refs.insert(0, None)
    registry.invalidate_child_registries_cache()
    undo.callback(model.register_forward_pre_hook(publish_grid, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(clear_grid, always_call=True).remove)


def installed_hook(model: nn.Module) -> RootHook | None:
    """Return the hook of an attached model, None for one that is not attached."""
    registry: Any = getattr(model, "_diffusers_hook", None)
    return None if registry is None else registry.hooks.get(HOOK_NAME)


def _remove_listing(model: nn.Module, had_registry: bool) -> None:
    """Take the hook off the registry, and the registry off a model that had none."""
    registry = getattr(model, "_diffusers_hook", None)
    if registry is None or HOOK_NAME not in registry.hooks:
        return
    index = registry._hook_order.index(HOOK_NAME)
    del registry.hooks[HOOK_NAME], registry._hook_order[index], registry._fn_refs[index]
    registry.invalidate_child_registries_cache()
    if not had_registry and not registry.hooks:
        del model._diffusers_hook
