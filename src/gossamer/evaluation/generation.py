"""One generation with one recipe: its frames, its records and its honest times."""

from __future__ import annotations

import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.plans import Observer
from gossamer.evaluation.settings import Settings

OnStep: TypeAlias = Callable[[int], None]
"""Called after each denoising step with the number of steps done."""


class Video(Protocol):
    """What a pipeline returns.

    Attributes:
        frames: [1, frames, height, width, 3] floats in 0…1.
    """

    frames: NDArray[np.floating] | Tensor


class Pipeline(Protocol):
    """A text-to-video pipeline with the calling convention of diffusers."""

    def __call__(self, **arguments: object) -> Video:
        """Generate one video."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What one call of the pipeline gave.

    Attributes:
        frames: [frames, height, width, 3] float32 in 0…1, on the CPU.
        records: One record per attention call, in order.
        summary: The session's summary: `density`, `attention_ms`, `plan_ms`, `plan_share`, ….
        total_ms: Wall-clock time of the pipeline call, the observer's own time taken out.
    """

    frames: Tensor
    records: Sequence[gs.Record]
    summary: Mapping[str, Any]
    total_ms: float

    @property
    def dense_steps(self) -> int:
        """Count the steps in which every attention call ran dense, whatever the reason."""
        sparse: dict[int, bool] = defaultdict(bool)
        for record in self.records:
            sparse[record.step] |= record.path != "dense"
        return sum(not is_sparse for is_sparse in sparse.values())

    @property
    def kernel(self) -> str:
        """Return the kernel that ran most of the sparse calls, of all calls if none was sparse."""
        sparse = [record.kernel for record in self.records if record.path != "dense"]
        names = Counter(sparse or [record.kernel for record in self.records])
        return names.most_common(1)[0][0] if names else ""


def generate(
    pipe: Pipeline,
    prompt: str,
    recipe: gs.Recipe,
    settings: Settings,
    *,
    seed: int,
    observer: Observer | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Generate one video with `recipe` applied, and take it off again.

    Args:
        pipe: The pipeline; left as it was found.
        prompt: The text.
        recipe: How attention runs; the `dense` method measures the unchanged model.
        settings: Size, steps and guidance.
        seed: Seed of the initial noise.
        observer: Sees every attention call; its time is taken out of `total_ms`.
        on_step: Called after each denoising step, where the pipeline supports it.

    Returns:
        The frames, records and times.

    Raises:
        GossamerError: The recipe cannot run on this model.
        ValueError: The pipeline refuses the settings, or its frames are not a video.
    """
    arguments: dict[str, Any] = {
        "prompt": prompt,
        "height": settings.height,
        "width": settings.width,
        "num_frames": settings.num_frames,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        # Noise drawn on the CPU is the same on every device.
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "np",
    }
    if on_step is not None and _reports_steps(pipe):
        arguments["callback_on_step_end"] = _step_callback(on_step)
    with gs.apply(pipe, recipe, observer=observer) as handle:
        start = time.perf_counter()
        frames = torch.as_tensor(pipe(**arguments).frames)[0]
        elapsed = time.perf_counter() - start
        records, summary = list(handle.records), handle.summary()
    watched = 0.0 if observer is None else observer.seconds
    return Generation(
        frames=frames.detach().to("cpu", torch.float32),
        records=records,
        summary=summary,
        total_ms=1e3 * (elapsed - watched),
    )


def _reports_steps(pipe: Pipeline) -> bool:
    """Say whether the pipeline takes diffusers' step callback."""
    return "callback_on_step_end" in inspect.signature(pipe.__call__).parameters


def _step_callback(
    on_step: OnStep,
) -> Callable[[Pipeline, int, object, dict[str, Tensor]], dict[str, Tensor]]:
    """Wrap `on_step` as diffusers calls it."""

    def callback(
        _pipe: Pipeline, step: int, _timestep: object, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        on_step(step + 1)
        return tensors

    return callback
