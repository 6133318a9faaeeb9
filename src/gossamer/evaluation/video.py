"""Videos as files: mp4 that every browser plays and its like, and back to frames."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.errors import MissingExtraError
from gossamer.evaluation.files import atomic_path, check_file
from gossamer.evaluation.metrics import Video

# Visually lossless for H.264: the files are looked at beside each other, so artefacts of the codec
# must not be mistaken for those of a method.
CRF = "14"
FORMATS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska"}
"""Containers that hold the same H.264 stream, by the suffix of the file."""
# ITU-T H.273 code points: BT.709 primaries, transfer and matrix, and "limited" range. Untagged
# files get BT.601 from some players and BT.709 from others.
_BT709 = 1
_LIMITED_RANGE = 1


def require_av() -> ModuleType:
    """Import PyAV, which ships no complete types.

    Raises:
        MissingExtraError: The package `av` is not installed.
    """
    if importlib.util.find_spec("av") is None:
        raise MissingExtraError("eval", "av")
    return importlib.import_module("av")


def write_video(path: Path, frames: Video, *, fps: int = 16) -> None:
    """Write `frames` as H.264 (yuv420p, BT.709, index first), atomically.

    yuv420p has no odd sizes: an odd side gets its last row or column twice.

    Args:
        path: The file, its container by its suffix, one of `FORMATS`; folders above it are made.
        frames: [frames, height, width, 3] floats in 0…1; values outside are clipped.
        fps: Frames per second.

    Raises:
        ValueError: `frames` is not a video, or has NaN, or the suffix is none of `FORMATS`.
        OSError: The file cannot be written (a full disk, a folder without permission).
        MissingExtraError: The package `av` is not installed.
    """
    av = require_av()
    check_file(path, FORMATS)
    container_format = FORMATS[path.suffix.lower()]
    # Index first, where the container has one that could stand last.
    options = {} if container_format == "matroska" else {"movflags": "+faststart"}
    pixels = _to_bytes(frames)
    _, height, width, _ = pixels.shape
    pixels = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with (
        atomic_path(path) as scratch,
        av.open(str(scratch), "w", format=container_format, options=options) as container,
    ):
        stream = container.add_stream("libx264", rate=fps, options={"crf": CRF})
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        codec = stream.codec_context
        codec.color_primaries = codec.color_trc = codec.colorspace = _BT709
        codec.color_range = _LIMITED_RANGE
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame = frame.reformat(
                format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_video(path: Path) -> NDArray[np.uint8]:
    """Read every frame of a video file.

    Args:
        path: Any file that FFmpeg reads.

    Returns:
        [frames, height, width, 3] uint8 RGB.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no video.
        MissingExtraError: The package `av` is not installed.
    """
    av = require_av()
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream")
        images = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    if not images:
        raise ValueError(f"{path} has no frames")
    return np.stack(images)


def _to_bytes(frames: Video) -> NDArray[np.uint8]:
    """Return float frames in 0…1 as uint8, rounded to the nearest level."""
    tensor = torch.as_tensor(frames)
    if tensor.dim() != 4 or tensor.shape[-1] != 3 or tensor.numel() == 0:
        raise ValueError(f"a video is [frames, height, width, 3], got {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"a video is floats in 0..1, got {tensor.dtype}: divide by 255")
    if not tensor.isfinite().all():
        raise ValueError("the video has NaN or infinite pixels: the generation went wrong")
    return tensor.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).cpu().numpy()
