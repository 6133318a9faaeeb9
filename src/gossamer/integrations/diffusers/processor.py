"""Attaching to a processor: in place, by its class, so that it stays the object it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gossamer.errors import UnsupportedError
from gossamer.integrations.diffusers.backend import CONTEXT_PARALLEL, MEMBER, attend
from gossamer.integrations.diffusers.frame import FRAME
from gossamer.integrations.diffusers.sites import SITE_ATTRIBUTE, Site

_PREVIOUS = "_gossamer_previous"
_BACKEND = "_attention_backend"


class _SdpaToOperator(TorchFunctionMode):
    """Serves processors that call scaled_dot_product_attention themselves, and nothing else.

    Dynamo cannot trace a processor under it; those that dispatch are never run under it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Send one call of the attention function to the operator."""
        if func is functional.scaled_dot_product_attention:
            return _attend_sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - the heads' numbers tell
) -> Tensor:
    """Take scaled_dot_product_attention's arguments, [B, H, N, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, N, H, D]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale).transpose(1, 2)


@functools.cache
def _attached_class(base: type, dispatches: bool) -> type:
    """Return the subclass of a processor's class that tells the backend which module calls.

    The base's `__call__` is looked up at every call, as other libraries patch it, and its
    signature is kept, as models read it to decide which arguments to pass.

    Args:
        base: The processor's class.
        dispatches: Whether it takes part in diffusers' dispatch.
    """

    @functools.wraps(base.__call__)
    def __call__(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        FRAME.site = getattr(attn, SITE_ATTRIBUTE, None)
        FRAME.previous = getattr(self, _PREVIOUS)
        FRAME.used = FRAME.site is None
        try:
            if dispatches or FRAME.site is None:
                output = base.__call__(self, attn, *args, **kwargs)
            else:
                with _SdpaToOperator():
                    output = base.__call__(self, attn, *args, **kwargs)
            if not FRAME.used:
                raise UnsupportedError(
                    f"processor {base.__name__} computed attention without diffusers' "
                    "dispatch_attention_fn(backend=self._attention_backend) or PyTorch's "
                    "scaled_dot_product_attention, so no attention can be made sparse: change it, "
                    "or set another processor before apply()"
                )
            return output
        finally:
            FRAME.site = FRAME.previous = None

    return type(f"Gossamer{base.__name__}", (base,), {"__call__": __call__, "_gossamer_base": base})


def base_class(processor: object) -> type | None:
    """Return the class an attached processor had before, None for one that is not attached."""
    return getattr(type(processor), "_gossamer_base", None)


def check_attachable(name: str, module: nn.Module) -> None:
    """Refuse a module whose processor must not be attached to.

    Args:
        name: The module's name in its model.
        module: A self-attention module.

    Raises:
        UnsupportedError: The processor is missing, another model's too, or context-parallel.
    """
    processor = getattr(module, "processor", None)
    if processor is None:
        raise UnsupportedError(f"{name} has no processor: set one before apply()")
    if base_class(processor) is not None:
        raise UnsupportedError(
            f"{name} shares its processor with a model that is attached already: give each model "
            "its own processors, or remove() the other handle first"
        )
    if getattr(processor, "_parallel_config", None) is not None:
        raise UnsupportedError(f"{name}: {CONTEXT_PARALLEL}")


def swap(name: str, processor: Any, undo: ExitStack) -> Any:
    """Attach to one processor; one that several modules share is attached to once.

    Args:
        name: The name of a module that it serves, for messages.
        processor: Its class and, if it dispatches, its backend change; it stays the same object.
        undo: Receives what restores both, as far as nobody else changed them in between.

    Returns:
        The dispatch backend that it had, None for diffusers' active one.

    Raises:
        UnsupportedError: It is of a class without subclasses or attributes.
    """
    base = type(processor)
    if base_class(processor) is not None:
        return getattr(processor, _PREVIOUS)
    dispatches = hasattr(processor, _BACKEND)
    had_backend = _BACKEND in getattr(processor, "__dict__", {})
    previous = getattr(processor, _BACKEND, None)
    try:
        attached = _attached_class(base, dispatches)
        setattr(processor, _PREVIOUS, previous)
        processor.__class__ = attached
    except (TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"{name} has a {base.__name__} as its processor, which cannot be attached to "
            f"({error}): use an instance of a class with __call__(self, attn, hidden_states, ...)"
        ) from error
    undo.callback(_restore, processor, base, had_backend, previous)
    if dispatches:
        setattr(processor, _BACKEND, MEMBER)
    return previous


def _restore(processor: Any, base: type, had_backend: bool, previous: object) -> None:
    """Give a processor its class and its backend back, unless the user has chosen another."""
    processor.__class__ = base
    delattr(processor, _PREVIOUS)
    if vars(processor).get(_BACKEND) is MEMBER:
        if had_backend:
            setattr(processor, _BACKEND, previous)
        else:
            delattr(processor, _BACKEND)


def check_processors(sites: Iterable[Site]) -> None:
    """Refuse to go on when sites were taken away since `apply`: they would be dense, silently.

    Args:
        sites: The sites of one model.

    Raises:
        UnsupportedError: A processor or its dispatch backend was replaced.
    """
    for site in sites:
        processor: Any = site.module.processor
        base = base_class(processor)
        if base is None:
            raise UnsupportedError(
                f"the processor of {site.name} was replaced after apply() by a "
                f"{type(processor).__name__}: remove() the handle, set processors, apply() again"
            )
        backend = getattr(processor, _BACKEND, MEMBER)
        if backend is not MEMBER:
            raise UnsupportedError(
                f"the attention backend of {site.name} was set to {backend!s} after apply(): "
                "remove() the handle, set the backend, apply() again"
            )
