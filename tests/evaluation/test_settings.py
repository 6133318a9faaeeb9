"""Settings that no model can take are refused before a model is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gossamer.evaluation.pipelines import ModelError, check_size, load_pipeline, model_digest
from gossamer.evaluation.settings import Settings

GOOD = {"height": 64, "width": 64, "num_frames": 17, "steps": 4, "guidance_scale": 3.0}


def settings(**changes):
    return Settings(model="any", **{**GOOD, **changes})


@pytest.mark.parametrize("name", ["height", "width", "num_frames", "steps"])
@pytest.mark.parametrize("value", [0, -16])
def test_sizes_must_be_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        settings(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_guidance_must_be_a_number(value):
    with pytest.raises(ValueError, match=r"guidance_scale must be a finite number >= 0"):
        settings(guidance_scale=value)


def wan(space=8, time=4, patch=(1, 2, 2)):
    return SimpleNamespace(
        vae_scale_factor_spatial=space,
        vae_scale_factor_temporal=time,
        transformer=SimpleNamespace(config=SimpleNamespace(patch_size=patch)),
    )


@pytest.mark.parametrize("size", [{}, {"height": 16}, {"num_frames": 1}, {"num_frames": 81}])
def test_sizes_that_the_model_takes(size):
    check_size(wan(), settings(**size))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"height": 60}, "height must be a multiple of 16 for this model, got 60: use 64"),
        ({"width": 1}, "width must be a multiple of 16 for this model, got 1: use 16"),
        ({"num_frames": 16}, "multiple of 4 plus 1 for this model, got 16: use 13 or 17"),
    ],
)
def test_the_nearest_size_is_named(size, message):
    with pytest.raises(ModelError, match=message):
        check_size(wan(), settings(**size))


def test_a_model_in_pixel_space_takes_any_number_of_frames():
    check_size(wan(space=1, time=1, patch=(1, 4, 4)), settings(num_frames=16))
    with pytest.raises(ModelError, match="multiple of 16"):
        check_size(wan(space=1, time=1, patch=(1, 4, 4)), settings(height=60))


def test_a_large_factor_counts():
    with pytest.raises(ModelError, match="multiple of 32 for this model, got 48: use 64"):
        check_size(wan(space=16), settings(height=48))


def test_unknown_pipelines_check_for_themselves():
    check_size(SimpleNamespace(), settings(height=3))


def test_a_folder_that_is_no_pipeline(tmp_path):
    pytest.importorskip("diffusers")
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        load_pipeline(tmp_path)


def test_the_digest_sees_a_retrained_model(tmp_path):
    (tmp_path / "unet").mkdir()
    weights = tmp_path / "unet" / "model.safetensors"
    weights.write_bytes(b"0" * 3_000_000)
    (tmp_path / "config.json").write_text("{}")
    first = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("not loaded")
    assert model_digest(tmp_path) == first
    weights.write_bytes(b"0" * 2_999_999 + b"1")
    assert model_digest(tmp_path) != first
