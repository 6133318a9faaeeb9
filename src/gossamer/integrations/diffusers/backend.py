"""The dispatch backend that attached processors use, and the opaque operator it calls."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor

from gossamer.errors import UnsupportedError
from gossamer.integrations.diffusers.frame import FRAME
from gossamer.integrations.diffusers.sites import site_of

INFERENCE_ONLY = (
    "attention attached by gossamer.apply is inference only, it has no gradient: "
    "call the model under torch.no_grad(), or remove() the handle before training"
)

CONTEXT_PARALLEL = (
    "context parallelism (model.enable_parallelism) is not supported: each rank would plan for its "
    "own part of the sequence; run the model on one device"
)

# Where a capture would freeze the decisions that the operator takes at run time.
_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)
)


@torch.library.custom_op("gossamer::session_attention", mutates_args=(), tags=_TAGS)
def session_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    site: Tensor,
    grid: Tensor,
) -> Tensor:
    """Run one attention call through the session its site belongs to.

    Opaque to `torch.compile`: pass, step and schedule are looked up at run time, so none of them
    is guarded on. `site` and `grid` live on the CPU; reading them does not wait for a device.

    Args:
        query: [B, N, H, D].
        key: [B, S, Hk, D].
        value: [B, S, Hk, D].
        mask: Broadcasts to [B, H, N, S], or a boolean key mask [B, S]; None for none.
        is_causal: Causal, top-left aligned.
        scale: Factor on the logits, None for 1/sqrt(D).
        site: int64 scalar, the number of the attention module.
        grid: int64 [3]: frames, rows, columns.

    Returns:
        [B, N, H, D], contiguous.
    """
    frames, rows, columns = grid.tolist()
    return site_of(int(site.item())).attend(
        query, key, value, mask, is_causal, scale, (frames, rows, columns)
    )


@session_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_rest: Any) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.custom_op("gossamer::no_gradient", mutates_args=())
def _no_gradient(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse a backward pass when it runs, as a compiler traces one for every forward under grad.

    It takes the incoming gradient so that the compiler cannot move it into the forward pass.
    """
    raise UnsupportedError(
        f"{INFERENCE_ONLY} (asked to carry the gradient of an output {tuple(grad.shape)} to query "
        f"{tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)})"
    )


@_no_gradient.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature is torch's
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_no_gradient(grad, *ctx.saved_tensors), None, None, None, None, None)


session_attention.register_autograd(_backward, setup_context=_keep_inputs)


def _dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Serve `dispatch_attention_fn`, which calls this by keyword, for attached processors.

    A module that is not attached to, but shares its processor with one that is, goes on to the
    backend that the processor had before.

    Raises:
        UnsupportedError: Context parallelism, dropout, or a call from outside the model's forward.
    """
    if getattr(FRAME, "site", None) is None:
        return dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            backend=getattr(FRAME, "previous", None),
            parallel_config=_parallel_config,
        )
    if _parallel_config is not None:
        raise UnsupportedError(CONTEXT_PARALLEL)
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Call the operator for the site and the grid that are in the frame.

    Args:
        query: [B, N, H, D].
        key: [B, S, Hk, D].
        value: [B, S, Hk, D].
        mask: See `session_attention`.
        dropout_p: Must be 0.
        is_causal: Causal, top-left aligned.
        scale: Factor on the logits, None for 1/sqrt(D).

    Returns:
        [B, N, H, D], contiguous.

    Raises:
        UnsupportedError: Dropout, or a call from outside the model's forward.
    """
    site, grid = getattr(FRAME, "site", None), getattr(FRAME, "grid", None)
    if dropout_p != 0.0:
        raise UnsupportedError(f"{INFERENCE_ONLY} (attention was called with dropout {dropout_p})")
    if site is None or grid is None:
        raise UnsupportedError(
            "an attached attention module was called outside its model's forward, so the latent "
            "grid is unknown: call model(...), not model.forward(...) or one of its blocks; "
            "recomputing blocks in a backward pass (gradient checkpointing) is not supported"
        )
    FRAME.used = True
    return session_attention(query, key, value, mask, is_causal, scale, site, grid)


def _make_member() -> AttentionBackendName:
    """Make a backend name that only attached processors know.

    diffusers' enum is closed. The member is not listed in it, so that diffusers goes on refusing
    `set_attention_backend("gossamer")`, which would take cross-attention and every other model too.
    """
    member = str.__new__(AttentionBackendName, "gossamer")
    member._name_, member._value_ = "GOSSAMER", "gossamer"
    # Before Python 3.11.4 copying an enum member looks its name up in the enum, which lacks it.
    vars(member)["__deepcopy__"] = lambda _memo: member
    return member


MEMBER = _make_member()
"""What `processor._attention_backend` is while attached."""

_AttentionBackendRegistry.register(MEMBER)(_dispatch)
