"""Attaching a session to a pipeline or a transformer of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from gossamer.errors import UnsupportedError
from gossamer.integrations.diffusers.families import Family, find_family, unsupported
from gossamer.integrations.diffusers.hook import RootHook, install, installed_hook
from gossamer.integrations.diffusers.passes import PassListener
from gossamer.integrations.diffusers.processor import check_attachable, swap
from gossamer.integrations.diffusers.progress import Progress
from gossamer.integrations.diffusers.sites import (
    SITE_ATTRIBUTE,
    Attachment,
    Site,
    number_site,
)
from gossamer.session import Session


def attach(target: object, session: Session) -> ExitStack:
    """Route the self-attention of a model, or of every supported model of a pipeline, to a session.

    Nothing is changed if anything is refused.

    Args:
        target: A diffusers pipeline, or one of its transformers (compiled or not).
        session: Runs the attention from now on.

    Returns:
        A stack whose `close()` restores the models; closing it again does nothing.

    Raises:
        UnsupportedError: Nothing supported in `target`, a model that is attached already, or
            something about it that would not run; nothing was changed.
    """
    pipeline, models = _models_of(target)
    for model, family in models:
        _check(model, family)
    progress = Progress(session, pipeline)
    with ExitStack() as undo:
        hooks = [
            _attach_model(number, model, family, session, progress, undo)
            for number, (model, family) in enumerate(models)
        ]
        whole = undo.pop_all()
    for hook in hooks:
        hook.undo = whole
    return whole


def detach(target: object) -> None:
    """Undo `attach` where its handle is lost, for all models that were attached together.

    Args:
        target: A pipeline or a transformer; one that is not attached is left as it is.

    Raises:
        UnsupportedError: Nothing supported in `target`.
    """
    for model, _ in _models_of(target)[1]:
        hook = installed_hook(model)
        if hook is not None:
            hook.undo.close()


def _models_of(target: object) -> tuple[object | None, list[tuple[nn.Module, Family]]]:
    """Return (the pipeline or None, [(model, family)]) of what can be attached to.

    Raises:
        UnsupportedError: There is none; the message names what there is and what is supported.
    """
    if isinstance(target, nn.Module):
        model = _unwrapped(target)
        family = find_family(model)
        if family is None:
            raise unsupported(f"a model of class {type(model).__name__}")
        return None, [(model, family)]
    components = getattr(target, "components", None)
    if not isinstance(components, Mapping):
        raise unsupported(f"an object of class {type(target).__name__}")
    parts: dict[str, nn.Module] = {
        str(name): _unwrapped(part)
        for name, part in components.items()
        if isinstance(part, nn.Module)
    }
    found = {id(part): (part, find_family(part)) for part in parts.values()}
    models = [(part, family) for part, family in found.values() if family is not None]
    if not models:
        has = ", ".join(f"{name}: {type(part).__name__}" for name, part in parts.items())
        raise unsupported(f"a {type(target).__name__} with {has or 'no models loaded'}")
    return target, models


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile(model)`."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner


def _check(model: nn.Module, family: Family) -> None:
    """Refuse a model that cannot be attached to, before anything is changed."""
    kind = type(model).__name__
    if installed_hook(model) is not None:
        raise UnsupportedError(
            f"this {kind} is attached already: call remove() on the handle that apply() returned, "
            "or gossamer.integrations.detach(pipe_or_model)"
        )
    sites = list(family.sites(model))
    if not sites:
        raise UnsupportedError(
            f"this {kind} has no module that matches {family.site.pattern!r}, where {family.name} "
            "has its self-attention: it is empty, or of another version of diffusers"
        )
    for name, module in sites:
        check_attachable(name, module)


def _attach_model(
    number: int,
    model: nn.Module,
    family: Family,
    session: Session,
    progress: Progress,
    undo: ExitStack,
) -> RootHook:
    """Attach to one model and return its hook.

    Args:
        number: Which of the pipeline's models it is.
        model: The transformer.
        family: Its family.
        session: Runs its attention.
        progress: Follows the generation, shared by the pipeline's models.
        undo: Receives what restores the model.
    """
    modules = list(family.sites(model))
    passes = PassListener(progress)
    attachment = Attachment(number, family, len(modules), session, progress, passes)
    sites: list[Site] = []
    for layer, (name, module) in enumerate(modules):
        previous = swap(name, module.processor, undo)
        site = Site(name, module, layer, attachment, previous)
        setattr(module, SITE_ATTRIBUTE, number_site(site))
        undo.callback(delattr, module, SITE_ATTRIBUTE)
        sites.append(site)
    hook = RootHook(passes, progress, sites)
    install(model, hook, family, undo)
    return hook
