"""The attached attention modules, and what becomes of a call of one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor, nn

from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError
from gossamer.integrations.diffusers.families import Family, Grid
from gossamer.integrations.diffusers.passes import PassListener
from gossamer.integrations.diffusers.progress import Progress
from gossamer.session import DenseBackend, Session

SITE_ATTRIBUTE = "_gossamer_site"
"""Attribute of an attached attention module: its number, an int64 scalar on the CPU."""


@dataclass(frozen=True, eq=False)
class Attachment:
    """One attached model: what all its sites share.

    Attributes:
        model: Which of the pipeline's models it is.
        family: Its family.
        num_layers: How many sites it has.
        session: Runs the attention.
        progress: Knows the step.
        passes: Knows the pass.
    """

    model: int
    family: Family
    num_layers: int
    session: Session
    progress: Progress
    passes: PassListener


@dataclass(frozen=True, eq=False)
class Site:
    """One attached attention module.

    Attributes:
        name: The module's name in its model.
        module: The module.
        layer: Its index among the model's sites.
        attachment: The model it belongs to.
        previous: The dispatch backend its processor had before, None for diffusers' active one.
    """

    name: str
    module: nn.Module
    layer: int
    attachment: Attachment
    previous: Any

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        grid: Grid,
    ) -> Tensor:
        """Run one attention call through the session.

        What the session cannot plan goes to the dispatch backend that the processor had before,
        and is recorded as dense with the reason. So do calls that the recipe wants dense where the
        user had chosen a backend: a dense step is what it was before attaching.

        Args:
            query: [B, N, H, D], as diffusers hands it over.
            key: [B, S, Hk, D].
            value: [B, S, Hk, D].
            mask: Broadcasts to [B, H, N, S]; bool (True = attend) or additive; None for none.
            is_causal: Causal, top-left aligned as in PyTorch.
            scale: Factor on the logits, None for 1/sqrt(D).
            grid: (frames, rows, columns) of the running forward.

        Returns:
            [B, N, H, D], contiguous.

        Raises:
            PlanError: A mask for another number of keys, or a grid for another number of tokens.
        """
        key_valid, reason = key_mask(mask, query.shape[0], key.shape[1])
        if query.shape[1] != key.shape[1]:
            reason = f"{query.shape[1]} queries and {key.shape[1]} keys: not self-attention"
        elif is_causal:
            reason = "causal attention"
        call = self._call(grid if reason is None else None, key.shape[1], key_valid, scale)
        backend = AttentionBackendName(
            self.previous or _AttentionBackendRegistry.get_active_backend()[0]
        )

        def run_previous() -> Tensor:
            gqa = query.shape[2] != key.shape[2]
            out = dispatch_attention_fn(
                query, key, value, mask, 0.0, is_causal, scale, gqa, backend=backend
            )
            return out.transpose(1, 2)

        other = DenseBackend(f"diffusers:{backend.value}", run_previous)
        if reason is None and backend is AttentionBackendName.NATIVE:
            other = None  # the session's own dense attention is the same, and deaf to padded keys
        session = self.attachment.session
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, N, D]
        if reason is None:
            out = session.attention(q, k, v, call, dense_by=other)
        else:
            out = session.dense(q, k, v, call, reason=reason, by=other)
        return out.transpose(1, 2).contiguous()

    def _call(
        self, grid: Grid | None, num_keys: int, key_valid: Tensor | None, scale: float | None
    ) -> Call:
        """Say where the call stands; without a grid for one whose tokens are not the latent's."""
        shared = self.attachment
        position = shared.progress.locate(shared.model, self.layer, shared.passes.current)
        text = None
        if grid is not None:
            text = shared.family.text_span(num_keys, grid[0] * grid[1] * grid[2])
        return Call(
            layer=self.layer,
            num_layers=shared.num_layers,
            step=position.step,
            num_steps=position.num_steps,
            branch=position.branch,
            grid=grid,
            text=text,
            key_valid=key_valid,
            scale=scale,
        )


def key_mask(mask: Tensor | None, batch: int, num_keys: int) -> tuple[Tensor | None, str | None]:
    """Read an attention mask as the padding of keys.

    Args:
        mask: Boolean [B, S] (a key mask, as in diffusers, also where B == N), [B, 1, 1, S], or
            anything else that broadcasts to [B, H, N, S].
        batch: B.
        num_keys: S.

    Returns:
        ([B or 1, S] bool, None) for a key mask, (None, None) for no mask, (None, reason) for a
        mask that no plan can carry.

    Raises:
        PlanError: The mask is for another number of keys.
    """
    if mask is None:
        return None, None
    shape = tuple(mask.shape)
    if mask.dim() < 2 or shape[-1] not in (1, num_keys):
        raise PlanError(
            f"the attention mask has shape {shape}, but there are {num_keys} keys: "
            "its last axis must have one entry per key"
        )
    two_axes = mask.dim() == 2 and shape[0] in (1, batch)
    four_axes = mask.dim() == 4 and shape[0] in (1, batch) and shape[1:3] == (1, 1)
    if mask.dtype == torch.bool and shape[-1] == num_keys and (two_axes or four_axes):
        return mask.reshape(shape[0], num_keys), None
    return None, f"an attention mask of shape {shape} and dtype {mask.dtype} is not a key mask"


_NUMBERS = itertools.count()
# Weak: a model that is dropped without remove() takes its sites along.
_SITES: WeakValueDictionary[int, Site] = WeakValueDictionary()


def number_site(site: Site) -> Tensor:
    """Give a site a number no other ever had, as an int64 scalar on the CPU.

    A compiled graph takes the number as an input, so one graph serves all layers.
    """
    number = next(_NUMBERS)
    _SITES[number] = site
    return torch.tensor(number, device="cpu")


def site_of(number: int) -> Site:
    """Return the site of a number.

    Raises:
        UnsupportedError: It is attached no more.
    """
    site = _SITES.get(number)
    if site is None:
        raise UnsupportedError(
            f"attention site {number} was detached, but a compiled or copied model still calls it: "
            "call torch.compiler.reset() after remove(), and copy models before apply()"
        )
    return site
