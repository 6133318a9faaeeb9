"""Reusing plans over denoising steps, and the cached residual that corrects what they leave out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import RecipeError, described
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan
from gossamer.records import Stopwatch
from gossamer.schedule import check_indices, indices

_EVERY = 4
_OFFLOADS = ("none", "cpu")
_RESIDUAL_BYTES = 4  # float32
Place = tuple[int, str]  # layer and branch


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Plan at anchor steps only; between them reuse the plan and add the anchor's residual.

    At an anchor step the output is full attention, O_full, and R = O_full - O_sparse is kept in
    float32; a later step outputs O_sparse + R with the anchor's plan (MC-Sparse, its reuse phase).
    Works around any method. Without the residual an anchor step is an ordinary sparse step whose
    plan the next ones share.

    The first sparse step of each layer and branch is an anchor, and the last dense warm-up step
    before it serves as one where it can. State is kept per layer and branch and freed at the end of
    a generation.

    Attributes:
        every: Steps from one anchor to the next: at most every - 1 steps in a row reuse one.
        anchors: Anchor steps as indices and ranges such as "0,10,20-22", instead of `every`; the
            first sparse step is one in any case. "": `every` decides.
        residual: Whether to correct by the anchor's residual.
        offload: "cpu" keeps plans and residuals in pinned host memory and fetches the next layer's
            while this one computes; "none" keeps them on the device.
        max_bytes: Bound on what is kept over all layers and branches; calls that would exceed it
            are planned anew at every step, and their records say so. None: no bound.

    Raises:
        RecipeError: A value out of range.
    """

    every: int = _EVERY
    anchors: str = ""
    residual: bool = True
    offload: str = "none"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, least in (("every", 1), ("max_bytes", 0)):
            value = getattr(self, name)
            if name == "max_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RecipeError(f"reuse: {name}={described(value)} must be an integer >= {least}")
        if not isinstance(self.residual, bool):
            raise RecipeError(f"reuse: residual={described(self.residual)} must be true or false")
        if self.offload not in _OFFLOADS:
            raise RecipeError(
                f"reuse: offload={described(self.offload)} must be one of {_OFFLOADS}"
            )
        check_indices("reuse: anchors", self.anchors)
        if self.anchors and self.every != _EVERY:
            raise RecipeError(
                f"reuse: every={self.every} has no effect beside anchors={self.anchors!r}: leave "
                "out one of them"
            )

    def params(self) -> dict[str, Any]:
        """Return every parameter by name, as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def is_due(self, step: int, anchor_step: int) -> bool:
        """Return whether `step` must be an anchor, given the last one."""
        if step <= anchor_step:  # another generation, or a step that was taken back
            return True
        if self.anchors:
            return any(anchor_step < i <= step for i in indices("reuse: anchors", self.anchors))
        return step - anchor_step >= self.every


@dataclass(frozen=True, eq=False)
class Anchor:
    """What an anchor step leaves for the steps after it.

    Attributes:
        step: The anchor step.
        shape: (B, H, N, D) of the queries and S.
        facts: What else of the call a plan depends on (see `call_facts`).
        plan: The plan, ordered.
        residual: [B, H, N, D] float32, O_full - O_sparse; None where none is kept.
    """

    step: int
    shape: tuple[int, ...]
    facts: tuple[Hashable, ...]
    plan: SparsePlan
    residual: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of everything kept."""
        return sum(x.nbytes for x in _tensors(self))


class AnchorStore:
    """The anchors of one generation, on the device or in host memory.

    Offloaded anchors are fetched one call ahead: the calls of a step come in the order in which
    their anchors were stored.

    Attributes:
        reuse: What to keep and where.
        peak_bytes: The most that was kept at once.
    """

    def __init__(self, reuse: Reuse) -> None:
        """Start empty."""
        self.reuse = reuse
        self._kept: dict[Place, Anchor] = {}
        self._fetched: dict[Place, Anchor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copies: list[Stopwatch] = []
        self._bytes = 0
        self.peak_bytes = 0

    @property
    def copy_ms(self) -> float:
        """Milliseconds spent fetching from host memory; waits for the device."""
        return sum(watch.elapsed_ms(0) for watch in self._copies)

    def has_room(self, place: Place, plan: SparsePlan, q: Tensor) -> bool:
        """Return whether the anchor of `plan` fits under the bound, in place of the last one."""
        limit = self.reuse.max_bytes
        if limit is None:
            return True
        old = self._kept[place].num_bytes if place in self._kept else 0
        new = Anchor(step=0, shape=(), facts=(), plan=plan, residual=None).num_bytes
        if self.reuse.residual:
            new += q.numel() * _RESIDUAL_BYTES
        return self._bytes - old + new <= limit

    def put(self, place: Place, anchor: Anchor) -> None:
        """Keep an anchor in place of the last one."""
        self.drop(place)
        if self.reuse.offload == "cpu" and anchor.plan.device.type == "cuda":
            anchor = _moved(anchor, _pinned)
        self._kept[place] = anchor
        self._bytes += anchor.num_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def clear(self) -> None:
        """Forget every anchor; what was measured stays until the next one."""
        self._kept, self._fetched, self._bytes = {}, {}, 0

    def drop(self, place: Place) -> None:
        """Forget the anchor of a place; nothing happens where there is none."""
        self._fetched.pop(place, None)
        old = self._kept.pop(place, None)
        if old is not None:
            self._bytes -= old.num_bytes

    def get(self, place: Place, call: Call, q: Tensor, k: Tensor) -> Anchor | None:
        """Return the anchor that this call may reuse, on q's device; None: an anchor is due."""
        anchor = self._kept.get(place)
        if anchor is None or self.reuse.is_due(call.step, anchor.step):
            return None
        if anchor.shape != (*q.shape, k.shape[2]) or anchor.facts != call_facts(call):
            return None
        if not _same_mask(anchor.plan.key_valid, call.key_valid):
            return None
        if anchor.plan.device == q.device:
            return anchor
        fetched = self._fetched.pop(place, None)
        if fetched is None:
            fetched = self._fetch(anchor, q.device)
        if self._stream is not None:
            torch.cuda.current_stream(q.device).wait_stream(self._stream)
            for x in _tensors(fetched):
                x.record_stream(torch.cuda.current_stream(q.device))
        self._fetch_next(place, q.device)
        return fetched

    def _fetch_next(self, place: Place, device: torch.device) -> None:
        """Start to fetch the anchor that the next call will ask for."""
        places = list(self._kept)
        following = places[(places.index(place) + 1) % len(places)]
        if following not in self._fetched and following != place:
            self._fetched = {following: self._fetch(self._kept[following], device)}

    def _fetch(self, anchor: Anchor, device: torch.device) -> Anchor:
        """Copy an anchor to the device beside the computation."""
        if device.type != "cuda":
            return _moved(anchor, lambda x: x.to(device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # What is in host memory must have arrived there before it is fetched back.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            watch = Stopwatch(device)
            fetched = _moved(anchor, lambda x: x.to(device, non_blocking=True))
            watch.mark()
        self._copies.append(watch)
        return fetched


def call_facts(call: Call) -> tuple[Hashable, ...]:
    """Return what of a call, beside its padding, must be the same for a plan to be reused."""
    return call.grid, call.text, call.causal, call.scale, call.head_offset, call.heads


def _same_mask(kept: Tensor | None, given: Tensor | None) -> bool:
    """Return whether two masks hide the same keys; waits for the device where both are given.

    Keys that a stale plan reads may hold anything by now.
    """
    if kept is None or given is None or kept is given:
        return kept is given
    return kept.shape == given.shape and torch.equal(kept, given.to(kept.device))


def _tensors(anchor: Anchor) -> list[Tensor]:
    """Return every tensor of an anchor."""
    found = [] if anchor.residual is None else [anchor.residual]
    for part in (anchor.plan, anchor.plan.keys):
        values = (getattr(part, field.name) for field in fields(part))
        found += [value for value in values if isinstance(value, Tensor)]
    return found


def _moved(anchor: Anchor, move: Any) -> Anchor:  # noqa: ANN401 -- Tensor -> Tensor
    """Return the anchor with every tensor moved."""

    def part(x: SparsePlan | KeyBlocks | KeyTokens) -> dict[str, Any]:
        values = {field.name: getattr(x, field.name) for field in fields(x)}
        return {name: move(value) for name, value in values.items() if isinstance(value, Tensor)}

    keys = replace(anchor.plan.keys, **part(anchor.plan.keys))
    plan = replace(anchor.plan, keys=keys, **part(anchor.plan))
    residual = None if anchor.residual is None else move(anchor.residual)
    return replace(anchor, plan=plan, residual=residual)


def _pinned(x: Tensor) -> Tensor:
    """Copy a tensor to page-locked host memory, from which copies run beside computation."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return host.copy_(x, non_blocking=True)
