"""Wan transformers of real geometry with random weights: what a forward costs needs no training."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from gossamer.errors import MissingExtraError
from gossamer.evaluation.bench.case import Tensors, normal
from gossamer.evaluation.bench.plan_case import VIDEO_480P, VIDEO_720P

_TEXT_TOKENS = 512
_PATCH = (1, 2, 2)  # latents of a token: frames, rows, columns


@dataclass(frozen=True, kw_only=True, slots=True)
class WanModel:
    """One of Wan2.1's transformers at one size of video.

    Attributes:
        name: As results name it, e.g. "wan2.1-14b-720p".
        num_layers: Layers of the model.
        heads: Heads of 128.
        ffn_dim: Width of the feed-forward layers.
        grid: (frames, rows, columns) of the latent tokens.
        text_dim: Width of the text embeddings.
        layers: Layers that are run; None for all.
    """

    name: str
    num_layers: int
    heads: int
    ffn_dim: int
    grid: tuple[int, int, int]
    text_dim: int = 4096
    layers: int | None = None

    @property
    def num_tokens(self) -> int:
        """Latent tokens of one forward."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def run_layers(self) -> int:
        """Layers that are run."""
        return self.num_layers if self.layers is None else self.layers

    def with_layers(self, layers: int) -> Self:
        """Return the model cut to its first layers, and named as such."""
        name = f"{self.name}-{layers}-of-{self.num_layers}-layers"
        return replace(self, name=name, layers=layers)

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k and v [1, H, N, 128] bfloat16 in the shape of its self-attention."""
        return normal(device, heads=self.heads, num_tokens=self.num_tokens, dim=128)

    def build(self, device: torch.device) -> Any:
        """Return the transformer in bfloat16, made on the device with random weights.

        Raises:
            MissingExtraError: diffusers is not installed.
        """
        check_diffusers()
        make = importlib.import_module("diffusers").WanTransformer3DModel
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = make(
                    patch_size=_PATCH,
                    num_attention_heads=self.heads,
                    attention_head_dim=128,
                    text_dim=self.text_dim,
                    ffn_dim=self.ffn_dim,
                    num_layers=self.run_layers,
                )
        finally:
            torch.set_default_dtype(before)
        return model.eval().requires_grad_(False)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a forward: latents, a time step and text embeddings."""
        generator = torch.Generator(device).manual_seed(0)
        sides = [count * patch for count, patch in zip(self.grid, _PATCH, strict=True)]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        return {
            "hidden_states": random(1, 16, *sides),
            "timestep": torch.full((1,), 500, device=device),
            "encoder_hidden_states": random(1, _TEXT_TOKENS, self.text_dim),
            "return_dict": False,
        }


def check_diffusers() -> None:
    """Refuse to go on without diffusers, before anything is measured.

    Raises:
        MissingExtraError: It is not installed.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise MissingExtraError("diffusers", "the Wan transformer")


_14B = {"num_layers": 40, "heads": 40, "ffn_dim": 13_824}
_1_3B = {"num_layers": 30, "heads": 12, "ffn_dim": 8_960}

MODELS = tuple(
    WanModel(name=f"wan2.1-{size}-{video}", grid=shape.grid, **geometry)
    for size, geometry in (("14b", _14B), ("1.3b", _1_3B))
    for video, shape in (("720p", VIDEO_720P), ("480p", VIDEO_480P))
)
"""Wan2.1's text-to-video transformers, 81 frames of 1280 x 720 and 832 x 480."""
