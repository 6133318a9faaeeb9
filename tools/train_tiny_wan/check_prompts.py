"""Generate the held-out prompts and measure whether colour, motion and shape came out as asked.

    python tools/train_tiny_wan/check_prompts.py [--device cuda] [--limit 4]

A pixel belongs to the shape if its chroma (largest minus smallest channel) exceeds 0.4; backgrounds
stay below 0.3 in the training data. Colour is the nearest hue of most such pixels; motion is the
direction in which their centroid drifts; shape is the template that overlaps them best.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from captions import COLOURS, MOTIONS, SHAPES, Scene, all_scenes
from diffusers import WanPipeline
from PIL import Image

from data import RGB, STEPS, Bank, Composer, signed_distance

MODEL = Path(__file__).resolve().parents[2] / "src" / "gossamer" / "models" / "tiny_wan"
RESULT = Path(__file__).with_name("check_prompts.json")
CHROMA = 0.4
FEWEST_PIXELS = 100  # in a frame; the smallest star has about 700


def hue(rgb: np.ndarray) -> np.ndarray:
    """Return the hue angle of colours ``[..., 3]`` in radians."""
    red, green, blue = np.moveaxis(rgb, -1, 0)
    return np.arctan2(math.sqrt(3) * (green - blue), 2 * red - green - blue)


def find_shape(video: np.ndarray) -> np.ndarray:
    """Return which pixels of ``[T, H, W, 3]`` in [0, 1] are saturated: ``[T, H, W]``, bool."""
    return video.max(-1) - video.min(-1) > CHROMA


def measure_colour(video: np.ndarray, mask: np.ndarray) -> str | None:
    """Name the colour whose hue is nearest for most masked pixels; None without such pixels."""
    if mask.sum() < FEWEST_PIXELS:
        return None
    targets = hue(np.asarray([RGB[name] for name in COLOURS]))
    gap = np.abs(np.angle(np.exp(1j * (hue(video[mask])[:, None] - targets))))
    return COLOURS[np.bincount(gap.argmin(1), minlength=len(COLOURS)).argmax()]


def measure_motion(mask: np.ndarray) -> tuple[str | None, list[float]]:
    """Name the direction of the masked pixels' centroid and return its drift in pixels a frame.

    Args:
        mask: ``[T, H, W]``, bool.

    Returns:
        A word of ``captions.MOTIONS``, or None if fewer than half the frames show a shape; and the
        drift downwards and to the right.
    """
    seen = [t for t in range(len(mask)) if mask[t].sum() >= FEWEST_PIXELS]
    if len(seen) < len(mask) / 2:
        return None, [0.0, 0.0]
    centroids = np.asarray([np.argwhere(mask[t]).mean(0) for t in seen])
    drift = np.polyfit(seen, centroids, 1)[0]
    scores = [float(np.dot(drift, STEPS[name])) for name in MOTIONS]
    return MOTIONS[int(np.argmax(scores))], [round(float(d), 2) for d in drift]


def measure_shape(mask: np.ndarray) -> str | None:
    """Name the shape whose template overlaps the middle frame's mask best; None without pixels."""
    frame = mask[len(mask) // 2]
    if frame.sum() < FEWEST_PIXELS:
        return None
    rows, columns = np.nonzero(frame)
    top, bottom = np.percentile(rows, [1, 99])
    left, right = np.percentile(columns, [1, 99])
    extent = max(bottom - top, right - left) / 2
    grid = [
        (shape, row, column, extent * scale)
        for shape in range(len(SHAPES))
        for row in np.linspace(-0.3, 0.3, 7) * extent + (top + bottom) / 2
        for column in np.linspace(-0.1, 0.1, 3) * extent + (left + right) / 2
        for scale in (0.9, 1.0, 1.1, 1.2)
    ]
    table = torch.tensor(grid, dtype=torch.float32)
    margin = 0.6 * extent
    y = torch.arange(max(int(top - margin), 0), min(int(bottom + margin), frame.shape[0]))
    x = torch.arange(max(int(left - margin), 0), min(int(right + margin), frame.shape[1]))
    target = torch.from_numpy(frame)[y][:, x]
    size = (len(grid), 1, len(y), len(x))
    dy = (y - table[:, 1, None])[:, None, :, None].expand(size)
    dx = (x - table[:, 2, None])[:, None, None, :].expand(size)
    template = signed_distance(dy, dx, table[:, 3], table[:, 0].long())[:, 0] < 0  # [N, h, w]
    overlap = (template & target).sum((1, 2)) / (template | target).sum((1, 2)).clamp(min=1)
    return SHAPES[grid[int(overlap.argmax())][0]]


def measure(video: np.ndarray) -> dict[str, Any]:
    """Measure one video ``[T, H, W, 3]`` in [0, 1]."""
    mask = find_shape(video)
    motion, drift = measure_motion(mask)
    return {
        "colour": measure_colour(video, mask),
        "motion": motion,
        "shape": measure_shape(mask),
        "drift": drift,
    }


def generate(
    pipeline: WanPipeline, prompts: list[str], defaults: dict[str, Any], first_seed: int
) -> np.ndarray:
    """Generate one video a prompt at the default size, each from a seed of its own.

    Returns:
        ``[B, T, H, W, 3]``, float32, in [0, 1].
    """
    call = {key: value for key, value in defaults.items() if key != "fps"}
    generators = [torch.Generator("cpu").manual_seed(first_seed + i) for i in range(len(prompts))]
    return np.asarray(pipeline(prompts, generator=generators, **call).frames)


def truth(bank: Path, count: int, video: tuple[int, int, int]) -> tuple[np.ndarray, list[Scene]]:
    """Render held-out scenes, to tell how well the measurements themselves work."""
    composer = Composer(Bank.load(bank, torch.device("cpu")), 11, held_out=True)
    scenes = composer.draw(count)
    clips = [composer.render([scene], video)[0] for scene in scenes]
    return np.stack([((c + 1) / 2).permute(1, 2, 3, 0).numpy() for c in clips]), scenes


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of rows in which each slot was measured as asked."""
    slots = ("colour", "motion", "shape")
    return {s: sum(r["asked"][s] == r["found"][s] for r in rows) / len(rows) for s in slots}


def contact_sheet(videos: np.ndarray, path: Path, columns: int = 6) -> None:
    """Save frames spread over each video ``[B, T, H, W, 3]``, one video a row."""
    picks = np.linspace(0, videos.shape[1] - 1, columns).round().astype(int)
    rows = [np.concatenate(list(video[picks]), axis=1) for video in videos]
    sheet = (np.concatenate(rows).clip(0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(sheet).save(path)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print asked and found, a cross beside each miss."""
    width = max(len(row["prompt"]) for row in rows)
    for row in rows:
        cells = []
        for slot in ("colour", "motion", "shape"):
            hit = row["asked"][slot] == row["found"][slot]
            cells.append(f"{row['found'][slot] or 'none':9}{' ' if hit else 'x'}")
        print(f"{row['prompt']:{width}} | {' '.join(cells)} | {row['found']['drift']}")


def options_from_command_line() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=None, help="only the first prompts")
    parser.add_argument("--batch", type=int, default=None, help="1 on a CPU, else 8")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt")
    parser.add_argument("--out", type=Path, default=None, help=f"JSON; by default {RESULT.name}")
    parser.add_argument("--picture", type=Path, default=None, help="contact sheet, PNG")
    parser.add_argument("--truth", type=Path, default=None, help="bank: measure rendered clips")
    return parser.parse_args()


def main() -> None:
    """Generate or render, measure, report."""
    options = options_from_command_line()
    facts = json.loads((options.model / "prompts.json").read_text())
    defaults = facts["defaults"]
    started = time.monotonic()
    if options.truth is not None:
        size = (defaults["num_frames"], defaults["height"], defaults["width"])
        videos, scenes = truth(options.truth, options.limit or 64, size)
        asked = [scene.words() for scene in scenes]
        prompts = [" ".join(words.values()) for words in asked]
    else:
        prompts = facts["held_out"][: options.limit]
        asked = facts["held_out_slots"][: options.limit]
        pipeline = WanPipeline.from_pretrained(options.model)
        pipeline.to(options.device).set_progress_bar_config(disable=True)
        batch = options.batch or (1 if options.device == "cpu" else 8)
        videos = np.concatenate([
            generate(pipeline, prompts[i : i + batch], defaults, options.seed + i)
            for i in range(0, len(prompts), batch)
        ])  # fmt: skip
    seconds = time.monotonic() - started
    rows = [
        {"prompt": prompt, "asked": words, "found": measure(video)}
        for prompt, words, video in zip(prompts, asked, videos, strict=True)
    ]
    print_table(rows)
    summary = summarise(rows)
    print({slot: f"{share:.0%}" for slot, share in summary.items()}, f"{seconds:.0f} s")
    if options.picture is not None:
        contact_sheet(videos, options.picture)
    complete = options.truth is None and options.limit is None
    if options.out is not None or complete:
        report = {
            "summary": summary,
            "prompts": len(rows),
            "held_out_scenes": len(all_scenes(held_out=True)),
            "defaults": defaults,
            "first_seed": options.seed,
            "seconds": round(seconds, 1),
            "device": _device_name(options.device),
            "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
            "rows": rows,
        }
        (options.out or RESULT).write_text(json.dumps(report, indent=2) + "\n")


def _device_name(device: str) -> str:
    return platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main()
