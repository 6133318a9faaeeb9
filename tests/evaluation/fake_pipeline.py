"""A text-to-video pipeline of two attention layers, and `apply` for it: no diffusers, milliseconds.

The session, the methods and the kernels are the real ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Self

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.variants import Variant

GRID = (4, 8, 8)
TOKENS = 256
HEADS, HEAD_DIM, LAYERS = 2, 16, 2


def topk(density: float, **recipe: object) -> Variant:
    """Block top-k with blocks small enough for 256 tokens."""
    method = gs.BlockTopK(density=density, block=16, tile=16)
    return Variant(
        name="block-topk",
        recipe=gs.Recipe(method=method, min_tokens=0, **recipe),
        density_asked=density,
    )


class FakePipeline:
    """Turns a prompt into a video through real attention calls.

    Attributes:
        calls: The keyword arguments of every generation.
        session: What `apply_fake` attached; None while nothing is attached.
        fail_at: Raise this exception at the generation with this index.
    """

    def __init__(self, fail_at: dict[int, BaseException] | None = None) -> None:
        self.calls: list[dict[str, object]] = []
        self.session: gs.Session | None = None
        self.fail_at = fail_at or {}

    def __call__(
        self,
        *,
        prompt: str,
        height: int = 32,
        width: int = 32,
        num_frames: int = 4,
        num_inference_steps: int = 4,
        guidance_scale: float = 3.0,
        generator: torch.Generator,
        output_type: str = "np",
        callback_on_step_end: Callable[..., dict[str, Tensor]] | None = None,
    ) -> SimpleNamespace:
        assert output_type == "np"
        arguments = {"prompt": prompt, "steps": num_inference_steps, "scale": guidance_scale}
        self.calls.append(arguments)
        error = self.fail_at.pop(len(self.calls) - 1, None)
        noise = torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator)
        text = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
        x = noise + torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=text)
        for step in range(num_inference_steps):
            for branch in ("cond", "uncond"):
                for layer in range(LAYERS):
                    x = x + 0.1 * self._attention(x, step, num_inference_steps, branch, layer)
            if callback_on_step_end is not None:
                callback_on_step_end(self, step, 0, {})
            if error is not None:
                raise error
        frames = x.mean((1, 3)).sigmoid().view(1, *GRID, 1).expand(-1, -1, -1, -1, 3)
        frames = frames.repeat_interleave(height // 8, 2).repeat_interleave(width // 8, 3)
        return SimpleNamespace(frames=frames[:, :num_frames].numpy())

    def _attention(self, x: Tensor, step: int, num_steps: int, branch: str, layer: int) -> Tensor:
        assert self.session is not None, "the harness runs every generation with a recipe applied"
        call = gs.Call(
            layer=layer,
            num_layers=LAYERS,
            step=step,
            num_steps=num_steps,
            branch=branch,
            grid=GRID,
        )
        return self.session.attention(x, x, x, call)


class FakeHandle:
    """What `apply_fake` returns: the part of `gossamer.Handle` that the harness uses."""

    def __init__(self, pipe: FakePipeline) -> None:
        self._pipe = pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.session = None

    @property
    def records(self) -> list[gs.Record]:
        return list(self._pipe.session.records)

    def summary(self) -> dict[str, object]:
        return self._pipe.session.summary()


def apply_fake(pipe: FakePipeline, recipe: gs.Recipe, *, observer: object = None) -> FakeHandle:
    """Attach a session to the fake pipeline, as `gossamer.apply` does to a real one."""
    assert pipe.session is None, "a recipe is still applied"
    pipe.session = gs.Session(recipe, observer=observer)
    return FakeHandle(pipe)
