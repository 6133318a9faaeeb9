"""How far one video is from another: PSNR, SSIM, ST-LPIPS and flicker.

Every metric takes two videos [frames, height, width, 3] of floats in 0…1 and compares the float
frames as they left the decoder: a codec's loss is not the method's.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gossamer.evaluation.stlpips import load_stlpips

Video: TypeAlias = Tensor | NDArray[np.floating]
"""A video [frames, height, width, 3] of floats in 0…1."""

# Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity".
SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
SSIM_C1 = 0.01**2
SSIM_C2 = 0.03**2

# The smallest side that AlexNet's three poolings leave something of.
STLPIPS_MIN_SIDE = 24
# Frames per forward pass: bounds the activations at 480x832 to about 200 MB.
STLPIPS_BATCH = 8


def psnr(a: Video, b: Video) -> float:
    """Compute the peak signal-to-noise ratio of `b` against `a` in dB.

    The error is averaged over the whole video before the logarithm, so one bad frame counts by its
    energy: 10·log10(1 / MSE) with a data range of 1.

    Args:
        a: [frames, height, width, 3] floats in 0…1.
        b: The same shape.

    Returns:
        Decibels; infinity for identical videos.

    Raises:
        ValueError: The shapes differ or are not videos, or a value is not finite.
    """
    first, second = _pair(a, b)
    mse = (first - second).square().mean().item()
    return math.inf if mse == 0.0 else -10.0 * math.log10(mse)


def ssim(a: Video, b: Video) -> float:
    """Compute the structural similarity of two videos (Wang et al. 2004).

    Gaussian window of 11 with sigma 1.5, K1 = .01, K2 = .03, data range 1, only windows that lie
    wholly inside the frame, mean over frames and channels.

    Args:
        a: [frames, height, width, 3] floats in 0…1, each side at least 11.
        b: The same shape.

    Returns:
        At most 1, and 1 for identical videos.

    Raises:
        ValueError: The shapes differ, are not videos or are too small, or a value is not finite.
    """
    first, second = _pair(a, b)
    if min(first.shape[1:3]) < SSIM_WINDOW:
        raise ValueError(
            f"ssim needs frames of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, "
            f"got {first.shape[1]}x{first.shape[2]}"
        )
    scores = [_ssim_frame(x, y) for x, y in zip(first, second, strict=True)]
    return math.fsum(scores) / len(scores)


def st_lpips(a: Video, b: Video) -> float:
    """Compute the shift-tolerant perceptual distance of two videos (Ghildyal & Liu 2022).

    AlexNet trunk, shift-tolerant variant, mean over frames. Not comparable with plain LPIPS.

    Args:
        a: [frames, height, width, 3] floats in 0…1, each side at least 24.
        b: The same shape.

    Returns:
        0 for identical videos; larger is further apart.

    Raises:
        ValueError: The shapes differ, are not videos or are too small, or a value is not finite.
        MissingExtraError: The package `stlpips-pytorch` is not installed.
    """
    first, second = _pair(a, b)
    if min(first.shape[1:3]) < STLPIPS_MIN_SIDE:
        raise ValueError(
            f"st_lpips needs frames of at least {STLPIPS_MIN_SIDE}x{STLPIPS_MIN_SIDE} pixels, "
            f"got {first.shape[1]}x{first.shape[2]}"
        )
    network = load_stlpips()
    if torch.equal(first, second):
        return 0.0  # exactly: the network's sums depend on where its memory lies
    scores: list[float] = []
    pairs = zip(first.split(STLPIPS_BATCH), second.split(STLPIPS_BATCH), strict=True)
    with torch.inference_mode():
        for x, y in pairs:
            # [frames, H, W, 3] -> [frames, 3, H, W]
            distance = network(x.movedim(-1, 1).float(), y.movedim(-1, 1).float(), normalize=True)
            scores.extend(distance.flatten().tolist())
    return math.fsum(scores) / len(scores)


def flicker(a: Video, b: Video) -> float:
    """Compute how much `b` flickers that `a` does not: the mean change of their difference.

    With d_t = b_t - a_t, the mean over pixels and successive frames of |d_{t+1} - d_t|, in levels
    of 255. An error that stands still does not count, one that comes and goes does.

    Args:
        a: [frames, height, width, 3] floats in 0…1, at least two frames.
        b: The same shape.

    Returns:
        0 for identical videos; larger flickers more.

    Raises:
        ValueError: The shapes differ, are not videos or have one frame, or a value is not finite.
    """
    first, second = _pair(a, b)
    if first.shape[0] < 2:
        raise ValueError("flicker needs at least two frames, got one")
    difference = second - first
    return 255.0 * (difference[1:] - difference[:-1]).abs().mean().item()


def _pair(a: Video, b: Video) -> tuple[Tensor, Tensor]:
    """Return both videos as float64 on the CPU, or refuse them."""
    first, second = _as_video(a), _as_video(b)
    if first.shape != second.shape:
        raise ValueError(
            f"the videos differ in shape: {tuple(first.shape)} and {tuple(second.shape)}"
        )
    return first, second


def _as_video(video: Video) -> Tensor:
    """Return `video` as float64 on the CPU, or say what is wrong with it."""
    tensor = torch.as_tensor(video)
    if tensor.dim() != 4 or tensor.shape[-1] != 3 or tensor.numel() == 0:
        raise ValueError(f"a video is [frames, height, width, 3], got {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"a video is floats in 0..1, got {tensor.dtype}: divide by 255")
    if not tensor.isfinite().all():
        raise ValueError("the video has NaN or infinite pixels: the generation went wrong")
    low, high = tensor.min().item(), tensor.max().item()
    if low < 0.0 or high > 1.0:
        raise ValueError(f"a video is floats in 0..1, got values in {low:.3g}..{high:.3g}")
    return tensor.detach().to("cpu", torch.float64)


def _ssim_frame(x: Tensor, y: Tensor) -> float:
    """Compute the SSIM of two frames [H, W, 3], mean over pixels and channels."""
    x, y = x.movedim(-1, 0)[:, None], y.movedim(-1, 0)[:, None]  # [3, 1, H, W]
    offsets = torch.arange(SSIM_WINDOW, dtype=x.dtype) - SSIM_WINDOW // 2
    weights = torch.exp(-offsets.square() / (2 * SSIM_SIGMA**2))
    weights = weights / weights.sum()

    def blur(image: Tensor) -> Tensor:
        # The Gaussian is separable: columns, then rows.
        image = functional.conv2d(image, weights[None, None, :, None])
        return functional.conv2d(image, weights[None, None, None, :])

    mean_x, mean_y = blur(x), blur(y)
    var_x = blur(x * x) - mean_x * mean_x
    var_y = blur(y * y) - mean_y * mean_y
    covariance = blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x**2 + mean_y**2 + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (var_x + var_y + SSIM_C2)
    return (luminance * structure).mean().item()
