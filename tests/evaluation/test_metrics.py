"""The metrics against textbook values and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gossamer.errors import MissingExtraError
from gossamer.evaluation import stlpips
from gossamer.evaluation.metrics import flicker, psnr, ssim, st_lpips

METRICS = [psnr, ssim, st_lpips, flicker]
IDENTICAL = {psnr: math.inf, ssim: 1.0, st_lpips: 0.0, flicker: 0.0}


@pytest.fixture(autouse=True)
def _needs_stlpips():
    if not stlpips.has_stlpips():
        pytest.skip("stlpips-pytorch is not installed")


def video(frames=2, height=40, width=36, seed=0):
    """Smooth shapes, so that perceptual distances mean something."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(frames, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return smooth.clamp(0.2, 0.8).movedim(1, -1)


def ssim_brute_force(x, y):
    """SSIM of one channel of one frame [H, W] by its definition, window by window."""
    offsets = np.arange(11) - 5
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    scores = []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            a, b = (image[row : row + 11, column : column + 11] for image in (x, y))
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            top = (2 * mean_a * mean_b + 0.01**2) * (2 * covariance + 0.03**2)
            scores.append(top / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2)))
    return np.mean(scores)


@pytest.mark.parametrize("metric", METRICS)
def test_identical_videos(metric):
    assert metric(video(), video()) == pytest.approx(IDENTICAL[metric])


@pytest.mark.parametrize("metric", METRICS)
def test_arrays_and_tensors_of_any_float_type_agree(metric):
    a, b = video().half(), video(seed=1).half()
    expected = metric(a, b)
    assert metric(a.numpy(), b.double().numpy()) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_are_symmetric_and_leave_their_inputs_alone(metric):
    a, b = video(), video(seed=1)
    copy = a.clone()
    assert metric(a, b) == pytest.approx(metric(b, a))
    assert torch.equal(a, copy)


@pytest.mark.parametrize("metric", METRICS)
def test_more_noise_is_further_away(metric):
    base, generator = video(), torch.Generator().manual_seed(1)
    noise = torch.randn(base.shape, generator=generator)
    scores = [metric(base, (base + size * noise).clamp(0, 1)) for size in (0.01, 0.05, 0.2)]
    assert scores == sorted(scores, reverse=metric in (psnr, ssim))


@pytest.mark.parametrize(
    ("mse", "decibels"), [(0.01, 20.0), (0.0001, 40.0), (0.25, 6.0206), (1.0, 0.0)]
)
def test_psnr_of_a_known_error(mse, decibels):
    a = torch.zeros(2, 8, 8, 3, dtype=torch.float64)
    assert psnr(a, a + math.sqrt(mse)) == pytest.approx(decibels, abs=1e-4)


def test_psnr_averages_the_error_before_the_logarithm():
    a = torch.zeros(2, 8, 8, 3, dtype=torch.float64)
    b = a.clone()
    b[0] += 0.2  # one bad frame: mse .04 there, .02 overall
    assert psnr(a, b) == pytest.approx(-10 * math.log10(0.02))


def test_psnr_takes_frames_of_any_size():
    assert psnr(torch.zeros(1, 1, 1, 3), torch.ones(1, 1, 1, 3)) == 0.0


def test_ssim_equals_its_definition():
    a, b = video(1, 16, 14).double(), video(1, 16, 14, seed=1).double()
    expected = np.mean(
        [ssim_brute_force(a[0, ..., c].numpy(), b[0, ..., c].numpy()) for c in range(3)]
    )
    assert ssim(a, b) == pytest.approx(expected, abs=1e-12)


def test_ssim_of_flat_frames_is_the_luminance_term():
    a, b = torch.full((1, 11, 11, 3), 0.5), torch.full((1, 11, 11, 3), 0.25)
    expected = (2 * 0.5 * 0.25 + 1e-4) / (0.5**2 + 0.25**2 + 1e-4)
    assert ssim(a, b) == pytest.approx(expected)


def test_st_lpips_tells_noise_from_a_shift():
    """What the metric is for: a shift of one pixel is little, noise of the same energy is much."""
    row, column = torch.meshgrid(torch.arange(64.0), torch.arange(65.0), indexing="ij")
    rings = 0.5 + 0.3 * torch.sin(torch.hypot(row - 20, column - 40))
    wide = rings[None, :, :, None].expand(-1, -1, -1, 3)
    a, shifted = wide[:, :, :-1], wide[:, :, 1:]
    spread = (a - shifted).square().mean().sqrt()
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(1)) * spread
    assert st_lpips(a, shifted) < 0.2 * st_lpips(a, (a + noise).clamp(0, 1))


def test_st_lpips_needs_its_package(monkeypatch):
    stlpips.load_stlpips.cache_clear()
    monkeypatch.setattr(stlpips, "has_stlpips", lambda: False)
    with pytest.raises(MissingExtraError, match=r'stlpips-pytorch: pip install "gossamer\[eval\]"'):
        st_lpips(video(), video())


def test_loading_st_lpips_leaves_no_stand_in_modules_behind():
    import sys

    before = {name: sys.modules.get(name) for name in ("torchvision", "torchsummary", "IPython")}
    stlpips.load_stlpips.cache_clear()
    stlpips.load_stlpips()
    assert before == {name: sys.modules.get(name) for name in before}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 40, 36, 3), r"\(2, 40, 36, 3\) and \(3, 40, 36, 3\)"),
        (torch.zeros(2, 36, 40, 3), r"\(2, 40, 36, 3\) and \(2, 36, 40, 3\)"),
        (torch.zeros(2, 3, 40, 36), r"\[frames, height, width, 3\], got \(2, 3, 40, 36\)"),
        (torch.zeros(40, 36, 3), r"\[frames, height, width, 3\]"),
        (torch.zeros(2, 40, 36, 3, dtype=torch.uint8), "uint8: divide by 255"),
        (torch.full((2, 40, 36, 3), math.nan), "NaN"),
        (torch.full((2, 40, 36, 3), 255.0), "0..1, got values in 255..255"),
        (torch.full((2, 40, 36, 3), -0.1), "0..1, got values in -0.1"),
    ],
)
def test_what_is_no_pair_of_videos_is_refused(metric, other, message):
    with pytest.raises(ValueError, match=message):
        metric(video(), other)


@pytest.mark.parametrize(("metric", "side"), [(ssim, 11), (st_lpips, 24)])
def test_frames_that_are_too_small_are_refused(metric, side):
    small = torch.zeros(1, side - 1, 64, 3)
    with pytest.raises(ValueError, match=f"at least {side}x{side} pixels, got {side - 1}x64"):
        metric(small, small)
    metric(torch.zeros(1, side, side, 3), torch.zeros(1, side, side, 3))


def test_flicker_counts_change_and_not_a_standing_error():
    a = video() * 0.5
    offset = torch.full_like(a[:1], 0.1)
    assert flicker(a, a + offset) == pytest.approx(0.0, abs=1e-5)
    blinking = a.clone()
    blinking[1::2] += 0.1
    assert flicker(a, blinking) == pytest.approx(25.5, rel=1e-5)


def test_flicker_needs_two_frames():
    with pytest.raises(ValueError, match="at least two frames"):
        flicker(video()[:1], video()[:1])
