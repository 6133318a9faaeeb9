"""Attaching Gossamer to the models of other libraries."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gossamer.errors import MissingExtraError
from gossamer.integrations.handle import Handle
from gossamer.methods import Method
from gossamer.recipe import Recipe
from gossamer.session import Observer, Session

__all__ = ["Handle", "apply", "detach"]


def apply(
    target: object,
    recipe: Recipe | Method | str | os.PathLike[str],
    *,
    observer: Observer | None = None,
) -> Handle:
    """Make the self-attention of a diffusion pipeline sparse, until the handle removes it.

    Only the self-attention of the transformer blocks changes, of the given pipeline or model and
    of no other. LoRA, offloading, `torch.compile` and diffusers' caches go on working. Attach
    after `fuse_qkv_projections`, `set_attn_processor` and `set_attention_backend`; what is changed
    behind the handle's back is noticed at the next forward and refused.

    Pass the pipeline rather than its transformer where there is one: its scheduler tells the
    denoising step, and all its transformers (Wan 2.2 has two) share one schedule. A transformer
    alone takes the step from `model.cache_context(name, step_index=…, num_inference_steps=…)`. With
    only the name it counts the passes since the caches were last reset, which pipelines do when
    they return (`model._reset_stateful_cache()`). Outside a `cache_context` it is at step 0 of 1,
    and nothing is kept from one forward to the next.

    Attention is for inference: a backward pass is refused. So is context parallelism
    (`enable_parallelism`). A call that no plan can carry (an attention mask that is more than
    padding, say) runs on the dispatch backend the model had before, and its record gives the
    reason. Where a backend other than PyTorch's own was chosen, dense steps run on it too.

    Args:
        target: A diffusers pipeline, or one of its transformers; supported is the Wan family.
        recipe: What to do: a recipe, a method (with the default schedule), the name of a shipped
            recipe, or the path of a recipe file.
        observer: Called after every call with what went in and came out, outside measured times.

    Returns:
        The handle: records, summary, `remove()`. As a context manager it removes at the end.

    Raises:
        MissingExtraError: diffusers is not installed.
        UnsupportedError: Nothing supported in `target`, or it is attached already.
        RecipeError: The recipe is unknown or malformed.

    Examples:
        >>> with gs.apply(pipe, gs.BlockTopK(density=0.2)) as handle:  # doctest: +SKIP
        ...     video = pipe("a paper boat on a river").frames
        >>> handle.summary()["density"]  # doctest: +SKIP
    """
    attachment = _diffusers_attachment()
    session = Session(_as_recipe(recipe), observer=observer)
    return Handle(session, attachment.attach(target, session))


def detach(target: object) -> None:
    """Remove what `apply` attached, where its handle is lost.

    Args:
        target: A pipeline or transformer; one that is not attached stays as it is.

    Raises:
        MissingExtraError: diffusers is not installed.
        UnsupportedError: Nothing supported in `target`.
    """
    _diffusers_attachment().detach(target)


def _as_recipe(recipe: Recipe | Method | str | os.PathLike[str]) -> Recipe:
    """Return what was given as a recipe."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return Recipe.load(recipe)
    return Recipe(method=recipe)


def _diffusers_attachment() -> Any:
    """Import the integration of diffusers, or say how to install what it needs."""
    try:
        importlib.import_module("diffusers")
    except ModuleNotFoundError as error:
        raise MissingExtraError("diffusers", "diffusers") from error
    return importlib.import_module("gossamer.integrations.diffusers.attach")
