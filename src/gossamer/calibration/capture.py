"""From what a session shows of an attention call to its latent tokens, in each head's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gossamer.errors import PlanError, UnsupportedError
from gossamer.methods.base import logit_scale, without
from gossamer.select.resize import Grid, token_order
from gossamer.session import AttentionEvent

OnStep = Callable[[int], None]
"""Called after each denoising step with the number of steps done."""


class Observer(Protocol):
    """A watcher of attention calls that knows how much time it took itself."""

    seconds: float

    def __call__(self, event: AttentionEvent) -> None:
        """See one call."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Latent:
    """The latent queries of a call, and all its keys: latent ones first, text behind them.

    Attributes:
        q: [B, H, N, D] latent queries.
        k: [B, Hk, S, D] keys, the first N latent.
        v: [B, Hk, S, D] their values.
        valid: [B or 1, S] bool, False for padded keys; None for none.
        grid: (frames, rows, columns), N in all.
        scale: Factor on the logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    grid: Grid
    scale: float

    @property
    def num_tokens(self) -> int:
        """N, latent tokens."""
        return self.q.shape[2]


def latent_of(event: AttentionEvent) -> Latent | None:
    """Return the latent tokens of a call; None for one that has no grid or is causal.

    The attachment gives no grid to calls that no plan can carry, so these run dense at inference
    too.

    Raises:
        UnsupportedError: The call has a part of the model's heads only.
    """
    call = event.call
    if call.grid is None or call.causal:
        return None
    if call.head_offset or call.num_heads not in (None, event.q.shape[1]):
        raise UnsupportedError(
            f"calibration needs all heads in one process, but this call has {event.q.shape[1]} "
            f"from head {call.head_offset} on: calibrate without tensor or Ulysses parallelism"
        )
    q, k, v, valid = event.q, event.k, event.v, call.key_valid
    if call.text is not None and call.text_length:
        span = slice(*call.text)
        q = without(q, call.text, dim=2)
        k, v = (torch.cat([without(x, call.text, dim=2), x[:, :, span]], dim=2) for x in (k, v))
        if valid is not None:
            valid = torch.cat([without(valid, call.text, dim=1), valid[:, span]], dim=1)
    return Latent(q=q, k=k, v=v, valid=valid, grid=call.grid, scale=logit_scale(event.q, call))


def reordered(latent: Latent, axes: int) -> Latent:
    """Return the latent tokens laid out in another order of the grid's axes; text stays behind."""
    if axes == 0:
        return latent
    order = token_order(latent.grid, axes, latent.q.device)
    rest = torch.arange(len(order), latent.k.shape[2], device=order.device)
    keys = torch.cat([order, rest])
    return replace(
        latent,
        q=latent.q[:, :, order],
        k=latent.k[:, :, keys],
        v=latent.v[:, :, keys],
        valid=None if latent.valid is None else latent.valid[:, keys],
    )


def by_order(latent: Latent, order: Tensor) -> Iterator[tuple[Tensor, Latent]]:
    """Yield the heads of each token order [n] with their tokens laid out in it.

    Args:
        latent: The tokens in raster order.
        order: [H] integer on the CPU, index into `AXIS_ORDERS`.
    """
    group = latent.q.shape[1] // latent.k.shape[1]
    used = order.unique().tolist()
    for axes in used:
        heads = (order == axes).nonzero().flatten()
        part = latent
        if len(used) > 1:
            at = heads.to(latent.q.device)
            part = replace(
                latent, q=latent.q[:, at], k=latent.k[:, at // group], v=latent.v[:, at // group]
            )
        yield heads, reordered(part, axes)


class Layers:
    """Tensors by layer, and the grid and number of layers that all calls must agree on."""

    def __init__(self) -> None:
        """Start empty."""
        self.grid: Grid | None = None
        self._num_layers: int | None = None
        self._tensors: dict[int, Tensor] = {}

    def at(self, event: AttentionEvent, latent: Latent, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of the event's layer, made at its first call.

        Raises:
            PlanError: The call has another grid than those before it.
        """
        if self.grid is None:
            self.grid = latent.grid
        if latent.grid != self.grid:
            raise PlanError(
                f"the calls of one generation have the grids {self.grid} and {latent.grid}: "
                "calibration needs one"
            )
        self._num_layers = event.call.num_layers
        if event.call.layer not in self._tensors:
            self._tensors[event.call.layer] = make()
        return self._tensors[event.call.layer]

    def stacked(self, dim: int) -> Tensor:
        """Return all layers along a new axis.

        Raises:
            UnsupportedError: No call could be measured, or those of a layer are missing.
        """
        if self.grid is None or not self._tensors:
            raise UnsupportedError(
                "no self-attention call with a grid was seen in the measured steps: is the model "
                "of a family that `gossamer.apply` knows?"
            )
        number = max(self._tensors) + 1 if self._num_layers is None else self._num_layers
        missing = [layer for layer in range(number) if layer not in self._tensors]
        if missing:
            raise UnsupportedError(
                f"layers {missing} of {number} had no self-attention call with a grid"
            )
        return torch.stack([self._tensors[layer] for layer in range(number)], dim=dim)
