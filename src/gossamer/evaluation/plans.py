"""An observer of attention calls: what the plans look like and how far each call is from dense."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

import gossamer as gs
from gossamer.session import AttentionEvent

CallKey: TypeAlias = tuple[int, int, str]
"""Which attention call of a generation: (step, layer, branch)."""

# Query rows on which the error of a call is measured, evenly spaced: a fixed cost per call, and the
# sampling error of a mean over 512 rows is far below the differences between methods.
ERROR_ROWS = 512
# The gallery's pictures: small enough for a page of dozens, fine enough for a block of 64 in 4096.
MASK_SIDE = 64
# plan.weights() is a float for every pair of tokens: 256 MiB a head at this bound of 8192 tokens.
MAX_PAIRS = 1 << 26


class Observer(Protocol):
    """A watcher of attention calls that knows how much time it took itself."""

    seconds: float

    def __call__(self, event: AttentionEvent) -> None:
        """See one call."""
        ...


@dataclass(kw_only=True)
class PlanObserver:
    """Collects coarse plan masks and errors against dense attention for a few chosen calls.

    Attributes:
        mask_steps: Steps whose plans are drawn: first, middle and last layer.
        mask_heads: Heads whose plans are drawn.
        error_steps: Steps whose calls are compared with dense attention, every layer.
        branch: The guidance pass that is watched; None for the first one seen.
        masks: The pictures so far; each has `layer`, `head`, `step`, `rows`, `cols`, `density` and
            `mask`: rows of queries over columns of keys, in token order, each number the share 0…1
            of a square's pairs that is read.
        errors: Relative L2 error of the calls compared so far.
        seconds: Time spent in here, to be taken out of the generation's.
    """

    mask_steps: Collection[int] = ()
    mask_heads: Collection[int] = (0, 1)
    error_steps: Collection[int] = ()
    branch: str | None = None
    masks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    errors: dict[CallKey, float] = field(default_factory=dict[CallKey, float])
    seconds: float = 0.0

    def __call__(self, event: AttentionEvent) -> None:
        """See one attention call."""
        start = time.perf_counter()
        call = event.call
        if self.branch is None:
            self.branch = call.branch
        if call.branch == self.branch and event.plan is not None:
            if call.step in self.error_steps:
                key = (call.step, call.layer, call.branch)
                self.errors[key] = relative_error(event.q, event.k, event.v, event.out, call)
            if call.step in self.mask_steps and call.layer in _shown_layers(call.num_layers):
                self.masks.extend(self._draw(event.plan, call))
        self.seconds += time.perf_counter() - start

    def _draw(self, plan: gs.SparsePlan, call: gs.Call) -> Iterator[dict[str, Any]]:
        """Yield the pictures of one plan; none where its token mask would be too large."""
        if plan.num_queries * plan.num_keys > MAX_PAIRS:
            return
        weights = plan.weights()[0, ..., : plan.num_keys]  # [H or 1, N, S]
        for head in self.mask_heads:
            if head < weights.shape[0]:
                mask = coarse_mask(weights[head])
                yield {
                    "layer": call.layer,
                    "head": head,
                    "step": call.step,
                    "rows": mask.shape[0],
                    "cols": mask.shape[1],
                    "density": (weights[head] > 0).float().mean().item(),
                    "mask": [[round(share, 3) for share in row] for row in mask.tolist()],
                }


def observer_for(num_steps: int) -> PlanObserver:
    """Choose what the report shows of a generation: a few calls, spread over it.

    Errors in the middle and at three quarters of the steps, pictures at three quarters: past the
    dense steps that most recipes begin with, and before those that some end with.

    Args:
        num_steps: Denoising steps of the generation.
    """
    late = 3 * num_steps // 4
    return PlanObserver(mask_steps=(late,), error_steps=(num_steps // 2, late))


def _shown_layers(num_layers: int | None) -> Collection[int]:
    """Return the first, middle and last layer; the first where their number is unknown."""
    return (0,) if num_layers is None else {0, num_layers // 2, num_layers - 1}


def relative_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: gs.Call) -> float:
    """Compute ‖out − dense‖ / ‖dense‖ of one attention call.

    The yardstick is the reference kernel, which is fp64 inside, so that the rounding of a
    low-precision dense run is not taken for truth. Measured on at most 512 evenly spaced query
    rows; on all of them under a causal mask, whose rows see different keys.

    Args:
        q: [B, H, N, D].
        k: [B, Hk, S, D].
        v: [B, Hk, S, D].
        out: [B, H, N, D], what the sparse call gave.
        call: Its mask, scale and padding.

    Returns:
        The relative L2 error over all heads and batch rows.
    """
    if not call.causal:
        num_rows = min(ERROR_ROWS, q.shape[2])
        rows = torch.arange(num_rows, device=q.device) * q.shape[2] // num_rows
        q, out = q[:, :, rows], out[:, :, rows]
    plain = gs.Call(causal=call.causal, scale=call.scale, key_valid=call.key_valid)
    dense = gs.sparse_attention(
        q.double(), k.double(), v.double(), gs.Dense(), plain, kernel="reference"
    )
    error = torch.linalg.vector_norm(out.double() - dense)
    return (error / torch.linalg.vector_norm(dense)).item()


def coarse_mask(weights: Tensor, side: int = MASK_SIDE) -> Tensor:
    """Average a plan's token mask into squares of tokens.

    Args:
        weights: [N, S] float, 0 where a pair is not read.
        side: Most squares per axis.

    Returns:
        [min(side, N), min(side, S)] float32, the share of each square's pairs that is read.
    """
    read = (weights > 0).float()[None, None]
    shape = (min(side, read.shape[2]), min(side, read.shape[3]))
    return torch.nn.functional.adaptive_avg_pool2d(read, shape)[0, 0]


def with_errors(
    records: list[dict[str, Any]], errors: Mapping[CallKey, float]
) -> list[dict[str, Any]]:
    """Return the records with `rel_l2` added: the error of the call, None where none was taken."""
    return [
        {**record, "rel_l2": errors.get((record["step"], record["layer"], record["branch"]))}
        for record in records
    ]
