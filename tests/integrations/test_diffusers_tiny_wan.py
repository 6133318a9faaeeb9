"""The bundled pipeline, whole: text encoder, denoiser and VAE as users load them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

import gossamer as gs
from gossamer.models import tiny_wan_path

METHODS = [
    gs.get_method("block-topk", density=0.3, tile=16, block=16),
    gs.get_method("svg2", density=0.3),
    gs.get_method("instagen", density=0.15),
]


@pytest.fixture(scope="module")
def pipe() -> Any:
    if not (tiny_wan_path() / "model_index.json").is_file():
        pytest.skip(f"no pipeline in {tiny_wan_path()}")
    pipe = WanPipeline.from_pretrained(tiny_wan_path(), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video(pipe: Any) -> torch.Tensor:
    """Generate 9 small frames, [1, F, 3, H, W]."""
    return pipe(
        prompt="a red ball",
        negative_prompt="",
        height=64,
        width=80,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames


@pytest.fixture(scope="module")
def dense(pipe: Any) -> torch.Tensor:
    return video(pipe)


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_a_video(pipe: Any, dense: torch.Tensor, method: gs.Method) -> None:
    layers = pipe.transformer.config.num_layers
    with gs.apply(pipe, gs.Recipe(method=method, min_tokens=0, dense_steps=1)) as handle:
        first = video(pipe)
        summary = handle.summary()
        assert summary["calls"] == 2 * 2 * layers
        assert summary["reasons"] == {"dense step": 2 * layers}
        sparse_calls = [r for r in handle.records if r.path == "sparse"]
        sizes = (1 + 8 // pipe.vae_scale_factor_temporal, 64, 80)
        pixels = (1, pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_spatial)
        patch = pipe.transformer.config.patch_size
        grid = [n // (s * p) for n, s, p in zip(sizes, pixels, patch, strict=True)]
        assert {r.num_queries for r in sparse_calls} == {math.prod(grid)}
        assert torch.equal(video(pipe), first)
    assert first.shape == dense.shape == (1, 9, 3, 64, 80)
    assert not torch.equal(first, dense)


def test_full_density_gives_the_stock_video(pipe: Any, dense: torch.Tensor) -> None:
    recipe = gs.Recipe(method=gs.BlockTopK(density=1.0, tile=16, block=16), min_tokens=0)
    with gs.apply(pipe, recipe) as handle:
        torch.testing.assert_close(video(pipe), dense, atol=1e-3, rtol=1e-3)
        assert handle.summary()["dense_calls"] == 0
    assert torch.equal(video(pipe), dense)
