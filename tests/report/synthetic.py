"""A results folder as `compare` writes one, made of numbers instead of generations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import av
import numpy as np

PROMPTS = (
    "a red circle drifts to the right over a blue ground",
    "a green square turns slowly, seen from above",
)
METHODS = ("instagen", "svg2", "block-topk", "radial")
DENSITIES = (0.15, 0.3)
FRAMES, STEPS, LAYERS, SIDE = 9, 10, 6, 96
DENSE_STEPS = 3

# A prompt that tries to break out of every place it is put in.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} \u2028 & \"'"


def write_results(folder: Path) -> Path:
    """Write results.json, videos, records and plans into a folder; return the results.json."""
    for name in ("videos", "records"):
        (folder / name).mkdir(parents=True)
    runs = [
        _write_run(folder, prompt, method, density)
        for prompt in range(len(PROMPTS))
        for method, density in _variants()
    ]
    document = {
        "environment": {
            "gossamer": "0.1.0",
            "torch": "2.13.0+cpu",
            "diffusers": "0.42.0",
            "python": "3.11.7",
            "platform": "Linux-6.1-x86_64",
            "cpu": "Example CPU @ 2.60GHz",
            "threads": 2,
            "device": "cpu",
            "commit": None,
            "date": "2026-11-30T04:00:00+00:00",
        },
        "settings": {
            "model": "tiny-wan",
            "height": SIDE,
            "width": SIDE,
            "num_frames": FRAMES,
            "steps": STEPS,
            "guidance_scale": 3.5,
        },
        "recipes": {method: _recipe(method) for method in ("dense", *METHODS)},
        "plans": "plans.json",
        "runs": runs,
    }
    masks = [
        _mask(method, layer, head) for method in METHODS for layer in (0, 3) for head in (0, 1)
    ]
    (folder / "plans.json").write_text(json.dumps({"masks": masks}), encoding="utf-8")
    path = folder / "results.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _variants() -> list[tuple[str, float]]:
    return [("dense", 1.0), *((method, density) for density in DENSITIES for method in METHODS)]


def _write_run(folder: Path, prompt: int, method: str, asked: float) -> dict[str, Any]:
    rank = METHODS.index(method) if method != "dense" else -1
    name = f"p{prompt}-{method}-{asked:g}"
    _write_video(folder / f"videos/{name}.mp4", prompt, error=0 if rank < 0 else rank + 1)
    records = _records(method, asked)
    (folder / f"records/{name}.json").write_text(json.dumps(records), encoding="utf-8")
    attention = 8000 if rank < 0 else 8000 * (0.3 + asked + 0.06 * rank) + 200 * prompt
    plan = 0 if rank < 0 else attention * (0.02 + 0.03 * rank)
    return {
        "prompt": PROMPTS[prompt],
        "seed": 0,
        "method": method,
        "density_asked": asked,
        "density": sum(record["density"] for record in records) / len(records),
        "psnr_db": None if rank < 0 else 29.5 - 2.2 * rank + 12 * asked + 0.8 * prompt,
        "ssim": None if rank < 0 else 0.95 - 0.03 * rank + 0.1 * asked - 0.01 * prompt,
        "st_lpips": None if rank < 0 or method == "radial" else 0.05 + 0.02 * rank - 0.08 * asked,
        "attention_ms": attention,
        "plan_ms": plan,
        "plan_share": plan / attention,
        "total_ms": attention + 9500,
        "dense_steps": STEPS if rank < 0 else DENSE_STEPS,
        "kernel": "cpu",
        "reasons": {"dense step": DENSE_STEPS * LAYERS, "dense layer": STEPS - DENSE_STEPS},
        "recipe": method,
        "video": f"videos/{name}.mp4",
        "records": f"records/{name}.json",
    }


def _records(method: str, asked: float) -> list[dict[str, Any]]:
    """Return the calls of a run: errors are measured at two steps, as compare does."""
    records: list[dict[str, Any]] = []
    for step in range(STEPS):
        for layer in range(LAYERS):
            dense = method == "dense" or step < DENSE_STEPS or layer == 0
            measured = not dense and step in (STEPS // 2, STEPS - 1)
            records.append(
                {
                    "layer": layer,
                    "step": step,
                    "branch": "cond",
                    "path": "dense" if dense else "sparse",
                    "density": 1.0 if dense else asked + 0.02 * math.sin(layer + step),
                    "plan_ms": 0.0 if dense else 1.0,
                    "attention_ms": 10.0,
                    "rel_l2": 0.05 + 0.03 * layer / (10 * asked) if measured else None,
                }
            )
    return records


def _write_video(path: Path, prompt: int, error: int) -> None:
    """Write a circle or a square that moves over a gradient; an error shifts and stains it."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for index in range(FRAMES):
            image = np.empty((SIDE, SIDE, 3), np.uint8)
            image[..., 0] = 40 + 20 * prompt
            image[..., 1] = 60 + rows // 2
            image[..., 2] = 110 + columns
            x, y = 20 + 6 * index + 2 * error, SIDE // 2 + error
            if prompt == 0:
                shape = (rows - y) ** 2 + (columns - x) ** 2 < 18**2
            else:
                shape = np.maximum(abs(rows - y), abs(columns - x)) < 15
            image[shape] = ((226, 60, 48), (52, 178, 96))[prompt]
            image[8 : 8 + 5 * error, 8 : 8 + 10 * error] = (240, 210, 60)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _mask(method: str, layer: int, head: int) -> dict[str, Any]:
    side = 32
    rows, columns = np.mgrid[0:side, 0:side]
    near = abs(rows - columns)
    noise = np.random.default_rng([METHODS.index(method), layer, head]).random((side, side))
    cells = {
        "instagen": np.where(near < 2, 1.0, (noise < 0.2) * 0.4),
        "svg2": ((rows // 6 + columns // 6 * (2 + head)) % 4 == 0) * 1.0,
        "block-topk": (noise[rows // 4, columns // 4] < 0.2) * 1.0,
        "radial": 1.0 * (near < 3) + 0.5 * ((near >= 3) & (near % 4 == 0)),
    }[method]
    return {
        "method": method,
        "layer": layer,
        "head": head,
        "step": STEPS // 2,
        "rows": side,
        "cols": side,
        "density": round(float(cells.mean()), 4),
        "mask": cells.round(3).tolist(),
    }


def _recipe(method: str) -> str:
    if method == "dense":
        return '[method]\nname = "dense"\n'
    return (
        f'dense_steps = {DENSE_STEPS}\ndense_layers = 1\nkernel = "auto"\n\n'
        f'[method]\nname = "{method}"\ndensity = 0.15\n'
    )
